"""Fine-tuned copies of a global model (K. Wang et al., 2019, arXiv:1910.10252)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from fedjax_het.algorithms import fedavg, fedprox
from fedjax_het.algorithms.contract import Algorithm, Tuning
from fedjax_het.algorithms.entry import Entry
from fedjax_het.common.records import Record, Whole
from fedjax_het.engine.local import LocalTraining, whole_model
from fedjax_het.engine.plan import Plan


@dataclass(frozen=True)
class FineTuningOptions(Record):
    tuning_epochs: Whole = 5
    "Of each copy, over the client's data."


def fine_tuned(
    training: LocalTraining,
    plan: Plan,
    *,
    tuned: Callable[..., Algorithm],
    options: FineTuningOptions = FineTuningOptions(),
) -> Algorithm:
    """The method `tuned`; to be scored, every client trains a copy of the new global model for
    `tuning_epochs` epochs on its own data, without the method's terms, by the local optimiser.

    Copies are discarded, so the global model's course is that of `tuned`, which 0 epochs are.
    FedAMP's comparison does not say how many epochs it took ("many fine-tuning steps"): 5 are
    chosen. Traffic: of `tuned`. Cost: see `Tuning`.
    """
    epochs = options.tuning_epochs
    tuning = Tuning(whole_model(training), epochs) if epochs else None
    return tuned(training, plan)._replace(tuning=tuning)


def _fine_tuned(entry: Entry, title: str, *, colour: str) -> Entry:
    """The entry of a method whose copies are tuned."""
    return replace(
        entry,
        name=f"{entry.name}_ft",
        build=partial(fine_tuned, tuned=entry.build),
        description=f"{title}, scored after fine-tuning at each client (Wang et al., 2019)",
        paper="K. Wang et al., 2019, arXiv:1910.10252",
        options=FineTuningOptions,
        protocol="fedamp",
        rules=(),
        refinable="nothing",
        scored=("tuned",),
        colour=colour,
    )


FEDAVG_FT = _fine_tuned(fedavg.ENTRY, "FedAvg", colour="#6BAED6")
FEDPROX_FT = _fine_tuned(fedprox.ENTRY, "FedProx", colour="#F5C26B")
