"""Accuracy of robust aggregation, FSL and RoFSL under attacks of malicious clients.

python experiments/robustness/table.py                the embedded digits, minutes on 2 cores
python experiments/robustness/table.py --preset cpu   a tenth of MNIST and of Fashion-MNIST, an hour

A row has one rule of the server, one attack and one share of malicious clients, drawn with the seed
of the partition. The rules are FedAvg's mean, rules of robust aggregation over FedAvg, FSL, and
RoFSL with its two filters. Rules that assume a share of malicious clients assume 40 %.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd

from fedjax_het.analysis.comparison import add_row_settings
from fedjax_het.analysis.render import (
    MISSING,
    TableSection,
    TextTable,
    format_mean_std,
)
from fedjax_het.papers.table import Preset, TableDeclaration, TableRun, make_table_program
from fedjax_het.papers.table.columns import run_paired_test
from fedjax_het.runtime.results import Result

MIN_PAIRS = 3
FRACTIONS = (0.2, 0.4, 0.6)
ATTACKS = {"sign flip": "sign_flip", "label flip": "label_flip", "ALIE": "alie"}


class Rule(NamedTuple):
    """A rule of the server."""

    name: str
    method: str
    settings: dict[str, Any]


RULES = (
    Rule("FedAvg", "fedavg", {}),
    *(
        Rule(f"FedAvg, {name}", "fedavg", {"aggregation": text})
        for name, text in (
            ("norm clipping", "norm_clipping:max_norm=1"),
            ("median", "median"),
            ("trimmed mean", "trimmed_mean:fraction=0.4"),
            ("geometric median", "geometric_median"),
            ("Krum", "krum:fraction=0.4"),
            ("centered clipping", "centered_clipping:radius=1"),
        )
    ),
    Rule("FSL", "fsl", {}),
    Rule("RoFSL, loss", "rofsl", {}),
    Rule("RoFSL, angle", "rofsl", {"filter": "angle"}),
)


class Condition(NamedTuple):
    """A rule under an attack of a share of the clients."""

    rule: Rule
    attack: str
    "Name of the attack; empty without an attack."
    fraction: float
    row: str


def list_conditions() -> list[Condition]:
    """List the rows: each rule without attack, and under each attack at each share.

    Example:
      >>> from fedjax_het.papers.robustness.table import list_conditions
      >>> list_conditions()[1].row
      "fedavg(attack='sign_flip:fraction=0.2')"
    """
    conditions = []
    for rule in RULES:
        row = add_row_settings(rule.method, **rule.settings) if rule.settings else rule.method
        conditions.append(Condition(rule, "", 0.0, row))
        for name, kind in ATTACKS.items():
            for fraction in FRACTIONS:
                settings = {**rule.settings, "attack": f"{kind}:fraction={fraction:g}"}
                row = add_row_settings(rule.method, **settings)
                conditions.append(Condition(rule, name, fraction, row))
    return conditions


def _make_preset(datasets: Sequence[str], size: int, rounds: int, batch_size: int) -> Preset:
    server = {"server_options": {"size": size}, "pretrain_epochs": 0}
    return Preset(
        datasets=tuple(datasets),
        models=("mlp",),
        alphas=(0.5,),
        seeds=(0, 1, 2),
        rows=tuple(condition.row for condition in list_conditions()),
        settings={"rounds": rounds, "batch_size": batch_size},
        method_settings={"fsl": server, "rofsl": server},
    )


TABLE = TableDeclaration(
    name="table",
    paper="fsl",
    item="robustness",
    title="Malicious clients.",
    has_reported_values=False,
    protocol="standard",
    settings={"num_clients": 20, "local_epochs": 2, "learning_rate": 0.05, "momentum": 0.0},
    presets={
        "quick": _make_preset(("digits",), 50, 10, 16),
        "cpu": _make_preset(("mnist_tenth", "fashion_mnist_tenth"), 100, 40, 32),
    },
)


def score_run(result: Result) -> dict[str, float]:
    """Return `accuracy`, the mean of the last five evaluations of a run in percent."""
    return {"accuracy": 100 * result.summary["final_accuracy"]}


def compare_rules(scores: pd.DataFrame) -> pd.DataFrame:
    """Compare each rule with FedAvg under the same attack, paired over seeds.

    Args:
      scores: `TableRun.collect_scores(score_run)`.

    Returns:
      A row per data set and condition: `dataset`, `rule`, `attack`, `fraction`, the mean `accuracy`
      and its deviation `std` over the `seeds` runs that did not diverge, the number `diverged`, and
      the mean `difference` from FedAvg with `half_width`, half the width of its 95 % confidence
      interval, and its p-value `p`.
    """
    records = []
    for dataset, table in scores.groupby("dataset", sort=False):
        own = {row: group.set_index("seed") for row, group in table.groupby("row")}
        references = {
            (c.attack, c.fraction): own.get(c.row) for c in list_conditions() if c.rule == RULES[0]
        }
        for condition in list_conditions():
            if condition.row not in own:
                continue
            accuracies = own[condition.row]["accuracy"]
            kept = accuracies.dropna()
            record: dict[str, Any] = {"dataset": dataset, "rule": condition.rule.name}
            record |= {"attack": condition.attack, "fraction": condition.fraction}
            record |= {"accuracy": kept.mean(), "std": kept.std(), "seeds": len(kept)}
            record["diverged"] = len(accuracies) - len(kept)
            reference = references[condition.attack, condition.fraction]
            if reference is not None and condition.rule != RULES[0]:
                test = run_paired_test(kept, reference["accuracy"].dropna(), MIN_PAIRS)
                record |= {"difference": test.mean, "half_width": test.half_width}
                record["p"] = test.p_value
            records.append(record)
    return pd.DataFrame(records)


def make_text(table: pd.DataFrame, title: str) -> TextTable:
    """Format the accuracies.

    Args:
      table: as `compare_rules` returns it.
      title: title of the table.

    Returns:
      A section per data set and attack, with a column for each share of malicious clients.
    """
    sections = []
    for dataset, own in table.groupby("dataset", sort=False):
        by_key = {(r["rule"], r["attack"], r["fraction"]): r for r in own.to_dict("records")}
        for attack in ATTACKS:
            rows = []
            for rule in RULES:
                row = {"Rule": rule.name}
                for fraction in (0.0, *FRACTIONS):
                    key = (rule.name, attack if fraction else "", fraction)
                    row[f"{100 * fraction:.0f} %"] = _format_accuracy(by_key.get(key))
                rows.append(row)
            name = f"{dataset}, {attack}"
            sections.append(TableSection(rows, name, {"Data and attack": name}))
    note = (
        "Test accuracy in %, mean of the last five rounds, mean ± deviation over seeds, by the "
        "share of malicious clients. Runs that diverged are counted and left out of the mean."
    )
    return TextTable(title, ["Rule"], sections, [note])


def _format_accuracy(record: dict[str, Any] | None) -> str:
    if record is None:
        return MISSING
    text = format_mean_std(record["accuracy"], record["std"]) if record["seeds"] else ""
    diverged = f"{record['diverged']} diverged" if record["diverged"] else ""
    return ", ".join(filter(None, (text, diverged)))


def _write_outputs(table_run: TableRun) -> Sequence[str]:
    scores = table_run.collect_scores(score_run)
    if "accuracy" not in scores:
        print("There is no run to show.")
        return []
    table = compare_rules(scores)
    return table_run.write_table("table", make_text(table, f"{table_run.title}."), table)


main = make_table_program(TABLE, _write_outputs)
