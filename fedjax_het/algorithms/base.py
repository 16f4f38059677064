"""The contract of a federated method: a record of pure functions.

An algorithm never prints, touches a disk, calls `jit`, or loops over clients. Static choices are
closed over; numeric hyper-parameters come in the traced dict `hp`. Most methods are built by
`building.federated` from a `ClientAlgorithm`, and read like this one, FedAvg whose clients pull their
steps to the model that they received:

>>> from typing import Annotated
>>> import jax
>>> from dataclasses import dataclass
>>> from fedjax_het import RunSpec, register_method, simulate
>>> from fedjax_het.algorithms.builders import build_federated_algorithm
>>> from fedjax_het.utils.config import Config, NonNegativeFloat
>>> from fedjax_het.core.local_training import make_local_sgd
>>>
>>> @dataclass(frozen=True)
... class TetherHyperParameters(Config):
...     tether: NonNegativeFloat = 0.1
...     "How strongly a client is pulled to the model that it received."
>>>
>>> def tethered(training, plan):
...     def adjust_gradient(context, gradient, local, batch):
...         here, start = local.variables["params"], context.message.variables["params"]
...         strength = context.hp["tether"]
...         pulled = jax.tree.map(lambda g, w, a: g + strength * (w - a), gradient, here, start)
...         return pulled, local.aux
...
...     return build_federated_algorithm(training, plan, make_local_sgd(training, adjust=adjust_gradient))
>>>
>>> algorithm_spec = register_method("tethered", tethered, "FedAvg on a tether", hyperparameters=TetherHyperParameters)
>>> spec = RunSpec("tethered", num_clients=4, rounds=2, model="mlp", hp={"tether": 0.5})
>>> simulate(spec).metrics["test_accuracy"].shape
(2,)

What a method brings is checked by shapes and types alone, while its program is traced and before
anything compiles: see `algorithms.checks`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from fedjax_het.core.client_algorithm import ClientAlgorithm, HyperParameters
from fedjax_het.core.client_loop import ClientModels, Cohort, Examples
from fedjax_het.core.gradient_diagnostics import ClientDiagnostics
from fedjax_het.core.work_items import CondensationWork
from fedjax_het.data import Dataset, Partition
from fedjax_het.nn import Model
from fedjax_het.utils.config import NonNegativeInt

Tree = Any


class State(NamedTuple):
    """Everything that a federation carries from round to round."""

    server: Tree
    clients: Tree  # leading axis K, or of a table, see `Algorithm.can_page_state`; () if stateless
    round: jax.Array  # [] int32, rounds done


class RoundInfo(NamedTuple):
    """What every method reports of a round; scalars."""

    train_loss: jax.Array  # mean over samples, met in local training (nats) or in condensing
    update_norm: jax.Array  # L2 norm of the global model's change; of clients' own, see the method
    records: dict[str, jax.Array] = {}  # noqa: RUF012  what else: see `Algorithm.record_shapes`
    models: ClientModels | None = None  # where `LocalTraining.returns_client_models` asks for them


class Traffic(NamedTuple):
    """Bytes per participating client and round."""

    down: int
    up: int
    up_per_class: int = 0  # besides, for every class that it condenses


class InitialTraffic(NamedTuple):
    """Bytes that go once, with the first model: of all clients together."""

    down: int = 0
    up: int = 0


class FederationData(NamedTuple):
    """What is known of a federation's data before its first round; arrays on the host."""

    dataset: Dataset
    partition: Partition  # of what clients hold of their own
    server_examples: Examples | None  # the server's examples, [n_0, ...]
    local_epochs: int | None  # None where clients condense, or go by steps
    seed: int  # of the partition
    samples_per_round: int | None = (
        None  # that all clients train on in a round, where they go by steps
    )


class RoundInput(NamedTuple):
    """Arrays that every round of a method reads besides its schedule and the examples.

    make(holdings) -> one pytree of host arrays for each federation, all of the same shapes. In a
    round it is `cohort.inputs[name]`.
    """

    name: str
    make_inputs: Callable[[Sequence[FederationData]], list[Tree]]


class InitStateFn(Protocol):
    """-> the state before the first round, from the first model's variables."""

    def __call__(
        self, hp: HyperParameters, key: jax.Array, variables: Tree, num_clients: int
    ) -> State: ...


class RunRoundFn(Protocol):
    """-> (state, of the same structure, shapes and types; what is reported)."""

    def __call__(
        self, hp: HyperParameters, state: State, key: jax.Array, cohort: Cohort
    ) -> tuple[State, RoundInfo]: ...


class GetModelFn(Protocol):
    """-> the global model's variables."""

    def __call__(self, state: State) -> Tree: ...


class SetModelFn(Protocol):
    """-> the state with these variables for the global model's."""

    def __call__(self, state: State, variables: Tree) -> State: ...


class CountTrafficFn(Protocol):
    """-> bytes; of arrays or of their shapes."""

    def __call__(self, hp: HyperParameters, state: State) -> Traffic: ...


class CountInitialTrafficFn(Protocol):
    """-> bytes."""

    def __call__(self, federation_data: FederationData) -> InitialTraffic: ...


class MakeInputsFn(Protocol):
    """-> one pytree of host arrays for each federation."""

    def __call__(self, federations: Sequence[FederationData]) -> list[Tree]: ...


