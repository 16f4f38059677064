"""Functions that build an `Algorithm`.

`build_federated_algorithm`: clients train, the server combines what they send.
`with_server_step`: a step of the server on the global model after each round of another method.
`build_dual_model_algorithm`: FedAvg whose clients also train a personal model.
`with_pretraining`: the global model is trained on the server's examples before the first round.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import (
    Algorithm,
    RoundInfo,
    ServerStage,
    State,
    Traffic,
    require_global_model,
)
from fedjax_het.core.client_algorithm import (
    ClientAlgorithm,
    ClientContext,
    ClientInfo,
    ClientUpdate,
    HyperParameters,
)
from fedjax_het.core.client_loop import (
    ClientModels,
    Cohort,
    Examples,
    tile_over_clients,
    train_cohort,
)
from fedjax_het.core.contract_checks import (
    ContractError,
    call_user_function,
    describe_value,
    require_like,
    unpack_tuple,
    with_contract_checks,
)
from fedjax_het.core.device_exchange import get_client_row
from fedjax_het.core.drift import split_drift, with_drift_sums
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import (
    ClientTrainState,
    LocalTraining,
    ServerMessage,
    begin_local_training,
    init_local_optimizer,
    make_local_sgd,
    select_kept_optimizer_state,
)
from fedjax_het.core.server_parallelism import ServerParallelism
from fedjax_het.core.server_training import train_on_server
from fedjax_het.utils.arrays import AnyArray
from fedjax_het.utils.config import Bounds, HyperParameter

Tree = Any


class CohortCounts(NamedTuple):
    """Numbers of clients in a round."""

    num_clients: AnyArray
    "`[]` int32: clients of the federation, K."
    num_trained: AnyArray
    "`[]` int32: clients of the round that hold data and have trained."
    cohort_weight_share: AnyArray
    """`[]` float32: share of the round's clients in the weight of all K clients, by the run's
    `averaging`. Times the mean of a round it is the round's part of the mean over all clients:
    share * mean = sum_i p_i x_i over the round's clients i."""


class EvaluatedClientState(NamedTuple):
    """A client's state where its model after local training is kept to be scored."""

    inner: Tree
    variables: Tree


def build_federated_algorithm(
    training: LocalTraining,
    plan: ExecutionPlan,
    client_algorithm: ClientAlgorithm,
    *,
    init_server: Callable[[HyperParameters, Tree], Any] = lambda hp, variables: ServerMessage(
        variables
    ),
    update: Callable[[HyperParameters, Any, ClientUpdate, CohortCounts], Any] | None = None,
    make_message: Callable[[Any, Cohort], Any] = lambda server, cohort: server,
) -> Algorithm:
    """Return a method whose clients train locally and whose server combines what they send.

    With `training.evaluated_model` "client" every client stores its model after local training, and
    its own test is made with that model: one more model per client. With
    `training.returns_client_models` a round returns the models of its S clients after local
    training, on every device: memory of up to 2 S models.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      client_algorithm: how a client trains.
      init_server: `init_server(hp, variables) -> server`: the server's state before the first round,
        a `ServerMessage` or any record with `variables`, those of the global model.
      update: `update(hp, server, client_update, counts) -> server`: the server's state after a
        round, with unchanged structure, shapes and types. Default: FedAvg's, which adds `server_lr`
        times `client_update.mean`.
      make_message: `make_message(server, cohort) -> message`: what the clients read, a record with
        `variables`. Default: the server's state.

    Raises:
      ContractError: if a function breaks the contract; some functions are only called, and so
        checked, when a round is traced.
    """
    update_server = update or update_by_mean_change
    if not isinstance(client_algorithm, ClientAlgorithm):
        raise ContractError(
            f"client is {describe_value(client_algorithm)}: expected a ClientAlgorithm"
        )
    client_algorithm = with_contract_checks(client_algorithm)
    evaluates_client_model = training.evaluated_model == "client"
    if evaluates_client_model:
        client_algorithm = _store_trained_model(client_algorithm)
    returns_client_models = training.returns_client_models
    if returns_client_models:
        client_algorithm = _output_trained_model(client_algorithm)

    def init_state(hp, key, variables, num_clients):
        client_state = client_algorithm.init(hp, variables)
        server = call_user_function("init_server", init_server, hp=hp, variables=variables)
        _require_message("init_server", server)
        return State(server, tile_over_clients(client_state, num_clients), jnp.int32(0))

    def round_(hp, state, key, cohort: Cohort):
        message = call_user_function(
            "make_message", make_message, server=state.server, cohort=cohort
        )
        _require_message("make_message", message)
        result = train_cohort(
            with_drift_sums(client_algorithm) if training.measures_drift else client_algorithm,
            plan,
            hp,
            message,
            state.clients,
            key,
            cohort,
            gather_models=returns_client_models,
        )
        client_update, drift = result.update, dict[str, jax.Array]()
        if training.measures_drift:
            client_update, drift = split_drift(client_update, message.variables["params"])
        schedule = cohort.schedule
        counts = CohortCounts(schedule.num_clients, result.num_trained, schedule.weight_fraction)
        server = call_user_function(
            "update",
            update_server,
            hp=hp,
            server=state.server,
            client_update=client_update,
            counts=counts,
        )
        _require_message("update", server)
        change = jax.tree.map(
            jnp.subtract, server.variables["params"], state.server.variables["params"]
        )
        models = result.outputs if returns_client_models else None
        info = RoundInfo(result.train_loss, optax.tree.norm(change), models=models, drift=drift)
        return State(server, result.states, state.round + 1), info

    def traffic(hp, state):
        client_state = get_client_row(state.clients, 0)
        client_update = plan.eval_shape(
            _make_abstract_client_update(client_algorithm), hp, state.server, client_state
        )
        return Traffic(num_bytes(state.server), num_bytes(client_update))

    return Algorithm(
        init=init_state,
        round=round_,
        global_model=get_server_variables,
        with_global_model=with_server_variables,
        traffic=traffic,
        personal_variables=(lambda hp, state, k: get_client_row(state.clients.variables, k))
        if evaluates_client_model
        else None,
        extra_passes=client_algorithm.extra_passes,
        can_page_state=not evaluates_client_model,
    )


