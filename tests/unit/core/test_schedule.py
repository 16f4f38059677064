"""The host's schedule: complete, balanced, and independent of lanes."""

import itertools

import numpy as np
import pytest
from support.data import CLIENT_SIZES, consecutive_partition

from fedjax_het.core.schedule import (
    RoundSettings,
    Scheduler,
    compute_useful_fraction,
    merge_segment_ends,
    merge_shapes,
    stack_rounds,
)
from fedjax_het.core.work_items import ClientWork
from fedjax_het.data import partition_from_clients


def scheduler(sizes=CLIENT_SIZES, **settings):
    passes, batch_size = settings.pop("passes", 2), settings.pop("batch_size", 4)
    blocks, lanes = settings.pop("blocks", 2), settings.pop("lanes", 2)
    units = ClientWork(consecutive_partition(sizes), passes, batch_size)
    return Scheduler(
        units, RoundSettings(**{"seed": 3, "num_rounds": 6, **settings}), blocks, lanes
    )


def replay(schedule):
    """What the device does with a schedule: {client: [(batch, size), ...]} in order of steps."""
    done, running = {}, {}
    for d in range(len(schedule.num_segments)):
        begin = 0
        for g in range(schedule.num_segments[d]):
            end = schedule.segment_ends[d, g]
            for v in range(schedule.active_slots.shape[-1]):
                client = int(schedule.client_ids[d, v, schedule.active_slots[d, g, v]])
                if schedule.starts_client[d, g, v]:
                    running[d, v] = (client, [])
                if (d, v) in running:
                    assert running[d, v][0] == client
                    running[d, v][1].extend(
                        (schedule.batches[d, t, v], int(schedule.batch_sizes[d, t, v]))
                        for t in range(begin, end)
                    )
                if schedule.ends_client[d, g, v]:
                    client, steps = running.pop((d, v))
                    assert client not in done, "a client must run once"
                    done[client] = steps
            begin = end
    return done


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_each_sample_is_used_once_per_pass(blocks, lanes):
    round_scheduler = scheduler(blocks=blocks, lanes=lanes)
    for r in range(3):
        ran = replay(round_scheduler.make_round(r))
        assert sorted(ran) == [k for k, n in enumerate(CLIENT_SIZES) if n > 0]
        for client, steps in ran.items():
            used = np.concatenate([batch[:size] for batch, size in steps])
            mine = round_scheduler.partition.client_indices(client)
            assert np.array_equal(np.sort(used), np.sort(np.tile(mine, 2)))
            per_pass = len(steps) // 2
            assert [size for _, size in steps[: per_pass - 1]] == [4] * (per_pass - 1)


@pytest.mark.parametrize(("blocks", "lanes"), [(1, 1), (2, 1), (1, 4), (2, 3)])
def test_batches_do_not_depend_on_lanes(blocks, lanes):
    here, there = scheduler(blocks=blocks, lanes=lanes), scheduler(blocks=1, lanes=2)
    for r in range(4):
        a, b = replay(here.make_round(r)), replay(there.make_round(r))
        assert a.keys() == b.keys()
        for client in a:
            for (x, n), (y, m) in zip(a[client], b[client], strict=True):
                assert n == m and np.array_equal(x[:n], y[:n])


def test_batches_depend_on_round_and_seed():
    first, again, other = scheduler(), scheduler(), scheduler(seed=4)
    batch = lambda s, r: s.client_batches(r, 5)[0]  # noqa: E731
    assert np.array_equal(batch(first, 0), batch(again, 0))
    assert not np.array_equal(batch(first, 0), batch(first, 1))
    assert not np.array_equal(batch(first, 0), batch(other, 0))


def test_cohort_is_uniform_without_replacement():
    round_scheduler = scheduler(sizes=(5,) * 20, participation=0.4, num_rounds=400, passes=1)
    counts = np.zeros(20)
    for r in range(400):
        drawn = round_scheduler.draw_cohort(r)
        assert len(set(drawn.tolist())) == 8
        counts[drawn] += 1
    # Binomial(400, 0.4): standard deviation 9.8.
    assert abs(counts - 160).max() < 5 * 9.8


@pytest.mark.parametrize(
    ("clients", "share", "expected"), [(80, 0.4, 32), (10, 0.05, 1), (10, 0.3, 3), (7, 1.0, 7)]
)
def test_cohort_size_rounds_down_to_at_least_one(clients, share, expected):
    assert scheduler(sizes=(4,) * clients, participation=share).cohort_size == expected


def test_weights_sum_to_one():
    for averaging in ("uniform", "weighted"):
        round_scheduler = scheduler(averaging=averaging).make_round(0)
        assert round_scheduler.weights.sum() == pytest.approx(1, abs=1e-6)
        used = round_scheduler.client_ids < len(CLIENT_SIZES)
        expected = used / sum(n > 0 for n in CLIENT_SIZES)
        if averaging == "weighted":
            expected = round_scheduler.num_samples / sum(CLIENT_SIZES)
        assert np.allclose(round_scheduler.weights, expected)


