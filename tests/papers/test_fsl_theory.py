"""FSL's theory: drifts, gradients and Eq. 10 against loops in float64; its gain by server data."""

import itertools
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.data import SERVER_EXAMPLES
from support.reference_loop import ReferenceFedAvg, flatten_inputs, flatten_params, server_batches
from support.small_federation import make_small_federation, round_key

from fedjax_het.algorithms.fsl import FSLOptions
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.papers.convergence_bounds import compute_progress_terms
from fedjax_het.papers.fsl import surface, theory
from fedjax_het.papers.fsl.theory import Preset, Setting

EPOCHS = 2
TINY = Preset(rounds=(3,), seeds=(1,), draws=60)


class RecordedFSL(ReferenceFedAvg):
    """Algorithm 1 by loops, with the squared distances of all steps from the round's start."""

    def update_server(self, r, clients, models):
        start, steps = self.global_vector, []
        for k in clients:
            model = start
            for batch in self.minibatches(r, k):
                steps.append(((model - start) ** 2).sum())
                model = self.local_step(model, batch)
        self.client_drift = sum(steps) / len(clients)
        average = self.average_models(clients, models)
        key = fold_in_purpose(round_key(r), Purpose.SERVER)
        batches = list(server_batches(key, EPOCHS, len(SERVER_EXAMPLES[1])))
        mean_steps = np.mean([len(self.minibatches(r, k)) for k in clients])
        lr = self.hp["gamma"] * self.hp["server_lr"] * self.hp["local_lr"] * mean_steps
        x, y, self.server_drift = flatten_inputs(SERVER_EXAMPLES[0]), SERVER_EXAMPLES[1], 0.0
        for index in batches:
            self.server_drift += ((average - start) ** 2).sum()
            average = average - lr / len(batches) * self.gradient(average, x[index], y[index])
        self.global_vector = average


def test_drifts_match_loops():
    hp = {"local_lr": 0.1, "server_lr": 1.4, "gamma": 0.8, "gamma_decay": 1.0}
    options = FSLOptions(server_epochs=EPOCHS)

    def build(training, plan):
        return theory.fsl_with_drifts(training, plan, options)

    federation = make_small_federation(build, hp=hp, participation=0.7)
    loop = RecordedFSL(federation)
    for r in range(3):
        loop.run_round(r)
    state, _ = federation.run(3)
    variables = federation.algorithm.global_model(state)
    np.testing.assert_allclose(flatten_params(variables["params"]), loop.global_vector, atol=5e-6)
    record = variables["state"]
    assert float(record["client"]) == pytest.approx(loop.client_drift, rel=1e-4)
    assert float(record["server"]) == pytest.approx(loop.server_drift, rel=1e-4)
    assert loop.client_drift > 1e-4


@pytest.fixture(scope="module")
def problem():
    return theory.make_problem()


def test_gradients_match_definitions(problem, monkeypatch):
    """Variances over all minibatches of two examples, of clients with six examples."""
    monkeypatch.setattr(theory, "BATCH_SIZE", 2)
    clients = problem.federation.clients[:3, :6]
    loss = problem.federation.loss.with_weights(clients.ravel())
    small = problem._replace(
        federation=problem.federation._replace(clients=clients, loss=loss),
        server_examples=problem.server_examples[:5],
    )
    point = np.random.default_rng(0).normal(size=problem.shape)

    def gradient(examples):
        return loss.with_weights(np.array(examples)).compute_gradient(point)

    def variance(examples):
        batches = [gradient(batch) for batch in itertools.combinations(examples, 2)]
        return np.mean([((batch - gradient(examples)) ** 2).sum() for batch in batches])

    full, server = gradient(clients.ravel()), gradient(small.server_examples)
    actual = {name: value[0] for name, value in theory.measure_gradients(small, [point]).items()}
    assert actual == pytest.approx(
        {
            "client_gap": np.mean([((gradient(client) - full) ** 2).sum() for client in clients]),
            "server_gap": ((server - full) ** 2).sum(),
            "gradient_norm": np.linalg.norm(full),
            "server_norm": np.linalg.norm(server),
            "client_noise": np.mean([variance(client) for client in clients]),
            "server_noise": variance(small.server_examples),
            "cosine": (full * server).sum() / np.linalg.norm(full) / np.linalg.norm(server),
        }
    )


def test_drift_bounds_match_lemmas():
    setting, names = Setting(local_steps=20, cohort_size=4, gamma=0.7), theory.GRADIENT_GAP_NAMES
    values = dict(zip(names, (0.9, 0.2, 1.1, 1.3, 0.5, 0.4), strict=True))
    N, K, S, K0, step, L, drift = 20, 20, 4, 20, 0.03, 3.0, 0.01
    bounds = theory.bound_drifts(setting, values, step, L)(drift)
    eta_l, rho, gamma = step / (K * 2), (N - S) / (N - 1), 0.7
    G3 = 0.5 / (K * S) + rho * 0.9 / S + gamma**2 * 0.4 / (3 * K0)
    server = 12 * step**2 * (L**2 * drift + 1.1**2 + 4 / 3 * gamma**2 * 1.3**2 + G3)
    assert bounds == pytest.approx((4 * K**2 * eta_l**2 * (1.1**2 + 0.5 / 40 + 0.9), server))


