"""Fine-tuned copies of a global model (K. Wang et al., 2019, arXiv:1910.10252)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from fedjax_het.algorithms import fedavg, fedprox
from fedjax_het.algorithms.base import Algorithm, FineTuning
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.training_variants import make_local_model_training
from fedjax_het.utils.config import Config, NonNegativeInt


@dataclass(frozen=True)
class FineTuningOptions(Config):
    """Choices of fine-tuning."""

    tuning_epochs: NonNegativeInt = 5
    "Epochs of each copy over the client's data; 0: the global model is evaluated."


def build_fine_tuned(
    training: LocalTraining,
    plan: ExecutionPlan,
    *,
    build_base: Callable[..., Algorithm],
    options: FineTuningOptions,
) -> Algorithm:
    """Fine-tuning: every client evaluates a copy of the global model that it trains first.

        theta_k = LocalSGD(w) on client k's data for `tuning_epochs` epochs.

    The copies are trained by the local optimizer without the base's own terms, and are discarded
    after the evaluation. The global model is therefore equal to the global model of the base in
    every round.

    Traffic and client state equal the traffic and state of the base. Cost: every evaluation trains
    all clients and holds one model of each.

    Departure: FedAMP's comparison does not state its number of epochs ("many fine-tuning steps"); 5
    are a choice of this package.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      build_base: `build_base(training, plan)`, the method whose global model is tuned.
      options: choices of fine-tuning.

    Returns:
      The method.
    """
    epochs = options.tuning_epochs
    fine_tuning = FineTuning(make_local_model_training(training), epochs) if epochs else None
    return build_base(training, plan)._replace(fine_tuning=fine_tuning)


def _make_spec(base: AlgorithmSpec, color: str) -> AlgorithmSpec:
    """Return the entry of a method whose global model is tuned."""
    return replace(
        base,
        name=f"{base.name}_ft",
        build=partial(build_fine_tuned, build_base=base.build),
        title=f"{base.title}-FT",
        description=f"{base.title}, evaluated after fine-tuning at each client (Wang et al., 2019)",
        paper="K. Wang et al., 2019, arXiv:1910.10252",
        options=FineTuningOptions,
        rules=(),
        wrappable_as="nothing",
        evaluated_models=("tuned",),
        color=color,
    )


FEDAVG_FT = _make_spec(fedavg.SPEC, "#6BAED6")
FEDPROX_FT = _make_spec(fedprox.SPEC, "#F5C26B")
