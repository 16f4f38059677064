"""Grids: every combination once, hyperparameters only for methods that have them."""

import numpy as np
import pytest

from fedjax_het import ConfigError, RunSpec, grid, register_partition
from fedjax_het.cli import _parse_command, main
from fedjax_het.cli.sweep import SweepCommand, build_run_specs
from fedjax_het.runtime.result_display import (
    format_run_label,
    format_settings,
    list_varying_settings,
)
from fedjax_het.utils.command_line import parse_flags
from fedjax_het.utils.config import to_json_value
from fedjax_het.utils.yaml_files import dump_yaml


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
    actual = [(spec.algorithm, spec.local_epochs) for spec in specs]
    assert actual == [("fedavg", 2), ("fedavg", 3), ("fedaf", None)]
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


def split_mine(rng, labels, num_clients, *, beta, sizes=(1, 2)):
    return [np.arange(3)] * num_clients


# Settings, the swept setting, its values in the runs of the grid.
OPTION_LISTS = {
    "unannotated": (
        {"partition": "mine", "partition_options": {"beta": [0.1, 0.5], "sizes": [3, 4]}},
        [{"beta": 0.1, "sizes": [3, 4]}, {"beta": 0.5, "sizes": [3, 4]}],
    ),
    "array": (
        {"partition": "mine", "partition_options": {"beta": np.array([0.1, 0.5])}},
        [{"beta": 0.1}, {"beta": 0.5}],
    ),
    "lists": (
        {"partition": "mine", "partition_options": {"beta": 1, "sizes": [[3, 4], [5]]}},
        [{"beta": 1, "sizes": [3, 4]}, {"beta": 1, "sizes": [5]}],
    ),
    "list of lists": (
        {
            "partition": "grouped",
            "partition_options": {"groups": [[0, 1], [2]], "dominating_share": [0.7, 0.9]},
        },
        [{"groups": [[0, 1], [2]], "dominating_share": share} for share in (0.7, 0.9)],
    ),
    "synonym": (
        {"partition": "classes_per_client", "partition_options": {"classes": [1, 2]}},
        [{"classes": 1}, {"classes": 2}],
    ),
    "mappings": (
        {"partition": "mine", "partition_options": [{"beta": 1}, {"beta": [2, 3]}]},
        [{"beta": 1}, {"beta": 2}, {"beta": 3}],
    ),
    "server": (
        {"algorithm": "feddf", "server_options": {"size": (20, 30)}},
        [{"size": 20}, {"size": 30}],
    ),
    "server list": (
        {"algorithm": "fsl", "server_data": "glyphs", "server_options": {"sizes": [90, 100]}},
        [{"sizes": [90, 100]}],
    ),
    "network list": ({"network_options": {"hidden": [8, 16]}}, [{"hidden": [8, 16]}]),
    "network lists": (
        {"network_options": {"hidden": [[8, 16], [4]]}},
        [{"hidden": [8, 16]}, {"hidden": [4]}],
    ),
    "user network": (
        {"model": "user", "network_options": {"hidden": [8, 16]}},
        [{"hidden": [8, 16]}],
    ),
    "optimizer": (
        {"local_optimizer": "nadam", "optimizer_options": {"nesterov": [True, False]}},
        [{"nesterov": True}, {"nesterov": False}],
    ),
}


@pytest.mark.parametrize("case", OPTION_LISTS)
def test_grid_sweeps_option_lists(case):
    register_partition("mine", split_mine)
    settings, expected = OPTION_LISTS[case]
    (name,) = [name for name in settings if name.endswith("_options")]
    specs = grid(**{"model": "mlp", "num_clients": 10, "seed": [0, 1], **settings})
    assert sorted(str(getattr(spec, name)) for spec in specs) == sorted(
        2 * list(map(str, expected))
    )


@pytest.mark.parametrize("case", sorted(OPTION_LISTS.keys() - {"mappings"}))
def test_file_sweeps_option_lists(case, tmp_path):
    register_partition("mine", split_mine)
    settings = {"model": "mlp", "num_clients": 10, "seed": [0, 1], **OPTION_LISTS[case][0]}
    path = tmp_path / "sweep.yaml"
    path.write_text(dump_yaml(to_json_value("settings", settings)))
    specs = build_run_specs(_parse_command(SweepCommand, ["--config", str(path)]))
    assert specs == grid(**settings)


