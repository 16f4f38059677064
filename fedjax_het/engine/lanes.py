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

from fedjax_het.common.arrays import AnyArray, row_of, with_row
from fedjax_het.engine.contract import Batch, Client, ClientMethod, Upload, checked_client
from fedjax_het.engine.drift import watched
from fedjax_het.engine.packing import from_words, to_words
from fedjax_het.engine.plan import AXIS, Plan
from fedjax_het.engine.schedule import RoundSchedule
from fedjax_het.engine.sharing import once_known
from fedjax_het.engine.soundness import still_finite
from fedjax_het.engine.stretches import BLOCKS, CLIENTS, TURNS, across, cut

Tree = Any


class Examples(NamedTuple):
    """Training examples on the device, gathered by index inside the program."""

    images: AnyArray  # [N, H, W, C] uint8 (or float32)
    labels: AnyArray  # [N] int32


class Cohort(NamedTuple):
    """A round's schedule, the examples that it indexes, and what else the round reads."""

    schedule: RoundSchedule
    examples: Examples
    server: Examples | None = None  # [n_0, ...] the server's own; None where it has none
    inputs: dict[str, Tree] = {}  # noqa: RUF012  what the method asked for, by name


class CohortResult(NamedTuple):
    upload: Upload  # of all the round's clients: their weighted mean, and their sum
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
    present: jax.Array  # [S] bool


def train_cohort(
    method: ClientMethod,
    plan: Plan,
    hp,
    broadcast,
    states,
    key,
    cohort: Cohort,
    *,
    gather: bool = False,
    name: str = CLIENTS,
) -> CohortResult:
    """Run local training of every client of a round.

    Args:
      broadcast: what the server sends; the same for all.
      states: client states; a client's is the row that the schedule names: of all K clients, which
        may be split over the devices, or of a table that holds at least those of the round.
      gather: whether outputs are models, of which every device gets all.
      name: of the loop, where the round is made in stretches.
      key: the round's key; a step's key is fold_in(fold_in(key, client id), step).
    Cost: the longest lane's steps; memory is one local state per lane, plus one client state
      and one output per slot.
    """
    schedule = cohort.schedule
    method, read = watched(checked_client(method))
    block: Callable[..., tuple] = partial(_block, method, plan, name)
    shared = (hp, broadcast, states, key, cohort.examples, schedule.longest)
    of_the_round = (
        "round",
        "num_clients",
        "evaluate",
        "trial",
        "share",
        "longest",
        "participants",
    )
    # No lane reads these: they have no axis of blocks, or every block's are needed together.
    unread: dict[str, Any] = dict.fromkeys((*of_the_round, "census", "census_pairs"))
    lanes = schedule._replace(**unread)

    def with_slots(outputs, part: RoundSchedule):
        return (outputs, part.client_ids, part.weights, part.num_steps) if gather else outputs

    if plan.spreads != AXIS:

        def in_turn(run, spans, carried):
            return jax.lax.map(lambda given: run(spans, given[0], given[1]), (carried, lanes))

        sums, new, outputs = across(
            in_turn, lambda part: block(*shared, part), TURNS, len(schedule.rows)
        )
        outputs = with_slots(outputs, lanes)
        sums = jax.tree.map(lambda a: a.sum(0), sums)
        states = _put_back(plan, states, new, schedule.rows)
    else:
        split = plan.splits_clients and bool(jax.tree.leaves(states))
        of_clients = P(AXIS) if split else P()

        def sharded(hp, broadcast, states, key, examples, longest, lanes):
            part = jax.tree.map(lambda a: a[0], lanes)
            table, read = _fetched(states, part) if split else (states, part)
            sums, new, outputs = block(hp, broadcast, table, key, examples, longest, read)
            rows = part.rows if jax.tree.leaves(new) else ()
            found = new, rows, with_slots(outputs, part)
            sums, (new, rows, outputs) = _exchange(plan, sums, found)
            if split:
                rows = _own_rows(states, rows)
            return sums, _put_back(plan, states, new, rows), outputs

        def on_devices(run, spans, carried):
            return jax.shard_map(
                run,
                mesh=plan.mesh,
                in_specs=(P(), P(AXIS), P(), P(), of_clients, P(), P(), P(), P(AXIS)),
                out_specs=((P(), of_clients, P()), P(AXIS), P()),
                check_vma=False,
            )(spans, carried, *shared, lanes)

        sums, states, outputs = across(on_devices, sharded, BLOCKS, len(schedule.rows))
    if gather:
        outputs = _models(schedule, *outputs)
    upload, loss, count, trained, unsound = sums
    loss = jnp.where(unsound > 0, jnp.nan, loss / jnp.maximum(count, 1))
    upload = read(upload)
    return CohortResult(upload, trained.astype(jnp.int32), states, outputs, loss)