def test_progress_terms_at_given_step():
    """Terms scale with the step; at the largest allowed step they are the default."""
    curves = dict.fromkeys(theory.GRADIENT_GAP_NAMES, np.ones(1)) | {"server_gap": np.zeros(1)}
    numbers = {"gamma": 1.0, "server_lr": 2.0, "num_clients": 20, "cohort_size": 4}
    numbers |= {"client_steps": 5, "server_steps": 5}
    default = compute_progress_terms(curves, **numbers)
    assert compute_progress_terms(curves, **numbers, step=default.step) == default
    half = compute_progress_terms(curves, **numbers, step=default.step / 2)
    assert (half.noise / default.noise, half.drift / default.drift) == (0.5, 0.25)
    assert default.descent == default.descent_factor  # of a gradient of length 1


def test_steps_follow_corollary_1_within_condition_13():
    setting, (small, large) = Setting(local_steps=20, cohort_size=4), theory.STEP_SCALES
    assert theory.choose_step(setting, large, 80) == pytest.approx(large / 2)
    assert theory.choose_step(setting, small, 80) == pytest.approx(small / 2)
    kappa = max(4, 2 / 4 + 3)
    assert theory.choose_step(setting, small, 1) == pytest.approx(min(1, 2 / kappa) / 16)


def test_random_server_data_have_variance_of_equation_10(problem, monkeypatch):
    monkeypatch.setattr(theory, "SERVER_SIZES", (20, 100))
    table = theory.measure_variance(problem, draws=50)
    z = (table["measured"] - table["formula"]) / table["error"]
    assert z.abs().max() < 4
    assert (table["balanced"] < 0.7 * table["formula"]).all()  # the package's draws are stratified


@pytest.mark.slow
def test_large_gamma_is_sgd_of_server(problem):
    limit = theory.measure_limit(problem, TINY).set_index("gamma")["distance"]
    assert limit[1] > 0.3 and limit[1000] < 2e-3
    assert limit[10] / limit[100] == pytest.approx(10, rel=0.1)


@pytest.mark.slow
def test_theory_program(tmp_path, capsys, monkeypatch):
    quick = Preset((3, 6), (1, 2), 20, (Setting(), Setting(gamma=0.0)))
    monkeypatch.setitem(theory.PRESETS, "quick", quick)
    assert theory.main(["--preset", "quick", "--output-dir", str(tmp_path)]) == 0
    assert {"theory_rates.png", "theory_server.png", "theory_server.md"} <= {
        p.name for p in tmp_path.iterdir()
    }
    rates = pd.read_csv(tmp_path / "theory_rates.csv")
    assert len(rates) == 8 and rates["bound"].notna().sum() == 4
    assert (rates["lowest"] < rates["bound"]).sum() == 4
    assert ((rates["server"] > 0) & (rates["server"] < 1) & (rates["client"] < 1)).all()
    lowest = rates.set_index(["gamma", "scale", "T"])["lowest"]
    assert (lowest.xs(6, level="T") < lowest.xs(3, level="T")).all()


# --- gain by size and divergence of the server's data ------------------------------------------


def test_rows_of_surface_name_server_data():
    method, settings = surface.parse_surface_row("fsl(c=5, n0=20, alone=True)", "digits")
    assert method == "fsl" and settings["server_options"] == {"clients": 5, "per_client": 4}
    # The server's rate, gamma K eta_l eta_g, is that of FSL; the clients hardly move.
    assert settings["gamma"] * settings["local_lr"] == pytest.approx(surface.LEARNING_RATES["fsl"])
    assert settings["local_lr"] < 1e-4


def test_gains_are_paired_by_seed():
    def make_run(method, seed, accuracy, distance=0.5):
        settings = SimpleNamespace(algorithm=method.partition("(")[0], seed=seed)
        server = {"class_distance": distance, "num_examples": 10}
        summary = {"window_accuracy": accuracy / 100, "server": server}
        return SimpleNamespace(method=method), SimpleNamespace(spec=settings, summary=summary)

    fsl, fedavg, levelled, alone = np.random.default_rng(0).uniform(20, 80, (4, 5))
    values = {"fsl(c=5, n0=10)": fsl, "fedavg": fedavg, "levelled": levelled}
    values["fsl(c=5, n0=10, alone=True)"] = alone
    runs = [
        make_run(method, seed, accuracy)
        for method, accuracies in values.items()
        for seed, accuracy in enumerate(accuracies)
    ]
    accuracies = surface.collect_accuracies(SimpleNamespace(iterate_results=lambda: iter(runs)))
    (row,) = surface.summarize_gains(accuracies).to_dict("records")
    assert (row["distance"], row["n0"], row["seeds"]) == (0.5, 10, 5)
    for name, control in {"fedavg": fedavg, "levelled": levelled, "alone": alone}.items():
        test = stats.ttest_rel(fsl, control)
        assert row[f"gain_{name}"] == pytest.approx((fsl - control).mean())
        assert row[f"p_{name}"] == pytest.approx(test.pvalue)
        low, high = test.confidence_interval()
        assert row[f"width_{name}"] == pytest.approx((high - low) / 2)


@pytest.mark.slow
def test_surface_program(tmp_path):
    rows = ["fedavg", "levelled", "fsl(c=10, n0=10)", "fsl(c=10, n0=10, alone=True)"]
    flags = ["--methods", *rows, "--rounds", "3", "--output-dir", str(tmp_path)]
    assert surface.main(flags) == 0
    table = pd.read_csv(tmp_path / "surface.csv")
    assert table["distance"].tolist() == [0] and (tmp_path / "surface.png").exists()