class CountCompletedFn(Protocol):
    """-> iterations finished."""

    def __call__(self, state: State) -> int: ...


class GetPersonalModelFn(Protocol):
    """-> variables of the model that client k's own test is for."""

    def __call__(self, hp: HyperParameters, state: State, k: jax.Array) -> Tree: ...


class GetRecordShapesFn(Protocol):
    """-> the shapes of what is recorded of a round, by name."""

    def __call__(self, num_clients: int) -> dict[str, tuple[int, ...]]: ...


class Algorithm(NamedTuple):
    """A federated method.

    init(hp, key, variables, num_clients) -> State
    round(hp, state, key, cohort) -> (State, RoundInfo)
    global_model(state) -> variables             what is broadcast and evaluated; None without one
    with_global_model(state, variables) -> State
    traffic(hp, state) -> Traffic
    first_traffic(holdings) -> InitialTraffic       what goes once, with the first model
    personal(hp, state, k) -> variables          of the model that client k's own test is for;
                                                 default: the global one
    personal_model: the network of these variables (default: the run's own)
    tuning: how every client tunes a copy of the global model that is scored in its place
    records(num_clients) -> {name: shape}        of what `RoundInfo.records` holds
    extra_passes: passes over a client's data before its local epochs
    trains_on_server_data: whether clients train on the server's examples besides their own
    pageable: whether a round reads the states of its own clients alone, by row, so that the others'
      can be elsewhere; `init` then makes as many equal ones as it is asked for, which do not depend
      on the first model's weights, since those may be pretrained
    pairs: how clients condense their data, where they do so instead of training
    inputs: what a round reads besides
    server_gradient(state, inputs, variables) -> tree    of the loss on data that the server has
                                                         made or was given, to be compared with
                                                         that of all clients' data
    survey: what is measured on all clients' data where a run asks for it (`gradient_gaps`), in
      place of the distances of the global model's gradients
    host_work: work between rounds, outside the rounds' program (DynaFed's synthesis)
    server_batch_size: samples of a step of the server's work that goes through `ExecutionPlan.shard_server_work`, by which a
      timing finds out whether sharing pays; 0: there is no such work
    artifacts(state), summary(hp, state): what the method leaves besides curves, as named arrays and
      as a JSON-able record
    """

    init: InitStateFn
    round: RunRoundFn
    global_model: GetModelFn | None
    with_global_model: SetModelFn | None
    traffic: CountTrafficFn
    initial_traffic: Callable[[FederationData], InitialTraffic] = lambda federation_data: (
        InitialTraffic()
    )
    personal_variables: GetPersonalModelFn | None = None
    personal_model: Model | None = None
    fine_tuning: "FineTuning | None" = None
    record_shapes: Callable[[int], dict[str, tuple[int, ...]]] = lambda num_clients: {}
    extra_passes: NonNegativeInt = 0
    trains_on_server_data: bool = False
    can_page_state: bool = False
    condensation_work: CondensationWork | None = None
    round_inputs: tuple[RoundInput, ...] = ()
    server_gradient: Callable[[State, dict[str, Tree], Tree], Tree] | None = None
    diagnostics: ClientDiagnostics | None = None
    server_stages: "tuple[ServerStage, ...]" = ()
    server_batch_size: NonNegativeInt = 0
    artifacts: Callable[[State], dict[str, Any]] = lambda state: {}
    summary: Callable[[Any, State], dict[str, Any]] = lambda hp, state: {}


def require_global_model(algorithm: Algorithm) -> tuple[GetModelFn, SetModelFn]:
    """(global_model, with_global_model) of a method that has them: without one there is nothing to
    refine, pretrain or condense into."""
    assert algorithm.global_model is not None and algorithm.with_global_model is not None
    return algorithm.global_model, algorithm.with_global_model


class FineTuning(NamedTuple):
    """Training of a copy of the global model by every client, before it is scored.

    The copies are scored and discarded: the federation goes on as if they had not been.
    client: a `ClientAlgorithm` whose state is the model, as `make_local_model_training` makes it.
    epochs: over the client's data; steps: at most so many minibatches of them (None: all).
    Cost: every evaluation trains all clients, and holds a model of each.
    """

    client_algorithm: ClientAlgorithm
    epochs: int
    steps: int | None = None


class AdvanceStageFn(Protocol):
    """-> the state after `count` (traced) more iterations; `server` are the server's examples."""

    def __call__(
        self,
        hp: HyperParameters,
        state: State,
        key: jax.Array,
        num_iterations: jax.Array,
        server_examples: Examples | None,
    ) -> State: ...


class ServerStage(NamedTuple):
    """Long server work between two rounds, done piece by piece so that it shows and resumes.

    done(state) -> int: iterations finished, of `total`.
    advance(hp, state, key, count, server) -> state after `count` (traced) more iterations;
      `server` are the server's examples (None if it has none).
    """

    name: str
    before_round: NonNegativeInt
    num_iterations: NonNegativeInt
    count_completed: Callable[[State], int]
    advance: AdvanceStageFn


class BuildAlgorithmFn(Protocol):
    """What a method's entry calls: `build(training, plan)`, with `options=` its record of options
    if it has any, and `base=` the method that it is put over if it needs one."""

    def __call__(self, training: Any, plan: Any, **static: Any) -> Algorithm: ...
