"""Runs that go in step: what they keep while they are advanced, and how they begin."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.contract import Algorithm, HostWork
from fedjax_het.common.arrays import host_values
from fedjax_het.engine.footprint import compiled_bytes
from fedjax_het.engine.host_state import Pager
from fedjax_het.engine.plan import RUN, Plan
from fedjax_het.engine.randomness import Stream
from fedjax_het.engine.rounds import ChunkInputs
from fedjax_het.running.accounts import Curves, Spent, curves_of
from fedjax_het.running.federations import Federation
from fedjax_het.running.inputs import Source, call_inputs, run_inputs
from fedjax_het.running.long_rounds import Stretched, Within, is_long, stretched
from fedjax_het.running.placement import HOST_STATE
from fedjax_het.running.prepare import Group
from fedjax_het.running.programs import client_state_bytes
from fedjax_het.running.progress import Progress
from fedjax_het.running.stopping import Early

MAX_CHUNK = 16  # rounds per call of the compiled program, at most
MAX_SCHEDULE_BYTES = 2**26  # of the rounds of a call, unless one alone takes more
MAX_TABLE_BYTES = 2**26  # likewise of client states where they are moved to the devices and back


class Room(NamedTuple):
    """What a call of the rounds' program has room for."""

    rounds: int
    rows: int  # client states on the devices
    ahead: int = 1  # calls whose inputs are there before they are due


@dataclass(eq=False)
class Runs:
    """Runs of one group that go in step, and where they stand.

    federations: as many as run at once, or fewer. source, kept: of what their program reads, and
    the part that stays the same. state: of all of them, on the devices. pager: of their clients'
    states, where those are on the host. stopped: of each run that diverged, the round, or how many
    were done where work between rounds did. early: how each ended that was ended before its last
    round. given: those whose results are made, while others go on. pause: calls end at multiples of
    so many rounds, where something may be decided.
    """

    group: Group
    federations: list[Federation]
    source: Source
    kept: dict[str, Any]
    room: Room
    curves: list[Curves]  # of each
    spent: Spent
    progress: Callable[[Progress], None]
    state: Any = None
    pager: Pager | None = None
    done: int = 0  # rounds
    within: Within | None = None  # the next round, where it has begun
    cut_anyway: bool = False  # whether rounds are cut, long or not
    stopped: list[int | None] = field(default_factory=list)  # of each: the round it diverged in
    early: dict[int, Early] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)
    pause: int | None = None
    begun_under: dict[int, dict] = field(
        default_factory=dict
    )  # of those begun elsewhere: its names

    @property
    def plan(self) -> Plan:
        return self.group.plan

    @property
    def algorithm(self) -> Algorithm:
        return self.group.program.algorithm

    @property
    def rounds(self) -> int:
        """From the first to the last."""
        return self.federations[0].spec.rounds

    @property
    def going(self) -> list[int]:
        """Those that have neither diverged nor been ended early."""
        every = range(len(self.federations))
        return [i for i in every if self.stopped[i] is None and i not in self.early]

    def rounds_of(self, i: int) -> int:
        """How many rounds of a run took place so far."""
        if i in self.early:
            return self.early[i].round
        stopped = self.stopped[i]
        return self.done if stopped is None else stopped

    @property
    def paged(self) -> bool:
        return self.group.client_state == HOST_STATE

    @property
    def shares_host_work(self) -> bool:
        """Whether work between rounds is where the rounds are: every run's on its own device, or
        shared by the devices; else it is on one device."""
        return self.source.apart or self.plan.sharing.axis is not None

    @functools.cached_property
    def stretched(self) -> Stretched | None:
        """How a round is cut, if it is long; else None.

        Traces the rounds' program, which is kept for when it is compiled. Raises ContractError.
        """
        program, inputs = self.group.program, (state_shapes(self), self.first_step())
        jax.eval_shape(program.chunk.program, *inputs)
        if not (self.cut_anyway or is_long(program, inputs[1])):
            return None
        return stretched(program, *inputs)

    def keys(self, stream: Stream) -> jax.Array:
        return self.source.keys(stream)

    def call(self, first: int, count: int) -> ChunkInputs:
        """What the program reads for rounds `first .. first+count-1`."""
        source = dataclasses.replace(self.source, rounds=range(first, first + count))
        return call_inputs(source, self.kept)

    def first_step(self) -> ChunkInputs:
        """The same for the first step of every lane of the next round, and of an evaluation."""
        upcoming = min(self.done, self.rounds - 1)
        rounds = range(upcoming, upcoming + 1)
        return call_inputs(dataclasses.replace(self.source, rounds=rounds, trial=True), self.kept)

    def load_states(self, rounds: Sequence[int]) -> None:
        """Put the states of these rounds' clients on the devices, if they are on the host."""
        if self.pager is not None:
            self.state = self.state._replace(clients=())  # makes room
            self.state = self.state._replace(clients=self.pager.load(rounds))

    def store_states(self, rounds: Sequence[int]) -> None:
        """Take them back when these rounds are done."""
        if self.pager is not None:
            self.pager.store(self.state.clients, rounds)

    def host_states(self) -> list[Any]:
        """Every run's state, on the host."""
        host = jax.tree.map(host_values, self.state)
        if not self.source.apart:
            return [host]
        return [jax.tree.map(lambda a, i=i: a[i], host) for i in range(len(self.federations))]

    def programs(self) -> dict[str, tuple[Any, tuple]]:
        """(jitted, its inputs: arrays, or shapes placed like them) of what the runs go through, by
        name."""
        programs, kept, state = self.group.program, self.kept, state_shapes(self)
        inputs = (kept["hp"], state, self.keys(Stream.SERVER), jnp.int32(1), kept.get("server"))
        if not self.shares_host_work:
            inputs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), inputs)
        between = {name: (work.program, inputs) for name, work in programs.host_work.items()}
        of_rounds: tuple[Any, tuple] = (programs.chunk.program, (state, self.first_step()))
        if (cut := self.stretched) is not None:
            first_calls = cut.spans(0), cut.carried
            of_rounds = (programs.stretch.program, (*of_rounds[1], *first_calls))
        return {"rounds": of_rounds, **between}

    def work_done(self, work: HostWork) -> int:
        """Iterations of work between rounds, of each run."""
        apart = self.source.apart
        return work.done(jax.tree.map(lambda a: a[0], self.state) if apart else self.state)


