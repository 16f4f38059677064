"""Protocols: the default, the former default of stored results, one protocol per comparison."""

import json

import numpy as np
import pandas as pd
import pytest
from support.stored_results import write_result

from fedjax_het import ConfigError, RunSpec, federation, grid, load_results, sweep
from fedjax_het.algorithms import METHODS
from fedjax_het.analysis import (
    TableCell,
    make_overview_table,
    make_pivot_table,
    plot_heat_map,
    plot_learning_curves,
    plot_metric_vs_alpha,
    plot_table_curves,
)
from fedjax_het.cli import main
from fedjax_het.cli.options import load_config_file
from fedjax_het.config import comparison
from fedjax_het.config.protocols import PROTOCOLS, describe_protocol
from fedjax_het.config.resolve import NAMES
from fedjax_het.config.run_spec import hash_settings
from fedjax_het.config.settings import get_former_protocol
from fedjax_het.data import DATASETS
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.runtime.result_display import format_run_label, format_settings

PAPERS = {
    "dynafed": "dynafed",
    "fedaf": "fedaf",
    "feddm": "fedaf",
    "fedamp": "fedamp",
    "heurfedamp": "fedamp",
    "fsl": "fsl",
    "fsl_p": "fsl",
    "rofsl": "fsl",
    "data_sharing": "fsl",
}


@pytest.fixture(autouse=True)
def _forget_warnings():
    comparison.warn_once.cache_clear()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_protocols_have_no_constants_of_images_for_other_inputs(protocol):
    for name in DATASETS.built_in:
        if defaults := DATASETS[name].defaults:
            spec = RunSpec(dataset=name, protocol=protocol).resolved()
            assert spec.normalization is None
            assert {key: getattr(spec, key) for key in defaults} == dict(defaults)
            assert spec.partition != "natural" or spec.test_per_client is None


def test_standard_protocol_is_niid_bench():
    run = RunSpec("fedavg", "cifar10").resolved()
    assert (run.partition, run.alpha, run.model) == ("dirichlet_capped", 0.5, "cnn")
    assert (run.num_clients, run.participation, run.rounds) == (10, 1.0, 50)
    assert (run.local_epochs, run.batch_size, run.local_optimizer) == (10, 64, "momentum")
    assert (run.optimizer_state, run.averaging) == ("reset", "weighted")
    expected = {"local_lr": 0.01, "local_momentum": 0.9, "local_weight_decay": 1e-5}
    assert run.hyperparameters == {"server_lr": 1.0} | expected
    assert RunSpec("fedavg", "digits").resolved().model == "mlp"  # too small for cnn
    # Other optimizers have their own numbers.
    assert RunSpec("fedavg", local_optimizer="adam").resolved().hyperparameters["local_lr"] == 1e-3
    assert (
        "local_weight_decay"
        not in RunSpec("fedavg", local_optimizer="adam").resolved().hyperparameters
    )


@pytest.mark.parametrize("name", METHODS)
def test_default_protocol_is_standard_or_own_paper(name):
    expected = PAPERS.get(name, "standard")
    assert RunSpec(name).resolved().protocol == expected == METHODS[name].protocol
    assert RunSpec(name, protocol="own").resolved() == RunSpec(name).resolved()
    assert RunSpec(name, protocol="standard").resolved().protocol == "standard"


def test_unknown_protocol_is_one_line():
    with pytest.raises(ConfigError, match="protocol = 'standart' is unknown"):
        RunSpec(protocol="standart").resolved()
    assert {*NAMES["protocol"]} == {*PROTOCOLS, "own"}


@pytest.mark.parametrize("name", METHODS)
def test_digest_leaves_out_former_default_protocol(name):
    former = RunSpec(name, protocol=get_former_protocol(name)).resolved()
    values = former.to_dict()
    assert values.pop("protocol") == former.protocol
    # As version 0.6 stored the run.
    stored = RunSpec.from_dict(values)
    assert stored == former and stored.resolved() == former
    assert stored.digest() == hash_settings(stored) == former.digest()
    other = RunSpec(name, protocol="standard", num_clients=7).resolved()
    assert other.protocol != former.protocol and other.digest() != former.digest()


# Digests of version 0.6, whose runs of these methods named no protocol.
FORMER_DIGESTS = {
    "fedavg": "dc0ef2ed0d81ce24",
    "ditto": "759a3d5896b73a4f",
    "fsl": "26b7df8c1a663a18",
    "feddm": "bb3a6865a15c9ef6",
}


