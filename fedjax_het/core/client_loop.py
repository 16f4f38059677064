"""The device's half of a round: every sampled client trains, lane by lane, in one program.

A client is described by the functions of a `ClientAlgorithm`. A lane runs through its clients one
after the other; lanes are vmapped on a device and sharded over devices. No client is padded to the
length of another, and no number depends on the lane of a client.

`train_cohort` runs `_run_block` for every block of lanes, and `_run_block` runs the functions of
`_Lane`. `core.device_exchange` has the case of several devices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.core.client_algorithm import (
    Batch,
    ClientAlgorithm,
    ClientContext,
    ClientInfo,
    ClientUpdate,
)
from fedjax_het.core.client_rows import (
    ClientLosses,
    get_client_row,
    scatter_client_states,
    select_client_models,
)
from fedjax_het.core.contract_checks import DeclaredHyperParameters, with_error_locations
from fedjax_het.core.device_exchange import run_blocks_on_devices
from fedjax_het.core.example_transform import ExampleTransform
from fedjax_het.core.execution_plan import LANES_AXIS, ExecutionPlan
from fedjax_het.core.resumable_loops import WHOLE_LOOPS, LoopRunner
from fedjax_het.utils.arrays import AnyArray, has_no_new_nonfinite, set_row, take_row
from fedjax_het.utils.former_names import FORMER_INPUT_NAMES, accept_former_fields
from fedjax_het.utils.input_kinds import take_rows

Tree = Any


@accept_former_fields(FORMER_INPUT_NAMES)
class Examples(NamedTuple):
    """Training examples on the device, gathered by index inside the program.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.methods import Examples
      >>> Examples(np.zeros((5, 28, 28, 1), np.uint8), np.zeros(5, np.int32)).inputs.shape
      (5, 28, 28, 1)
    """

    inputs: Any
    "Inputs `[N, ...]`, such as images `[N, H, W, C]`, uint8, float32 or int32; or arrays by name."
    labels: AnyArray
    "`[N]` int32."

    def take(self, positions: jax.Array, client: jax.Array) -> jax.Array:
        """Return inputs as a client sees them.

        Args:
          positions: positions of the examples, int32 `[B]`.
          client: id of the client, int32 `[]`; not read without skews.

        Returns:
          Images as stored, `[B, H, W, C]`.
        """
        return take_rows(self.inputs, positions)

    def take_by_owner(self, positions: jax.Array) -> jax.Array:
        """Return inputs of several clients, each as its owner sees it.

        Args:
          positions: positions of the examples, int32 `[B]`.

        Returns:
          Images as stored, `[B, H, W, C]`.
        """
        return take_rows(self.inputs, positions)

    def take_labels(self, positions: jax.Array, client: jax.Array) -> jax.Array:
        """Return labels as a client sees them.

        Args:
          positions: positions of the examples, int32 `[B]`.
          client: id of the client, int32 `[]`; not read without skews.

        Returns:
          Labels, int32 `[B]`.
        """
        return self.labels[positions]


class SkewedExamples(NamedTuple):
    """Examples that clients see through the run's skews; it replaces `Examples`."""

    inputs: Any
    "Inputs `[N, ...]` as stored, or arrays by name."
    labels: AnyArray
    "`[N]` int32."
    transform: ExampleTransform | None = None
    "Feature skews of the clients that read the examples; None for none."
    label_maps: AnyArray | None = None
    "`[K, C]` int32: label of each class at each client; None: the labels as they are."

    def take(self, positions: jax.Array, client: jax.Array) -> jax.Array:
        """Return inputs as a client sees them.

        Args:
          positions: positions of the examples, int32 `[B]`.
          client: id of the client, int32 `[]`.

        Returns:
          Images `[B, H, W, C]`: float32 with values in [0, 1] before noise under feature skews,
          otherwise as stored.
        """
        inputs = take_rows(self.inputs, positions)
        return inputs if self.transform is None else self.transform.apply(inputs, positions, client)

    def take_by_owner(self, positions: jax.Array) -> jax.Array:
        """Return inputs of several clients, each as its owner sees it.

        Args:
          positions: positions of the examples, int32 `[B]`.

        Returns:
          Images like the result of `take`.
        """
        inputs = take_rows(self.inputs, positions)
        return (
            inputs if self.transform is None else self.transform.apply_by_owner(inputs, positions)
        )

    def take_labels(self, positions: jax.Array, client: jax.Array) -> jax.Array:
        """Return labels as a client sees them.

        Args:
          positions: positions of the examples, int32 `[B]`.
          client: id of the client, int32 `[]`.

        Returns:
          Labels, int32 `[B]`.
        """
        labels = self.labels[positions]
        return labels if self.label_maps is None else self.label_maps[client, labels]