def for_each_client(tree: Tree, num_clients: int) -> Tree:
    """One client's state -> the same for all, with leading axis K."""
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (num_clients, *a.shape)), tree)


def client_row(states: Tree, client: jax.Array | int) -> Tree:
    """A client's state of all clients' `[K, ...]`, or of a table, by row. A number beyond the last
    gives the last's."""
    return jax.tree.map(lambda s: row_of(s, jnp.minimum(client, s.shape[0] - 1)), states)


def _models(schedule: RoundSchedule, variables, ids, weights, num_steps) -> ClientModels:
    """The models of the slots `[D, V, J, ...]`, by client.

    What the slots are is gathered with them: read from the schedule, it could be on other devices.
    """
    wanted = schedule.participants
    slots = (ids.reshape(-1) == wanted[:, None]).argmax(1)
    present = (wanted < schedule.num_clients) & (num_steps.reshape(-1)[slots] > 0)
    return ClientModels(
        jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:])[slots], variables),
        jnp.where(present, weights.reshape(-1)[slots], 0),
        present,
    )


def _exchange(plan: Plan, sums, rows):
    """-> (sums over devices, rows of all devices `[D, V, J, ...]`, any tree).

    On CPUs by one collective, because XLA's CPU devices share a pool of threads: two that are ready
    at the same time can be entered in different orders, hold all threads, and wait for ever. Where
    there are rows all is gathered, and added up in the order of the blocks. Accelerators enter
    collectives in the program's order: sums are reduced between them, in an order of theirs, which
    is less to send, and rows alone are gathered.
    """
    if plan.platform != "cpu":
        return jax.lax.psum(sums, AXIS), jax.lax.all_gather(rows, AXIS)
    leaves, structure = jax.tree.flatten((sums, rows))
    num_sums = len(jax.tree.leaves(sums))
    if len(leaves) == num_sums and all(leaf.dtype == jnp.float32 for leaf in leaves):
        summed, unravel = ravel_pytree(sums)
        return unravel(jax.lax.psum(summed, AXIS)), rows
    members: dict[Any, list[int]] = {}  # which leaves are of each type
    for i, leaf in enumerate(leaves):
        members.setdefault(leaf.dtype, []).append(i)
    flat = [jnp.concatenate([leaves[i].reshape(-1) for i in kind]) for kind in members.values()]
    words = [to_words(part) for part in flat]
    everyones = jax.lax.all_gather(jnp.concatenate(words), AXIS)  # [D, ...]
    gathered = list(leaves)
    parts = _split(everyones, [word.size for word in words])
    for kind, part, like in zip(members.values(), parts, flat, strict=True):
        pieces = _split(from_words(part, like), [leaves[i].size for i in kind])
        for i, piece in zip(kind, pieces, strict=True):
            gathered[i] = piece.reshape(piece.shape[0], *leaves[i].shape)
    totals = [part.sum(0, dtype=part.dtype) for part in gathered[:num_sums]]
    return jax.tree.unflatten(structure, totals + gathered[num_sums:])


