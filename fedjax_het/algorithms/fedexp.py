"""FedExP (Jhunjhunwala, Wang and Joshi, ICLR 2023, arXiv:2301.09604)."""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm, State
from fedjax_het.algorithms.builders import add_scaled_variables, build_federated_algorithm
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_algorithm import ClientUpdate
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, ServerMessage, make_local_sgd
from fedjax_het.utils.config import Config, PositiveFloat, SearchRange

Tree = Any


@dataclass(frozen=True)
class FedExPOptions(Config):
    """Choices of FedExP."""

    average_iterates: bool = True
    "Whether the evaluated model is the mean of the global models of the last two rounds."


@dataclass(frozen=True)
class FedExPHyperParameters(Config):
    """Hyperparameters of FedExP."""

    fedexp_epsilon: Annotated[PositiveFloat, SearchRange(0.0001, 0.1)] = 1e-3
    """Number added to the squared norm of the clients' mean change. A smaller number extrapolates
    more: the server's step is longer than the mean change."""


class FedExPServerState(NamedTuple):
    """State of the server."""

    variables: Tree
    "Variables of the global model, which clients receive."
    previous: Tree
    "Variables of the global model of the round before; `()` without the averaging of iterates."
    extrapolation: jax.Array
    "`[]` float32: eta of the last round in which clients trained; 0 before the first."


class FedExPUpdate(NamedTuple):
    """Upload of a client, averaged over the round's clients."""

    change: Tree
    "Change of the client's variables."
    squared_norm: jax.Array
    "`[]` float32: squared L2 norm of the change of the parameters."


def fedexp(training: LocalTraining, plan: ExecutionPlan, *, options: FedExPOptions) -> Algorithm:
    """FedExP: the server extrapolates along the mean change if clients disagree (Algorithm 1).

        D_k = w_k - w,  D = sum_k p_k D_k,
        eta = max(1, sum_k p_k ||D_k||^2 / (2 (||D||^2 + fedexp_epsilon))),
        w <- w + server_lr eta D.

    p_k are the weights of the run's `averaging`. With uniform weights 1 / M over the M clients of a
    round this is the paper's rule, which divides a sum by 2 M. The weighted form is the form of the
    public codes. eta lies between 1 and half the ratio of the mean squared norm to the squared norm
    of the mean. A round with one client has eta 1. A large fedexp_epsilon gives FedAvg.

    server_lr multiplies eta; the paper has no such factor, which is 1 by default. Norms are over
    all parameters. Batch-norm statistics are averaged with rate 1 as in FedAvg.

    average_iterates: evaluate the mean of the last two global models, as the paper does since the
      last model oscillates. The mean after the first round is its model, as in the paper's code.
      Clients still start from the last model. A step of the server over this method moves both
      models by the change of their mean. `update_norm` is of the last model.

    The record `extrapolation` has eta of each round. fedexp_epsilon 1e-3 is the paper's value for
    CIFAR-10; its EMNIST runs have 0.1.

    Departures: the paper's code (Divyansh03/FedExP) multiplies epsilon by the number of the round's
    clients and decays it by 0.998^2 per round. Here epsilon is constant, as in Algorithm 1.

    Traffic: one model down, one and a number up. State: one more model on the server with
    average_iterates. Cost: FedAvg's.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      options: choices of the method.

    Returns:
      The method.
    """
    base = make_local_sgd(training)

    def end(context, local, state):
        update, state, output = base.end(context, local, state)
        squared_norm = optax.tree.norm(update.mean["params"], squared=True)
        return ClientUpdate(FedExPUpdate(update.mean, squared_norm)), state, output

    def init_server(hp, variables):
        previous = variables if options.average_iterates else ()
        return FedExPServerState(variables, previous, jnp.zeros(()))

    def update_server(hp, server, client_update, counts):
        change, mean_square = client_update.mean
        square_of_mean = optax.tree.norm(change["params"], squared=True)
        ratio = mean_square / (2 * (square_of_mean + hp["fedexp_epsilon"]))
        eta = jnp.maximum(1, ratio).astype(server.extrapolation.dtype)
        variables = add_scaled_variables(server.variables, hp["server_lr"] * eta, change)
        previous = ()
        if options.average_iterates:  # the initial model is no iterate
            is_first = server.extrapolation == 0
            select = lambda new, old: jnp.where(is_first, new, old)  # noqa: E731
            previous = jax.tree.map(select, variables, server.variables)
        new_server = FedExPServerState(variables, previous, eta)
        has_trained = counts.num_trained > 0
        return jax.tree.map(lambda new, old: jnp.where(has_trained, new, old), new_server, server)

    algorithm = build_federated_algorithm(
        training,
        plan,
        base._replace(end=end),
        init_server=init_server,
        update=update_server,
        make_message=lambda server, cohort: ServerMessage(server.variables),
    )
    run_round = algorithm.round

    def round_(hp, state, key, cohort):
        new_state, info = run_round(hp, state, key, cohort)
        return new_state, info._replace(records={"extrapolation": new_state.server.extrapolation})

    algorithm = algorithm._replace(
        round=round_, record_shapes=lambda num_clients: {"extrapolation": ()}
    )
    if not options.average_iterates:
        return algorithm
    return algorithm._replace(global_model=_get_mean_iterate, with_global_model=_with_mean_iterate)


def _get_mean_iterate(state: State) -> Tree:
    """Return the mean of the last two global models."""
    server = state.server
    return jax.tree.map(lambda w, v: (w + v) / 2, server.variables, server.previous)


def _with_mean_iterate(state: State, variables: Tree) -> State:
    """Return the state with another mean of the last two models and with their difference."""
    server = state.server
    half = jax.tree.map(lambda w, v: (w - v) / 2, server.variables, server.previous)
    last, previous = (jax.tree.map(op, variables, half) for op in (jnp.add, jnp.subtract))
    return state._replace(server=server._replace(variables=last, previous=previous))


SPEC = AlgorithmSpec(
    "fedexp",
    fedexp,
    "FedAvg with an adaptive step of the server (Jhunjhunwala et al., 2023)",
    title="FedExP",
    paper="Jhunjhunwala, Wang and Joshi, ICLR 2023, arXiv:2301.09604",
    options=FedExPOptions,
    hyperparameters=FedExPHyperParameters,
    color="#1B9E77",
    server_step="own",
    wrappable_as="model",
    evaluated_models=("global", "client"),
)
