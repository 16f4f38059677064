"""Grids: every combination once, hyperparameters only for methods that have them."""

import pytest

from fedjax_het import ConfigError, RunSpec, grid
from fedjax_het.cli import main
from fedjax_het.cli.sweep import SweepCommand, build_run_specs


def test_grid_combines_values():
    specs = grid(
        algorithm=["fedavg", "fedprox"],
        alpha=[0.01, 0.1],
        seed=range(3),
        model="mlp",
        hp={"prox_mu": [0.001, 0.01]},
    )
    assert len(specs) == 6 + 12 and len({spec.digest() for spec in specs}) == 18
    assert {spec.algorithm for spec in specs if spec.hp} == {"fedprox"}
    assert specs[0] == RunSpec("fedavg", model="mlp", alpha=0.01, seed=0)
    assert specs[6].hp == {"prox_mu": 0.001} and specs[7].hp == {"prox_mu": 0.01}


def test_grid_drops_unused_local_training_settings():
    specs = grid(algorithm=["fedavg", "fedaf"], local_epochs=[2, 3], options={"ipc": 5})
    found = [(spec.algorithm, spec.local_epochs) for spec in specs]
    assert found == [("fedavg", 2), ("fedavg", 3), ("fedaf", None)]
    with pytest.raises(ConfigError, match="local_epochs = 2: expected no value"):
        grid(algorithm="fedaf", local_epochs=2)


def test_grid_removes_duplicate_runs():
    assert len(grid(algorithm=["fedavg", "fedavg"], seed=[1, 1], hp={"local_lr": [0.1, 0.1]})) == 1
    # The default alpha does not apply to this partition.
    assert len(grid(partition="iid", seed=0)) == 1


def test_grid_applies_options_per_method():
    specs = grid(
        algorithm=["dynafed", "scaffold"],
        options={"preset": ["paper", "code"], "option": ["I", "II"]},
        hp={"fine_tune_lr": [1e-4, 1e-3]},
    )
    assert sum(spec.algorithm == "dynafed" for spec in specs) == 4
    assert sum(spec.algorithm == "scaffold" for spec in specs) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algoritm": "fedavg"}, "did you mean 'algorithm'"),
        ({"algorithm": "fedagv"}, "did you mean 'fedavg'"),
        ({"hp": {"prox_mu": 0.1}}, "hp 'prox_mu': none of the methods .fedavg. has it"),
        ({"options": {"preset": "code"}}, "options 'preset': none"),
        ({"alpha": []}, "alpha = .*expected 1 to 1000000 values"),
        ({"alpha": [0.1, -1.0]}, "alpha = -1.0"),
    ],
)
def test_grid_rejects_unknown_names(settings, message):
    with pytest.raises(ConfigError, match=message):
        grid(**settings)


def test_sweep_command_builds_grid():
    values = {"algorithm": ("fedavg", "fedprox"), "alpha": (0.01, 0.1), "model": ("mlp",)}
    values["hp"] = {"prox_mu": (0.001, 0.01)}
    command = SweepCommand(**values, seeds=(0, 1, 2))
    assert build_run_specs(command) == grid(**values, seed=[0, 1, 2])


@pytest.mark.slow
def test_sweep_command_runs_and_lists(tmp_path, capsys):
    words = ["sweep", "--model", "mlp", "--rounds", "1", "--alpha", "0.1", "1"]
    words += ["--num-clients", "5", "--output-dir", str(tmp_path)]
    assert main([*words, "--algorithm", "fedprox"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert '"runs": 2' in lines[-1] and '"results": 2' in lines[-1]
    words += ["--algorithm", "fedavg", "fedprox"]
    assert main([*words, "--list"]) == 0
    listed = capsys.readouterr().out
    assert listed.count("done") == 2 and listed.count("missing") == 2
    assert main(words) == 0
    assert '"results": 4' in capsys.readouterr().out.splitlines()[-1]
