"""`Algorithm`, the record of pure functions that makes a federated method, and the records it uses.

A method never prints, touches a disk, calls `jit` or loops over clients. Static choices are closed
over; numeric hyperparameters come in the traced dict `hp`. Most methods are made by
`build_federated_algorithm` from a `ClientAlgorithm`: `fedjax_het.methods` shows one.

`algorithms.checks` checks the results of a method by structures, shapes and types while its program
is traced and before anything compiles.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_het.core.client_algorithm import ClientAlgorithm, HyperParameters
from fedjax_het.core.client_loop import Cohort, Examples
from fedjax_het.core.client_rows import ClientLosses, ClientModels
from fedjax_het.core.gradient_diagnostics import ClientDiagnostics
from fedjax_het.core.work_items import CondensationWork
from fedjax_het.data import Dataset, Partition
from fedjax_het.nn import Model
from fedjax_het.skews.assignment import Drift
from fedjax_het.utils.config import NonNegativeInt, PositiveInt

Tree = Any


class State(NamedTuple):
    """State of a federation between rounds.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.methods import ServerMessage, State
      >>> server = ServerMessage({"params": jnp.zeros(3), "state": {}})
      >>> State(server, clients=(), round=jnp.int32(0)).server.variables["params"].shape
      (3,)
    """

    server: Tree
    "State of the server."
    clients: Tree
    """States of all clients, with leading axis K, or of the clients of a table, see
    `Algorithm.can_page_state`; `()` for none."""
    round: jax.Array
    "`[]` int32: number of completed rounds."


class RoundInfo(NamedTuple):
    """Report of a round.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.methods import RoundInfo
      >>> RoundInfo(train_loss=jnp.float32(2.3), update_norm=jnp.float32(0.1)).records
      {}
    """

    train_loss: jax.Array
    """`[]`: mean loss over the samples of local training, in nats, or of condensation. A run
    records NaN if no client trained."""
    update_norm: jax.Array
    """`[]`: L2 norm of the change of the global model; methods without one document their own
    number. A run records NaN if no client trained and the norm is 0."""
    records: dict[str, jax.Array] = {}  # noqa: RUF012
    "Further arrays by name, of the shapes that `Algorithm.record_shapes` announces."
    models: ClientModels | None = None
    "The clients' models after local training, if `LocalTraining.returns_client_models`."
    drift: dict[str, jax.Array] = {}  # noqa: RUF012
    "Metrics of client drift by name, if `LocalTraining.measures_drift`."
    client_losses: ClientLosses | None = None
    "`CohortResult.client_losses`, which client selection by losses reads."
    num_trained: jax.Array | None = None
    "`[]` int32: clients that have trained, of a run with client-level privacy."
    num_within_norm: jax.Array | None = None
    "`[]` int32: clients whose change client-level privacy did not clip."


class Traffic(NamedTuple):
    """Bytes per participating client and round.

    Example:
      >>> from fedjax_het.methods import Traffic
      >>> Traffic(down=4000, up=8000).up_per_class
      0
    """

    down: int
    "From the server to the client."
    up: int
    "From the client to the server."
    up_per_class: int = 0
    "From the client to the server, in addition, for every class that the client condenses."


class InitialTraffic(NamedTuple):
    """Bytes that are sent once, with the first model, summed over all clients.

    Example:
      >>> from fedjax_het.methods import InitialTraffic
      >>> InitialTraffic(down=10_000)
      InitialTraffic(down=10000, up=0)
    """

    down: int = 0
    "From the server to the clients."
    up: int = 0
    "From the clients to the server."


class FederationData(NamedTuple):
    """Data of a federation before its first round; arrays on the host.

    Example:
      >>> import numpy as np
      >>> from fedjax_het import dataset_from_arrays
      >>> from fedjax_het.data import partition_from_clients
      >>> from fedjax_het.methods import FederationData
      >>> inputs, labels = np.zeros((4, 2, 2, 1), np.float32), np.array([0, 1, 0, 1])
      >>> dataset = dataset_from_arrays(inputs, labels, inputs, labels)
      >>> partition = partition_from_clients([[0, 1], [2, 3]])
      >>> FederationData(dataset, partition, None, 1, seed=0).partition.sizes.tolist()
      [2, 2]
    """

    dataset: Dataset
    "The data set, whose training examples the partition indexes."
    partition: Partition
    "The clients' own examples."
    server_examples: Examples | None
    "The server's examples, `[n_0, ...]`."
    local_epochs: int | None
    "Local epochs; None for methods that condense data, and for runs that set `local_steps`."
    seed: int
    "Seed of the partition."
    samples_per_round: int | None = None
    "Samples that all clients process in a round, for runs that set `local_steps`."
    withheld_indices: np.ndarray | None = None
    "Positions of the examples for validation and of held-out clients, on which nothing trains."
    drift: Drift | None = None
    "Active examples of the clients over the rounds; None: all examples in every round."


class RoundInput(NamedTuple):
    """Arrays that every round of a method reads in addition to its schedule and the examples.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.methods import RoundInput
      >>> count_classes = lambda federations: [np.int32(f.dataset.num_classes) for f in federations]
      >>> RoundInput("num_classes", count_classes).make_inputs([])
      []
    """

    name: str
    "A round reads the arrays as `cohort.inputs[name]`."
    make_inputs: Callable[[Sequence[FederationData]], list[Tree]]
    """`make_inputs(federations) -> inputs`: one pytree of host arrays for each federation, all with
    the same structure and shapes."""


class FineTuning(NamedTuple):
    """Training of a copy of the global model by every client, before the copy is evaluated.

    The copies are discarded after the evaluation, so the federation does not depend on them. Cost:
    every evaluation trains all clients and holds one model of each.

    Example:
      >>> from fedjax_het import register_method
      >>> from fedjax_het.algorithms.fedavg import fedavg
      >>> from fedjax_het.methods import FineTuning, make_local_model_training
      >>> def build_tuned(training, plan):
      ...     fine_tuning = FineTuning(make_local_model_training(training), epochs=2)
      ...     return fedavg(training, plan)._replace(fine_tuning=fine_tuning)
      >>> register_method("tuned", build_tuned, evaluated_models=("tuned",)).name
      'tuned'
    """

    client_algorithm: ClientAlgorithm
    "Client whose state is the model, see `make_local_model_training`."
    epochs: int
    "Passes over the client's data."
    steps: int | None = None
    "Upper limit of the number of minibatches; None: no limit."


class ServerStage(NamedTuple):
    """Long work of the server between two rounds, done in parts, so that it can be resumed.

    Example:
      >>> from fedjax_het.methods import ServerStage
      >>> stage = ServerStage(
      ...     "warm-up",
      ...     before_rounds=(0,),
      ...     num_iterations=10,
      ...     count_completed=lambda state: int(state.server.extra),
      ...     advance=lambda hp, state, key, num_iterations, server_examples: state,
      ... )
      >>> stage.num_iterations
      10
    """

    name: str
    "Name of the stage in the progress display."
    before_rounds: tuple[NonNegativeInt, ...]
    "The rounds, counted from 0 and ascending, before which the stage runs."
    num_iterations: NonNegativeInt
    "Number of iterations of the stage before each of these rounds."
    count_completed: Callable[[State], int]
    "`count_completed(state) -> int`: number of completed iterations before all these rounds."
    advance: Callable[[HyperParameters, State, jax.Array, jax.Array, Examples | None], State]
    """`advance(hp, state, key, num_iterations, server_examples) -> state`: the state after
    `num_iterations` (traced) more iterations. `server_examples` is None for a server without."""


class AsynchronousSchedule(NamedTuple):
    """Sizes of an asynchronous method, on which the simulation of its clients depends.

    Example:
      >>> from fedjax_het.algorithms.base import AsynchronousSchedule
      >>> AsynchronousSchedule(buffer_size=5, max_staleness=20).buffer_size
      5
    """

    buffer_size: PositiveInt | None
    """Updates that the server collects before it changes its model; None: half of the clients that
    train at a time."""
    max_staleness: NonNegativeInt
    "Largest staleness of an update that the server uses."


class Algorithm(NamedTuple):
    """A federated method: pure functions and their properties.

    `build_federated_algorithm` fills the fields for methods whose clients train locally. A method
    changes single fields with `algorithm._replace(...)`.

    Example:
      >>> from fedjax_het import register_method
      >>> from fedjax_het.algorithms.fedavg import fedavg
      >>> def build_counted(training, plan):
      ...     count = lambda hp, state: {"rounds": int(state.round)}
      ...     return fedavg(training, plan)._replace(summary=count)
      >>> register_method("counted", build_counted).name
      'counted'
    """

    # --- rounds ---

    init: Callable[[HyperParameters, jax.Array, Tree, int], State]
    """`init(hp, key, variables, num_clients) -> State`: the state before the first round;
    `variables` contain the initial model."""
    round: Callable[[HyperParameters, State, jax.Array, Cohort], tuple[State, RoundInfo]]
    """`round(hp, state, key, cohort) -> (state, info)`: one round, usually by `train_cohort`; the
    state with unchanged structure, shapes and types."""
    global_model: Callable[[State], Tree] | None
    """`global_model(state) -> variables`: the model that is sent to clients and evaluated; None for
    methods without one."""
    with_global_model: Callable[[State, Tree], State] | None
    """`with_global_model(state, variables) -> state`: the state with another global model; None for
    methods without one."""
    traffic: Callable[[HyperParameters, State], Traffic]
    "`traffic(hp, state) -> Traffic`, from arrays or from their shapes."
    initial_traffic: Callable[[FederationData], InitialTraffic] = lambda data: InitialTraffic()
    "`initial_traffic(federation_data) -> InitialTraffic`; default: 0 bytes."
    compressed_params: Callable[[State], Tree] | None = None
    """`compressed_params(state) -> parameters` whose change clients compress by
    `LocalTraining.compressor`; `traffic` counts them as they are. None: nothing is compressed, and
    runs with the setting `compression` are refused."""

    # --- evaluation ---

    result_model: Callable[[State], Tree] | None = None
    """`result_model(state) -> variables`: the model that is evaluated and returned instead of the
    global model, which is only sent to clients; None: the global model."""
    personal_variables: Callable[[HyperParameters, State, jax.Array], Tree] | None = None
    """`personal_variables(hp, state, k) -> variables`: the model that is evaluated on client k's
    own test; None: the global model."""
    personal_model: Model | None = None
    "The network of `personal_variables`; None: the run's."
    fine_tuning: FineTuning | None = None
    "How every client trains a copy of the global model that is evaluated instead of it."
    record_shapes: Callable[[int], dict[str, tuple[int, ...]]] = lambda num_clients: {}
    "`record_shapes(num_clients) -> {name: shape}` of `RoundInfo.records`; default: no records."

    # --- data of a round ---

    extra_passes: NonNegativeInt = 0
    "Passes over a client's data before its local epochs."
    trains_on_server_data: bool = False
    """Whether clients train on the server's examples in addition to their own examples. The method
    declares it as `required_data=("server_data", "shared_server_data")`."""
    can_page_state: bool = False
    """Whether `State.clients` may hold a table of rows instead of all K clients. Required: a round
    reads the rows of its own clients only; `init` makes the same row for every client, which does
    not depend on the weights of the initial model, since these may be pretrained.
    `build_federated_algorithm` finds out, and methods with `personal_variables` never do."""
    asynchronous: AsynchronousSchedule | None = None
    """Clients that train without waiting for each other, see `ClientInfo.staleness`; None: clients
    of a round receive the same model."""
    condensation_work: CondensationWork | None = None
    "How clients condense their data instead of training; None: they train."
    combines_changes: bool = False
    """Whether a round applies `LocalTraining.attacks` and `LocalTraining.aggregations`; otherwise
    runs with such settings are refused."""
    protects_privacy: bool = False
    """Whether a round applies `LocalTraining.privacy` and reads the clients' data in no other way;
    otherwise runs with the setting `privacy` are refused. `with_server_step` unsets it."""
    round_inputs: tuple[RoundInput, ...] = ()
    "Arrays that a round reads in addition to its schedule and the examples."

    # --- diagnostics ---

    server_gradient: Callable[[State, dict[str, Tree], Tree], Tree] | None = None
    """`server_gradient(state, inputs, variables) -> gradient`: gradient of the loss on the server's
    data, which `gradient_gaps` compares with the gradient on all clients' data; None: on the
    server's examples."""
    diagnostics: ClientDiagnostics | None = None
    """Measurement of `gradient_gaps` on all clients' data; None: the distances of the global
    model's gradients."""

    # --- work of the server ---

    server_stages: tuple[ServerStage, ...] = ()
    "Work of the server between rounds, outside the rounds' program, such as DynaFed's synthesis."
    server_batch_size: NonNegativeInt = 0
    """Samples per step of the work in `ExecutionPlan.shard_server_work`, with which a measurement
    decides whether the devices share it; 0: there is no such work."""

    # --- results in addition to curves ---

    artifacts: Callable[[State], dict[str, Any]] = lambda state: {}
    "`artifacts(state) -> {name: array}`, stored with the result."
    summary: Callable[[HyperParameters, State], dict[str, Any]] = lambda hp, state: {}
    "`summary(hp, state) -> {name: value}`, values that JSON can represent, stored with the result."

    def get_result_model(self, state: State) -> Tree:
        """Return the model that is evaluated and returned, of a method with a global model.

        Args:
          state: state of the federation.

        Returns:
          Variables of the result model; without a result model, variables of the global model.
        """
        get_model = self.result_model or self.global_model
        assert get_model is not None
        return get_model(state)


