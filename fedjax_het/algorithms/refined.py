"""Work that the server does on each round's model, over any method with one global model."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fedjax_het.algorithms.contract import Algorithm, ServerStage, State, require_global_model
from fedjax_het.engine.lanes import ClientModels, Cohort, Examples

Tree = Any


class ServerStepState(NamedTuple):
    """The server's state of the method that is refined, and what refining keeps besides."""

    inner: Tree
    step_state: Tree


class ServerStepContext(NamedTuple):
    """What a refinement reads of a round."""

    variables_before: Tree  # the variables that the round started from
    variables_after: Tree  # those that the method made of its clients' work
    round_index: Any  # [] int32, from 0
    key: Any  # the round's
    cohort: Cohort
    client_models: ClientModels | None  # where `LocalTraining.returns_client_models` asks for them


def get_server_examples(context: ServerStepContext) -> Examples:
    """Those of a method whose entry says that it needs some."""
    assert context.cohort.server_examples is not None
    return context.cohort.server_examples


def with_server_step(
    algorithm: Algorithm,
    run_server_step: Callable[[Any, Tree, ServerStepContext], tuple[Tree, Tree]],
    *,
    init_step_state: Callable[[Any, Any, Tree], Tree] = lambda hp, key, variables: (),
    server_batch_size: int = 0,
) -> Algorithm:
    """`algorithm`, whose global model the server works on after each round.

    What comes out is what is evaluated and broadcast; clients, their state and the traffic are
    those of `algorithm`.

    Args:
      refine(hp, own, round) -> (variables, own).
      init(hp, key, variables) -> own, whatever is kept from round to round.
      server_batch_size: of the refinement, see `Algorithm`.
    """
    get_model, set_model = require_global_model(algorithm)

    def init_state(hp, key, variables, num_clients):
        state = algorithm.init(hp, key, variables, num_clients)
        return state._replace(
            server=ServerStepState(state.server, init_step_state(hp, key, variables))
        )

    def round_(hp, state: State, key, cohort: Cohort):
        new_state, info = algorithm.round(hp, inner_state(state), key, cohort)
        variables_before, variables_after = (
            get_model(wrapped_state) for wrapped_state in (inner_state(state), new_state)
        )
        context = ServerStepContext(
            variables_before, variables_after, state.round, key, cohort, info.models
        )
        variables, step_state = run_server_step(hp, state.server.step_state, context)
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
