"""Fine-tuned copies of a global model (K. Wang et al., 2019, arXiv:1910.10252)."""

from collections.abc import Callable
from typing import Any

from fedjax_het.algorithms.base import Algorithm, Tuning
from fedjax_het.common.errors import is_whole, require
from fedjax_het.engine.local import LocalTraining, whole_model
from fedjax_het.engine.plan import Plan

FINE_TUNING_OPTIONS = {"tuning_epochs": 5}


def fine_tuned(
    training: LocalTraining, plan: Plan, *, base: Callable[..., Algorithm], tuning_epochs: int
) -> Algorithm:
    """The method `base`; to be scored, every client trains a copy of the new global model for
    `tuning_epochs` epochs on its own data, without the method's terms, by the local optimiser.

    Copies are discarded, so the global model's course is that of `base`; 0 epochs are `base`.
    FedAMP's comparison does not say how many epochs it took ("many fine-tuning steps"): 5 are
    chosen. Traffic: of `base`. Cost: see `Tuning`.
    """
    check_fine_tuning({"tuning_epochs": tuning_epochs})
    tuning = Tuning(whole_model(training), tuning_epochs) if tuning_epochs else None
    return base(training, plan)._replace(tuning=tuning)


def check_fine_tuning(options: dict[str, Any]) -> None:
    """Raise ConfigError unless the epochs are a whole number."""
    epochs = options["tuning_epochs"]
    require(is_whole(epochs, 0), "tuning_epochs", epochs, "a whole number >= 0")
