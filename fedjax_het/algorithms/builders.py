"""`build_federated_algorithm`: clients train, and the server combines their updates.

`algorithms.server_step` adds work at the server to a method. `algorithms.client_state` has parts of
methods whose clients store models or gradients.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm, RoundInfo, State, Traffic
from fedjax_het.algorithms.compressed_uploads import with_compressed_change
from fedjax_het.algorithms.local_parameters import (
    ParameterSplit,
    get_personal_variables,
    split_parameters,
    with_local_parameters,
)
from fedjax_het.algorithms.private_updates import (
    add_private_noise,
    get_client_level,
    with_private_change,
)
from fedjax_het.algorithms.received_updates import combine_received, with_sent_change
from fedjax_het.algorithms.sent_changes import select_sent_params
from fedjax_het.core.client_algorithm import (
    ClientAlgorithm,
    ClientContext,
    ClientInfo,
    ClientUpdate,
    HyperParameters,
)
from fedjax_het.core.client_loop import Cohort, train_cohort
from fedjax_het.core.client_rows import get_client_row, tile_over_clients
from fedjax_het.core.contract_checks import (
    ContractError,
    call_user_function,
    describe_value,
    require_arrays,
    require_like,
    with_contract_checks,
)
from fedjax_het.core.drift import split_drift, with_drift_sums
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, ServerMessage
from fedjax_het.core.private_gradients import PrivateStep
from fedjax_het.privacy import ExampleLevel
from fedjax_het.utils.arrays import AnyArray, make_key
from fedjax_het.utils.arrays import num_bytes as num_bytes

Tree = Any


class CohortCounts(NamedTuple):
    """Numbers of clients in a round.

    Example:
      >>> from fedjax_het.methods import CohortCounts
      >>> CohortCounts(num_clients=10, num_trained=4, cohort_weight_share=0.4).num_trained
      4
    """

    num_clients: AnyArray
    "`[]` int32: clients of the federation, K."
    num_trained: AnyArray
    "`[]` int32: clients of the round that hold data and have trained."
    cohort_weight_share: AnyArray
    """`[]` float32: share of the round's clients in the weight of all K clients, by the run's
    `averaging`. Its product with a round's mean is the round's part of the mean over all clients:
    share * mean = sum_i p_i x_i over the round's clients i."""


class EvaluatedClientState(NamedTuple):
    """State of a client whose model after local training is evaluated."""

    inner: Tree
    "State of the method's own client algorithm."
    variables: Tree
    "Variables of the client's model after its last local training."