ClientExamples = Examples | SkewedExamples
"""Examples that a client reads."""


class RoundSchedule(NamedTuple):
    """One round's work, padded to the run's largest round; `[R, ...]` for a chunk of rounds.

    Axes: D blocks of lanes, V lanes per block, J client slots per lane, T steps per lane, B batch,
    G segments per block, S sampled clients. A segment is a range of steps of one block in which no
    client starts or ends. `core.schedule` makes the arrays on the host. Where clients condense
    data, "client" means a pair of a client and a class in the fields of slots.
    """

    round: np.ndarray
    "`[]` int32: index of the round, from 0."
    num_clients: np.ndarray
    "`[]` int32: clients of the federation, K."
    is_eval_round: np.ndarray
    "`[]` bool: whether an evaluation follows the round."
    is_verification: np.ndarray
    "`[]` bool: whether only the first step of everything runs, to check a program's numbers."
    weight_fraction: np.ndarray
    "`[]` float32: share of the round's clients in the weight of all clients."
    max_steps: np.ndarray
    "`[]` int32: steps of the longest lane of all blocks, and of all runs in lockstep."
    client_ids: np.ndarray
    "`[D, V, J]` int32: client of each slot; K where the slot is unused."
    state_rows: np.ndarray
    "`[D, V, J]` int32: row of the client's state; the client's id where all states are stored."
    weights: np.ndarray
    "`[D, V, J]` float32: weight in the average; the sum over the round's clients is 1."
    num_samples: np.ndarray
    "`[D, V, J]` int32: examples that the client holds."
    num_steps: np.ndarray
    "`[D, V, J]` int32: minibatches of the client."
    staleness: np.ndarray
    "`[D, V, J]` int32: updates of the server since the client received its model."
    init_example_ids: np.ndarray
    "`[D, V, J, I]` int32: examples from which a client that condenses data starts."
    batches: np.ndarray
    "`[D, T, V, B]` int32: training examples of each step."
    batch_sizes: np.ndarray
    "`[D, T, V]` int32: examples of each step that count; further entries are padding."
    num_segments: np.ndarray
    "`[D]` int32."
    segment_ends: np.ndarray
    "`[D, G]` int32: step at which the segment ends."
    active_slots: np.ndarray
    "`[D, G, V]` int32: slot of the lane's client in the segment."
    starts_client: np.ndarray
    "`[D, G, V]` bool: whether the client's first step opens the segment."
    ends_client: np.ndarray
    "`[D, G, V]` bool: whether the client's last step closes the segment."
    participants: np.ndarray
    "`[S]` int32: clients that take part, ascending; further entries are K."
    full_pass_indices: np.ndarray
    "`[D, M, B]` int32: all examples of the round's clients, if the method needs them."
    full_pass_pair_ids: np.ndarray
    "`[D, M, B]` int32: client * C + class of each such example; K * C for padding."


@jax.tree_util.register_static
@dataclass(frozen=True)
class CohortOptions:
    """Static choices of local training in a round; a pytree without leaves."""

    records_losses: bool = False
    "Whether the training loss of each client is returned."


class Cohort(NamedTuple):
    """A round's schedule, the examples that it indexes, and the other inputs of the round.

    Example:
      >>> from fedjax_het.methods import Cohort
      >>> Cohort(schedule=None, examples=None, inputs={"rate": 0.1}).inputs["rate"]
      0.1
    """

    schedule: RoundSchedule
    "Clients, lanes and minibatches of the round."
    examples: ClientExamples
    "The clients' training examples."
    server_examples: Examples | None = None
    "The server's examples, `[n_0, ...]`; None for a server without."
    inputs: dict[str, Tree] = {}  # noqa: RUF012
    "Arrays that the method requests, by name, see `RoundInput`."
    loops: LoopRunner = WHOLE_LOOPS
    "Runs the long loops of the round."
    options: CohortOptions = CohortOptions()
    "Static choices."


