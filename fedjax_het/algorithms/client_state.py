"""Parts of methods whose clients store gradients or models between rounds."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm, State
from fedjax_het.algorithms.builders import build_federated_algorithm
from fedjax_het.core.client_algorithm import (
    ClientAlgorithm,
    ClientContext,
    ClientUpdate,
    HyperParameters,
)
from fedjax_het.core.client_loop import CohortResult
from fedjax_het.core.client_rows import get_client_row, tile_over_clients
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import (
    ClientTrainState,
    LocalTraining,
    begin_local_training,
    init_local_optimizer,
    make_local_sgd,
    select_kept_optimizer_state,
)

Tree = Any
Initialization = Literal["independent", "shared"]


class ClientMemory(NamedTuple):
    """State of a client that stores more than its optimizer's state."""

    memory: Tree
    "Arrays that the method stores."
    optimizer: Tree
    "State of the local optimizer, if the run keeps it; else `()`."


def with_client_memory(
    base: ClientAlgorithm,
    *,
    init: Callable[[HyperParameters, Tree], Tree],
    begin: Callable[[ClientContext, Tree], Tree],
    end: Callable[[ClientContext, Any, Tree, ClientUpdate], tuple[ClientUpdate, Tree]],
) -> ClientAlgorithm:
    """Return a client that also stores a memory between rounds.

    Args:
      base: a client made by `make_local_sgd`, whose `step` may be another one.
      init: `init(hp, variables) -> memory` before the client's first round.
      begin: `begin(context, memory) -> aux`: the `ClientTrainState.aux` of the first step.
      end: `end(context, local, memory, update) -> (update, memory)`: the client's update, given the
        update of `base`, and its new memory.

    Returns:
      A client algorithm whose state is a `ClientMemory`.
    """

    def end_round(context, local, state):
        update, optimizer, output = base.end(context, local, state.optimizer)
        update, memory = end(context, local, state.memory, update)
        return update, ClientMemory(memory, optimizer), output

    return base._replace(
        init=lambda hp, variables: ClientMemory(init(hp, variables), base.init(hp, variables)),
        begin=lambda context, state: base.begin(context, state.optimizer)._replace(
            aux=begin(context, state.memory)
        ),
        end=end_round,
    )


def zeros_like_params(hp: HyperParameters, variables: Tree) -> Tree:
    """Return zeros like the parameters of a model.

    Args:
      hp: values of the hyperparameters; not read.
      variables: variables of the model, `{"params": ..., "state": ...}`.

    Returns:
      A tree like `variables["params"]`.
    """
    return jax.tree.map(jnp.zeros_like, variables["params"])


def build_dual_model_algorithm(
    training: LocalTraining,
    plan: ExecutionPlan,
    step_personal_model: Callable,
    *,
    init_aux: Callable[[dict], Tree] = lambda hp: (),
) -> Algorithm:
    """Return FedAvg, whose clients also train a personal model on the same minibatches.

    The personal model is evaluated, and its losses are reported. Traffic: FedAvg's. State: one
    model per client. Cost: two gradients per step.

    Args:
      training: the choices of local training, for both models.
      plan: where the clients run.
      step_personal_model: `(context, local, new_local, batch) -> (personal, loss)`: a step of the
        personal model `local.aux`. It is a `ClientTrainState` that the client stores between
        rounds, starting at the initial global model. `local` and `new_local` are the client's copy
        of the global model before and after its step on this minibatch.
      init_aux: `init_aux(hp)` is the initial `aux` of the personal model's `ClientTrainState`.

    Returns:
      The method.

    Example:
      >>> from fedjax_het import register_method
      >>> from fedjax_het.methods import build_dual_model_algorithm, make_training_step
      >>> def build_alone(training, plan):
      ...     step = make_training_step(training)
      ...     def step_personal_model(context, local, new_local, batch):
      ...         return step(context, local.aux, batch)
      ...     return build_dual_model_algorithm(training, plan, step_personal_model)
      >>> register_method("beside", build_alone, evaluated_models=("personal",)).name
      'beside'
    """
    base = make_local_sgd(training)

    def init(hp, variables):
        optimizer = init_local_optimizer(training, hp, variables)
        optimizer = select_kept_optimizer_state(training, optimizer)
        return ClientTrainState(variables, optimizer, init_aux(hp))

    def begin(context, personal):
        return begin_local_training(training, context.hp, *personal)

    def step(context, local, batch):
        new_local, _ = base.step(context, local, batch)
        personal, loss = step_personal_model(context, local, new_local, batch)
        return new_local._replace(aux=personal), loss

    def end(context, local, personal, update):
        optimizer = select_kept_optimizer_state(training, local.aux.optimizer_state)
        return update, local.aux._replace(optimizer_state=optimizer)

    client = with_client_memory(base._replace(step=step), init=init, begin=begin, end=end)
    return build_federated_algorithm(training, plan, client)._replace(
        personal_variables=lambda hp, state, k: get_client_row(state.clients.memory.variables, k),
    )


