"""How far the gradients of the server's and of the clients' losses are from that of all data."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedjax_het.engine.contract import ClientMethod, Upload
from fedjax_het.engine.lanes import Cohort, train_cohort
from fedjax_het.engine.local import Broadcast
from fedjax_het.engine.plan import Plan
from fedjax_het.engine.server import mean_gradient
from fedjax_het.engine.task import Task

Tree = Any

GAPS = ("client_gap", "server_gap")  # names of the curves


def gradient_gaps(task: Task, plan: Plan, variables: Tree, cohort: Cohort) -> dict[str, jax.Array]:
    """FSL's Fig. 9: xi^2 = ||grad f_0 - grad F||^2 and G^2 = mean_i ||grad f_i - grad F||^2.

    F weighs clients by their examples; f_0 is the server's loss. Gradients are over all data, of
    the network as it is evaluated (no dropout, kept batch-norm statistics). G^2 is the mean over
    clients that hold examples; xi^2 is NaN where the server has none.

    Args:
      cohort: of all clients, weighted by their examples, each going through its data once.
    Cost: one pass over all clients' data; memory of two gradients per lane.
    """
    broadcast = Broadcast(variables)
    key = jax.random.key(0)  # nothing is drawn
    result = train_cohort(_measuring(task), plan, {}, broadcast, (), key, cohort)
    present = jnp.maximum(result.num_trained, 1)
    whole = result.upload.mean
    mean, square = (total / present for total in result.upload.sum)
    to_server = jnp.float32(jnp.nan)
    if cohort.server is not None:
        own = ravel_pytree(mean_gradient(task, variables, cohort.server, batch_size=64))[0]
        to_server = jnp.square(own - whole).sum()
    return {
        "client_gap": square - 2 * mean @ whole + whole @ whole,
        "server_gap": to_server,
    }


def _measuring(task: Task) -> ClientMethod:
    """A client that stays and sends its gradient: averaged, and added up with its square."""

    def begin(hp, broadcast, state, client):
        return jax.tree.map(jnp.zeros_like, broadcast.variables["params"])

    def step(hp, broadcast, local, batch, client, key):
        share = batch.mask.sum() / client.num_samples
        loss, gradient, _ = task.loss_and_gradient(broadcast.variables, batch, None, train=False)
        return jax.tree.map(lambda total, g: total + share * g, local, gradient), loss

    def end(hp, broadcast, local, state, client):
        gradient = ravel_pytree(local)[0]
        return Upload(mean=gradient, sum=(gradient, jnp.square(gradient).sum())), (), ()

    return ClientMethod(lambda hp, variables: (), begin, step, end)
