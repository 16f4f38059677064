"""A run made ready on the host: who holds what, and when each client is worked on."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fedjax_het.algorithms.contract import Algorithm, Holdings
from fedjax_het.data import Dataset, Partition, ServerData
from fedjax_het.data.server_data import Pool
from fedjax_het.engine.evaluation import TestsShape, tests_shape
from fedjax_het.engine.lanes import Examples
from fedjax_het.engine.plan import Plan
from fedjax_het.engine.randomness import Stream
from fedjax_het.engine.rate_schedules import is_of_host, rate_factors
from fedjax_het.engine.schedule import Scheduler, Shape, common_shape
from fedjax_het.engine.units import ClientUnits, PairUnits
from fedjax_het.running.splits import Split
from fedjax_het.settings.spec import ResolvedSpec

FEW_RUNS, FEW_ROUNDS = 4, 3  # that are packed on each number of lanes that is tried


class Initial(NamedTuple):
    """A first model that is not drawn, on the host, and what tells it from others."""

    variables: Any
    digest: str


@dataclass(frozen=True, eq=False)
class Federation:
    """One run made ready on the host.

    `inputs` is what its method asks for besides, see `Algorithm.inputs`: pytrees by name; `initial`
    the model that it begins with, where that is in a file.
    """

    spec: ResolvedSpec
    split: Split
    scheduler: Scheduler
    tuning: Scheduler | None = None  # of all clients, where copies are tuned to be scored
    survey: Scheduler | None = None  # of all clients, where their gradients are measured
    inputs: dict[str, Any] = field(default_factory=dict)
    initial: Initial | None = None

    @property
    def partition(self) -> Partition:
        return self.split.partition

    @property
    def tests(self) -> Partition | None:
        return self.split.tests

    @property
    def server(self) -> ServerData | None:
        return self.split.server

    @property
    def hp(self) -> dict[str, Any]:
        """Its numeric hyper-parameters as programs read them."""
        read = (item for item in self.spec.hp.items() if not is_of_host(item[0]))
        return {name: np.float32(value) for name, value in read}

    @functools.cached_property
    def rates(self) -> np.ndarray:
        """[R] float32: what `local_lr` is multiplied with in each round."""
        spec = self.spec
        return rate_factors(spec.lr_schedule or "constant", spec.hp, spec.rounds)


class Shapes(NamedTuple):
    """Static sizes that hold for every round of all federations of a group."""

    schedule: Shape
    tuning: Shape | None
    survey: Shape | None
    tests: TestsShape | None


def federation_of(
    spec: ResolvedSpec,
    split: Split,
    units: ClientUnits | PairUnits,
    algorithm: Algorithm,
    *,
    blocks: int,
    lanes: int,
    initial: Initial | None = None,
) -> Federation:
    """The run of resolved settings, on so many blocks of lanes."""
    on = {"blocks": blocks, "lanes": lanes}
    scheduler = Scheduler(
        split.trained_on,
        units,
        seed=spec.seed,
        rounds=spec.rounds,
        participation=spec.participation,
        averaging=spec.averaging,
        eval_every=spec.eval_every,
        **on,
    )
    tuning = survey = None
    if algorithm.tuning is not None:
        copies, own = algorithm.tuning, split.partition
        tuned = ClientUnits(
            own, copies.epochs, spec.batch_size, steps=copies.steps, stream=Stream.TUNING
        )
        tuning = _all_clients(spec, own, tuned, rounds=spec.rounds, averaging=None, **on)
    if spec.gradient_gaps:  # one round, which serves whenever gradients are due
        once = ClientUnits(split.partition, 1, spec.batch_size)
        survey = _all_clients(spec, split.partition, once, rounds=1, averaging="weighted", **on)
    return Federation(spec, split, scheduler, tuning, survey, initial=initial)


def first_rounds(
    specs: Sequence[ResolvedSpec],
    partitions: Sequence[Partition],
    units: Sequence[ClientUnits | PairUnits],
    blocks: int,
    lanes: int,
) -> list[Scheduler]:
    """Of some of the runs, on so many lanes: enough to tell how long the lanes wait."""
    few = itertools.islice(zip(specs, partitions, units, strict=True), FEW_RUNS)
    return [
        Scheduler(
            partition,
            own,
            seed=spec.seed,
            rounds=min(spec.rounds, FEW_ROUNDS),
            participation=spec.participation,
            averaging=spec.averaging,
            eval_every=spec.eval_every,
            blocks=blocks,
            lanes=lanes,
        )
        for spec, partition, own in few
    ]


def _all_clients(
    spec: ResolvedSpec, partition: Partition, units: ClientUnits, *, rounds: int, **settings: Any
) -> Scheduler:
    """Every client in every round that is evaluated."""
    return Scheduler(
        partition,
        units,
        seed=spec.seed,
        rounds=rounds,
        participation=1.0,
        eval_every=spec.eval_every,
        **settings,
    )


def units_of(
    spec: ResolvedSpec, trained_on: Partition, dataset: Dataset, algorithm: Algorithm
) -> ClientUnits | PairUnits:
    """What the lanes of a run go through."""
    if algorithm.pairs is None:
        passes = (spec.local_epochs or 0) + algorithm.extra_passes
        return ClientUnits(trained_on, passes, spec.batch_size, further=spec.local_steps or 0)
    labels, num_classes = dataset.train_labels, dataset.num_classes
    return PairUnits(trained_on, labels, num_classes, algorithm.pairs, spec.batch_size)


def shapes_of(federations: Sequence[Federation], plan: Plan) -> Shapes:
    """Sizes that hold for all of them."""
    first = federations[0]
    tuning = survey = tests = None
    shape_of = partial(common_shape, width=plan.width)
    if first.tuning is not None:
        tuning = shape_of([f.tuning for f in federations if f.tuning])
    if first.survey is not None:
        survey = shape_of([f.survey for f in federations if f.survey])
    if first.tests is not None:
        shapes = (tests_shape(plan, f.tests) for f in federations if f.tests is not None)
        tests = TestsShape(*map(max, zip(*shapes, strict=True)))
    schedule = shape_of([f.scheduler for f in federations])
    return Shapes(schedule, tuning, survey, tests)


def server_examples_of(
    federation: Federation, dataset: Dataset, pool: Pool | None
) -> Examples | None:
    """What a federation's server learns from, on the host; None where it has nothing."""
    if federation.server is None:
        return None
    return Examples(*federation.server.examples(dataset, pool))


def holdings_of(federation: Federation, dataset: Dataset, pool: Pool | None) -> Holdings:
    """What a method's own functions of the host read."""
    spec, samples = federation.spec, None
    if spec.local_steps is not None:
        own, steps = federation.partition, spec.local_steps
        samples = int(ClientUnits(own, 0, spec.batch_size, further=steps).samples.sum())
    return Holdings(
        dataset,
        federation.partition,
        server_examples_of(federation, dataset, pool),
        spec.local_epochs,
        spec.partition_seed,
        samples,
    )


def with_method_inputs(
    federations: Sequence[Federation], algorithm: Algorithm, dataset: Dataset, pool: Pool | None
) -> list[Federation]:
    """The same, with what their method asks for besides."""
    if not algorithm.inputs:
        return list(federations)
    holdings = [holdings_of(federation, dataset, pool) for federation in federations]
    made = {wanted.name: wanted.make(holdings) for wanted in algorithm.inputs}
    return [
        dataclasses.replace(federation, inputs={name: trees[i] for name, trees in made.items()})
        for i, federation in enumerate(federations)
    ]
