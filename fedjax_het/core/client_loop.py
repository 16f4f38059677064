"""The device's half of a round: every sampled client trains, lane by lane, in one program.

A client is described by a triple (begin, step, end). A lane runs through its clients one after
the other; lanes are vmapped on a device and sharded over devices. No client is padded to the
length of another, and nothing here depends on which lane a client is on.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

from fedjax_het.core.bitcast import bitcast_from_words, bitcast_to_words
from fedjax_het.core.client_algorithm import (
    Batch,
    ClientAlgorithm,
    ClientContext,
    ClientInfo,
    ClientUpdate,
    with_contract_checks,
    with_error_locations,
)
from fedjax_het.core.divergence import has_no_new_nonfinite
from fedjax_het.core.execution_plan import LANES_AXIS, ExecutionPlan
from fedjax_het.core.resumable_loops import BLOCKS, CLIENTS, TURNS, WHOLE_LOOPS, LoopRunner
from fedjax_het.core.schedule import RoundSchedule
from fedjax_het.core.server_parallelism import order_after
from fedjax_het.utils.arrays import AnyArray, set_row, take_row

Tree = Any


class Examples(NamedTuple):
    """Training examples on the device, gathered by index inside the program."""

    images: AnyArray  # [N, H, W, C] uint8 (or float32)
    labels: AnyArray  # [N] int32


class Cohort(NamedTuple):
    """A round's schedule, the examples that it indexes, and what else the round reads."""

    schedule: RoundSchedule
    examples: Examples
    server_examples: Examples | None = None  # [n_0, ...] the server's own; None where it has none
    inputs: dict[str, Tree] = {}  # noqa: RUF012  what the method asked for, by name
    loops: LoopRunner = WHOLE_LOOPS  # runs the round's long loops


class CohortResult(NamedTuple):
    update: ClientUpdate  # of all the round's clients: their weighted mean, and their sum
    num_trained: jax.Array  # [] int32: clients (or pairs) of the round that trained
    states: Tree  # as they were given; clients that took no part are unchanged
    outputs: Any
    """[D, V, J, ...] per client slot, whole on every device, zero where it is unused; a
    `ClientModels` where they were models to be gathered."""
    train_loss: jax.Array
    """[] mean over samples of the loss met during local training; NaN where a client's state has
    become one that is not finite."""


class ClientModels(NamedTuple):
    """The models of a round's S sampled clients after local training, in the order of their ids.

    A sampled client without data has not trained: what stands in its place is not to be used.
    """

    variables: Tree  # [S, ...]
    weights: jax.Array  # [S] float32: of the clients in the round's average; 0 of the absent
    is_present: jax.Array  # [S] bool


