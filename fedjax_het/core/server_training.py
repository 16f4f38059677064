"""Training at the server: one loop of minibatch steps, whatever it learns from."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from fedjax_het.core.client_algorithm import Batch
from fedjax_het.core.client_loop import Examples
from fedjax_het.core.resumable_loops import DIAGNOSTICS, SERVER
from fedjax_het.core.server_parallelism import SINGLE_DEVICE, ServerParallelism
from fedjax_het.core.task import Task
from fedjax_het.nn.batch_axis import take_local_rows

Tree = Any


class LossAndGradient(Protocol):
    """What a step of `fit` descends: `Task.loss_and_gradient`, or a function of one's own."""

    def __call__(
        self, variables: Tree, batch: Batch, key: jax.Array | None, /
    ) -> tuple[jax.Array, Tree, Tree]:
        """-> (loss, gradient of `variables["params"]`, variables with the network's new state).

        The loss is a mean over the samples whose `batch.mask` is 1; `key` is the step's own. Where
        devices share the batch it is that of this device's part, see `Batch.axis`.
        """


class BatchPlan(NamedTuple):
    """In which order epochs visit n examples, and how many a step takes.

    order(epoch) -> `[n]` positions, of which the epoch visits the first `num_visited`.
    num_visited: at most n; may be traced.
    size: examples a step, at most n; static. An epoch's last batch is filled up with examples that
      its mask leaves out.
    """

    order: Callable[[jax.Array], jax.Array]
    num_visited: int | jax.Array
    size: int

    @property
    def steps_per_epoch(self) -> int | jax.Array:
        """Steps of an epoch."""
        return -(-self.num_visited // self.size)

    def take_batch(self, order: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Positions and mask `[size]` of step `step`, counted within its epoch, whose order this
        is; the mask is float32."""
        positions = step * self.size + jnp.arange(self.size)
        mask = (positions < self.num_visited).astype(jnp.float32)
        return order[positions % jnp.maximum(self.num_visited, 1)], mask


def make_shuffled_batches(key: jax.Array, num_examples: int, batch_size: int) -> BatchPlan:
    """Every epoch is a permutation of its own, which depends on `key` and its number alone."""

    def order(epoch):
        return jax.random.permutation(jax.random.fold_in(key, epoch), num_examples)

    return BatchPlan(order, num_examples, min(batch_size, num_examples))


def make_masked_shuffled_batches(key: jax.Array, present: jax.Array, batch_size: int) -> BatchPlan:
    """As `shuffled`, of those examples alone that are `present` `[n]`, which may be traced."""

    def order(epoch):
        draws = jax.random.uniform(jax.random.fold_in(key, epoch), present.shape)
        return jnp.argsort(jnp.where(present, draws, jnp.inf))

    return BatchPlan(order, present.sum(), min(batch_size, len(present)))


def make_sequential_batches(num_examples: int, batch_size: int) -> BatchPlan:
    """Every epoch goes through the examples as they stand."""
    return BatchPlan(
        lambda epoch: jnp.arange(num_examples), num_examples, min(batch_size, num_examples)
    )


class ServerTrainState(NamedTuple):
    """What steps of training change."""

    variables: Tree  # {"params": tree, ...}, of which the optimiser moves the parameters
    optimizer_state: Tree  # the optimiser's
    callback_state: Tree = ()


def _keep_watched(num_steps: jax.Array, variables: Tree, callback_state: Tree) -> Tree:
    return callback_state


def make_server_step(
    make_batch: Callable[..., Batch],
    loss_and_gradient: LossAndGradient,
    *,
    optimizer: optax.GradientTransformation,
    key: jax.Array | None = None,
    step_callback: Callable[[jax.Array, Tree, Tree], Tree] = _keep_watched,
    server_parallelism: ServerParallelism = SINGLE_DEVICE,
) -> Callable[..., ServerTrainState]:
    """-> step(number, learner, *more) -> learner: a step of all training at the server, on the
    batch `make_batch(number, *more)`. `fit` goes through epochs of examples, FedGen's generator draws
    a batch for each step. Arguments as in `fit`.
    """

    sharded_loss_and_gradient = shard_loss_and_gradient(server_parallelism, loss_and_gradient)

    def step(step_index, train_state, *batch_args):
        variables, optimizer_state, callback_state = train_state
        step_key = None if key is None else jax.random.fold_in(key, step_index)
        _, gradient, variables = sharded_loss_and_gradient(
            variables, make_batch(step_index, *batch_args), step_key
        )
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, variables["params"])
        variables = {**variables, "params": optax.apply_updates(variables["params"], updates)}
        return ServerTrainState(
            variables, optimizer_state, step_callback(step_index + 1, variables, callback_state)
        )

    return step


def train_on_examples(
    variables: Tree,
    examples: Examples,
    batches: BatchPlan,
    loss_and_gradient: LossAndGradient,
    *,
    optimizer: optax.GradientTransformation,
    epochs: int | jax.Array,
    max_epochs: int | None = None,
    first_epoch: int | jax.Array = 0,
    key: jax.Array | None = None,
    step_callback: Callable[[jax.Array, Tree, Tree], Tree] = _keep_watched,
    callback_state: Tree = (),
    server_parallelism: ServerParallelism = SINGLE_DEVICE,
    samples_per_step: float | None = None,
) -> tuple[Tree, Tree]:
    """(variables, watched) after `epochs` epochs of minibatch steps; to be jitted by the caller.

    Args:
      variables: `{"params": tree, ...}`, of which the optimiser moves the parameters.
      examples: `[n, ...]` images and labels, in whatever form `loss_and_gradient` reads them: as
        stored or normalised, classes or probabilities.
      optimizer: starts afresh.
      epochs: may be traced; max_epochs: then, at most so many. first_epoch: the number of the
        first, where others went before: orders and keys go on from there.
      key: of what steps draw, see `LossAndGradient`: a step's depends on it and on the step's
        number, counted over all epochs, alone. None: steps are given none.
      watch(done, variables, watched) -> watched, after each step; `done` counts them from 1.
      sharing: the devices that share each batch, all of which have all arguments.
      samples: that a step trains on (default: the batch).
    Cost: epochs * batches.per_epoch steps, one after the other, of which a device takes its part of
      the samples; one collective a step, of the gradient. The order of the examples once an epoch.
    """
    num_steps_per_epoch = batches.steps_per_epoch

    def make_batch(step, order, first):
        index, mask = batches.take_batch(order, step - first)
        return Batch(examples.images[index], examples.labels[index], mask, step)

    step = make_server_step(
        make_batch,
        loss_and_gradient,
        optimizer=optimizer,
        key=key,
        step_callback=step_callback,
        server_parallelism=server_parallelism,
    )

    def run_epoch(epoch_index, train_state, step_range=None):
        """An epoch; of it the steps in `part`, (first, last), where it is cut."""
        order, first = batches.order(epoch_index), epoch_index * num_steps_per_epoch
        begin, end = first, first + num_steps_per_epoch
        if step_range is not None:
            begin, end = jnp.maximum(begin, step_range[0]), jnp.minimum(end, step_range[1])
        return jax.lax.fori_loop(
            begin,
            end,
            lambda step_index, train_state: step(step_index, train_state, order, first),
            train_state,
        )

    def run_steps(first, last, train_state):
        if isinstance(first, int):  # all of it
            return jax.lax.fori_loop(first_epoch, first_epoch + epochs, run_epoch, train_state)
        epoch_length = jnp.maximum(num_steps_per_epoch, 1)
        step_range = (
            first + first_epoch * num_steps_per_epoch,
            last + first_epoch * num_steps_per_epoch,
        )
        epoch_range = first_epoch + first // epoch_length, first_epoch + -(-last // epoch_length)
        return jax.lax.fori_loop(
            *epoch_range, partial(run_epoch, step_range=step_range), train_state
        )

    start = ServerTrainState(variables, optimizer.init(variables["params"]), callback_state)
    max_num_epochs = epochs if max_epochs is None else max_epochs
    train_state = server_parallelism.loops.run_split(
        SERVER,
        epochs * num_steps_per_epoch,
        run_steps,
        start,
        max_iterations=max_num_epochs * count_steps_per_epoch(len(examples.labels), batches.size),
        samples_per_iteration=batches.size if samples_per_step is None else samples_per_step,
    )
    return train_state.variables, train_state.callback_state


def shard_loss_and_gradient(
    server_parallelism: ServerParallelism, loss_and_gradient: LossAndGradient
) -> LossAndGradient:
    """The same, of which each device takes its part of the batch's samples.

    A network with a state (batch norm) sees what fills up the last part: batches that do not split
    evenly every device takes whole.
    """

    def compute_on_batch(variables: Tree, batch: Batch, key: jax.Array | None):
        if server_parallelism.axis is None or (
            variables.get("state") and len(batch.mask) % server_parallelism.num_devices
        ):
            return loss_and_gradient(variables, batch, key)

        batch_axis = server_parallelism.batch_axis
        images, labels, mask = take_local_rows((batch.images, batch.labels, batch.mask), batch_axis)
        device_batch = Batch(images, labels, mask, batch.step_index, batch_axis)
        # Each device's new state is that of the whole batch.
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
    """Variables after `epochs` epochs of plain minibatch SGD, each a shuffle of its own.

    Args:
      examples: `[n_0, ...]` as stored.
      key: an epoch's shuffle and a step's dropout depend on it and on their number alone.
      lr, epochs: may be traced; max_epochs: then, at most so many. first_epoch: the number of the
        first, where others went before.
    Cost: epochs * ceil(n_0 / batch_size) steps, one after the other, shared as `fit` says.
    """
    order_key, step_key = jax.random.split(key)
    return train_on_examples(
        variables,
        examples,
        make_shuffled_batches(order_key, len(examples.labels), batch_size),
        task.loss_and_gradient,
        optimizer=optax.sgd(lr),
        epochs=epochs,
        max_epochs=max_epochs,
        first_epoch=first_epoch,
        key=step_key,
        server_parallelism=server_parallelism,
    )[0]


def compute_mean_gradient(
    task: Task,
    variables: Tree,
    examples: Examples,
    *,
    batch_size: int,
    server_parallelism: ServerParallelism = SINGLE_DEVICE,
) -> Tree:
    """The gradient of the mean loss of all examples `[n_0, ...]`, as stored, of the network as it
    is evaluated (no dropout, kept batch-norm statistics).

    Cost: a pass over them, `batch_size` at a time, shared as `fit` says.
    """
    batches = make_sequential_batches(len(examples.labels), batch_size)
    return compute_gradient_moments(
        task, variables, examples, batches, server_parallelism=server_parallelism
    )[0]


def compute_gradient_moments(
    task: Task,
    variables: Tree,
    examples: Examples,
    batches: BatchPlan,
    *,
    server_parallelism: ServerParallelism = SINGLE_DEVICE,
) -> tuple[Tree, jax.Array]:
    """`mean_gradient`, and the mean over examples of the squared length of the gradient of the
    minibatch that they are in; by the first epoch of `batches`, of all examples."""
    num_examples, order = len(examples.labels), batches.order(jnp.int32(0))

    def evaluation_gradient(variables, batch, key):
        return task.loss_and_gradient(variables, batch, key, train=False)

    compute_on_batch = shard_loss_and_gradient(server_parallelism, evaluation_gradient)

    def add(step, totals):
        mean, mean_squared_norm = totals
        index, mask = batches.take_batch(order, step)
        batch = Batch(examples.images[index], examples.labels[index], mask, step)
        _, gradient, _ = compute_on_batch(variables, batch, None)
        fraction = mask.sum() / num_examples
        mean = jax.tree.map(lambda total, g: total + fraction * g, mean, gradient)
        return mean, mean_squared_norm + fraction * optax.tree.norm(gradient, squared=True)

    zeros = jax.tree.map(jnp.zeros_like, variables["params"])
    start = (zeros, jnp.zeros(()))
    return server_parallelism.loops.run(
        DIAGNOSTICS, batches.steps_per_epoch, add, start, samples_per_iteration=batches.size
    )


def get_epoch_batch(
    key: jax.Array, step: jax.Array, num_examples: int, batch_size: int
) -> tuple[jax.Array, jax.Array]:
    """Which examples step `step`, counted over all epochs, takes: positions and mask
    `[batch_size]`, those of `shuffled` in `fit`.

    Cost: the order of all examples, in every step.
    """
    batches = make_shuffled_batches(key, num_examples, batch_size)
    num_steps_per_epoch = batches.steps_per_epoch
    return batches.take_batch(
        batches.order(step // num_steps_per_epoch), step % num_steps_per_epoch
    )


def count_steps_per_epoch(num_examples: int, batch_size: int) -> int:
    """Minibatches of an epoch, the last of which may be smaller."""
    return -(-num_examples // batch_size)
