"""DynaFed and FSL over other methods: rows with their controls, differences and their tests."""

import numpy as np
import pandas as pd
import pytest

from fedjax_het.analysis.render import MISSING
from fedjax_het.papers.composition import (
    ADDITIONS,
    BASES,
    COMPARISONS,
    COMPOSITION,
    TUNED,
    main,
    make_gains_table,
    make_scores_table,
    make_text_tables,
    name_row,
)
from fedjax_het.papers.table import TableArguments, make_cells


def test_row_and_control_differ_only_in_mechanism():
    cells = make_cells(COMPOSITION, TableArguments("cpu", seeds=(1,)))
    runs = {cell.method: cell.runs[0].resolved() for cell in cells}
    assert len(runs) == len(BASES) * len(ADDITIONS)
    for base in BASES:
        own = {name: runs[name_row(name, base)] for name in ADDITIONS}
        dynafed, untrained, real = (own[name] for name in ("DynaFed", "Untrained", "Real"))
        assert {**dynafed.options, "synthetic": "untrained"} == untrained.options
        assert {**dynafed.options, "synthetic": "real"} == real.options
        assert dynafed.hyperparameters == untrained.hyperparameters == real.hyperparameters
        assert dynafed.options["preset"] == "improved"
        assert dynafed.options["num_samples"] == own["FSL"].server_options["size"]
        for name in ("server_data", "server_options", "seed", "local_optimizer"):
            assert getattr(own["FSL"], name) == getattr(own["Data sharing"], name)
        assert own.pop("Alone").algorithm == base
        for run in own.values():
            assert TUNED.get(base, {}).items() <= run.hyperparameters.items()
            assert run.protocol == "dynafed" and run.rounds == 60
            assert run.options.get("base", "fedavg") == base


def test_fedsam_is_an_optional_base():
    rows = name_row("DynaFed", "fedsam"), name_row("Alone", "fedsam")
    arguments = TableArguments("cpu", seeds=(1,), methods=rows)
    cells = make_cells(COMPOSITION, arguments)
    runs = {cell.method: cell.runs[0].resolved() for cell in cells}
    dynafed, alone = (runs[row] for row in rows)
    assert dynafed.options["base"] == alone.algorithm == "fedsam"
    assert dynafed.hyperparameters["fedsam_rho"] == alone.hyperparameters["fedsam_rho"]


def test_scores_are_means_of_late_rounds():
    curve = np.concatenate([np.full(20, 9.0), np.full(35, 60.0), np.full(5, 68.0)])
    table = make_scores_table({("FSL", "moon"): {3: curve}}, start=20)
    assert table.to_dict("records") == [
        {"base": "moon", "addition": "FSL", "seed": 3, "mean": 61.0, "last": 68.0}
    ]


def make_scores(**gains):
    """Scores of DynaFed over bases alone, whose level differs by seed and base."""
    records = []
    for level, (base, own) in enumerate(gains.items()):
        for seed, gain in enumerate(own):
            alone = 50.0 + 10 * level + 7 * seed
            for addition, value in (("Alone", alone), ("DynaFed", alone + gain)):
                records.append({"base": base, "addition": addition, "seed": seed, "mean": value})
    return pd.DataFrame(records).assign(last=0.0)


def test_gains_are_paired_by_seed():
    gains = make_gains_table(make_scores(fedavg=[10, 12, 14], scaffold=[1, 2, 6], feddyn=[9, 9.5]))
    table = gains[(gains["addition"] == "DynaFed") & (gains["control"] == "Alone")]
    table = table.set_index("base")
    assert table["mean"].tolist() == [12, 3, 9.25] and table["seeds"].tolist() == [3, 3, 2]
    # t = mean / (std / sqrt(n)); two-sided p of two degrees of freedom: 1 - t / sqrt(2 + t^2).
    statistic = np.array([12 / (2 / np.sqrt(3)), 3 / np.sqrt(7 / 3)])
    p_values = 1 - statistic / np.sqrt(2 + statistic**2)
    expected = [2 * p_values[0], p_values[1], np.nan]  # two seeds have no test
    assert table["p"].tolist() == pytest.approx(expected, nan_ok=True)
    # Less FedAvg's, of the same seeds: -9, -10, -8 and -1, -2.5.
    assert table["beyond"].tolist() == pytest.approx([np.nan, -9, -1.75], nan_ok=True)
    assert table["beyond_std"].tolist()[1] == pytest.approx(1)
    statistic = 9 * np.sqrt(3)
    expected = 1 - statistic / np.sqrt(2 + statistic**2)
    assert table["beyond_p"].tolist()[1] == pytest.approx(expected)
    assert len(gains) == 3 * len(COMPARISONS) and gains["mean"].notna().sum() == 3


def test_tables_have_missing_cells():
    scores = make_scores(fedavg=[10, 12], moon=[3, 4])
    accuracies, gains = make_text_tables(scores, make_gains_table(scores), "T.", 20)
    assert accuracies.sections[0].rows[1]["DynaFed"] == "67.0 ± 5.7"
    assert accuracies.sections[0].rows[1]["FSL"] == MISSING
    assert [section.title for section in gains.sections][:2] == [
        "DynaFed − Alone",
        "DynaFed − Untrained",
    ]
    assert [row["Difference"] for row in gains.sections[0].rows] == ["+11.0 ± 1.4", "+3.5 ± 0.7"]
    assert gains.sections[0].rows[0]["Less FedAvg's"] == MISSING


@pytest.mark.slow
def test_composition_program(tmp_path, capsys):
    rows = ("fedavg", name_row("Untrained", "fedavg"))
    words = ["--rounds", "12", "--seeds", "0", "1", "--output-dir", str(tmp_path)]
    assert main([*words, "--methods", *rows]) == 0
    assert "Untrained" in capsys.readouterr().out
    files = ("composition.md", "composition.png", "composition_gains.csv")
    assert all((tmp_path / name).stat().st_size for name in files)
    assert pd.read_csv(tmp_path / "composition.csv")["mean"].between(0, 100).all()
