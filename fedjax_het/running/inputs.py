"""What the rounds' program reads, one record an input: its name, what it is to the federations,
who wants it, and how it is made.

To add one, give it a field in `engine.rounds.ChunkInputs`, where rounds read it, and a record in
`INPUTS`. What one method alone reads needs neither: see `algorithms.contract.RoundInput`.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.algorithms.contract import Algorithm
from fedjax_het.common.arrays import stacked
from fedjax_het.data import Dataset
from fedjax_het.data.server_data import Pool
from fedjax_het.engine.evaluation import EvaluationSet, client_tests, evaluation_set, test_batches
from fedjax_het.engine.lanes import Examples
from fedjax_het.engine.plan import BLOCK, DEVICE, RUN, RUNS, SHARED, Plan
from fedjax_het.engine.randomness import Stream, device_key
from fedjax_het.engine.rounds import SCHEDULE_KINDS, ChunkInputs, Measuring
from fedjax_het.engine.schedule import (
    RoundSchedule,
    Scheduler,
    Shape,
    merged_cuts,
    stack_rounds,
    with_rows,
)
from fedjax_het.running.federations import Federation, Shapes, server_examples_of


class Reader(NamedTuple):
    """The program that reads: what decides which inputs it wants. Static."""

    algorithm: Algorithm
    measuring: Measuring
    has_server: bool  # whether the server has examples
    scheduled: bool = False  # whether the local rate has a schedule over rounds


@dataclass(frozen=True)
class Source:
    """What inputs are made of.

    Attributes:
      reader: the program that reads them.
      dataset, pool, shapes: of a group; pool: what the server's examples are from besides those of
        training.
      places: the federation of each place of the plan, an idle place's being the last federation
        once more, of which `num_federations` are different ones.
      num_rows: of the table of client states on the devices, where the others are on the host.
      rounds: of a call of the program, which has room for `capacity` of them.
      trial: whether it only makes the first step of every lane, to check its numbers.
    """

    plan: Plan
    reader: Reader
    dataset: Dataset
    pool: Pool | None
    shapes: Shapes
    places: Sequence[Federation] = ()
    num_federations: int = 0
    num_rows: int | None = None
    capacity: int = 1
    rounds: range = field(default=range(0))
    trial: bool = False

    @property
    def apart(self) -> bool:
        """Whether federations are on devices of their own, which gives arrays an axis of places."""
        return self.plan.spreads == RUNS

    def for_places(self, trees: Sequence[Any]) -> Any:
        """One pytree for every place -> what programs take: stacked, or the only one."""
        if not self.apart:
            return self.plan.put(trees[0])
        return self.plan.put(jax.tree.map(lambda *leaves: stacked(leaves), *trees), RUN)

    def keys(self, stream: Stream) -> jax.Array:
        """The key of every place's run."""
        return self.for_places([device_key(f.spec.seed, stream) for f in self.places])


class Scope(enum.Enum):
    """How often an input is made."""

    GROUP = "once for all federations of a group"
    RUNS = "once for the federations that go in step"
    CALL = "for every call of the program"


class Input(NamedTuple):
    """One of the fields of `ChunkInputs`.

    kind: what it, or each of its parts, is to the federations, see `Plan.over_runs`.
    wanted(reader): whether there is one; else it is None.
    make(source) -> the arrays, placed.
    trial: whether it is another one where only first steps are made.
    """

    name: str
    kind: Any
    wanted: Callable[[Reader], bool]
    make: Callable[[Source], Any]
    scope: Scope
    trial: bool = False


def _always(reader: Reader) -> bool:
    return True


def _has_global_model(reader: Reader) -> bool:
    return reader.algorithm.global_model is not None


def _tests_clients(reader: Reader) -> bool:
    return reader.measuring.tests_clients


# --- once for all federations of a group ---------------------------------------------------------


