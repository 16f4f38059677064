"""Atlas of heterogeneity: the accuracy that each kind costs each method, at three strengths.

python experiments/heterogeneity/atlas.py                the embedded digits, two minutes on 2 cores
python experiments/heterogeneity/atlas.py --preset cpu   a tenth of Fashion-MNIST, two hours

Each run is compared with the run of its method and seed on an IID partition without heterogeneity.
Ditto is scored on the clients' own tests, the other methods on all test images. A last table has
the rank correlation of the measures of a split with FedAvg's loss of accuracy.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from fedjax_het.analysis.comparison import add_row_settings, parse_row
from fedjax_het.analysis.overview import get_method_title
from fedjax_het.analysis.render import (
    MISSING,
    TableSection,
    TextTable,
    format_difference,
    format_mean_std,
    format_number,
)
from fedjax_het.metrics.registry import get_metric_info
from fedjax_het.papers.table import Preset, TableDeclaration, TableRun, make_table_program
from fedjax_het.papers.table.columns import run_paired_test
from fedjax_het.skews import PARTITION_SKEWS

MIN_PAIRS = 3
REFERENCE = "fedavg"
METHOD_ROWS = ("fedavg", "fedprox", "scaffold", "fednova", "fedadam", "ditto", "dynafed", "fsl")
QUICK_METHODS = ("fedavg", "fedprox", "scaffold", "ditto")
QUICK_KINDS = ("label", "quantity", "label_noise", "noise", "dropout")
MEASURES = (
    "label_hellinger",
    "label_jensen_shannon",
    "label_total_variation",
    "effective_classes",
    "size_gini",
    "feature_distance",
    "gradient_dissimilarity",
)
MIN_CONDITIONS = 4  # of a correlation
NUM_RESAMPLES = 2000


class HeterogeneityKind(NamedTuple):
    """A kind of heterogeneity with three strengths."""

    group: str
    name: str
    parameter: str
    values: tuple[float, float, float]
    "Values of the parameter in increasing order of heterogeneity."
    setting: Literal["skew", "system"] = "skew"
    fixed: str = ""
    "Further parameters."


KINDS = (
    HeterogeneityKind("Labels", "label", "alpha", (1, 0.1, 0.01)),
    HeterogeneityKind("Labels", "label_quantity", "classes", (5, 2, 1)),
    HeterogeneityKind("Labels", "long_tail", "ratio", (5, 20, 100)),
    HeterogeneityKind("Labels", "label_noise", "rate", (0.2, 0.4, 0.6)),
    HeterogeneityKind("Labels", "concept", "share", (0.3, 0.6, 1)),
    HeterogeneityKind("Sizes", "quantity", "alpha", (1, 0.3, 0.1)),
    HeterogeneityKind("Sizes", "power_law", "exponent", (1, 2, 3)),
    HeterogeneityKind("Drift", "drift", "width", (0.5, 0.25, 0.1)),
    HeterogeneityKind("Drift", "arrival", "initial", (0.7, 0.4, 0.1)),
    HeterogeneityKind("Drift", "churn", "share", (0.3, 0.6, 1)),
    HeterogeneityKind("Images", "rotation", "degrees", (30, 90, 180)),
    HeterogeneityKind("Images", "inversion", "amount", (0.25, 0.75, 1)),
    HeterogeneityKind("Images", "contrast", "amount", (0.5, 0.8, 0.95)),
    HeterogeneityKind("Images", "blur", "sigma", (1, 2, 4)),
    HeterogeneityKind("Images", "resolution", "factor", (2, 4, 8)),
    HeterogeneityKind("Images", "permutation", "share", (0.3, 0.6, 1)),
    HeterogeneityKind("Images", "noise", "std", (0.3, 1, 2)),
    HeterogeneityKind(
        "Systems", "partial_work", "stragglers", (0.3, 0.6, 1), "system", "unit=steps"
    ),
    HeterogeneityKind("Systems", "dropout", "probability", (0.3, 0.6, 0.9), "system"),
    HeterogeneityKind("Systems", "availability", "probability", (0.7, 0.4, 0.1), "system"),
)


class Condition(NamedTuple):
    """A kind of heterogeneity at one strength."""

    kind: HeterogeneityKind
    value: float
    text: str
    "Value of the setting `kind.setting`."

    @property
    def strength(self) -> str:
        """Parameter and value, for tables."""
        return f"{self.kind.parameter} {self.value:g}"


def list_conditions(rounds: int, kinds: Sequence[HeterogeneityKind] = KINDS) -> list[Condition]:
    """List the strengths of kinds of heterogeneity.

    Args:
      rounds: rounds of a run, which are also the rounds of a drift.
      kinds: the kinds.

    Returns:
      Three conditions per kind, in increasing order of heterogeneity.

    Example:
      >>> from fedjax_het.papers.heterogeneity.atlas import list_conditions
      >>> [condition.text for condition in list_conditions(rounds=20)][:2]
      ['label:alpha=1', 'label:alpha=0.1']
    """
    conditions = []
    for kind in kinds:
        fixed = f"rounds={rounds}" if kind.group == "Drift" else kind.fixed
        for value in kind.values:
            parameters = ",".join(filter(None, (f"{kind.parameter}={value:g}", fixed)))
            conditions.append(Condition(kind, value, f"{kind.name}:{parameters}"))
    return conditions


def parse_atlas_row(row: str, dataset: str) -> tuple[str, dict[str, Any]]:
    """Read a row; the partition is IID unless the row's skew is a partition.

    Args:
      row: the row.
      dataset: name of the data set.

    Returns:
      The method's name, and the settings by name.

    Example:
      >>> from fedjax_het.papers.heterogeneity.atlas import parse_atlas_row
      >>> parse_atlas_row("fedavg(skew='noise:std=1')", "digits")
      ('fedavg', {'skew': 'noise:std=1', 'partition': 'iid'})
    """
    method, settings = parse_row(row)
    if settings.get("skew", "").partition(":")[0] not in PARTITION_SKEWS:
        settings["partition"] = "iid"
    return method, settings


def _list_rows(
    rounds: int, methods: Sequence[str], kinds: Sequence[HeterogeneityKind]
) -> tuple[str, ...]:
    conditions = list_conditions(rounds, kinds)
    variants = [{}, *({condition.kind.setting: condition.text} for condition in conditions)]
    return tuple(
        add_row_settings(method, **variant) if variant else method
        for method in methods
        for variant in variants
    )


_ROUNDS = {"quick": 10, "cpu": 20}
_QUICK_ROWS = _list_rows(
    _ROUNDS["quick"], QUICK_METHODS, [kind for kind in KINDS if kind.name in QUICK_KINDS]
)
ATLAS = TableDeclaration(
    name="atlas",
    paper="dynafed",
    item="atlas",
    title="Atlas of heterogeneity.",
    has_reported_values=False,
    protocol="standard",
    row_parser=parse_atlas_row,
    settings={"num_clients": 10, "local_epochs": 2, "batch_size": 32},
    presets={
        "quick": Preset(
            datasets=("digits",),
            models=("mlp",),
            seeds=(0, 1, 2),
            rows=_QUICK_ROWS,
            optional_rows=tuple(
                row
                for row in _list_rows(_ROUNDS["quick"], METHOD_ROWS, KINDS)
                if row not in _QUICK_ROWS
            ),
            settings={"rounds": _ROUNDS["quick"], "batch_size": 16},
            method_settings={
                "fedavg": {"metrics": ["feature_distance", "gradient_dissimilarity"]},
                "ditto": {"client_tests": True},
                "dynafed": {"options": {"trajectory_rounds": 8, "num_iterations": 20}},
                "fsl": {"server_options": {"size": 50}},
            },
        ),
        "cpu": Preset(
            datasets=("fashion_mnist_tenth",),
            models=("mlp",),
            seeds=(0, 1, 2),
            rows=_list_rows(_ROUNDS["cpu"], METHOD_ROWS, KINDS),
            settings={"rounds": _ROUNDS["cpu"]},
            method_settings={
                "fedavg": {"metrics": ["feature_distance", "gradient_dissimilarity"]},
                "ditto": {"client_tests": True},
                "dynafed": {"options": {"trajectory_rounds": 10, "num_iterations": 50}},
                "fsl": {"server_options": {"size": 100}},
            },
            description="a tenth of the images, 20 rounds",
        ),
    },
)


def collect_scores(table_run: TableRun) -> pd.DataFrame:
    """Collect accuracies and measures of the runs that did not diverge.

    Args:
      table_run: the table with its runs.

    Returns:
      A row per run: `method`, `condition` (text of the setting, empty without heterogeneity),
      `seed`, `accuracy` in percent, and the measures of the split that the run has.
    """
    records = []
    for cell, result in table_run.iterate_results():
        method, settings = parse_row(cell.method)
        condition = settings.get("skew") or settings.get("system") or ""
        score = "final_client_accuracy" if method == "ditto" else "final_accuracy"
        record = {"method": method, "condition": condition, "seed": result.spec.seed}
        record |= {"accuracy": 100 * result.summary[score]}
        split = result.summary["split"]
        records.append(record | {name: split.get(name, math.nan) for name in MEASURES})
    return pd.DataFrame(records)


def compute_changes(scores: pd.DataFrame, conditions: Sequence[Condition]) -> pd.DataFrame:
    """Compute the changes of accuracy from each method's own run without heterogeneity.

    Args:
      scores: as `collect_scores` returns it.
      conditions: the conditions, in the order of the rows.

    Returns:
      A row per method and condition with runs: `method`, `condition`, the mean `accuracy`, its
      deviation `std` over seeds, the mean paired `change` in points with `half_width`, half the
      width of its 95 % confidence interval, and the number of `seeds`. The condition of the runs
      without heterogeneity is empty, and so is their change.
    """
    accuracies = {
        key: group.set_index("seed")["accuracy"]
        for key, group in scores.groupby(["method", "condition"], sort=False)
    }
    records = []
    for method in scores["method"].unique():
        base = accuracies.get((method, ""), pd.Series(dtype=float))
        for condition in ("", *(condition.text for condition in conditions)):
            if (own := accuracies.get((method, condition))) is None:
                continue
            record = {"method": method, "condition": condition, "accuracy": own.mean()}
            record |= {"std": own.std(), "change": math.nan, "half_width": math.nan}
            if condition:
                test = run_paired_test(own, base, MIN_PAIRS)
                record |= {"change": test.mean, "half_width": test.half_width}
            records.append(record | {"seeds": len(own)})
    return pd.DataFrame(records)


def correlate_measures(scores: pd.DataFrame, conditions: Sequence[Condition]) -> pd.DataFrame:
    """Correlate the measures of a split with FedAvg's loss of accuracy, over kinds and strengths.

    Values are means over seeds. Kinds of systems do not change the split and are left out. The
    bootstrap draws kinds with all of their strengths, because strengths of one kind are dependent.

    Args:
      scores: as `collect_scores` returns it.
      conditions: the conditions.

    Returns:
      A row per measure: Spearman's `rho` with the 95 % percentile interval from `low` to `high`,
      the number of `conditions`, and rho within each group of kinds, by the group's name. Constant
      values have no correlation, NaN.
    """
    own_scores = scores[scores["method"] == REFERENCE]
    table = own_scores.groupby("condition")[list(MEASURES)].mean()
    changes = compute_changes(own_scores, conditions)
    table["loss"] = -changes.set_index("condition")["change"]
    kinds = {c.text: c.kind for c in conditions if c.kind.setting == "skew"}
    table = table[table.index.isin(list(kinds))]
    table["kind"] = [kinds[text].name for text in table.index]
    table["group"] = [kinds[text].group for text in table.index]
    records = []
    for name in MEASURES:
        known = table[[name, "loss", "kind", "group"]].dropna()
        rho = _correlate(known[[name, "loss"]].to_numpy())
        low, high = (rho, rho) if math.isnan(rho) else _bootstrap_correlation(known, name)
        record: dict[str, Any] = {"measure": name, "rho": rho}
        record |= {"low": low, "high": high, "conditions": len(known)}
        for kind in kinds.values():
            rows = known[known["group"] == kind.group]
            record[kind.group] = _correlate(rows[[name, "loss"]].to_numpy())
        records.append(record)
    return pd.DataFrame(records)


def _bootstrap_correlation(table: pd.DataFrame, name: str) -> tuple[float, float]:
    """Return the percentile interval of a measure's correlation over drawn kinds."""
    blocks = [rows[[name, "loss"]].to_numpy() for _, rows in table.groupby("kind")]
    if len(blocks) < 2:
        return math.nan, math.nan
    rng = np.random.default_rng(0)
    draws = rng.integers(len(blocks), size=(NUM_RESAMPLES, len(blocks)))
    samples = [np.concatenate([blocks[index] for index in draw]) for draw in draws]
    correlations = np.array([_correlate(sample) for sample in samples])
    low, high = np.nanquantile(correlations, (0.025, 0.975))
    return float(low), float(high)


