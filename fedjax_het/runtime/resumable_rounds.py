"""Rounds of over a minute: which they are, how they are cut, and where one stands.

See `core.resumable_loops` for what a stretch is.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.core.execution_plan import PER_BLOCK, PER_RUN, REPLICATED, RUNS_AXIS, ExecutionPlan
from fedjax_het.core.resumable_loops import BLOCKS
from fedjax_het.core.round_program import ChunkInputs, trace_loops
from fedjax_het.runtime.compiled_programs import CompiledPrograms, flops_per_sample, workload_key

Tree = Any

# What takes about a minute: a core at 30 GFLOP/s or a small accelerator at 15 TFLOP/s.
LONG_FLOPS = {"cpu": 2e12}
DEFAULT_LONG_FLOPS = 1e15


class LoopLayout(NamedTuple):
    """How the rounds of runs that go in step are cut."""

    plan: ExecutionPlan
    loop_names: list[str]  # of the loops
    sharding_kinds: list[Any]  # how what they carry is spread
    carry_shapes: Tree  # as shapes

    def build_spans(self, num_iterations: int) -> Tree:
        """From the first iteration of every loop to so many."""
        return self.plan.put(
            np.tile(np.array([0, num_iterations], np.int32), (len(self.loop_names), 1))
        )

    def init_carry(self) -> Tree:
        """What is carried before the first call."""
        return self.place_carry(
            jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.carry_shapes)
        )

    def place_carry(self, carry: Tree) -> Tree:
        """What is carried, on the devices."""
        if self.plan.mesh_axis == RUNS_AXIS:
            return self.plan.put(carry, PER_RUN)
        return jax.tree.map(
            lambda kind, part: self.plan.put(part, PER_BLOCK if kind == BLOCKS else REPLICATED),
            self.sharding_kinds,
            carry,
        )


@dataclass
class RoundProgress:
    """Where a round that has begun stands."""

    carry: Tree
    done: list[int]
    """Iterations of each loop."""
    totals: list[int] = field(default_factory=list)
    """Of the loops that have ended."""

    @property
    def loop_index(self) -> int:
        """Which one is going on."""
        return len(self.totals)

    def build_spans(self, count: int) -> np.ndarray:
        """`[n, 2]` of a call in which the loop goes on by so many iterations."""
        first = np.asarray(self.done, np.int32)
        last = first.copy()
        last[self.loop_index] += count
        return np.stack([first, last], 1)

    def advance(self, carry: Tree, count: int, totals: np.ndarray) -> int:
        """What a call has left; -> the iterations of the loop that was going on."""
        self.carry, i = carry, self.loop_index
        total = int(totals[i])
        self.done[i] = min(self.done[i] + count, total)
        if self.done[i] == total:
            self.totals.append(total)
        return total

    @property
    def is_complete(self) -> bool:
        return self.loop_index == len(self.done)

    def to_record(self) -> dict[str, list[int]]:
        """Of a checkpoint, which has `carried` besides."""
        return {"done": self.done, "totals": self.totals}


def is_long_round(program: CompiledPrograms, inputs: ChunkInputs) -> bool:
    """Whether a round takes about a minute or more, by its arithmetic: of a device's federations,
    on all devices together, so that it does not depend on how many there are."""
    max_flops = LONG_FLOPS.get(jax.default_backend(), DEFAULT_LONG_FLOPS)
    samples = program.samples_per_round[workload_key(inputs)] * program.plan.num_parallel
    return samples * flops_per_sample(program.signature) > max_flops


def trace_loop_layout(program: CompiledPrograms, state: Tree, inputs: ChunkInputs) -> LoopLayout:
    """How rounds are cut. Cost: they are traced."""
    loops = trace_loops(program.components, program.input_kinds, state, inputs)
    return LoopLayout(
        program.plan, [loop.name for loop in loops.loops], loops.layouts, loops.carries
    )


def start_round(layout: LoopLayout) -> RoundProgress:
    """A round before its first call."""
    return RoundProgress(layout.init_carry(), [0] * len(layout.loop_names))
