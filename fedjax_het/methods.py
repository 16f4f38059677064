"""Everything that the file of a method imports, in one namespace.

A method is a function `build(training, plan) -> Algorithm`. `build_federated_algorithm` makes the
`Algorithm` from a `ClientAlgorithm`, the functions of one client:

    init(hp, variables) -> state                       before the client's first round
    begin(context, state) -> local                     at the start of a round
    step(context, local, batch) -> (local, loss)       for each minibatch
    end(context, local, state) -> (update, state, output)

`context` is a `ClientContext`: `hp` (values of the hyperparameters), `message` (from the server),
`client` (id, number of samples and of steps) and `key` (PRNG key).

`make_local_sgd` returns FedAvg's client. Its arguments `adjust` and `loss_and_gradient` change the
gradient or the loss of every step; a method may also replace single functions. The example is
FedAvg with a pull of each client to the global model, that reports how far clients move.
The files in `fedjax_het/algorithms/` are further examples; `fedprox.py` is the shortest.

Example:
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
"""

from fedjax_het.algorithms import METHODS as METHODS
from fedjax_het.algorithms import register_method as register_method
from fedjax_het.algorithms.base import Algorithm as Algorithm
from fedjax_het.algorithms.base import FederationData as FederationData
from fedjax_het.algorithms.base import FineTuning as FineTuning
from fedjax_het.algorithms.base import InitialTraffic as InitialTraffic
from fedjax_het.algorithms.base import RoundInfo as RoundInfo
from fedjax_het.algorithms.base import RoundInput as RoundInput
from fedjax_het.algorithms.base import ServerStage as ServerStage
from fedjax_het.algorithms.base import State as State
from fedjax_het.algorithms.base import Traffic as Traffic
from fedjax_het.algorithms.builders import CohortCounts as CohortCounts
from fedjax_het.algorithms.builders import add_mean_change as add_mean_change
from fedjax_het.algorithms.builders import build_federated_algorithm as build_federated_algorithm
from fedjax_het.algorithms.builders import get_server_variables as get_server_variables
from fedjax_het.algorithms.builders import model_traffic as model_traffic
from fedjax_het.algorithms.builders import num_bytes as num_bytes
from fedjax_het.algorithms.builders import with_server_variables as with_server_variables
from fedjax_het.algorithms.client_state import (
    build_dual_model_algorithm as build_dual_model_algorithm,
)
from fedjax_het.algorithms.server_step import ServerStepContext as ServerStepContext
from fedjax_het.algorithms.server_step import get_server_examples as get_server_examples
from fedjax_het.algorithms.server_step import with_server_step as with_server_step
from fedjax_het.algorithms.spec import AlgorithmSpec as AlgorithmSpec
from fedjax_het.algorithms.spec import DefaultsRule as DefaultsRule
from fedjax_het.core.client_algorithm import Batch as Batch
from fedjax_het.core.client_algorithm import ClientAlgorithm as ClientAlgorithm
from fedjax_het.core.client_algorithm import ClientContext as ClientContext
from fedjax_het.core.client_algorithm import ClientInfo as ClientInfo
from fedjax_het.core.client_algorithm import ClientUpdate as ClientUpdate
from fedjax_het.core.client_algorithm import HyperParameters as HyperParameters
from fedjax_het.core.client_loop import Cohort as Cohort
from fedjax_het.core.client_loop import CohortResult as CohortResult
from fedjax_het.core.client_loop import Examples as Examples
from fedjax_het.core.client_loop import train_cohort as train_cohort
from fedjax_het.core.client_rows import ClientModels as ClientModels
from fedjax_het.core.client_rows import get_client_row as get_client_row
from fedjax_het.core.client_rows import tile_over_clients as tile_over_clients
from fedjax_het.core.contract_checks import ContractError as ContractError
from fedjax_het.core.contract_checks import with_contract_checks as with_contract_checks
from fedjax_het.core.distillation import compute_logits as compute_logits
from fedjax_het.core.distillation import compute_weighted_sum as compute_weighted_sum
from fedjax_het.core.execution_plan import ExecutionPlan as ExecutionPlan
from fedjax_het.core.gradient_diagnostics import ClientDiagnostics as ClientDiagnostics
from fedjax_het.core.local_training import ClientTrainState as ClientTrainState
from fedjax_het.core.local_training import LocalTraining as LocalTraining
from fedjax_het.core.local_training import ServerMessage as ServerMessage
from fedjax_het.core.local_training import apply_gradient as apply_gradient
from fedjax_het.core.local_training import begin_local_training as begin_local_training
from fedjax_het.core.local_training import init_local_optimizer as init_local_optimizer
from fedjax_het.core.local_training import make_local_sgd as make_local_sgd
from fedjax_het.core.local_training import make_training_step as make_training_step
from fedjax_het.core.local_training import (
    select_kept_optimizer_state as select_kept_optimizer_state,
)
from fedjax_het.core.rng import Purpose as Purpose
from fedjax_het.core.rng import fold_in_purpose as fold_in_purpose
from fedjax_het.core.server_parallelism import ServerParallelism as ServerParallelism
from fedjax_het.core.server_training import train_on_server as train_on_server
from fedjax_het.core.task import Task as Task
from fedjax_het.core.training_variants import add_proximal_gradient as add_proximal_gradient
from fedjax_het.core.training_variants import count_optimizer_steps as count_optimizer_steps
from fedjax_het.core.training_variants import (
    make_local_model_training as make_local_model_training,
)
from fedjax_het.core.training_variants import (
    measure_applied_gradient as measure_applied_gradient,
)
from fedjax_het.core.training_variants import require_constant_lr as require_constant_lr
from fedjax_het.core.training_variants import with_plain_sgd as with_plain_sgd
from fedjax_het.nn import Model as Model
from fedjax_het.nn.model import Head as Head
from fedjax_het.tasks.classification import correct as correct
from fedjax_het.utils.config import Bounds as Bounds
from fedjax_het.utils.config import Config as Config
from fedjax_het.utils.config import DecayFactor as DecayFactor
from fedjax_het.utils.config import HyperParameter as HyperParameter
from fedjax_het.utils.config import MomentumCoefficient as MomentumCoefficient
from fedjax_het.utils.config import NonNegativeFloat as NonNegativeFloat
from fedjax_het.utils.config import NonNegativeInt as NonNegativeInt
from fedjax_het.utils.config import PositiveFloat as PositiveFloat
from fedjax_het.utils.config import PositiveInt as PositiveInt
from fedjax_het.utils.config import SearchRange as SearchRange
from fedjax_het.utils.config import UnitInterval as UnitInterval
from fedjax_het.utils.errors import ConfigError as ConfigError
from fedjax_het.utils.errors import require as require