def take_outer_states(function: Any, get_inner: Callable[[State], State]) -> Any:
    """Return a function of an inner method's states for states that contain them.

    Args:
      function: a function some of whose arguments are a `State`; None stays None.
      get_inner: `get_inner(state)`: the inner method's state within a state.

    Returns:
      The function, which applies `get_inner` to each argument that is a `State`.

    Example:
      >>> from fedjax_het.algorithms.base import State, take_outer_states
      >>> get_inner = lambda state: state._replace(server=state.server["inner"])
      >>> read_server = take_outer_states(lambda state: state.server, get_inner)
      >>> read_server(State({"inner": "weights"}, None, 0))
      'weights'
    """

    def call(*args):
        return function(*(get_inner(a) if isinstance(a, State) else a for a in args))

    return function and call


def with_inner_states(
    algorithm: Algorithm,
    get_inner: Callable[[State], State],
    with_inner: Callable[[State, State], State],
) -> Algorithm:
    """Return a method whose states contain the states of another method.

    Args:
      algorithm: the inner method.
      get_inner: `get_inner(state)`: the inner method's state within a state of the new method.
      with_inner: `with_inner(state, inner)`: `state` with another state of the inner method.

    Returns:
      The inner method with functions that take states of the new method. The caller replaces `init`
      and `round`, which still are the inner method's functions.

    Example:
      >>> from fedjax_het.algorithms.base import Algorithm, State, with_inner_states
      >>> read_server = lambda state: state.server
      >>> inner = Algorithm(*(None, None, read_server, None, None))
      >>> get_inner = lambda state: state._replace(server=state.server["inner"])
      >>> with_inner = lambda state, inner: state._replace(server={"inner": inner.server})
      >>> outer = with_inner_states(inner, get_inner, with_inner)
      >>> outer.global_model(State({"inner": "weights"}, None, 0))
      'weights'
    """

    def return_outer_states(function: Any) -> Any:
        change = take_outer_states(function, get_inner)

        def call(*args):
            (state,) = (a for a in args if isinstance(a, State))
            return with_inner(state, change(*args))

        return function and call

    def change_stage(stage: ServerStage) -> ServerStage:
        return stage._replace(
            count_completed=take_outer_states(stage.count_completed, get_inner),
            advance=return_outer_states(stage.advance),
        )

    readers = (
        *("global_model", "result_model", "personal_variables", "server_gradient"),
        *("traffic", "compressed_params", "artifacts", "summary"),
    )
    return algorithm._replace(
        **{name: take_outer_states(getattr(algorithm, name), get_inner) for name in readers},
        with_global_model=return_outer_states(algorithm.with_global_model),
        server_stages=tuple(map(change_stage, algorithm.server_stages)),
    )
