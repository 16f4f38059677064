"""Client states on the host, where those of all clients would not fit on the devices.

Who takes part in the next rounds is known, so their states alone are put on the devices as a table
`[U, ...]`, and taken back afterwards. Copies of float arrays: results are the same bits.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fedjax_het.engine.plan import RUN, RUNS, Plan, host_values
from fedjax_het.engine.schedule import Scheduler

Tree = Any

SLAB_BYTES = 2**26  # copied at a time on the way to a file


class HostState:
    """The states of K clients, `[K, ...]`, which all start alike.

    Only clients that were written take memory: the others' rows are never touched, and are the
    first row by definition.
    """

    def __init__(self, first: Tree, num_clients: int):
        """`first`: a client's state before it ever trained."""
        self.num_clients = num_clients
        self.first = jax.tree.map(np.asarray, first)
        self.rows = jax.tree.map(
            lambda a: np.empty((num_clients, *a.shape), a.dtype), self.first
        )  # the system gives memory to what is written
        self._touched = np.zeros(num_clients, bool)

    @property
    def touched(self) -> np.ndarray:
        """Ids of the clients that were written, ascending."""
        return np.flatnonzero(self._touched)

    def client(self, k: int) -> Tree:
        """Client k's state."""
        if not self._touched[k]:
            return self.first
        return jax.tree.map(lambda rows: rows[k], self.rows)

    def gather(self, ids: np.ndarray, out: Tree) -> None:
        """Write the states of these clients to the first rows of `out`, and the first state to the
        rest."""
        known = self._touched[ids]
        fresh = np.concatenate([np.flatnonzero(~known), np.arange(len(ids), _length(out))])

        def one(rows, first, out):
            out[fresh] = first
            if known.all():
                np.take(rows, ids, 0, out[: len(ids)], mode="clip")  # without a copy on the way
            else:
                out[np.flatnonzero(known)] = rows[ids[known]]

        jax.tree.map(one, self.rows, self.first, out)

    def scatter(self, ids: np.ndarray, rows: Tree) -> None:
        """Take the states of these clients from the first rows of `rows`."""

        def one(all_, new):
            all_[ids] = new[: len(ids)]

        jax.tree.map(one, self.rows, rows)
        self._touched[ids] = True

    def selected(self) -> Tree:
        """The states of `touched`, as leaves of a checkpoint."""
        ids = self.touched
        return jax.tree.map(lambda rows: SelectedRows(rows, ids), self.rows)


class SelectedRows:
    """Some rows of a large array, which a checkpoint copies piece by piece."""

    def __init__(self, rows: np.ndarray, ids: np.ndarray):
        self._rows, self._ids = rows, ids
        self.shape, self.dtype = (len(ids), *rows.shape[1:]), rows.dtype

    def pieces(self):
        """The rows in order, a few at a time."""
        size = int(np.prod(self.shape[1:])) * self.dtype.itemsize
        count = max(1, SLAB_BYTES // max(1, size))
        for start in range(0, len(self._ids), count):
            yield self._rows[self._ids[start : start + count]]


class Pager:
    """Moves client states between the host and the devices, for federations that go in step.

    Args:
      schedulers: of every place; places that do the last federation's work once more share its
        states.
      first: a client's first state, as the devices have it: a leading axis of one client, and one
        of places before it where federations are on devices of their own.
      num_rows: U, at least the number of clients that train in any chunk of rounds.
    """

    def __init__(self, plan: Plan, schedulers: Sequence[Scheduler], first: Tree, num_rows: int):
        self._plan, self._schedulers, self.num_rows = plan, list(schedulers), num_rows
        self._apart = plan.spreads == RUNS
        first = jax.tree.map(host_values, first)
        own: dict[int, HostState] = {}
        for i, scheduler in enumerate(self._schedulers):
            if id(scheduler) not in own:
                one = jax.tree.map(lambda a, i=i: a[i, 0] if self._apart else a[0], first)
                own[id(scheduler)] = HostState(one, scheduler.partition.num_clients)
        self.states = [own[id(scheduler)] for scheduler in self._schedulers]  # of every place

    def load(self, rounds: Sequence[int]) -> Tree:
        """The table of the clients of these rounds, on the devices."""
        shape = (len(self.states), self.num_rows)
        table = jax.tree.map(lambda a: np.empty((*shape, *a.shape), a.dtype), self.states[0].first)
        for i, (state, ids) in enumerate(zip(self.states, self._ids(rounds), strict=True)):
            state.gather(ids, jax.tree.map(lambda a, i=i: a[i], table))
        if self._apart:
            return self._plan.put(table, RUN)
        return self._plan.put(jax.tree.map(lambda a: a[0], table))

    def store(self, table: Tree, rounds: Sequence[int]) -> None:
        """Take the states back that these rounds have changed."""
        table = jax.tree.map(host_values, table)
        if not self._apart:
            table = jax.tree.map(lambda a: a[None], table)
        done: list[HostState] = []
        for i, (state, ids) in enumerate(zip(self.states, self._ids(rounds), strict=True)):
            if state not in done:  # an idle place may have left its copy as it was
                done.append(state)
                state.scatter(ids, jax.tree.map(lambda a, i=i: a[i], table))

    def _ids(self, rounds: Sequence[int]) -> list[np.ndarray]:
        return [scheduler.trained(rounds) for scheduler in self._schedulers]


def _length(tree: Tree) -> int:
    return len(jax.tree.leaves(tree)[0])
