"""Methods with options of a test's own, and such that they are quick."""

from functools import partial
from typing import get_type_hints

from fedjax_het.algorithms import entry_of
from fedjax_het.common.records import read
from support.data import SIZES

FAST_SYNTHESIS = {
    "num_iterations": 2,
    "inner_steps": 2,
    "trajectory_rounds": 3,
    "segment_length": 2,
    "target_counts": 1,
    "num_samples": 6,
    "augment_strategy": "none",
}
FAST_CONDENSATION = {"ipc": 2, "steps": 3, "server_epochs": 2, "server_batch_size": 4}
FAST_DISTILLATION = {"distill_epochs": 3, "distill_batch_size": 4}
FAST_GENERATOR = {"generator_hidden": 5, "generator_noise": 2, "generator_steps": 3}
FAST = {
    "dynafed": FAST_SYNTHESIS,
    "feddm": FAST_CONDENSATION,
    "fedaf": FAST_CONDENSATION,
    "fedgen": FAST_GENERATOR,
    "feddf": FAST_DISTILLATION,
    "fedbe": {**FAST_DISTILLATION, "num_samples": 3},
}
# The mean logits of linear models are those of their mean: FedDF would follow rounding errors.
NUMBERS = {"feddf": {"server_lr": 0.7}}


def registered(name):
    """-> (build, settings of `small`) of a registered method, such that it is quick."""
    entry, options = entry_of(name, {}), FAST.get(name, {})
    numbers = defaults(entry, options) | {"local_lr": 0.1, **NUMBERS.get(name, {})}
    settings = {"hp": numbers, "scored": entry.scored[0]}
    return builder_of(entry, options), settings


def chosen(build, *, base=None, tuned=None, **values):
    """`build` with these options, and over this base."""
    record = get_type_hints(build.func if isinstance(build, partial) else build)["options"]
    others = {"base": base, "tuned": tuned}
    others = {name: other for name, other in others.items() if other is not None}
    return partial(build, options=read(record, values), **others)


def defaults(entry, options, optimizer="sgd", num_clients=len(SIZES)) -> dict[str, float]:
    """A method's hyper-parameters as they are where nothing is said."""
    numbers = entry.hyper_parameters(optimizer, entry.fill(options), num_clients)
    return {name: number.default for name, number in numbers.items()}


def builder_of(entry, options):
    """The method's `build(training, plan)`."""
    return lambda training, plan: entry.make(training, plan, entry.fill(options))