def train_cohort(
    algorithm: ClientAlgorithm,
    plan: ExecutionPlan,
    hp,
    message,
    states,
    key,
    cohort: Cohort,
    *,
    gather_models: bool = False,
    loop_name: str = CLIENTS,
) -> CohortResult:
    """Run local training of every sampled client of a round.

    Cost: the time of the steps of the longest lane. Memory: one local state per lane, one client
    state and one output per slot.

    Args:
      algorithm: the functions of one client.
      plan: devices, blocks and lanes.
      hp: values of the hyper-parameters by name.
      message: the server's message, the same for all clients.
      states: client states with a leading axis of rows; the schedule gives each client's row. The
        rows are those of all K clients, which may be sharded over devices, or a table that contains
        at least the clients of the round.
      key: PRNG key of the round; the key of a step is fold_in(fold_in(key, client id), step).
      cohort: schedule and examples of the round.
      gather_models: whether outputs are models, all of which every device receives.
      loop_name: name of the loop in the progress of a resumable round.

    Returns:
      The average and sum of the clients' updates, their new states, outputs and training loss.
    """
    schedule = cohort.schedule
    algorithm = with_contract_checks(algorithm)
    if plan.is_debug:
        algorithm = with_error_locations(algorithm, schedule.round)
    run_block: Callable[..., tuple] = partial(_run_block, algorithm, plan, loop_name)
    inputs = _BlockInputs(hp, message, states, key, cohort.examples, schedule.max_steps)
    round_fields = (
        "round",
        "num_clients",
        "is_eval_round",
        "is_verification",
        "weight_fraction",
        "max_steps",
        "participants",
    )
    # No lane reads these: they have no axis of blocks, or every block's are needed together.
    unused_fields: dict[str, Any] = dict.fromkeys(
        (*round_fields, "full_pass_indices", "full_pass_pair_ids")
    )
    lanes = schedule._replace(**unused_fields)

    def pair_with_slots(outputs, block_schedule: RoundSchedule):
        return (
            (outputs, block_schedule.client_ids, block_schedule.weights, block_schedule.num_steps)
            if gather_models
            else outputs
        )

    if plan.mesh_axis != LANES_AXIS:

        def run_blocks_in_turn(run, spans, carries):
            return jax.lax.map(
                lambda block_args: run(spans, block_args[0], block_args[1]), (carries, lanes)
            )

        sums, new_states, outputs = cohort.loops.map(
            run_blocks_in_turn,
            lambda loops, block_schedule: run_block(loops, inputs, block_schedule),
            TURNS,
            len(schedule.state_rows),
        )
        outputs = pair_with_slots(outputs, lanes)
        sums = jax.tree.map(lambda a: a.sum(0), sums)
        states = _scatter_client_states(plan, states, new_states, schedule.state_rows)
    else:
        is_split = plan.has_sharded_client_states and bool(jax.tree.leaves(states))
        client_spec = P(LANES_AXIS) if is_split else P()
        input_specs = _BlockInputs(P(), P(), client_spec, P(), P(), P())

        def run_on_device(loops, inputs: _BlockInputs, lanes):
            states = inputs.states
            block_schedule = jax.tree.map(lambda a: a[0], lanes)
            state_table, table_schedule = (
                _fetch_client_states(states, block_schedule)
                if is_split
                else (states, block_schedule)
            )
            sums, new_states, outputs = run_block(
                loops, inputs._replace(states=state_table), table_schedule
            )
            rows = block_schedule.state_rows if jax.tree.leaves(new_states) else ()
            row_outputs = new_states, rows, pair_with_slots(outputs, block_schedule)
            sums, (new_states, rows, outputs) = _exchange_between_devices(plan, sums, row_outputs)
            if is_split:
                rows = _local_rows(states, rows)
            return sums, _scatter_client_states(plan, states, new_states, rows), outputs

        def map_devices(run, spans, carries):
            return jax.shard_map(
                run,
                mesh=plan.mesh,
                in_specs=(P(), P(LANES_AXIS), input_specs, P(LANES_AXIS)),
                out_specs=((P(), client_spec, P()), P(LANES_AXIS), P()),
                check_vma=False,
            )(spans, carries, inputs, lanes)

        sums, states, outputs = cohort.loops.map(
            map_devices, run_on_device, BLOCKS, len(schedule.state_rows)
        )
    if gather_models:
        outputs = _select_client_models(schedule, *outputs)
    upload, loss, num_samples, num_trained, num_nonfinite = sums
    loss = jnp.where(num_nonfinite > 0, jnp.nan, loss / jnp.maximum(num_samples, 1))
    return CohortResult(upload, num_trained.astype(jnp.int32), states, outputs, loss)


def tile_over_clients(tree: Tree, num_clients: int) -> Tree:
    """One client's state -> the same for all, with leading axis K."""
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (num_clients, *a.shape)), tree)


def get_client_row(states: Tree, client: jax.Array | int) -> Tree:
    """A client's state of all clients' `[K, ...]`, or of a table, by row. A number beyond the last
    gives the last's."""
    return jax.tree.map(lambda s: take_row(s, jnp.minimum(client, s.shape[0] - 1)), states)


def _select_client_models(
    schedule: RoundSchedule, variables, client_ids, weights, num_steps
) -> ClientModels:
    """The models of the slots `[D, V, J, ...]`, by client.

    What the slots are is gathered with them: read from the schedule, it could be on other devices.
    """
    participants = schedule.participants
    slot_index = (client_ids.reshape(-1) == participants[:, None]).argmax(1)
    is_present = (participants < schedule.num_clients) & (num_steps.reshape(-1)[slot_index] > 0)
    return ClientModels(
        jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:])[slot_index], variables),
        jnp.where(is_present, weights.reshape(-1)[slot_index], 0),
        is_present,
    )


