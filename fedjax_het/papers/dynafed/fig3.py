"""DynaFed's Figure 3: losses of three clients' data in local training and in fine-tuning.

python experiments/dynafed/fig3.py                  the embedded digits, a minute on 2 cores
python experiments/dynafed/fig3.py --preset cpu     Fashion-MNIST, width 32: two hours
python experiments/dynafed/fig3.py --preset paper   CIFAR-10: a GPU's work
python experiments/dynafed/fig3.py --result results/table1-cpu/DIGEST.json    of a finished run

From the average after which the data are synthesized, `--shown` rounds are run step by step. First,
the lines are the losses of each client's model on its own data after every local step. Then, from
the average on, they are the losses of the global model on the same clients' data during
fine-tuning. A star is its mean loss over all training data afterwards. A control, dotted, is the
same fine-tuning from the same average on equally many random real images. The three clients take
part in every one of these rounds, the others are drawn. Clients start each round with a new
optimizer state, while the run before keeps it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd

from fedjax_het.algorithms.dynafed import FINE_TUNE_OPTIMIZERS
from fedjax_het.analysis import to_csv
from fedjax_het.analysis.figures.style import FigureFormat, add_legend, style_axes, write_figure
from fedjax_het.analysis.report import write_text
from fedjax_het.analysis.synthetic_measures import load_trajectory
from fedjax_het.condensation import SyntheticTask, fine_tune
from fedjax_het.config.run_spec import ResolvedRunSpec, RunSpec
from fedjax_het.core.server_training import EpochRange
from fedjax_het.data import Dataset, load_dataset
from fedjax_het.papers.dynafed import settings
from fedjax_het.papers.dynafed.fig6 import build_comparison_data, build_network
from fedjax_het.papers.programs import make_config_program
from fedjax_het.runtime.data_assignment import build_partition
from fedjax_het.runtime.progress import show_progress
from fedjax_het.runtime.result_display import format_run_label
from fedjax_het.runtime.results import Result
from fedjax_het.runtime.session import simulate
from fedjax_het.utils.arrays import make_key
from fedjax_het.utils.config import NonNegativeInt, PositiveInt
from fedjax_het.utils.errors import require, require_name
from fedjax_het.utils.io import make_output_directory

CLIENTS = 3
CLIENT_COLORS = ("#0072B2", "#009E73", "#E69F00")
PHASE_DASHES = {"tuning": (3, 1), "control": (1, 1)}
TUNING_STEPS = (0, 5, 20)  # epochs after which the global model is measured; each is compiled


def make_run_spec(preset: str) -> ResolvedRunSpec:
    """Return the settings of a run that ends with the round after the synthesis."""
    declaration = settings.PRESETS[preset]
    (dataset,), (model,) = declaration.datasets, declaration.models
    unused = ("server_options", "rounds")
    own = {name: value for name, value in declaration.settings.items() if name not in unused}
    own |= declaration.method_settings.get("dynafed", {})
    own |= declaration.model_settings.get(model, {})
    return RunSpec("dynafed", dataset, model=model, alpha=0.01, rounds=21, **own).resolved()


PRESETS = {name: make_run_spec(name) for name in settings.PRESETS}


@dataclass
class Arguments:
    """The command line."""

    preset: str = "quick"
    """Size of the run: quick, cpu or paper."""
    shown: PositiveInt = 3
    """Number of rounds that are run step by step."""
    seed: NonNegativeInt = 0
    """Seed of the run, of its clients and of the draws of this program."""
    result: str | None = None
    """JSON file of a run of DynaFed, for example of Table 1. Its synthetic data and seed are used
    (default: a run of the preset is made, up to the synthesis)."""
    output_dir: Path | None = None
    """Folder of the figure (default: results/dynafed-fig3-PRESET)."""
    list: bool = False
    """Print the run; do nothing."""
    pictures: tuple[FigureFormat, ...] = ()
    """Additional files of each figure: pdf, svg (default: PNG only)."""


def pad_partition(partition) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions `[K, n]` of the clients' examples, and whether they are no padding."""
    indices = [partition.indices[a:b] for a, b in pairwise(partition.offsets)]
    max_size = max(map(len, indices))
    positions = np.stack([np.pad(own, (0, max_size - len(own))) for own in indices])
    return positions, np.arange(max_size) < np.array([[len(own)] for own in indices])


