"""Runs with system heterogeneity: limits, invariance to placement and resuming, and costs."""

import numpy as np
import pytest
from support.small_runs import KilledError, assert_results_equal, make_killing_callback

from fedjax_het import ConfigError, Placement, RunSpec, grid, simulate, sweep
from fedjax_het.systems import SYSTEM_SETTING, SYSTEMS, Deadline, Speed

SETTINGS = {
    "model": "mlp",
    "num_clients": 8,
    "participation": 0.5,
    "rounds": 5,
    "local_epochs": 3,
    "alpha": 0.3,
    "learning_rate": 0.1,
}
COMBINED = [
    *(
        "speed:sigma=1,step_seconds=0.1",
        "bandwidth:sigma=1,upload=1e5",
        "markov:leave=0.3,join=0.7",
    ),
    *("over_selection:factor=1.5", "partial_work:unit=steps", "dropout:probability=0.2"),
    "deadline:seconds=5,late=partial",
]


def run(system=None, algorithm="fedavg", **settings):
    return simulate(RunSpec(algorithm, **{**SETTINGS, "system": system, **settings}))


def assert_metrics_equal(a, b, *, ignored=("simulated_seconds",)):
    for name in (a.metrics.keys() | b.metrics.keys()) - {*ignored}:
        np.testing.assert_array_equal(a.metrics[name], b.metrics[name], err_msg=name)


@pytest.mark.parametrize("name", [n for n in SYSTEMS if SYSTEMS[n].make.neutral is not None])
def test_neutral_kind_is_the_plain_run(name):
    kind = SYSTEMS[name].make
    specs = [
        RunSpec(**SETTINGS, system={"speed.sigma": 1.0, **settings}).resolved()
        for settings in ({}, {f"{name}.{kind.strength}": kind.neutral})
    ]
    assert specs[0] == specs[1] and specs[0].digest() == specs[1].digest()


def test_synchronous_rounds_equal_the_plain_run():
    plain, timed = run(), run(["speed:sigma=1", "bandwidth", "deadline:seconds=1e9"])
    assert_metrics_equal(timed, plain)
    assert "simulated_seconds" not in plain.metrics
    assert (timed.metrics["simulated_seconds"] > 0).all()


@pytest.mark.slow
def test_results_do_not_depend_on_placement_and_sweep():
    spec = RunSpec("scaffold", **SETTINGS, system=COMBINED, client_tests=True)
    reference = simulate(spec)
    assert len(np.unique(reference.metrics["bytes_up"])) > 1
    for placement in (Placement(lanes=2), Placement(devices=2), Placement(devices=1, lanes=4)):
        assert_results_equal(simulate(spec, placement=placement), reference, rtol=1e-4, atol=6e-3)
    values = [0.0, 0.5, 0.9]
    specs = grid(**SETTINGS, system={"dropout.probability": values})
    assert [spec.system for spec in specs] == [{"dropout.probability": v} for v in values]
    results = sweep(specs, progress=None).results
    for spec, result in zip(specs, results, strict=True):
        assert_results_equal(result, simulate(spec), rtol=1e-4, atol=6e-3)


def test_resume_is_bit_equal(eager, tmp_path):
    spec = RunSpec("scaffold", **SETTINGS, system=COMBINED)
    whole = simulate(spec)
    with pytest.raises(KilledError):
        simulate(spec, output_dir=tmp_path, progress=make_killing_callback(1))
    assert (tmp_path / "checkpoint.npz").exists()
    assert_results_equal(simulate(spec, output_dir=tmp_path, resume=True), whole)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["feddm", "fedaf"])
def test_condensing_clients_take_time_and_drop_out(algorithm):
    options = {"ipc": 1, "steps": 2, "server_epochs": 1}
    settings = {**SETTINGS, "options": options, "rounds": 3}
    del settings["local_epochs"], settings["learning_rate"]
    settings |= {"model": "convnet", "width": 4, "depth": 1}
    system = ["speed:sigma=1", "bandwidth:sigma=0,upload=100", "dropout:probability=0.5"]
    plain, other = (simulate(RunSpec(algorithm, **settings, system=s)) for s in (None, system))
    assert np.isfinite(other.metrics["train_loss"]).all()
    assert other.bytes_up < plain.bytes_up and other.bytes_down == plain.bytes_down
    # A client sends its condensed classes at 100 bytes per second.
    lower = other.metrics["bytes_up"] / SETTINGS["num_clients"] / 100
    assert (other.metrics["simulated_seconds"] > lower).all()
    with pytest.raises(ConfigError, match="condense data instead of training"):
        RunSpec(algorithm, **settings, system="partial_work")


def test_costs_count_selected_and_arrived_clients():
    result, plain = run(["speed", "over_selection:factor=2"]), run()
    np.testing.assert_array_equal(result.metrics["bytes_up"], plain.metrics["bytes_up"])
    np.testing.assert_array_equal(result.metrics["bytes_down"], 2 * plain.metrics["bytes_down"])
    cost = result.costs_to(0.0)
    assert cost.simulated_seconds == result.metrics["simulated_seconds"][0]
    total = result.metrics["simulated_seconds"].sum()
    assert result.summary["simulated_seconds"] == pytest.approx(total)
    assert f"{total:,.0f} s of simulated time" in repr(result)


