"""Resumable rounds: a round that takes minutes is made in several calls of its program, so that its
progress is visible and it can be stopped within and resumed.

The program of a round hands a `LoopRunner` down to all code that has long loops: to the clients in
`Cohort.loops`, to work at the server in `ServerParallelism.loops`. A plain `LoopRunner` makes every
loop whole, as a `fori_loop`. A `ResumableLoopRunner` makes a part of it.

The long loops of a round are met in the same order whenever it is traced. Each call gets the first
and the last iteration that each of them is to make, and the values that the loop carried at the end
of the call before. Loops that are done keep their values; later loops make no iteration, and values
computed from them are not used until they are done. The code between the loops is little work and is
repeated in every call, from the state before the round, which is kept until the round is done.
Therefore it changes no bit of a round where it is cut.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Tree = Any
IntScalar = int | jax.Array

# How the values that loops carry are placed, where `LoopRunner.map` runs them on several devices or
# in several turns.
REPLICATED_CARRY, BLOCKS, TURNS = (
    "whole on every device",
    "a block's on its device",
    "one block after another",
)

CLIENTS, SERVER, SOFT_LABELS = "clients", "server", "soft labels"
TUNING, DIAGNOSTICS, TEACHERS = "tuning", "survey", "teachers"


class Loop(NamedTuple):
    """A long loop of a round."""

    name: str
    """The round's phase while it is in the loop, as progress shows it."""


class LoopTrace(NamedTuple):
    """The loops that a part of a round has met; `carries` and `layouts` are nested alike, as calls
    of `LoopRunner.map` are."""

    carries: list[Any]
    totals: list[jax.Array]  # [] int32 of each loop: its iterations, once the loops before are done
    loops: list[Loop]
    layouts: list[Any]


class SampleCounter:
    """Adds up how many samples the loops of a program train on, while it is traced."""

    def __init__(self):
        self.num_samples = 0.0


