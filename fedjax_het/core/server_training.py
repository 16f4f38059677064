"""Training at the server: one loop of minibatch steps, for any examples and any loss."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.core.client_algorithm import Batch
from fedjax_het.core.client_loop import Examples
from fedjax_het.core.resumable_loops import SERVER
from fedjax_het.core.server_parallelism import SINGLE_DEVICE, ServerParallelism
from fedjax_het.core.task import Task
from fedjax_het.nn.batch_axis import take_local_rows
from fedjax_het.utils.input_kinds import take_rows

Tree = Any
# (variables, batch, key of the step or None) -> (loss, gradient of variables["params"], variables
# with the network's new state), such as `Task.loss_and_gradient`. The loss is a mean over the
# samples whose mask is 1. If devices share the batch, it is the loss of the local part, see
# `Batch.axis`.
LossAndGradient = Callable[[Tree, Batch, jax.Array | None], tuple[jax.Array, Tree, Tree]]


class BatchPlan(NamedTuple):
    """Order in which epochs visit n examples, and the size of a batch.

    Attributes:
      order: `epoch -> [n]` positions, of which the epoch visits the first `num_visited`.
      num_visited: at most n; may be traced.
      size: examples per step, at most n. The mask of an epoch's last batch leaves out the examples
        that fill it up.
    """

    order: Callable[[jax.Array], jax.Array]
    num_visited: int | jax.Array
    size: int

    @property
    def steps_per_epoch(self) -> int | jax.Array:
        """Return the number of steps of an epoch."""
        return -(-self.num_visited // self.size)

    def take_batch(self, order: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Select the examples of a step.

        Args:
          order: order of the epoch, `[n]`.
          step: number of the step, counted within its epoch.

        Returns:
          Positions, int32 `[size]`, and mask, float32 `[size]`.
        """
        positions = step * self.size + jnp.arange(self.size)
        mask = (positions < self.num_visited).astype(jnp.float32)
        return order[positions % jnp.maximum(self.num_visited, 1)], mask

    def take_step(self, step: Any) -> tuple[jax.Array, jax.Array]:
        """Select the examples of a step, counted over all epochs. Cost: the order of its epoch."""
        steps_per_epoch = self.steps_per_epoch
        return self.take_batch(self.order(step // steps_per_epoch), step % steps_per_epoch)


def make_shuffled_batches(key: jax.Array, num_examples: int, batch_size: int) -> BatchPlan:
    """Plan epochs that visit all examples in random orders.

    Args:
      key: an order depends on it and on the number of the epoch alone.
      num_examples: number of examples, n.
      batch_size: examples per step; at most n are used.

    Returns:
      The plan.

    Example:
      >>> import jax
      >>> from fedjax_het.core.server_training import make_shuffled_batches
      >>> make_shuffled_batches(jax.random.key(0), 10, 4).steps_per_epoch
      3
    """

    def order(epoch):
        return jax.random.permutation(jax.random.fold_in(key, epoch), num_examples)

    return BatchPlan(order, num_examples, min(batch_size, num_examples))


def make_sequential_batches(num_examples: int, batch_size: int) -> BatchPlan:
    """Plan epochs that visit all examples in their stored order.

    Args:
      num_examples: number of examples, n.
      batch_size: examples per step; at most n are used.

    Returns:
      The plan.
    """
    return BatchPlan(
        lambda epoch: jnp.arange(num_examples), num_examples, min(batch_size, num_examples)
    )


class EpochRange(NamedTuple):
    """Consecutive epochs of training at the server.

    Example:
      >>> from fedjax_het.core.server_training import EpochRange
      >>> EpochRange(5).first
      0
    """

    total: int | jax.Array
    "Number of epochs; may be traced."
    first: int | jax.Array = 0
    "Number of the first epoch, from which orders and keys continue."
    max_total: int | None = None
    "Static upper bound of a traced `total`."


class ServerTrainState(NamedTuple):
    """The state of training between steps."""

    variables: Tree
    """`{"params": tree, ...}`; the optimizer moves the parameters."""
    optimizer_state: Tree
    "State of the optimizer."
    average: tuple[Tree, jax.Array] | tuple[()] = ()
    "Mean of the averaged variables, and the number of averaged steps; `()` without averaging."


class ServerTraining(NamedTuple):
    """Loss and optimizer of training at the server, and the devices that share each batch."""

    loss_and_gradient: LossAndGradient
    "Loss and gradient of a batch."
    optimizer: optax.GradientTransformation
    "Moves the parameters."
    key: jax.Array | None = None
    """A step's key depends on it and on the step's number, counted over all epochs, alone. None:
    steps have no key."""
    is_averaged_step: Callable[[jax.Array], jax.Array] | None = None
    """`is_averaged_step(number of steps, from 1) -> bool`: whether the variables after that step
    are part of the returned mean (stochastic weight averaging). None: no step is."""
    parallelism: ServerParallelism = SINGLE_DEVICE
    "Devices that share each batch; all have all arguments."

    def init(self, variables: Tree) -> ServerTrainState:
        """Return the state before the first step."""
        average = () if self.is_averaged_step is None else (variables, jnp.int32(0))
        return ServerTrainState(variables, self.optimizer.init(variables["params"]), average)

    def step(self, train_state: ServerTrainState, batch: Batch) -> ServerTrainState:
        """Make a step of training.

        Args:
          train_state: the state before the step.
          batch: the minibatch, with the number of the step.

        Returns:
          The state after the step.
        """
        variables, optimizer_state, average = train_state
        step_key = None if self.key is None else jax.random.fold_in(self.key, batch.step_index)
        compute = shard_loss_and_gradient(self.parallelism, self.loss_and_gradient)
        _, gradient, variables = compute(variables, batch, step_key)
        params = variables["params"]
        updates, optimizer_state = self.optimizer.update(gradient, optimizer_state, params)
        variables = {**variables, "params": optax.apply_updates(params, updates)}
        if average and self.is_averaged_step is not None:
            mean, count = average
            is_due = self.is_averaged_step(batch.step_index + 1)
            count += is_due
            weight = jnp.where(is_due, 1 / jnp.maximum(count, 1), 0)
            average = jax.tree.map(lambda m, v: m + weight * (v - m), mean, variables), count
        return ServerTrainState(variables, optimizer_state, average)

    def get_result(self, train_state: ServerTrainState) -> Tree:
        """Return the mean of the averaged variables, or the last variables if there are none."""
        if not train_state.average:
            return train_state.variables
        mean, count = train_state.average
        return jax.tree.map(lambda m, v: jnp.where(count > 0, m, v), mean, train_state.variables)


def train_on_examples(
    training: ServerTraining,
    variables: Tree,
    examples: Examples,
    batches: BatchPlan,
    epochs: EpochRange,
    *,
    samples_per_step: float | None = None,
) -> Tree:
    """Train by minibatch steps; the caller jits.

    Cost: epochs * steps per epoch in sequence; each device computes its part of the samples. There
    are one collective per step, for the gradient, and one shuffle of the examples per epoch.

    Args:
      training: loss, optimizer and devices.
      variables: `{"params": tree, ...}` at the start.
      examples: `[n, ...]` inputs and labels as the loss reads them: stored or normalized, classes
        or probabilities.
      batches: order and size of the batches.
      epochs: the epochs.
      samples_per_step: samples that a step computes, for the cost (default: the batch).

    Returns:
      The trained variables, see `ServerTraining.get_result`.
    """
    num_steps_per_epoch = batches.steps_per_epoch
    num_epochs, first_epoch, max_epochs = epochs
    max_num_epochs = num_epochs if max_epochs is None else max_epochs

    def run_epoch(epoch_index, train_state, step_range=None):
        """Run the steps of an epoch that are in `step_range`, (first, last); None: all."""
        order, first = batches.order(epoch_index), epoch_index * num_steps_per_epoch
        begin, end = first, first + num_steps_per_epoch
        if step_range is not None:
            begin, end = jnp.maximum(begin, step_range[0]), jnp.minimum(end, step_range[1])

        def run_step(step, train_state):
            index, mask = batches.take_batch(order, step - first)
            inputs = take_rows(examples.inputs, index)
            batch = Batch(inputs, examples.labels[index], mask, step)
            return training.step(train_state, batch)

        return jax.lax.fori_loop(begin, end, run_step, train_state)

    def run_steps(first, last, train_state):
        if isinstance(first, int):  # all steps
            return jax.lax.fori_loop(first_epoch, first_epoch + num_epochs, run_epoch, train_state)
        epoch_length = jnp.maximum(num_steps_per_epoch, 1)
        skipped = first_epoch * num_steps_per_epoch
        step_range = first + skipped, last + skipped
        epoch_range = first_epoch + first // epoch_length, first_epoch + -(-last // epoch_length)
        return jax.lax.fori_loop(
            *epoch_range, partial(run_epoch, step_range=step_range), train_state
        )

    train_state = training.parallelism.loops.run_split(
        SERVER,
        num_epochs * num_steps_per_epoch,
        run_steps,
        training.init(variables),
        max_iterations=max_num_epochs * -(-len(examples.labels) // batches.size),
        samples_per_iteration=batches.size if samples_per_step is None else samples_per_step,
    )
    return training.get_result(train_state)


def shard_loss_and_gradient(
    server_parallelism: ServerParallelism, loss_and_gradient: LossAndGradient
) -> LossAndGradient:
    """Share the samples of each batch among the devices.

    Samples fill up the last part, and not every network with a state takes a mask of them. Every
    device therefore takes a batch that does not split evenly whole if the network has a state.

    Args:
      server_parallelism: the devices.
      loss_and_gradient: loss and gradient of a device's part.

    Returns:
      Loss and gradient of the whole batch, equal on all devices.
    """

    def compute_on_batch(variables: Tree, batch: Batch, key: jax.Array | None):
        if server_parallelism.axis is None or (
            variables.get("state") and len(batch.mask) % server_parallelism.num_devices
        ):
            return loss_and_gradient(variables, batch, key)

        batch_axis = server_parallelism.batch_axis
        inputs, labels, mask = take_local_rows((batch.inputs, batch.labels, batch.mask), batch_axis)
        device_batch = Batch(inputs, labels, mask, batch.step_index, batch_axis)
        # Each device's new state is computed from the whole batch.
        loss, gradient, variables = loss_and_gradient(variables, device_batch, key)
        weight = jnp.maximum(device_batch.mask.sum(), 1) / jnp.maximum(batch.mask.sum(), 1)
        weighted_values = jax.tree.map(lambda mean: mean * weight, (loss, gradient))
        return *server_parallelism.sum_over_devices(weighted_values), variables

    return compute_on_batch


def train_on_server(
    task: Task,
    variables: Tree,
    examples: Examples,
    key: jax.Array,
    *,
    batch_size: int,
    lr: float | jax.Array,
    epochs: int | jax.Array,
    max_epochs: int | None = None,
    first_epoch: int | jax.Array = 0,
    server_parallelism: ServerParallelism = SINGLE_DEVICE,
) -> Tree:
    """Train by plain minibatch SGD, in a new order per epoch.

    Cost: epochs * ceil(n_0 / batch_size) steps, see `train_on_examples`.

    Args:
      task: network, normalization and loss.
      variables: variables of the network at the start.
      examples: `[n_0, ...]` as stored.
      key: an epoch's order and a step's dropout depend on it and on their number alone.
      batch_size: examples per step.
      lr: learning rate; may be traced.
      epochs: number of epochs; may be traced.
      max_epochs: static upper bound of a traced `epochs`.
      first_epoch: number of the first epoch, from which orders and keys continue.
      server_parallelism: devices that share each batch.

    Returns:
      The trained variables.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from fedjax_het.methods import Examples, Task, train_on_server
      >>> from fedjax_het.nn import make_model
      >>> task = Task(make_model("mlp", (4, 4, 1), 3), mean=(0.5,), std=(0.25,))
      >>> examples = Examples(jnp.zeros((6, 4, 4, 1), jnp.uint8), jnp.arange(6) % 3)
      >>> start, key = task.model.init(jax.random.key(0)), jax.random.key(1)
      >>> trained = train_on_server(task, start, examples, key, batch_size=3, lr=0.1, epochs=1)
      >>> jax.tree.structure(trained) == jax.tree.structure(start)
      True
    """
    order_key, step_key = jax.random.split(key)
    training = ServerTraining(
        task.loss_and_gradient, optax.sgd(lr), step_key, parallelism=server_parallelism
    )
    batches = make_shuffled_batches(order_key, len(examples.labels), batch_size)
    epoch_range = EpochRange(epochs, first_epoch, max_epochs)
    return train_on_examples(training, variables, examples, batches, epoch_range)