def _correlate(pairs: np.ndarray) -> float:
    """Return Spearman's rank correlation of the columns; NaN if a column is constant."""
    from scipy import stats

    if len(pairs) < MIN_CONDITIONS or not np.ptp(pairs, axis=0).all():
        return math.nan
    return float(stats.spearmanr(pairs).statistic)


def make_changes_text(
    changes: pd.DataFrame, conditions: Sequence[Condition], title: str
) -> TextTable:
    """Format the changes of accuracy.

    Args:
      changes: as `compute_changes` returns it.
      conditions: the conditions.
      title: title of the table.

    Returns:
      A section with the accuracies without heterogeneity, and a section per group of kinds.
    """
    methods = list(changes["method"].unique())
    records = {
        (record["method"], record["condition"]): record for record in changes.to_dict("records")
    }
    base = {"Kind": "none", "Strength": ""}
    for method in methods:
        record = records.get((method, ""))
        base[get_method_title(method)] = (
            format_mean_std(record["accuracy"], record["std"], format_spec=".1f")
            if record
            else MISSING
        )
    sections = [TableSection([base], "Accuracy without heterogeneity", {"Group": "none"})]
    rows: dict[str, list[dict[str, str]]] = {}
    for condition in conditions:
        row = {"Kind": condition.kind.name, "Strength": condition.strength}
        for method in methods:
            record = records.get((method, condition.text), {})
            change = record.get("change", math.nan)
            row[get_method_title(method)] = (
                format_difference(change, record["half_width"])
                if math.isfinite(change)
                else MISSING
            )
        if any((method, condition.text) in records for method in methods):
            rows.setdefault(condition.kind.group, []).append(row)
    sections += [TableSection(texts, group, {"Group": group}) for group, texts in rows.items()]
    note = (
        "Points of accuracy above the method's own run without heterogeneity, mean over seeds ± half "
        "the width of the paired 95 % confidence interval. First section: accuracy in %, mean ± "
        "deviation over seeds. Accuracies are means of the last five evaluations, on all test images; "
        "of Ditto on the clients' own tests, which have the clients' skews. Diverged runs are left out."
    )
    return TextTable(title, ["Kind", "Strength"], sections, [note])