def _examples(source: Source) -> Examples:
    data, pool = source.dataset, source.pool
    images, labels = data.train_images, data.train_labels
    if pool is not None and source.reader.algorithm.shares_server_data:
        images, labels = np.concatenate([images, pool[0]]), np.concatenate([labels, pool[1]])
    return source.plan.put(Examples(images, np.asarray(labels, np.int32)))


def _test(source: Source) -> EvaluationSet:
    data = source.dataset
    return evaluation_set(source.plan, data.test_images, data.test_labels, data.test_domains)


def _test_examples(source: Source) -> Examples:
    data = source.dataset
    return source.plan.put(Examples(data.test_images, np.asarray(data.test_labels, np.int32)))


# --- once for the federations that go in step ----------------------------------------------------


def _client_tests(source: Source) -> Any:
    shape = source.shapes.tests
    assert shape is not None
    own = (f.tests for f in source.places if f.tests is not None)
    tests = [client_tests(source.plan, partition, shape) for partition in own]
    return source.for_places(tests) if source.apart else source.plan.put(tests[0], BLOCK)


def _server(source: Source) -> Examples:
    examples = [server_examples_of(f, source.dataset, source.pool) for f in source.places]
    return source.for_places(examples)


def _survey(source: Source) -> RoundSchedule:
    """The one round in which all clients' gradients are measured."""
    assert source.shapes.survey is not None
    surveys = [f.survey for f in source.places if f.survey is not None]
    once = replace(source, rounds=range(1), capacity=1)
    schedules = _schedules(once, surveys, source.shapes.survey)
    return jax.tree.map(lambda a: a[:, 0] if source.apart else a[0], schedules)


# --- for every call ------------------------------------------------------------------------------


def _num_rounds(source: Source) -> jax.Array:
    """As many as there are, for every device that has a run."""
    count = jnp.int32(len(source.rounds))
    if not source.apart:
        return source.plan.put(count)
    starts = np.arange(0, len(source.places), source.plan.width)
    return source.plan.put(np.int32(count) * (starts < source.num_federations), DEVICE)


def _rates(source: Source) -> jax.Array:
    """[R] factors of `local_lr` in the rounds of the call, padded to its capacity."""
    padding = np.ones(source.capacity - len(source.rounds), np.float32)
    rounds = list(source.rounds)
    return source.for_places([np.append(f.rates[rounds], padding) for f in source.places])


def _num_eval_batches(source: Source) -> jax.Array:
    """All of a block's; the first, where only first steps are made."""
    if source.trial or not _has_global_model(source.reader):
        return source.plan.put(jnp.int32(1))
    _, batches = test_batches(source.plan, source.dataset.test_images)
    return source.plan.put(jnp.int32(batches))


def _schedule(source: Source) -> RoundSchedule:
    schedulers = [f.scheduler for f in source.places]
    return _schedules(source, schedulers, source.shapes.schedule, paged=True)


def _tuning(source: Source) -> RoundSchedule:
    assert source.shapes.tuning is not None
    schedulers = [f.tuning for f in source.places if f.tuning is not None]
    return _schedules(source, schedulers, source.shapes.tuning)


def _schedules(
    source: Source, schedulers: Sequence[Scheduler], shape: Shape, *, paged: bool = False
) -> RoundSchedule:
    """The rounds of a call as every place's scheduler plans them, padded to the call's capacity."""
    width, schedules = source.plan.width, []
    for start in range(0, len(schedulers), width):
        in_step = schedulers[start : start + width]
        schedules += [
            stack_rounds(_rounds(source, scheduler, in_step, shape), source.capacity)
            for scheduler in in_step
        ]
    if paged and source.num_rows is not None:
        schedules = [
            with_rows(schedule, scheduler.trained(np.unique(schedule.round)), source.num_rows)
            for schedule, scheduler in zip(schedules, schedulers, strict=True)
        ]
    if not source.apart:
        return source.plan.put(schedules[0])
    columns = zip(SCHEDULE_KINDS, zip(*schedules, strict=True), strict=True)
    stacked_ = RoundSchedule(
        *(np.stack(leaves[::width] if kind == DEVICE else leaves) for kind, leaves in columns)
    )
    return source.plan.put(stacked_, RUN)