def draw_batches(is_example: np.ndarray, batch_size: int, epochs: int, rng) -> np.ndarray:
    """Draw the batches of all clients; each epoch visits all examples once.

    Args:
      is_example: whether a position holds an example of the client, `[K, n]`.
      batch_size: number of examples per batch, B.
      epochs: number of epochs.
      rng: NumPy generator.

    Returns:
      Positions in a client's own examples, int `[K, steps, B]`; -1 is padding.
    """
    padded_size = -(-is_example.shape[1] // batch_size) * batch_size
    clients = []
    for row in is_example:
        order = [rng.permutation(row.sum()) for _ in range(epochs)]
        padded_orders = [np.pad(o, (0, padded_size - len(o)), constant_values=-1) for o in order]
        clients.append(np.concatenate(padded_orders).reshape(-1, batch_size))
    return np.stack(clients)


class TrainingFunctions(NamedTuple):
    """Compiled functions of a run."""

    train: Callable
    """Function of parameters, positions `[K, n]`, whether these are examples `[K, n]`, and batches
    `[K, S, B]`. It returns the clients' parameters, and their losses `[K, S + 1]` on their data."""
    tune: Callable
    """Function of parameters, key, epochs and `real`. It returns the parameters after fine-tuning
    on the synthetic data, or on equally many random real images."""
    losses: Callable
    """Function of parameters, positions `[K, n]` and whether these are examples `[K, n]` that
    returns the losses `[K]`."""


def build_training_functions(run: Result, dataset: Dataset) -> TrainingFunctions:
    """Build the functions that run a round step by step.

    Args:
      run: result of a run of DynaFed.
      dataset: its data set.

    Returns:
      The functions.
    """
    spec = run.spec.resolved()
    task, apply, _ = build_network(spec, dataset)
    data_by_kind = build_comparison_data(run, task, dataset)
    images, labels = jnp.asarray(dataset.train_inputs), jnp.asarray(dataset.train_labels)
    optimizer = optax.adam(spec.hyperparameters["local_lr"])
    synthetic_task = SyntheticTask(
        apply, spec.options["augment_strategy"], spec.options["loss_scaling"]
    )

    def loss(params, positions, weights):
        logits = apply(params, task.normalize(images[positions]))
        example_losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels[positions])
        return (weights * example_losses).sum() / jnp.maximum(weights.sum(), 1)

    @jax.jit
    @partial(jax.vmap, in_axes=(None, 0, 0, 0))
    def train(params, positions, is_example, steps):
        def step(carry, positions_in_client):
            params, optimizer_state = carry
            is_in_batch = positions_in_client >= 0
            gradient = jax.grad(loss)(params, positions[positions_in_client], is_in_batch)
            updates, new_optimizer_state = optimizer.update(gradient, optimizer_state, params)
            # A step without any example changes nothing.
            carry_out = jax.tree.map(
                lambda new, old: jnp.where(is_in_batch.any(), new, old),
                (optax.apply_updates(params, updates), new_optimizer_state),
                (params, optimizer_state),
            )
            return carry_out, loss(carry_out[0], positions, is_example)

        first = loss(params, positions, is_example)
        (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), steps)
        return params, jnp.concatenate([first[None], losses])

    @partial(jax.jit, static_argnames=("epochs", "real"))
    def tune(params, key, epochs, real=False):
        return fine_tune(
            synthetic_task,
            params,
            data_by_kind["real" if real else "synthetic"],
            key,
            optimizer=FINE_TUNE_OPTIMIZERS[spec.options["fine_tune_optimizer"]](
                spec.hp["fine_tune_lr"]
            ),
            epochs=EpochRange(epochs),
        )

    return TrainingFunctions(train, tune, jax.jit(jax.vmap(loss, in_axes=(None, 0, 0))))


def load_run(path: str) -> Result:
    """Load a result of DynaFed.

    Raises:
      ConfigError: if the file cannot be read, or the result has no synthetic data.
    """
    try:
        run = Result.load(path)
    except OSError:
        require(False, "result", path, "the JSON file of a run")
        raise
    expected = "a run of dynafed with synthetic data"
    require("synthetic_images" in run.artifacts, "result", path, expected)
    return run


def measure_losses(run: Result, dataset: Dataset, num_rounds: int) -> pd.DataFrame:
    """Run rounds step by step and measure losses.

    Args:
      run: result of a run of DynaFed.
      dataset: its data set.
      num_rounds: number of rounds.

    Returns:
      A row per measured step: `round` (from 1), `phase` (local, tuning, control or all), `client`,
      `step` in its phase, `loss` in nats.
    """
    spec = run.spec.resolved()
    assert spec.local_epochs is not None
    train, tune, client_losses = build_training_functions(run, dataset)
    params = build_network(spec, dataset)[2](load_trajectory(run)[-1])
    positions, is_example = pad_partition(build_partition(spec, dataset))
    sizes = is_example.sum(1)
    rng = np.random.default_rng(spec.seed)
    followed = rng.choice(np.flatnonzero(sizes), CLIENTS, replace=False)
    others = np.setdiff1d(np.arange(len(sizes)), followed)
    cohort = max(CLIENTS, int(spec.num_clients * spec.participation))
    rows = []
    for round_number in range(1, num_rounds + 1):
        other_clients = rng.choice(others, cohort - CLIENTS, replace=False)
        participants = np.concatenate([followed, other_clients])
        steps = draw_batches(is_example[participants], spec.batch_size, spec.local_epochs, rng)
        trained, losses = train(params, positions[participants], is_example[participants], steps)
        average = jax.tree.map(lambda leaf: leaf.mean(0), trained)
        for client in range(CLIENTS):
            for step, value in enumerate(np.asarray(losses[client])):
                rows.append((round_number, "local", client, step, float(value)))
        key = jax.random.fold_in(make_key(spec.seed), round_number)
        for step in TUNING_STEPS:  # draws are by step: each is a part of the longest
            for phase, real in (("control", True), ("tuning", False)):
                params = tune(average, key, step, real) if step else average
                losses_by_client = np.asarray(
                    client_losses(params, positions[followed], is_example[followed])
                )
                rows += [
                    (round_number, phase, c, step, float(v)) for c, v in enumerate(losses_by_client)
                ]
        all_losses = np.asarray(client_losses(params, positions, is_example), np.float64)
        mean = float((all_losses * sizes).sum() / sizes.sum())
        rows.append((round_number, "all", -1, TUNING_STEPS[-1], mean))
    return pd.DataFrame(rows, columns=["round", "phase", "client", "step", "loss"])


