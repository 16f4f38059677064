"""Accuracy and loss of a model on labeled examples, and of clients' models on their own tests."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedjax_het.core.client_loop import ClientExamples
from fedjax_het.core.execution_plan import PER_BLOCK, ExecutionPlan
from fedjax_het.core.memory import memory_limit_bytes
from fedjax_het.core.task import Task
from fedjax_het.data import Partition
from fedjax_het.metrics.registry import Metric, finish_metric, sum_metrics
from fedjax_het.utils.arrays import AnyArray, take_row
from fedjax_het.utils.input_kinds import count_rows, map_arrays

Tree = Any

CPU_BATCH_SIZE = 250  # examples of a batch that fits the caches of a CPU
# An accelerator waits for the host between batches. A batch therefore fills a fraction of its
# memory. The estimate counts the bytes that networks hold per pixel at a time (128 channels, four
# times).
MAX_BATCH_SIZE, MEMORY_FRACTION, BYTES_PER_PIXEL = 5000, 1 / 8, 4 * 4 * 128
DEFAULT_MEMORY_BYTES = 2**35  # of a device that does not report its memory


class EvaluationSet(NamedTuple):
    """Labeled examples in batches, in the blocks of the plan."""

    inputs: Any
    "Inputs `[D, M, B, ...]`, or `[D, M, B]` int32: positions in examples."
    labels: AnyArray
    "`[D, M, B, ...]`."
    is_real: AnyArray
    "`[D, M, B]` bool: whether an entry is an example; otherwise it is padding."
    domains: AnyArray | None
    "`[D, M, B]` int32; None for a set without domains."


class Evaluation(NamedTuple):
    """Measurements of a model; float32, NaN where an output is not finite."""

    accuracy: jax.Array
    "`[]`: mean score of the task, the accuracy of classification."
    loss: jax.Array
    "`[]`: mean loss of the task, the cross-entropy in nats of classification."
    domain_accuracy: jax.Array | None
    "`[G]`: accuracy on each domain's examples; None without domains."
    metrics: dict[str, jax.Array]
    "Values of the metrics, by name."

    @classmethod
    def missing(
        cls, num_domains: int, metric_shapes: Mapping[str, tuple[int, ...]]
    ) -> "Evaluation":
        """Return the measurements where none was made: NaN everywhere.

        Args:
          num_domains: number of domains, G; 0 without domains.
          metric_shapes: shapes of the metrics' values, by name.

        Returns:
          The measurements.
        """
        nan = jnp.float32(jnp.nan)
        metrics = {name: jnp.full(shape, nan) for name, shape in metric_shapes.items()}
        return cls(nan, nan, jnp.full(num_domains, nan) if num_domains else None, metrics)


class ClientEvaluation(NamedTuple):
    """Measurements of clients' models on their own tests."""

    accuracy: jax.Array
    "`[K]` float32; NaN without a test, and where an output is not finite."
    is_finite: jax.Array
    "`[]` bool: whether all outputs are finite."


