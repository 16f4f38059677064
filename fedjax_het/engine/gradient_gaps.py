"""How far the gradients of the server's and of the clients' losses are from that of all data."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from fedjax_het.engine.contract import ClientMethod, Upload
from fedjax_het.engine.lanes import Cohort, train_cohort
from fedjax_het.engine.local import Broadcast
from fedjax_het.engine.plan import Plan
from fedjax_het.engine.server import gradient_moments, shuffled
from fedjax_het.engine.stretches import SURVEY
from fedjax_het.engine.task import Task

Tree = Any

# Names of the curves.
GAPS = (
    "client_gap",
    "server_gap",
    "gradient_norm",
    "server_norm",
    "client_noise",
    "server_noise",
)


class Survey(NamedTuple):
    """What is measured on all clients' training data every so many rounds, before a round.

    measure(hp, state, cohort) -> a scalar for each of `names`; `cohort` is of all clients, weighted
    by their examples, each going through its data once.
    """

    names: tuple[str, ...]
    measure: Callable[..., dict[str, jax.Array]]


def gradient_gaps(
    task: Task,
    plan: Plan,
    variables: Tree,
    cohort: Cohort,
    of_server: Callable[[Tree], Tree] | None = None,
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
    broadcast = Broadcast(variables)
    key = jax.random.key(0)  # clients draw nothing
    result = train_cohort(_measuring(task), plan, {}, broadcast, (), key, cohort, name=SURVEY)
    present = jnp.maximum(result.num_trained, 1)
    whole = result.upload.mean
    mean, square, squares_of_batches = (total / present for total in result.upload.sum)
    own, noise = jnp.full_like(whole, jnp.nan), jnp.float32(jnp.nan)
    if of_server is not None:
        own = ravel_pytree(of_server(variables))[0]
    elif (examples := cohort.server) is not None:
        size = cohort.schedule.batches.shape[-1]
        batches = shuffled(key, len(examples.labels), size)
        gradient, of_batches = gradient_moments(task, variables, examples, batches)
        own = ravel_pytree(gradient)[0]
        noise = of_batches - own @ own
    return {
        "client_gap": square - 2 * mean @ whole + whole @ whole,
        "server_gap": jnp.square(own - whole).sum(),
        "gradient_norm": jnp.linalg.norm(whole),
        "server_norm": jnp.linalg.norm(own),
        "client_noise": squares_of_batches - square,
        "server_noise": noise,
    }


def _measuring(task: Task) -> ClientMethod:
    """A client that stays and sends its gradient: averaged, and added up with its square and with
    those of its minibatches."""

    def begin(hp, broadcast, state, client):
        return jax.tree.map(jnp.zeros_like, broadcast.variables["params"]), jnp.zeros(())

    def step(hp, broadcast, local, batch, client, key):
        total, square = local
        share = batch.mask.sum() / client.num_samples
        loss, gradient, _ = task.loss_and_gradient(broadcast.variables, batch, None, train=False)
        total = jax.tree.map(lambda sum_, g: sum_ + share * g, total, gradient)
        return (total, square + share * optax.tree.norm(gradient, squared=True)), loss

    def end(hp, broadcast, local, state, client):
        total, of_batches = local
        gradient = ravel_pytree(total)[0]
        sums = (gradient, jnp.square(gradient).sum(), of_batches)
        return Upload(mean=gradient, sum=sums), (), ()

    return ClientMethod(lambda hp, variables: (), begin, step, end)


def own_losses(task: Task, plan: Plan, models: Tree, cohort: Cohort) -> tuple[jax.Array, Tree]:
    """Each client's mean loss `[K]` over all its data under its own model, and the gradients
    `[K, ...]` of these, all of the network as it is evaluated; 0 of clients without data.

    Args:
      models: the clients' variables `[K, ...]`.
      cohort: as in `gradient_gaps`.
    Cost: one pass over all clients' data; memory of a gradient for each client.
    """

    def begin(hp, broadcast, state, client):
        return jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.gradient), state.variables

    def step(hp, broadcast, local, batch, client, key):
        total, gradients, variables = local
        share = batch.mask.sum() / client.num_samples
        loss, gradient, _ = task.loss_and_gradient(variables, batch, None, train=False)
        gradients = jax.tree.map(lambda sum_, g: sum_ + share * g, gradients, gradient)
        return (total + share * loss, gradients, variables), loss

    def end(hp, broadcast, local, state, client):
        return Upload(), _Own(state.variables, *local[:2]), ()

    num_clients = len(jax.tree.leaves(models)[0])
    blank = jax.tree.map(jnp.zeros_like, models["params"])
    states = _Own(models, jnp.zeros(num_clients), blank)
    method = ClientMethod(lambda hp, variables: (), begin, step, end)
    plan = plan.holds_all_clients
    found = train_cohort(
        method, plan, {}, (), states, jax.random.key(0), cohort, name=SURVEY
    ).states
    return found.loss, found.gradient


class _Own(NamedTuple):
    """What is known of a client's model."""

    variables: Tree
    loss: jax.Array
    gradient: Tree
