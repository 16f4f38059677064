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

from fedjax_het.common.arrays import AnyArray, row_of
from fedjax_het.data import Partition
from fedjax_het.engine.lanes import Examples
from fedjax_het.engine.measured import Measure, added, finished
from fedjax_het.engine.memory import whole_bytes
from fedjax_het.engine.plan import BLOCK, Plan
from fedjax_het.engine.task import Task

BATCH = 250  # images at a time, of a CPU whose caches they have to fit
# An accelerator waits for the host between batches: it takes as many as a share of its memory
# holds, by what networks keep of a pixel at a time (128 channels, four times over).
MOST, SHARE, BYTES_A_PIXEL = 5000, 1 / 8, 4 * 4 * 128
UNKNOWN_BYTES = 2**35  # of a device that does not say how much it has


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
    measured: dict[str, jax.Array]  # what `measures` find, by name

    @classmethod
    def missing(cls, num_domains: int, shapes: Mapping[str, tuple[int, ...]]) -> "Evaluation":
        """NaN everywhere: nothing was measured. shapes: of what `measures` find."""
        nan = jnp.float32(jnp.nan)
        measured = {name: jnp.full(shape, nan) for name, shape in shapes.items()}
        return cls(nan, nan, jnp.full(num_domains, nan) if num_domains else None, measured)


class ClientEvaluation(NamedTuple):
    """What was measured of clients' models on their own tests."""

    accuracy: jax.Array  # [K] float32; NaN without a test, and where a logit is not finite
    sound: jax.Array  # [] bool: whether all logits are finite


