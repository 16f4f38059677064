"""Fine-tuned copies of a global model (K. Wang et al., 2019, arXiv:1910.10252)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from fedjax_het.algorithms import fedavg, fedprox
from fedjax_het.algorithms.base import Algorithm, FineTuning
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, make_local_model_training
from fedjax_het.utils.config import Config, NonNegativeInt


@dataclass(frozen=True)
class FineTuningOptions(Config):
    tuning_epochs: NonNegativeInt = 5
    "Of each copy, over the client's data."


def build_fine_tuned(
    training: LocalTraining,
    plan: ExecutionPlan,
    *,
    build_base: Callable[..., Algorithm],
    options: FineTuningOptions = FineTuningOptions(),
) -> Algorithm:
    """The method `tuned`; to be scored, every client trains a copy of the new global model for
    `tuning_epochs` epochs on its own data, without the method's terms, by the local optimiser.

    Copies are discarded, so the global model's course is that of `tuned`, which 0 epochs are.
    FedAMP's comparison does not say how many epochs it took ("many fine-tuning steps"): 5 are
    chosen. Traffic: of `tuned`. Cost: see `FineTuning`.
    """
    epochs = options.tuning_epochs
    fine_tuning = FineTuning(make_local_model_training(training), epochs) if epochs else None
    return build_base(training, plan)._replace(fine_tuning=fine_tuning)


def _make_fine_tuned_spec(base_spec: AlgorithmSpec, title: str, *, color: str) -> AlgorithmSpec:
    """The entry of a method whose copies are tuned."""
    return replace(
        base_spec,
        name=f"{base_spec.name}_ft",
        build=partial(build_fine_tuned, build_base=base_spec.build),
        description=f"{title}, scored after fine-tuning at each client (Wang et al., 2019)",
        paper="K. Wang et al., 2019, arXiv:1910.10252",
        options=FineTuningOptions,
        protocol="fedamp",
        rules=(),
        wrappable_as="nothing",
        evaluated_models=("tuned",),
        color=color,
    )


FEDAVG_FT = _make_fine_tuned_spec(fedavg.SPEC, "FedAvg", color="#6BAED6")
FEDPROX_FT = _make_fine_tuned_spec(fedprox.SPEC, "FedProx", color="#F5C26B")
