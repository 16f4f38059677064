"""The table of accuracy against epsilon: rows, paired comparisons, and the program."""

import numpy as np
import pandas as pd
import pytest

from fedjax_het.papers.privacy.epsilon import (
    CONTROL,
    NOISE_MULTIPLIERS,
    PRIVATE_METHODS,
    TABLE,
    compare_methods,
    list_conditions,
    main,
    make_text,
    plot_epsilons,
)
from fedjax_het.papers.table import TableArguments, make_cells


@pytest.mark.parametrize("preset", TABLE.presets)
def test_rows_differ_in_method_and_privacy_only(preset):
    cells = make_cells(TABLE, TableArguments(preset))
    conditions = {condition.row: condition for condition in list_conditions()}
    assert len(conditions) == 1 + len(PRIVATE_METHODS) * (1 + len(NOISE_MULTIPLIERS))
    assert {cell.method for cell in cells} == set(conditions)
    varied = ("privacy", "algorithm", "options", "hp", "server_data", "server_options")
    varied += ("pretrain_epochs", "server_learning_rate")
    common = set()
    for cell in cells:
        spec, condition = cell.runs[0].resolved(), conditions[cell.method]
        common.add(repr(sorted((k, v) for k, v in spec.to_dict().items() if k not in varied)))
        if condition.name != CONTROL:
            noise = spec.privacy.get("client_level.noise_multiplier")
            assert noise == condition.noise and spec.averaging == "uniform"
        assert spec.server_data in (None, "held_out")
    assert len(common) == 1


def make_scores():
    records = []
    for condition in list_conditions():
        for seed in range(3):
            gain = PRIVATE_METHODS.index(condition.method) * (1 + seed / 10)
            accuracy = 50.0 if condition.name == CONTROL else 80 - (condition.noise or 0) + gain
            epsilon = np.inf if condition.noise is None else 10 / condition.noise
            records.append(("digits", condition.row, seed, accuracy, epsilon))
    return pd.DataFrame(records, columns=["dataset", "row", "seed", "accuracy", "epsilon"])


def test_differences_are_paired_at_equal_noise():
    table = compare_methods(make_scores())
    fsl = table[table["name"] == "FSL"]
    np.testing.assert_allclose(fsl["over_fedavg"], 2.2)
    assert fsl["fedavg_p"].max() < 0.01
    fedavg = table[(table["name"] == "FedAvg") & (table["noise"] == 8)]
    assert fedavg["over_fedavg"].isna().all()
    np.testing.assert_allclose(fedavg["over_control"], 22)
    rows = make_text(table, "Privacy.").sections[0].rows
    by_key = {(row["Method"], row["Noise"]): row for row in rows}
    assert by_key["FedAvg", "2"]["Epsilon"] == "5.00" and by_key["FedAvg", "—"]["Epsilon"] == "—"
    assert by_key["FSL", "2"]["Over FedAvg"].startswith("+2.2 ±")


def test_figure_has_a_line_of_each_method_and_the_limits():
    panel = plot_epsilons(compare_methods(make_scores())).axes[0]
    labels = panel.get_legend_handles_labels()[1]
    assert sorted(labels) == sorted(["FedAvg", "FedAdam", "FSL", CONTROL])
    assert panel.get_xscale() == "log" and "epsilon" in panel.get_xlabel()


@pytest.mark.slow
def test_program_prints_the_accuracies(tmp_path, capsys):
    rows = [c.row for c in list_conditions() if c.method == "fedavg"][:2]
    arguments = ["--methods", *rows, "--rounds", "3", "--seeds", "0", "--output-dir", str(tmp_path)]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "FedAvg" in text and "Epsilon" in text
    assert (tmp_path / "epsilon.png").is_file()
