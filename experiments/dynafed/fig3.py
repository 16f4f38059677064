"""DynaFed's Figure 3: losses of three clients' data in local training and in fine-tuning.

python experiments/dynafed/fig3.py                  the embedded digits, a minute on 2 cores
python experiments/dynafed/fig3.py --preset cpu     Fashion-MNIST, width 32: two hours
python experiments/dynafed/fig3.py --preset paper   CIFAR-10: a GPU's work
python experiments/dynafed/fig3.py --result results/table1-cpu/DIGEST.json    of a run that is there

From the average after which the data are synthesised, `--shown` rounds are run step by step: each
client's model on its own data after every local step, then, from the average on, the global model
on the same clients' data over the steps of fine-tuning; a star is its mean loss over all training
data afterwards. A control, dotted, is the same fine-tuning from the same average on as many random
real images. The three clients take part in every one of these rounds, the others are drawn; clients
start each with a new optimiser, where the run before them keeps it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd

from experiments.dynafed import settings
from experiments.dynafed.fig6 import data_of, network, synthetic_data, trajectory_of
from fedjax_het import RunSpec, simulate
from fedjax_het.common.errors import require, require_name
from fedjax_het.common.files import make_output_directory
from fedjax_het.common.pictures import plain_axes, write_figure
from fedjax_het.common.records import Count, Whole
from fedjax_het.condensation import fine_tune
from fedjax_het.data import Dataset, load_dataset
from fedjax_het.report import to_csv
from fedjax_het.report.programs import record_program
from fedjax_het.report.style import add_legend
from fedjax_het.report.write import write_text
from fedjax_het.running.ledger import describe
from fedjax_het.running.progress import progress_line
from fedjax_het.running.result import Result
from fedjax_het.running.splits import split_clients
from fedjax_het.settings.spec import ResolvedSpec

CLIENTS = 3
COLOURS = ("#0072B2", "#009E73", "#E69F00")
DASHES = {"tuning": (3, 1), "control": (1, 1)}
TUNING_STEPS = (0, 5, 20)  # after which the global model is measured: each is compiled


def spec_of(preset: str) -> ResolvedSpec:
    """Of one run that ends with the round after the synthesis."""
    declared = settings.PRESETS[preset]
    (dataset,), (model,) = declared.datasets, declared.models
    unused = ("server_options", "rounds")
    shared = {name: value for name, value in declared.settings.items() if name not in unused}
    own = declared.method_settings.get("dynafed", {}) | declared.model_settings.get(model, {})
    run = RunSpec("dynafed", dataset, model=model, alpha=0.01, rounds=21, **shared, **own)
    return run.resolved()


PRESETS = {name: spec_of(name) for name in settings.PRESETS}


@dataclass
class Arguments:
    """The command line."""

    preset: str = "quick"
    """quick, cpu or paper."""
    shown: Count = 3
    """Rounds that are run step by step."""
    seed: Whole = 0
    """Of the run, of its clients, and of what is drawn here."""
    result: str | None = None
    """JSON of a kept run of DynaFed, as those of Table 1, whose data and seed these are to be;
    default: a run of the preset is made, up to the synthesis."""
    output_dir: str | None = None
    """Folder of the figure (default: results/dynafed-fig3-PRESET)."""
    list: bool = False
    """Print the run; do nothing."""


def padded(partition) -> tuple[np.ndarray, np.ndarray]:
    """Positions [K, n] of the clients' examples, and whether they are there."""
    offsets = partition.offsets
    own = [partition.indices[a:b] for a, b in pairwise(offsets)]
    most = max(map(len, own))
    positions = np.stack([np.pad(each, (0, most - len(each))) for each in own])
    return positions, np.arange(most) < np.array([[len(each)] for each in own])