def build_federated_algorithm(
    training: LocalTraining,
    plan: ExecutionPlan,
    client_algorithm: ClientAlgorithm,
    *,
    init_server: Callable[[HyperParameters, Tree], Any] = lambda hp, variables: ServerMessage(
        variables
    ),
    update: Callable[
        [HyperParameters, Any, ClientUpdate, CohortCounts], Any
    ] = lambda hp, server, client_update, counts: add_mean_change(hp, server, client_update.mean),
    make_message: Callable[[Any, Cohort], Any] = lambda server, cohort: server,
    unsent: ParameterSplit | None = None,
) -> Algorithm:
    """Return a method whose clients train locally and whose server combines their updates.

    With `training.evaluated_model` "client" every client stores its model after local training, and
    its own test is made with that model: one more model per client. With
    `training.returns_client_models` a round returns the models of its S clients after local
    training, on every device: memory of up to 2 S models.

    With `training.compressor` the change of the parameters in `ClientUpdate.mean` is compressed,
    unless a round returns the clients' models. All other parts of the upload stay as they are.

    With `training.attacks` and `training.aggregations` the server combines the changes of the
    parameters by these attacks and rules, unless a round returns the clients' models. Memory: the
    changes of S clients on every device.

    With `training.privacy` clients send the clipped change of the parameters and nothing else, and
    the server adds noise. `counts` then contain the expected number of clients, which does not
    depend on the clients.

    With `training.local_parameters` (see `AlgorithmSpec.local_parameters`) the server's state, the
    messages and the uploads contain no local parameters. `init_server` receives the initial
    variables with None in their place. The functions of `client_algorithm` see messages with the
    client's own parameters, and return changes of all variables.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      client_algorithm: how a client trains.
      init_server: `init_server(hp, variables) -> server`: the server's state before the first
        round, a `ServerMessage` or any record whose `variables` are the global model.
      update: `update(hp, server, client_update, counts) -> server`: the server's state after a
        round, with unchanged structure, shapes and types. Default: FedAvg's, which adds `server_lr`
        times `client_update.mean`.
      make_message: `make_message(server, cohort) -> message`: message to the clients, a record with
        `variables`. Default: the server's state. Its bytes are the traffic down, without the
        entries of `cohort.inputs`. A message that depends on the cohort's schedule requires
        `algorithm._replace(traffic=...)`; else the server's state is counted.
      unsent: places of variables that messages and updates contain although nobody sends them, such
        as a constant head. The traffic does not count them. Not with `training.local_parameters`.

    Returns:
      The method. A method changes single fields with `algorithm._replace(...)`.

    Raises:
      ContractError: if a function breaks the contract; some functions are only called, and so
        checked, when a round is traced.

    Example:
      >>> from fedjax_het import register_method
      >>> from fedjax_het.methods import build_federated_algorithm, make_local_sgd
      >>> def build_average(training, plan):
      ...     return build_federated_algorithm(training, plan, make_local_sgd(training))
      >>> register_method("average", build_average).name
      'average'
    """
    if not isinstance(client_algorithm, ClientAlgorithm):
        kind = describe_value(client_algorithm)
        raise ContractError(f"client is {kind}: expected a ClientAlgorithm")
    client = with_contract_checks(client_algorithm)
    evaluates_client_model = training.evaluated_model == "client"
    if evaluates_client_model:
        client = _store_trained_model(client)
    if training.returns_client_models:
        client = _output_trained_model(client)
    select, split = training.local_parameters, None
    if select is not None:
        split = split_parameters(training.task.model, select)
        client = with_local_parameters(client, split)
    compressor = None if training.returns_client_models else training.compressor
    if compressor is not None:
        drop_local = (lambda variables: variables) if split is None else split.drop_local
        client = with_compressed_change(client, compressor, drop_local=drop_local, unsent=unsent)
    sending_client, privacy = client, training.privacy
    if training.returns_client_models or training.weigh_updates is not None:
        privacy = None
    if isinstance(privacy, ExampleLevel) and not isinstance(client_algorithm.step, PrivateStep):
        privacy = None
    client_level = None if privacy is None else get_client_level(training)
    if privacy is not None:
        client = with_private_change(client, privacy, unsent)
    combines_changes = bool(training.attacks or training.aggregations or training.weigh_updates)
    combines_changes = combines_changes and not training.returns_client_models
    if combines_changes:
        client = with_sent_change(client, unsent)
    measured_client = with_drift_sums(client) if training.measures_drift else client

    def init_state(hp, key, variables, num_clients):
        client_state = client.init(hp, variables)
        if split is not None:
            variables = split.drop_local(variables)
        server = call_user_function("init_server", init_server, hp=hp, variables=variables)
        _require_message("init_server", server)
        require_arrays("init_server", server, "a ServerMessage")
        to_array = lambda leaf: leaf if hasattr(leaf, "dtype") else jnp.array(leaf)  # noqa: E731
        server = jax.tree.map(to_array, server)
        return State(server, tile_over_clients(client_state, num_clients), jnp.int32(0))

    def round_(hp, state, key, cohort: Cohort):
        server, schedule = state.server, cohort.schedule
        message = call_user_function("make_message", make_message, server=server, cohort=cohort)
        _require_message("make_message", message)
        result = train_cohort(measured_client, plan, hp, message, state.clients, key, cohort)
        client_update, drift = split_drift(result.update, message.variables["params"])
        if combines_changes:
            received = (client_update, result.outputs, message.variables, unsent, cohort, key)
            client_update = combine_received(training, hp, *received)
        counts = CohortCounts(schedule.num_clients, result.num_trained, schedule.weight_fraction)
        num_within_norm = None
        if client_level is not None:
            num_within_norm, size = client_update.sum, training.expected_cohort_size
            client_update = add_private_noise(
                *(client_level, client_update, message.variables, unsent),
                hp=hp,
                num_trained=result.num_trained,
                cohort_size=size,
                key=key,
            )
            share = jnp.float32(size / schedule.num_clients)
            counts = CohortCounts(schedule.num_clients, jnp.int32(max(1, round(size))), share)
        arguments = {"hp": hp, "server": server, "client_update": client_update, "counts": counts}
        new_server = call_user_function("update", update, **arguments)
        _require_message("update", new_server)
        old, new = (record.variables["params"] for record in (server, new_server))
        update_norm = optax.tree.norm(jax.tree.map(jnp.subtract, new, old))
        models = result.outputs if training.returns_client_models else None
        info = RoundInfo(
            result.train_loss,
            update_norm,
            models=models,
            drift=drift,
            client_losses=result.client_losses,
            num_trained=None if client_level is None else result.num_trained,
            num_within_norm=num_within_norm,
        )
        return State(new_server, result.states, state.round + 1), info

    def traffic(hp, state):
        def make_update(hp, server, client_state):
            count = jnp.int32(1)
            info = ClientInfo(jnp.int32(0), count, count, jnp.zeros(0))
            context = ClientContext(hp, server, info, make_key(0))
            local = sending_client.begin(context, client_state)
            return sending_client.end(context, local, client_state)[0]

        client_state = get_client_row(state.clients, 0)
        upload = plan.eval_shape(make_update, hp, state.server, client_state)
        # Without a schedule; `initial_traffic` counts the inputs.
        cohort: Any = Cohort._make((None, None, None, _NoInputs(), None, None))
        try:
            message = jax.eval_shape(lambda server: make_message(server, cohort), state.server)
        except Exception:  # it reads the schedule, which is not known here
            message = state.server
        if unsent is not None:
            message = message._replace(variables=unsent.drop_local(message.variables))
            upload = unsent.drop_local_changes(upload)
        return Traffic(num_bytes(message), num_bytes(upload))

    def compressed_params(state):
        return select_sent_params(state.server.variables, unsent)

    def get_trained_variables(hp, state, k):
        clients = state.clients if split is None else state.clients.inner
        return get_client_row(clients.variables, k)

    personal_variables = get_trained_variables if evaluates_client_model else None
    if split is not None and not evaluates_client_model:
        personal_variables = get_personal_variables(split)
    return Algorithm(
        init=init_state,
        round=round_,
        global_model=get_server_variables if split is None else None,
        with_global_model=with_server_variables if split is None else None,
        traffic=traffic,
        compressed_params=None if compressor is None else compressed_params,
        personal_variables=personal_variables,
        extra_passes=client.extra_passes,
        can_page_state=not _depends_on_weights(client, training),
        combines_changes=combines_changes,
        protects_privacy=privacy is not None,
    )


