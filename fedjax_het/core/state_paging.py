"""Client states on the host, for runs whose states do not fit on the devices.

The participants of the next rounds are known. Only their states are put on the devices, as a table
`[U, ...]`, and stored again afterwards. Copies preserve the bits of arrays of any type.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_het.core.execution_plan import PER_RUN, RUNS_AXIS, ExecutionPlan
from fedjax_het.core.schedule import Scheduler
from fedjax_het.utils.arrays import fetch_to_host, from_numpy_bits, to_numpy_bits

Tree = Any


class HostClientStates:
    """The states of K clients, which all have the same initial state.

    Only the states of clients that were written use memory.

    Attributes:
      initial_state: state of a client before its first round.
      written_client_ids: clients that were written, int64 `[W]`, in the order of their first write.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.core.state_paging import HostClientStates
      >>> states = HostClientStates({"w": np.zeros(2)}, num_clients=5)
      >>> states.scatter_states(np.array([3]), {"w": np.ones((1, 2))})
      >>> states.get_client(3)["w"], states.get_client(0)["w"]
      (array([1., 1.]), array([0., 0.]))
    """

    def __init__(self, initial_state: Tree, num_clients: int):
        """Create states that are equal to `initial_state`.

        Args:
          initial_state: state of a client before its first round.
          num_clients: number of clients, K.
        """
        self.initial_state = jax.tree.map(fetch_to_host, initial_state)
        self._initial_bits = jax.tree.map(to_numpy_bits, self.initial_state)
        # The system allocates memory only for rows that are written, from the front on.
        self._rows = self.allocate_table((num_clients,))
        self._row_of = np.full(num_clients, -1)
        self.written_client_ids = np.zeros(0, np.int64)

    @property
    def rows(self) -> Tree:
        """Return the states of `written_client_ids`; a view, except for PRNG keys."""
        return self._restore_types(
            jax.tree.map(lambda rows: rows[: len(self.written_client_ids)], self._rows)
        )

    def copy(self) -> "HostClientStates":
        """Return a copy of the states, which later writes do not change."""
        states = HostClientStates(self.initial_state, len(self._row_of))
        states.scatter_states(self.written_client_ids, self.rows)
        return states

    def get_client(self, k: int) -> Tree:
        """Return the state of client k."""
        row = self._row_of[k]
        if row < 0:
            return self.initial_state
        return self._restore_types(jax.tree.map(lambda rows: rows[row], self._rows))

    def allocate_table(self, shape: tuple[int, ...]) -> Tree:
        """Return uninitialized memory for the bits of `shape` states."""
        return jax.tree.map(lambda a: np.empty((*shape, *a.shape), a.dtype), self._initial_bits)

    def _restore_types(self, bits: Tree) -> Tree:
        return jax.tree.map(from_numpy_bits, bits, self.initial_state)

    def gather_states(self, ids: np.ndarray, out: Tree) -> None:
        """Write the states of some clients to the first rows of a table.

        Args:
          ids: the clients, `[n]`.
          out: bits of states, `[U, ...]`; the initial state fills the rows from n on.
        """
        source_rows = self._row_of[ids]

        def gather_leaf(rows, initial, out):
            for i, row in enumerate(source_rows):
                out[i] = rows[row] if row >= 0 else initial
            out[len(ids) :] = initial

        jax.tree.map(gather_leaf, self._rows, self._initial_bits, out)

    def scatter_states(self, ids: np.ndarray, rows: Tree) -> None:
        """Store the states of some clients.

        Args:
          ids: distinct clients, `[n]`.
          rows: their states, the first n rows of `[U, ...]`.
        """
        new_client_ids = ids[self._row_of[ids] < 0]
        self._row_of[new_client_ids] = len(self.written_client_ids) + np.arange(len(new_client_ids))
        self.written_client_ids = np.concatenate([self.written_client_ids, new_client_ids])
        target_rows = self._row_of[ids]

        def scatter_leaf(stored_rows, rows):
            stored_rows[target_rows] = to_numpy_bits(rows)[: len(ids)]

        jax.tree.map(scatter_leaf, self._rows, rows)


class StatePager:
    """Moves client states between the host and the devices, for runs that share their programs.

    Attributes:
      states: the states of each place's run. Idle places repeat the last run and share its states.
      num_rows: U, rows of the table on the devices.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        schedulers: Sequence[Scheduler],
        initial_state: Tree,
        num_rows: int,
    ):
        """Create the initial states on the host.

        Args:
          plan: placement of the runs.
          schedulers: the scheduler of each place.
          initial_state: initial state of a client on the devices, with a leading axis of one
            client. If runs have their own devices, an axis of places precedes it.
          num_rows: U, at least the number of clients that train in any chunk of rounds.
        """
        self._plan, self._schedulers, self.num_rows = plan, list(schedulers), num_rows
        self._has_run_axis = plan.mesh_axis == RUNS_AXIS
        initial_state = jax.tree.map(fetch_to_host, initial_state)
        if not self._has_run_axis:
            initial_state = jax.tree.map(lambda a: a[None], initial_state)
        by_scheduler: dict[int, HostClientStates] = {}
        for i, scheduler in enumerate(self._schedulers):
            if id(scheduler) not in by_scheduler:
                first = jax.tree.map(
                    lambda a, i=i: a[i if self._has_run_axis else 0, 0], initial_state
                )
                num_clients = scheduler.partition.num_clients
                by_scheduler[id(scheduler)] = HostClientStates(first, num_clients)
        self.states = [by_scheduler[id(scheduler)] for scheduler in self._schedulers]

    def load_table(self, round_indices: Sequence[int]) -> Tree:
        """Put the states of the clients of some rounds on the devices.

        Args:
          round_indices: the rounds.

        Returns:
          The table, `[U, ...]`, with an axis of places before it if runs are on their own devices.
        """
        first_states = self.states[0]
        table = first_states.allocate_table((len(self.states), self.num_rows))
        for i, (states, ids) in enumerate(self._trained_clients(round_indices)):
            states.gather_states(ids, jax.tree.map(lambda a, i=i: a[i], table))
        if not self._has_run_axis:
            table = jax.tree.map(lambda a: a[0], table)
        table = jax.tree.map(from_numpy_bits, table, first_states.initial_state)
        return self._plan.put(table, PER_RUN)

    def store_table(self, table: Tree, round_indices: Sequence[int]) -> None:
        """Store the states that some rounds have changed.

        Args:
          table: the table on the devices, see `load_table`.
          round_indices: the rounds.
        """
        table = jax.tree.map(fetch_to_host, table)
        if not self._has_run_axis:
            table = jax.tree.map(lambda a: a[None], table)
        stored_states: list[HostClientStates] = []
        for i, (states, ids) in enumerate(self._trained_clients(round_indices)):
            if states not in stored_states:  # an idle place may hold an older copy
                stored_states.append(states)
                states.scatter_states(ids, jax.tree.map(lambda a, i=i: a[i], table))

    def _trained_clients(
        self, round_indices: Sequence[int]
    ) -> Iterator[tuple[HostClientStates, np.ndarray]]:
        """Yield states and trained clients of each place."""
        for states, scheduler in zip(self.states, self._schedulers, strict=True):
            yield states, scheduler.trained_work_ids(round_indices)