def batches(there: np.ndarray, batch_size: int, epochs: int, rng) -> np.ndarray:
    """[K, steps, B] places in a client's own examples; -1 is no example. Each epoch visits all."""
    most = -(-there.shape[1] // batch_size) * batch_size
    clients = []
    for row in there:
        order = [rng.permutation(row.sum()) for _ in range(epochs)]
        filled = [np.pad(o, (0, most - len(o)), constant_values=-1) for o in order]
        clients.append(np.concatenate(filled).reshape(-1, batch_size))
    return np.stack(clients)


class Steps(NamedTuple):
    """Compiled steps of a run, from the parameters at hand."""

    train: Callable
    """(params, positions [K, n], there [K, n], steps [K, S, B]) -> the clients' parameters, and the
    losses [K, S + 1] of each on its own data."""
    tune: Callable
    """(params, key, epochs, real) -> params, fine-tuned on the synthetic data, or on as many random
    real images."""
    losses: Callable
    """(params, positions [K, n], there [K, n]) -> [K]."""


def steps_of(run: Result, dataset: Dataset) -> Steps:
    spec = run.spec
    task, apply, _ = network(spec, dataset)
    kinds = data_of(run, task, dataset)
    images, labels = jnp.asarray(dataset.train_images), jnp.asarray(dataset.train_labels)
    optimizer = optax.adam(spec.hp["local_lr"])

    def loss(params, positions, weights):
        logits = apply(params, task.normalise(images[positions]))
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels[positions])
        return (weights * each).sum() / jnp.maximum(weights.sum(), 1)

    @jax.jit
    @partial(jax.vmap, in_axes=(None, 0, 0, 0))
    def train(params, positions, there, steps):
        def step(carry, places):
            params, memory = carry
            real = places >= 0
            gradient = jax.grad(loss)(params, positions[places], real)
            change, after = optimizer.update(gradient, memory, params)
            # A step without any example changes nothing.
            kept = jax.tree.map(
                lambda new, old: jnp.where(real.any(), new, old),
                (optax.apply_updates(params, change), after),
                (params, memory),
            )
            return kept, loss(kept[0], positions, there)

        first = loss(params, positions, there)
        (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), steps)
        return params, jnp.concatenate([first[None], losses])

    @partial(jax.jit, static_argnames=("epochs", "real"))
    def tune(params, key, epochs, real=False):
        return fine_tune(
            apply,
            params,
            kinds["real" if real else "synthetic"],
            key,
            epochs=epochs,
            lr=spec.hp["fine_tune_lr"],
            augment_strategy=spec.options["augment_strategy"],
            loss_scaling=spec.options["loss_scaling"],
            optimizer=spec.options["fine_tune_optimizer"],
        )

    return Steps(train, tune, jax.jit(jax.vmap(loss, in_axes=(None, 0, 0))))


def kept_run(path: str) -> Result:
    """ConfigError where it has no synthetic data."""
    require(Path(path).is_file(), "result", path, "the JSON of a kept run")
    run = Result.load(path)
    synthetic_data(run, path)
    return run


def measure(run: Result, dataset: Dataset, shown: int) -> pd.DataFrame:
    """A row per measured step: `round` (from 1), `phase` (local, tuning, control or all), `client`,
    `step` in its phase, `loss` in nats."""
    spec = run.spec
    assert spec.local_epochs is not None
    train, tune, own_losses = steps_of(run, dataset)
    params = network(spec, dataset)[2](trajectory_of(run)[-1])
    positions, there = padded(split_clients(spec, dataset))
    sizes = there.sum(1)
    rng = np.random.default_rng(spec.seed)
    followed = rng.choice(np.flatnonzero(sizes), CLIENTS, replace=False)
    others = np.setdiff1d(np.arange(len(sizes)), followed)
    cohort = max(CLIENTS, int(spec.num_clients * spec.participation))
    rows = []
    for number in range(1, shown + 1):
        drawn = rng.choice(others, cohort - CLIENTS, replace=False)
        chosen = np.concatenate([followed, drawn])
        steps = batches(there[chosen], spec.batch_size, spec.local_epochs, rng)
        trained, losses = train(params, positions[chosen], there[chosen], steps)
        average = jax.tree.map(lambda leaf: leaf.mean(0), trained)
        for place in range(CLIENTS):
            for step, value in enumerate(np.asarray(losses[place])):
                rows.append((number, "local", place, step, float(value)))
        key = jax.random.fold_in(jax.random.key(spec.seed), number)
        for step in TUNING_STEPS:  # draws are by step: each is a part of the longest
            for phase, real in (("control", True), ("tuning", False)):
                params = tune(average, key, step, real) if step else average
                found = np.asarray(own_losses(params, positions[followed], there[followed]))
                rows += [(number, phase, c, step, float(v)) for c, v in enumerate(found)]
        every = np.asarray(own_losses(params, positions, there), np.float64)
        mean = float((every * sizes).sum() / sizes.sum())
        rows.append((number, "all", -1, TUNING_STEPS[-1], mean))
    return pd.DataFrame(rows, columns=["round", "phase", "client", "step", "loss"])


