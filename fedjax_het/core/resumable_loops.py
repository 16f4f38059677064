"""Resumable rounds, for rounds that take minutes.

A long round runs in several calls of its program. Its progress is visible, and it can be stopped
and resumed within the round.

The program of a round passes a `LoopRunner` to all code with long loops: `Cohort.loops` for the
clients, and `ServerParallelism.loops` for work at the server. A plain `LoopRunner` runs every
loop whole, as a `fori_loop`. A `ResumableLoopRunner` runs a part of it.

Every trace of a round reaches its long loops in the same order. Each call receives the first and
the last iteration of each loop, and the values that the loop carried at the end of the previous
call. Finished loops keep their values. Later loops run no iteration, and values computed from them
are not used until they are finished. Every call repeats the code between the loops, which is cheap,
from the state before the round. This state is stored until the round is finished. Therefore the
place of a split changes no bit of a round.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.utils.arrays import AnyArray

Tree = Any
IntScalar = int | AnyArray

# Layouts of the values that loops carry, where `LoopRunner.map` runs them on several devices or in
# several turns.
REPLICATED_CARRY, BLOCKS, TURNS = "replicated", "a block on each device", "blocks in turn"

CLIENTS, SERVER, SOFT_LABELS = "clients", "server", "soft labels"
TUNING, DIAGNOSTICS, TEACHERS = "tuning", "survey", "teachers"
FEATURES = "features"


class LoopTrace(NamedTuple):
    """The loops that a part of a round has met.

    `carries` and `layouts` are nested like the calls of `LoopRunner.map`.
    """

    carries: list[Any]
    "Values carried by the loops."
    totals: list[jax.Array]
    "`[]` int32: iterations of each loop; valid once the loops before it are done."
    names: list[str]
    "The round's phase in each loop, for its progress."
    layouts: list[Any]
    "Layouts of the carried values."


class LoopRunner:
    """Runs the long loops of a round, each of them whole.

    Args:
      num_samples: receives the samples on which each loop of a traced program trains.
      multiplier: how often the traced code runs, in turns.
    """

    def __init__(self, num_samples: list[float] | None = None, multiplier: int = 1):
        self._num_samples, self._multiplier = num_samples, multiplier

    def run(
        self,
        name: str,
        total: IntScalar,
        body: Callable[[Any, Tree], Tree],
        init: Tree,
        **bounds: Any,
    ) -> Tree:
        """Run `fori_loop(0, total, body, init)`, or the part of it that is due.

        Args:
          name: the round's phase in the loop, for its progress.
          total: number of iterations; may be traced.
          body: body of `jax.lax.fori_loop`.
          init: the initial values.
          **bounds: keyword arguments of `run_split`.

        Returns:
          The values after the loop. They are of no use while `has_finished_loops` is false.

        Example:
          >>> from fedjax_het.core.resumable_loops import WHOLE_LOOPS
          >>> int(WHOLE_LOOPS.run("sum", 4, lambda i, total: total + i, 0))
          6
        """

        def run_iterations(first: IntScalar, last: IntScalar, carry: Tree) -> Tree:
            return jax.lax.fori_loop(first, last, body, carry)

        return self.run_split(name, total, run_iterations, init, **bounds)

    def run_split(
        self,
        name: str,
        total: IntScalar,
        run_iterations: Callable[[Any, Any, Tree], Tree],
        init: Tree,
        *,
        max_total: IntScalar | None = None,
        max_iterations: IntScalar | None = None,
        samples_per_iteration: float = 0,
    ) -> Tree:
        """Run `run_iterations(0, total, init)`, or the part of it that is due.

        Args:
          name: the round's phase in the loop, for its progress.
          total: number of iterations; may be traced.
          run_iterations: `run_iterations(first, last, carry)` returns the values after iterations
            `first` to `last` - 1; `first` is a plain 0 where it is to run all of them.
          init: the initial values.
          max_total: the largest `total` of all devices and turns that run the loop; default:
            `total`.
          max_iterations: a static upper bound of `total`, required where `total` is traced.
          samples_per_iteration: samples on which an iteration trains; a third of the samples that
            it only evaluates.

        Returns:
          The values after the loop. They are of no use while `has_finished_loops` is false.
        """
        if self._num_samples is not None:
            num_iterations: Any = total if max_iterations is None else max_iterations
            num_samples = float(num_iterations) * samples_per_iteration
            self._num_samples.append(num_samples * self._multiplier)
        return run_iterations(0, total, init)

    def map(
        self,
        mapper: Callable[..., tuple[Any, Any, Any]],
        function: Callable[..., Any],
        layout: str = REPLICATED_CARRY,
        num_turns: int = 1,
    ) -> Any:
        """Run a function with loops where `mapper` places it: on devices, in turns, in a branch.

        Args:
          mapper: `mapper(run, spans, carries)` places `run(spans, carries, *args)`, and returns its
            result, carries and totals. Totals are equal everywhere, except in turns.
          function: `function(loops, *args)`, which `run` calls; `loops` is the runner of its loops.
          layout: layout of the values that its loops carry: BLOCKS has a leading axis of one block
            on each device, TURNS of all blocks.
          num_turns: how often the function runs, in turns.

        Returns:
          The result of `mapper`, without carries and totals.
        """
        loops = LoopRunner(self._num_samples, self._multiplier * num_turns)
        return mapper(lambda spans, carries, *args: (function(loops, *args), (), ()), (), ())[0]

    def cond(
        self,
        predicate: Any,
        true_function: Callable[..., Any],
        false_function: Callable[..., Any],
        *operands: Any,
    ) -> Any:
        """Run `lax.cond(predicate, true_function, false_function, *operands)`.

        Args:
          predicate: a boolean scalar.
          true_function: `true_function(loops, *operands)`, which may have long loops.
          false_function: `false_function(*operands)`, which has none.
          *operands: arguments of both.

        Returns:
          The result of the function that is due.
        """
        return jax.lax.cond(predicate, partial(true_function, self), false_function, *operands)

    def has_finished_loops(self) -> Any:
        """Return whether all loops met so far are done after this call of the program.

        It is True where loops are whole, so that a product or a conjunction with it changes
        nothing.
        """
        return True

    def can_finish_next_loop(self, total: IntScalar) -> Any:
        """Return whether the next loop, of `total` iterations, is done after this call."""
        return True


class ResumableLoopRunner(LoopRunner):
    """Runs the part of each loop that is due in one call of a resumable round.

    Args:
      spans: `[n, 2]` int32 of all loops of the round: iterations done, and to be done after this
        call. None to find the loops of a round: they are traced whole.
      carries: the values that the loops of this part of the round carried in the previous call.
      first_index: number of loops of the round before this part.
    """

    def __init__(self, spans: jax.Array | None, carries: Sequence[Any], first_index: int = 0):
        super().__init__()
        self._spans, self._carries, self._first_index = spans, carries, first_index
        self.trace = LoopTrace([], [], [], [])

    @property
    def _next_index(self) -> int:
        """The position of the next loop among the loops of the round."""
        return self._first_index + len(self.trace.names)

    def _next_carry(self) -> Any:
        """Return the values that the next loop, or call of `map`, carried in the previous call."""
        return self._carries[len(self.trace.carries)]

    def run_split(
        self,
        name: str,
        total: IntScalar,
        run_iterations: Callable[[Any, Any, Tree], Tree],
        init: Tree,
        *,
        max_total: IntScalar | None = None,
        **bounds: Any,
    ) -> Tree:
        """Run the iterations of a loop that are due.

        Args:
          name: the round's phase in the loop, for its progress.
          total: number of iterations; may be traced.
          run_iterations: `run_iterations(first, last, carry)` returns the values after iterations
            `first` to `last` - 1.
          init: the initial values.
          max_total: the largest `total` of all devices and turns that run the loop.
          **bounds: further arguments of `LoopRunner.run_split`.

        Returns:
          The values after the iterations.
        """
        if self._spans is None:
            carry = run_iterations(0, total, init)
        else:
            num_done, num_due = self._spans[self._next_index, 0], self._spans[self._next_index, 1]
            init = jax.tree.map(
                lambda new, old: jnp.where(num_done > 0, old, new), init, self._next_carry()
            )
            carry = run_iterations(jnp.minimum(num_done, total), jnp.minimum(num_due, total), init)
        self.trace.carries.append(carry)
        self.trace.totals.append(jnp.asarray(total if max_total is None else max_total, jnp.int32))
        self.trace.names.append(name)
        self.trace.layouts.append(REPLICATED_CARRY)
        return carry

    def map(
        self,
        mapper: Callable[..., tuple[Any, Any, Any]],
        function: Callable[..., Any],
        layout: str = REPLICATED_CARRY,
        num_turns: int = 1,
    ) -> Any:
        """Run the due part of a function with loops where `mapper` places it.

        Args:
          mapper: see `LoopRunner.map`.
          function: `function(loops, *args)`, which `run` calls.
          layout: layout of the values that its loops carry.
          num_turns: how often the function runs, in turns.

        Returns:
          The result of `mapper`, without carries and totals.
        """
        inner_trace: LoopTrace

        def run(spans, carries, *args):
            nonlocal inner_trace
            if layout == BLOCKS:
                carries = jax.tree.map(lambda a: a[0], carries)
            inner_spans = None if self._spans is None else spans
            loops = ResumableLoopRunner(inner_spans, carries, self._next_index)
            inner_trace = loops.trace
            result, carries = function(loops, *args), loops.trace.carries
            if layout == BLOCKS:
                carries = jax.tree.map(lambda a: a[None], carries)
            return result, carries, loops.trace.totals

        loop_args = ((), ()) if self._spans is None else (self._spans, self._next_carry())
        result, carries, totals = mapper(run, *loop_args)
        if layout == TURNS:
            totals = [total.max() for total in totals]
        layouts = [layout] * len(carries) if layout == BLOCKS else inner_trace.layouts
        self.trace.carries.append(carries)
        self.trace.totals.extend(totals)
        self.trace.names.extend(inner_trace.names)
        self.trace.layouts.append(layouts)
        return result

    def cond(
        self,
        predicate: Any,
        true_function: Callable[..., Any],
        false_function: Callable[..., Any],
        *operands: Any,
    ) -> Any:
        """Run the due part of a branch with loops.

        Args:
          predicate: a boolean scalar.
          true_function: `true_function(loops, *operands)`, which may have long loops.
          false_function: `false_function(*operands)`, which has none.
          *operands: arguments of both.

        Returns:
          The result of the function that is due.
        """
        if self._spans is None:
            return self.map(lambda run, *loop_args: run(*loop_args, *operands), true_function)

        def choose_branch(run, spans, carries):
            def skip(spans, carries, *operands):
                return false_function(*operands), carries, [jnp.int32(0)] * _num_loops(carries)

            return jax.lax.cond(predicate, run, skip, spans, carries, *operands)

        return self.map(choose_branch, true_function)

    def has_finished_loops(self) -> Any:
        """Return whether all loops met so far are done after this call, `[]` bool."""
        if self._spans is None:
            return True
        is_finished = jnp.bool_(True)
        for i, total in enumerate(self.trace.totals):
            is_finished &= self._spans[self._first_index + i, 1] >= total
        return is_finished

    def can_finish_next_loop(self, total: IntScalar) -> Any:
        """Return whether the next loop, of `total` iterations, is done after this call."""
        return True if self._spans is None else self._spans[self._next_index, 1] >= total


# Runners have no arrays: they may be a part of the arguments of `jit` and other transformations.
jax.tree_util.register_static(LoopRunner)
jax.tree_util.register_static(ResumableLoopRunner)

WHOLE_LOOPS = LoopRunner()


def _num_loops(carries: Sequence[Any]) -> int:
    return sum(_num_loops(part) if isinstance(part, list) else 1 for part in carries)
