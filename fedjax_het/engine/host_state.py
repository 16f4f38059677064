"""Client states on the host, where those of all clients would not fit on the devices.

Who takes part in the next rounds is known, so their states alone are put on the devices as a table
`[U, ...]`, and taken back afterwards. Copies of arrays of any type: results are the same bits.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fedjax_het.common.arrays import bits, host_values, with_bits
from fedjax_het.engine.plan import RUN, RUNS, Plan
from fedjax_het.engine.schedule import Scheduler

Tree = Any


class HostState:
    """The states of K clients, which all start alike.

    Only clients that were written take memory. Where a client's state is says the order in which
    they were first written: row i of `rows` is that of client `touched[i]`.
    """

    def __init__(self, first: Tree, num_clients: int):
        """`first`: a client's state before it ever trained."""
        self.num_clients = num_clients
        self.first = jax.tree.map(host_values, first)
        self._first = jax.tree.map(bits, self.first)
        # The system gives memory to what is written, from the front on.
        self._rows = jax.tree.map(lambda a: np.empty((num_clients, *a.shape), a.dtype), self._first)
        self._row_of = np.full(num_clients, -1)
        self.touched = np.zeros(0, np.int64)

    @property
    def rows(self) -> Tree:
        """The states of the clients `touched`; not a copy, but for random keys."""
        return self._with_types(jax.tree.map(lambda rows: rows[: len(self.touched)], self._rows))

    def client(self, k: int) -> Tree:
        """Client k's state."""
        row = self._row_of[k]
        if row < 0:
            return self.first
        return self._with_types(jax.tree.map(lambda rows: rows[row], self._rows))

    def empty(self, shape: tuple[int, ...]) -> Tree:
        """Memory for so many states: of their `bits`, as `gather` writes them."""
        return jax.tree.map(lambda a: np.empty((*shape, *a.shape), a.dtype), self._first)

    def _with_types(self, tree: Tree) -> Tree:
        return jax.tree.map(with_bits, tree, self.first)

    def gather(self, ids: np.ndarray, out: Tree) -> None:
        """Write the states of these clients to the first rows of `out`, and the first state to the
        rest. `out` holds the `bits` of states."""
        source = self._row_of[ids]

        def gather_leaf(rows, first, out):
            for i, row in enumerate(source):
                out[i] = rows[row] if row >= 0 else first
            out[len(ids) :] = first

        jax.tree.map(gather_leaf, self._rows, self._first, out)

    def scatter(self, ids: np.ndarray, rows: Tree) -> None:
        """Take the states of these clients, all different, from the first rows of `rows`."""
        new = ids[self._row_of[ids] < 0]
        self._row_of[new] = len(self.touched) + np.arange(len(new))
        self.touched = np.concatenate([self.touched, new])
        target = self._row_of[ids]

        def scatter_leaf(kept, rows):
            kept[target] = bits(rows)[: len(ids)]

        jax.tree.map(scatter_leaf, self._rows, rows)


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
                untrained = jax.tree.map(lambda a, i=i: a[i, 0] if self._apart else a[0], first)
                own[id(scheduler)] = HostState(untrained, scheduler.partition.num_clients)
        self.states = [own[id(scheduler)] for scheduler in self._schedulers]  # of every place

    def load(self, rounds: Sequence[int]) -> Tree:
        """The table of the clients of these rounds, on the devices."""
        shape = (len(self.states), self.num_rows)
        first = self.states[0]
        table = first.empty(shape)
        for i, (state, ids) in enumerate(zip(self.states, self._ids(rounds), strict=True)):
            state.gather(ids, jax.tree.map(lambda a, i=i: a[i], table))
        if self._apart:
            return self._plan.put(jax.tree.map(with_bits, table, first.first), RUN)
        table = jax.tree.map(lambda a: a[0], table)
        return self._plan.put(jax.tree.map(with_bits, table, first.first))

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
