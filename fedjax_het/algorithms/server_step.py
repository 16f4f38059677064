"""Work of the server in addition to the average: a step after each round."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm, State, with_inner_states
from fedjax_het.core.client_loop import Cohort, Examples
from fedjax_het.core.client_rows import ClientModels
from fedjax_het.core.contract_checks import call_user_function, require_like, unpack_tuple

Tree = Any


class ServerStepState(NamedTuple):
    """The server's state of a method with a server step."""

    inner: Tree
    "The server's state of the wrapped method."
    step_state: Tree
    "State of the server step, carried from round to round."
    result: Tree = ()
    "Variables that are evaluated, of a step that does not feed back; else `()`."


class ServerStepContext(NamedTuple):
    """Inputs of a server step.

    Example:
      >>> from fedjax_het.methods import ServerStepContext
      >>> ServerStepContext._fields[:3]
      ('variables_before', 'variables_after', 'round_index')
    """

    variables_before: Tree
    "Variables of the global model at the start of the round."
    variables_after: Tree
    "Variables of the global model after the wrapped method's round."
    round_index: Any
    "`[]` int32: index of the round, counted from 0."
    key: Any
    "PRNG key of the round."
    cohort: Cohort
    "Schedule, examples and inputs of the round."
    client_models: ClientModels | None
    "The clients' models after local training, if `LocalTraining.returns_client_models`."


def get_server_examples(context: ServerStepContext) -> Examples:
    """Return the server's examples, for methods whose `AlgorithmSpec` requires them.

    Args:
      context: argument of the server's step.

    Returns:
      Images and labels.

    Example:
      >>> from fedjax_het.methods import Cohort, Examples, ServerStepContext, get_server_examples
      >>> cohort = Cohort(None, None, server_examples=Examples(inputs=[0], labels=[3]))
      >>> get_server_examples(ServerStepContext({}, {}, 0, None, cohort, None)).labels
      [3]
    """
    assert context.cohort.server_examples is not None
    return context.cohort.server_examples


def inner_state(state: State) -> State:
    """Return the state of the wrapped method."""
    return state._replace(server=state.server.inner)


def with_server_step(
    algorithm: Algorithm,
    run_server_step: Callable[[Any, Tree, ServerStepContext], tuple[Tree, Tree]],
    *,
    init_step_state: Callable[[Any, Any, Tree], Tree] = lambda hp, key, variables: (),
    server_batch_size: int = 0,
    feeds_back: bool = True,
) -> Algorithm:
    """Return `algorithm` with a step of the server on the global model after each round.

    The step's result is evaluated and sent to the clients of the next round, and `update_norm` is
    the change of the global model by round and step. Clients, their state and the traffic are
    unchanged from `algorithm`. `protects_privacy` is False, as a step may read the clients'
    examples.

    With `feeds_back=False` the step's result is evaluated and returned, see
    `Algorithm.result_model`. The clients of the next round receive the model of `algorithm`, and
    `update_norm` is the change by the round alone.

    Args:
      algorithm: a method with one global model.
      run_server_step: `run_server_step(hp, step_state, context) -> (variables, step_state)` with a
        `ServerStepContext`.
      init_step_state: `init_step_state(hp, key, variables) -> step_state`, the state of the step
        before the first round.
      server_batch_size: samples per step of the work, see `Algorithm.server_batch_size`.
      feeds_back: whether the step's result becomes the global model.

    Returns:
      The method with the step.

    Example:
      >>> from fedjax_het import register_method
      >>> from fedjax_het.algorithms.fedavg import fedavg
      >>> from fedjax_het.methods import with_server_step
      >>> def build_kept(training, plan):
      ...     keep = lambda hp, step_state, context: (context.variables_before, step_state)
      ...     return with_server_step(fedavg(training, plan), keep)
      >>> register_method("kept", build_kept, "FedAvg that never moves").name
      'kept'
    """
    get_model, set_model = algorithm.global_model, algorithm.with_global_model
    assert get_model is not None and set_model is not None, "a method with a global model"

    def with_inner(state: State, inner: State) -> State:
        return inner._replace(server=state.server._replace(inner=inner.server))

    def init_state(hp, key, variables, num_clients):
        state = algorithm.init(hp, key, variables, num_clients)
        arguments = {"hp": hp, "key": key, "variables": variables}
        step_state = call_user_function("init_step_state", init_step_state, **arguments)
        result = () if feeds_back else variables
        return state._replace(server=ServerStepState(state.server, step_state, result))

    def round_(hp, state: State, key, cohort: Cohort):
        inner, step_state = inner_state(state), state.server.step_state
        new, info = algorithm.round(hp, inner, key, cohort)
        models = (get_model(inner), get_model(new))
        context = ServerStepContext(*models, state.round, key, cohort, info.models)
        arguments = {"hp": hp, "step_state": step_state, "context": context}
        outputs = call_user_function("run_server_step", run_server_step, **arguments)
        names = ("variables", "step_state")
        variables, step_state = unpack_tuple("run_server_step", outputs, names)
        origin = "`context.variables_after`"
        require_like("run_server_step: variables", variables, context.variables_after, origin)
        if not feeds_back:
            server = ServerStepState(new.server, step_state, variables)
            return new._replace(server=server), info._replace(models=None)
        new = set_model(new, variables)
        old_params, new_params = (get_model(s)["params"] for s in (inner, new))
        update_norm = optax.tree.norm(jax.tree.map(jnp.subtract, new_params, old_params))
        server = ServerStepState(new.server, step_state)
        return new._replace(server=server), info._replace(update_norm=update_norm, models=None)

    stepped = with_inner_states(algorithm, inner_state, with_inner)._replace(
        init=init_state,
        round=round_,
        server_batch_size=max(algorithm.server_batch_size, server_batch_size),
        protects_privacy=False,
    )
    if feeds_back:
        return stepped

    def with_global_model(state, variables):
        state = with_inner(state, set_model(inner_state(state), variables))
        return state._replace(server=state.server._replace(result=variables))

    return stepped._replace(
        with_global_model=with_global_model, result_model=lambda state: state.server.result
    )
