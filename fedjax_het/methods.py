"""Everything that the file of a method imports, in one namespace.

A method is a function `build(training, plan) -> Algorithm`. `build_federated_algorithm` makes the
`Algorithm` from a `ClientAlgorithm`, the functions of one client:

    init(hp, variables) -> state                       before the client's first round
    begin(context, state) -> local                     at the start of a round
    step(context, local, batch) -> (local, loss)       for each minibatch
    end(context, local, state) -> (update, state, output)

`context` is a `ClientContext`: `hp` (values of the hyper-parameters), `message` (what the server
sent), `client` (id, number of samples and of steps) and `key` (PRNG key).

`make_local_sgd` returns FedAvg's client. A method replaces what differs. FedAvg with a pull of each
client to the global model, that reports how far clients move:

>>> from dataclasses import dataclass
>>> import jax
>>> import optax
>>> from fedjax_het import RunSpec, simulate
>>> from fedjax_het.methods import (
...     ClientUpdate, Config, NonNegativeFloat, ServerMessage, add_mean_change,
...     build_federated_algorithm, make_local_sgd, register_method,
... )

>>> @dataclass(frozen=True)
... class TetherHyperParameters(Config):
...     tether: NonNegativeFloat = 0.1
...     "Strength of the pull to the global model."

>>> def build_tethered(training, plan):
...     def adjust(context, gradient, local, batch):
...         params, anchor = local.variables["params"], context.message.variables["params"]
...         strength = context.hp["tether"]
...         pull = lambda g, w, a: g + strength * (w - a)
...         return jax.tree.map(pull, gradient, params, anchor), local.aux
...
...     base = make_local_sgd(training, adjust=adjust)
...
...     def end(context, local, state):
...         update, state, output = base.end(context, local, state)
...         distance = optax.tree.norm(update.mean["params"])
...         return ClientUpdate(mean=(update.mean, distance)), state, output
...
...     def init_server(hp, variables):
...         return ServerMessage(variables, extra=jax.numpy.zeros(()))
...
...     def update_server(hp, server, client_update, counts):
...         change, distance = client_update.mean
...         return add_mean_change(hp, server, change)._replace(extra=distance)
...
...     client_algorithm = base._replace(end=end)
...     return build_federated_algorithm(
...         training, plan, client_algorithm, init_server=init_server, update=update_server
...     )._replace(summary=lambda hp, state: {"distance": state.server.extra})

>>> spec = register_method(
...     "tethered", build_tethered, "FedAvg with a pull", hyperparameters=TetherHyperParameters
... )
>>> run = RunSpec("tethered", num_clients=4, rounds=2, model="mlp", hp={"tether": 0.5})
>>> result = simulate(run)
>>> result.metrics["test_accuracy"].shape
(2,)
>>> result.summary["distance"] > 0
True

The files in `fedjax_het/algorithms/` are further examples; `fedprox.py` is the shortest.
"""

from fedjax_het.algorithms import METHODS, register_method
from fedjax_het.algorithms.base import (
    Algorithm,
    FederationData,
    FineTuning,
    InitialTraffic,
    RoundInfo,
    RoundInput,
    ServerStage,
    State,
    Traffic,
)
from fedjax_het.algorithms.builders import (
    CohortCounts,
    add_mean_change,
    build_federated_algorithm,
    get_server_variables,
    model_traffic,
    num_bytes,
    with_server_variables,
)
from fedjax_het.algorithms.client_state import build_dual_model_algorithm
from fedjax_het.algorithms.server_step import (
    ServerStepContext,
    get_server_examples,
    with_server_step,
)
from fedjax_het.algorithms.spec import AlgorithmSpec, DefaultsRule
from fedjax_het.core.client_algorithm import (
    Batch,
    ClientAlgorithm,
    ClientContext,
    ClientInfo,
    ClientUpdate,
    HyperParameters,
)
from fedjax_het.core.client_loop import (
    ClientModels,
    Cohort,
    CohortResult,
    Examples,
    tile_over_clients,
    train_cohort,
)
from fedjax_het.core.contract_checks import ContractError, with_contract_checks
from fedjax_het.core.device_exchange import get_client_row
from fedjax_het.core.distillation import compute_logits, compute_weighted_sum
from fedjax_het.core.evaluation import correct
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.gradient_diagnostics import ClientDiagnostics
from fedjax_het.core.local_training import (
    ClientTrainState,
    LocalTraining,
    ServerMessage,
    add_proximal_gradient,
    apply_gradient,
    begin_local_training,
    count_optimizer_steps,
    init_local_optimizer,
    make_local_model_training,
    make_local_sgd,
    make_training_step,
    require_constant_lr,
    select_kept_optimizer_state,
    with_plain_sgd,
)
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.core.server_parallelism import ServerParallelism
from fedjax_het.core.server_training import train_on_server
from fedjax_het.core.task import Task
from fedjax_het.nn import Model
from fedjax_het.utils.config import (
    Bounds,
    Config,
    DecayFactor,
    MomentumCoefficient,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
)
from fedjax_het.utils.errors import ConfigError, require

__all__ = [
    "METHODS",
    "Algorithm",
    "AlgorithmSpec",
    "Batch",
    "Bounds",
    "ClientAlgorithm",
    "ClientContext",
    "ClientDiagnostics",
    "ClientInfo",
    "ClientModels",
    "ClientTrainState",
    "ClientUpdate",
    "Cohort",
    "CohortCounts",
    "CohortResult",
    "Config",
    "ConfigError",
    "ContractError",
    "DecayFactor",
    "DefaultsRule",
    "Examples",
    "ExecutionPlan",
    "FederationData",
    "FineTuning",
    "HyperParameters",
    "InitialTraffic",
    "LocalTraining",
    "Model",
    "MomentumCoefficient",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "Purpose",
    "RoundInfo",
    "RoundInput",
    "ServerMessage",
    "ServerParallelism",
    "ServerStage",
    "ServerStepContext",
    "State",
    "Task",
    "Traffic",
    "UnitInterval",
    "add_mean_change",
    "add_proximal_gradient",
    "apply_gradient",
    "begin_local_training",
    "build_dual_model_algorithm",
    "build_federated_algorithm",
    "compute_logits",
    "compute_weighted_sum",
    "correct",
    "count_optimizer_steps",
    "fold_in_purpose",
    "get_client_row",
    "get_server_examples",
    "get_server_variables",
    "init_local_optimizer",
    "make_local_model_training",
    "make_local_sgd",
    "make_training_step",
    "model_traffic",
    "num_bytes",
    "register_method",
    "require",
    "require_constant_lr",
    "select_kept_optimizer_state",
    "tile_over_clients",
    "train_cohort",
    "train_on_server",
    "with_contract_checks",
    "with_plain_sgd",
    "with_server_step",
    "with_server_variables",
]
