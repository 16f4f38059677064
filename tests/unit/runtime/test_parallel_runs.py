"""How many federations devices hold at a time: a table of counts and timings, without devices."""

import pytest

from fedjax_het.runtime.placement import (
    LANES_AXIS,
    RUNS_AXIS,
    balance_parallel_runs,
    choose_parallelism,
    plan_independent_runs,
)

COUNTS, DEVICES = range(1, 65), range(1, 9)
LANES = 32
GAINS = {1: 1.0, 2: 1.7, 4: 2.6, 8: 3.2}  # by federations side by side
ENOUGH = 0.9


def timed(most):
    """Seconds of a client's step by lanes."""
    return {LANES * width: 1 / gain for width, gain in GAINS.items() if width <= most}


def chosen(count, devices, most=8, together=0.97, seconds=None):
    return choose_parallelism(
        count,
        devices,
        lanes=LANES,
        max_parallel=most,
        step_seconds=seconds or timed(most),
        utilization=together,
    )


def test_runs_go_in_as_few_turns_with_the_fewest_places():
    assert (
        balance_parallel_runs(27, 1, 8) == 7
        and balance_parallel_runs(24, 1, 16) == 12
        and balance_parallel_runs(5, 1, 2) == 2
    )
    for count in COUNTS:
        for devices in DEVICES:
            for width in range(1, 17):
                found, at_once = balance_parallel_runs(count, devices, width), devices * width
                assert -(-count // (devices * found)) == -(-count // at_once)
                assert found == 1 or -(-count // (devices * (found - 1))) > -(-count // at_once)


@pytest.mark.parametrize("most", [1, 4, 8])
def test_places_are_useful_wherever_a_width_makes_them_so(most):
    """At least 90 % of them; where others are cheaper, it is by what was timed."""
    for count in COUNTS:
        for devices in DEVICES:
            best = chosen(count, devices, most)
            every = [
                plan_independent_runs(count, devices, width, lanes=LANES, step_seconds=timed(most))
                for width in range(1, most + 1)
            ]
            assert all(best.cost <= way.cost for way in every)
            # Narrower ones may waste less and yet be slower, by the timings.
            others = [way.utilization for way in every if way.num_parallel >= best.num_parallel]
            assert best.utilization >= min(ENOUGH, max(others)), (count, devices, best)


def test_what_was_timed_outweighs_idle_places():
    for count, most, width in ((27, 8, 7), (24, 16, 12), (20, 16, 10), (5, 2, 2), (8, 8, 8)):
        seconds = {LANES: 1.0, LANES * most: 1 / 3.0}
        best = chosen(count, 1, most, seconds=seconds)
        assert (best.mesh_axis, best.num_parallel) == (RUNS_AXIS, width)
    # Nine on eight devices, for which no width is good: they share each, unless two at a time are
    # much faster.
    assert chosen(9, 8, 1).mesh_axis == LANES_AXIS
    assert chosen(9, 8, 2, seconds={LANES: 1.0, 2 * LANES: 0.5})[:2] == (RUNS_AXIS, 2)
    assert chosen(9, 8, 2, seconds={LANES: 1.0, 2 * LANES: 0.98}).mesh_axis == LANES_AXIS


def test_one_device_shares_nothing():
    for count in COUNTS:
        assert chosen(count, 1).mesh_axis == RUNS_AXIS


def test_devices_that_wait_for_each_other_share_less():
    assert chosen(9, 8, 1, together=0.97).mesh_axis == LANES_AXIS
    assert chosen(9, 8, 1, together=0.5).mesh_axis == RUNS_AXIS