def _require_message(name: str, message: Any) -> None:
    """Raise ContractError for a server's state, or what it sends, without a model."""
    if "params" not in (getattr(message, "variables", None) or {}):
        expected = "a ServerMessage, or what has its `variables`, the model"
        raise ContractError(f"{name} returned {describe_value(message)}: expected {expected}")


def _store_trained_model(client_algorithm: ClientAlgorithm) -> ClientAlgorithm:
    """The same, with the model after local training in the client's state."""

    def end(context, local, state):
        client_update, inner_state, output = client_algorithm.end(context, local, state.inner)
        return client_update, EvaluatedClientState(inner_state, local.variables), output

    return client_algorithm._replace(
        init=lambda hp, variables: EvaluatedClientState(
            client_algorithm.init(hp, variables), variables
        ),
        begin=lambda context, state: client_algorithm.begin(context, state.inner),
        end=end,
    )


def _output_trained_model(client_algorithm: ClientAlgorithm) -> ClientAlgorithm:
    """The same, whose output is the model after local training."""

    def end(context, local, state):
        client_update, state, _ = client_algorithm.end(context, local, state)
        return client_update, state, local.variables

    return client_algorithm._replace(end=end)


def get_server_variables(state: State) -> Tree:
    """The global model of a method whose server state is a `ServerMessage`."""
    return state.server.variables


def with_server_variables(state: State, variables: Tree) -> State:
    return state._replace(server=state.server._replace(variables=variables))


def update_by_mean_change(
    hp, server: ServerMessage, client_update: ClientUpdate, counts: CohortCounts
) -> ServerMessage:
    """FedAvg's server, whose upload is the mean change."""
    return add_mean_change(hp, server, client_update.mean)


def add_mean_change(hp, server: Any, change: Tree) -> Any:
    """server + server_lr * the clients' mean change; batch-norm statistics with rate 1.

    Raises ContractError unless the change is of the same structure, shapes and types as the model.
    """
    require_like("update: the mean change", change, dict(server.variables), "the model has them")
    variables = {
        name: jax.tree.map(
            lambda s, u, rate=hp["server_lr"] if name == "params" else 1.0: s + rate * u,
            part,
            change[name],
        )
        for name, part in server.variables.items()
    }
    return server._replace(variables=variables)


def model_traffic(hp, state: State) -> Traffic:
    """Traffic of a method whose clients send one model, and receive one."""
    size = num_bytes(state.server.variables)
    return Traffic(size, size)


def _make_abstract_client_update(client_algorithm: ClientAlgorithm):
    """Return `(hp, server, state) -> ClientUpdate` of one client, to be evaluated abstractly."""

    def make_client_update(hp, server, state):
        count = jnp.int32(1)
        client = ClientInfo(jnp.int32(0), count, count, jnp.zeros(0))
        context = ClientContext(hp, server, client, jax.random.key(0))
        return client_algorithm.end(context, client_algorithm.begin(context, state), state)[0]

    return make_client_update


def num_bytes(tree: Tree) -> int:
    """What the arrays of a tree take."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


class ServerStepState(NamedTuple):
    """The server's state of a method with a server step."""

    inner: Tree
    "The server's state of the method itself."
    step_state: Tree
    "State of the server step, carried from round to round."


