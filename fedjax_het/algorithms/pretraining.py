"""Pretraining: the server's model learns from the server's own examples before the first round."""

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.contract import Algorithm, HostWork, global_model_of
from fedjax_het.algorithms.refined import RefinedServer, refined, unrefined
from fedjax_het.common.records import Bounds, Number
from fedjax_het.engine.lanes import Examples
from fedjax_het.engine.local import LocalTraining
from fedjax_het.engine.plan import Plan
from fedjax_het.engine.server import train_on_server
from fedjax_het.engine.sharing import Sharing

PRETRAINING_NUMBERS = {"pretrain_lr": Number(0.01, Bounds(0))}


def pretrained(
    algorithm: Algorithm, training: LocalTraining, plan: Plan, epochs: int, num_clients: int
) -> Algorithm:
    """`algorithm`, whose first model has seen the server's examples for `epochs` epochs.

    SGD at `pretrain_lr` in batches of local training's size (FSL, section IV-B: 500 epochs at
    0.01). The method then begins as if that were the first draw of its network: what clients or the
    server derive from the first model is derived from it.
    Cost: epochs * ceil(n_0 / batch_size) steps, once; shown and resumed like rounds.
    """

    model_of, with_model_of = global_model_of(algorithm)

    def learn(sharing: Sharing, start, examples, key, lr, count, done):
        return train_on_server(
            training.task,
            start,
            examples,
            key,
            batch_size=training.batch_size,
            lr=lr,
            epochs=count,
            first_epoch=done,
            sharing=sharing,
        )

    def advance(hp, state, key, count, server: Examples | None):
        assert server is not None  # a run that pretrains has a server with examples
        done = state.server.own
        start = model_of(unrefined(state))
        variables = plan.shared(learn, start, server, key, hp["pretrain_lr"], count, done)
        states = jax.tree.leaves(state.clients)  # of all clients, or of those that are here
        count_here = states[0].shape[0] if states else num_clients
        begun = algorithm.init(hp, key, variables, count_here)
        moved = with_model_of(unrefined(state), variables)
        inner = jax.tree.map(
            lambda a, b: jnp.where(done + count == epochs, a, b).astype(b.dtype), begun, moved
        )
        return inner._replace(server=RefinedServer(inner.server, done + count))

    whole = refined(
        algorithm,
        lambda hp, own, this_round: (this_round.after, own),
        init=lambda hp, key, variables: jnp.int32(0),
        server_batch=training.batch_size,
    )
    work = HostWork(
        "pretraining",
        before_round=0,
        total=epochs,
        done=lambda state: int(state.server.own),
        advance=advance,
    )
    return whole._replace(host_work=(work, *whole.host_work))
