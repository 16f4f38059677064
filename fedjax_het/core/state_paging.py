"""Client states on the host, where those of all clients would not fit on the devices.

Who takes part in the next rounds is known, so their states alone are put on the devices as a table
`[U, ...]`, and taken back afterwards. Copies of arrays of any type: results are the same bits.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fedjax_het.core.execution_plan import PER_RUN, RUNS_AXIS, ExecutionPlan
from fedjax_het.core.schedule import Scheduler
from fedjax_het.utils.arrays import fetch_to_host, from_numpy_bits, to_numpy_bits

Tree = Any


class HostClientStates:
    """The states of K clients, which all start alike.

    Only clients that were written take memory. Where a client's state is says the order in which
    they were first written: row i of `rows` is that of client `touched[i]`.
    """

    def __init__(self, initial_state: Tree, num_clients: int):
        """`first`: a client's state before it ever trained."""
        self.num_clients = num_clients
        self.initial_state = jax.tree.map(fetch_to_host, initial_state)
        self._initial_bits = jax.tree.map(to_numpy_bits, self.initial_state)
        # The system gives memory to what is written, from the front on.
        self._rows = jax.tree.map(
            lambda a: np.empty((num_clients, *a.shape), a.dtype), self._initial_bits
        )
        self._row_of = np.full(num_clients, -1)
        self.written_client_ids = np.zeros(0, np.int64)

    @property
    def rows(self) -> Tree:
        """The states of the clients `touched`; not a copy, but for random keys."""
        return self._restore_types(
            jax.tree.map(lambda rows: rows[: len(self.written_client_ids)], self._rows)
        )

    def get_client(self, k: int) -> Tree:
        """Client k's state."""
        row = self._row_of[k]
        if row < 0:
            return self.initial_state
        return self._restore_types(jax.tree.map(lambda rows: rows[row], self._rows))

    def allocate_table(self, shape: tuple[int, ...]) -> Tree:
        """Memory for so many states: of their `bits`, as `gather` writes them."""
        return jax.tree.map(lambda a: np.empty((*shape, *a.shape), a.dtype), self._initial_bits)

    def _restore_types(self, tree: Tree) -> Tree:
        return jax.tree.map(from_numpy_bits, tree, self.initial_state)

    def gather_states(self, ids: np.ndarray, out: Tree) -> None:
        """Write the states of these clients to the first rows of `out`, and the first state to the
        rest. `out` holds the `bits` of states."""
        source_rows = self._row_of[ids]

        def gather_leaf(rows, initial, out):
            for i, row in enumerate(source_rows):
                out[i] = rows[row] if row >= 0 else initial
            out[len(ids) :] = initial

        jax.tree.map(gather_leaf, self._rows, self._initial_bits, out)

    def scatter_states(self, ids: np.ndarray, rows: Tree) -> None:
        """Take the states of these clients, all different, from the first rows of `rows`."""
        new_client_ids = ids[self._row_of[ids] < 0]
        self._row_of[new_client_ids] = len(self.written_client_ids) + np.arange(len(new_client_ids))
        self.written_client_ids = np.concatenate([self.written_client_ids, new_client_ids])
        target_rows = self._row_of[ids]

        def scatter_leaf(stored_rows, rows):
            stored_rows[target_rows] = to_numpy_bits(rows)[: len(ids)]

        jax.tree.map(scatter_leaf, self._rows, rows)


class StatePager:
    """Moves client states between the host and the devices, for federations that go in step.

    Args:
      schedulers: of every place; places that do the last federation's work once more share its
        states.
      first: a client's first state, as the devices have it: a leading axis of one client, and one
        of places before it where federations are on devices of their own.
      num_rows: U, at least the number of clients that train in any chunk of rounds.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        schedulers: Sequence[Scheduler],
        initial_state: Tree,
        num_rows: int,
    ):
        self._plan, self._schedulers, self.num_rows = plan, list(schedulers), num_rows
        self._has_run_axis = plan.mesh_axis == RUNS_AXIS
        initial_state = jax.tree.map(fetch_to_host, initial_state)
        states_by_scheduler: dict[int, HostClientStates] = {}
        for i, scheduler in enumerate(self._schedulers):
            if id(scheduler) not in states_by_scheduler:
                untrained = jax.tree.map(
                    lambda a, i=i: a[i, 0] if self._has_run_axis else a[0], initial_state
                )
                states_by_scheduler[id(scheduler)] = HostClientStates(
                    untrained, scheduler.partition.num_clients
                )
        self.states = [
            states_by_scheduler[id(scheduler)] for scheduler in self._schedulers
        ]  # of every place

    def load_table(self, round_indices: Sequence[int]) -> Tree:
        """The table of the clients of these rounds, on the devices."""
        shape = (len(self.states), self.num_rows)
        first_states = self.states[0]
        table = first_states.allocate_table(shape)
        for i, (state, ids) in enumerate(
            zip(self.states, self._trained_client_ids(round_indices), strict=True)
        ):
            state.gather_states(ids, jax.tree.map(lambda a, i=i: a[i], table))
        if self._has_run_axis:
            return self._plan.put(
                jax.tree.map(from_numpy_bits, table, first_states.initial_state), PER_RUN
            )
        table = jax.tree.map(lambda a: a[0], table)
        return self._plan.put(jax.tree.map(from_numpy_bits, table, first_states.initial_state))

    def store_table(self, table: Tree, round_indices: Sequence[int]) -> None:
        """Take the states back that these rounds have changed."""
        table = jax.tree.map(fetch_to_host, table)
        if not self._has_run_axis:
            table = jax.tree.map(lambda a: a[None], table)
        written_states: list[HostClientStates] = []
        for i, (state, ids) in enumerate(
            zip(self.states, self._trained_client_ids(round_indices), strict=True)
        ):
            if state not in written_states:  # an idle place may have left its copy as it was
                written_states.append(state)
                state.scatter_states(ids, jax.tree.map(lambda a, i=i: a[i], table))

    def _trained_client_ids(self, round_indices: Sequence[int]) -> list[np.ndarray]:
        return [scheduler.trained_work_ids(round_indices) for scheduler in self._schedulers]