@pytest.mark.parametrize("name", FORMER_DIGESTS)
def test_former_runs_keep_their_digest(name):
    run = RunSpec(name, "digits", protocol=get_former_protocol(name), model="mlp")
    assert run.digest() == FORMER_DIGESTS[name]


def test_settings_of_a_user_are_no_former_run():
    given = {"algorithm": "fedavg", "num_clients": 20, "rounds": 5}
    assert RunSpec.from_dict(given).resolved().protocol == "standard"
    complete = RunSpec(**RunSpec().resolved().to_dict() | {"protocol": None})
    assert RunSpec.from_dict(complete.to_dict()) == complete


def test_files_of_former_results_keep_their_protocol(tmp_path):
    run = RunSpec("ditto", protocol="fedamp").resolved()
    values = {name: value for name, value in run.to_dict().items() if name != "protocol"}
    record = tmp_path / "result.json"
    record.write_text(json.dumps({"spec": values, "summary": {}}))
    yaml = tmp_path / "run.yaml"
    given = {name: value for name, value in values.items() if value not in (None, {})}
    yaml.write_text(json.dumps({name.replace("_", "-"): value for name, value in given.items()}))
    for path in (record, yaml):
        assert RunSpec(**load_config_file(path)).digest() == run.digest()


def test_grid_has_one_protocol(caplog):
    specs = grid(algorithm=["fedavg", "ditto", "fsl"], model="mlp", num_clients=20)
    assert {spec.resolved().protocol for spec in specs} == {"standard"}
    first, second = (record.getMessage() for record in caplog.records)
    assert first == (
        "protocol = 'standard' for all methods, since they differ in their default protocols "
        "(standard: FedAvg, Ditto; fsl: FSL); 'own' selects the defaults"
    )
    assert second == (
        "methods differ in settings that are not given: client_tests (False: FedAvg, FSL; True: "
        "Ditto); client_tests=True tests all methods on clients' own data"
    )
    names = ("partition", "alpha", "local_optimizer", "batch_size", "local_epochs", "rounds")
    assert len({tuple(getattr(spec.resolved(), name) for name in names) for spec in specs}) == 1


def test_grid_of_one_default_keeps_it(caplog):
    assert {spec.resolved().protocol for spec in grid(algorithm=["fsl", "fsl_p"])} == {"fsl"}
    assert {spec.resolved().protocol for spec in grid(algorithm=["fedavg", "scaffold"])} == {
        "standard"
    }
    assert not caplog.records


def test_grid_with_own_protocols_lists_differences(caplog):
    specs = grid(
        algorithm=["fedavg", "ditto", "fedamp"], protocol="own", num_clients=20, client_tests=True
    )
    assert [spec.resolved().protocol for spec in specs] == ["standard", "standard", "fedamp"]
    (text,) = (record.getMessage() for record in caplog.records)
    assert "partition (dirichlet_capped: FedAvg, Ditto; grouped: FedAMP)" in text
    assert "rounds (50: FedAvg, Ditto; 100: FedAMP)" in text
    assert "learning_rate (0.01: FedAvg, Ditto; 0.05: FedAMP)" in text
    assert "normalization" not in text
    fsl = [RunSpec(name, protocol="own").resolved() for name in ("fedavg", "fsl")]
    unequal = comparison.find_unequal_settings(vars(run) for run in fsl)
    assert unequal["normalization"] == {"default": ["fedavg"], "fsl": ["fsl"]}
    # Given settings, and settings that one method does not have, are no difference.
    assert "num_clients" not in text and "client_tests" not in text and "alpha" not in text


def test_swept_settings_are_no_difference(caplog):
    grid(algorithm=["fedavg", "fedprox"], dataset=["digits", "mnist"], local_epochs=[1, 5])
    grid(algorithm=["fedavg", "fedaf"], protocol="fedaf")  # its batches are real images of a class
    assert not caplog.records


