"""Accuracy and loss of a model on a set of labelled images, and of clients' models on their own
tests, on the device."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from fedjax_het.core.client_loop import Examples
from fedjax_het.core.execution_plan import PER_BLOCK, ExecutionPlan
from fedjax_het.core.memory import memory_limit_bytes
from fedjax_het.core.task import Task
from fedjax_het.data import Partition
from fedjax_het.metrics.registry import Metric, finish_metric, sum_metrics
from fedjax_het.utils.arrays import AnyArray, take_row

CPU_BATCH_SIZE = 250  # images at a time, of a CPU whose caches they have to fit
# An accelerator waits for the host between batches: it takes as many as a share of its memory
# holds, by what networks keep of a pixel at a time (128 channels, four times over).
MAX_BATCH_SIZE, MEMORY_FRACTION, BYTES_PER_PIXEL = 5000, 1 / 8, 4 * 4 * 128
DEFAULT_MEMORY_BYTES = 2**35  # of a device that does not say how much it has


class EvaluationSet(NamedTuple):
    """Labelled images cut into batches, in blocks as the plan's; padding has label -1."""

    images: AnyArray  # [D, batches, B, H, W, C]
    labels: AnyArray  # [D, batches, B]
    domains: AnyArray | None  # [D, batches, B]; None for a set without domains


class Evaluation(NamedTuple):
    """What was measured of a model; float32, NaN where a logit is not finite."""

    accuracy: jax.Array  # []
    loss: jax.Array  # [] mean cross-entropy in nats
    domain_accuracy: jax.Array | None  # [G] of each domain's images; None without domains
    metrics: dict[str, jax.Array]  # what `measures` find, by name

    @classmethod
    def missing(
        cls, num_domains: int, metric_shapes: Mapping[str, tuple[int, ...]]
    ) -> "Evaluation":
        """NaN everywhere: nothing was measured. shapes: of what `measures` find."""
        nan = jnp.float32(jnp.nan)
        metrics = {name: jnp.full(shape, nan) for name, shape in metric_shapes.items()}
        return cls(nan, nan, jnp.full(num_domains, nan) if num_domains else None, metrics)


class ClientEvaluation(NamedTuple):
    """What was measured of clients' models on their own tests."""

    accuracy: jax.Array  # [K] float32; NaN without a test, and where a logit is not finite
    is_finite: jax.Array  # [] bool: whether all logits are finite