class _NoInputs(dict):
    """Inputs of any name, without content."""

    def __missing__(self, name: str) -> tuple[()]:
        return ()


class _AnyHyperParameter(dict):
    """Hyperparameters of any name, for functions whose values are not read."""

    def __missing__(self, name: str) -> jax.Array:
        return jnp.float32(1)


def _depends_on_weights(client: ClientAlgorithm, training: LocalTraining) -> bool:
    """Return whether a client's first state depends on the values of the initial weights."""

    def init(variables):
        return client.init(_AnyHyperParameter(), variables)

    try:
        variables = jax.eval_shape(jax.vmap(training.task.model.init), jnp.stack([make_key(0)] * 2))
        # A result that varies along the mapped axis is an error for `out_axes=None`.
        jax.eval_shape(jax.vmap(init, out_axes=None), variables)
    except Exception:  # the round reports errors of `init`, with their location
        return True
    return False


def _require_message(name: str, message: Any) -> None:
    """Raise ContractError for a server's state or message without a model."""
    if "params" not in (getattr(message, "variables", None) or {}):
        expected = "a ServerMessage, or a record with its `variables`, the model"
        raise ContractError(f"{name} returned {describe_value(message)}: expected {expected}")


def _store_trained_model(client: ClientAlgorithm) -> ClientAlgorithm:
    """Return a client algorithm that stores the model after local training in its state."""

    def end(context, local, state):
        update, inner_state, output = client.end(context, local, state.inner)
        return update, EvaluatedClientState(inner_state, local.variables), output

    return client._replace(
        init=lambda hp, variables: EvaluatedClientState(client.init(hp, variables), variables),
        begin=lambda context, state: client.begin(context, state.inner),
        end=end,
    )