def test_specs_made_by_hand_are_compared(caplog):
    small = {"model": "mlp", "rounds": 1, "local_epochs": 1}
    specs = [
        RunSpec("fedavg", **small, num_clients=4, alpha=1.0),
        RunSpec("fedprox", **small, num_clients=5, alpha=1.0, batch_size=32),
    ]
    sweep(specs, progress=None)
    (text,) = (record.getMessage() for record in caplog.records if "differ" in record.getMessage())
    # Both numbers of clients are given.
    assert text.endswith("not given: batch_size (64: FedAvg; 32: FedProx)")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("local_steps", 3), ("lr_schedule", "cosine"), ("validation", 0.1), ("patience", 3)),
        *(("seed", 3), ("partition_seed", 3), ("held_out_clients", 2), ("precision", "bfloat16")),
        *(("network_options", {"hidden": [8]}), ("partition_options", {"min_size": 1})),
    ],
)
def test_a_setting_that_only_one_method_has_from_the_user_is_a_difference(name, value, caplog):
    shared = {"model": "mlp", "partition": "dirichlet_capped"}
    UserObjects().resolve_all(
        [RunSpec("fedavg", **shared, **{name: value}), RunSpec("fedprox", **shared)]
    )
    (text,) = caplog.messages
    assert text.startswith(f"methods differ in settings that are not given: {name}")


def test_settings_of_resolved_runs_count_as_not_given(caplog):
    UserObjects().resolve_all([RunSpec(name).resolved() for name in ("fedavg", "fsl")])
    (text,) = caplog.messages
    assert "protocol (standard: FedAvg; fsl: FSL)" in text


def test_grid_of_several_protocols_has_equal_protocols_for_all_methods(caplog):
    specs = grid(algorithm=["fedavg", "fsl"], protocol=[None, "dynafed"])
    assert [(spec.algorithm, spec.resolved().protocol) for spec in specs] == [
        (name, protocol) for name in ("fedavg", "fsl") for protocol in ("standard", "dynafed")
    ]
    assert caplog.messages[0].startswith("protocol = 'standard' for all methods")


def test_methods_of_the_most_frequent_value_are_others(caplog):
    methods = ["fedavg", "fedprox", "scaffold", "feddyn", "fednova"]
    grid(algorithm=[*methods, "ditto"])
    assert "client_tests (False: others; True: Ditto)" in caplog.text


def test_tables_note_averages_over_unequal_settings(tmp_path):
    for name, alphas in (("fedavg", (0.1, 1.0)), ("fedprox", (0.1,))):
        for alpha in alphas:
            write_result(tmp_path, RunSpec(name, alpha=alpha), np.asarray([0.5]))
    results = load_results(tmp_path)
    notes = make_overview_table(results, by=["algorithm"]).notes
    assert "Methods differ in settings: alpha (0.1, 1: FedAvg; 0.1: FedProx)." in notes
    assert "Methods differ" not in " ".join(make_overview_table(results).notes)


def test_tables_distinguish_networks_and_optimizers_of_the_user(tmp_path):
    spec = RunSpec("fedavg", model="user", local_optimizer="user")
    for network, optimizer in (("a" * 16, "0"), ("b" * 16, "0"), ("b" * 16, "1")):
        digests = {"network_digest": network, "optimizer_digest": optimizer}
        write_result(tmp_path, spec, np.asarray([0.5]), **digests)
    table = make_overview_table(load_results(tmp_path))
    rows = {row["model"]: row["Seeds"] for section in table.sections for row in section.rows}
    assert rows == {"user (own aaaaaaaa)": "1", "user (own bbbbbbbb)": "2"}
    assert "fedavg: the runs have different optimizers of the user." in table.notes


@pytest.fixture
def folder(tmp_path):
    """Results of three methods with their own protocols."""
    for name in ("fedavg", "fedprox", "dynafed"):
        for alpha in (0.1, 1.0):
            spec = RunSpec(name, protocol="own", alpha=alpha, model="mlp", num_clients=20)
            write_result(tmp_path, spec, np.asarray([0.5, 0.6]))
    return tmp_path


@pytest.mark.parametrize("make_table", [make_overview_table, make_pivot_table])
def test_tables_name_protocols_and_differences(folder, make_table):
    results = load_results(folder)
    table = make_table(results.sort_values("digest"))
    assert table.title.startswith("Overview, protocol ")
    text = " ".join(table.notes)
    assert f"Protocol: {describe_protocol('standard')}" in text or "dynafed (Pi et al." in text
    assert "Methods differ in settings: protocol (" in text and "local_optimizer (" in text
    table = make_table(results[results["algorithm"] != "dynafed"])
    assert table.title.startswith("Overview, protocol standard")
    assert "Protocol: standard (NIID-Bench, Li et al., ICDE 2022)." in table.notes
    assert "Methods differ" not in " ".join(table.notes)