class CohortResult(NamedTuple):
    """The results of local training of a round's clients.

    Example:
      >>> from fedjax_het.methods import CohortResult
      >>> CohortResult._fields
      ('update', 'num_trained', 'states', 'outputs', 'train_loss', 'client_losses')
    """

    update: ClientUpdate
    "Weighted mean and sum of the clients' updates."
    num_trained: jax.Array
    "`[]` int32: clients, or pairs of client and class, of the round that trained."
    states: Tree
    "Client states like those passed in; clients that took no part are unchanged."
    outputs: Any
    """`[D, V, J, ...]` per client slot, whole on every device, zero where it is unused; a
    `ClientModels` with `ClientAlgorithm.outputs_models`."""
    train_loss: jax.Array
    """`[]` float32: mean over samples of the loss of local training; NaN where no client trained or
    a client's state has new entries that are not finite."""
    client_losses: ClientLosses | None = None
    "The mean loss of each client with `CohortOptions.records_losses`."


# Fields of `RoundSchedule` that no lane reads: they have no axis of blocks, or the blocks of all
# devices are needed together.
_ROUND_FIELDS = (
    *("round", "num_clients", "is_eval_round", "is_verification", "weight_fraction", "max_steps"),
    *("participants", "full_pass_indices", "full_pass_pair_ids"),
)


def train_cohort(
    client_algorithm: ClientAlgorithm,
    plan: ExecutionPlan,
    hp: dict[str, jax.Array],
    message: Tree,
    states: Tree,
    key: jax.Array,
    cohort: Cohort,
) -> CohortResult:
    """Run local training of every sampled client of a round.

    Cost: the time of the steps of the longest lane. Memory: one local state per lane, one client
    state and one output per slot.

    Args:
      client_algorithm: the functions of one client; `with_contract_checks` adds checks to them.
      plan: devices, blocks and lanes.
      hp: values of the hyperparameters by name.
      message: the server's message, the same for all clients.
      states: client states with a leading axis of rows; the schedule gives each client's row. The
        rows belong to all K clients and may be sharded over devices, or form a table that contains
        at least the clients of the round.
      key: PRNG key of the round; the key of a step is fold_in(fold_in(key, client id), step).
      cohort: schedule and examples of the round.

    Returns:
      The average and sum of the clients' updates, their new states, outputs and training loss.

    Example:
      >>> from fedjax_het.algorithms.base import RoundInfo, State
      >>> from fedjax_het.methods import train_cohort
      >>> def make_round(client_algorithm, plan):
      ...     def round(hp, state, key, cohort):
      ...         args = (hp, state.server, state.clients, key, cohort)
      ...         result = train_cohort(client_algorithm, plan, *args)
      ...         info = RoundInfo(result.train_loss, update_norm=result.train_loss)
      ...         return State(state.server, result.states, state.round + 1), info
      ...     return round
    """
    schedule, examples = cohort.schedule, cohort.examples
    if plan.is_debug:
        client_algorithm = with_error_locations(client_algorithm, schedule.round)
    run_block = partial(_run_block, client_algorithm, plan, cohort.options.records_losses)
    hp = DeclaredHyperParameters(hp)
    inputs = _BlockInputs(hp, message, states, key, examples, schedule.max_steps)
    no_fields: dict[str, Any] = dict.fromkeys(_ROUND_FIELDS)
    lanes = schedule._replace(**no_fields)
    if plan.mesh_axis == LANES_AXIS:
        sums, states, outputs = run_blocks_on_devices(plan, cohort.loops, run_block, inputs, lanes)
    else:
        sums, new_states, outputs = plan.map_blocks(cohort.loops, run_block, inputs, lanes)
        sums = jax.tree.map(lambda a: a.sum(0), sums)
        states = scatter_client_states(plan, states, new_states, schedule.state_rows)
    client_losses = None
    if cohort.options.records_losses:
        outputs, client_losses = outputs
    if client_algorithm.outputs_models:
        outputs = select_client_models(schedule, *outputs)
    loss = jnp.where(sums.num_nonfinite > 0, jnp.nan, sums.loss / sums.num_samples)  # 0 / 0 is NaN
    num_trained = sums.num_trained.astype(jnp.int32)
    return CohortResult(sums.update, num_trained, states, outputs, loss, client_losses)