def _output_trained_model(client: ClientAlgorithm) -> ClientAlgorithm:
    """Return a client algorithm whose output is the model after local training."""

    def end(context, local, state):
        update, state, _ = client.end(context, local, state)
        return update, state, local.variables

    return client._replace(end=end, outputs_models=True)


def get_server_variables(state: State) -> Tree:
    """Return the global model of a method whose server's state has `variables`.

    Args:
      state: state of the federation.

    Returns:
      Variables of the model.

    Example:
      >>> from fedjax_het.methods import ServerMessage, State, get_server_variables
      >>> get_server_variables(State(ServerMessage({"params": 1.0}), clients=(), round=0))
      {'params': 1.0}
    """
    return state.server.variables


def with_server_variables(state: State, variables: Tree) -> State:
    """Return the state with another global model.

    Args:
      state: a state whose server's state has `variables`.
      variables: variables of the model, `{"params": ..., "state": ...}`.

    Returns:
      The state with these variables.

    Example:
      >>> from fedjax_het.methods import ServerMessage, State, with_server_variables
      >>> state = State(ServerMessage({"params": 1.0}), clients=(), round=0)
      >>> with_server_variables(state, {"params": 2.0}).server.variables
      {'params': 2.0}
    """
    return state._replace(server=state.server._replace(variables=variables))


def add_mean_change(hp: HyperParameters, server: Any, change: Tree) -> Any:
    """Add the clients' mean change to the global model: w + server_lr * change.

    Batch-norm statistics change with rate 1.

    Args:
      hp: values of the hyperparameters, with `server_lr`.
      server: the server's state, a record with `variables`.
      change: the mean change, like `server.variables`.

    Returns:
      The server's state with the new variables.

    Raises:
      ContractError: if the change has another structure, shape or type than the model, or if `hp`
        lacks `server_lr`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.methods import ServerMessage, add_mean_change
      >>> server = ServerMessage({"params": jnp.ones(2), "state": ()})
      >>> change = {"params": jnp.ones(2), "state": ()}
      >>> add_mean_change({"server_lr": 0.5}, server, change).variables["params"].tolist()
      [1.5, 1.5]
    """
    if "server_lr" not in hp:
        raise ContractError(
            "FedAvg's server update reads `server_lr`, which a method with has_global_model=False "
            "does not have: pass your own `update=` to build_federated_algorithm"
        )
    variables = dict(server.variables)
    require_like("update: the mean change", change, variables, "the model has them")
    return server._replace(variables=add_scaled_variables(variables, hp["server_lr"], change))


def add_scaled_variables(variables: dict[str, Tree], lr: Any, change: dict[str, Tree]) -> Tree:
    """Return variables + lr * change, with rate 1 for batch-norm statistics.

    Args:
      variables: variables of the model, `{"params": ..., "state": ...}`.
      lr: learning rate of the parameters, `[]`.
      change: a tree like `variables`.

    Returns:
      The new variables.
    """
    return {
        name: jax.tree.map(
            lambda v, d, rate=lr if name == "params" else 1.0: v + rate * d, part, change[name]
        )
        for name, part in variables.items()
    }


def model_traffic(hp: HyperParameters, state: State) -> Traffic:
    """Return the traffic of a method whose clients receive one model and send one.

    Args:
      hp: values of the hyperparameters; not read.
      state: a state whose server's state has `variables`.

    Returns:
      Bytes per participating client and round.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.methods import ServerMessage, State, model_traffic
      >>> server = ServerMessage({"params": jnp.zeros(3)}, extra=jnp.zeros(100))
      >>> model_traffic({}, State(server, clients=(), round=0))
      Traffic(down=12, up=12, up_per_class=0)
    """
    size = num_bytes(state.server.variables)
    return Traffic(size, size)
