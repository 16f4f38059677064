"""Kinds of system heterogeneity of the user: runs, identity, and one line for mistakes."""

import json
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from fedjax_het import ConfigError, RunSpec, register_system, simulate
from fedjax_het.cli import main
from fedjax_het.runtime.identity import collect_function_digests
from fedjax_het.systems import (
    SYSTEMS,
    AdaptiveSelection,
    AvailabilityModel,
    ClientSelection,
    DeviceModel,
)

SETTINGS = {"model": "mlp", "num_clients": 4, "participation": 0.5, "rounds": 3}
TIMES = {"add_times": lambda self, rates, federation: rates}
FILE = """
from dataclasses import dataclass
from typing import ClassVar

from fedjax_het import register_system
from fedjax_het.systems import AvailabilityModel


@register_system
@dataclass(frozen=True, kw_only=True)
class EvenRounds(AvailabilityModel):
    "Clients with even ids are available in even rounds."
    period: int = 2
    name: ClassVar[str] = "even_rounds"
    strength: ClassVar[str] = "period"

    def start(self, federation):
        return None

    def find_available(self, state, federation, round_index, time):
        import numpy as np

        ids = np.arange(federation.num_clients)
        return (ids % self.period == 0) & (round_index % self.period == 0), state
"""


@pytest.fixture(autouse=True)
def reset_systems():
    yield
    SYSTEMS.reset()


def make_kind(base, **functions):
    """A registered kind with these functions."""
    values = {"__module__": __name__, "level": 1.0, "name": "mine", "strength": "level"}
    values |= functions
    annotations = {"level": float, "name": ClassVar[str], "strength": ClassVar[str]}
    kind = type("Mine", (base,), {**values, "__annotations__": annotations})
    return register_system(dataclass(frozen=True, kw_only=True)(kind))


def test_selection_of_the_largest_clients():
    def select(self, federation, available, count, *path):
        return available[np.argsort(-federation.sizes[available], kind="stable")][:count]

    make_kind(ClientSelection, select=select)
    spec = RunSpec(system="mine", alpha=0.1, **SETTINGS)
    result = simulate(spec)
    largest = np.sort(result.partition.sizes)[-2:].sum()
    epochs = spec.resolved().local_epochs
    np.testing.assert_array_equal(result.metrics["client_samples"], [epochs * largest] * 3)
    digests = collect_function_digests(spec.resolved())
    make_kind(ClientSelection, select=lambda self, f, available, count, *path: available[:count])
    assert digests != collect_function_digests(spec.resolved()) and digests


def test_devices_of_the_user_give_rounds_a_duration():
    def add_times(self, rates, federation):
        return rates._replace(step_seconds=np.full(federation.num_clients, 2.0))

    make_kind(DeviceModel, add_times=add_times)
    settings = {**SETTINGS, "participation": 1.0, "partition": "iid", "local_steps": 5}
    result = simulate(RunSpec(system=["mine", "deadline:seconds=9"], **settings))
    assert result.metrics["simulated_seconds"].tolist() == [9.0] * 3
    assert result.bytes_up == 0


def test_devices_of_the_user_read_the_traffic():
    def add_times(self, rates, federation):
        seconds = np.full(federation.num_clients, federation.bytes_up / 1000)
        return rates._replace(transfer_seconds=seconds)

    make_kind(DeviceModel, add_times=add_times)
    result = simulate(RunSpec(system="mine", **SETTINGS))
    per_client = result.metrics["bytes_up"] / 2
    np.testing.assert_allclose(result.metrics["simulated_seconds"], per_client / 1000)


def test_kind_of_a_file_on_the_command_line(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    options = ["--model", "mlp", "--rounds", "2", "--num-clients", "4", "--json"]
    assert main(["run", "--import", str(path), "--system", "even_rounds", *options]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["functions"].keys() == {"system even_rounds"}
    assert record["bytes_up"] == record["bytes_down"] > 0


@pytest.mark.parametrize(
    ("base", "functions", "message"),
    [
        (int, {}, "expected a subclass of DeviceModel, AvailabilityModel, ClientSelection"),
        (DeviceModel, {}, "function add_times of Mine"),
        (DeviceModel, {**TIMES, "strength": "size"}, "Mine.strength = .size."),
        (DeviceModel, {**TIMES, "name": "speed"}, "name = .speed.*no system of the package"),
    ],
)
def test_invalid_class_is_one_line(base, functions, message):
    with pytest.raises(ConfigError, match=message):
        make_kind(base, **functions)


@pytest.mark.parametrize(
    ("base", "functions", "message"),
    [
        (ClientSelection, {"select": lambda s, f, a, n, *p: [0, 0]}, "at most 2 distinct ids"),
        (ClientSelection, {"select": lambda s, f, a, n, *p: [9]}, r"are \[9\]: expected at most"),
        (ClientSelection, {"select": lambda s, f, a, n, *p: [0.5]}, "distinct ids of the 4"),
        (
            AvailabilityModel,
            {"start": lambda s, f: 0, "find_available": lambda s, *a: (np.ones(3, bool), 0)},
            "expected 4 booleans",
        ),
        (
            DeviceModel,
            {"add_times": lambda s, r, f: r._replace(step_seconds=-np.ones(4))},
            "step_seconds .*expected 4 finite numbers >= 0",
        ),
        (DeviceModel, {"add_times": lambda s, r, f: None}, "add_times returned None: expected Dev"),
        (DeviceModel, {"add_times": lambda s, r, f: 1 / 0}, "fails .ZeroDivisionError: division"),
        (ClientSelection, {"select": lambda s, f, a, n, *p: {}["x"]}, "fails .KeyError: 'x'"),
        (
            AvailabilityModel,
            {"start": lambda s, f: 0, "find_available": lambda s, *a: np.ones(4, bool)},
            "find_available returned .* expected two values",
        ),
        (
            AvailabilityModel,
            {
                "start": lambda s, f: 0,
                "find_available": lambda s, *a: (np.ones(4, bool), 0),
                "find_next_time": lambda s, state, time: None,
            },
            "find_next_time returned None: expected a number >= 0",
        ),
        (
            AdaptiveSelection,
            {
                "start": lambda s, f: 0,
                "select_by_losses": lambda s, *a, **k: [0, 1, 2],
                "record_losses": lambda s, state, losses: state,
            },
            "select_by_losses returned .0, 1, 2.: expected two values",
        ),
    ],
)
def test_invalid_return_value_is_one_line(base, functions, message):
    make_kind(base, **functions)
    with pytest.raises(ConfigError, match=f"system 'mine'.* {message}") as caught:
        simulate(RunSpec(system="mine", **SETTINGS))
    assert "\n" not in str(caught.value)
