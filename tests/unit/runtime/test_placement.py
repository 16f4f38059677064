"""Placement: validation, the choice of lanes, and the number of runs in parallel."""

import functools

import jax
import numpy as np
import pytest
from support.data import consecutive_partition, make_user_dataset
from support.small_runs import make_spec
from support.x64 import enable_x64

from fedjax_het import ConfigError, Placement, simulate, sweep
from fedjax_het.core.autotune import LaneChoice
from fedjax_het.data import partition_from_clients
from fedjax_het.nn import count_training_flops
from fedjax_het.runtime import placement as module
from fedjax_het.runtime.build import prepare_group
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.runtime.placement import (
    LANES_AXIS,
    RUNS_AXIS,
    balance_parallel_runs,
    choose_parallelism,
    plan_independent_runs,
)


@pytest.mark.parametrize("devices", [0, -1, True, "cpu:0", ["cpu:0", "cpu:1"], []])
def test_placement_rejects_invalid_devices(devices):
    """The fuzz tests have the other fields."""
    with pytest.raises(ConfigError, match=r"^devices = "):
        Placement(devices=devices)


def test_missing_devices_are_reported_by_runs():
    count = len(jax.devices())
    placement = Placement(devices=count + 1)  # this starts no backend yet
    expected = f"devices = {count + 1}: expected 1 to {count}"
    with pytest.raises(ConfigError, match=expected):
        simulate(make_spec(), dataset=make_user_dataset(), placement=placement)
    with pytest.raises(ConfigError, match=expected):
        sweep([make_spec()], dataset=make_user_dataset(), placement=placement)


def test_placement_lists_devices_without_starting_a_backend(monkeypatch):
    devices = jax.devices()
    assert Placement(devices=1).list_devices() == devices[:1]
    assert Placement(devices=devices[-1:]).list_devices() == devices[-1:]
    assert Placement().list_devices() == devices
    monkeypatch.setattr(jax, "devices", None)
    assert Placement(lanes=2, devices=64).lanes == 2


# --- lanes


@pytest.fixture
def choose_lanes_arguments(monkeypatch):
    """The arguments of `choose_lanes`, which returns one lane."""
    arguments = {}

    def choose(work, **settings):
        arguments.update(settings, work=work)
        return LaneChoice(1, 1, {}, "im2col")

    monkeypatch.setattr(module, "choose_lanes", choose)
    return arguments


