"""FedBN (Li et al., ICLR 2021, arXiv:2102.07623)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import build_federated_algorithm
from fedjax_het.algorithms.local_parameters import split_parameters
from fedjax_het.algorithms.spec import AlgorithmSpec, DefaultsRule
from fedjax_het.core.client_algorithm import ClientAlgorithm
from fedjax_het.core.client_rows import get_client_row
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, make_local_sgd
from fedjax_het.nn import get_norm_variables

Tree = Any


class FedBNClientState(NamedTuple):
    """State of a client: its normalization layers."""

    norms: tuple[jax.Array, ...]
    "Scales, shifts and running statistics of all normalization layers."
    has_trained: jax.Array
    "`[]` int32: 1 if the client has trained, else 0."
    optimizer: Tree
    "State of the local optimizer, if the run keeps it; else `()`."


def fedbn(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
    """FedBN: FedAvg of all variables except the variables of normalization layers (Algorithm 1).

        theta  <- theta + server_lr sum_k p_k (theta_k - theta)   all other weights
        beta_k stays with client k                                scales, shifts, statistics

    A client starts each of its rounds from theta and its own beta_k, and its first round from the
    received layers. The kind of a layer decides whether it is a normalization layer: batch,
    instance or group norm, see `get_norm_variables`. Without normalization layers this is FedAvg,
    and a run logs a warning.

    Evaluated: "personal", the global body with the client's own normalization on the client's own
    test, is the paper's evaluation. The paper defines no test of a global model. The global model
    here is the body with the mean of the round's normalization layers, which equals FedAvg's model.
    Only this test and clients that have not trained read those means.

    Traffic: one model without normalization layers each way. State: these layers of every client.
    Cost: FedAvg's.

    Departure from the paper: the run sets weights and participation; the paper averages all clients
    with equal weights. The paper trains by SGD at 0.01 with batches of 32 and one local epoch.

    Args:
      training: the choices of local training.
      plan: where the clients run.

    Returns:
      The method.
    """
    base = make_local_sgd(training)
    split = split_parameters(training.task.model, get_norm_variables, allows_empty=True)

    def personalize(state: FedBNClientState, variables: Tree) -> Tree:
        """Return the variables with the client's layers, if the client has trained."""
        pairs = zip(state.norms, split.get_local(variables), strict=True)
        norms = tuple(jnp.where(state.has_trained > 0, own, received) for own, received in pairs)
        return split.join(split.drop_local(variables), norms)

    def init(hp, variables):
        zeros = jax.tree.map(jnp.zeros_like, split.get_local(variables))
        return FedBNClientState(zeros, jnp.int32(0), base.init(hp, variables))

    def begin(context, state):
        variables = personalize(state, context.message.variables)
        message = context.message._replace(variables=variables)
        return base.begin(context._replace(message=message), state.optimizer)

    def end(context, local, state):
        update, optimizer, output = base.end(context, local, state.optimizer)
        norms = split.get_local(local.variables)
        return update, FedBNClientState(norms, jnp.int32(1), optimizer), output

    def personal_variables(hp, state, k):
        return personalize(get_client_row(state.clients, k), state.server.variables)

    client = ClientAlgorithm(init, begin, base.step, end)
    algorithm = build_federated_algorithm(training, plan, client, unsent=split)
    if training.evaluated_model == "personal":
        return algorithm._replace(personal_variables=personal_variables, can_page_state=False)
    return algorithm


SPEC = AlgorithmSpec(
    "fedbn",
    fedbn,
    "FedAvg of all layers except normalization, which clients keep (Li et al., 2021)",
    title="FedBN",
    paper="Li et al., ICLR 2021, arXiv:2102.07623",
    rules=(
        # A client's own test evaluates the client's own layers.
        DefaultsRule(settings={"client_test_model": "personal"}),
        # Each client is a domain there: "personal" is each client's own model on its own domain.
        DefaultsRule(("fedaf", "feddm"), ("domainnet",), settings={"client_tests": True}),
    ),
    color="#2C7FB8",
    dashes=(0, (1.5, 1)),
    required_data=("norms",),
    evaluated_models=("global", "personal"),
)