def right_of(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """[...] float32: 1 where the largest of `logits` [..., C] is the label's, else 0; NaN where one
    of them is not finite, so that no mean hides it. The largest of NaN would be class 0."""
    right = (logits.argmax(-1) == labels).astype(jnp.float32)
    return jnp.where(jnp.isfinite(logits).all(-1), right, jnp.nan)


def test_batches(plan: Plan, images: np.ndarray) -> tuple[int, int]:
    """(size, number) of the batches of each block that hold so many images `[N, H, W, C]`.

    They depend on the kind of device and on its memory: of an accelerator's, sums of losses are
    those of a CPU to rounding, and the numbers of images the same.
    """
    of_block = -(-len(images) // plan.blocks)
    most = BATCH
    if plan.platform != "cpu":
        whole = whole_bytes(plan.devices) or UNKNOWN_BYTES
        fitting = int(SHARE * whole / (plan.width * BYTES_A_PIXEL * np.prod(images.shape[1:3])))
        most = max(BATCH, min(MOST, fitting))
        most = -(-of_block // -(-of_block // most))  # all of them alike
    batch = min(most, of_block)
    return batch, -(-len(images) // (plan.blocks * batch))


def evaluation_set(
    plan: Plan, images: np.ndarray, labels: np.ndarray, domains: np.ndarray | None = None
) -> EvaluationSet:
    """Place a test set on the plan's devices: a block on each, or all blocks on all."""
    count, blocks = len(labels), plan.blocks
    batch, batches = test_batches(plan, images)
    short = blocks * batches * batch - count
    images = np.concatenate([images, np.zeros((short, *images.shape[1:]), images.dtype)])
    labels = np.concatenate([labels, np.full(short, -1, labels.dtype)]).astype(np.int32)
    shape = (blocks, batches, batch)
    if domains is not None:
        domains = np.concatenate([domains, np.zeros(short, domains.dtype)]).astype(np.int32)
        domains = domains.reshape(shape)
    images = images.reshape(*shape, *images.shape[1:])
    return plan.put(EvaluationSet(images, labels.reshape(shape), domains), BLOCK)


def evaluate(
    task: Task,
    plan: Plan,
    variables,
    data: EvaluationSet,
    num_batches: jax.Array | int | None = None,
    *,
    num_domains: int = 0,
    measures: tuple[Measure, ...] = (),
) -> Evaluation:
    """Accuracy and loss on the first `num_batches` in each block, accuracy per domain, and what
    else is to be measured: `measures` of examples.

    `num_domains` is that of the data set, and static. A domain of which those batches have no image
    gets NaN, and so does what a logit that is not finite is part of.
    """
    assert bool(num_domains) == (data.domains is not None)
    total = data.labels.shape[1]
    num_batches = total if num_batches is None else num_batches

    def block(variables, num_batches, data):
        images, labels, domains = data

        def add(i, sums):
            target = row_of(labels, i)
            known = target >= 0
            shown = task.normalise(row_of(images, i))
            logits, _ = task.model.apply(variables, shown, train=False)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, abs(target))
            right = jnp.where(known, right_of(logits, target), 0)
            counts = jnp.stack(
                [
                    right.sum(),
                    jnp.where(known, losses, 0).sum(),
                    known.sum(dtype=jnp.float32),
                ]
            )
            if domains is None and not measures:
                return sums + counts
            parts = [counts]
            if domains is not None:
                member = row_of(domains, i)[:, None] == jnp.arange(num_domains)
                parts += [jnp.where(member, n[:, None], 0).sum(0) for n in (right, known)]
            if measures:
                parts.append(ravel_pytree(_added(measures, logits, target))[0])
            return sums + jnp.concatenate(parts)

        return jax.lax.fori_loop(0, num_batches, add, jnp.zeros(counted + size))

    counted = 3 + 2 * num_domains
    size, split = _unravelled(measures, task.model.num_classes)
    sums = plan.sum_over_blocks(block, (variables, num_batches), data)
    right, members = sums[3 : 3 + num_domains], sums[3 + num_domains : counted]
    domain_accuracy = right / members if num_domains else None
    measured: dict[str, jax.Array] = {}
    if measures:
        for measure, own in zip(measures, split(sums[counted:]), strict=True):
            measured |= finished(measure, own)
    return Evaluation(sums[0] / sums[2], sums[1] / sums[2], domain_accuracy, measured)


def _added(measures: tuple[Measure, ...], logits: jax.Array, target: jax.Array) -> Any:
    known = (target >= 0).astype(jnp.float32)
    return added(measures, logits.astype(jnp.float32), jnp.maximum(target, 0), known)


def _unravelled(
    measures: tuple[Measure, ...], num_classes: int
) -> tuple[int, Callable[[jax.Array], Any]]:
    """(how many sums `measures` keep, what makes of them as one row those of each measure)."""
    if not measures:
        return 0, lambda row: ()
    shapes = jax.eval_shape(
        functools.partial(_added, measures),
        jax.ShapeDtypeStruct((2, num_classes), jnp.float32),
        jax.ShapeDtypeStruct((2,), jnp.int32),
    )
    row, split = ravel_pytree(jax.tree.map(lambda a: np.zeros(a.shape, np.float32), shapes))
    return row.size, split


class ClientTests(NamedTuple):
    """The tests of all clients: G groups of V clients in each of D blocks, M batches each."""

    clients: np.ndarray  # [D, G, V] int32; num_clients where there is none
    indices: np.ndarray  # [D, G, V, M, B] int32 positions in the test split; -1 is padding


class TestsShape(NamedTuple):
    """Static sizes that hold for the tests of one federation, or of several."""

    groups: int  # clients of a lane, one after the other
    batches: int
    batch: int


def tests_shape(plan: Plan, tests: Partition) -> TestsShape:
    """What `client_tests` needs for these."""
    tested, most = int((tests.sizes > 0).sum()), int(tests.sizes.max())
    batches = -(-most // BATCH)
    return TestsShape(-(-tested // (plan.blocks * plan.lanes)), batches, -(-most // batches))


def client_tests(plan: Plan, tests: Partition, shape: TestsShape) -> ClientTests:
    """The positions that `tests` gives the clients, spread over blocks and lanes."""
    groups, batches, batch = shape
    places = groups * plan.blocks * plan.lanes
    clients = np.full(places, tests.num_clients, np.int32)
    indices = np.full((places, batches * batch), -1, np.int32)
    for place, k in enumerate(np.flatnonzero(tests.sizes).tolist()):
        held = tests.client(k)
        clients[place], indices[place, : len(held)] = k, held
    lanes = (groups, plan.blocks, plan.lanes)
    indices = indices.reshape(*lanes, batches, batch)
    return ClientTests(clients.reshape(lanes).swapaxes(0, 1), indices.swapaxes(0, 1))


def evaluate_clients(
    task: Task,
    plan: Plan,
    model_of: Callable,
    source,
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

    def of_client(source, examples, k, indices):
        variables = model_of(source, k)

        def add(m, sums):
            at = row_of(indices, m)
            images = task.normalise(examples.images[at])
            logits, _ = task.model.apply(variables, images, train=False)
            known = at >= 0
            right = jnp.where(known, right_of(logits, examples.labels[at]), 0)
            return sums + jnp.stack([right.sum(), known.sum(dtype=jnp.float32)])

        return jax.lax.fori_loop(0, indices.shape[0], add, jnp.zeros(2))

    def block(source, examples, num_groups, part):
        clients, indices = part

        def one_group(g, sums):
            here = row_of(clients, g)
            counts = of_lanes(source, examples, here, row_of(indices, g))
            return sums.at[here].add(counts, mode="drop")

        return jax.lax.fori_loop(0, num_groups, one_group, jnp.zeros((num_clients, 2)))

    def single(source, examples, clients, indices):
        return of_client(source, examples, clients[0], indices[0])[None]

    of_lanes = jax.vmap(of_client, (None, None, 0, 0)) if plan.lanes > 1 else single
    shared = (source, examples, num_groups)
    sums = plan.sum_over_blocks(block, shared, (tests.clients, tests.indices))
    accuracy = jnp.where(sums[:, 1] > 0, sums[:, 0] / jnp.maximum(sums[:, 1], 1), jnp.nan)
    return ClientEvaluation(accuracy, jnp.isfinite(sums).all())
