"""The table of malicious clients: rows, paired comparisons, and the program."""

import numpy as np
import pandas as pd
import pytest

from fedjax_het.papers.robustness.table import (
    ATTACKS,
    FRACTIONS,
    RULES,
    TABLE,
    compare_rules,
    list_conditions,
    main,
    make_text,
)
from fedjax_het.papers.table import TableArguments, make_cells


@pytest.mark.parametrize("preset", TABLE.presets)
def test_rows_differ_in_rule_and_attack_only(preset):
    cells = make_cells(TABLE, TableArguments(preset))
    conditions = {condition.row: condition for condition in list_conditions()}
    assert len(conditions) == len(RULES) * (1 + len(ATTACKS) * len(FRACTIONS))
    assert {cell.method for cell in cells} == set(conditions)
    varied = ("attack", "aggregation", "algorithm", "options", "hp", "server_data")
    varied += ("server_options", "pretrain_epochs")
    common = set()
    for cell in cells:
        spec, condition = cell.runs[0].resolved(), conditions[cell.method]
        settings = {k: v for k, v in spec.to_dict().items() if k not in (*varied, "dataset")}
        common.add(repr(sorted(settings.items())))
        assert list(spec.attack.values()) == [condition.fraction] * bool(condition.attack)
    assert len(common) == 1


def make_scores():
    conditions = [c for c in list_conditions() if c.attack in ("", "ALIE") and c.fraction < 0.3]
    records = [
        ("digits", c.row, seed, 80.0 + RULES.index(c.rule) * (1 + seed / 10) - 50 * c.fraction)
        for c in conditions
        for seed in range(3)
    ]
    records[1] = (*records[1][:3], np.nan)
    return pd.DataFrame(records, columns=["dataset", "row", "seed", "accuracy"])


def test_differences_are_paired_with_fedavg_under_the_same_attack():
    table = compare_rules(make_scores())
    assert table["diverged"].tolist() == [1] + [0] * (len(table) - 1)
    attacked = table[(table["attack"] == "ALIE") & (table["rule"] != "FedAvg")]
    np.testing.assert_allclose(attacked["difference"], 1.1 * np.arange(1, len(RULES)))
    assert attacked["p"].max() < 0.01 and table["difference"].isna().sum() >= 2
    text = make_text(table, "Malicious clients.")
    assert text.sections[0].rows[0]["0 %"].endswith("1 diverged")
    by_rule = {row["Rule"]: row for row in text.sections[2].rows}
    assert by_rule["FSL"]["20 %"].startswith("77.70 ±") and by_rule["FSL"]["40 %"] == "—"


@pytest.mark.slow
def test_program_prints_the_accuracies(tmp_path, capsys):
    rows = [c.row for c in list_conditions() if c.rule.name == "RoFSL, angle"][:2]
    arguments = ["--methods", *rows, "--rounds", "2", "--seeds", "0", "--output-dir", str(tmp_path)]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "digits, sign flip" in text and "RoFSL, angle" in text