class _BlockInputs(NamedTuple):
    """Inputs of all blocks of lanes in addition to their schedules."""

    hp: Tree
    message: Tree
    states: Tree  # of all clients, or the rows of a table
    key: jax.Array  # of the round
    examples: ClientExamples
    max_steps: Any  # [] int32 of the longest lane of all blocks


class _BlockSums(NamedTuple):
    """Sums over the clients of a block that have trained."""

    update: ClientUpdate  # weighted mean, and sum
    loss: jax.Array  # [] float32, over samples
    num_samples: jax.Array  # [] float32
    num_trained: jax.Array  # [] float32: clients
    num_nonfinite: jax.Array  # [] float32: clients whose state has new entries that are not finite


class _Slots(NamedTuple):
    """The clients of each lane, one after the other, `[V, J]`: fields of `RoundSchedule`."""

    client_ids: Any
    num_samples: Any
    num_steps: Any
    staleness: Any
    init_example_ids: Any
    weights: Any
    state_rows: Any


class _ActiveClient(NamedTuple):
    """The client that a lane trains."""

    local: Tree
    num_steps: jax.Array  # [] int32 done so far
    loss: jax.Array  # [] float32 summed over samples
    num_samples: jax.Array  # [] float32


class _Lane(NamedTuple):
    """The functions of one lane for the client in one of its slots."""

    client_algorithm: ClientAlgorithm
    inputs: _BlockInputs
    records_losses: bool

    def make_context(self, slots: _Slots, slot: jax.Array) -> ClientContext:
        inputs = self.inputs
        facts = jax.tree.map(lambda a: take_row(a, slot), slots)
        client_key = jax.random.fold_in(inputs.key, facts.client_ids)
        init_inputs = inputs.examples.take(facts.init_example_ids, facts.client_ids)
        counts = facts.num_samples, facts.num_steps
        client = ClientInfo(facts.client_ids, *counts, init_inputs, facts.staleness)
        return ClientContext(inputs.hp, inputs.message, client, client_key)

    def begin(self, slots: _Slots, slot: jax.Array) -> _ActiveClient:
        state = get_client_row(self.inputs.states, take_row(slots.state_rows, slot))
        local = self.client_algorithm.begin(self.make_context(slots, slot), state)
        zero = jnp.zeros((), jnp.float32)
        return _ActiveClient(local, jnp.int32(0), zero, zero)

    def step(
        self, slots: _Slots, slot: jax.Array, active: _ActiveClient, indices: jax.Array, size
    ) -> _ActiveClient:
        """Make one step on the minibatch of examples `indices`, of which the first `size` count."""
        examples, num_steps = self.inputs.examples, active.num_steps
        context = self.make_context(slots, slot)
        mask = (jnp.arange(indices.shape[0]) < size).astype(jnp.float32)
        inputs = examples.take(indices, context.client.id)
        batch = Batch(inputs, examples.labels[indices], mask, num_steps)
        context = context._replace(key=jax.random.fold_in(context.key, num_steps))
        local, loss = self.client_algorithm.step(context, active.local, batch)
        count = size.astype(jnp.float32)
        loss = active.loss + (loss * count).astype(active.loss.dtype)  # of 64 bits with x64
        return _ActiveClient(local, num_steps + 1, loss, active.num_samples + count)

    def end(self, slots: _Slots, slot: jax.Array, active: _ActiveClient) -> tuple:
        """Return the weighted update, whether the state is finite as before, state and output."""
        state = get_client_row(self.inputs.states, take_row(slots.state_rows, slot))
        update, new_state, output = self.client_algorithm.end(
            self.make_context(slots, slot), active.local, state
        )
        is_finite = has_no_new_nonfinite(new_state, state)
        if self.records_losses:
            mean_loss = active.loss / jnp.maximum(active.num_samples, 1)
            output = output, mean_loss.astype(jnp.float32)
        return _weight_update(update, take_row(slots.weights, slot)), is_finite, new_state, output