def _rounds(
    source: Source, scheduler: Scheduler, in_step: Sequence[Scheduler], shape: Shape
) -> list[RoundSchedule]:
    """A scheduler's rounds, whose segments end where any of the runs `in_step` ends a client."""
    alone = len(in_step) == 1
    if not source.trial:
        return [
            scheduler.round(r, shape, None if alone else merged_cuts(in_step, r))
            for r in source.rounds
        ]
    steps = [scheduler.first_step(r, shape) for r in source.rounds]
    if alone:
        return steps
    # One segment for all: where a lane has no client, it idles.
    return [step._replace(num_segments=np.ones_like(step.num_segments)) for step in steps]


INPUTS: tuple[Input, ...] = (
    Input(
        "hp",
        RUN,
        _always,
        lambda source: source.for_places([f.hp for f in source.places]),
        Scope.RUNS,
    ),
    Input("train_key", RUN, _always, lambda source: source.keys(Stream.TRAIN), Scope.RUNS),
    Input("schedule", SCHEDULE_KINDS, _always, _schedule, Scope.CALL, trial=True),
    Input("rates", RUN, lambda reader: reader.scheduled, _rates, Scope.CALL, trial=True),
    Input("num_rounds", DEVICE, _always, _num_rounds, Scope.CALL, trial=True),
    Input("num_eval_batches", SHARED, _always, _num_eval_batches, Scope.GROUP, trial=True),
    Input("examples", SHARED, _always, _examples, Scope.GROUP),
    Input(
        "tuning",
        SCHEDULE_KINDS,
        lambda reader: reader.algorithm.tuning is not None,
        _tuning,
        Scope.CALL,
        trial=True,
    ),
    Input("test", SHARED, _has_global_model, _test, Scope.GROUP),
    Input("client_tests", RUN, _tests_clients, _client_tests, Scope.RUNS),
    Input("test_examples", SHARED, _tests_clients, _test_examples, Scope.GROUP),
    Input("server", RUN, lambda reader: reader.has_server, _server, Scope.RUNS),
    Input(
        "survey",
        SCHEDULE_KINDS,
        lambda reader: reader.measuring.survey_every > 0,
        _survey,
        Scope.RUNS,
        trial=True,
    ),
    Input(
        "inputs",
        RUN,
        lambda reader: bool(reader.algorithm.inputs),
        lambda source: source.for_places([f.inputs for f in source.places]),
        Scope.RUNS,
    ),
)
assert {wanted.name for wanted in INPUTS} == set(ChunkInputs._fields)


def kinds_of(reader: Reader) -> ChunkInputs:
    """What each of a program's inputs is to the federations."""
    return ChunkInputs(**{given.name: given.kind for given in INPUTS if given.wanted(reader)})


def group_inputs(source: Source) -> dict[str, Any]:
    """What is the same for all federations of a group, by name."""
    return _made(source, lambda given: given.scope is Scope.GROUP)


def run_inputs(source: Source) -> dict[str, Any]:
    """What stays the same for the federations that go in step, by name."""
    return _made(source, lambda given: given.scope is Scope.RUNS)


def call_inputs(source: Source, kept: dict[str, Any]) -> ChunkInputs:
    """What a call of the program reads: what is `kept` of the group and the runs, and the rest."""
    made = _made(source, lambda i: i.trial if source.trial else i.scope is Scope.CALL)
    return ChunkInputs(**(kept | made))


def without_rounds(source: Source, inputs: ChunkInputs) -> ChunkInputs:
    """The same, of which the program runs none."""
    return inputs._replace(num_rounds=_num_rounds(replace(source, rounds=range(0))))


def _made(source: Source, due: Callable[[Input], bool]) -> dict[str, Any]:
    wanted = (given for given in INPUTS if due(given) and given.wanted(source.reader))
    return {given.name: given.make(source) for given in wanted}
