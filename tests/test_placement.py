"""Where runs go is said once, and checked where it is said."""

import jax
import pytest
from support.data import user_dataset
from support.running import spec

from fedjax_het import ConfigError, Placement, simulate, sweep

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
        simulate(spec(), dataset=user_dataset(), placement=placement)
    with pytest.raises(ConfigError, match=expected):
        sweep([spec()], dataset=user_dataset(), placement=placement)


def test_devices_by_number_and_by_name_are_the_same():
    devices = jax.devices()
    assert Placement(devices=1).present_devices() == devices[:1]
    assert Placement(devices=devices[-1:]).present_devices() == devices[-1:]
    assert Placement().present_devices() == devices


def test_it_starts_no_backend(monkeypatch):
    monkeypatch.setattr(jax, "devices", None)
    assert Placement(lanes=2, devices=64).lanes == 2