def test_figures_name_protocols_and_differences(folder):
    results = load_results(folder)
    curves = pd.concat(
        pd.DataFrame({"digest": digest, "round": [1, 2], "test_accuracy": [0.5, 0.6]})
        for digest in results["digest"]
    )
    specs = [
        RunSpec(name, protocol="own", alpha=0.1, model="mlp", num_clients=20)
        for name in ("fedavg", "dynafed")
    ]
    cells = [TableCell("digits", "mlp", 0.1, spec.algorithm, runs=(spec,)) for spec in specs]
    for figure in (
        plot_table_curves(cells, results, curves, load_reported_values("dynafed", "table1")),
        plot_metric_vs_alpha(results),
        plot_heat_map(results, x="alpha", y="num_clients"),
        plot_learning_curves(results, curves),
    ):
        text = " ".join(figure.get_supxlabel().split())
        assert "protocol: " in text and "standard (NIID-Bench" in text
        assert "methods differ in settings" in text


def test_run_texts_name_the_protocol(capsys, caplog):
    with caplog.at_level("INFO", logger="fedjax_het"):
        federation(RunSpec("fedavg", num_clients=4, rounds=1))
    assert caplog.messages[0] == "protocol: standard (NIID-Bench, Li et al., ICDE 2022)"
    run = RunSpec("fedprox", "digits").resolved()
    assert format_run_label(run).endswith("protocol standard, seed 0")
    assert format_settings(run, {}).endswith("protocol standard")
    assert main(["show", "fedprox", "fsl"]) == 0
    text = capsys.readouterr().out
    assert "default protocol: standard (NIID-Bench, Li et al., ICDE 2022)" in text
    assert "default protocol: fsl (Mai et al., 2022)" in text


def test_pfllib_settings():
    """The page and the code of PFLlib's leaderboard."""
    run = RunSpec("fedavg", "fashion_mnist_pooled", protocol="pfllib").resolved()
    assert (run.num_clients, run.participation, run.rounds) == (20, 1.0, 2000)
    assert (run.local_epochs, run.batch_size, run.local_optimizer) == (1, 10, "sgd")
    assert (run.averaging, run.optimizer_state, run.model) == ("weighted", "reset", "cnn")
    assert (run.partition, run.alpha, run.normalization) == ("dirichlet_capped", 0.1, "pfllib")
    assert run.has_client_tests and run.test_per_client == "proportional"
    assert run.evaluated_model == "global"
    assert run.hyperparameters == {"local_lr": 0.005, "server_lr": 1.0}
    pathological = RunSpec(protocol="pfllib", partition="pathological_unequal").resolved()
    assert pathological.partition_arguments == {}
    values = {
        name: RunSpec(name, "fashion_mnist_pooled", protocol="pfllib").resolved().hyperparameters
        for name in ("fedprox", "ditto", "per_fedavg", "pfedme")
    }
    assert all(hp["local_lr"] == 0.005 for hp in values.values())
    assert values["fedprox"]["prox_mu"] == 0.01 and values["ditto"]["ditto_lambda"] == 1.0
    assert values["per_fedavg"]["inner_lr"] == 0.005 and values["pfedme"]["personal_lr"] == 0.01
    assert RunSpec("fedrep", protocol="pfllib").resolved().options["head_epochs"] == 1
    fedgen = RunSpec("fedgen", protocol="pfllib").resolved()
    assert (fedgen.options["generator_noise"], fedgen.options["generator_steps"]) == (512, 1000)
    assert (fedgen.hp["generated_weight"], fedgen.hp["distilled_weight"]) == (1.0, 0.0)
    assert RunSpec("fedavg", "digits", protocol="pfllib").resolved().model == "mlp"
    other = RunSpec("fedavg", "digits", protocol="pfllib", local_optimizer="adam").resolved()
    assert other.hyperparameters["local_lr"] != 0.005


def test_fedprox_default_is_in_the_tuned_range():
    assert RunSpec("fedprox", "fashion_mnist").resolved().hp["prox_mu"] == 0.01
    assert RunSpec("fedprox", "digits").resolved().hp["prox_mu"] == 0.1
    # Papers' protocols keep their value, also for FedProx as the base of another method.
    for name in ("dynafed", "fedamp", "fsl"):
        assert RunSpec("fedprox", protocol=name).resolved().hp["prox_mu"] == 0.002
    assert RunSpec("fedprox", protocol="fedaf").resolved().hp["prox_mu"] == 0.001
    assert RunSpec("dynafed", options={"base": "fedprox"}).resolved().hp["prox_mu"] == 0.002
    over = RunSpec("dynafed", protocol="standard", options={"base": "fedprox"})
    assert over.resolved().hp["prox_mu"] == 0.1
