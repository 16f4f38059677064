"""Rounds that take over a minute, which several calls of a program execute in parts.

See `core.resumable_loops` for how a part of a round is executed.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.core.execution_plan import PER_BLOCK, PER_RUN, REPLICATED, RUNS_AXIS, ExecutionPlan
from fedjax_het.core.partial_round import trace_loops
from fedjax_het.core.resumable_loops import BLOCKS
from fedjax_het.core.round_inputs import ChunkInputs, RoundComponents
from fedjax_het.runtime.compiled_programs import CompiledPrograms, workload_key
from fedjax_het.runtime.signature import flops_per_sample

Tree = Any

# Operations of about a minute: a core at 30 GFLOP/s or a small accelerator at 15 TFLOP/s.
LONG_FLOPS = {"cpu": 2e12}
DEFAULT_LONG_FLOPS = 1e15


class LoopLayout(NamedTuple):
    """The long loops of a round, at which it is split into parts.

    Attributes:
      plan: the devices.
      loop_names: names of the loops for progress reports.
      sharding_kinds: how the carry of each loop is spread over the devices.
      carry_shapes: shapes of the carries.
    """

    plan: ExecutionPlan
    loop_names: list[str]
    sharding_kinds: list[Any]
    carry_shapes: Tree

    def build_spans(self, num_iterations: int) -> Tree:
        """Return the spans `[loops, 2]` int32 of a call that executes the first iterations."""
        span = np.array([0, num_iterations], np.int32)
        return self.plan.put(np.tile(span, (len(self.loop_names), 1)))

    def init_carry(self) -> Tree:
        """Return the carry of all loops before the first call."""
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.carry_shapes)
        return self.place_carry(zeros)

    def place_carry(self, carry: Tree) -> Tree:
        """Return a carry on the devices."""
        if self.plan.mesh_axis == RUNS_AXIS:
            return self.plan.put(carry, PER_RUN)
        return jax.tree.map(
            lambda kind, part: self.plan.put(part, PER_BLOCK if kind == BLOCKS else REPLICATED),
            self.sharding_kinds,
            carry,
        )


class RoundProgress(NamedTuple):
    """The parts of a round that are done.

    Attributes:
      carry: the carry of all loops.
      done: number of iterations of each loop that are done.
      totals: number of iterations of the loops that have ended.
    """

    carry: Tree
    done: tuple[int, ...]
    totals: tuple[int, ...] = ()

    @property
    def loop_index(self) -> int:
        """Index of the loop that is executed next; the number of loops after the last one."""
        return len(self.totals)

    def build_spans(self, count: int) -> np.ndarray:
        """Return the spans `[loops, 2]` of a call that executes `count` iterations of the loop."""
        last = np.array(self.done, np.int32)
        last[self.loop_index] += count
        return np.stack([np.array(self.done, np.int32), last], 1)

    def advance(self, carry: Tree, count: int, totals: np.ndarray) -> "RoundProgress":
        """Return the progress after a call.

        Args:
          carry: the carry after the call.
          count: number of iterations that the call executed at most.
          totals: number of iterations of each loop, as far as known.

        Returns:
          The parts that are done now.
        """
        i = self.loop_index
        total = int(totals[i])
        done = min(self.done[i] + count, total)
        return RoundProgress(
            carry,
            (*self.done[:i], done, *self.done[i + 1 :]),
            (*self.totals, total) if done == total else self.totals,
        )

    def to_record(self) -> dict[str, list[int]]:
        """Return the record for a checkpoint, which also has the carry."""
        return {"done": [*self.done], "totals": [*self.totals]}


def is_long_round(program: CompiledPrograms, inputs: ChunkInputs) -> bool:
    """Return whether a round takes about a minute or more, estimated from its operations.

    The operations of one device's runs on all devices count, so that the number of devices has no
    influence.

    Args:
      program: the programs, of which the chunk is traced.
      inputs: inputs of a round.

    Returns:
      Whether the round is to be split into parts.
    """
    max_flops = LONG_FLOPS.get(jax.default_backend(), DEFAULT_LONG_FLOPS)
    samples = program.samples_per_round[workload_key(inputs)] * program.plan.num_parallel
    return samples * flops_per_sample(program.signature) > max_flops


def trace_loop_layout(program: CompiledPrograms, state: Tree, inputs: ChunkInputs) -> LoopLayout:
    """Find the long loops of a round by tracing it.

    Args:
      program: the programs.
      state: the state of the runs, as shapes.
      inputs: inputs of a round.

    Returns:
      The loops.
    """
    signature, plan = program.signature, program.plan
    task = signature.training.task
    components = RoundComponents(program.algorithm, task, plan, signature.evaluation)
    loops = trace_loops(components, program.input_kinds, state, inputs)
    return LoopLayout(plan, loops.names, loops.layouts, loops.carries)