class PersonalModelState(NamedTuple):
    """State of a client that has a model of its own and no copy of a global model."""

    variables: Tree
    "Variables of the model."
    optimizer: Tree
    "State of the local optimizer, if the run keeps it; else `()`."
    num_rounds: jax.Array
    "`[]` int32: number of rounds in which the client has trained."


def make_personal_client(
    training: LocalTraining, begin: Callable[[ClientContext, Any], Any], step: Callable
) -> ClientAlgorithm:
    """Return a client whose state is a `PersonalModelState`.

    The client sends only ||change of its weights||^2, which is summed.

    Args:
      training: the choices of local training.
      begin: `begin(context, state) -> local`.
      step: `step(context, local, batch) -> (local, loss)`.

    Returns:
      The client algorithm.
    """

    def init(hp, variables):
        optimizer = init_local_optimizer(training, hp, variables)
        optimizer = select_kept_optimizer_state(training, optimizer)
        return PersonalModelState(variables, optimizer, jnp.int32(0))

    def end(context, local, state):
        new, old = local.variables["params"], state.variables["params"]
        squared_change = optax.tree.norm(jax.tree.map(jnp.subtract, new, old), squared=True)
        optimizer = select_kept_optimizer_state(training, local.optimizer_state)
        new_state = PersonalModelState(local.variables, optimizer, state.num_rounds + 1)
        return ClientUpdate(sum=squared_change), new_state, ()

    return ClientAlgorithm(init, begin, step, end)


def init_personal_models(
    training: LocalTraining,
    client: ClientAlgorithm,
    hp: HyperParameters,
    key: jax.Array,
    variables: Tree,
    num_clients: int,
    initialization: Initialization,
) -> PersonalModelState:
    """Return the states of all clients before the first round.

    Args:
      training: the choices of local training.
      client: a client of `make_personal_client`.
      hp: values of the hyperparameters by name.
      key: PRNG key of the weights of "independent" models.
      variables: variables of a "shared" model.
      num_clients: number of clients, K.
      initialization: "independent": every client draws its own weights; "shared": one draw.

    Returns:
      The states, `[K, ...]`.
    """
    if initialization == "shared":
        return tile_over_clients(client.init(hp, variables), num_clients)
    keys = jax.vmap(lambda k: jax.random.fold_in(key, k))(jnp.arange(num_clients))
    return jax.vmap(lambda key: client.init(hp, training.task.model.init(key)))(keys)


def get_client_model(hp: HyperParameters, state: State, k: jax.Array) -> Tree:
    """Return the personal model of a client, as `Algorithm.personal_variables`.

    Args:
      hp: values of the hyperparameters; not read.
      state: a state whose `clients` are a `PersonalModelState`, `[K, ...]`.
      k: index of the client.

    Returns:
      The variables of the client's model.
    """
    return get_client_row(state.clients.variables, k)


def compute_rms_change(result: CohortResult) -> jax.Array:
    """Return the root mean square over all K clients of the L2 norm of their weights' change."""
    return jnp.sqrt(result.update.sum / len(result.states.num_rounds))
