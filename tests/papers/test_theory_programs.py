"""The programs beside the papers' tables: theory along runs, and what images give away."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedjax_het.papers import leakage
from fedjax_het.papers.dynafed import convergence
from fedjax_het.papers.dynafed import measures as dynafed_measures
from fedjax_het.papers.dynafed import theory as dynafed_theory
from fedjax_het.papers.fedamp import robustness
from fedjax_het.papers.fedamp import theory as fedamp_theory
from fedjax_het.papers.softmax_regression import make_convex_federation

MATCHED = "dynafed(preset='improved')"
CONTROL = "dynafed(preset='improved', synthetic='real')"


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
def test_dynafed_measures(tmp_path, monkeypatch):
    monkeypatch.setattr(dynafed_measures, "EPOCHS", 20)
    monkeypatch.setattr(dynafed_measures, "NUM_NETWORKS", 1)
    arguments = ["--methods", MATCHED, CONTROL, "--alphas", "0.04", "--rounds", "22"]
    assert {"measures.md", "measures.csv"} <= run_program(dynafed_measures, tmp_path, *arguments)
    table = pd.read_csv(tmp_path / "measures.csv").set_index("method")
    assert table["gradient_cosine"][CONTROL] > table["gradient_cosine"][MATCHED]
    assert table["hard_label_recovery"][CONTROL] < table["hard_label_recovery"][MATCHED]
    assert "Rank correlation" in (tmp_path / "measures.md").read_text()
    # Rows of an earlier call are not measured again.
    monkeypatch.setattr(dynafed_measures, "measure_synthetic_data", None)
    run_program(dynafed_measures, tmp_path, *arguments, "--show")
    pd.testing.assert_frame_equal(
        pd.read_csv(tmp_path / "measures.csv").set_index("method")[table.columns], table
    )


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


def test_mixed_loss_of_soft_labels_has_mean_gradient():
    loss, rng = make_convex_federation().loss, np.random.default_rng(0)
    labels = rng.dirichlet(np.ones(10), size=7)
    data = convergence.FineTuningData(rng.normal(size=(7, loss.features.shape[1])), labels)
    point = rng.normal(size=(loss.features.shape[1], 10))
    expected = 0.75 * loss.compute_gradient(point) + 0.25 * data.compute_gradient(point, loss.l2)
    np.testing.assert_allclose(data.mix(loss, 0.25).compute_gradient(point), expected, atol=1e-12)


def test_dynafed_convergence_follows_equation6():
    federation = make_convex_federation()
    loss, clients = federation.loss, federation.clients
    examples = clients.ravel()
    data = convergence.FineTuningData(loss.features[examples], np.eye(10)[loss.labels[examples]])
    arguments = convergence.Arguments(steps=3, local_steps=1, server_steps=2)
    optimum = np.ones((loss.features.shape[1], 10))  # any point
    curves = convergence.run_dynafed(federation, optimum, data, arguments, seed=5)
    rng, point = np.random.default_rng(5), np.zeros_like(optimum)
    drawn = clients[np.arange(20), rng.integers(clients.shape[1], size=20)]
    offset = 8 * loss.smoothness / loss.l2
    gradients = [loss.with_weights(drawn).compute_gradient, *2 * [loss.compute_gradient]]
    for step, gradient in enumerate(gradients):
        point = point - 2 / loss.l2 / (step + offset) * gradient(point)
    assert curves["step"] == [3 + offset]
    np.testing.assert_allclose(curves["distance"], ((point - 1) ** 2).sum(), rtol=1e-12)
    np.testing.assert_allclose(curves["error"], 0, atol=1e-12)
    assert curves["gap"] < curves["average_gap"]  # two gradient steps


@pytest.mark.slow
def test_dynafed_convergence_table(tmp_path):
    flags = ["--seeds", "0", "--steps", "440", "--iterations", "3", "--output-dir", str(tmp_path)]
    assert convergence.main(flags) == 0
    table = pd.read_csv(tmp_path / "convergence.csv").set_index("data")
    assert list(table.index) == list(convergence.DATA_COLORS)
    assert (tmp_path / "convergence.png").read_bytes().startswith(b"\x89PNG")
    assert table["nearer"]["all examples"] == table["lower"]["all examples"] == 100
    assert table["delta"]["all examples"] == pytest.approx(0, abs=1e-9)
    assert table["limit"]["all examples"] < 1e-12 < table["limit"]["matched"]
    assert np.isnan(table["limit"]["no fine-tuning"])


def test_robustness_compares_with_controls_by_seed():
    settings = {"separate": [np.nan], "fedavg_ft": [np.nan], "heurfedamp": [0.0, 1.0]}
    rows = [
        {"algorithm": method, "hp.self_weight": value, "seed": seed, "diverged": False}
        for method, values in settings.items()
        for value in values
        for seed in range(6)
    ]
    rng = np.random.default_rng(0)
    results = pd.DataFrame(rows).assign(
        bmta=rng.random(24), bmta_worst_decile=0.5, final_accuracy=0.5
    )
    results.loc[5, "diverged"] = True  # Separate, seed 5
    table = robustness.compare_with_controls(results, "hp.self_weight").set_index(
        ["method", "hp.self_weight"]
    )
    separate, own = 100 * results["bmta"][:5].to_numpy(), 100 * results["bmta"][18:23].to_numpy()
    row = table.loc[("heurfedamp", 1.0)]
    assert row["minus_separate"] == pytest.approx((own - separate).mean())
    other = 100 * results["bmta"][12:17].to_numpy() - separate
    fine_tuned = 100 * results["bmta"][6:11].to_numpy() - separate
    p_values = [stats.ttest_1samp(d, 0).pvalue for d in (own - separate, other, fine_tuned)]
    assert table["p_separate"].min() == pytest.approx(
        min(1, 3 * min(p_values))
    )  # Holm's correction
    assert row["mean"] == pytest.approx(100 * results["bmta"][18:].mean()) and row["seeds"] == 6


@pytest.mark.slow
def test_self_weight_of_one_is_near_separate_training(tmp_path):
    flags = ["--rounds", "3", "--seeds", "0", "--output-dir", str(tmp_path)]
    rows = ["separate", "heurfedamp(self_weight=0.0)", "heurfedamp(self_weight=1.0)"]
    assert robustness.weight([*flags, "--methods", *rows]) == 0
    table = pd.read_csv(tmp_path / "robustness_weight.csv").set_index("hp.self_weight")
    assert abs(table["minus_separate"][1.0]) < 2  # a weak pull to the own model remains
    assert table["mean"][1.0] != table["mean"][0.0]


@pytest.mark.slow
def test_offline_clients_lower_accuracy_of_separate_training(tmp_path):
    flags = ["--rounds", "5", "--seeds", "0", "--output-dir", str(tmp_path)]
    rows = [f"separate(participation={share})" for share in (1.0, 0.2)]
    received = "heurfedamp(client_test_model='received', participation=0.2)"
    assert robustness.offline([*flags, "--methods", *rows, received]) == 0
    table = pd.read_csv(tmp_path / "robustness_offline.csv")
    assert table["method"].tolist() == ["separate", "separate", robustness.RECEIVED]
    assert table["mean"][0] < table["mean"][1]  # a fifth of the clients in a round, all
