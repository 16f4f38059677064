"""Rounds of over a minute: which they are, how they are cut, and where one stands.

See `engine.stretches` for what a stretch is.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.engine.plan import BLOCK, RUN, RUNS, SHARED, Plan
from fedjax_het.engine.rounds import ChunkInputs, loops_of
from fedjax_het.engine.stretches import BLOCKS
from fedjax_het.running.inputs import kinds_of
from fedjax_het.running.programs import Program, sample_flops, work_key

Tree = Any

# What takes about a minute: a core at 30 GFLOP/s or a small accelerator at 15 TFLOP/s.
LONG_FLOPS = {"cpu": 2e12}
LONG_FLOPS_ELSEWHERE = 1e15


class Stretched(NamedTuple):
    """How the rounds of runs that go in step are cut."""

    plan: Plan
    names: list[str]  # of the loops
    kinds: list[Any]  # how what they carry is spread
    carried: Tree  # as shapes

    def spans(self, due: int) -> Tree:
        """From the first iteration of every loop to so many."""
        return self.plan.put(np.tile(np.array([0, due], np.int32), (len(self.names), 1)))

    def nothing(self) -> Tree:
        """What is carried before the first call."""
        return self.put(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.carried))

    def put(self, carried: Tree) -> Tree:
        """What is carried, on the devices."""
        if self.plan.spreads == RUNS:
            return self.plan.put(carried, RUN)
        return jax.tree.map(
            lambda kind, part: self.plan.put(part, BLOCK if kind == BLOCKS else SHARED),
            self.kinds,
            carried,
        )


@dataclass
class Within:
    """Where a round that has begun stands."""

    carried: Tree
    done: list[int]
    """Iterations of each loop."""
    totals: list[int] = field(default_factory=list)
    """Of the loops that have ended."""

    @property
    def loop(self) -> int:
        """Which one is going on."""
        return len(self.totals)

    def spans(self, count: int) -> np.ndarray:
        """`[n, 2]` of a call in which the loop goes on by so many iterations."""
        first = np.asarray(self.done, np.int32)
        last = first.copy()
        last[self.loop] += count
        return np.stack([first, last], 1)

    def take(self, carried: Tree, count: int, totals: np.ndarray) -> int:
        """What a call has left; -> the iterations of the loop that was going on."""
        self.carried, i = carried, self.loop
        total = int(totals[i])
        self.done[i] = min(self.done[i] + count, total)
        if self.done[i] == total:
            self.totals.append(total)
        return total

    @property
    def ended(self) -> bool:
        return self.loop == len(self.done)

    def record(self) -> dict[str, list[int]]:
        """Of a checkpoint, which has `carried` besides."""
        return {"done": self.done, "totals": self.totals}


def is_long(program: Program, inputs: ChunkInputs) -> bool:
    """Whether a round takes about a minute or more, by its arithmetic: of a device's federations,
    on all devices together, so that it does not depend on how many there are."""
    most = LONG_FLOPS.get(jax.default_backend(), LONG_FLOPS_ELSEWHERE)
    samples = program.work[work_key(inputs)] * program.plan.width
    return samples * sample_flops(program.signature) > most


def stretched(program: Program, state: Tree, inputs: ChunkInputs) -> Stretched:
    """How rounds are cut. Cost: they are traced."""
    found = loops_of(program.rounds, kinds_of(program.reader), state, inputs)
    return Stretched(program.plan, [loop.name for loop in found.loops], found.kinds, found.carried)


def begun(cut: Stretched) -> Within:
    """A round before its first call."""
    return Within(cut.nothing(), [0] * len(cut.names))
