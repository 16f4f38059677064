"""Rounds that take over a minute, which several calls of a program execute in parts.

See `core.resumable_loops` for how a part of a round is executed.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.core.execution_plan import PER_BLOCK, PER_RUN, REPLICATED, RUNS_AXIS, ExecutionPlan
from fedjax_het.core.partial_round import trace_loops
from fedjax_het.core.resumable_loops import BLOCKS
from fedjax_het.core.round_inputs import ChunkInputs, RoundComponents
from fedjax_het.runtime.compiled_programs import CompiledPrograms, flops_per_sample, workload_key

Tree = Any

# What takes about a minute: a core at 30 GFLOP/s or a small accelerator at 15 TFLOP/s.
LONG_FLOPS = {"cpu": 2e12}
DEFAULT_LONG_FLOPS = 1e15


class LoopLayout(NamedTuple):
    """The long loops of a round, at which it is split into parts."""

    plan: ExecutionPlan
    loop_names: list[str]  # of the loops
    sharding_kinds: list[Any]  # how what they carry is spread
    carry_shapes: Tree  # as shapes

    def build_spans(self, num_iterations: int) -> Tree:
        """Return the iterations of every loop to execute: from the first to so many."""
        return self.plan.put(
            np.tile(np.array([0, num_iterations], np.int32), (len(self.loop_names), 1))
        )

    def init_carry(self) -> Tree:
        """Return the carry of all loops before the first call."""
        return self.place_carry(
            jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.carry_shapes)
        )

    def place_carry(self, carry: Tree) -> Tree:
        """Place a carry on the devices."""
        if self.plan.mesh_axis == RUNS_AXIS:
            return self.plan.put(carry, PER_RUN)
        return jax.tree.map(
            lambda kind, part: self.plan.put(part, PER_BLOCK if kind == BLOCKS else REPLICATED),
            self.sharding_kinds,
            carry,
        )


@dataclass
class RoundProgress:
    """The parts of a round that are done."""

    carry: Tree
    done: list[int]
    """Iterations of each loop."""
    totals: list[int] = field(default_factory=list)
    """Of the loops that have ended."""

    @property
    def loop_index(self) -> int:
        """Return the index of the loop that is executed next."""
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
        """Return the record for a checkpoint, which also has the carry."""
        return {"done": self.done, "totals": self.totals}


def is_long_round(program: CompiledPrograms, inputs: ChunkInputs) -> bool:
    """Return whether a round takes about a minute or more, estimated from its operations.

    The operations of one device's runs on all devices count, so that the number of devices has no
    influence.
    """
    max_flops = LONG_FLOPS.get(jax.default_backend(), DEFAULT_LONG_FLOPS)
    samples = program.samples_per_round[workload_key(inputs)] * program.plan.num_parallel
    return samples * flops_per_sample(program.signature) > max_flops


def trace_loop_layout(program: CompiledPrograms, state: Tree, inputs: ChunkInputs) -> LoopLayout:
    """Find the long loops of a round by tracing it."""
    signature, plan = program.signature, program.plan
    components = RoundComponents(
        program.algorithm, signature.training.task, plan, signature.evaluation
    )
    loops = trace_loops(components, program.input_kinds, state, inputs)
    return LoopLayout(plan, loops.names, loops.layouts, loops.carries)


def start_round(layout: LoopLayout) -> RoundProgress:
    """Return a round of which no part is done."""
    return RoundProgress(layout.init_carry(), [0] * len(layout.loop_names))