def compute_test_batches(plan: ExecutionPlan, inputs: Any) -> tuple[int, int]:
    """Compute the batches of a test set.

    They depend on the kind of device and on its memory. On an accelerator, sums of losses equal a
    CPU's up to rounding, and the numbers of examples are equal.

    Args:
      plan: the devices.
      inputs: inputs `[N, ...]`, or arrays by name.

    Returns:
      Size of a batch, and number of batches of each block.
    """
    num_examples = count_rows(inputs)
    examples_per_block = -(-num_examples // plan.blocks)
    batch_size = CPU_BATCH_SIZE
    if plan.platform != "cpu":
        memory_bytes = memory_limit_bytes(plan.devices) or DEFAULT_MEMORY_BYTES
        arrays = inputs.values() if isinstance(inputs, Mapping) else (inputs,)
        num_pixels = sum(np.prod(array.shape[1:-1]) for array in arrays)  # 1 for features
        bytes_per_example = plan.num_parallel * BYTES_PER_PIXEL * num_pixels
        fitting = int(MEMORY_FRACTION * memory_bytes / bytes_per_example)
        batch_size = max(CPU_BATCH_SIZE, min(MAX_BATCH_SIZE, fitting))
        batch_size = -(-examples_per_block // -(-examples_per_block // batch_size))  # all equal
    batch_size = min(batch_size, examples_per_block)
    return batch_size, -(-num_examples // (plan.blocks * batch_size))


def place_evaluation_set(
    plan: ExecutionPlan, inputs: Any, labels: np.ndarray, domains: np.ndarray | None = None
) -> EvaluationSet:
    """Place a test set on the plan's devices: a block on each, or all blocks on all.

    Args:
      plan: the devices.
      inputs: inputs `[N, ...]`, or arrays by name.
      labels: `[N]`.
      domains: `[N]`, or None.

    Returns:
      The test set.
    """
    batch_size, num_batches = compute_test_batches(plan, inputs)
    evaluation_set = _make_set((plan.blocks, num_batches, batch_size), inputs, labels, domains)
    return plan.put(evaluation_set, PER_BLOCK)


def make_validation_set(
    plan: ExecutionPlan,
    labels: np.ndarray,
    positions: np.ndarray,
    *,
    num_batches: int,
    batch_size: int,
) -> EvaluationSet:
    """Make a set of training examples to evaluate, with their positions in place of inputs.

    Args:
      plan: the devices.
      labels: labels of the training examples.
      positions: positions of the examples in the training set.
      num_batches: batches of each block.
      batch_size: size of a batch. It must not depend on other runs, so that the sums of losses of a
        run do not depend on them.

    Returns:
      The set, arrays on the host.
    """
    shape = (plan.blocks, num_batches, batch_size)
    return _make_set(shape, positions.astype(np.int32), labels[positions])


def _make_set(
    shape: tuple[int, ...],
    inputs: Any,
    labels: np.ndarray,
    domains: np.ndarray | None = None,
) -> EvaluationSet:
    """Return arrays on the host in batches of a shape `(D, M, B)`, filled up with padding."""

    def split(array: np.ndarray) -> np.ndarray:
        rest = np.zeros((np.prod(shape) - len(labels), *array.shape[1:]), array.dtype)
        return np.concatenate([array, rest]).reshape(*shape, *array.shape[1:])

    return EvaluationSet(
        map_arrays(split, inputs),
        split(labels),
        split(np.ones(len(labels), bool)),
        None if domains is None else split(domains).astype(np.int32),
    )


def evaluate(
    task: Task,
    plan: ExecutionPlan,
    variables: Tree,
    data: EvaluationSet,
    num_batches: jax.Array | int | None = None,
    *,
    examples: ClientExamples | None = None,
    num_domains: int = 0,
    metrics: tuple[Metric, ...] = (),
    change_inputs: Callable[[Any], Any] = lambda inputs: inputs,
) -> Evaluation:
    """Measure accuracy and loss, the accuracy of each domain, and metrics of a model.

    Args:
      task: network and normalization.
      plan: the devices.
      variables: variables of the model.
      data: the test set.
      num_batches: batches of each block to evaluate, the first ones; may be traced; default: all.
      examples: the examples of which `data` has positions in place of inputs.
      num_domains: number of domains of the data set, G; static.
      metrics: further metrics of examples.
      change_inputs: `change_inputs(inputs)` of stored inputs, before they are normalized.

    Returns:
      The measurements. A domain without an example in these batches has NaN, and so has every
      measurement with an output that is not finite.
    """
    assert bool(num_domains) == (data.domains is not None)
    # One array, which one collective adds up.
    outputs = jax.ShapeDtypeStruct((2, *task.model.output_shape), jnp.float32)
    labels = jax.ShapeDtypeStruct((2, *data.labels.shape[3:]), data.labels.dtype)
    num_sums, unravel_sums = _make_unraveler(metrics, outputs, labels, num_domains)

    def evaluate_block(variables, num_batches, examples, data):
        inputs, labels, real, domains = data

        def add_batch(i, sums):
            batch_labels, is_real = take_row(labels, i), take_row(real, i)
            batch_inputs = jax.tree.map(lambda array: take_row(array, i), inputs)
            if examples is not None:
                batch_inputs = examples.take_by_owner(batch_inputs)
            normalized = task.normalize(change_inputs(batch_inputs))
            outputs, _ = task.model.apply(variables, normalized, train=False)
            weights = jnp.where(is_real, task.kind.count_targets(batch_labels), 0)
            losses = task.kind.compute_losses(outputs, batch_labels)
            scores = task.kind.compute_scores(outputs, batch_labels)
            losses, scores = (jnp.where(is_real, v * weights, 0) for v in (losses, scores))
            new_sums: Any = {"total": jnp.stack([scores.sum(), losses.sum(), weights.sum()])}
            if domains is not None:
                is_in_domain = take_row(domains, i)[:, None] == jnp.arange(num_domains)
                new_sums["domains"] = [
                    jnp.where(is_in_domain, values[:, None], 0).sum(0)
                    for values in (scores, weights)
                ]
            if metrics:
                new_sums["metrics"] = _sum_metrics(metrics, outputs, batch_labels, is_real)
            return sums + ravel_pytree(new_sums)[0].astype(jnp.float32)

        return jax.lax.fori_loop(0, num_batches, add_batch, jnp.zeros(num_sums, jnp.float32))

    num_batches = data.labels.shape[1] if num_batches is None else num_batches
    arguments = (variables, num_batches, examples)
    sums = unravel_sums(plan.sum_over_blocks(evaluate_block, arguments, data))
    score, loss, weight = sums["total"]
    domain_accuracy = sums["domains"][0] / sums["domains"][1] if num_domains else None
    values: dict[str, jax.Array] = {}
    for metric, metric_sums in zip(metrics, sums.get("metrics", ()), strict=True):
        values |= finish_metric(metric, metric_sums)
    return Evaluation(score / weight, loss / weight, domain_accuracy, values)


def _sum_metrics(
    metrics: tuple[Metric, ...], logits: jax.Array, labels: jax.Array, is_real: jax.Array
) -> Any:
    mask = is_real.astype(jnp.float32)
    return sum_metrics(metrics, logits.astype(jnp.float32), labels, mask)


def _make_unraveler(
    metrics: tuple[Metric, ...], outputs: Any, labels: Any, num_domains: int
) -> tuple[int, Callable[[jax.Array], Any]]:
    """Return the number of sums of an evaluation, and the function that splits their array."""
    shapes: Any = {"total": jax.ShapeDtypeStruct((3,), jnp.float32)}
    if num_domains:
        shapes["domains"] = [jax.ShapeDtypeStruct((num_domains,), jnp.float32)] * 2
    if metrics:
        shapes["metrics"] = jax.eval_shape(
            partial(_sum_metrics, metrics),
            *(outputs, labels),
            jax.ShapeDtypeStruct((2,), bool),
        )
    with jax.ensure_compile_time_eval():
        sums, unravel = ravel_pytree(jax.tree.map(lambda a: np.zeros(a.shape, np.float32), shapes))
    return sums.size, unravel


class ClientTests(NamedTuple):
    """The tests of all clients: G groups of V clients in each of D blocks, M batches each."""

    clients: np.ndarray
    "`[D, G, V]` int32; K where there is none."
    indices: np.ndarray
    "`[D, G, V, M, B]` int32: positions in the test split; -1 is padding."


class ClientTestsShape(NamedTuple):
    """Static sizes that hold for the tests of one federation, or of several."""

    num_groups: int
    "Clients of a lane, one after the other."
    num_batches: int
    batch_size: int


def compute_client_tests_shape(plan: ExecutionPlan, tests: Partition) -> ClientTestsShape:
    """Compute the sizes of the clients' tests.

    Args:
      plan: blocks and lanes.
      tests: test examples of each client.

    Returns:
      The sizes that `make_client_tests` takes.
    """
    num_tested, max_size = int((tests.sizes > 0).sum()), int(tests.sizes.max())
    num_groups = -(-num_tested // (plan.blocks * plan.lanes))
    num_batches = -(-max_size // CPU_BATCH_SIZE)
    return ClientTestsShape(num_groups, num_batches, -(-max_size // num_batches))


def make_client_tests(
    plan: ExecutionPlan, tests: Partition, shape: ClientTestsShape
) -> ClientTests:
    """Spread the clients' tests over blocks and lanes.

    Args:
      plan: blocks and lanes.
      tests: test examples of each client.
      shape: sizes to which they are padded.

    Returns:
      The tests, arrays on the host.
    """
    num_groups, num_batches, batch_size = shape
    num_slots = num_groups * plan.blocks * plan.lanes
    clients = np.full(num_slots, tests.num_clients, np.int32)
    indices = np.full((num_slots, num_batches * batch_size), -1, np.int32)
    for slot, k in enumerate(np.flatnonzero(tests.sizes).tolist()):
        clients[slot], indices[slot, : tests.sizes[k]] = k, tests.client_indices(k)
    lanes = (num_groups, plan.blocks, plan.lanes)
    indices = indices.reshape(*lanes, num_batches, batch_size)
    return ClientTests(clients.reshape(lanes).swapaxes(0, 1), indices.swapaxes(0, 1))


class ClientModelSource(NamedTuple):
    """The models of all clients."""

    get_model: Callable[[Tree, jax.Array], Tree]
    "`get_model(arrays, k)` returns the variables of client k's model."
    arrays: Tree
    "A tree of arrays, whole on every device."


def evaluate_clients(
    task: Task,
    plan: ExecutionPlan,
    models: ClientModelSource,
    tests: ClientTests,
    examples: ClientExamples,
    num_clients: int,
    num_groups: jax.Array | int,
) -> ClientEvaluation:
    """Measure the accuracy of each client's model on its own test.

    Cost: one pass over all tests; a client of each lane at a time.

    Args:
      task: network and normalization.
      plan: devices, blocks and lanes.
      models: the clients' models.
      tests: the tests of all clients.
      examples: the test split, whole on every device.
      num_clients: clients of the federation, K.
      num_groups: clients of every lane to evaluate, at most G; may be traced.

    Returns:
      The measurements.
    """

    def evaluate_client(arrays, examples, client, indices):
        variables = models.get_model(arrays, client)

        def add_batch(m, sums):
            positions = take_row(indices, m)
            normalized = task.normalize(examples.take(positions, client))
            outputs, _ = task.model.apply(variables, normalized, train=False)
            is_real = positions >= 0
            labels = examples.take_labels(positions, client)
            weights = jnp.where(is_real, task.kind.count_targets(labels), 0)
            scores = jnp.where(is_real, task.kind.compute_scores(outputs, labels) * weights, 0)
            return sums + jnp.stack([scores.sum(), weights.sum()])

        return jax.lax.fori_loop(0, indices.shape[0], add_batch, jnp.zeros(2, jnp.float32))

    def evaluate_lanes(arrays, examples, clients, indices):
        if plan.lanes == 1:
            return evaluate_client(arrays, examples, clients[0], indices[0])[None]
        return jax.vmap(evaluate_client, (None, None, 0, 0))(arrays, examples, clients, indices)

    def evaluate_block(arrays, examples, num_groups, block_tests):
        clients, indices = block_tests

        def add_group(g, sums):
            group = take_row(clients, g)
            counts = evaluate_lanes(arrays, examples, group, take_row(indices, g))
            return sums.at[group].add(counts, mode="drop")

        return jax.lax.fori_loop(0, num_groups, add_group, jnp.zeros((num_clients, 2), jnp.float32))

    arguments = (models.arrays, examples, num_groups)
    sums = plan.sum_over_blocks(evaluate_block, arguments, (tests.clients, tests.indices))
    accuracy = jnp.where(sums[:, 1] > 0, sums[:, 0] / jnp.maximum(sums[:, 1], 1), jnp.nan)
    return ClientEvaluation(accuracy, jnp.isfinite(sums).all())