def test_idle_factor_is_of_the_runs_own_clients(choose_lanes_arguments):
    """One client of 9 batches beside three of one, in blocks of one lane and of two."""
    sizes = [36, 4, 4, 4]
    ends = np.cumsum(sizes)
    clients = [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    spec = make_spec(num_clients=4, local_epochs=1, batch_size=4, participation=1.0)
    user_objects = UserObjects(make_user_dataset(), partition=partition_from_clients(clients))
    for blocks in (1, 2):
        placement = Placement(devices=1, blocks=blocks, memory=10**9)
        prepare_group([spec], user_objects, placement=placement)
        # 12 steps in all; the longest lane has 9 wherever there are two.
        idle_factor = choose_lanes_arguments["idle_factor"]
        assert idle_factor(1) == pytest.approx(1 if blocks == 1 else 9 * 2 / 12)
        assert idle_factor(2) == pytest.approx(9 * 2 * blocks / 12)
    assert choose_lanes_arguments["memory_bytes"] == 10**9
    assert choose_lanes_arguments["cohort_size"] == 4


def test_flops_are_of_all_rounds_and_runs(choose_lanes_arguments):
    """4 clients of 12 images train for 3 epochs of 3 batches in each of 5 rounds."""
    partition = consecutive_partition((12,) * 4)
    user_objects = UserObjects(make_user_dataset((12,) * 4), partition=partition)
    settings = {"num_clients": 4, "local_epochs": 3, "batch_size": 4, "participation": 1.0}
    specs = [make_spec(rounds=5, seed=seed, **settings) for seed in (0, 1)]
    group = prepare_group(specs, user_objects, placement=Placement(devices=1))
    per_sample = count_training_flops(group.program.signature.training.task.model)
    expected = 2 * 5 * 4 * 3 * 12 * per_sample
    assert choose_lanes_arguments["count_flops"]() == expected > 0


def test_pairs_are_timed_on_accelerators_only(choose_lanes_arguments, monkeypatch):
    spec = make_spec("feddm", options={"ipc": 2, "steps": 2, "server_epochs": 1})
    prepare_group([spec], UserObjects(make_user_dataset()))
    assert not choose_lanes_arguments  # on a CPU they go in turn
    monkeypatch.setattr(module.jax, "default_backend", lambda: "gpu")
    (run,) = prepare_group([spec], UserObjects(make_user_dataset())).prepared_runs
    assert choose_lanes_arguments["work"].inputs_per_pair == 2
    assert choose_lanes_arguments["cohort_size"] == run.scheduler.work_counts.pairs.max() > 4


def test_timings_of_64_bits_have_other_labels(choose_lanes_arguments):
    labels = set()
    for enabled, matmul_precision in ((False, None), (True, None), (False, "float32")):
        with enable_x64(enabled), jax.default_matmul_precision(matmul_precision):
            prepare_group([make_spec()], UserObjects(make_user_dataset()))
        labels.add(choose_lanes_arguments["work"].label)
    assert len(labels) == 3


@pytest.mark.slow
def test_chosen_conv_impl_enters_programs_and_no_digest(choose_lanes_arguments):
    spec = make_spec(model="convnet", width=4, depth=1, rounds=1)
    group = prepare_group([spec], UserObjects(make_user_dataset()))
    assert group.lane_choice.conv_impl == "im2col"
    model = group.program.signature.training.task.model
    variables = jax.eval_shape(model.init, jax.random.key(0))
    image = np.zeros((1, *model.input_shape), np.float32)
    text = str(jax.make_jaxpr(functools.partial(model.apply, train=False))(variables, image))
    assert "impl='im2col'" in text and "impl='auto'" not in text
    result = simulate(spec, dataset=make_user_dataset())
    assert result.summary["conv_impl"] == "im2col"
    fixed = simulate(spec, dataset=make_user_dataset(), placement=Placement(lanes=1))
    assert fixed.summary["conv_impl"] == "auto" and fixed.digest() == result.digest()


# --- runs in parallel, for a table of counts and timings

COUNTS, DEVICES, LANES = range(1, 65), range(1, 9), 32
SPEEDUPS = {1: 1.0, 2: 1.7, 4: 2.6, 8: 3.2}  # by runs in parallel


def time_steps(max_parallel):
    """Return seconds of a client's step by lanes."""
    return {LANES * w: 1 / gain for w, gain in SPEEDUPS.items() if w <= max_parallel}


def choose(num_runs, num_devices, max_parallel=8, utilization=0.97, seconds=None):
    return choose_parallelism(
        num_runs,
        num_devices,
        lanes=LANES,
        max_parallel=max_parallel,
        step_seconds=seconds or time_steps(max_parallel),
        utilization=utilization,
    )


def test_parallel_runs_are_fewest_for_the_batches():
    examples = {(27, 1, 8): 7, (24, 1, 16): 12, (5, 1, 2): 2}
    assert all(balance_parallel_runs(*arguments) == width for arguments, width in examples.items())
    for count in COUNTS:
        for devices in DEVICES:
            for width in range(1, 17):
                balanced = balance_parallel_runs(count, devices, width)
                batches = -(-count // (devices * width))
                assert -(-count // (devices * balanced)) == batches
                assert balanced == 1 or -(-count // (devices * (balanced - 1))) > batches


@pytest.mark.parametrize("max_parallel", [1, 4, 8])
def test_chosen_parallelism_is_cheapest_and_uses_slots(max_parallel):
    """At least 90 % of the slots hold a run, unless the timings favor fewer."""
    timings = {"lanes": LANES, "step_seconds": time_steps(max_parallel)}
    for count in COUNTS:
        for devices in DEVICES:
            best = choose(count, devices, max_parallel)
            plans = [
                plan_independent_runs(count, devices, width, **timings)
                for width in range(1, max_parallel + 1)
            ]
            assert all(best.cost <= plan.cost for plan in plans)
            # Narrower ones may waste less and yet be slower, by the timings.
            others = [p.utilization for p in plans if p.num_parallel >= best.num_parallel]
            assert best.utilization >= min(0.9, max(others)), (count, devices, best)


def test_timings_outweigh_idle_slots():
    for count, most, width in ((27, 8, 7), (24, 16, 12), (20, 16, 10), (5, 2, 2), (8, 8, 8)):
        best = choose(count, 1, most, seconds={LANES: 1.0, LANES * most: 1 / 3.0})
        assert best[:2] == (RUNS_AXIS, width)
    # Nine on eight devices, for which no width is good: they share each run, unless two in parallel
    # are much faster.
    assert choose(9, 8, 1).mesh_axis == LANES_AXIS
    assert choose(9, 8, 2, seconds={LANES: 1.0, 2 * LANES: 0.5})[:2] == (RUNS_AXIS, 2)
    assert choose(9, 8, 2, seconds={LANES: 1.0, 2 * LANES: 0.98}).mesh_axis == LANES_AXIS
    # Devices that wait for each other share less, and one device shares nothing.
    assert choose(9, 8, 1, utilization=0.5).mesh_axis == RUNS_AXIS
    assert all(choose(count, 1).mesh_axis == RUNS_AXIS for count in COUNTS)