def _split(rows: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """`rows` [D, n] as pieces of so many columns."""
    ends = np.cumsum([0, *sizes])
    return [
        jax.lax.slice_in_dim(rows, first, last, axis=1) for first, last in itertools.pairwise(ends)
    ]


def _fetched(states, part: Any):
    """The states of the clients in this device's slots, of all clients' that are split over the
    devices: -> (a table `[V * J, ...]`, the lanes' schedule with its rows). Two collectives, one
    after the other: devices say which rows they want, then every one gives those that it holds, bit
    by bit, and zeros for the others.
    """
    # After the collectives of what comes before the clients.
    rows = once_known(part.num_segments.astype(jnp.float32), part.rows.reshape(-1))
    wanted, held = jax.lax.all_gather(rows, AXIS), jax.tree.leaves(states)[0].shape[0]
    wanted = jnp.minimum(wanted, held * len(wanted) - 1)  # as `client_row` does
    mine = _own_rows(states, wanted)
    is_here = (mine < held)[..., None]
    found = jax.vmap(jax.vmap(partial(client_row, states)))(mine)  # [D, V * J, ...]
    leaves, structure = jax.tree.flatten(found)
    words = [jax.vmap(jax.vmap(to_words))(leaf) for leaf in leaves]
    given = jnp.where(is_here, jnp.concatenate(words, axis=-1), jnp.uint32(0))
    own = jax.lax.psum_scatter(given, AXIS)  # [V * J, words]
    parts = _split(own, [word.shape[-1] for word in words])
    table = [from_words(part, leaf[0, 0]) for part, leaf in zip(parts, leaves, strict=True)]
    slots = jnp.arange(part.rows.size, dtype=part.rows.dtype).reshape(part.rows.shape)
    return jax.tree.unflatten(structure, table), part._replace(rows=slots)


def _own_rows(states, rows):
    """Rows of all clients' states as those of this device's part; what it does not hold is beyond
    its last."""
    held = jax.tree.leaves(states)[0].shape[0]
    own = rows - held * jax.lax.axis_index(AXIS)
    return jnp.where((own >= 0) & (own < held), own, held)


def _put_back(plan: Plan, states, new, rows):
    """Write the states of a round's clients, `[D, V, J, ...]`, to their rows `[D, V, J]`.

    On a CPU row by row, which happens in place: its scatter copies the states of all K clients. An
    accelerator's does not, and is one operation instead of a loop of several.
    """
    if not jax.tree.leaves(states):
        return states
    rows = rows.reshape(-1)
    flat = jax.tree.map(lambda n: n.reshape(rows.shape + n.shape[3:]), new)
    if plan.platform != "cpu":

        def scatter(all_, new):
            # Unused slots: beyond the last row, which drops them, and each somewhere else.
            unused = all_.shape[0] + jnp.arange(len(rows))
            places = jnp.where(rows < all_.shape[0], rows, unused)
            return all_.at[places].set(
                new, mode="drop", unique_indices=True, wrap_negative_indices=False
            )

        return jax.tree.map(scatter, states, flat)

    def put(i, states):
        place = row_of(rows, i)

        def put_leaf(all_, new):
            keep = place >= all_.shape[0]  # an unused slot
            row = jnp.where(keep, client_row(all_, place), row_of(new, i))
            return with_row(all_, row, place)

        return jax.tree.map(put_leaf, states, flat)

    return jax.lax.fori_loop(0, rows.shape[0], put, states)


class _Running(NamedTuple):
    """One lane's client in training."""

    local: Tree
    steps: jax.Array  # [] int32 done so far
    loss: jax.Array  # [] float32 summed over samples
    samples: jax.Array  # [] float32, how many


class _Slots(NamedTuple):
    """The clients of each lane, one after the other; leading axes V and J."""

    ids: jax.Array
    num_samples: jax.Array
    num_steps: jax.Array
    seeds: jax.Array
    weights: jax.Array
    rows: jax.Array


class _Lane(NamedTuple):
    """What a lane does for the client in one of its slots."""

    begin: Callable[[_Slots, jax.Array], _Running]
    step: Callable[..., _Running]  # (slots, slot, running, indices of the minibatch, its size)
    # -> (weighed upload, whether the state is as finite as it was, state, output)
    end: Callable[[_Slots, jax.Array, _Running], tuple]


def _lane(method: ClientMethod, hp, broadcast, states, key, examples: Examples) -> _Lane:
    """The lane's functions of a method; `states` holds everyone's rows."""

    def client_of(slots: _Slots, slot):
        here = jax.tree.map(lambda a: row_of(a, slot), slots)
        client_key = jax.random.fold_in(key, here.ids)
        start = examples.images[here.seeds]
        return Client(here.ids, here.num_samples, here.num_steps, client_key, start)

    def begin(slots, slot):
        state = client_row(states, row_of(slots.rows, slot))
        local = method.begin(hp, broadcast, state, client_of(slots, slot))
        zero = jnp.zeros((), jnp.float32)
        return _Running(local, jnp.int32(0), zero, zero)

    def step(slots, slot, running, indices, size):
        client = client_of(slots, slot)
        mask = (jnp.arange(indices.shape[0]) < size).astype(jnp.float32)
        batch = Batch(examples.images[indices], examples.labels[indices], mask, running.steps)
        step_key = jax.random.fold_in(client.key, running.steps)
        local, loss = method.step(hp, broadcast, running.local, batch, client, step_key)
        samples_seen = size.astype(jnp.float32)
        return _Running(
            local,
            running.steps + 1,
            running.loss + loss * samples_seen,
            running.samples + samples_seen,
        )

    def end(slots, slot, running):
        state, client = client_row(states, row_of(slots.rows, slot)), client_of(slots, slot)
        upload, new, output = method.end(hp, broadcast, running.local, state, client)
        sound = still_finite(new, state)
        return _weighed(upload, row_of(slots.weights, slot)), sound, new, output

    return _Lane(begin, step, end)


def _block(method, plan, name, hp, broadcast, states, key, examples, longest, schedule):
    """One block of lanes: -> ((upload, loss, samples, clients, those whose state is not finite any
    more: sums), states, outputs).

    `states` holds everyone's rows; returned are those of this block's slots, `[V, J, ...]`. A round
    in stretches is cut between steps of the lanes, of which the longest of all blocks has
    `longest`.
    """
    num_lanes, lane = plan.lanes, _lane(method, hp, broadcast, states, key, examples)
    over_lanes = partial(_over_lanes, num_lanes)
    slots = _Slots(
        schedule.client_ids,
        schedule.num_samples,
        schedule.num_steps,
        schedule.seeds,
        schedule.weights,
        schedule.rows,
    )
    batches, batch_sizes = schedule.batches.swapaxes(0, 1), schedule.batch_sizes.swapaxes(0, 1)
    first_slots = jnp.zeros(num_lanes, jnp.int32)
    running = over_lanes(lane.begin)(slots, first_slots)
    shapes = jax.eval_shape(over_lanes(lane.end), slots, first_slots, running)
    upload_shape, _, *slot_shapes = shapes
    upload = jax.tree.map(lambda s: jnp.zeros(s.shape[1:], s.dtype), upload_shape)
    num_slots = schedule.client_ids.shape[1]
    new_states, outputs = jax.tree.map(
        lambda s: jnp.zeros((s.shape[0], num_slots, *s.shape[1:]), s.dtype), tuple(slot_shapes)
    )

    def segment(g, carry, part=None):
        """Segment g; of it the steps in `part`, (first, last), where it is cut."""
        running, sums, new_states, outputs = carry
        slot, starts, ends, last = (
            row_of(a, g)
            for a in (schedule.slots, schedule.starts, schedule.ends, schedule.segment_ends)
        )
        first = jnp.where(g == 0, 0, row_of(schedule.segment_ends, jnp.maximum(g - 1, 0)))
        chosen = plan.in_step or part is not None
        if part is not None:
            starts, ends = starts & (first >= part[0]), ends & (last <= part[1])
            first, last = jnp.maximum(first, part[0]), jnp.minimum(last, part[1])
        fresh = over_lanes(lane.begin)(slots, slot)
        running = _where(chosen, starts, fresh, running)

        # The loop is inside the lane, whose arrays then have no axis for it: with one lane the
        # weights are updated in place, which XLA does not do through a reshape.
        def train(slots, slot, running, batches, sizes):
            def one_step(t, running):
                return lane.step(slots, slot, running, row_of(batches, t), row_of(sizes, t))

            if plan.platform == "cpu":
                return jax.lax.fori_loop(first, last, one_step, running)
            # The lane's steps are told from the loop's: a count of its own is one more launch.
            before = running.steps

            def counted(t, running):
                running = one_step(t, running._replace(steps=before + t - first))
                return running._replace(steps=before)

            running = jax.lax.fori_loop(first, last, counted, running)
            return running._replace(steps=before + jnp.maximum(last - first, 0))

        running = over_lanes(train)(slots, slot, running, batches, batch_sizes)
        sent, sound, new, output = over_lanes(lane.end)(slots, slot, running)
        sent = _where(chosen, ends, sent, jax.tree.map(jnp.zeros_like, sent))
        upload, loss, count, trained, unsound = sums
        upload = jax.tree.map(lambda total, s: total + s.sum(0, dtype=s.dtype), upload, sent)
        loss += jnp.where(ends, running.loss, 0).sum()
        count += jnp.where(ends, running.samples, 0).sum()
        trained += ends.sum(dtype=jnp.float32)
        write = partial(_write, plan, slot, ends)
        unsound += (ends & ~sound).sum(dtype=jnp.float32)
        sums = (upload, loss, count, trained, unsound)
        return running, sums, write(new_states, new), write(outputs, output)

    def go(first, last, carry):
        if isinstance(first, int):  # all of it
            return jax.lax.fori_loop(0, schedule.num_segments, segment, carry)
        ends = schedule.segment_ends
        used = jnp.arange(len(ends)) < schedule.num_segments
        begins = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
        segments = (used & (ends <= first)).sum(), (used & (begins < last)).sum()
        return jax.lax.fori_loop(*segments, partial(segment, part=(first, last)), carry)

    zero = jnp.zeros((), jnp.float32)
    carry = (running, (upload, zero, zero, zero, zero), new_states, outputs)
    num_steps, batch_size = batches.shape[1:]
    total = row_of(schedule.segment_ends, jnp.maximum(schedule.num_segments - 1, 0))
    return cut(
        name,
        jnp.where(schedule.num_segments > 0, total, 0),
        go,
        carry,
        longest=longest,
        most=num_steps,
        samples=num_lanes * batch_size,
    )[1:]


def _weighed(upload: Upload, weight: jax.Array) -> Upload:
    """What is added up over the clients, in at least 32 bits: see `Upload`."""

    def widened(leaf, integers):
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        return leaf.astype(jnp.promote_types(leaf.dtype, integers))

    def unsigned(leaf):
        return jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.unsignedinteger)

    mean = jax.tree.map(lambda leaf: weight * widened(leaf, jnp.float32), upload.mean)
    total = jax.tree.map(
        lambda leaf: widened(leaf, jnp.uint32 if unsigned(leaf) else jnp.int32), upload.sum
    )
    return Upload(mean, total)


