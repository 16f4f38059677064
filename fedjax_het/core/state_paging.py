"""Client states on the host or on disk, for runs whose states do not fit on the devices.

The participants of the next rounds are known. Only their states are put on the devices, as a table
`[U, ...]`, and stored again afterwards. Copies preserve the bits of arrays of any type.
"""

import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import jax
import numpy as np

from fedjax_het.core.execution_plan import PER_RUN, RUNS_AXIS, ExecutionPlan
from fedjax_het.core.schedule import Scheduler
from fedjax_het.utils.arrays import fetch_to_host, from_numpy_bits, to_numpy_bits
from fedjax_het.utils.errors import make_value_error

Tree = Any


class _DiskRows:
    """Rows of an array in a part of a temporary file, which is read and written a row at a time.

    Such reads and writes take no memory of the process, unlike a memory map, and a full disk is an
    error.
    """

    def __init__(self, file: BinaryIO, offset: int, template: np.ndarray):
        self._file, self._offset, self._template = file, offset, template

    def __getitem__(self, key: int | slice) -> np.ndarray:
        """Return a copy of one row, or the first rows as a memory map that cannot be changed."""
        template = self._template
        if isinstance(key, slice):
            if not key.stop or not template.nbytes:
                return np.empty((key.stop, *template.shape), template.dtype)
            shape = (key.stop, *template.shape)
            return np.memmap(self._file, template.dtype, "r", self._offset, shape)
        row = np.empty_like(template)
        self._file.seek(self._offset + key * template.nbytes)
        self._file.readinto(row.reshape(-1).view(np.uint8))  # type: ignore[attr-defined]
        return row

    def __setitem__(self, rows: np.ndarray, values: np.ndarray) -> None:
        for row, value in zip(rows.tolist(), values, strict=True):
            content = np.ascontiguousarray(value, self._template.dtype).reshape(-1).view(np.uint8)
            try:
                self._file.seek(self._offset + row * self._template.nbytes)
                while content.size:
                    content = content[self._file.write(content.data) :]
            except OSError as error:
                expected = f"room in the folder {tempfile.gettempdir()} ({error.strerror or error})"
                raise make_value_error("client_state", "disk", expected) from error

    def prefetch(self, rows: np.ndarray) -> None:
        """Ask the system to read some rows, without waiting for them."""
        if hasattr(os, "posix_fadvise"):  # Windows and macOS have no such advice
            length = self._template.nbytes
            for row in rows.tolist():
                start = self._offset + row * length
                os.posix_fadvise(self._file.fileno(), start, length, os.POSIX_FADV_WILLNEED)


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

    def __init__(
        self,
        initial_state: Tree,
        num_clients: int,
        *,
        max_written: int | None = None,
        on_disk: bool = False,
    ):
        """Create states that are equal to `initial_state`.

        Args:
          initial_state: state of a client before its first round.
          num_clients: number of clients, K.
          max_written: number of clients that are expected to be written (default: K).
          on_disk: store the states in a temporary file, see `tempfile.gettempdir`.
        """
        self.initial_state = jax.tree.map(fetch_to_host, initial_state)
        self._initial_bits = jax.tree.map(to_numpy_bits, self.initial_state)
        self.is_on_disk, self._capacity = on_disk, num_clients
        if on_disk:
            self._rows = self._create_file(num_clients)
        else:
            # The system allocates memory only for rows that are written, from the front on.
            self._capacity = min(num_clients, max_written or num_clients)
            self._rows = self.allocate_table((self._capacity,))
        self._row_of = np.full(num_clients, -1)
        self.written_client_ids = np.zeros(0, np.int64)

    @property
    def rows(self) -> Tree:
        """Return the states of `written_client_ids`; a view, except for PRNG keys."""
        return self._restore_types(
            jax.tree.map(lambda rows: rows[: len(self.written_client_ids)], self._rows)
        )

    def _create_file(self, num_clients: int) -> Tree:
        """Return the rows of each leaf, one after the other in a file without a name."""
        file = tempfile.TemporaryFile(buffering=0, prefix="fedjax_het-")  # noqa: SIM115
        weakref.finalize(self, file.close)
        leaves, structure = jax.tree.flatten(self._initial_bits)
        sizes = [num_clients * leaf.nbytes for leaf in leaves]
        offsets = np.cumsum([0, *sizes[:-1]]).tolist()
        rows = [_DiskRows(file, *pair) for pair in zip(offsets, leaves, strict=True)]
        return jax.tree.unflatten(structure, rows)

    def copy(self) -> "HostClientStates":
        """Return a copy of the states, which later writes do not change."""
        num_clients, on_disk = len(self._row_of), self.is_on_disk
        states = HostClientStates(
            self.initial_state, num_clients, max_written=self._capacity, on_disk=on_disk
        )
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
        self._reserve(len(self.written_client_ids))
        target_rows = self._row_of[ids]

        def scatter_leaf(stored_rows, rows):
            stored_rows[target_rows] = to_numpy_bits(rows)[: len(ids)]

        jax.tree.map(scatter_leaf, self._rows, rows)

    def _reserve(self, num_rows: int) -> None:
        """Make room for rows beyond the expected number."""
        if num_rows <= self._capacity:
            return
        old_rows, num_old = self._rows, self._capacity
        self._capacity = min(len(self._row_of), max(num_rows, 2 * num_old))
        self._rows = self.allocate_table((self._capacity,))

        def copy_leaf(new: np.ndarray, old: np.ndarray) -> None:
            new[:num_old] = old

        jax.tree.map(copy_leaf, self._rows, old_rows)

    def prefetch(self, ids: np.ndarray) -> None:
        """Begin to read the states of some clients from disk.

        Args:
          ids: the clients, `[n]`.
        """
        if self.is_on_disk:
            rows = self._row_of[ids]
            for leaf in jax.tree.leaves(self._rows):
                leaf.prefetch(rows[rows >= 0])


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
        *,
        on_disk: bool = False,
    ):
        """Create the initial states on the host.

        Args:
          plan: placement of the runs.
          schedulers: the scheduler of each place.
          initial_state: initial state of a client on the devices, with a leading axis of one
            client. If runs have their own devices, an axis of places precedes it.
          num_rows: U, at least the number of clients that train in any chunk of rounds.
          on_disk: store the states on disk instead of the host's memory.
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
                max_written = scheduler.cohort_size * scheduler.settings.num_rounds
                by_scheduler[id(scheduler)] = HostClientStates(
                    *(first, scheduler.partition.num_clients),
                    max_written=max_written,
                    on_disk=on_disk,
                )
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

    def prefetch(self, round_indices: Sequence[int]) -> None:
        """Begin to read the states of the clients of some rounds, if they are on disk."""
        for states, ids in self._trained_clients(round_indices):
            states.prefetch(ids)

    def _trained_clients(
        self, round_indices: Sequence[int]
    ) -> Iterator[tuple[HostClientStates, np.ndarray]]:
        """Yield states and trained clients of each place."""
        for states, scheduler in zip(self.states, self._schedulers, strict=True):
            yield states, scheduler.trained_work_ids(round_indices)