class ServerStepContext(NamedTuple):
    """What a server step reads of a round."""

    variables_before: Tree
    "Variables of the global model at the start of the round."
    variables_after: Tree
    "Variables of the global model that the method made of its clients' updates."
    round_index: Any
    "`[]` int32: index of the round, counted from 0."
    key: Any
    "PRNG key of the round."
    cohort: Cohort
    "Schedule, examples and inputs of the round."
    client_models: ClientModels | None
    "The clients' models after local training, if `LocalTraining.returns_client_models`."


def get_server_examples(context: ServerStepContext) -> Examples:
    """Return the server's examples, for methods whose `AlgorithmSpec` requires them."""
    assert context.cohort.server_examples is not None
    return context.cohort.server_examples


def with_server_step(
    algorithm: Algorithm,
    run_server_step: Callable[[Any, Tree, ServerStepContext], tuple[Tree, Tree]],
    *,
    init_step_state: Callable[[Any, Any, Tree], Tree] = lambda hp, key, variables: (),
    server_batch_size: int = 0,
) -> Algorithm:
    """Return `algorithm` with a step of the server on the global model after each round.

    The step's result is evaluated and sent to the clients of the next round. Clients, their state
    and the traffic are those of `algorithm`.

    Args:
      algorithm: a method with one global model.
      run_server_step: `run_server_step(hp, step_state, context) -> (variables, step_state)` with a
        `ServerStepContext`.
      init_step_state: `init_step_state(hp, key, variables) -> step_state`, what the step itself
        carries from round to round.
      server_batch_size: samples per step of the work, see `Algorithm.server_batch_size`.
    """
    get_model, set_model = require_global_model(algorithm)

    def init_state(hp, key, variables, num_clients):
        state = algorithm.init(hp, key, variables, num_clients)
        step_state = call_user_function(
            "init_step_state", init_step_state, hp=hp, key=key, variables=variables
        )
        return state._replace(server=ServerStepState(state.server, step_state))

    def round_(hp, state: State, key, cohort: Cohort):
        new_state, info = algorithm.round(hp, inner_state(state), key, cohort)
        variables_before, variables_after = (
            get_model(wrapped_state) for wrapped_state in (inner_state(state), new_state)
        )
        context = ServerStepContext(
            variables_before, variables_after, state.round, key, cohort, info.models
        )
        outputs = call_user_function(
            "run_server_step",
            run_server_step,
            hp=hp,
            step_state=state.server.step_state,
            context=context,
        )
        variables, step_state = unpack_tuple(
            "run_server_step", outputs, ("variables", "step_state")
        )
        new_state = set_model(new_state, variables)
        info = info._replace(models=None)
        return new_state._replace(server=ServerStepState(new_state.server, step_state)), info

    def with_global_model(state, variables):
        inner_server = set_model(inner_state(state), variables).server
        return state._replace(server=state.server._replace(inner=inner_server))

    get_personal_variables = algorithm.personal_variables
    personal_variables = (
        None
        if get_personal_variables is None
        else lambda hp, state, k: get_personal_variables(hp, inner_state(state), k)
    )
    return algorithm._replace(
        init=init_state,
        round=round_,
        global_model=lambda state: get_model(inner_state(state)),
        with_global_model=with_global_model,
        traffic=lambda hp, state: algorithm.traffic(hp, inner_state(state)),
        personal_variables=personal_variables,
        server_stages=tuple(_lift_server_stage(work) for work in algorithm.server_stages),
        server_batch_size=max(algorithm.server_batch_size, server_batch_size),
        artifacts=lambda state: algorithm.artifacts(inner_state(state)),
        summary=lambda hp, state: algorithm.summary(hp, inner_state(state)),
    )


def _lift_server_stage(stage: ServerStage) -> ServerStage:
    """The refined method's work between rounds, on the state as it is kept."""

    def advance(hp, state, key, num_iterations, server_examples=None):
        inner_server = stage.advance(
            hp, inner_state(state), key, num_iterations, server_examples
        ).server
        return state._replace(server=state.server._replace(inner=inner_server))

    return stage._replace(
        count_completed=lambda state: stage.count_completed(inner_state(state)), advance=advance
    )


def inner_state(state: State) -> State:
    """The state as the method that is refined has it."""
    return state._replace(server=state.server.inner)


class DualModelState(NamedTuple):
    """What a client keeps.

    own: its model, the state of that model's optimiser, if kept, and what the method remembers.
    optimizer: of its copy of the global model, if kept.
    """

    personal: ClientTrainState
    optimizer: Tree


