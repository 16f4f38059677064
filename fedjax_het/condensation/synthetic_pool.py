"""Training of the global model on the synthetic inputs of all clients."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_het.condensation.distribution_matching import (
    divide_by_count,
    soft_label_matching_loss,
    sum_logits_by_class,
)
from fedjax_het.core.client_loop import Examples
from fedjax_het.core.server_parallelism import SINGLE_DEVICE, ServerParallelism
from fedjax_het.core.server_training import (
    BatchPlan,
    EpochRange,
    LossAndGradient,
    ServerTraining,
    shard_loss_and_gradient,
    train_on_examples,
)
from fedjax_het.core.task import Task
from fedjax_het.nn import Model
from fedjax_het.nn.batch_axis import sum_over_shards, take_local_rows
from fedjax_het.utils.arrays import pad_rows
from fedjax_het.utils.former_names import FORMER_INPUT_NAMES, accept_former_fields

Tree = Any


@accept_former_fields(FORMER_INPUT_NAMES)
class SyntheticPool(NamedTuple):
    """The synthetic inputs of all clients; a mask marks the inputs of the current round.

    Attributes:
      inputs: `[M, ...]` float32, normalized.
      labels: `[M]` int32.
      is_valid: `[M]` bool, True for inputs that exist in the current round.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.condensation import SyntheticPool
      >>> labels = jnp.zeros(6, jnp.int32)
      >>> SyntheticPool(jnp.zeros((6, 4, 4, 1)), labels, jnp.ones(6, bool)).inputs.shape
      (6, 4, 4, 1)
    """

    inputs: Array
    labels: Array
    is_valid: Array


class SoftLabelTargets(NamedTuple):
    """The clients' soft labels, averaged over the owners of each class.

    Attributes:
      soft_labels: `[C, C]`, a distribution over classes for each class.
      is_owned: `[C]` bool, True for classes that a client owns.
      weight: `[]`, factor of the matching loss relative to the cross-entropy (lambda_glob).
      tau: `[]`, temperature of the softmax.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.condensation import SoftLabelTargets
      >>> weight, tau = jnp.float32(1.0), jnp.float32(2.0)
      >>> targets = SoftLabelTargets(jnp.eye(3), jnp.ones(3, bool), weight, tau)
      >>> targets.soft_labels.shape
      (3, 3)
    """

    soft_labels: Array
    is_owned: Array
    weight: Array
    tau: Array


def make_masked_shuffled_batches(key: jax.Array, present: jax.Array, batch_size: int) -> BatchPlan:
    """Plan epochs that visit the present examples in random orders.

    Args:
      key: an order depends on it and on the number of the epoch alone.
      present: `[n]` bool, True for the examples to visit; may be traced.
      batch_size: examples per step; at most n are used.

    Returns:
      The plan.
    """

    def order(epoch):
        draws = jax.random.uniform(jax.random.fold_in(key, epoch), present.shape)
        return jnp.argsort(jnp.where(present, draws, jnp.inf))

    return BatchPlan(order, present.sum(), min(batch_size, len(present)))


class PoolTask(NamedTuple):
    """Network and loss of training on a pool of synthetic inputs, and how it is computed.

    Example:
      >>> from fedjax_het.condensation import PoolTask
      >>> from fedjax_het.nn import make_model
      >>> PoolTask(make_model("mlp", (2, 2, 1), 3)).exact_matching
      False
    """

    model: Model
    "The network."
    targets: SoftLabelTargets | None = None
    """Adds the soft-label matching loss, summed over classes, to the mean cross-entropy. The mean
    logit of a class is the mean over its inputs in the minibatch; classes without inputs in the
    minibatch add nothing."""
    exact_matching: bool = False
    "Whether mean logits are of all inputs of the pool instead, in evaluation mode."
    parallelism: ServerParallelism = SINGLE_DEVICE
    "Devices that share each batch and the passes over the pool."


def make_decayed_sgd(
    lr: float | Array, momentum: float | Array, weight_decay: float | Array
) -> optax.GradientTransformation:
    """Return PyTorch's SGD, with velocity 0 at the start.

        velocity <- momentum * velocity + gradient + weight_decay * w,  w <- w - lr * velocity

    Args:
      lr: learning rate; all numbers may be traced.
      momentum: momentum.
      weight_decay: L2 coefficient.

    Returns:
      The optimizer.
    """
    return optax.chain(optax.add_decayed_weights(weight_decay), optax.sgd(lr, momentum=momentum))


def train_on_synthetic_pool(
    task: PoolTask,
    variables: Tree,
    pool: SyntheticPool,
    key: Array,
    *,
    optimizer: optax.GradientTransformation,
    epochs: EpochRange,
    batch_size: int,
) -> Tree:
    """Train on the pool, starting at `variables`.

    An epoch is a permutation of the valid inputs in ceil(valid / batch_size) steps. The last batch
    is filled up with inputs of weight 0, which batch norm masks.

    Cost: epochs * ceil(valid / batch_size) steps; `exact_matching` adds two passes over the pool to
    each step. With several devices, each step has one collective for its gradient. Batch norm adds
    one per layer, matching one per step, and `exact_matching` two per step.

    Args:
      task: network and loss.
      variables: its variables at the start.
      pool: the synthetic inputs.
      key: key of the permutations; the network draws no random numbers.
      optimizer: the optimizer, new in each call, see `make_decayed_sgd`.
      epochs: the epochs.
      batch_size: inputs per step.

    Returns:
      The trained variables.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from fedjax_het.nn import make_model
      >>> from fedjax_het.condensation import PoolTask, SyntheticPool, train_on_synthetic_pool
      >>> from fedjax_het.core.server_training import EpochRange
      >>> model = make_model("mlp", (2, 2, 1), 3, hidden=[4])
      >>> labels = jnp.arange(6) % 3
      >>> pool = SyntheticPool(jnp.ones((6, 2, 2, 1)), labels, jnp.ones(6, bool))
      >>> settings = {"optimizer": optax.sgd(0.1), "epochs": EpochRange(1), "batch_size": 3}
      >>> variables, key = model.init(jax.random.key(0)), jax.random.key(1)
      >>> trained = train_on_synthetic_pool(PoolTask(model), variables, pool, key, **settings)
      >>> trained["params"]["head"]["kernel"].shape
      (4, 3)
    """
    batches = make_masked_shuffled_batches(key, pool.is_valid, batch_size)
    loss_and_gradient = shard_loss_and_gradient(task.parallelism, _make_batch_loss(task))
    samples_per_step = float(batches.size)
    if task.exact_matching and task.targets is not None:
        samples_per_step += 4 / 3 * len(pool.inputs)
        loss_and_gradient = _add_exact_matching(task, loss_and_gradient, pool, batches.size)
    # The devices share the batches already, in `loss_and_gradient`.
    parallelism = SINGLE_DEVICE._replace(loops=task.parallelism.loops)
    training = ServerTraining(loss_and_gradient, optimizer, parallelism=parallelism)
    examples = Examples(pool.inputs, pool.labels)
    return train_on_examples(
        training, variables, examples, batches, epochs, samples_per_step=samples_per_step
    )


def _make_batch_loss(pool_task: PoolTask) -> LossAndGradient:
    """Return the mean cross-entropy of normalized inputs plus the batch's matching loss."""
    model = pool_task.model
    targets = None if pool_task.exact_matching else pool_task.targets
    if targets is not None:  # the term needs the whole batch, so no micro-batches
        model = model._replace(micro_batch=None)
    task = Task(model, mean=(0.0,), std=(1.0,))  # inputs are already normalized

    def compute_losses(batch_axis, network, inputs, labels, mask):
        logits, state = network(inputs)
        sample_losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        if targets is not None:  # added to every sample, so the mean adds it once
            local_sums = sum_logits_by_class(logits, labels, mask, model.num_classes)
            sums, count = sum_over_shards(local_sums, batch_axis)
            sample_losses += _weighted_matching_loss(targets, sums, count)
        return sample_losses, state

    def loss_and_gradient(variables, batch, key):
        return task.loss_and_gradient(
            variables,
            batch,
            key,
            sample_losses=partial(compute_losses, batch.axis),
            extra_sample_arrays=(batch.mask,),
        )

    return loss_and_gradient


