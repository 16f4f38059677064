"""Exchange of sums, client states and outputs between the devices that share a federation.

All collectives that train clients are here. Arrays of several types travel as 32-bit words, bit by
bit, so that one collective carries them.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

from fedjax_het.core.client_rows import get_client_row, scatter_client_states
from fedjax_het.core.execution_plan import LANES_AXIS, ExecutionPlan
from fedjax_het.core.resumable_loops import LoopRunner
from fedjax_het.core.server_parallelism import order_after
from fedjax_het.utils.arrays import is_prng_key

Tree = Any


def run_blocks_on_devices(
    plan: ExecutionPlan, loops: LoopRunner, run_block: Callable, inputs: Any, lanes: Any
) -> tuple[Tree, Tree, Tree]:
    """Train the clients of all blocks, one block on each device.

    Args:
      plan: the devices.
      loops: runs the long loops of the round.
      run_block: `run_block(loops, inputs, block_schedule) -> (sums, new states, outputs)`.
      inputs: a NamedTuple of the inputs of all blocks, with the client states in `states`.
      lanes: the schedule of all lanes, with a leading axis of blocks.

    Returns:
      The sums over all blocks, the states of all clients, and the outputs `[D, V, J, ...]`.
    """
    is_split = plan.has_sharded_client_states and bool(jax.tree.leaves(inputs.states))
    state_spec = P(LANES_AXIS) if is_split else P()
    input_specs = inputs._make(P() for _ in inputs)._replace(states=state_spec)

    def run_on_device(loops, inputs, block_schedule):
        states, table, table_schedule = inputs.states, inputs.states, block_schedule
        if is_split:
            table, table_schedule = fetch_client_states(states, block_schedule)
        inputs = inputs._replace(states=table)
        sums, new_states, outputs = run_block(loops, inputs, table_schedule)
        rows = block_schedule.state_rows if jax.tree.leaves(new_states) else ()
        sums, (new_states, rows, outputs) = exchange_between_devices(
            plan, sums, (new_states, rows, outputs)
        )
        if is_split:
            rows = compute_local_rows(states, rows)
        return sums, scatter_client_states(plan, states, new_states, rows), outputs

    output_specs = (P(), state_spec, P())
    return plan.map_blocks(
        loops, run_on_device, inputs, lanes, input_specs=input_specs, output_specs=output_specs
    )


def exchange_between_devices(plan: ExecutionPlan, sums: Tree, rows: Tree) -> tuple[Tree, Tree]:
    """Add up sums, and gather rows, over all devices.

    On CPUs one collective carries both, because XLA's CPU devices share a pool of threads. Devices
    can enter two ready collectives in different orders, block all threads, and never finish. If
    there are rows, all arrays are gathered and added up in the order of the blocks. Accelerators
    enter collectives in the program's order. They reduce sums in a device-specific order, which
    sends less data, and gather only rows.

    Args:
      plan: the devices.
      sums: arrays of this device's block.
      rows: any tree of this device's block, with leaves `[V, J, ...]`.

    Returns:
      The sums over all devices, and the rows of all devices, `[D, V, J, ...]`.
    """
    if plan.platform != "cpu":
        return jax.lax.psum(sums, LANES_AXIS), jax.lax.all_gather(rows, LANES_AXIS)
    leaves, structure = jax.tree.flatten((sums, rows))
    num_sums = len(jax.tree.leaves(sums))
    if len(leaves) == num_sums and all(leaf.dtype == jnp.float32 for leaf in leaves):
        flat_sums, unravel = ravel_pytree(sums)
        return unravel(jax.lax.psum(flat_sums, LANES_AXIS)), rows
    indices_by_dtype: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        indices_by_dtype.setdefault(leaf.dtype, []).append(i)
    flat_by_dtype = [
        jnp.concatenate([leaves[i].reshape(-1) for i in indices])
        for indices in indices_by_dtype.values()
    ]
    words = [bitcast_to_words(flat) for flat in flat_by_dtype]
    gathered_words = jax.lax.all_gather(jnp.concatenate(words), LANES_AXIS)  # [D, ...]
    gathered = list(leaves)
    parts = _split_columns(gathered_words, [word.size for word in words])
    for indices, part, flat in zip(indices_by_dtype.values(), parts, flat_by_dtype, strict=True):
        columns = bitcast_from_words(part, flat)
        pieces = _split_columns(columns, [leaves[i].size for i in indices])
        for i, piece in zip(indices, pieces, strict=True):
            gathered[i] = piece.reshape(piece.shape[0], *leaves[i].shape)
    totals = [leaf.sum(0, dtype=leaf.dtype) for leaf in gathered[:num_sums]]
    return jax.tree.unflatten(structure, totals + gathered[num_sums:])


def _split_columns(rows: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Return `rows` `[D, n]` as pieces with these numbers of columns."""
    ends = np.cumsum([0, *sizes])
    return [
        jax.lax.slice_in_dim(rows, first, last, axis=1) for first, last in itertools.pairwise(ends)
    ]