def draw(table: pd.DataFrame, title: str):
    """Rounds one after the other; each has local steps, then fine-tuning (shaded), equally wide."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(7.5, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.add_subplot()
    longest = table.query("phase == 'local'")["step"].max()
    last = TUNING_STEPS[-1]
    for number, rows in table.groupby("round"):
        start = 2 * (number - 1)
        panel.axvspan(start + 1, start + 2, color="#D55E00", alpha=0.08, linewidth=0)
        for client, colour in enumerate(COLOURS):
            own = rows[rows["client"] == client]
            local = own.query("phase == 'local'")
            panel.plot(start + local["step"] / longest, local["loss"], color=colour, lw=1.5)
            for phase, dashes in DASHES.items():
                tuned = own[own["phase"] == phase]
                at = start + 1 + tuned["step"] / last
                panel.plot(at, tuned["loss"], color=colour, lw=1.5, linestyle=(0, dashes))
        star = rows.query("phase == 'all'")["loss"]
        panel.plot([start + 2], star, marker="*", markersize=11, color="#000000", linestyle="none")
    rounds = sorted(table["round"].unique())
    panel.set_xticks([2 * n - 1.5 for n in rounds], [f"local training {n}" for n in rounds])
    panel.set_yscale("symlog", linthresh=1e-2)
    panel.set_ylim(bottom=0)
    panel.set_ylabel("Loss (nats)")
    panel.set_title(title, fontsize=10)
    plain_axes(panel)
    handles = [
        *(
            Line2D([], [], color=colour, lw=2, label=f"client {letter}")
            for colour, letter in zip(COLOURS, "abc", strict=True)
        ),
        Line2D([], [], color="#444444", linestyle=(0, DASHES["tuning"]), label="fine-tuning"),
        Line2D([], [], color="#444444", linestyle=(0, DASHES["control"]), label="on real images"),
        Line2D([], [], color="#000000", marker="*", linestyle="none", label="all data, after it"),
    ]
    add_legend(figure, handles)
    return figure


def run(arguments: Arguments) -> int:
    require_name("preset", arguments.preset, PRESETS)
    made = None if arguments.result is None else kept_run(arguments.result)
    spec = replace(PRESETS[arguments.preset], seed=arguments.seed, partition_seed=None).resolved()
    spec = spec if made is None else made.spec
    if arguments.list:
        print(f"{describe(spec)}; then {arguments.shown} rounds step by step")
        return 0
    dataset = load_dataset(spec.dataset, normalisation=spec.normalisation)
    if made is None:
        with progress_line(describe(spec), passing=True) as show:
            made = simulate(spec, dataset=dataset, progress=show)
    table = measure(made, dataset, arguments.shown)
    directory = make_output_directory(
        arguments.output_dir or f"results/dynafed-fig3-{arguments.preset}"
    )
    after = spec.options["trajectory_rounds"]
    title = f"{spec.dataset}, alpha {spec.alpha:g}, after {after} rounds"
    write_figure(directory / "fig3.png", draw(table, title))
    write_text(directory / "fig3.csv", to_csv(table))
    print(f"Written to {directory}: fig3.png, fig3.csv.")
    return 0


main = record_program(
    Arguments,
    run,
    "DynaFed, Figure 3: losses of clients' data in local training and fine-tuning.",
)


if __name__ == "__main__":
    raise SystemExit(main())