def _exchange_between_devices(plan: ExecutionPlan, sums, rows):
    """-> (sums over devices, rows of all devices `[D, V, J, ...]`, any tree).

    On CPUs by one collective, because XLA's CPU devices share a pool of threads: two that are ready
    at the same time can be entered in different orders, hold all threads, and wait for ever. Where
    there are rows all is gathered, and added up in the order of the blocks. Accelerators enter
    collectives in the program's order: sums are reduced between them, in an order of theirs, which
    is less to send, and rows alone are gathered.
    """
    if plan.platform != "cpu":
        return jax.lax.psum(sums, LANES_AXIS), jax.lax.all_gather(rows, LANES_AXIS)
    leaves, structure = jax.tree.flatten((sums, rows))
    num_sums = len(jax.tree.leaves(sums))
    if len(leaves) == num_sums and all(leaf.dtype == jnp.float32 for leaf in leaves):
        flat_sums, unravel = ravel_pytree(sums)
        return unravel(jax.lax.psum(flat_sums, LANES_AXIS)), rows
    leaves_by_dtype: dict[Any, list[int]] = {}  # which leaves are of each type
    for i, leaf in enumerate(leaves):
        leaves_by_dtype.setdefault(leaf.dtype, []).append(i)
    flat_by_dtype = [
        jnp.concatenate([leaves[i].reshape(-1) for i in leaf_indices])
        for leaf_indices in leaves_by_dtype.values()
    ]
    words = [bitcast_to_words(rows_of_dtype) for rows_of_dtype in flat_by_dtype]
    gathered_words = jax.lax.all_gather(jnp.concatenate(words), LANES_AXIS)  # [D, ...]
    gathered_leaves = list(leaves)
    parts = _split_columns(gathered_words, [word.size for word in words])
    for leaf_indices, rows_of_dtype, template in zip(
        leaves_by_dtype.values(), parts, flat_by_dtype, strict=True
    ):
        pieces = _split_columns(
            bitcast_from_words(rows_of_dtype, template), [leaves[i].size for i in leaf_indices]
        )
        for i, piece in zip(leaf_indices, pieces, strict=True):
            gathered_leaves[i] = piece.reshape(piece.shape[0], *leaves[i].shape)
    totals = [
        rows_of_dtype.sum(0, dtype=rows_of_dtype.dtype)
        for rows_of_dtype in gathered_leaves[:num_sums]
    ]
    return jax.tree.unflatten(structure, totals + gathered_leaves[num_sums:])