@pytest.mark.parametrize(
    ("words", "name", "expected"),
    [
        (
            "--partition mine --partition-option beta=0.1,0.5 sizes=[3,4]",
            "partition_options",
            [{"beta": 0.1, "sizes": [3, 4]}, {"beta": 0.5, "sizes": [3, 4]}],
        ),
        (
            "--partition mine --partition-option beta=2 sizes=[3,4],[5]",
            "partition_options",
            [{"beta": 2, "sizes": [3, 4]}, {"beta": 2, "sizes": [5]}],
        ),
        (
            "--partition grouped --partition-option groups=[[0,1],[2,3]] dominating_share=0.7",
            "partition_options",
            [{"groups": [[0, 1], [2, 3]], "dominating_share": 0.7}],
        ),
        ("--network-option hidden=[8,16]", "network_options", [{"hidden": [8, 16]}]),
        ("--algorithm feddf --server-option size=20,30", "server_options", [{"size": 20}, {"size": 30}]),
        (
            "--local-optimizer nadam --optimizer-option nesterov=true,false",
            "optimizer_options",
            [{"nesterov": True}, {"nesterov": False}],
        ),
    ],
)  # fmt: skip
def test_sweep_command_sweeps_option_lists(words, name, expected):
    register_partition("mine", split_mine)
    line = f"--model mlp --num-clients 10 {words}"
    specs = build_run_specs(SweepCommand(**parse_flags(SweepCommand, line.split())))
    assert [getattr(spec, name) for spec in specs] == expected
    assert len({format_run_label(spec) for spec in specs}) == len(expected)


@pytest.mark.parametrize("value", ["0.1,", ",0.1", "0.1,,0.5", ","])
def test_sweep_command_rejects_empty_values(value):
    register_partition("mine", split_mine)
    words = ["--partition", "mine", "--partition-option", f"beta={value}"]
    with pytest.raises(
        ConfigError, match=r"partition-option beta = .*expected a value around each"
    ):
        parse_flags(SweepCommand, words)


def test_sweep_command_keeps_quoted_commas():
    words = ["--option", 'a="x, y",z', 'b="x,y"', 'c=["x,y"],["z"]', "d=1,2", "--model=mlp"]
    options = parse_flags(SweepCommand, words)["options"]
    assert options == {"a": ("x, y", "z"), "b": ("x,y",), "c": (["x,y"], ["z"]), "d": (1, 2)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algoritm": "fedavg"}, "did you mean 'algorithm'"),
        ({"algorithm": "fedagv"}, "did you mean 'fedavg'"),
        ({"hp": {"prox_mu": 0.1}}, "hp prox_mu: none of the methods .fedavg. has it"),
        ({"options": {"preset": "code"}}, "options preset: none"),
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


@pytest.mark.parametrize("word", ["true", "True", "TRUE"])
def test_words_of_optional_booleans(word):
    assert parse_flags(SweepCommand, ["--client-tests", word])["client_tests"] == (True,)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("num_clients", [4, 5]),
        ("batch_size", [32, 64]),
        ("participation", [0.5, 1.0]),
        ("rounds", [1, 50]),
        ("partition", ["iid", "dirichlet_capped"]),
        ("optimizer_state", ["keep", "reset"]),
        ("averaging", ["uniform", "weighted"]),
        ("partition_seed", [1, 2]),
        ("validation", [None, 0.1]),
        ("learning_rate", [0.01, 0.1]),
    ],
)
def test_labels_distinguish_runs_of_a_sweep(name, values):
    specs = [spec.resolved() for spec in grid(algorithm="fedavg", seed=[0, 1], **{name: values})]
    varying = list_varying_settings(specs)
    assert {"seed", name} <= {*varying}
    assert len({format_run_label(spec, varying=varying) for spec in specs}) == 4
    assert len({format_settings(spec, {}, varying) for spec in specs}) == 4
    assert format_run_label(specs[0], varying=["seed"]) == format_run_label(specs[0])
