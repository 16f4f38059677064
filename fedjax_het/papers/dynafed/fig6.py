"""DynaFed's Figure 6: quality of the synthetic data.

python experiments/dynafed/fig6.py                  the embedded digits, a minute on 2 cores
python experiments/dynafed/fig6.py --preset cpu     Fashion-MNIST, width 32: as Table 1
python experiments/dynafed/fig6.py --preset paper   CIFAR-10: a GPU's work

`fig6_distance.png`: networks train from every checkpoint for s' steps on the synthetic data, on
equally many random real images and on noise. The distance is 1 minus the cosine between their
parameters and the checkpoint s rounds later. All three have the learned step size and the method's
augmentation; noise has one class per image, and equal numbers of each class. `fig6_scratch.png`:
accuracy of networks trained by one recipe on the synthetic data alone and, as a control, on equally
many random real images, against local epochs.

The runs are the runs of Table 1, in its folder. For other numbers of local epochs, runs end with
the round after the synthesis. `--show` draws the available runs. The public code trains three
copies of the federation's initial network; here each of the three has its own initialization.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax.flatten_util import ravel_pytree

from fedjax_het.analysis import to_csv
from fedjax_het.analysis.figures.direct_labels import LineLabel, label_line_ends
from fedjax_het.analysis.figures.style import (
    add_note,
    make_panels,
    set_integer_ticks,
    style_axes,
)
from fedjax_het.analysis.report import write_text
from fedjax_het.analysis.synthetic_measures import load_synthetic_data, load_trajectory
from fedjax_het.condensation import (
    SyntheticData,
    SyntheticTask,
    matching_loss,
    unroll,
)
from fedjax_het.condensation.downstream_eval import (
    HARD_LABEL_LOGIT,
    random_subset,
    train_and_test,
)
from fedjax_het.config.run_spec import ResolvedRunSpec
from fedjax_het.core.client_loop import Examples
from fedjax_het.core.task import Task
from fedjax_het.data import Dataset, load_dataset
from fedjax_het.nn import make_model
from fedjax_het.papers.dynafed.settings import EXPERIMENT, FOLDER, PRESETS
from fedjax_het.papers.table import TableRun, make_table_program
from fedjax_het.runtime.results import Result
from fedjax_het.utils.arrays import make_key

EXTRA_LOCAL_EPOCHS = {"quick": (2, 10), "cpu": (), "paper": (5, 10)}  # in addition to Table 1's
NUM_NETWORKS = 3
SCRATCH_EPOCHS = 501
LINE_COLORS = {"synthetic": "#D55E00", "real": "#0072B2", "noise": "#777777"}


FIG6 = EXPERIMENT(
    name="dynafed-fig6",
    results_folder=FOLDER,
    item="fig6",
    title="DynaFed, Figure 6: the quality of the synthetic data.",
    has_reported_values=False,
    presets={
        name: replace(
            PRESETS[name],
            rows=("dynafed", *(f"dynafed(local_epochs={n}, rounds=21)" for n in extra_epochs)),
        )
        for name, extra_epochs in EXTRA_LOCAL_EPOCHS.items()
    },
)


def build_network(spec: ResolvedRunSpec, dataset: Dataset):
    """Build the network of a run.

    Args:
      spec: settings of the run.
      dataset: its data set.

    Returns:
      The task, the function `apply(params, images)` in training mode, and the function that makes
      parameters from a vector `[P]`.
    """
    model = make_model(spec.model, dataset.input_shape, dataset.num_classes, **spec.model_options)
    variables = model.init(make_key(spec.seed))
    state = variables["state"]

    def apply(params, images):
        return model.apply({"params": params, "state": state}, images, train=True)[0]

    return Task(model, dataset.mean, dataset.std), apply, ravel_pytree(variables["params"])[1]


def build_comparison_data(result: Result, task: Task, dataset: Dataset) -> dict[str, SyntheticData]:
    """Return the run's synthetic data, equally many random real images, and noise.

    Args:
      result: result of a run of DynaFed.
      task: task of `build_network`.
      dataset: data set of the run.

    Returns:
      Data by name: `synthetic`, `real` and `noise`.
    """
    synthetic = load_synthetic_data(result, dataset.num_classes)
    seed = result.spec.seed
    num_samples, classes = synthetic.label_logits.shape
    labels = np.arange(num_samples) * classes // num_samples
    indices = random_subset(dataset.train_labels, labels, seed=seed)
    hard_logits = HARD_LABEL_LOGIT * jax.nn.one_hot(labels, classes)
    noise = jax.random.normal(make_key(seed), synthetic.inputs.shape)
    real = task.normalize(jnp.asarray(dataset.train_inputs[indices]))
    return {
        "synthetic": synthetic,
        "real": SyntheticData(real, hard_logits, synthetic.step_size),
        "noise": SyntheticData(noise, hard_logits, synthetic.step_size),
    }


def measure_distances(result: Result, dataset: Dataset) -> pd.DataFrame:
    """Measure the distances from the checkpoints that a segment leads to.

    Args:
      result: result of a run of DynaFed.
      dataset: data set of the run.

    Returns:
      A row per checkpoint `start`, and a column per kind of data.
    """
    spec = result.spec.resolved()
    task, apply, unravel = build_network(spec, dataset)
    data = build_comparison_data(result, task, dataset)
    options = spec.options
    trajectory = jnp.asarray(load_trajectory(result))
    length = options["segment_length"]
    synthetic_task = SyntheticTask(apply, options["augment_strategy"], options["loss_scaling"])

    @jax.jit
    def distance(data, start, target, key):
        end = unroll(
            *(synthetic_task, unravel, start, data, key),
            num_steps=options["inner_steps"],
            batch_size=options["inner_batch_size"],
        )
        return matching_loss(end, start, target, distance="cosine")

    rows = []
    for start in range(len(trajectory) - length):
        key = jax.random.fold_in(make_key(spec.seed), start)
        checkpoints = trajectory[start], trajectory[start + length], key
        distance_by_data = {
            name: float(distance(synthetic, *checkpoints)) for name, synthetic in data.items()
        }
        rows.append({"alpha": spec.alpha, "seed": spec.seed, "start": start, **distance_by_data})
    return pd.DataFrame(rows)


def scratch_accuracies(results: list[Result], dataset: Dataset) -> pd.DataFrame:
    """Train networks from scratch on the synthetic data, and on equally many random real images.

    The runs may differ in data and seed only, so that one compilation serves all.

    Args:
      results: results of runs of DynaFed.
      dataset: data set of the runs.

    Returns:
      A row per run, `data` (`synthetic` or `real`) and `network`, with its test `accuracy` as a
      fraction.
    """
    spec = results[0].spec.resolved()
    task, _, _ = build_network(spec, dataset)
    images, labels = jnp.asarray(dataset.test_inputs), jnp.asarray(dataset.test_labels)
    accuracy = partial(
        train_and_test,
        task.model,
        test=Examples(task.normalize(images), labels),
        **{name: spec.options[name] for name in ("augment_strategy", "loss_scaling")},
        epochs=SCRATCH_EPOCHS,
    )
    rows = []
    for result in results:
        data = build_comparison_data(result, task, dataset)
        identifiers = {
            name: getattr(result.spec, name) for name in ("alpha", "local_epochs", "seed")
        }
        keys = jax.random.split(make_key(result.spec.seed), NUM_NETWORKS)
        for kind, (number, key) in product(("synthetic", "real"), enumerate(keys)):
            row = {"data": kind, "network": number, "accuracy": float(accuracy(data[kind], key))}
            rows.append({**identifiers, **row})
    return pd.DataFrame(rows)


def plot_distances(table: pd.DataFrame):
    """Plot `measure_distances` against the start, a panel per alpha."""
    groups = {f"alpha {alpha:g}": rows for alpha, rows in table.groupby("alpha", sort=False)}
    figure, panels = make_panels(list(groups), columns=len(groups), size=(3.6, 2.8), sharey="all")
    labels: dict[Any, list[LineLabel]] = {panel: [] for panel in panels.values()}
    for title, rows in groups.items():
        panel, by_start = panels[title], rows.groupby("start")
        for name, color in LINE_COLORS.items():
            mean, std = by_start[name].mean(), by_start[name].std().fillna(0)
            panel.plot(mean.index, mean, color=color, lw=1.6, label=name)
            band: Any = {"color": color, "alpha": 0.15, "linewidth": 0}
            panel.fill_between(mean.index, mean - std, mean + std, **band)
            labels[panel].append(LineLabel(name, float(mean.iloc[-1]), color))
        panel.set_xlabel("Start t (round)")
        panel.set_xlim(rows["start"].min(), rows["start"].max())
        set_integer_ticks(panel)
        style_axes(panel)
    next(iter(labels)).set_ylabel("Cosine distance")
    label_line_ends(figure, labels)
    add_note(figure, "band: one standard deviation over seeds")
    return figure


def plot_scratch_accuracies(table: pd.DataFrame):
    """Plot `scratch_accuracies` against the local epochs, a panel per alpha."""
    groups = {f"alpha {alpha:g}": rows for alpha, rows in table.groupby("alpha")}
    figure, panels = make_panels(list(groups), columns=len(groups), size=(3.2, 2.8), sharey="all")
    labels: dict[Any, list[LineLabel]] = {panel: [] for panel in panels.values()}
    for title, alpha_rows in groups.items():
        panel = panels[title]
        for kind, rows in alpha_rows.groupby("data"):
            accuracies = 100 * rows.groupby("local_epochs")["accuracy"].agg(["mean", "std"])
            mean, std, color = accuracies["mean"], accuracies["std"].fillna(0), LINE_COLORS[kind]
            panel.errorbar(mean.index, mean, std, color=color, marker="o", capsize=3, label=kind)
            labels[panel].append(LineLabel(kind, float(mean.iloc[-1]), color))
        panel.set_xticks(sorted(table["local_epochs"].unique()))
        panel.set_xlabel("Local epochs")
        style_axes(panel)
    next(iter(labels)).set_ylabel("Test accuracy from scratch (%)")
    label_line_ends(figure, labels)
    add_note(figure, "bars: one standard deviation over seeds and networks")
    return figure


def _write_outputs(table_run: TableRun) -> list[str]:
    results = [result for _, result in table_run.iterate_results()]
    if not results:
        print("There is no run to draw.")
        return []
    spec = results[0].spec
    dataset = load_dataset(spec.dataset, normalization=spec.normalization)
    shortest = min(result.spec.local_epochs or 0 for result in results)
    shortest_results = [r for r in results if r.spec.local_epochs == shortest]
    frames = [measure_distances(result, dataset) for result in shortest_results]
    distance = pd.concat(frames, ignore_index=True)
    sort_columns = ["alpha", "local_epochs", "data", "seed", "network"]
    scratch = scratch_accuracies(results, dataset).sort_values(sort_columns)
    print(FIG6.title)
    print("Cosine distance from the checkpoint s rounds on, mean over starts and seeds:")
    print(distance.groupby("alpha")[list(LINE_COLORS)].mean().to_string())
    print("Test accuracy (%) from scratch, mean over seeds and networks:")
    print((100 * scratch.groupby(sort_columns[:3])["accuracy"].mean()).to_string())
    figures = {
        "fig6_distance.png": plot_distances(distance),
        "fig6_scratch.png": plot_scratch_accuracies(scratch),
    }
    tables = {"fig6_distance.csv": distance, "fig6_scratch.csv": scratch}
    for name, table in tables.items():
        write_text(table_run.directory / name, to_csv(table))
    return [*table_run.write_figures(figures), *tables]


main = make_table_program(FIG6, _write_outputs)
