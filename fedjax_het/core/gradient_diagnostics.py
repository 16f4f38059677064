"""Distances of the server's and the clients' loss gradients from the gradient over all data."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from fedjax_het.core.client_algorithm import Batch, ClientAlgorithm, ClientUpdate
from fedjax_het.core.client_loop import Cohort, Examples, train_cohort
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import ServerMessage
from fedjax_het.core.resumable_loops import DIAGNOSTICS
from fedjax_het.core.server_parallelism import SINGLE_DEVICE, ServerParallelism
from fedjax_het.core.server_training import (
    BatchPlan,
    make_shuffled_batches,
    shard_loss_and_gradient,
)
from fedjax_het.core.task import Task
from fedjax_het.utils.arrays import make_key

Tree = Any

# Names of the metrics.
GRADIENT_GAP_NAMES = (
    "client_gap",
    "server_gap",
    "gradient_norm",
    "server_norm",
    "client_noise",
    "server_noise",
)


class ClientDiagnostics(NamedTuple):
    """A measurement on all clients' training data, made before some of the rounds.

    Attributes:
      names: names of the metrics.
      measure: `(hp, state, cohort) -> {name: scalar}`. `cohort` contains all clients, weighted by
        their examples, each with one pass through its data.

    Example:
      >>> from fedjax_het.methods import ClientDiagnostics
      >>> measure = lambda hp, state, cohort: {"rounds": state.round.astype("float32")}
      >>> ClientDiagnostics(("rounds",), measure).names
      ('rounds',)
    """

    names: tuple[str, ...]
    measure: Callable[..., dict[str, jax.Array]]


def measure_gradient_gaps(
    task: Task,
    plan: ExecutionPlan,
    variables: Tree,
    cohort: Cohort,
    server_gradient: Callable[[Tree], Tree] | None = None,
) -> dict[str, jax.Array]:
    """Measure the gradients of FSL's Fig. 9 and Theorem 1, and of DynaFed's Assumption 3.

    F is the clients' loss, weighted by their examples, f_i the loss of client i, f_0 the server's
    loss:

    * `server_gap`: xi^2 = ||grad f_0 - grad F||^2 (FSL, Fig. 9);
    * `client_gap`: G^2 = mean_i ||grad f_i - grad F||^2 (FSL, Fig. 9);
    * `gradient_norm`: ||grad F||; DynaFed's Assumption 3 is xi <= delta ||grad F|| + epsilon;
    * `server_norm`: ||grad f_0||;
    * `client_noise`, `server_noise`: sigma^2 and sigma_0^2, the variances of a minibatch's gradient
      at a client (mean over clients) and at the server.

    Gradients are over all data, of the network in evaluation mode (no dropout, stored batch-norm
    statistics). Minibatches are one epoch of the clients' training minibatches, and minibatches of
    equal size of the server's examples. Means over clients leave out clients without examples. The
    server's metrics are NaN without server data, `server_noise` also if `server_gradient` is given.

    Cost: one pass over all clients' data; memory of two gradients per lane.

    Args:
      task: network, normalization and loss.
      plan: placement of the clients on the devices.
      variables: variables of the network.
      cohort: all clients, weighted by their examples, each with one pass through its data.
      server_gradient: `variables -> gradient` of f_0, for server data that are no examples.

    Returns:
      The metrics of `GRADIENT_GAP_NAMES`, scalars.
    """
    key = make_key(0)  # clients draw nothing
    client, message = _make_gradient_client(task), ServerMessage(variables)
    result = train_cohort(client, plan, {}, message, (), key, cohort)
    mean_gradient = result.update.mean
    unweighted_mean, mean_squared_norm, mean_squared_batch_norm = (
        total / result.num_trained for total in result.update.sum
    )
    server_vector = jnp.full_like(mean_gradient, jnp.nan)
    server_noise = jnp.float32(jnp.nan)
    if server_gradient is not None:
        server_vector = ravel_pytree(server_gradient(variables))[0]
    elif (examples := cohort.server_examples) is not None:
        batch_size = cohort.schedule.batches.shape[-1]
        batches = make_shuffled_batches(key, len(examples.labels), batch_size)
        parallelism = SINGLE_DEVICE._replace(loops=cohort.loops)
        gradient, squared_batch_norm = compute_gradient_moments(
            task, variables, examples, batches, server_parallelism=parallelism
        )
        server_vector = ravel_pytree(gradient)[0]
        server_noise = squared_batch_norm - server_vector @ server_vector
    client_gap = mean_squared_norm - 2 * unweighted_mean @ mean_gradient
    return {
        "client_gap": client_gap + mean_gradient @ mean_gradient,
        "server_gap": jnp.square(server_vector - mean_gradient).sum(),
        "gradient_norm": jnp.linalg.norm(mean_gradient),
        "server_norm": jnp.linalg.norm(server_vector),
        "client_noise": mean_squared_batch_norm - mean_squared_norm,
        "server_noise": server_noise,
    }


def compute_gradient_moments(
    task: Task,
    variables: Tree,
    examples: Examples,
    batches: BatchPlan,
    *,
    server_parallelism: ServerParallelism = SINGLE_DEVICE,
) -> tuple[Tree, jax.Array]:
    """Compute the gradient of the mean loss, and the mean squared norm of minibatch gradients.

    The network is in evaluation mode (no dropout, stored batch-norm statistics).

    Cost: a pass over the examples, shared by the devices.

    Args:
      task: network, normalization and loss.
      variables: variables of the network.
      examples: `[n, ...]` as stored.
      batches: a plan whose first epoch visits all examples.
      server_parallelism: devices that share each batch.

    Returns:
      The gradient, a tree like `variables["params"]`, and the mean over examples of the squared
      norm of their minibatch's gradient, `[]`.
    """
    num_examples, order = len(examples.labels), batches.order(jnp.int32(0))

    def evaluation_gradient(variables, batch, key):
        return task.loss_and_gradient(variables, batch, key, train=False)

    compute_on_batch = shard_loss_and_gradient(server_parallelism, evaluation_gradient)

    def add(step, totals):
        mean, mean_squared_norm = totals
        index, mask = batches.take_batch(order, step)
        batch = Batch(examples.take(index, jnp.int32(0)), examples.labels[index], mask, step)
        _, gradient, _ = compute_on_batch(variables, batch, None)
        fraction = mask.sum() / num_examples
        mean = jax.tree.map(lambda total, g: total + fraction * g, mean, gradient)
        return mean, mean_squared_norm + fraction * optax.tree.norm(gradient, squared=True)

    start = jax.tree.map(jnp.zeros_like, variables["params"]), jnp.zeros(())
    return server_parallelism.loops.run(
        DIAGNOSTICS, batches.steps_per_epoch, add, start, samples_per_iteration=batches.size
    )


def _make_gradient_client(task: Task) -> ClientAlgorithm:
    """Return a client that sends its gradient.

    The update's mean is the gradient. Its sum adds the gradient, its squared norm, and the mean
    squared norm of its minibatches' gradients.
    """

    def begin(context, state):
        return jax.tree.map(jnp.zeros_like, context.message.variables["params"]), jnp.zeros(())

    def step(context, local, batch):
        gradient_sum, squared_batch_norm = local
        fraction = batch.mask.sum() / context.client.num_samples
        variables = context.message.variables
        gradient_sum, loss, gradient = _add_gradient(task, context, variables, gradient_sum, batch)
        squared_batch_norm += fraction * optax.tree.norm(gradient, squared=True)
        return (gradient_sum, squared_batch_norm), loss

    def end(context, local, state):
        gradient_tree, squared_batch_norm = local
        gradient = ravel_pytree(gradient_tree)[0]
        sums = (gradient, jnp.square(gradient).sum(), squared_batch_norm)
        return ClientUpdate(mean=gradient, sum=sums), (), ()

    return ClientAlgorithm(lambda hp, variables: (), begin, step, end, phase=DIAGNOSTICS)


class ClientGradients(NamedTuple):
    """Gradients of the losses F_k of K clients over all their data, relative to a reference.

    Example:
      >>> from fedjax_het.core.gradient_diagnostics import ClientGradients
      >>> ClientGradients._fields
      ('mean', 'squared_norms', 'squared_distances')
    """

    mean: Tree
    "Gradient of F, the mean of F_k weighted by examples, like the parameters."
    squared_norms: jax.Array
    "||grad F_k||^2, float32 `[K]`; 0 for a client without data."
    squared_distances: jax.Array
    "||grad F_k - reference||^2, float32 `[K]`; 0 for a client without data."


def measure_client_gradients(
    task: Task, plan: ExecutionPlan, variables: Tree, reference: Tree, cohort: Cohort
) -> ClientGradients:
    """Compute the gradient of every client's loss over all its data at one model.

    The network is in evaluation mode (no dropout, stored batch-norm statistics). Cost: one pass
    over all clients' data; memory of a gradient per lane.

    Args:
      task: network, normalization and loss.
      plan: placement of the clients on the devices.
      variables: variables of the network.
      reference: a tree like `variables["params"]`.
      cohort: all clients, weighted by their examples, each with one pass through its data.

    Returns:
      The mean gradient, and the norms and distances of the clients.
    """

    def begin(context, state):
        return jax.tree.map(jnp.zeros_like, context.message[0]["params"])

    def step(context, gradient_sum, batch):
        return _add_gradient(task, context, context.message[0], gradient_sum, batch)[:2]

    def end(context, gradient, state):
        differences = jax.tree.map(jnp.subtract, gradient, context.message[1])
        norms = (optax.tree.norm(tree, squared=True) for tree in (gradient, differences))
        return ClientUpdate(mean=gradient), tuple(norms), ()

    client = ClientAlgorithm(lambda hp, variables: (), begin, step, end, phase=DIAGNOSTICS)
    states = (jnp.zeros(cohort.schedule.participants.shape[-1]),) * 2
    message = (variables, reference)
    result = train_cohort(client, plan, {}, message, states, make_key(0), cohort)
    return ClientGradients(result.update.mean, *result.states)


def _add_gradient(
    task: Task, context: Any, variables: Tree, gradient_sum: Tree, batch: Batch
) -> tuple[Tree, jax.Array, Tree]:
    """Add a batch's part of the gradient over a client's data.

    Returns:
      The sum, and the loss and the gradient of the batch.
    """
    fraction = batch.mask.sum() / context.client.num_samples
    loss, gradient, _ = task.loss_and_gradient(variables, batch, None, train=False)
    total = jax.tree.map(lambda total, g: total + fraction * g, gradient_sum, gradient)
    return total, loss, gradient


class _ClientLossState(NamedTuple):
    variables: Tree
    loss: jax.Array
    gradient: Tree


def measure_client_losses(
    task: Task, plan: ExecutionPlan, models: Tree, cohort: Cohort
) -> tuple[jax.Array, Tree]:
    """Compute each client's mean loss over all its data under its own model, and its gradient.

    The networks are in evaluation mode. Cost: one pass over all clients' data; memory of a gradient
    for each client.

    Args:
      task: network, normalization and loss.
      plan: placement of the clients on the devices.
      models: the clients' variables, `[K, ...]`.
      cohort: all clients, each with one pass through its data.

    Returns:
      Losses `[K]` and gradients `[K, ...]`; 0 for clients without data.
    """

    def begin(context, state):
        return jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.gradient), state.variables

    def step(context, local, batch):
        loss_sum, gradients, variables = local
        fraction = batch.mask.sum() / context.client.num_samples
        gradients, loss, _ = _add_gradient(task, context, variables, gradients, batch)
        return (loss_sum + fraction * loss, gradients, variables), loss

    def end(context, local, state):
        return ClientUpdate(), _ClientLossState(state.variables, *local[:2]), ()

    num_clients = len(jax.tree.leaves(models)[0])
    zero_gradient = jax.tree.map(jnp.zeros_like, models["params"])
    states = _ClientLossState(models, jnp.zeros(num_clients), zero_gradient)
    client = ClientAlgorithm(lambda hp, variables: (), begin, step, end, phase=DIAGNOSTICS)
    plan = plan._replace(has_sharded_client_states=False)
    result = train_cohort(client, plan, {}, (), states, make_key(0), cohort)
    return result.states.loss, result.states.gradient