def gathered(
    group: Group,
    federations: Sequence[Federation],
    *,
    progress: Callable[[Progress], None] | None = None,
    started: float | None = None,
    records: Sequence[dict] = (),
) -> Runs:
    """Runs of a group that are to go in step: nothing is allocated for their states yet.

    Args:
      federations: as many as run at once, or fewer.
      started: when their wall-clock began (default: now).
      records: of the checkpoints that they are to go on from.
    """
    assert len(federations) <= group.plan.capacity
    federations = list(federations)
    # An idle place does the last federation's work once more, or nothing.
    places = federations + federations[-1:] * (group.plan.capacity - len(federations))
    room = _room(group, federations)
    source = dataclasses.replace(
        group.source,
        places=places,
        num_federations=len(federations),
        num_rows=room.rows if group.client_state == HOST_STATE else None,
        capacity=room.rounds,
    )
    program, rounds = group.program, federations[0].spec.rounds
    return Runs(
        group,
        federations,
        source,
        kept=group.shared | run_inputs(source),
        room=room,
        curves=[
            curves_of(
                program.measuring.nothing(program.algorithm, rounds),
                group.dataset,
                f.partition,
                f.tests,
                program.measuring.measures,
            )
            for f in federations
        ],
        spent=Spent() if started is None else Spent(started=started),
        progress=progress or (lambda progress: None),
        stopped=[None] * len(federations),
        cut_anyway=any(record.get("within") for record in records),
    )


def _room(group: Group, federations: Sequence[Federation]) -> Room:
    """As many rounds as schedules, and client states on the host, leave room for."""
    spec, plan, shapes = federations[0].spec, group.plan, group.shapes
    scheduled = [shape for shape in (shapes.schedule, shapes.tuning) if shape is not None]
    bytes_a_round = sum(shape.num_bytes(spec.batch_size) for shape in scheduled)
    fitting = MAX_SCHEDULE_BYTES // (bytes_a_round * plan.capacity)
    ahead = 2 if fitting else 1
    cohort, all_clients = 0, group.program.measuring.num_clients
    if group.client_state == HOST_STATE:
        cohort = max(f.scheduler.cohort_size for f in federations)
        row = client_state_bytes(group.program, spec)
        fitting = min(fitting, MAX_TABLE_BYTES // (row * cohort * plan.width))
    rounds = max(1, min(MAX_CHUNK, spec.rounds, fitting))
    rows = min(all_clients, rounds * cohort) if cohort else all_clients
    return Room(rounds, rows, ahead)


def require_contract(runs: Runs) -> None:
    """Raise ContractError, before anything compiles, if the method's functions do not do what they
    are to do: see `algorithms.checking.checked_algorithm`.

    Cost: nothing, as the traces are kept for when the programs are compiled.
    """
    for program, inputs in runs.programs().values():
        jax.eval_shape(program, *inputs)


def state_shapes(runs: Runs) -> Any:
    """The states of all runs before the first round, as shapes placed like them."""
    plan, init = runs.plan, runs.group.program.init(runs.room.rows)
    shapes = jax.eval_shape(init, runs.kept["hp"], runs.keys(Stream.INIT))

    def placed(tree, kind):
        sharding = plan.sharding(RUN if runs.source.apart else kind)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
        )

    return plan.with_clients(shapes, placed)


def begin_states(runs: Runs) -> None:
    """Make the states before the first round, where they are to be."""
    given: list[Any] = [runs.kept["hp"], runs.keys(Stream.INIT)]
    if (initial := runs.federations[0].initial) is not None:  # the same of all, see `static_key`
        given.append(runs.source.for_places([initial.variables] * len(runs.source.places)))
    state = runs.group.program.init(1 if runs.paged else runs.room.rows)(*given)
    if runs.paged:
        schedulers = [f.scheduler for f in runs.source.places]
        runs.pager = Pager(runs.plan, schedulers, state.clients, runs.room.rows)
        state = state._replace(clients=())
    runs.state = state if runs.source.apart else runs.plan.with_clients(state, runs.plan.put)


def memory_needed(runs: Runs) -> int:
    """Bytes that the programs, which this compiles, need on each device. Nothing is allocated for
    it."""
    return max(compiled_bytes(*program) for program in runs.programs().values())
