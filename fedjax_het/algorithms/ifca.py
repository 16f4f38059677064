"""IFCA (Ghosh, Chung, Yin and Ramchandran, NeurIPS 2020, arXiv:2006.04088)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm, Traffic
from fedjax_het.algorithms.builders import build_federated_algorithm, num_bytes
from fedjax_het.algorithms.client_state import with_client_memory
from fedjax_het.algorithms.measuring_passes import compute_batch_weight, with_measuring_passes
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_algorithm import ClientUpdate
from fedjax_het.core.client_rows import get_client_row, tile_over_clients
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import (
    LocalTraining,
    ServerMessage,
    begin_local_training,
    make_local_sgd,
)
from fedjax_het.utils.config import Config, PositiveInt

Tree = Any
_NOT_TRAINED = -1


@dataclass(frozen=True)
class IFCAOptions(Config):
    """Choices of IFCA."""

    num_clusters: PositiveInt = 4
    "Number of clusters, each with a model at the server; 1 is FedAvg."


class IFCAServerState(NamedTuple):
    """State of the server."""

    variables: Tree
    "Variables of the models of the clusters, `[J, ...]`."
    cluster_sizes: jax.Array
    "`[J]` float32: clients that trained each model in the last round in which clients trained."


class IFCAUpdate(NamedTuple):
    """Upload of a client in arrays for all clusters, averaged over the round's clients."""

    change: Tree
    "`[J, ...]`: change of the variables in the row of the client's cluster, zeros in others."
    weight: jax.Array
    "`[J]` float32: 1 for the client's cluster, 0 for others."