class LoopRunner:
    """Runs the long loops of a round, each of them whole.

    Args:
      counter: adds up the samples that the loops train on, if given.
      multiplier: how often the traced code runs, in turns.
    """

    def __init__(self, counter: SampleCounter | None = None, multiplier: int = 1):
        self._counter, self._multiplier = counter, multiplier

    def run(
        self,
        name: str,
        total: IntScalar,
        body: Callable[[Any, Tree], Tree],
        init: Tree,
        *,
        max_total: IntScalar | None = None,
        max_iterations: IntScalar | None = None,
        samples_per_iteration: float = 0,
    ) -> Tree:
        """Return `fori_loop(0, total, body, init)`, or the part of it that is due.

        Args:
          name: the round's phase while it is in the loop, as progress shows it.
          total: number of iterations; may be traced.
          body: as `jax.lax.fori_loop` has it.
          init: the values that the loop begins with.
          max_total: the largest `total` of all devices and turns that make this loop; default:
            `total`.
          max_iterations: a static upper bound of `total`, needed where that is traced.
          samples_per_iteration: samples that an iteration trains on; a third of those that it only
            evaluates.

        Returns:
          The values after the loop. They are of no use while `has_finished_loops` is false.
        """

        def run_iterations(first: IntScalar, last: IntScalar, carry: Tree) -> Tree:
            return jax.lax.fori_loop(first, last, body, carry)

        return self.run_split(
            name,
            total,
            run_iterations,
            init,
            max_total=max_total,
            max_iterations=max_iterations,
            samples_per_iteration=samples_per_iteration,
        )

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
        """Return `run_iterations(0, total, init)`, or the part of it that is due.

        Args:
          name: see `run`, as for the arguments that are not described here.
          total: see `run`.
          run_iterations: `run_iterations(first, last, carry)` returns the values after iterations
            `first` to `last` - 1; `first` is a plain 0 where it is to make all of them.
          init: see `run`.
          max_total: see `run`.
          max_iterations: see `run`.
          samples_per_iteration: see `run`.

        Returns:
          The values after the loop. They are of no use while `has_finished_loops` is false.
        """
        if self._counter is not None:
            num_iterations: Any = total if max_iterations is None else max_iterations
            num_samples = float(num_iterations) * samples_per_iteration
            self._counter.num_samples += num_samples * self._multiplier
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
            result, carries and totals. Totals are the same everywhere, but for turns.
          function: `function(loops, *args)`, which `run` calls; `loops` is the runner of its loops.
          layout: how the carried values of its loops are placed: BLOCKS has a leading axis of one
            block on each device, TURNS of all blocks.
          num_turns: how often the function runs, in turns.

        Returns:
          The result of `mapper`, without carries and totals.
        """
        loops = LoopRunner(self._counter, self._multiplier * num_turns)
        return mapper(lambda spans, carries, *args: (function(loops, *args), (), ()), (), ())[0]

    def cond(
        self,
        predicate: Any,
        true_function: Callable[..., Any],
        false_function: Callable[..., Any],
        *operands: Any,
    ) -> Any:
        """Return `lax.cond(predicate, true_function, false_function, *operands)`.

        Args:
          predicate: a boolean scalar.
          true_function: `true_function(loops, *operands)`, which may have long loops.
          false_function: `false_function(*operands)`, which has none.
          *operands: arguments of both.

        Returns:
          The result of the function that is due.
        """

        def run_true_function(*operands):
            return true_function(self, *operands)

        return jax.lax.cond(predicate, run_true_function, false_function, *operands)

    def has_finished_loops(self) -> Any:
        """Return whether all loops met so far are done after this call of the program.

        It is True where loops are whole, so that a product or a conjunction with it changes nothing.
        """
        return True

    def can_finish_next_loop(self, total: IntScalar) -> Any:
        """Return whether the next loop, of `total` iterations, is done after this call."""
        return True


class ResumableLoopRunner(LoopRunner):
    """Runs the part of each loop that is due in one call of a resumable round.

    Args:
      spans: `[n, 2]` int32 of all loops of the round: iterations done, and to be done after this
        call. None to find out which loops there are: they are traced whole.
      carries: the values that the loops of this part of the round carried in the call before.
      first_index: number of loops of the round before this part.
    """

    def __init__(self, spans: jax.Array | None, carries: Sequence[Any], first_index: int = 0):
        super().__init__()
        self._spans, self._carries, self._first_index = spans, carries, first_index
        self.trace = LoopTrace([], [], [], [])

    @property
    def _next_index(self) -> int:
        """The position of the next loop among those of the round."""
        return self._first_index + len(self.trace.loops)

    def _next_span(self) -> tuple[jax.Array, jax.Array]:
        assert self._spans is not None
        return self._spans[self._next_index, 0], self._spans[self._next_index, 1]

    def _next_carry(self) -> Any:
        """The values that the next loop, or the next call of `map`, carried in the call before."""
        return self._carries[len(self.trace.carries)]

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
        if self._spans is None:
            carry = run_iterations(0, total, init)
        else:
            num_done, num_due = self._next_span()
            saved_carry = self._next_carry()
            init = jax.tree.map(
                lambda new, old: jnp.where(num_done > 0, old, new), init, saved_carry
            )
            carry = run_iterations(jnp.minimum(num_done, total), jnp.minimum(num_due, total), init)
        carries, totals, loops, layouts = self.trace
        carries.append(carry)
        totals.append(jnp.asarray(total if max_total is None else max_total, jnp.int32))
        loops.append(Loop(name))
        layouts.append(REPLICATED_CARRY)
        return carry

    def map(
        self,
        mapper: Callable[..., tuple[Any, Any, Any]],
        function: Callable[..., Any],
        layout: str = REPLICATED_CARRY,
        num_turns: int = 1,
    ) -> Any:
        is_tracing = self._spans is None
        inner_runners: list[ResumableLoopRunner] = []

        def run(spans, carries, *args):
            if layout == BLOCKS:
                carries = jax.tree.map(lambda a: a[0], carries)
            loops = ResumableLoopRunner(None if is_tracing else spans, carries, self._next_index)
            inner_runners[:] = [loops]
            result = function(loops, *args)
            carries = loops.trace.carries
            if layout == BLOCKS:
                carries = jax.tree.map(lambda a: a[None], carries)
            return result, carries, loops.trace.totals

        loop_args = ((), ()) if is_tracing else (self._spans, self._next_carry())
        result, carries, totals = mapper(run, *loop_args)
        if layout == TURNS:
            totals = [total.max() for total in totals]
        (inner_runner,) = inner_runners
        self.trace.carries.append(carries)
        self.trace.totals.extend(totals)
        self.trace.loops.extend(inner_runner.trace.loops)
        self.trace.layouts.append(
            [layout] * len(carries) if layout == BLOCKS else inner_runner.trace.layouts
        )
        return result

    def cond(
        self,
        predicate: Any,
        true_function: Callable[..., Any],
        false_function: Callable[..., Any],
        *operands: Any,
    ) -> Any:
        if self._spans is None:
            return self.map(lambda run, *loop_args: run(*loop_args, *operands), true_function)

        def choose_branch(run, spans, carries):
            def skip(spans, carries, *operands):
                return false_function(*operands), carries, [jnp.int32(0)] * _num_loops(carries)

            return jax.lax.cond(predicate, run, skip, spans, carries, *operands)

        return self.map(choose_branch, true_function)

    def has_finished_loops(self) -> Any:
        if self._spans is None:
            return True
        is_finished = jnp.bool_(True)
        for i, total in enumerate(self.trace.totals):
            is_finished &= self._spans[self._first_index + i, 1] >= total
        return is_finished

    def can_finish_next_loop(self, total: IntScalar) -> Any:
        return True if self._spans is None else self._next_span()[1] >= total


# Runners have no arrays: they may be a part of what `jit` and other transformations get.
jax.tree_util.register_static(LoopRunner)
jax.tree_util.register_static(ResumableLoopRunner)

WHOLE_LOOPS = LoopRunner()


def _num_loops(carries: Sequence[Any]) -> int:
    return sum(_num_loops(part) if isinstance(part, list) else 1 for part in carries)
