"""The floating-point operations of a whole run: clients, server, and work between rounds."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.algorithms.contract import HostWork
from fedjax_het.common.doors import door
from fedjax_het.common.errors import require
from fedjax_het.common.records import Count
from fedjax_het.data import Dataset
from fedjax_het.engine.counting import Counting, counting
from fedjax_het.engine.randomness import Stream
from fedjax_het.engine.rounds import ChunkInputs
from fedjax_het.running.placement import DEVICE_STATE, Placement
from fedjax_het.running.prepare import prepare, unspread
from fedjax_het.running.runs import Runs, begin_states, gathered, state_shapes
from fedjax_het.settings.spec import RunSpec


class Work(NamedTuple):
    """Work of the server between two rounds: its name, how many rounds are done before it (0:
    pretraining), and its floating-point operations."""

    name: str
    before_round: int
    flops: int


@dataclass(frozen=True)
class Arithmetic:
    """Floating-point operations of a run, 2 for each multiply-add.

    Attributes:
      rounds: [rounds] float64, exact below 2^53: of clients and server in each round.
      between: of work of the server between them.
      tuning: where copies of the global model are tuned to be scored (`fedavg_ft`, `per_fedavg`),
        of all clients once; in no sum, as it takes place as often as copies are asked for.
    """

    rounds: np.ndarray
    between: tuple[Work, ...] = ()
    tuning: int = 0

    @property
    def total(self) -> float:
        """Of the whole run."""
        return float(self.rounds.sum() + sum(work.flops for work in self.between))

    def after(self, rounds: int) -> float:
        """Of so many rounds, and of all work before the last of them."""
        require(0 <= rounds <= len(self.rounds), "rounds", rounds, f"from 0 to {len(self.rounds)}")
        done = sum(work.flops for work in self.between if work.before_round < rounds)
        return float(self.rounds[:rounds].sum() + done)

    @property
    def so_far(self) -> np.ndarray:
        """[rounds]: `after` each of them."""
        return np.array([self.after(done) for done in range(1, len(self.rounds) + 1)])


@door
def count(
    spec: RunSpec,
    dataset: Dataset | None = None,
    *,
    lanes: Count = 1,
    data_dir: str | os.PathLike | None = None,
) -> Arithmetic:
    """The floating-point operations that a run takes, all of it: clients' training and
    condensation, the server's training, distillation and synthesis, pretraining.

    Counted are the products of matrices and convolutions of the programs that the run goes through,
    on one device, with their loops as the run's own schedules make them end: batches are counted
    filled up, as they are executed, and every gradient of a step. Not counted are what is done
    value by value (norms, pooling, optimisers, sums of models), the first draw of the network, and
    what only measures: tests and surveys. The fine-tuning of copies that are tested and forgotten
    (`fedavg_ft`) is told apart. Nothing is trained, and the programs of the run are left as they
    are.

    Args:
      spec: the settings.
      dataset, data_dir: as `simulate` takes them.
      lanes: vmapped lanes, which go in step: what they do where one has no client left counts, too.
    Raises: ConfigError as `simulate` does; NotImplementedError for a product inside of an operation
      of jax that is not known here.
    Cost: a trace of each program, a compilation of what decides its loops, and the drawing of every
      round's schedule.
    """
    placement = Placement(lanes=lanes, blocks=1, devices=1, client_state=DEVICE_STATE)
    group = unspread(prepare([spec], dataset=dataset, placement=placement, data_dir=data_dir))
    runs = gathered(group, group.federations)
    return _counted(runs)


class _Traced(NamedTuple):
    """A program of a run. before, after: its inputs around the state, as leaves."""

    jaxpr: Any
    before: list
    after: list

    def counting(self, kept: tuple[bool, ...]) -> Counting:
        """It, counting, with these leaves of the state among what it returns."""
        more = len(self.jaxpr.jaxpr.outvars) - len(kept)
        return counting(self.jaxpr, (*kept, *(False,) * more))

    def needs(self, counts: Counting, size: int) -> tuple[bool, ...]:
        """Which leaves of the state, of so many, decide how much is done."""
        return counts.inputs[len(self.before) : len(self.before) + size]


def _counted(runs: Runs) -> Arithmetic:
    works = runs.algorithm.host_work
    traced = [_rounds_of(runs), *(_work_of(runs, work) for work in works)]
    shapes = jax.tree.leaves(state_shapes(runs))
    kept, counts = _with_what_decides(traced, len(shapes))
    state = _first_state(runs, kept)

    def counted(which: int, after: list) -> int:
        nonlocal state
        own = counts[which]
        whole = [*traced[which].before, *state, *after]
        leaves = [leaf for leaf, is_ in zip(whole, own.inputs, strict=True) if is_]
        new, flops = own.run(leaves)
        found = iter(new)
        state = [next(found) if is_ else None for is_ in kept]
        return flops

    between, rounds = [], []
    for done in range(runs.rounds):
        for i, work in enumerate(works):
            if work.before_round == done:
                between.append(Work(work.name, done, counted(i + 1, traced[i + 1].after)))
        rounds.append(counted(0, jax.tree.leaves(_inputs(runs, done, tested=False))))
    tuning = 0
    if runs.algorithm.tuning is not None:
        ends = state
        tested = _inputs(runs, runs.rounds - 1, tested=True)
        tuning = counted(0, jax.tree.leaves(tested))
        state = ends
        tuning -= counted(0, jax.tree.leaves(_untuned(tested)))
    return Arithmetic(np.array(rounds, np.float64), tuple(between), tuning)


def _rounds_of(runs: Runs) -> _Traced:
    inputs = _inputs(runs, 0, tested=False)
    program = runs.group.program.chunk.program
    return _Traced(program.trace(state_shapes(runs), inputs).jaxpr, [], jax.tree.leaves(inputs))


def _work_of(runs: Runs, work: HostWork) -> _Traced:
    """All iterations of work between rounds."""
    program = runs.group.program.host_work[work.name].program
    hp, after = runs.kept["hp"], (runs.keys(Stream.SERVER), jnp.int32(work.total))
    inputs = (hp, state_shapes(runs), *after, runs.kept.get("server"))
    leaves = jax.tree.leaves(hp), jax.tree.leaves((*after, inputs[-1]))
    return _Traced(program.trace(*inputs).jaxpr, *leaves)


def _inputs(runs: Runs, done: int, *, tested: bool) -> ChunkInputs:
    """What the program reads for the next round, with tests after it or without."""
    inputs = runs.call(done, 1)
    evaluate = np.full_like(inputs.schedule.evaluate, tested)
    return inputs._replace(schedule=inputs.schedule._replace(evaluate=evaluate))


def _untuned(inputs: ChunkInputs) -> ChunkInputs:
    """The same, but copies have no minibatch to be tuned on."""
    assert inputs.tuning is not None
    none = {name: 0 * getattr(inputs.tuning, name) for name in ("longest", "num_segments")}
    return inputs._replace(tuning=inputs.tuning._replace(**none))


def _with_what_decides(
    traced: Sequence[_Traced], size: int
) -> tuple[tuple[bool, ...], list[Counting]]:
    """Which leaves of the state, of so many, decide how much is done in any program, or what these
    leaves become: these are computed as in the run. -> (they, the counting programs)."""
    kept = (False,) * size
    while True:
        counts = [one.counting(kept) for one in traced]
        needs = (one.needs(own, size) for one, own in zip(traced, counts, strict=True))
        more = tuple(map(any, zip(kept, *needs, strict=True)))
        if more == kept:
            return kept, counts
        kept = more


def _first_state(runs: Runs, kept: tuple[bool, ...]) -> list:
    """The leaves that are kept of the state before the first round, None for others."""
    if not any(kept):
        return [None] * len(kept)
    begin_states(runs)
    leaves = jax.tree.leaves(runs.state)
    return [leaf if is_ else None for leaf, is_ in zip(leaves, kept, strict=True)]