def _split_columns(rows: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """`rows` [D, n] as pieces of so many columns."""
    ends = np.cumsum([0, *sizes])
    return [
        jax.lax.slice_in_dim(rows, first, last, axis=1) for first, last in itertools.pairwise(ends)
    ]


def _fetch_client_states(states, block_schedule: Any):
    """The states of the clients in this device's slots, of all clients' that are split over the
    devices: -> (a table `[V * J, ...]`, the lanes' schedule with its rows). Two collectives, one
    after the other: devices say which rows they want, then every one gives those that it holds, bit
    by bit, and zeros for the others.
    """
    # After the collectives of what comes before the clients.
    rows = order_after(
        block_schedule.num_segments.astype(jnp.float32), block_schedule.state_rows.reshape(-1)
    )
    requested_rows, num_local_rows = (
        jax.lax.all_gather(rows, LANES_AXIS),
        jax.tree.leaves(states)[0].shape[0],
    )
    requested_rows = jnp.minimum(
        requested_rows, num_local_rows * len(requested_rows) - 1
    )  # as `get_client_row` does
    local_rows = _local_rows(states, requested_rows)
    is_local = (local_rows < num_local_rows)[..., None]
    requested_states = jax.vmap(jax.vmap(partial(get_client_row, states)))(
        local_rows
    )  # [D, V * J, ...]
    leaves, structure = jax.tree.flatten(requested_states)
    words = [jax.vmap(jax.vmap(bitcast_to_words))(leaf) for leaf in leaves]
    sent_words = jnp.where(is_local, jnp.concatenate(words, axis=-1), jnp.uint32(0))
    received_words = jax.lax.psum_scatter(sent_words, LANES_AXIS)  # [V * J, words]
    parts = _split_columns(received_words, [word.shape[-1] for word in words])
    table = [
        bitcast_from_words(block_schedule, leaf[0, 0])
        for block_schedule, leaf in zip(parts, leaves, strict=True)
    ]
    table_rows = jnp.arange(
        block_schedule.state_rows.size, dtype=block_schedule.state_rows.dtype
    ).reshape(block_schedule.state_rows.shape)
    return jax.tree.unflatten(structure, table), block_schedule._replace(state_rows=table_rows)


def _local_rows(states, rows):
    """Rows of all clients' states as those of this device's part; what it does not hold is beyond
    its last."""
    num_local_rows = jax.tree.leaves(states)[0].shape[0]
    local_rows = rows - num_local_rows * jax.lax.axis_index(LANES_AXIS)
    return jnp.where((local_rows >= 0) & (local_rows < num_local_rows), local_rows, num_local_rows)


def _scatter_client_states(plan: ExecutionPlan, states, new_states, rows):
    """Write the states of a round's clients, `[D, V, J, ...]`, to their rows `[D, V, J]`.

    On a CPU row by row, which happens in place: its scatter copies the states of all K clients. An
    accelerator's does not, and is one operation instead of a loop of several.
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
        row_index = take_row(rows, i)

        def put_leaf(all_states, new_states):
            is_unused = row_index >= all_states.shape[0]  # an unused slot
            row = jnp.where(
                is_unused, get_client_row(all_states, row_index), take_row(new_states, i)
            )
            return set_row(all_states, row, row_index)

        return jax.tree.map(put_leaf, states, flat_states)

    return jax.lax.fori_loop(0, rows.shape[0], write_row, states)


class _BlockInputs(NamedTuple):
    """What all blocks of lanes read besides their schedules, or how each of it is placed."""

    hp: Tree
    message: Tree
    states: Tree  # of all clients, or the rows of a table
    key: Any  # the round's
    examples: Any  # an `Examples`
    max_steps: Any  # [] int32 of the longest lane of all blocks


class _ActiveClient(NamedTuple):
    """One lane's client in training."""

    local: Tree
    steps: jax.Array  # [] int32 done so far
    loss: jax.Array  # [] float32 summed over samples
    samples: jax.Array  # [] float32, how many


class _LaneSlots(NamedTuple):
    """The clients of each lane, one after the other; leading axes V and J."""

    ids: jax.Array
    num_samples: jax.Array
    num_steps: jax.Array
    init_example_ids: jax.Array
    weights: jax.Array
    state_rows: jax.Array


class _LaneFunctions(NamedTuple):
    """What a lane does for the client in one of its slots."""

    begin: Callable[[_LaneSlots, jax.Array], _ActiveClient]
    step: Callable[..., _ActiveClient]  # (slots, slot, running, indices of the minibatch, its size)
    # -> (weighed upload, whether the state is as finite as it was, state, output)
    end: Callable[[_LaneSlots, jax.Array, _ActiveClient], tuple]


def _make_lane_functions(algorithm: ClientAlgorithm, inputs: _BlockInputs) -> _LaneFunctions:
    """Return the functions of a lane for a method's clients."""
    hp, message, states, key, examples, _ = inputs

    def make_context(slots: _LaneSlots, slot) -> ClientContext:
        slot_values = jax.tree.map(lambda a: take_row(a, slot), slots)
        client_key = jax.random.fold_in(key, slot_values.ids)
        init_images = examples.images[slot_values.init_example_ids]
        client = ClientInfo(
            slot_values.ids, slot_values.num_samples, slot_values.num_steps, init_images
        )
        return ClientContext(hp, message, client, client_key)

    def begin(slots, slot):
        state = get_client_row(states, take_row(slots.state_rows, slot))
        local = algorithm.begin(make_context(slots, slot), state)
        zero = jnp.zeros((), jnp.float32)
        return _ActiveClient(local, jnp.int32(0), zero, zero)

    def step(slots, slot, active, indices, size):
        context = make_context(slots, slot)
        mask = (jnp.arange(indices.shape[0]) < size).astype(jnp.float32)
        batch = Batch(examples.images[indices], examples.labels[indices], mask, active.steps)
        context = context._replace(key=jax.random.fold_in(context.key, active.steps))
        local, loss = algorithm.step(context, active.local, batch)
        num_samples = size.astype(jnp.float32)
        return _ActiveClient(
            local,
            active.steps + 1,
            active.loss + loss * num_samples,
            active.samples + num_samples,
        )

    def end(slots, slot, active):
        state = get_client_row(states, take_row(slots.state_rows, slot))
        update, new_state, output = algorithm.end(make_context(slots, slot), active.local, state)
        is_finite = has_no_new_nonfinite(new_state, state)
        return _weight_update(update, take_row(slots.weights, slot)), is_finite, new_state, output

    return _LaneFunctions(begin, step, end)


def _run_block(
    algorithm: ClientAlgorithm,
    plan: ExecutionPlan,
    loop_name: str,
    loops: LoopRunner,
    inputs: _BlockInputs,
    schedule: Any,
) -> tuple:
    """Train the clients of one block of lanes.

    Args:
      algorithm: the functions of one client.
      plan: where lanes run.
      loop_name: the round's phase, as progress shows it.
      loops: runs the loop over the lanes' steps, which is cut between two steps.
      inputs: what all blocks read.
      schedule: the block's part of the round's `RoundSchedule`, traced.

    Returns:
      The sums of this block (update, loss, samples, clients, and clients whose state is not finite
      any more), and the states and outputs of the clients in its slots, `[V, J, ...]`.
    """
    num_lanes, lane_functions = plan.lanes, _make_lane_functions(algorithm, inputs)
    map_lanes = partial(_map_lanes, num_lanes)
    slots = _LaneSlots(
        schedule.client_ids,
        schedule.num_samples,
        schedule.num_steps,
        schedule.init_example_ids,
        schedule.weights,
        schedule.state_rows,
    )
    batches, batch_sizes = schedule.batches.swapaxes(0, 1), schedule.batch_sizes.swapaxes(0, 1)
    first_slots = jnp.zeros(num_lanes, jnp.int32)
    active = map_lanes(lane_functions.begin)(slots, first_slots)
    shapes = plan.eval_shape(map_lanes(lane_functions.end), slots, first_slots, active)
    update_shape, _, *slot_shapes = shapes
    update_sums = jax.tree.map(lambda s: jnp.zeros(s.shape[1:], s.dtype), update_shape)
    num_slots = schedule.client_ids.shape[1]
    new_states, outputs = jax.tree.map(
        lambda s: jnp.zeros((s.shape[0], num_slots, *s.shape[1:]), s.dtype), tuple(slot_shapes)
    )

    def run_segment(g, carry, step_range=None):
        """Segment g; of it the steps in `part`, (first, last), where it is cut."""
        active, sums, new_states, outputs = carry
        slot, starts_client, ends_client, last = (
            take_row(a, g)
            for a in (
                schedule.active_slots,
                schedule.starts_client,
                schedule.ends_client,
                schedule.segment_ends,
            )
        )
        first = jnp.where(g == 0, 0, take_row(schedule.segment_ends, jnp.maximum(g - 1, 0)))
        needs_select = plan.is_lockstep or step_range is not None
        if step_range is not None:
            starts_client, ends_client = (
                starts_client & (first >= step_range[0]),
                ends_client & (last <= step_range[1]),
            )
            first, last = jnp.maximum(first, step_range[0]), jnp.minimum(last, step_range[1])
        new_active = map_lanes(lane_functions.begin)(slots, slot)
        active = _select_by_lane(needs_select, starts_client, new_active, active)

        # The loop is inside the lane, whose arrays then have no axis for it: with one lane the
        # weights are updated in place, which XLA does not do through a reshape.
        def train_lane(slots, slot, active, batches, sizes):
            def train_step(t, active):
                return lane_functions.step(
                    slots, slot, active, take_row(batches, t), take_row(sizes, t)
                )

            if plan.platform == "cpu":
                return jax.lax.fori_loop(first, last, train_step, active)
            # The lane's steps are told from the loop's: a count of its own is one more launch.
            initial_steps = active.steps

            def counted_step(t, active):
                active = train_step(t, active._replace(steps=initial_steps + t - first))
                return active._replace(steps=initial_steps)

            active = jax.lax.fori_loop(first, last, counted_step, active)
            return active._replace(steps=initial_steps + jnp.maximum(last - first, 0))

        active = map_lanes(train_lane)(slots, slot, active, batches, batch_sizes)
        weighted_update, is_finite, new_state, output = map_lanes(lane_functions.end)(
            slots, slot, active
        )
        weighted_update = _select_by_lane(
            needs_select,
            ends_client,
            weighted_update,
            jax.tree.map(jnp.zeros_like, weighted_update),
        )
        update_sums, loss, num_samples, num_trained, num_nonfinite = sums
        update_sums = jax.tree.map(
            lambda total, s: total + s.sum(0, dtype=s.dtype), update_sums, weighted_update
        )
        loss += jnp.where(ends_client, active.loss, 0).sum()
        num_samples += jnp.where(ends_client, active.samples, 0).sum()
        num_trained += ends_client.sum(dtype=jnp.float32)
        write_to_slots = partial(_write_to_slots, plan, slot, ends_client)
        num_nonfinite += (ends_client & ~is_finite).sum(dtype=jnp.float32)
        sums = (update_sums, loss, num_samples, num_trained, num_nonfinite)
        return active, sums, write_to_slots(new_states, new_state), write_to_slots(outputs, output)

    def run_segments(first, last, carry):
        if isinstance(first, int):  # all of it
            return jax.lax.fori_loop(0, schedule.num_segments, run_segment, carry)
        ends = schedule.segment_ends
        is_used = jnp.arange(len(ends)) < schedule.num_segments
        begins = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
        segments = (is_used & (ends <= first)).sum(), (is_used & (begins < last)).sum()
        return jax.lax.fori_loop(*segments, partial(run_segment, step_range=(first, last)), carry)

    zero = jnp.zeros((), jnp.float32)
    carry = (active, (update_sums, zero, zero, zero, zero), new_states, outputs)
    num_steps, batch_size = batches.shape[1:]
    total = take_row(schedule.segment_ends, jnp.maximum(schedule.num_segments - 1, 0))
    return loops.run_split(
        loop_name,
        jnp.where(schedule.num_segments > 0, total, 0),
        run_segments,
        carry,
        max_total=inputs.max_steps,
        max_iterations=num_steps,
        samples_per_iteration=num_lanes * batch_size,
    )[1:]


def _weight_update(update: ClientUpdate, weight: jax.Array) -> ClientUpdate:
    """What is added up over the clients, in at least 32 bits: see `ClientUpdate`."""

    def widen(leaf, integer_type):
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        return leaf.astype(jnp.promote_types(leaf.dtype, integer_type))

    def is_unsigned(leaf):
        return jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.unsignedinteger)

    mean = jax.tree.map(lambda leaf: weight * widen(leaf, jnp.float32), update.mean)
    total = jax.tree.map(
        lambda leaf: widen(leaf, jnp.uint32 if is_unsigned(leaf) else jnp.int32), update.sum
    )
    return ClientUpdate(mean, total)


