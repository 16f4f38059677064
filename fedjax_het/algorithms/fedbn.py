"""FedBN (Li et al., ICLR 2021, arXiv:2102.07623)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.building import federated, num_bytes
from fedjax_het.algorithms.contract import Algorithm, Traffic
from fedjax_het.algorithms.entry import Entry, Rule
from fedjax_het.engine.contract import ClientMethod
from fedjax_het.engine.lanes import client_row
from fedjax_het.engine.local import LocalTraining, local_sgd
from fedjax_het.engine.plan import Plan
from fedjax_het.nn import norms_of, with_norms

Tree = Any


class FedBNClient(NamedTuple):
    """What a client keeps: its normalisation layers' leaves, whether it has taken part yet, and its
    optimiser's state, if kept."""

    norms: tuple[jax.Array, ...]
    trained: jax.Array  # [] int32: 0 or 1
    optimizer: Tree


def fedbn(training: LocalTraining, plan: Plan) -> Algorithm:
    """FedAvg of all variables but those of normalisation layers: scales, shifts and running
    statistics stay with the client, which takes its own back at the start of each of its rounds.

    Which these are is decided by the kind of layer, see `norm_mask`: batch norm, and instance or
    group norm where the network has that. A client's first round starts from the ones received.
    The paper averages with equal weights and has everyone take part; here as the run says. Its
    setting: SGD at 0.01, batches of 32, one local epoch.

    Scored: "personal", the global body with the client's own normalisation, on the client's own
    test, is the paper's. A test of one model for all is not defined there: the global model here is
    the body with the mean of the round's normalisation layers, i.e. FedAvg's at test time ("global"
    and the usual test). Those are means for this test and for clients that have no layers yet; no
    client that has trained reads them. Without normalisation layers this is FedAvg,
    which a run says in a warning.

    Traffic: FedAvg's without the normalisation layers. State: these layers of every client.
    """
    base, model = local_sgd(training), training.task.model

    def own(state: FedBNClient, variables: Tree) -> Tree:
        """These variables with the client's layers, if it has any yet."""
        norms = tuple(
            jnp.where(state.trained > 0, own_norms, received)
            for own_norms, received in zip(state.norms, norms_of(model, variables), strict=True)
        )
        return with_norms(model, variables, norms)

    def init(hp, variables):
        nothing = jax.tree.map(jnp.zeros_like, norms_of(model, variables))
        return FedBNClient(nothing, jnp.int32(0), base.init(hp, variables))

    def begin(hp, broadcast, state, client):
        received = broadcast._replace(variables=own(state, broadcast.variables))
        return base.begin(hp, received, state.optimizer, client)

    def end(hp, broadcast, local, state, client):
        upload, optimizer, output = base.end(hp, broadcast, local, state.optimizer, client)
        kept = FedBNClient(norms_of(model, local.variables), jnp.int32(1), optimizer)
        return upload, kept, output

    def personal(hp, state, k):
        return own(client_row(state.clients, k), state.server.variables)

    def traffic(hp, state):
        variables = state.server.variables
        body = num_bytes(variables) - num_bytes(norms_of(model, variables))
        return Traffic(body, body)

    algorithm = federated(training, plan, ClientMethod(init, begin, base.step, end))
    algorithm = algorithm._replace(traffic=traffic)
    if training.scored == "personal":
        return algorithm._replace(personal=personal, pageable=False)
    return algorithm


ENTRY = Entry(
    "fedbn",
    fedbn,
    "FedAvg of all but normalisation layers, which clients keep (Li et al., 2021)",
    paper="Li et al., ICLR 2021, arXiv:2102.07623",
    rules=(
        # Its own tests are for the client's own layers, wherever clients are tested.
        Rule(settings={"scored": "personal"}),
        # There each client is a domain: "personal" is each client's own model on its own domain.
        Rule(("fedaf", "feddm"), ("domainnet",), settings={"local_tests": True}),
    ),
    colour="#2C7FB8",
    dashes=(0, (1.5, 1)),
    needs=("norms",),
    scored=("global", "personal"),
)