def test_run_without_an_update_has_a_warning(caplog):
    expected = "no client sends an update in any round"
    run("availability:probability=0", rounds=1)
    assert caplog.text.count(expected) == 1
    caplog.clear()
    specs = grid(**{**SETTINGS, "rounds": 1}, system="dropout:probability=1", seed=[0, 1])
    sweep(specs, progress=None)
    assert f"note: {expected}: the model does not change" in caplog.text


@pytest.mark.parametrize(
    ("system", "settings", "message"),
    [
        ("partial_work", {"local_epochs": 1}, "partial_work has no effect with local_epochs = 1"),
        ("partial_work:unit=steps", {"local_epochs": 1}, ""),
        ("partial_work", {}, ""),
        *(
            (kind, {"participation": 1}, f"{kind} has no effect with participation = 1")
            for kind in ("selection_by_size", "power_of_choice", "oort", "over_selection")
        ),
        ("cyclic_selection", {"participation": 1}, ""),
        ("oort:blacklist_rounds=3", {"participation": 1}, ""),
        ("selection_by_size", {}, ""),
    ],
)
def test_kinds_without_effect_have_a_warning(system, settings, message):
    spec = RunSpec(**{**SETTINGS, **settings}, system=["speed", system]).resolved()
    warnings = [
        text for kind in SYSTEM_SETTING.parse(spec.system) for text in kind.list_warnings(spec)
    ]
    assert len(warnings) == bool(message) and message in "".join(warnings)


def test_a_default_in_the_text_does_not_change_the_run():
    texts = ("deadline:seconds=5", "deadline:seconds=5,late=drop"), ("noise", "noise:levels=ramp")
    for (short, long), name in zip(texts, ("system", "skew"), strict=True):
        specs = [
            RunSpec(**SETTINGS, **{name: ["speed", text] if name == "system" else text})
            for text in (short, long)
        ]
        assert specs[0].digest() == specs[1].digest()


def test_rounds_without_a_client_keep_the_model():
    result = run("availability:probability=0.05", rounds=12, eval_every=1)
    is_empty = result.metrics["bytes_up"] == 0
    assert 0 < is_empty.sum() < 12 and np.isnan(result.metrics["train_loss"][is_empty]).all()
    accuracy = result.metrics["test_accuracy"]
    np.testing.assert_array_equal(accuracy[1:][is_empty[1:]], accuracy[:-1][is_empty[1:]])


def test_lanes_do_the_work_of_unequal_clients():
    spec = RunSpec(
        **{
            **SETTINGS,
            "num_clients": 100,
            "local_epochs": 1,
            "participation": 1.0,
            "rounds": 2,
            "alpha": None,
            "batch_size": 1,
        },
        partition="iid",
        skew="power_law:exponent=1",
        system="partial_work:stragglers=1,unit=steps",
    )
    result = simulate(spec, placement=Placement(devices=1, lanes=2))
    assert result.summary["useful_work_fraction"] > 0.95


def test_forms_of_the_setting_are_equal():
    forms = (
        ["speed:sigma=1.0", "deadline:seconds=5,late=partial"],
        [Deadline(seconds=5, late="partial"), Speed(sigma=1)],
        {"deadline.late": "partial", "speed.sigma": 1.0, "deadline.seconds": 5.0},
    )
    specs = [RunSpec(**SETTINGS, system=form).resolved() for form in forms]
    assert len({spec.digest() for spec in specs}) == 1


def test_trace_is_part_of_the_record(tmp_path):
    path = tmp_path / "devices.csv"
    path.write_text("step_seconds\n1\n2\n")
    spec = RunSpec(**SETTINGS, system=f"device_trace:path={path}").resolved()
    path.write_text("step_seconds\n1\n3\n")
    changed = RunSpec(**SETTINGS, system=f"device_trace:path={path}").resolved()
    assert spec.digest() != changed.digest()
    with pytest.raises(ConfigError, match="expected the file with the digest"):
        simulate(spec)


@pytest.mark.parametrize(
    ("system", "message"),
    [
        ("sped", "system = 'sped' is unknown: did you mean 'speed'"),
        ("0.0", "system = '0.0' is unknown"),
        ("speed:sigma=-1", "system speed:sigma = -1: expected a number in .0, 10"),
        ("speed:sigma=1,sigma=2", "system = 'speed:sigma=1,sigma=2': expected sigma once"),
        ({"speed": {"sigma": 1}}, "expected keys kind.field such as 'speed.sigma'"),
        ("deadline:seconds=5", "system deadline: expected speed, bandwidth or device_trace"),
        (
            "device_trace:path=none.csv",
            "system device_trace:path = 'none.csv': expected a CSV file",
        ),
        (["availability", "markov"], "system: availability and markov: expected one of them"),
        (["speed", "deadline:late=never"], "system deadline:late = 'never' .*expected drop"),
        ("deadline:seconds=inf,late=never", "system deadline:late = 'never' .*expected drop"),
    ],
)
def test_wrong_system_is_one_line(system, message):
    with pytest.raises(ConfigError, match=message):
        RunSpec(**SETTINGS, system=system)
