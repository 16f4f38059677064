"""A round in stretches: made in several calls of its program, so that one that takes minutes shows
where it is, and can be stopped within and go on.

A round's long loops are met in the same order whenever it is traced. Each call is told from which
iteration each of them is to go to which, and is given what the loop carried when the call before
left it. Loops that are done stay as they ended; those to come go from 0 to 0, and what follows from
them is of no use until they are done. What lies between the loops is little work and is done anew
in every call, from the state before the round, which is kept until the round is done. So where a
round is cut changes no bit of it.

Outside a stretch a loop is the `fori_loop` that it would be without all this.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Tree = Any
IntScalar = int | jax.Array

# How what loops carry is spread, where `across` takes them over several devices or turns.
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
    """What the round is at in it, as progress says."""


class LoopTrace(NamedTuple):
    """What a stretch leaves; `carried` and `kinds` are nested alike, as `across` is."""

    carries: list[Any]
    totals: list[jax.Array]  # [] int32 of each loop: its iterations, once those before are done
    loops: list[Loop]
    layouts: list[Any]


class _LoopFrame:
    """The loops met so far in one part of a stretch.

    spans: `[n, 2]` of all loops of the round: iterations done, and to be done after this call. None
      where it is only to be found out which loops there are. given: what they carried.
    """

    def __init__(self, spans: jax.Array | None, carries: Sequence[Any], first_index: int = 0):
        self.spans, self.carries, self.first_index = spans, carries, first_index
        self.trace = LoopTrace([], [], [], [])

    @property
    def next_index(self) -> int:
        """Of the next loop."""
        return self.first_index + len(self.trace.loops)

    def next_span(self) -> tuple[jax.Array, jax.Array]:
        assert self.spans is not None
        return self.spans[self.next_index, 0], self.spans[self.next_index, 1]

    def next_carry(self) -> Any:
        """What the next loop, or the next part, was given."""
        return self.carries[len(self.trace.carries)]


_FRAME: ContextVar[_LoopFrame | None] = ContextVar("frame", default=None)


class SampleCounter:
    """Adds up how many samples the loops that are traced train on."""

    def __init__(self):
        self.num_samples, self.multiplier = 0.0, 1


_SAMPLE_COUNTER: ContextVar[SampleCounter | None] = ContextVar("meter", default=None)


@contextlib.contextmanager
def count_samples() -> Iterator[SampleCounter]:
    """What is traced inside is added up in the meter."""
    with _set_context_var(_SAMPLE_COUNTER, SampleCounter()) as counter:
        yield counter


@contextlib.contextmanager
def resume_round(spans: jax.Array | None, carries: Sequence[Any]) -> Iterator[LoopTrace]:
    """What is traced inside is a stretch; see `_LoopFrame`."""
    with _set_context_var(_FRAME, _LoopFrame(spans, carries)) as frame:
        yield frame.trace


def resumable_loop(
    name: str,
    total: IntScalar,
    body: Callable[[Any, Tree], Tree],
    init: Tree,
    *,
    max_total: IntScalar | None = None,
    max_iterations: IntScalar | None = None,
    samples_per_iteration: float = 0,
) -> Tree:
    """`fori_loop(0, total, body, start)`, which a round in stretches may be cut in.

    Args:
      longest: of the totals of all devices and turns that go through this loop; default: `total`.
      most: at most so many iterations, where `total` is traced; samples: that one of them trains
        on, of which a third counts where they are only seen.
    """

    def run_iterations(first: IntScalar, last: IntScalar, carry: Tree) -> Tree:
        return jax.lax.fori_loop(first, last, body, carry)

    return split_loop(
        name,
        total,
        run_iterations,
        init,
        max_total=max_total,
        max_iterations=max_iterations,
        samples_per_iteration=samples_per_iteration,
    )


def split_loop(
    name: str,
    total: IntScalar,
    run_iterations: Callable[[Any, Any, Tree], Tree],
    init: Tree,
    *,
    max_total: IntScalar | None = None,
    max_iterations: IntScalar | None = None,
    samples_per_iteration: float = 0,
) -> Tree:
    """`go(0, total, start)`, or the part of it that is due. Arguments as in `loop`.

    Args:
      go(first, last, carried) -> what is carried after iterations `first` to `last` - 1; `first` is
        a plain 0 where it is all of them.
    """
    _add_samples(total if max_iterations is None else max_iterations, samples_per_iteration)
    frame = _FRAME.get()
    if frame is None:
        return run_iterations(0, total, init)
    if frame.spans is None:
        carry = run_iterations(0, total, init)
    else:
        num_done, num_due = frame.next_span()
        saved_carry = frame.next_carry()
        init = jax.tree.map(lambda new, old: jnp.where(num_done > 0, old, new), init, saved_carry)
        carry = run_iterations(jnp.minimum(num_done, total), jnp.minimum(num_due, total), init)
    carries, totals, loops, layouts = frame.trace
    carries.append(carry)
    totals.append(jnp.asarray(total if max_total is None else max_total, jnp.int32))
    loops.append(Loop(name))
    layouts.append(REPLICATED_CARRY)
    return carry


def map_loop(
    mapper: Callable[..., tuple[Any, Any, Any]],
    function: Callable[..., Any],
    layout: str = REPLICATED_CARRY,
    num_turns: int = 1,
) -> Any:
    """The result of `function`, which meets loops, where `mapped` takes it: over devices, or
    blocks, or into a branch.

    Args:
      mapped(run, spans, carried) -> what `run(spans, carried, *args)` of it comes to, (result,
        carried, totals): `run` calls `function(*args)`. Totals are the same everywhere, but for
        turns.
      kind: how what its loops carry is spread: BLOCKS has a leading axis of one block on each
        device, TURNS one of them all. turns: how many.
    """
    frame = _FRAME.get()
    if frame is None:
        with _multiply_samples(num_turns):
            return mapper(lambda spans, carries, *args: (function(*args), (), ()), (), ())[0]
    is_tracing = frame.spans is None
    inner_frames: list[_LoopFrame] = []

    def run(spans, carries, *args):
        if layout == BLOCKS:
            carries = jax.tree.map(lambda a: a[0], carries)
        inner_frame = _LoopFrame(None if is_tracing else spans, carries, frame.next_index)
        inner_frames[:] = [inner_frame]
        with _set_context_var(_FRAME, inner_frame):
            result = function(*args)
        carries = inner_frame.trace.carries
        if layout == BLOCKS:
            carries = jax.tree.map(lambda a: a[None], carries)
        return result, carries, inner_frame.trace.totals

    with _multiply_samples(num_turns):
        result, carries, totals = mapper(
            run, *(((), ()) if is_tracing else (frame.spans, frame.next_carry()))
        )
    if layout == TURNS:
        totals = [total.max() for total in totals]
    (inner_frame,) = inner_frames
    frame.trace.carries.append(carries)
    frame.trace.totals.extend(totals)
    frame.trace.loops.extend(inner_frame.trace.loops)
    frame.trace.layouts.append(
        [layout] * len(carries) if layout == BLOCKS else inner_frame.trace.layouts
    )
    return result


def cond_with_loops(
    predicate: Any, true_fun: Callable[..., Any], false_fun: Callable[..., Any], *operands: Any
) -> Any:
    """`lax.cond(due, when, otherwise, *operands)`, of which `when` meets loops."""
    frame = _FRAME.get()
    if frame is None:
        return jax.lax.cond(predicate, true_fun, false_fun, *operands)
    if frame.spans is None:
        return map_loop(lambda run, *loop_args: run(*loop_args, *operands), true_fun)

    def choose_branch(run, spans, carries):
        def skip(spans, carries, *operands):
            return false_fun(*operands), carries, [jnp.int32(0)] * _num_loops(carries)

        return jax.lax.cond(predicate, run, skip, spans, carries, *operands)

    return map_loop(choose_branch, true_fun)


def has_finished_loops() -> Any:
    """Whether the loops met so far are done after this call: True outside a stretch, so that a
    product with it, or a conjunction, changes nothing there."""
    frame = _FRAME.get()
    if frame is None or frame.spans is None:
        return True
    is_finished = jnp.bool_(True)
    for i, total in enumerate(frame.trace.totals):
        is_finished &= frame.spans[frame.first_index + i, 1] >= total
    return is_finished


def can_finish_next_loop(total: IntScalar) -> Any:
    """Whether the next loop to be met, of so many iterations, is done after this call."""
    frame = _FRAME.get()
    if frame is None or frame.spans is None:
        return True
    return frame.next_span()[1] >= total


def _num_loops(carries: Sequence[Any]) -> int:
    return sum(_num_loops(part) if isinstance(part, list) else 1 for part in carries)


def _add_samples(iterations: Any, samples_per_iteration: float) -> None:
    counter = _SAMPLE_COUNTER.get()
    if counter is not None:
        counter.num_samples += float(iterations) * samples_per_iteration * counter.multiplier


@contextlib.contextmanager
def _multiply_samples(num_turns: int) -> Iterator[None]:
    counter = _SAMPLE_COUNTER.get()
    if counter is None:
        yield
        return
    counter.multiplier *= num_turns
    try:
        yield
    finally:
        counter.multiplier //= num_turns


@contextlib.contextmanager
def _set_context_var(variable: ContextVar, value: Any) -> Iterator[Any]:
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