def _over_lanes(num_lanes: int, function: Callable) -> Callable:
    """Map over the leading lane axis; one lane is called as it is, without a batch axis."""
    if num_lanes > 1:
        return jax.vmap(function)

    def single(*args):
        out = function(*jax.tree.map(lambda a: jax.lax.index_in_dim(a, 0, keepdims=False), args))
        return jax.tree.map(lambda a: a[None], out)

    return single


def _where(in_step: bool, condition, new, old):
    """Lane-wise choice; on a lane of its own every segment starts and ends a client."""
    if not in_step:
        return new
    shape = lambda a: condition.reshape(condition.shape + (1,) * (a.ndim - 1))  # noqa: E731
    return jax.tree.map(lambda n, o: jnp.where(shape(n), n, o), new, old)


def _write(plan: Plan, slot, ends, buffers, values):
    """Write each lane's value to its client's slot where the client ends."""

    def write_leaf(buffer, value, slot, end):
        if not plan.in_step:
            return with_row(buffer, value, slot)
        place = jnp.where(end, slot, buffer.shape[0])  # beyond the last: dropped
        return buffer.at[place].set(value, mode="drop", wrap_negative_indices=False)

    over_lanes = _over_lanes(plan.lanes, write_leaf)
    return jax.tree.map(lambda b, v: over_lanes(b, v, slot, ends), buffers, values)