def _run_block(
    client_algorithm: ClientAlgorithm,
    plan: ExecutionPlan,
    records_losses: bool,
    loops: LoopRunner,
    inputs: _BlockInputs,
    schedule: Any,
) -> tuple[_BlockSums, Tree, Tree]:
    """Train the clients of one block of lanes.

    A segment is a range of steps in which no client of the block starts or ends. `run_segment`
    begins the clients that start, runs the steps, and ends the clients that end. A round is one
    `fori_loop` over its segments. Only a resumable round splits the loop between two steps and
    passes `step_range`.

    Args:
      client_algorithm: the functions of one client.
      plan: the devices and lanes.
      records_losses: whether the outputs include the loss of each slot's client.
      loops: runs the loop over the lanes' steps, which is split between two steps.
      inputs: the inputs of all blocks.
      schedule: the block's part of the round's `RoundSchedule`, traced.

    Returns:
      The sums of the block, and the states and outputs of the clients in its slots, `[V, J, ...]`;
      with `outputs_models` the slots' fields that `select_client_models` reads beside the outputs.
      With `records_losses` outputs are pairs of outputs and `ClientLosses`.
    """
    lane = _Lane(client_algorithm, inputs, records_losses)
    map_lanes = partial(_map_lanes, plan.lanes)
    slots = _Slots(*(getattr(schedule, name) for name in _Slots._fields))
    batches, batch_sizes = schedule.batches.swapaxes(0, 1), schedule.batch_sizes.swapaxes(0, 1)
    starts_client, ends_client = schedule.starts_client, schedule.ends_client
    segments = schedule.active_slots, starts_client, ends_client, schedule.segment_ends

    def run_segment(g, carry, step_range=None):
        """Run segment g; in a split loop its steps in `step_range`, (first, last)."""
        active, sums, new_states, outputs = carry
        slot, starts, ends, last = (take_row(values, g) for values in segments)
        first = jnp.where(g == 0, 0, take_row(schedule.segment_ends, jnp.maximum(g - 1, 0)))
        if step_range is not None:
            starts, ends = starts & (first >= step_range[0]), ends & (last <= step_range[1])
            first, last = jnp.maximum(first, step_range[0]), jnp.minimum(last, step_range[1])
        # All lanes begin and end a client in every segment, and `select` applies only the
        # beginnings and ends that are due. A single lane starts and ends a client in every segment:
        # nothing is selected.
        select = partial(_select_by_lane, plan.is_lockstep or step_range is not None)
        active = select(starts, map_lanes(lane.begin)(slots, slot), active)

        # The loop is inside the lane, whose arrays then have no axis for it. With one lane XLA
        # updates the weights in place, which it does not do through a reshape.
        def train_lane(slots, slot, active, batches, sizes):
            def run_step(t, active):
                return lane.step(slots, slot, active, take_row(batches, t), take_row(sizes, t))

            return _run_steps(plan, first, last, run_step, active)

        active = map_lanes(train_lane)(slots, slot, active, batches, batch_sizes)
        update, is_finite, new_state, output = map_lanes(lane.end)(slots, slot, active)
        update = select(ends, update, jax.tree.map(jnp.zeros_like, update))
        sums = _BlockSums(
            jax.tree.map(lambda total, u: total + u.sum(0, dtype=u.dtype), sums.update, update),
            sums.loss + jnp.where(ends, active.loss, 0).sum(),
            sums.num_samples + jnp.where(ends, active.num_samples, 0).sum(),
            sums.num_trained + ends.sum(dtype=jnp.float32),
            sums.num_nonfinite + (ends & ~is_finite).sum(dtype=jnp.float32),
        )
        write = partial(_write_to_slots, plan, slot, ends)
        return active, sums, write(new_states, new_state), write(outputs, output)

    def run_segments(first, last, carry):
        if isinstance(first, int):  # the whole loop
            return jax.lax.fori_loop(0, schedule.num_segments, run_segment, carry)
        ends = schedule.segment_ends
        is_used = jnp.arange(len(ends)) < schedule.num_segments
        begins = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
        segments = (is_used & (ends <= first)).sum(), (is_used & (begins < last)).sum()
        return jax.lax.fori_loop(*segments, partial(run_segment, step_range=(first, last)), carry)

    carry = _make_initial_carry(plan, lane, slots)
    max_lane_steps, batch_size = batches.shape[1:]
    num_steps = take_row(schedule.segment_ends, jnp.maximum(schedule.num_segments - 1, 0))
    _, sums, new_states, outputs = loops.run_split(
        client_algorithm.phase,
        jnp.where(schedule.num_segments > 0, num_steps, 0),
        run_segments,
        carry,
        max_total=inputs.max_steps,
        max_iterations=max_lane_steps,
        samples_per_iteration=plan.lanes * batch_size,
    )
    losses: Any = None
    if records_losses:
        outputs, losses = outputs
    if client_algorithm.outputs_models:
        outputs = outputs, slots.client_ids, slots.weights, slots.num_steps
    if records_losses:
        outputs = outputs, ClientLosses(slots.client_ids, losses)
    return sums, new_states, outputs


