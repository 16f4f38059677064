"""NIID-Bench's grid: reported values, settings of the rows, the choice of mu, and the table."""

import math

import numpy as np
import pandas as pd
import pytest

from fedjax_het.analysis.render import MISSING
from fedjax_het.papers.niid_bench.table3 import (
    IID,
    METHODS,
    MUS,
    SKEWS,
    TABLE3,
    find_skew,
    main,
    make_text,
    name_row,
    select_best_mu,
)
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.papers.table import TableArguments, make_cells


def resolve_runs(preset, **arguments):
    cells = make_cells(TABLE3, TableArguments(preset, **arguments))
    return {(cell.dataset, cell.method): [run.resolved() for run in cell.runs] for cell in cells}


def test_reported_values():
    reported = load_reported_values("niid_bench")
    table3 = reported[reported["item"] == "table3"].set_index(["partition", "method"])["mean"]
    assert len(table3) == 16 and table3["quantity", "fednova"] == 10.0
    assert table3["dirichlet_capped"].idxmax() == "scaffold"
    parties = reported[reported["clients"] == 100].set_index(["partition", "method"])["mean"]
    assert (parties.xs("scaffold", level="method") == 10).all() and len(parties) == 12
    flower = reported[reported["item"] == "flower"]
    assert len(flower) == 3 * 4 * 4 and set(flower["dataset"]) == {
        *("mnist", "fashion_mnist", "cifar10")
    }


def test_paper_preset_is_the_protocol():
    runs = resolve_runs("paper")
    assert len(runs) == 3 * len(SKEWS) * (len(METHODS) - 1 + len(MUS))
    for skew in SKEWS:
        for method in METHODS:
            values = {"prox_mu": 0.1} if method == "fedprox" else {}
            row = runs["cifar10", name_row(method, skew, **values)]
            run = row[0]
            assert [one.seed for one in row] == [0, 1, 2]
            assert (run.algorithm, run.protocol, run.model) == (method, "niid_bench", "lenet5")
            assert (run.rounds, run.local_epochs, run.batch_size) == (50, 10, 64)
            assert (run.local_optimizer, run.num_clients) == ("momentum", 10)
            assert run.hyperparameters["local_lr"] == 0.01 and run.normalization == "unit"
            assert run.hp.get("prox_mu") == values.get("prox_mu")
            assert (run.partition, run.classes) == (
                skew.settings["partition"],
                skew.settings.get("classes"),
            )
            assert run.alpha == (0.5 if run.partition == "dirichlet_capped" else None)
    noise = runs["mnist", name_row("fedavg", SKEWS[4])][0]
    quantity = runs["mnist", name_row("fedavg", SKEWS[5])][0]
    assert (noise.skew, quantity.skew) == ({"noise.std": 0.1}, {"quantity.alpha": 0.5})


def test_rows_name_their_skew():
    for skew in (*SKEWS, IID):
        assert find_skew({**skew.settings, "prox_mu": 0.1}) is skew
    chance = resolve_runs("chance")
    cohorts = {
        (row[0].algorithm, row[0].num_clients, row[0].participation) for row in chance.values()
    }
    assert {("fednova", 10, 1.0), ("scaffold", 100, 0.1)} <= cohorts


def make_scores(dataset="cifar10_tenth", clients=10, skew=SKEWS[5]):
    columns = ("method", "prox_mu", "mean", "std", "seeds", "diverged")
    records = [
        ("fedavg", math.nan, 50.0, 1.0, 3, 0),
        ("fedprox", 0.01, 49.0, 1.0, 3, 0),
        ("fedprox", 0.1, 51.0, 2.0, 3, 0),
        ("fedprox", 1.0, math.nan, math.nan, 0, 3),
        ("fednova", math.nan, math.nan, math.nan, 0, 3),
    ]
    scores = pd.DataFrame(records, columns=columns)
    return scores.assign(dataset=dataset, skew=skew.title, clients=clients)


def test_table_has_best_mu_and_reported_values():
    best = select_best_mu(make_scores())
    assert best["method"].tolist() == ["fedavg", "fedprox", "fednova"]
    assert best.set_index("method").loc["fedprox", "prox_mu"] == 0.1
    reported = load_reported_values("niid_bench")
    fedavg, fedprox, fednova = make_text(best, reported, "T.").sections[0].rows
    assert (fedavg["Accuracy"], fedavg["Reported"], fedavg["Flower"]) == (
        *("50.0 ± 1.0", "72.0", MISSING),
    )
    assert (fedprox["Accuracy"], fedprox["mu"]) == ("51.0 ± 2.0", "0.1")
    assert (fednova["Accuracy"], fednova["Reported"]) == ("diverged", "10.0")
    labels = select_best_mu(make_scores("mnist", skew=SKEWS[1]))
    values = [row["Flower"] for row in make_text(labels, reported, "T.").sections[0].rows]
    assert values == ["10.0", "81.3", "55.1"]
    parties = select_best_mu(make_scores(clients=100, skew=IID))
    values = [row["Reported"] for row in make_text(parties, reported, "T.").sections[0].rows]
    assert values == ["65.6", "66.0", "66.1"]
    toy = make_text(select_best_mu(make_scores("digits")), reported, "T.").sections[0].rows
    assert {row["Reported"] for row in toy} == {MISSING}


@pytest.mark.slow
def test_program(tmp_path, capsys):
    command = ["--methods", "fedavg", "fednova", "--rounds", "1", "--output-dir", str(tmp_path)]
    assert main(command) == 0
    assert "sizes Dir(0.5)" in capsys.readouterr().out
    scores = pd.read_csv(tmp_path / "table3.csv")
    assert len(scores) == 2 * len(SKEWS) and scores["mean"].between(0, 100).all()
    assert (scores["seeds"] == 1).all() and np.isnan(scores["std"]).all()