def correct(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """[...] float32: 1 where the largest of `logits` [..., C] is the label's, else 0; NaN where one
    of them is not finite, so that no mean hides it. The largest of NaN would be class 0."""
    is_correct = (logits.argmax(-1) == labels).astype(jnp.float32)
    return jnp.where(jnp.isfinite(logits).all(-1), is_correct, jnp.nan)


def compute_test_batches(plan: ExecutionPlan, images: np.ndarray) -> tuple[int, int]:
    """(size, number) of the batches of each block that hold so many images `[N, H, W, C]`.

    They depend on the kind of device and on its memory: of an accelerator's, sums of losses are
    those of a CPU to rounding, and the numbers of images the same.
    """
    images_per_block = -(-len(images) // plan.blocks)
    max_batch_size = CPU_BATCH_SIZE
    if plan.platform != "cpu":
        memory_bytes = memory_limit_bytes(plan.devices) or DEFAULT_MEMORY_BYTES
        fitting_batch_size = int(
            MEMORY_FRACTION
            * memory_bytes
            / (plan.num_parallel * BYTES_PER_PIXEL * np.prod(images.shape[1:3]))
        )
        max_batch_size = max(CPU_BATCH_SIZE, min(MAX_BATCH_SIZE, fitting_batch_size))
        max_batch_size = -(
            -images_per_block // -(-images_per_block // max_batch_size)
        )  # all of them alike
    batch_size = min(max_batch_size, images_per_block)
    return batch_size, -(-len(images) // (plan.blocks * batch_size))


def place_evaluation_set(
    plan: ExecutionPlan, images: np.ndarray, labels: np.ndarray, domains: np.ndarray | None = None
) -> EvaluationSet:
    """Place a test set on the plan's devices: a block on each, or all blocks on all."""
    num_images, blocks = len(labels), plan.blocks
    batch_size, num_batches = compute_test_batches(plan, images)
    num_padding = blocks * num_batches * batch_size - num_images
    images = np.concatenate([images, np.zeros((num_padding, *images.shape[1:]), images.dtype)])
    labels = np.concatenate([labels, np.full(num_padding, -1, labels.dtype)]).astype(np.int32)
    shape = (blocks, num_batches, batch_size)
    if domains is not None:
        domains = np.concatenate([domains, np.zeros(num_padding, domains.dtype)]).astype(np.int32)
        domains = domains.reshape(shape)
    images = images.reshape(*shape, *images.shape[1:])
    return plan.put(EvaluationSet(images, labels.reshape(shape), domains), PER_BLOCK)


def evaluate(
    task: Task,
    plan: ExecutionPlan,
    variables,
    data: EvaluationSet,
    num_batches: jax.Array | int | None = None,
    *,
    num_domains: int = 0,
    metrics: tuple[Metric, ...] = (),
) -> Evaluation:
    """Accuracy and loss on the first `num_batches` in each block, accuracy per domain, and what
    else is to be measured: `measures` of examples.

    `num_domains` is that of the data set, and static. A domain of which those batches have no image
    gets NaN, and so does what a logit that is not finite is part of.
    """
    assert bool(num_domains) == (data.domains is not None)
    max_batches = data.labels.shape[1]
    num_batches = max_batches if num_batches is None else num_batches

    def evaluate_block(variables, num_batches, data):
        images, labels, domains = data

        def add_batch(i, sums):
            target_labels = take_row(labels, i)
            is_real = target_labels >= 0
            inputs = task.normalize(take_row(images, i))
            logits, _ = task.model.apply(variables, inputs, train=False)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, abs(target_labels))
            is_correct = jnp.where(is_real, correct(logits, target_labels), 0)
            base_sums = jnp.stack(
                [
                    is_correct.sum(),
                    jnp.where(is_real, losses, 0).sum(),
                    is_real.sum(dtype=jnp.float32),
                ]
            )
            if domains is None and not metrics:
                return sums + base_sums
            sums_of_batch = [base_sums]
            if domains is not None:
                is_in_domain = take_row(domains, i)[:, None] == jnp.arange(num_domains)
                sums_of_batch += [
                    jnp.where(is_in_domain, values[:, None], 0).sum(0)
                    for values in (is_correct, is_real)
                ]
            if metrics:
                sums_of_batch.append(ravel_pytree(_sum_metrics(metrics, logits, target_labels))[0])
            return sums + jnp.concatenate(sums_of_batch)

        return jax.lax.fori_loop(0, num_batches, add_batch, jnp.zeros(num_counts + num_metric_sums))

    num_counts = 3 + 2 * num_domains
    num_metric_sums, unravel_metric_sums = _make_unraveler(metrics, task.model.num_classes)
    sums = plan.sum_over_blocks(evaluate_block, (variables, num_batches), data)
    num_correct_by_domain, num_images_by_domain = (
        sums[3 : 3 + num_domains],
        sums[3 + num_domains : num_counts],
    )
    domain_accuracy = num_correct_by_domain / num_images_by_domain if num_domains else None
    metric_values: dict[str, jax.Array] = {}
    if metrics:
        for metric, metric_sums in zip(
            metrics, unravel_metric_sums(sums[num_counts:]), strict=True
        ):
            metric_values |= finish_metric(metric, metric_sums)
    return Evaluation(sums[0] / sums[2], sums[1] / sums[2], domain_accuracy, metric_values)


def _sum_metrics(metrics: tuple[Metric, ...], logits: jax.Array, labels: jax.Array) -> Any:
    mask = (labels >= 0).astype(jnp.float32)
    return sum_metrics(metrics, logits.astype(jnp.float32), jnp.maximum(labels, 0), mask)


def _make_unraveler(
    metrics: tuple[Metric, ...], num_classes: int
) -> tuple[int, Callable[[jax.Array], Any]]:
    """(how many sums `measures` keep, what makes of them as one row those of each measure)."""
    if not metrics:
        return 0, lambda row: ()
    shapes = jax.eval_shape(
        functools.partial(_sum_metrics, metrics),
        jax.ShapeDtypeStruct((2, num_classes), jnp.float32),
        jax.ShapeDtypeStruct((2,), jnp.int32),
    )
    flat_sums, unravel = ravel_pytree(jax.tree.map(lambda a: np.zeros(a.shape, np.float32), shapes))
    return flat_sums.size, unravel


class ClientTests(NamedTuple):
    """The tests of all clients: G groups of V clients in each of D blocks, M batches each."""

    clients: np.ndarray  # [D, G, V] int32; num_clients where there is none
    indices: np.ndarray  # [D, G, V, M, B] int32 positions in the test split; -1 is padding


class ClientTestsShape(NamedTuple):
    """Static sizes that hold for the tests of one federation, or of several."""

    num_groups: int  # clients of a lane, one after the other
    num_batches: int
    batch_size: int


def compute_client_tests_shape(plan: ExecutionPlan, tests: Partition) -> ClientTestsShape:
    """What `client_tests` needs for these."""
    num_tested, max_test_size = int((tests.sizes > 0).sum()), int(tests.sizes.max())
    num_batches = -(-max_test_size // CPU_BATCH_SIZE)
    return ClientTestsShape(
        -(-num_tested // (plan.blocks * plan.lanes)), num_batches, -(-max_test_size // num_batches)
    )


def make_client_tests(
    plan: ExecutionPlan, tests: Partition, shape: ClientTestsShape
) -> ClientTests:
    """The positions that `tests` gives the clients, spread over blocks and lanes."""
    num_groups, num_batches, batch_size = shape
    num_slots = num_groups * plan.blocks * plan.lanes
    clients = np.full(num_slots, tests.num_clients, np.int32)
    indices = np.full((num_slots, num_batches * batch_size), -1, np.int32)
    for slot, k in enumerate(np.flatnonzero(tests.sizes).tolist()):
        test_indices = tests.client_indices(k)
        clients[slot], indices[slot, : len(test_indices)] = k, test_indices
    lanes = (num_groups, plan.blocks, plan.lanes)
    indices = indices.reshape(*lanes, num_batches, batch_size)
    return ClientTests(clients.reshape(lanes).swapaxes(0, 1), indices.swapaxes(0, 1))


def evaluate_clients(
    task: Task,
    plan: ExecutionPlan,
    get_model: Callable,
    model_source,
    tests: ClientTests,
    examples: Examples,
    num_clients: int,
    num_groups: jax.Array | int,
) -> ClientEvaluation:
    """The share of its own test that each client's model gets right.

    Args:
      model_of(source, k) -> variables of client k's model.
      examples: of the test split, on every device.
      num_groups: so many clients of every lane, of G.
    Cost: one pass over all tests; a client of each lane at a time.
    """

    def evaluate_client(model_source, examples, client_id, indices):
        variables = get_model(model_source, client_id)

        def add_batch(m, sums):
            positions = take_row(indices, m)
            images = task.normalize(examples.images[positions])
            logits, _ = task.model.apply(variables, images, train=False)
            is_real = positions >= 0
            is_correct = jnp.where(is_real, correct(logits, examples.labels[positions]), 0)
            return sums + jnp.stack([is_correct.sum(), is_real.sum(dtype=jnp.float32)])

        return jax.lax.fori_loop(0, indices.shape[0], add_batch, jnp.zeros(2))

    def evaluate_block(model_source, examples, num_groups, block_tests):
        clients, indices = block_tests

        def evaluate_group(g, sums):
            group_clients = take_row(clients, g)
            counts = evaluate_lanes(model_source, examples, group_clients, take_row(indices, g))
            return sums.at[group_clients].add(counts, mode="drop")

        return jax.lax.fori_loop(0, num_groups, evaluate_group, jnp.zeros((num_clients, 2)))

    def evaluate_single_lane(model_source, examples, clients, indices):
        return evaluate_client(model_source, examples, clients[0], indices[0])[None]

    evaluate_lanes = (
        jax.vmap(evaluate_client, (None, None, 0, 0)) if plan.lanes > 1 else evaluate_single_lane
    )
    replicated_args = (model_source, examples, num_groups)
    sums = plan.sum_over_blocks(evaluate_block, replicated_args, (tests.clients, tests.indices))
    accuracy = jnp.where(sums[:, 1] > 0, sums[:, 0] / jnp.maximum(sums[:, 1], 1), jnp.nan)
    return ClientEvaluation(accuracy, jnp.isfinite(sums).all())