def build_dual_model_algorithm(
    training: LocalTraining,
    plan: ExecutionPlan,
    step_personal_model: Callable,
    *,
    init_aux: Callable[[dict], Tree] = lambda hp: (),
) -> Algorithm:
    """Return FedAvg, whose clients also train a personal model on the same minibatches.

    The personal model is evaluated, and its losses are reported. Traffic: FedAvg's. State: one model
    per client. Cost: two gradients per step.

    Args:
      training: the choices of local training, for both models.
      plan: where the clients run.
      step_personal_model: `(context, local, new_local, batch) -> (personal, loss)`, a step of the
        personal model `local.aux`, a `ClientTrainState` that the client stores between rounds and
        that starts at the initial global model. `local` and `new_local` are the client's copy of
        the global model before and after its step on this minibatch.
      init_aux: `init_aux(hp)` is the initial `aux` of the personal model's `ClientTrainState`.
    """
    base = make_local_sgd(training)

    def init(hp, variables):
        optimizer = select_kept_optimizer_state(
            training, init_local_optimizer(training, hp, variables)
        )
        return DualModelState(
            ClientTrainState(variables, optimizer, init_aux(hp)), base.init(hp, variables)
        )

    def begin(context, state):
        local = base.begin(context, state.optimizer)
        personal = begin_local_training(training, context.hp, *state.personal)
        return local._replace(aux=personal)

    def step(context, local, batch):
        new_local, _ = base.step(context, local, batch)
        personal, loss = step_personal_model(context, local, new_local, batch)
        return new_local._replace(aux=personal), loss

    def end(context, local, state):
        client_update, optimizer, output = base.end(context, local, state.optimizer)
        personal = local.aux._replace(
            optimizer_state=select_kept_optimizer_state(training, local.aux.optimizer_state)
        )
        return client_update, DualModelState(personal, optimizer), output

    return build_federated_algorithm(
        training, plan, ClientAlgorithm(init, begin, step, end)
    )._replace(
        personal_variables=lambda hp, state, k: get_client_row(state.clients.personal.variables, k),
        can_page_state=False,
    )


PRETRAINING_HYPERPARAMETERS = {"pretrain_lr": HyperParameter(0.01, Bounds(0))}


def with_pretraining(
    algorithm: Algorithm,
    training: LocalTraining,
    plan: ExecutionPlan,
    epochs: int,
    num_clients: int,
) -> Algorithm:
    """`algorithm`, whose first model has seen the server's examples for `epochs` epochs.

    SGD at `pretrain_lr` in batches of local training's size (FSL, section IV-B: 500 epochs at
    0.01). The method then begins as if that were the first draw of its network: what clients or the
    server derive from the first model is derived from it.
    Cost: epochs * ceil(n_0 / batch_size) steps, once; shown and resumed like rounds.
    """

    get_model, set_model = require_global_model(algorithm)

    def train_on_shard(
        server_parallelism: ServerParallelism, variables, examples, key, lr, num_epochs, first_epoch
    ):
        return train_on_server(
            training.task,
            variables,
            examples,
            key,
            batch_size=training.batch_size,
            lr=lr,
            epochs=num_epochs,
            first_epoch=first_epoch,
            server_parallelism=server_parallelism,
        )

    def advance(hp, state, key, num_iterations, server_examples: Examples | None):
        assert server_examples is not None  # a run that pretrains has a server with examples
        completed_epochs = state.server.step_state
        start_variables = get_model(inner_state(state))
        variables = plan.shard_server_work(
            train_on_shard,
            start_variables,
            server_examples,
            key,
            hp["pretrain_lr"],
            num_iterations,
            completed_epochs,
        )
        client_state_leaves = jax.tree.leaves(
            state.clients
        )  # of all clients, or of those that are here
        num_rows = client_state_leaves[0].shape[0] if client_state_leaves else num_clients
        initial_state = algorithm.init(hp, key, variables, num_rows)
        continued_state = set_model(inner_state(state), variables)
        new_inner_state = jax.tree.map(
            lambda a, b: jnp.where(completed_epochs + num_iterations == epochs, a, b).astype(
                b.dtype
            ),
            initial_state,
            continued_state,
        )
        return new_inner_state._replace(
            server=ServerStepState(new_inner_state.server, completed_epochs + num_iterations)
        )

    wrapped_algorithm = with_server_step(
        algorithm,
        lambda hp, step_state, context: (context.variables_after, step_state),
        init_step_state=lambda hp, key, variables: jnp.int32(0),
        server_batch_size=training.batch_size,
    )
    stage = ServerStage(
        "pretraining",
        before_round=0,
        num_iterations=epochs,
        count_completed=lambda state: int(state.server.step_state),
        advance=advance,
    )
    return wrapped_algorithm._replace(server_stages=(stage, *wrapped_algorithm.server_stages))
