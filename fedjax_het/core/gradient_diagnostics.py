"""How far the gradients of the server's and of the clients' losses are from that of all data."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from fedjax_het.core.client_algorithm import ClientAlgorithm, ClientUpdate
from fedjax_het.core.client_loop import Cohort, train_cohort
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import ServerMessage
from fedjax_het.core.resumable_loops import DIAGNOSTICS
from fedjax_het.core.server_parallelism import SINGLE_DEVICE
from fedjax_het.core.server_training import compute_gradient_moments, make_shuffled_batches
from fedjax_het.core.task import Task

Tree = Any

# Names of the curves.
GRADIENT_GAP_NAMES = (
    "client_gap",
    "server_gap",
    "gradient_norm",
    "server_norm",
    "client_noise",
    "server_noise",
)


class ClientDiagnostics(NamedTuple):
    """What is measured on all clients' training data every so many rounds, before a round.

    measure(hp, state, cohort) -> a scalar for each of `names`; `cohort` is of all clients, weighted
    by their examples, each going through its data once.
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
    """FSL's Fig. 9: xi^2 = ||grad f_0 - grad F||^2 and G^2 = mean_i ||grad f_i - grad F||^2
    (`server_gap`, `client_gap`); ||grad F||, with which they are DynaFed's Assumption 3, xi <=
    delta ||grad F|| + epsilon; and what else FSL's Theorem 1 is of: ||grad f_0||, and sigma^2 and
    sigma_0^2, the variances of a minibatch's gradient at a client (mean over clients) and at the
    server.

    F weighs clients by their examples; f_0 is the server's loss. Gradients are over all data, of
    the network as it is evaluated (no dropout, kept batch-norm statistics); minibatches are an
    epoch of those that clients train with, and as large ones of the server's examples. Means over
    clients are over those that hold examples; what is the server's is NaN where it has no data, and
    its noise where its data are not examples.

    Args:
      cohort: of all clients, weighted by their examples, each going through its data once.
      of_server: the gradient of f_0 where the server's data are not its examples.
    Cost: one pass over all clients' data; memory of two gradients per lane.
    """
    message = ServerMessage(variables)
    key = jax.random.key(0)  # clients draw nothing
    result = train_cohort(
        _gradient_client(task), plan, {}, message, (), key, cohort, loop_name=DIAGNOSTICS
    )
    num_trained = jnp.maximum(result.num_trained, 1)
    mean_gradient = result.update.mean
    unweighted_mean, mean_squared_norm, mean_squared_batch_norm = (
        total / num_trained for total in result.update.sum
    )
    server_gradient_vector, server_noise = (
        jnp.full_like(mean_gradient, jnp.nan),
        jnp.float32(jnp.nan),
    )
    if server_gradient is not None:
        server_gradient_vector = ravel_pytree(server_gradient(variables))[0]
    elif (examples := cohort.server_examples) is not None:
        batch_size = cohort.schedule.batches.shape[-1]
        batches = make_shuffled_batches(key, len(examples.labels), batch_size)
        gradient, squared_batch_norm = compute_gradient_moments(
            task,
            variables,
            examples,
            batches,
            server_parallelism=SINGLE_DEVICE._replace(loops=cohort.loops),
        )
        server_gradient_vector = ravel_pytree(gradient)[0]
        server_noise = squared_batch_norm - server_gradient_vector @ server_gradient_vector
    return {
        "client_gap": mean_squared_norm
        - 2 * unweighted_mean @ mean_gradient
        + mean_gradient @ mean_gradient,
        "server_gap": jnp.square(server_gradient_vector - mean_gradient).sum(),
        "gradient_norm": jnp.linalg.norm(mean_gradient),
        "server_norm": jnp.linalg.norm(server_gradient_vector),
        "client_noise": mean_squared_batch_norm - mean_squared_norm,
        "server_noise": server_noise,
    }


def _gradient_client(task: Task) -> ClientAlgorithm:
    """A client that stays and sends its gradient: averaged, and added up with its square and with
    those of its minibatches."""

    def begin(context, state):
        return jax.tree.map(jnp.zeros_like, context.message.variables["params"]), jnp.zeros(())

    def step(context, local, batch):
        gradient_sum, squared_batch_norm = local
        fraction = batch.mask.sum() / context.client.num_samples
        loss, gradient, _ = task.loss_and_gradient(
            context.message.variables, batch, None, train=False
        )
        gradient_sum = jax.tree.map(lambda sum_, g: sum_ + fraction * g, gradient_sum, gradient)
        return (
            gradient_sum,
            squared_batch_norm + fraction * optax.tree.norm(gradient, squared=True),
        ), loss

    def end(context, local, state):
        gradient_tree, squared_batch_norm = local
        gradient = ravel_pytree(gradient_tree)[0]
        sums = (gradient, jnp.square(gradient).sum(), squared_batch_norm)
        return ClientUpdate(mean=gradient, sum=sums), (), ()

    return ClientAlgorithm(lambda hp, variables: (), begin, step, end)


def measure_client_losses(
    task: Task, plan: ExecutionPlan, models: Tree, cohort: Cohort
) -> tuple[jax.Array, Tree]:
    """Each client's mean loss `[K]` over all its data under its own model, and the gradients
    `[K, ...]` of these, all of the network as it is evaluated; 0 of clients without data.

    Args:
      models: the clients' variables `[K, ...]`.
      cohort: as in `gradient_gaps`.
    Cost: one pass over all clients' data; memory of a gradient for each client.
    """

    def begin(context, state):
        return jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.gradient), state.variables

    def step(context, local, batch):
        loss_sum, gradients, variables = local
        fraction = batch.mask.sum() / context.client.num_samples
        loss, gradient, _ = task.loss_and_gradient(variables, batch, None, train=False)
        gradients = jax.tree.map(lambda sum_, g: sum_ + fraction * g, gradients, gradient)
        return (loss_sum + fraction * loss, gradients, variables), loss

    def end(context, local, state):
        return ClientUpdate(), _ClientLossState(state.variables, *local[:2]), ()

    num_clients = len(jax.tree.leaves(models)[0])
    zero_gradient = jax.tree.map(jnp.zeros_like, models["params"])
    states = _ClientLossState(models, jnp.zeros(num_clients), zero_gradient)
    client_algorithm = ClientAlgorithm(lambda hp, variables: (), begin, step, end)
    plan = plan.with_replicated_client_states
    client_states = train_cohort(
        client_algorithm, plan, {}, (), states, jax.random.key(0), cohort, loop_name=DIAGNOSTICS
    ).states
    return client_states.loss, client_states.gradient


class _ClientLossState(NamedTuple):
    """What is known of a client's model."""

    variables: Tree
    loss: jax.Array
    gradient: Tree
