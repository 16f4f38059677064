"""Where runs go is said once, and checked where it is said."""

import functools

import jax
import numpy as np
import pytest
from support.data import make_user_dataset
from support.small_runs import make_spec

from fedjax_het import ConfigError, Placement, simulate, sweep
from fedjax_het.core.autotune import LaneChoice
from fedjax_het.data import partition_from_clients
from fedjax_het.runtime import placement as placing
from fedjax_het.runtime.build import prepare_group
from fedjax_het.runtime.data_assignment import UserObjects

BAD = [
    ("lanes", 0),
    ("lanes", "many"),
    ("lanes", True),
    ("lanes", 1.5),
    ("width", 0),
    ("width", None),
    ("blocks", 0),
    ("memory", 0),
    ("memory", "1 GB"),
    ("spread", "rounds"),
    ("spread", None),
    ("client_state", "disk"),
    ("client_state", None),
    ("devices", 0),
    ("devices", -1),
    ("devices", True),
    ("devices", "cpu:0"),
    ("devices", ["cpu:0", "cpu:1"]),
    ("devices", []),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_what_cannot_be_is_named(name, value):
    with pytest.raises(ConfigError, match=rf"{name} = .*"):
        Placement(**{name: value})


def test_more_devices_than_there_are():
    there = len(jax.devices())
    placement = Placement(devices=there + 1)  # which starts no backend yet
    expected = f"devices = {there + 1}: expected 1 to {there}"
    with pytest.raises(ConfigError, match=expected):
        simulate(make_spec(), dataset=make_user_dataset(), placement=placement)
    with pytest.raises(ConfigError, match=expected):
        sweep([make_spec()], dataset=make_user_dataset(), placement=placement)


def test_devices_by_number_and_by_name_are_the_same():
    devices = jax.devices()
    assert Placement(devices=1).list_devices() == devices[:1]
    assert Placement(devices=devices[-1:]).list_devices() == devices[-1:]
    assert Placement().list_devices() == devices


def test_it_starts_no_backend(monkeypatch):
    monkeypatch.setattr(jax, "devices", None)
    assert Placement(lanes=2, devices=64).lanes == 2


@pytest.fixture
def asked(monkeypatch):
    """What `choose_lanes` is asked; it answers one lane."""
    given = {}

    def choose(work, **settings):
        given.update(settings, work=work)
        return LaneChoice(1, 1, {}, "im2col")

    monkeypatch.setattr(placing, "choose_lanes", choose)
    return given


def test_lanes_are_chosen_by_what_the_runs_own_clients_wait(asked):
    """One client of 9 batches beside three of one, in blocks of one lane and of two."""
    data = make_user_dataset()
    sizes = [36, 4, 4, 4]
    ends = np.cumsum(sizes)
    clients = [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    one = make_spec(num_clients=4, local_epochs=1, batch_size=4, participation=1.0)
    for blocks in (1, 2):
        prepare_group(
            [one],
            UserObjects(data, partition=partition_from_clients(clients)),
            placement=Placement(devices=1, blocks=blocks, memory=10**9),
        )
        # 12 steps in all; the longest lane has 9 wherever there are two.
        assert asked["idle_factor"](1) == pytest.approx(1 if blocks == 1 else 9 * 2 / 12)
        assert asked["idle_factor"](2) == pytest.approx(9 * 2 * blocks / 12)
    assert asked["memory_bytes"] == 10**9 and asked["cohort_size"] == 4


def test_pairs_are_timed_where_they_may_go_side_by_side(asked, monkeypatch):
    one = make_spec("feddm", options={"ipc": 2, "steps": 2, "server_epochs": 1})
    prepare_group([one], UserObjects(make_user_dataset()))
    assert not asked  # on a CPU they go in turn
    monkeypatch.setattr(placing.jax, "default_backend", lambda: "gpu")
    group = prepare_group([one], UserObjects(make_user_dataset()))
    pairs = [f.scheduler.work_counts.pairs.max() for f in group.prepared_runs]
    assert asked["work"].images_per_pair == 2 and asked["cohort_size"] == max(pairs) > 4


@pytest.mark.slow
def test_the_convolutions_that_were_chosen_enter_the_programs_and_no_name(asked):
    one = make_spec(model="convnet", width=4, depth=1, rounds=1)
    group = prepare_group([one], UserObjects(make_user_dataset()))
    assert group.lane_choice.conv_impl == "im2col"
    model = group.program.signature.training.task.model
    variables = jax.eval_shape(model.init, jax.random.key(0))
    image = np.zeros((1, *model.input_shape), np.float32)
    text = str(jax.make_jaxpr(functools.partial(model.apply, train=False))(variables, image))
    assert "impl='im2col'" in text and "impl='auto'" not in text
    result = simulate(one, dataset=make_user_dataset())
    assert result.summary["conv_impl"] == "im2col"
    by_hand = simulate(one, dataset=make_user_dataset(), placement=Placement(lanes=1))
    assert by_hand.summary["conv_impl"] == "auto" and by_hand.digest() == result.digest()