def make_correlations_text(correlations: pd.DataFrame, title: str) -> TextTable:
    """Format the correlations of the measures.

    Args:
      correlations: as `correlate_measures` returns it.
      title: title of the table.

    Returns:
      A row per measure.
    """
    groups = list(correlations.columns[correlations.columns.get_loc("conditions") + 1 :])
    rows = []
    for record in correlations.to_dict("records"):
        row = {"Measure": get_metric_info(f"split.{record['measure']}").label}
        row["rho"] = format_number(record["rho"], "+.2f")
        low, high = (format_number(record[name], "+.2f") for name in ("low", "high"))
        row["95 %"] = f"{low} to {high}" if math.isfinite(record["low"]) else MISSING
        row |= {group: format_number(record[group], "+.2f") for group in groups}
        rows.append(row | {"Conditions": f"{record['conditions']}"})
    note = (
        f"Spearman's rank correlation of a measure with {get_method_title(REFERENCE)}'s loss of accuracy "
        "over kinds and strengths, means over seeds. 95 %: percentile interval of a bootstrap that "
        "draws kinds. Other columns: correlation within a group of kinds. A measure that is constant has "
        "none. Systems do not change the split and are left out."
    )
    return TextTable(title, ["Measure"], [TableSection(rows)], [note])


def plot_changes(changes: pd.DataFrame, conditions: Sequence[Condition]):
    """Plot the changes of accuracy, a row per kind and three columns per method.

    Args:
      changes: as `compute_changes` returns it.
      conditions: the conditions.

    Returns:
      The figure. Strengths increase from left to right within a method.
    """
    from matplotlib.figure import Figure

    methods = list(changes["method"].unique())
    known = set(changes["condition"])
    kinds = list(dict.fromkeys(c.kind for c in conditions if c.text in known))
    by_key = changes.set_index(["method", "condition"])["change"].to_dict()
    values = np.full((len(kinds), 3 * len(methods)), math.nan)
    for condition in conditions:
        if condition.kind in kinds:
            row, level = kinds.index(condition.kind), condition.kind.values.index(condition.value)
            for index, method in enumerate(methods):
                values[row, 3 * index + level] = by_key.get((method, condition.text), math.nan)
    size = (2.2 + 0.36 * values.shape[1], 1.2 + 0.27 * len(kinds))
    figure = Figure(figsize=size, layout="constrained")
    panel = figure.subplots()
    limit = max(np.nanmax(np.abs(values), initial=0.0), 1.0)
    image = panel.imshow(values, cmap="PuOr_r", vmin=-limit, vmax=limit, aspect="auto")
    for (y, x), value in np.ndenumerate(np.rint(values) + 0.0):  # no negative zeros
        style: Any = {"ha": "center", "va": "center", "fontsize": 7}
        color = "white" if abs(value) > 0.6 * limit else "black"
        text = format_number(value, "+.0f" if value else ".0f")
        panel.text(x, y, text, color=color, **style)
    for boundary in range(3, values.shape[1], 3):
        panel.axvline(boundary - 0.5, color="black", linewidth=0.8)
    groups = [kind.group for kind in kinds]
    for boundary in range(1, len(kinds)):
        if groups[boundary] != groups[boundary - 1]:
            panel.axhline(boundary - 0.5, color="black", linewidth=0.8)
    titles = [get_method_title(method) for method in methods]
    panel.set_xticks(np.arange(len(methods)) * 3 + 1, titles, fontsize=9)
    panel.set_yticks(range(len(kinds)), [kind.name for kind in kinds], fontsize=9)
    panel.tick_params(length=0)
    panel.set_xlabel("method; strength increases from left to right", fontsize=10)
    panel.set_ylabel("kind of heterogeneity", fontsize=10)
    figure.colorbar(image, ax=panel, label="change of accuracy (points)", pad=0.01)
    return figure


def _write_outputs(table_run: TableRun) -> Sequence[str]:
    scores = collect_scores(table_run)
    if not len(scores):
        print("There is no run to show.")
        return []
    conditions = list_conditions(_ROUNDS[table_run.preset])
    changes = compute_changes(scores, conditions)
    text = make_changes_text(changes, conditions, f"{table_run.title}.")
    has_changes = changes["change"].notna().any()
    figures = {"atlas.png": plot_changes(changes, conditions)} if has_changes else {}
    names = table_run.write_table("atlas", text, changes, figures)
    correlations = correlate_measures(scores, conditions)
    if correlations["rho"].notna().any():
        title = f"{table_run.title}. Measures of a split."
        text = make_correlations_text(correlations, title)
        names = [*names, *table_run.write_table("correlations", text, correlations)]
    return names


main = make_table_program(ATLAS, _write_outputs)