def ifca(training: LocalTraining, plan: ExecutionPlan, *, options: IFCAOptions) -> Algorithm:
    """IFCA: each client trains the one of J models that fits its data best (Algorithm 1).

        c_k = argmin_j F_k(w_j),
        w_j <- w_j + sum_(k: c_k = j) p_k (w_k - w_j) / sum_(k: c_k = j) p_k,

    with w_k from local training started at w_(c_k). F_k(w_j) is the mean loss over the client's
    training data in evaluation mode. It is measured for all J models in a pass before local
    training. This is the paper's variant with model averaging. A model that no client chooses stays
    as it is. p_k are the weights of the run's `averaging`, uniform in the paper. The models start
    at different random weights, the first one at the weights that other methods start from. With
    one cluster this is FedAvg.

    The number of clusters is `num_clusters`; 4 is the paper's number for rotated MNIST. Batch-norm
    statistics are averaged within the clusters like weights. The reported training loss includes
    the measuring pass, with the smallest of the J losses of each minibatch.

    Evaluated: the model w_j of the cluster that the client chose in its last round, as it is after
    the current round. A client that has never trained has the first model. There is no global
    model. `clusters` of the result's artifacts has the choice of every client, -1 before its first
    round. The record `cluster_sizes` has the number of clients that trained each model in a round.

    Traffic: J models down, one and a number up. State: J models on the server. Cost: FedAvg's, a
    measuring pass and J forward passes in every step, since lanes in different phases run in step.

    Departures: the paper's code evaluates each test client with the model of the smallest loss on
    its test data. Here no test data enter the choice. The variants with averages of gradients and
    with layers that all clusters share are left out.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      options: choices of the method.

    Returns:
      The method, which has no global model.
    """
    base, task, num_clusters = make_local_sgd(training), training.task, options.num_clusters

    def begin(context, optimizer_state):
        first = get_client_row(context.message.variables, 0)
        return begin_local_training(training, context.hp, first, optimizer_state)

    def measure(context, local, batch):
        def compute_loss(variables):
            return task.loss_and_gradient(variables, batch, None, train=False)[0]

        losses = jax.vmap(compute_loss)(context.message.variables)
        weight = compute_batch_weight(batch, context.client)
        return (local.aux + weight * losses).astype(local.aux.dtype), losses.min()

    def get_chosen_model(context, local):
        return get_client_row(context.message.variables, local.aux.argmin())

    def step(context, local, batch):
        is_first = batch.step_index == 0
        variables = jax.tree.map(
            lambda chosen, current: jnp.where(is_first, chosen, current),
            get_chosen_model(context, local),
            local.variables,
        )
        return base.step(context, local._replace(variables=variables), batch)

    def end(context, local, optimizer_state):
        received = ServerMessage(get_chosen_model(context, local))
        update, state, output = base.end(context._replace(message=received), local, optimizer_state)
        is_chosen = jnp.arange(num_clusters) == local.aux.argmin()
        weight = is_chosen.astype(jnp.float32)
        change = jax.tree.map(lambda d: jnp.where(_align(is_chosen, d), d, 0), update.mean)
        return ClientUpdate(IFCAUpdate(change, weight), sum=weight), state, output

    def init_server(hp, variables):
        return IFCAServerState(tile_over_clients(variables, num_clusters), jnp.zeros(num_clusters))

    def update_server(hp, server, client_update, counts):
        change, weight = client_update.mean
        divisor = jnp.where(weight > 0, weight, 1)
        variables = jax.tree.map(
            lambda w, d: w + d / _align(divisor, d[0]), server.variables, change
        )
        has_trained = counts.num_trained > 0
        sizes = jnp.where(has_trained, client_update.sum, server.cluster_sizes)
        return IFCAServerState(variables, sizes)

    client = with_client_memory(
        base._replace(begin=begin, step=step, end=end),
        init=lambda hp, variables: jnp.int32(_NOT_TRAINED),
        begin=lambda context, cluster: jnp.zeros(num_clusters),
        end=lambda context, local, cluster, update: (update, local.aux.argmin().astype(jnp.int32)),
    )
    algorithm = build_federated_algorithm(
        # Clients send one of several models.
        training.with_plain_uploads(),
        plan,
        with_measuring_passes(client, training, measure, num_before=1),
        init_server=init_server,
        update=update_server,
        make_message=lambda server, cohort: ServerMessage(server.variables),
    )
    init_state, run_round = algorithm.init, algorithm.round

    def init(hp, key, variables, num_clients):
        state = init_state(hp, key, variables, num_clients)
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(1, num_clusters))
        others = jax.vmap(task.model.init)(keys)
        stacked = jax.tree.map(lambda w, rest: jnp.concatenate([w[None], rest]), variables, others)
        return state._replace(server=state.server._replace(variables=stacked))

    def round_(hp, state, key, cohort):
        new_state, info = run_round(hp, state, key, cohort)
        return new_state, info._replace(records={"cluster_sizes": new_state.server.cluster_sizes})

    def get_cluster_model(hp, state, k):
        cluster = get_client_row(state.clients.memory, k)
        return get_client_row(state.server.variables, jnp.maximum(cluster, 0))

    def traffic(hp, state):
        size = num_bytes(state.server.variables)
        return Traffic(size, size // num_clusters + 4)

    return algorithm._replace(
        init=init,
        round=round_,
        global_model=None,
        with_global_model=None,
        traffic=traffic,
        personal_variables=get_cluster_model,
        record_shapes=lambda num_clients: {"cluster_sizes": (num_clusters,)},
        artifacts=lambda state: {"clusters": state.clients.memory},
    )


def _align(values: jax.Array, leaf: jax.Array) -> jax.Array:
    """Return values `[J]` as `[J, 1, ...]`, to broadcast with a leaf of one model."""
    return values.reshape(-1, *[1] * leaf.ndim)


def _settings_warnings(run: Any, algorithm_spec: AlgorithmSpec) -> Sequence[str]:
    """Return a warning of clusters that no client can train."""
    num_clusters, num_clients = run.options["num_clusters"], run.num_clients
    if num_clusters <= num_clients:
        return []
    return [
        f"num_clusters = {num_clusters} exceeds num_clients = {num_clients}: at least "
        f"{num_clusters - num_clients} models train in no round"
    ]


SPEC = AlgorithmSpec(
    "ifca",
    ifca,
    "each client trains the one of several models that fits it best (Ghosh et al., 2020)",
    title="IFCA",
    paper="Ghosh, Chung, Yin and Ramchandran, NeurIPS 2020, arXiv:2006.04088",
    options=IFCAOptions,
    color="#DD3497",
    has_global_model=False,
    evaluated_models=("personal",),
    settings_warnings=_settings_warnings,
)
