"""States and models of clients as rows of arrays."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.utils.arrays import set_row, take_row

Tree = Any


def get_client_row(states: Tree, client: jax.Array | int) -> Tree:
    """Return one row of client states.

    Args:
      states: states with a leading axis of clients `[K, ...]`, or of the rows of a table.
      client: the row; a number beyond the last row selects the last row.

    Returns:
      The state of one client.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.core.client_rows import get_client_row
      >>> int(get_client_row(jnp.array([5, 6, 7]), 1))
      6
    """
    return jax.tree.map(lambda s: take_row(s, jnp.minimum(client, s.shape[0] - 1)), states)


def tile_over_clients(tree: Tree, num_clients: int) -> Tree:
    """Repeat one client's state for all clients.

    Args:
      tree: the state of one client, `[...]`.
      num_clients: number of clients, K.

    Returns:
      The states, `[K, ...]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.core.client_rows import tile_over_clients
      >>> tile_over_clients({"w": jnp.zeros(3)}, 5)["w"].shape
      (5, 3)
    """
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (num_clients, *a.shape)), tree)


def scatter_client_states(plan: ExecutionPlan, states: Tree, new_states: Tree, rows: Any) -> Tree:
    """Write the states of a round's clients to their rows.

    On a CPU the states are written row by row, in place: its scatter copies the states of all K
    clients. An accelerator's does not, and is one operation instead of a loop of several.

    Args:
      plan: the devices.
      states: the states of all clients, or a table.
      new_states: the states of the clients in the slots, `[D, V, J, ...]`.
      rows: the row of each slot, `[D, V, J]`; a row beyond the last is an unused slot.

    Returns:
      `states` with the new rows.
    """
    if not jax.tree.leaves(states):
        return states
    rows = rows.reshape(-1)
    flat_states = jax.tree.map(lambda n: n.reshape(rows.shape + n.shape[3:]), new_states)
    if plan.platform != "cpu":

        def scatter(all_states, new_states):
            # Unused slots: beyond the last row, which drops them, and each somewhere else.
            unused = all_states.shape[0] + jnp.arange(len(rows))
            target_rows = jnp.where(rows < all_states.shape[0], rows, unused)
            return all_states.at[target_rows].set(
                new_states, mode="drop", unique_indices=True, wrap_negative_indices=False
            )

        return jax.tree.map(scatter, states, flat_states)

    def write_row(i, states):
        index = take_row(rows, i)

        def write_leaf(all_states, new_states):
            is_unused = index >= all_states.shape[0]
            row = jnp.where(is_unused, get_client_row(all_states, index), take_row(new_states, i))
            return set_row(all_states, row, index)

        return jax.tree.map(write_leaf, states, flat_states)

    return jax.lax.fori_loop(0, rows.shape[0], write_row, states)


class ClientModels(NamedTuple):
    """The models of a round's S sampled clients after local training, in the order of their ids.

    A sampled client without data has not trained: the entry in its place is not to be used.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.methods import ClientModels
      >>> weights, present = jnp.array([0.25, 0.75, 0.0]), jnp.array([True, True, False])
      >>> ClientModels({"params": jnp.zeros((3, 7))}, weights, present).variables["params"].shape
      (3, 7)
    """

    variables: Tree
    "`[S, ...]`."
    weights: jax.Array
    "`[S]` float32: of the clients in the round's average; 0 of clients that did not train."
    is_present: jax.Array
    "`[S]` bool: whether the client trained."


class ClientLosses(NamedTuple):
    """Training losses of a round's clients, by slot.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.core.client_rows import ClientLosses
      >>> losses = ClientLosses(jnp.array([[[2, 3]]]), jnp.array([[[0.5, 0.0]]]))
      >>> losses.by_client(3).tolist()
      [nan, nan, 0.5]
    """

    client_ids: jax.Array
    "`[D, V, J]` int32: client of each slot; K where the slot is unused."
    losses: jax.Array
    "`[D, V, J]` float32: mean loss over the samples of local training."

    def by_client(self, num_clients: int) -> jax.Array:
        """Return the losses of all K clients, float32 `[K]`; NaN for clients without a slot."""
        ids, losses = self.client_ids.reshape(-1), self.losses.reshape(-1)
        return jnp.full(num_clients, jnp.nan, losses.dtype).at[ids].set(losses, mode="drop")


def select_client_models(
    schedule: Any, variables: Tree, client_ids: jax.Array, weights: jax.Array, num_steps: jax.Array
) -> ClientModels:
    """Return the models of the slots in the order of the clients.

    The properties of the slots are gathered with the models: in the schedule they could be on other
    devices.

    Args:
      schedule: the round's `RoundSchedule`.
      variables: models of the slots, `[D, V, J, ...]`.
      client_ids: clients of the slots, `[D, V, J]`.
      weights: weights of the slots, `[D, V, J]`.
      num_steps: minibatches of the slots, `[D, V, J]`.

    Returns:
      The models.
    """
    participants = schedule.participants
    slots = (client_ids.reshape(-1) == participants[:, None]).argmax(1)
    is_present = (participants < schedule.num_clients) & (num_steps.reshape(-1)[slots] > 0)
    return ClientModels(
        jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:])[slots], variables),
        jnp.where(is_present, weights.reshape(-1)[slots], 0),
        is_present,
    )