def _map_lanes(num_lanes: int, function: Callable) -> Callable:
    """Map over the leading lane axis; one lane is called as it is, without a batch axis."""
    if num_lanes > 1:
        return jax.vmap(function)

    def run_single_lane(*args):
        out = function(*jax.tree.map(lambda a: jax.lax.index_in_dim(a, 0, keepdims=False), args))
        return jax.tree.map(lambda a: a[None], out)

    return run_single_lane


def _select_by_lane(is_lockstep: bool, condition, new, old):
    """Lane-wise choice; on a lane of its own every segment starts and ends a client."""
    if not is_lockstep:
        return new
    expand = lambda a: condition.reshape(condition.shape + (1,) * (a.ndim - 1))  # noqa: E731
    return jax.tree.map(lambda n, o: jnp.where(expand(n), n, o), new, old)


def _write_to_slots(plan: ExecutionPlan, slot, ends_client, buffers, values):
    """Write each lane's value to its client's slot where the client ends."""

    def write_leaf(buffer, value, slot, has_ended):
        if not plan.is_lockstep:
            return set_row(buffer, value, slot)
        target_slot = jnp.where(has_ended, slot, buffer.shape[0])  # beyond the last: dropped
        return buffer.at[target_slot].set(value, mode="drop", wrap_negative_indices=False)

    map_lanes = _map_lanes(plan.lanes, write_leaf)
    return jax.tree.map(lambda b, v: map_lanes(b, v, slot, ends_client), buffers, values)
