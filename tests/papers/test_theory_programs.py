"""The programs beside the papers' tables: theory along runs, and what images give away."""

import pandas as pd
import pytest

from fedjax_het.papers import leakage
from fedjax_het.papers.dynafed import theory as dynafed_theory
from fedjax_het.papers.fedamp import theory as fedamp_theory


def run_program(program, folder, *arguments) -> set[str]:
    assert program.main([*arguments, "--seeds", "0", "--output-dir", str(folder)]) == 0
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow
def test_fedamp_theory_objective_decreases(tmp_path, capsys):
    rows = [f"fedamp(layers=0, K={rounds})" for rounds in (4, 16)]
    names = run_program(fedamp_theory, tmp_path, "--methods", *rows)
    assert {"theory.md", "theory.csv", "theory.png"} <= names
    assert "nan" not in capsys.readouterr().out
    table = pd.read_csv(tmp_path / "theory.csv").set_index("K")
    assert table["first_objective"].nunique() == 1  # of the same W^0
    for name in ("objective", "gradient"):
        lowest = table[f"lowest_{name}"]
        assert lowest[16] < lowest[4] < table[f"first_{name}"][4]


@pytest.mark.slow
def test_dynafed_theory_gradient_error(tmp_path, capsys):
    rows = ["dynafed(synthetic='untrained')", "dynafed(synthetic='real')"]
    names = run_program(
        dynafed_theory, tmp_path, "--methods", *rows, "--alphas", "0.04", "--rounds", "26"
    )
    assert {"theory.md", "theory.csv", "theory.png"} <= names
    assert "nan" not in capsys.readouterr().out
    table = pd.read_csv(tmp_path / "theory.csv").set_index("method")
    assert table["cosine"][rows[1]] > table["cosine"][rows[0]]
    assert (table["delta"] >= 0).all() and (table["relative"] > 0).all()


@pytest.mark.slow
def test_leakage_of_real_images_and_noise(tmp_path, capsys):
    names = run_program(leakage, tmp_path, "--methods", "feddm(init='noise')")
    assert {"leakage.md", "leakage.csv", "leakage.png"} <= names
    table = pd.read_csv(tmp_path / "leakage.csv").set_index("images")
    assert set(table.index) == {"made", "real", "noise"}
    # The digits' made images are more than half of the test images that real ones are paired with.
    assert table["nearest_share"]["real"] > 0.9 and table["nearest_member"]["real"] == 0
    assert table["distance_auc"]["real"] > table["distance_auc"]["made"]
    assert 0.4 < table["distance_auc"]["noise"] < 0.6
    assert 0.4 < table["loss_auc"]["noise"] < 0.6