def fetch_client_states(states: Tree, block_schedule: Any) -> tuple[Tree, Any]:
    """Fetch the states of the clients of this device's lanes from the devices that hold them.

    There are two collectives, one after the other. First each device sends the rows that it
    requests. Then each device sends, bit by bit, the states that it holds, and zeros for the
    others.

    Args:
      states: this device's part of all client states, which are split over the devices.
      block_schedule: the schedule of this device's lanes, see `RoundSchedule`.

    Returns:
      A table of states `[V * J, ...]`, and the schedule with the table's rows in `state_rows`.
    """
    # Ordered after the collectives of the work that precedes the clients.
    signal = block_schedule.num_segments.astype(jnp.float32)
    rows = order_after(signal, block_schedule.state_rows.reshape(-1))
    requested_rows = jax.lax.all_gather(rows, LANES_AXIS)
    num_local_rows = jax.tree.leaves(states)[0].shape[0]
    last_row = num_local_rows * len(requested_rows) - 1
    requested_rows = jnp.minimum(requested_rows, last_row)  # as `get_client_row` does
    local_rows = compute_local_rows(states, requested_rows)
    is_local = (local_rows < num_local_rows)[..., None]
    requested = jax.vmap(jax.vmap(partial(get_client_row, states)))(local_rows)  # [D, V * J, ...]
    leaves, structure = jax.tree.flatten(requested)
    words = [jax.vmap(jax.vmap(bitcast_to_words))(leaf) for leaf in leaves]
    sent_words = jnp.where(is_local, jnp.concatenate(words, axis=-1), jnp.uint32(0))
    received_words = jax.lax.psum_scatter(sent_words, LANES_AXIS)  # [V * J, words]
    parts = _split_columns(received_words, [word.shape[-1] for word in words])
    table = [bitcast_from_words(part, leaf[0, 0]) for part, leaf in zip(parts, leaves, strict=True)]
    state_rows = block_schedule.state_rows
    table_rows = jnp.arange(state_rows.size, dtype=state_rows.dtype).reshape(state_rows.shape)
    return jax.tree.unflatten(structure, table), block_schedule._replace(state_rows=table_rows)


def compute_local_rows(states: Tree, rows: jax.Array) -> jax.Array:
    """Return rows of all client states as rows of this device's part.

    Args:
      states: this device's part.
      rows: rows of all clients' states, int32.

    Returns:
      Rows of this device's part; for a row of another device a number beyond the last row.
    """
    num_local_rows = jax.tree.leaves(states)[0].shape[0]
    local_rows = rows - num_local_rows * jax.lax.axis_index(LANES_AXIS)
    return jnp.where((local_rows >= 0) & (local_rows < num_local_rows), local_rows, num_local_rows)


def bitcast_to_words(leaf: jax.Array) -> jax.Array:
    """Return the bits of an array of any jax type, PRNG keys included, as uint32 `[n]`."""
    bits = _to_bitcastable(leaf).reshape(-1)
    itemsize = bits.dtype.itemsize
    if itemsize >= 4:
        return jax.lax.bitcast_convert_type(bits, jnp.uint32).reshape(-1)
    per_word = 4 // itemsize
    bits = jax.lax.bitcast_convert_type(bits, {1: jnp.uint8, 2: jnp.uint16}[itemsize])
    bits = jnp.pad(bits, (0, -bits.size % per_word)).reshape(-1, per_word)
    return jax.lax.bitcast_convert_type(bits, jnp.uint32)


def bitcast_from_words(words: jax.Array, template: jax.Array) -> jax.Array:
    """Return arrays of any type from their words.

    Args:
      words: uint32 `[D, n]`; a row holds the words of one array, as `bitcast_to_words` returns
        them.
      template: an array of the type and shape `[...]` of each array.

    Returns:
      The arrays, `[D, ...]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.core.device_exchange import bitcast_from_words, bitcast_to_words
      >>> array = jnp.array([1.5, -2.0], jnp.bfloat16)
      >>> bitcast_from_words(bitcast_to_words(array)[None], array).tolist()
      [[1.5, -2.0]]
    """
    bitcastable = jax.eval_shape(_to_bitcastable, template)
    rows, size = words.shape[0], bitcastable.dtype.itemsize
    if size == 8:
        bits = jax.lax.bitcast_convert_type(words.reshape(rows, -1, 2), bitcastable.dtype)
    elif size == 4:
        bits = jax.lax.bitcast_convert_type(words, bitcastable.dtype)
    else:
        narrow = jax.lax.bitcast_convert_type(words, {1: jnp.uint8, 2: jnp.uint16}[size])
        narrow = narrow.reshape(rows, -1)[:, : bitcastable.size]
        bits = jax.lax.bitcast_convert_type(narrow, bitcastable.dtype)
    return _from_bitcastable(bits.reshape(rows, *bitcastable.shape), template.dtype)


def _to_bitcastable(leaf: jax.Array) -> jax.Array:
    """Return the array in a type of 1, 2, 4 or 8 bytes that is not complex."""
    dtype = leaf.dtype
    if is_prng_key(leaf):
        return jax.random.key_data(leaf)
    if dtype == jnp.bool_:
        return leaf.astype(jnp.uint8)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.stack([leaf.real, leaf.imag], axis=-1)
    # Several numbers of less than 8 bits share a byte.
    if jnp.issubdtype(dtype, jnp.floating):
        return leaf.astype(jnp.float32) if jnp.finfo(dtype).bits < 8 else leaf
    return leaf.astype(jnp.int8) if jnp.iinfo(dtype).bits < 8 else leaf


def _from_bitcastable(bitcastable: jax.Array, dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(bitcastable, impl=jax.random.key_impl(jnp.zeros((), dtype)))
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.lax.complex(bitcastable[..., 0], bitcastable[..., 1])
    return bitcastable.astype(dtype)
