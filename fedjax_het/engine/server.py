"""Training at the server: one loop of minibatch steps, whatever it learns from."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from fedjax_het.engine.contract import Batch
from fedjax_het.engine.lanes import Examples
from fedjax_het.engine.sharing import ALONE, Sharing
from fedjax_het.engine.stretches import SERVER, SURVEY, cut, loop
from fedjax_het.engine.task import Task
from fedjax_het.nn.spread import own_rows

Tree = Any


class LossAndGradient(Protocol):
    """What a step of `fit` descends: `Task.loss_and_gradient`, or a function of one's own."""

    def __call__(
        self, variables: Tree, batch: Batch, key: jax.Array | None, /
    ) -> tuple[jax.Array, Tree, Tree]:
        """-> (loss, gradient of `variables["params"]`, variables with the network's new state).

        The loss is a mean over the samples whose `batch.mask` is 1; `key` is the step's own.
        """


class Batches(NamedTuple):
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
    def per_epoch(self) -> int | jax.Array:
        """Steps of an epoch."""
        return -(-self.num_visited // self.size)

    def take(self, order: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Positions and mask `[size]` of step `step`, counted within its epoch, whose order this
        is; the mask is float32."""
        place = step * self.size + jnp.arange(self.size)
        inside = (place < self.num_visited).astype(jnp.float32)
        return order[place % jnp.maximum(self.num_visited, 1)], inside


def shuffled(key: jax.Array, num_examples: int, batch_size: int) -> Batches:
    """Every epoch is a permutation of its own, which depends on `key` and its number alone."""

    def order(epoch):
        return jax.random.permutation(jax.random.fold_in(key, epoch), num_examples)

    return Batches(order, num_examples, min(batch_size, num_examples))


def shuffled_present(key: jax.Array, present: jax.Array, batch_size: int) -> Batches:
    """As `shuffled`, of those examples alone that are `present` `[n]`, which may be traced."""

    def order(epoch):
        draws = jax.random.uniform(jax.random.fold_in(key, epoch), present.shape)
        return jnp.argsort(jnp.where(present, draws, jnp.inf))

    return Batches(order, present.sum(), min(batch_size, len(present)))


def in_order(num_examples: int, batch_size: int) -> Batches:
    """Every epoch goes through the examples as they stand."""
    return Batches(
        lambda epoch: jnp.arange(num_examples), num_examples, min(batch_size, num_examples)
    )


class Learner(NamedTuple):
    """What steps of training change."""

    variables: Tree  # {"params": tree, ...}, of which the optimiser moves the parameters
    moments: Tree  # the optimiser's
    watched: Tree = ()


def _unwatched(done: jax.Array, variables: Tree, watched: Tree) -> Tree:
    return watched


def stepping(
    batch_of: Callable[..., Batch],
    loss_and_gradient: LossAndGradient,
    *,
    optimizer: optax.GradientTransformation,
    key: jax.Array | None = None,
    watch: Callable[[jax.Array, Tree, Tree], Tree] = _unwatched,
    sharing: Sharing = ALONE,
) -> Callable[..., Learner]:
    """-> step(number, learner, *more) -> learner: a step of all training at the server, on the
    batch `batch_of(number, *more)`. `fit` goes through epochs of examples, FedGen's generator draws
    a batch for each step. Arguments as in `fit`.
    """

    shared_loss_and_gradient = shared_among(sharing, loss_and_gradient)

    def step(number, learner, *more):
        variables, moments, watched = learner
        step_key = None if key is None else jax.random.fold_in(key, number)
        _, gradient, variables = shared_loss_and_gradient(
            variables, batch_of(number, *more), step_key
        )
        updates, moments = optimizer.update(gradient, moments, variables["params"])
        variables = {**variables, "params": optax.apply_updates(variables["params"], updates)}
        return Learner(variables, moments, watch(number + 1, variables, watched))

    return step


def fit(
    variables: Tree,
    examples: Examples,
    batches: Batches,
    loss_and_gradient: LossAndGradient,
    *,
    optimizer: optax.GradientTransformation,
    epochs: int | jax.Array,
    most_epochs: int | None = None,
    first_epoch: int | jax.Array = 0,
    key: jax.Array | None = None,
    watch: Callable[[jax.Array, Tree, Tree], Tree] = _unwatched,
    watched: Tree = (),
    sharing: Sharing = ALONE,
    samples: float | None = None,
) -> tuple[Tree, Tree]:
    """(variables, watched) after `epochs` epochs of minibatch steps; to be jitted by the caller.

    Args:
      variables: `{"params": tree, ...}`, of which the optimiser moves the parameters.
      examples: `[n, ...]` images and labels, in whatever form `loss_and_gradient` reads them: as
        stored or normalised, classes or probabilities.
      optimizer: starts afresh.
      epochs: may be traced; most_epochs: then, at most so many. first_epoch: the number of the
        first, where others went before: orders and keys go on from there.
      key: of what steps draw, see `LossAndGradient`: a step's depends on it and on the step's
        number, counted over all epochs, alone. None: steps are given none.
      watch(done, variables, watched) -> watched, after each step; `done` counts them from 1.
      sharing: the devices that share each batch, all of which have all arguments.
      samples: that a step trains on (default: the batch).
    Cost: epochs * batches.per_epoch steps, one after the other, of which a device takes its part of
      the samples; one collective a step, of the gradient. The order of the examples once an epoch.
    """
    per_epoch = batches.per_epoch

    def batch_of(step, order, first):
        index, mask = batches.take(order, step - first)
        return Batch(examples.images[index], examples.labels[index], mask, step)

    step = stepping(
        batch_of, loss_and_gradient, optimizer=optimizer, key=key, watch=watch, sharing=sharing
    )

    def epoch(number, learner, part=None):
        """An epoch; of it the steps in `part`, (first, last), where it is cut."""
        order, first = batches.order(number), number * per_epoch
        begin, end = first, first + per_epoch
        if part is not None:
            begin, end = jnp.maximum(begin, part[0]), jnp.minimum(end, part[1])
        return jax.lax.fori_loop(
            begin, end, lambda number, learner: step(number, learner, order, first), learner
        )

    def go(first, last, learner):
        if isinstance(first, int):  # all of it
            return jax.lax.fori_loop(first_epoch, first_epoch + epochs, epoch, learner)
        each = jnp.maximum(per_epoch, 1)
        part = first + first_epoch * per_epoch, last + first_epoch * per_epoch
        numbers = first_epoch + first // each, first_epoch + -(-last // each)
        return jax.lax.fori_loop(*numbers, partial(epoch, part=part), learner)

    start = Learner(variables, optimizer.init(variables["params"]), watched)
    most = epochs if most_epochs is None else most_epochs
    learner = cut(
        SERVER,
        epochs * per_epoch,
        go,
        start,
        most=most * steps_per_epoch(len(examples.labels), batches.size),
        samples=batches.size if samples is None else samples,
    )
    return learner.variables, learner.watched


def shared_among(sharing: Sharing, loss_and_gradient: LossAndGradient) -> LossAndGradient:
    """The same, of which each device takes its part of the batch's samples.

    A network with a state (batch norm) sees what fills up the last part: batches that do not split
    evenly every device takes whole.
    """

    def of_batch(variables: Tree, batch: Batch, key: jax.Array | None):
        if sharing.axis is None or (variables.get("state") and len(batch.mask) % sharing.parts):
            return loss_and_gradient(variables, batch, key)

        with sharing.spread():
            images, labels, mask = own_rows((batch.images, batch.labels, batch.mask))
            part = Batch(images, labels, mask, batch.number)
            # Each device's new state is that of the whole batch.
            loss, gradient, variables = loss_and_gradient(variables, part, key)
        weight = jnp.maximum(part.mask.sum(), 1) / jnp.maximum(batch.mask.sum(), 1)
        own = jax.tree.map(lambda mean: mean * weight, (loss, gradient))
        return *sharing.total(own), variables

    return of_batch


def train_on_server(
    task: Task,
    variables: Tree,
    examples: Examples,
    key: jax.Array,
    *,
    batch_size: int,
    lr: float | jax.Array,
    epochs: int | jax.Array,
    most_epochs: int | None = None,
    first_epoch: int | jax.Array = 0,
    sharing: Sharing = ALONE,
) -> Tree:
    """Variables after `epochs` epochs of plain minibatch SGD, each a shuffle of its own.

    Args:
      examples: `[n_0, ...]` as stored.
      key: an epoch's shuffle and a step's dropout depend on it and on their number alone.
      lr, epochs: may be traced; most_epochs: then, at most so many. first_epoch: the number of the
        first, where others went before.
    Cost: epochs * ceil(n_0 / batch_size) steps, one after the other, shared as `fit` says.
    """
    order_key, step_key = jax.random.split(key)
    return fit(
        variables,
        examples,
        shuffled(order_key, len(examples.labels), batch_size),
        task.loss_and_gradient,
        optimizer=optax.sgd(lr),
        epochs=epochs,
        most_epochs=most_epochs,
        first_epoch=first_epoch,
        key=step_key,
        sharing=sharing,
    )[0]


def mean_gradient(
    task: Task, variables: Tree, examples: Examples, *, batch_size: int, sharing: Sharing = ALONE
) -> Tree:
    """The gradient of the mean loss of all examples `[n_0, ...]`, as stored, of the network as it
    is evaluated (no dropout, kept batch-norm statistics).

    Cost: a pass over them, `batch_size` at a time, shared as `fit` says.
    """
    batches = in_order(len(examples.labels), batch_size)
    return gradient_moments(task, variables, examples, batches, sharing=sharing)[0]


def gradient_moments(
    task: Task, variables: Tree, examples: Examples, batches: Batches, *, sharing: Sharing = ALONE
) -> tuple[Tree, jax.Array]:
    """`mean_gradient`, and the mean over examples of the squared length of the gradient of the
    minibatch that they are in; by the first epoch of `batches`, of all examples."""
    count, order = len(examples.labels), batches.order(jnp.int32(0))

    def slope(variables, batch, key):
        return task.loss_and_gradient(variables, batch, key, train=False)

    of_batch = shared_among(sharing, slope)

    def add(step, totals):
        mean, square = totals
        index, mask = batches.take(order, step)
        batch = Batch(examples.images[index], examples.labels[index], mask, step)
        _, gradient, _ = of_batch(variables, batch, None)
        share = mask.sum() / count
        mean = jax.tree.map(lambda total, g: total + share * g, mean, gradient)
        return mean, square + share * optax.tree.norm(gradient, squared=True)

    zeros = jax.tree.map(jnp.zeros_like, variables["params"])
    start = (zeros, jnp.zeros(()))
    return loop(SURVEY, batches.per_epoch, add, start, samples=batches.size)


def epoch_batch(
    key: jax.Array, step: jax.Array, num_examples: int, batch_size: int
) -> tuple[jax.Array, jax.Array]:
    """Which examples step `step`, counted over all epochs, takes: positions and mask
    `[batch_size]`, those of `shuffled` in `fit`.

    Cost: the order of all examples, in every step.
    """
    batches = shuffled(key, num_examples, batch_size)
    per_epoch = batches.per_epoch
    return batches.take(batches.order(step // per_epoch), step % per_epoch)


def steps_per_epoch(num_examples: int, batch_size: int) -> int:
    """Minibatches of an epoch, the last of which may be smaller."""
    return -(-num_examples // batch_size)