def _make_initial_carry(plan: ExecutionPlan, lane: _Lane, slots: _Slots) -> tuple:
    """Return the active clients, zero sums, and empty states and outputs of all slots."""
    num_lanes, num_slots = slots.client_ids.shape
    first_slots = jnp.zeros(num_lanes, jnp.int32)
    active = _map_lanes(plan.lanes, lane.begin)(slots, first_slots)
    end = _map_lanes(plan.lanes, lane.end)
    update, _, *rows = plan.eval_shape(end, slots, first_slots, active)
    update_sums = jax.tree.map(lambda s: jnp.zeros(s.shape[1:], s.dtype), update)
    new_states, outputs = jax.tree.map(
        lambda s: jnp.zeros((num_lanes, num_slots, *s.shape[1:]), s.dtype), tuple(rows)
    )
    zero = jnp.zeros((), jnp.float32)
    return active, _BlockSums(update_sums, zero, zero, zero, zero), new_states, outputs


def _run_steps(
    plan: ExecutionPlan, first, last, run_step: Callable, active: _ActiveClient
) -> _ActiveClient:
    """Run the steps of a lane from `first` to `last` - 1."""
    if plan.platform == "cpu":
        return jax.lax.fori_loop(first, last, run_step, active)
    # On an accelerator a count of the client's steps beside the loop's is one more launch.
    num_steps = active.num_steps

    def run_counted_step(t, active):
        active = run_step(t, active._replace(num_steps=num_steps + t - first))
        return active._replace(num_steps=num_steps)

    active = jax.lax.fori_loop(first, last, run_counted_step, active)
    return active._replace(num_steps=num_steps + jnp.maximum(last - first, 0))


def _weight_update(update: ClientUpdate, weight: jax.Array) -> ClientUpdate:
    """Return the terms of the sums over clients, in at least 32 bits: see `ClientUpdate`."""

    def weight_leaf(leaf):
        leaf = jnp.asarray(leaf)
        return weight * leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))

    def widen_leaf(leaf):
        leaf = jnp.asarray(leaf)
        wide_type: Any = jnp.int32
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            wide_type = jnp.float32
        elif jnp.issubdtype(leaf.dtype, jnp.unsignedinteger):
            wide_type = jnp.uint32
        return leaf.astype(jnp.promote_types(leaf.dtype, wide_type))

    return ClientUpdate(
        jax.tree.map(weight_leaf, update.mean), jax.tree.map(widen_leaf, update.sum)
    )


def _map_lanes(num_lanes: int, function: Callable) -> Callable:
    """Map over the leading lane axis; one lane is called as it is, without a batch axis."""
    if num_lanes > 1:
        return jax.vmap(function)

    def run_single_lane(*args):
        out = function(*jax.tree.map(lambda a: jax.lax.index_in_dim(a, 0, keepdims=False), args))
        return jax.tree.map(lambda a: a[None], out)

    return run_single_lane


def _select_by_lane(is_lockstep: bool, condition: jax.Array, new: Tree, old: Tree) -> Tree:
    """Return `new` in the lanes where `condition` `[V]` holds, else `old`.

    A single lane starts and ends a client in every segment, so that `condition` is always true.
    """
    if not is_lockstep:
        return new
    expand = lambda a: condition.reshape(condition.shape + (1,) * (a.ndim - 1))  # noqa: E731
    return jax.tree.map(lambda n, o: jnp.where(expand(n), n, o), new, old)


def _write_to_slots(plan: ExecutionPlan, slot, ends, buffers: Tree, values: Tree) -> Tree:
    """Write each lane's value to its client's slot where the client ends."""

    def write_leaf(buffer, value, slot, has_ended):
        if not plan.is_lockstep:
            return set_row(buffer, value, slot)
        target_slot = jnp.where(has_ended, slot, buffer.shape[0])  # beyond the last: dropped
        return buffer.at[target_slot].set(value, mode="drop", wrap_negative_indices=False)

    map_lanes = _map_lanes(plan.lanes, write_leaf)
    return jax.tree.map(lambda b, v: map_lanes(b, v, slot, ends), buffers, values)
