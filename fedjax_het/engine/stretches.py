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
Whole = int | jax.Array

# How what loops carry is spread, where `across` takes them over several devices or turns.
WHOLE, BLOCKS, TURNS = "whole on every device", "a block's on its device", "one block after another"

CLIENTS, SERVER, SOFT_LABELS = "clients", "server", "soft labels"
TUNING, SURVEY, TEACHERS = "tuning", "survey", "teachers"


class Loop(NamedTuple):
    """A long loop of a round."""

    name: str
    """What the round is at in it, as progress says."""


class Found(NamedTuple):
    """What a stretch leaves; `carried` and `kinds` are nested alike, as `across` is."""

    carried: list[Any]
    totals: list[jax.Array]  # [] int32 of each loop: its iterations, once those before are done
    loops: list[Loop]
    kinds: list[Any]


class _Frame:
    """The loops met so far in one part of a stretch.

    spans: `[n, 2]` of all loops of the round: iterations done, and to be done after this call. None
      where it is only to be found out which loops there are. given: what they carried.
    """

    def __init__(self, spans: jax.Array | None, given: Sequence[Any], first: int = 0):
        self.spans, self.given, self.first = spans, given, first
        self.found = Found([], [], [], [])

    @property
    def index(self) -> int:
        """Of the next loop."""
        return self.first + len(self.found.loops)

    def span(self) -> tuple[jax.Array, jax.Array]:
        assert self.spans is not None
        return self.spans[self.index, 0], self.spans[self.index, 1]

    def carried(self) -> Any:
        """What the next loop, or the next part, was given."""
        return self.given[len(self.found.carried)]


_FRAME: ContextVar[_Frame | None] = ContextVar("frame", default=None)


class Meter:
    """Adds up how many samples the loops that are traced train on."""

    def __init__(self):
        self.samples, self.times = 0.0, 1


_METER: ContextVar[Meter | None] = ContextVar("meter", default=None)


@contextlib.contextmanager
def metered() -> Iterator[Meter]:
    """What is traced inside is added up in the meter."""
    with _set(_METER, Meter()) as meter:
        yield meter


@contextlib.contextmanager
def in_stretch(spans: jax.Array | None, given: Sequence[Any]) -> Iterator[Found]:
    """What is traced inside is a stretch; see `_Frame`."""
    with _set(_FRAME, _Frame(spans, given)) as frame:
        yield frame.found


def loop(
    name: str,
    total: Whole,
    body: Callable[[Any, Tree], Tree],
    start: Tree,
    *,
    longest: Whole | None = None,
    most: Whole | None = None,
    samples: float = 0,
) -> Tree:
    """`fori_loop(0, total, body, start)`, which a round in stretches may be cut in.

    Args:
      longest: of the totals of all devices and turns that go through this loop; default: `total`.
      most: at most so many iterations, where `total` is traced; samples: that one of them trains
        on, of which a third counts where they are only seen.
    """

    def go(first: Whole, last: Whole, carried: Tree) -> Tree:
        return jax.lax.fori_loop(first, last, body, carried)

    return cut(name, total, go, start, longest=longest, most=most, samples=samples)


def cut(
    name: str,
    total: Whole,
    go: Callable[[Any, Any, Tree], Tree],
    start: Tree,
    *,
    longest: Whole | None = None,
    most: Whole | None = None,
    samples: float = 0,
) -> Tree:
    """`go(0, total, start)`, or the part of it that is due. Arguments as in `loop`.

    Args:
      go(first, last, carried) -> what is carried after iterations `first` to `last` - 1; `first` is
        a plain 0 where it is all of them.
    """
    _count(total if most is None else most, samples)
    frame = _FRAME.get()
    if frame is None:
        return go(0, total, start)
    if frame.spans is None:
        carried = go(0, total, start)
    else:
        done, due = frame.span()
        given = frame.carried()
        start = jax.tree.map(lambda new, old: jnp.where(done > 0, old, new), start, given)
        carried = go(jnp.minimum(done, total), jnp.minimum(due, total), start)
    carries, totals, loops, kinds = frame.found
    carries.append(carried)
    totals.append(jnp.asarray(total if longest is None else longest, jnp.int32))
    loops.append(Loop(name))
    kinds.append(WHOLE)
    return carried


def across(
    mapped: Callable[..., tuple[Any, Any, Any]],
    function: Callable[..., Any],
    kind: str = WHOLE,
    turns: int = 1,
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
        with _times(turns):
            return mapped(lambda spans, carried, *args: (function(*args), (), ()), (), ())[0]
    looking = frame.spans is None
    inner: list[_Frame] = []

    def run(spans, carried, *args):
        if kind == BLOCKS:
            carried = jax.tree.map(lambda a: a[0], carried)
        here = _Frame(None if looking else spans, carried, frame.index)
        inner[:] = [here]
        with _set(_FRAME, here):
            result = function(*args)
        carried = here.found.carried
        if kind == BLOCKS:
            carried = jax.tree.map(lambda a: a[None], carried)
        return result, carried, here.found.totals

    with _times(turns):
        result, carried, totals = mapped(
            run, *(((), ()) if looking else (frame.spans, frame.carried()))
        )
    if kind == TURNS:
        totals = [total.max() for total in totals]
    (here,) = inner
    frame.found.carried.append(carried)
    frame.found.totals.extend(totals)
    frame.found.loops.extend(here.found.loops)
    frame.found.kinds.append([kind] * len(carried) if kind == BLOCKS else here.found.kinds)
    return result


def either(
    due: Any, when: Callable[..., Any], otherwise: Callable[..., Any], *operands: Any
) -> Any:
    """`lax.cond(due, when, otherwise, *operands)`, of which `when` meets loops."""
    frame = _FRAME.get()
    if frame is None:
        return jax.lax.cond(due, when, otherwise, *operands)
    if frame.spans is None:
        return across(lambda run, *given: run(*given, *operands), when)

    def choice(run, spans, carried):
        def stay(spans, carried, *operands):
            return otherwise(*operands), carried, [jnp.int32(0)] * _num_loops(carried)

        return jax.lax.cond(due, run, stay, spans, carried, *operands)

    return across(choice, when)


def done() -> Any:
    """Whether the loops met so far are done after this call: True outside a stretch, so that a
    product with it, or a conjunction, changes nothing there."""
    frame = _FRAME.get()
    if frame is None or frame.spans is None:
        return True
    known = jnp.bool_(True)
    for i, total in enumerate(frame.found.totals):
        known &= frame.spans[frame.first + i, 1] >= total
    return known


def next_done(total: Whole) -> Any:
    """Whether the next loop to be met, of so many iterations, is done after this call."""
    frame = _FRAME.get()
    if frame is None or frame.spans is None:
        return True
    return frame.span()[1] >= total


def _num_loops(carried: Sequence[Any]) -> int:
    return sum(_num_loops(part) if isinstance(part, list) else 1 for part in carried)


def _count(iterations: Any, samples: float) -> None:
    meter = _METER.get()
    if meter is not None:
        meter.samples += float(iterations) * samples * meter.times


@contextlib.contextmanager
def _times(turns: int) -> Iterator[None]:
    meter = _METER.get()
    if meter is None:
        yield
        return
    meter.times *= turns
    try:
        yield
    finally:
        meter.times //= turns


@contextlib.contextmanager
def _set(variable: ContextVar, value: Any) -> Iterator[Any]:
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