def _weighted_matching_loss(targets: SoftLabelTargets, sums: Array, count: Array) -> Array:
    """Return the weighted matching loss for sums of logits by class `[C, C]` and counts `[C]`."""
    is_present = (count > 0) & targets.is_owned
    means = divide_by_count(sums, count)
    loss = soft_label_matching_loss(means, is_present, targets.soft_labels, targets.tau)
    return targets.weight * loss


def _add_exact_matching(
    task: PoolTask, batch_loss: LossAndGradient, pool: SyntheticPool, batch_size: int
) -> LossAndGradient:
    """Add the gradient of the matching loss over the whole pool to `batch_loss`.

    The returned loss excludes the matching loss. The matching gradient uses the parameters before
    the batch and the statistics after it. Two passes over equal pieces compute it: the first
    computes the sums of logits, the second pulls their cotangents back piece by piece. The memory
    is therefore bounded by one batch.
    """
    model, targets, _, parallelism = task
    assert targets is not None

    def split(rows: Array) -> Array:
        rows = pad_rows(rows, -len(rows) % batch_size)
        return rows.reshape(-1, batch_size, *rows.shape[1:])

    def loss_and_gradient(variables, batch, key):
        params = variables["params"]
        loss, gradient, variables = batch_loss(variables, batch, key)
        # All devices must run the batch's collectives first.
        ordered_inputs = parallelism.order_after(loss, pool.inputs)
        local_pool = take_local_rows(pool._replace(inputs=ordered_inputs), parallelism.batch_axis)
        inputs, labels, is_valid = map(split, local_pool)
        pieces = inputs, labels, is_valid.astype(jnp.float32)

        def sum_logits(params, piece):
            inputs, labels, weights = piece
            state = variables["state"]
            logits, _ = model.apply({"params": params, "state": state}, inputs, train=False)
            return sum_logits_by_class(logits, labels, weights, model.num_classes)

        piece_sums = jax.lax.map(lambda piece: sum_logits(params, piece), pieces)
        totals = parallelism.sum_over_devices(jax.tree.map(lambda a: a.sum(0), piece_sums))
        matching_loss = partial(_weighted_matching_loss, targets)
        cotangent = jax.grad(matching_loss)(*totals)

        def add_piece(total, piece):
            piece_gradient = jax.vjp(lambda p: sum_logits(p, piece)[0], params)[1](cotangent)[0]
            return jax.tree.map(jnp.add, total, piece_gradient), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        local_gradient = jax.lax.scan(add_piece, zeros, pieces)[0]
        pool_gradient = parallelism.sum_over_devices(local_gradient)
        return loss, jax.tree.map(jnp.add, gradient, pool_gradient), variables

    return loss_and_gradient