def plot_losses(table: pd.DataFrame, title: str):
    """Plot the rounds one after the other: local steps, then fine-tuning (shaded), equally wide.

    Args:
      table: losses of `measure_losses`.
      title: title of the figure.

    Returns:
      The figure.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(7.5, 3.8), layout="constrained")
    panel = figure.add_subplot()
    longest = table.query("phase == 'local'")["step"].max()
    for number, rows in table.groupby("round"):
        start = 2 * (number - 1)
        panel.axvspan(start + 1, start + 2, color="#D55E00", alpha=0.08, linewidth=0)
        for client, color in enumerate(CLIENT_COLORS):
            phases = dict(list(rows[rows["client"] == client].groupby("phase")))
            x = start + phases["local"]["step"] / longest
            panel.plot(x, phases["local"]["loss"], color=color, lw=1.5)
            for phase, dashes in PHASE_DASHES.items():
                x = start + 1 + phases[phase]["step"] / TUNING_STEPS[-1]
                panel.plot(x, phases[phase]["loss"], color=color, lw=1.5, linestyle=(0, dashes))
        star = rows.query("phase == 'all'")["loss"]
        panel.plot([start + 2], star, marker="*", markersize=11, color="#000000", linestyle="none")
    rounds = sorted(table["round"].unique())
    panel.set_xticks([2 * n - 1.5 for n in rounds], [f"local training {n}" for n in rounds])
    panel.set_yscale("symlog", linthresh=1e-2)
    panel.set_ylim(bottom=0)
    panel.set_ylabel("Loss (nats)")
    panel.set_title(title, fontsize=10)
    style_axes(panel)
    styles: dict[str, dict[str, Any]] = {
        f"client {letter}": {"color": color, "lw": 2}
        for color, letter in zip(CLIENT_COLORS, "abc", strict=True)
    }
    styles["fine-tuning"] = {"color": "#444444", "linestyle": (0, PHASE_DASHES["tuning"])}
    styles["on real images"] = {"color": "#444444", "linestyle": (0, PHASE_DASHES["control"])}
    styles["all data, after it"] = {"color": "#000000", "marker": "*", "linestyle": "none"}
    add_legend(figure, [Line2D([], [], label=label, **style) for label, style in styles.items()])
    return figure


def make_figure(arguments: Arguments) -> int:
    """Make the figure of a run, and print its files."""
    require_name("preset", arguments.preset, PRESETS)
    result = None if arguments.result is None else load_run(arguments.result)
    spec = replace(PRESETS[arguments.preset], seed=arguments.seed, partition_seed=None).resolved()
    spec = spec if result is None else result.spec.resolved()
    if arguments.list:
        print(f"{format_run_label(spec)}; then {arguments.shown} rounds step by step")
        return 0
    dataset = load_dataset(spec.dataset, normalization=spec.normalization)
    if result is None:
        with show_progress(format_run_label(spec), transient=True) as show:
            result = simulate(spec, dataset=dataset, progress=show)
    table = measure_losses(result, dataset, arguments.shown)
    directory = make_output_directory(
        arguments.output_dir or f"results/dynafed-fig3-{arguments.preset}"
    )
    after = spec.options["trajectory_rounds"]
    title = f"{spec.dataset}, alpha {spec.alpha:g}, after {after} rounds"
    figure = plot_losses(table, title)
    write_figure(directory / "fig3.png", figure, formats=arguments.pictures)
    write_text(directory / "fig3.csv", to_csv(table))
    print(f"Written to {directory}: fig3.png, fig3.csv.")
    return 0


main = make_config_program(
    Arguments,
    make_figure,
    "DynaFed, Figure 3: losses of clients' data in local training and fine-tuning.",
)