def test_lanes_are_balanced():
    rng = np.random.default_rng(0)
    sizes = tuple(int(n) for n in rng.integers(200, 1200, 80))
    settings = {"participation": 0.4, "batch_size": 32, "passes": 1, "lanes": 1}
    round_scheduler = scheduler(sizes, num_rounds=10, **settings)
    for r in range(10):
        steps = [round_scheduler.make_round(r).num_steps[d].sum() for d in range(2)]
        assert abs(steps[0] - steps[1]) <= 8  # of about 350
    longest = round_scheduler.work_counts.block_steps
    waiting = compute_useful_fraction([round_scheduler], is_concurrent=True)
    num_samples = round_scheduler.work_counts.samples.sum()
    assert waiting == pytest.approx(num_samples / (longest.max(1).sum() * 2 * 32))
    in_turn = compute_useful_fraction([round_scheduler], is_concurrent=False)
    assert in_turn == pytest.approx(num_samples / (longest.sum() * 32))
    assert in_turn > waiting > 0.95


def test_empty_cohort_has_no_segments():
    round_scheduler = scheduler(sizes=(0, 0, 5), participation=0.34, num_rounds=30)
    empty = [r for r in range(30) if round_scheduler.work_counts.participants[r] == 0]
    assert empty
    one = round_scheduler.make_round(empty[0])
    assert one.num_segments.sum() == 0 and one.weights.sum() == 0


def test_first_step_round_has_one_step_per_lane():
    round_scheduler = scheduler()
    ran = replay(round_scheduler.make_first_step_round(0))
    full = replay(round_scheduler.make_round(0))
    assert len(ran) == 4
    for client, steps in ran.items():
        assert len(steps) == 1 and np.array_equal(steps[0][0], full[client][0][0])


def test_stack_rounds_pads_with_copies():
    round_scheduler = scheduler()
    chunk = stack_rounds([round_scheduler.make_round(r) for r in (2, 3, 4)], 5)
    assert chunk.round.tolist() == [2, 3, 4, 4, 4]
    assert np.array_equal(chunk.batches[1], round_scheduler.make_round(3).batches)


def test_eval_rounds_include_last_five():
    round_scheduler = scheduler(num_rounds=20, eval_every=6)
    due = [r for r in range(20) if round_scheduler.make_round(r).is_eval_round]
    assert due == [5, 11, 15, 16, 17, 18, 19]


def test_partition_of_one_client():
    partition = partition_from_clients([np.arange(9)])
    settings = RoundSettings(seed=0, averaging="weighted")
    round_scheduler = Scheduler(ClientWork(partition, 1, 4), settings, blocks=2, lanes=1)
    one = round_scheduler.make_round(0)
    assert one.num_steps.sum() == 3 and one.num_segments.tolist() == [1, 0]


def test_parallel_runs_share_segments():
    runs = [scheduler(seed=seed, lanes=lanes) for seed, lanes in ((1, 1), (2, 1), (3, 1))]
    shape = merge_shapes(runs, num_parallel=3)
    for r in range(4):
        cuts = merge_segment_ends(runs, r)
        padded = [one.make_round(r, shape, cuts) for one in runs]
        for one, schedule in zip(runs, padded, strict=True):
            assert np.array_equal(schedule.num_segments, padded[0].num_segments)
            assert np.array_equal(schedule.segment_ends, padded[0].segment_ends)
            alone, together = replay(one.make_round(r)), replay(schedule)
            assert alone.keys() == together.keys()
            for client in alone:
                for (x, n), (y, m) in zip(alone[client], together[client], strict=True):
                    assert n == m and np.array_equal(x, y)


def test_parallel_runs_wait_for_longest():
    runs = [scheduler(sizes=(16, 0)), scheduler(sizes=(16, 16))]
    one, two = (run.work_counts.block_steps.sum() for run in runs)
    both = compute_useful_fraction(runs, is_concurrent=False)
    samples = sum(run.work_counts.samples.sum() for run in runs)
    assert two > one and both == pytest.approx(samples / (2 * two * 2 * 4))


def test_merged_shape_fits_any_pair_of_runs():
    """Which do is known when workers have claimed them: there are segments for whichever. Here
    neighbours' clients end at the same steps, and others' do not."""
    few, many = [7, 9, 11, 13, 15, 17], [4] * 6
    runs = [scheduler(sizes, lanes=1, blocks=1) for sizes in (few, few, many, many)]
    shape = merge_shapes(runs, num_parallel=2)
    for pair in itertools.combinations(runs, 2):
        for r in range(runs[0].settings.num_rounds):
            cuts = merge_segment_ends(pair, r)
            assert len(cuts[0]) <= shape.segments
            for one in pair:
                assert one.make_round(r, shape, cuts).num_segments[0] == len(cuts[0])
