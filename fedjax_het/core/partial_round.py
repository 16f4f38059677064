"""One part of a resumable round as a program, see `core.resumable_loops`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_het.core.execution_plan import PER_BLOCK, PER_RUN, REPLICATED
from fedjax_het.core.resumable_loops import BLOCKS, LoopTrace, ResumableLoopRunner
from fedjax_het.core.round_inputs import ChunkInputs, RoundComponents
from fedjax_het.core.round_program import count_nonfinite_state, run_round, select_round
from fedjax_het.core.run_mapping import map_runs


def make_partial_round(components: RoundComponents) -> Callable:
    """Build the program of one part of a resumable round.

    Args:
      components: the static parts of the rounds.

    Returns:
      `partial_round(state, inputs, spans, carries) -> (state, RoundMetrics, carries, totals)`, a
      part of the first round of `inputs`. `spans` `[n, 2]` int32: iterations of each long loop that
      are done before and after the call. `totals` `[n]`: iterations of each loop, known once the
      loops before it are done. State and metrics are valid once the last loop is done.
    """
    plan = components.plan

    def partial_round(state, inputs: ChunkInputs, spans, carries):
        spans = jnp.where(inputs.num_rounds > 0, spans, 0)  # none, where there is no run
        loops = ResumableLoopRunner(spans, carries)
        state, metrics = _run_first_round(components, state, inputs, loops)
        metrics, totals = jax.tree.map(lambda a: a[None], metrics), jnp.stack(loops.trace.totals)
        constrain = plan.constrain_sharding
        carries = jax.tree.map(
            lambda layout, carry: constrain(carry, PER_BLOCK if layout == BLOCKS else REPLICATED),
            loops.trace.layouts,
            loops.trace.carries,
        )
        state = plan.map_state(state, constrain)
        return state, constrain(metrics, REPLICATED), carries, constrain(totals, REPLICATED)

    return partial_round


def trace_loops(
    components: RoundComponents, placements: ChunkInputs, state, inputs: ChunkInputs
) -> LoopTrace:
    """Find the long loops of a round by tracing it.

    Args:
      components: the static parts of the rounds.
      placements: placements of the inputs, see `map_runs`.
      state: the states of all runs in lockstep, arrays or shapes.
      inputs: the inputs of all runs in lockstep, arrays or shapes.

    Returns:
      The loops; `carries` are shapes, of all runs in lockstep, and `totals` is empty.
    """
    traces: list[LoopTrace] = []

    def trace_round(state, inputs):
        loops = ResumableLoopRunner(None, ())
        _run_first_round(components, state, inputs, loops)
        traces.append(loops.trace)
        return loops.trace.carries

    trace_runs = map_runs(components.plan, trace_round, (PER_RUN, placements))
    carries = jax.eval_shape(trace_runs, state, inputs)
    return traces[0]._replace(carries=carries, totals=[])


def _run_first_round(components: RoundComponents, state, inputs: ChunkInputs, loops):
    num_nonfinite = count_nonfinite_state(components, state)
    return run_round(components, select_round(inputs, 0), state, num_nonfinite, loops)[:2]
