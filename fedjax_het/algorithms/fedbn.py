"""FedBN (Li et al., ICLR 2021, arXiv:2102.07623)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm, Traffic
from fedjax_het.algorithms.builders import build_federated_algorithm, num_bytes
from fedjax_het.algorithms.spec import AlgorithmSpec, DefaultsRule
from fedjax_het.core.client_algorithm import ClientAlgorithm
from fedjax_het.core.device_exchange import get_client_row
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, make_local_sgd
from fedjax_het.nn import get_norm_variables, replace_norm_variables

Tree = Any


class FedBNClientState(NamedTuple):
    """What a client keeps: its normalisation layers' leaves, whether it has taken part yet, and its
    optimiser's state, if kept."""

    norms: tuple[jax.Array, ...]
    has_trained: jax.Array  # [] int32: 0 or 1
    optimizer: Tree


def fedbn(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
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
    base, model = make_local_sgd(training), training.task.model

    def personalize(state: FedBNClientState, variables: Tree) -> Tree:
        """These variables with the client's layers, if it has any yet."""
        norms = tuple(
            jnp.where(state.has_trained > 0, client_norm, received)
            for client_norm, received in zip(
                state.norms, get_norm_variables(model, variables), strict=True
            )
        )
        return replace_norm_variables(model, variables, norms)

    def init(hp, variables):
        zeros = jax.tree.map(jnp.zeros_like, get_norm_variables(model, variables))
        return FedBNClientState(zeros, jnp.int32(0), base.init(hp, variables))

    def begin(context, state):
        personal_message = context.message._replace(
            variables=personalize(state, context.message.variables)
        )
        return base.begin(context._replace(message=personal_message), state.optimizer)

    def end(context, local, state):
        client_update, optimizer, output = base.end(context, local, state.optimizer)
        client_state = FedBNClientState(
            get_norm_variables(model, local.variables), jnp.int32(1), optimizer
        )
        return client_update, client_state, output

    def get_personal_variables(hp, state, k):
        return personalize(get_client_row(state.clients, k), state.server.variables)

    def traffic(hp, state):
        variables = state.server.variables
        body_bytes = num_bytes(variables) - num_bytes(get_norm_variables(model, variables))
        return Traffic(body_bytes, body_bytes)

    algorithm = build_federated_algorithm(
        training, plan, ClientAlgorithm(init, begin, base.step, end)
    )
    algorithm = algorithm._replace(traffic=traffic)
    if training.evaluated_model == "personal":
        return algorithm._replace(personal_variables=get_personal_variables, can_page_state=False)
    return algorithm


SPEC = AlgorithmSpec(
    "fedbn",
    fedbn,
    "FedAvg of all but normalisation layers, which clients keep (Li et al., 2021)",
    paper="Li et al., ICLR 2021, arXiv:2102.07623",
    rules=(
        # Its own tests are for the client's own layers, wherever clients are tested.
        DefaultsRule(settings={"scored": "personal"}),
        # There each client is a domain: "personal" is each client's own model on its own domain.
        DefaultsRule(("fedaf", "feddm"), ("domainnet",), settings={"local_tests": True}),
    ),
    color="#2C7FB8",
    dashes=(0, (1.5, 1)),
    required_data=("norms",),
    evaluated_models=("global", "personal"),
)
