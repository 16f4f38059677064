"""DynaFed's Theorem 1 and Lemma 3 on a strongly convex problem: softmax regression on the digits.

python experiments/dynafed/convergence.py   minutes on one core

Theorem 1 bounds the loss at step T by C / T if steps decay as c / (t + gamma): tau_1 steps of local
training on single examples, the average, tau_2 full steps on the synthetic data (Eq. 6). Lemma 3
says that each step on the synthetic data contracts the distance to the optimum. This program runs
that analysis in float64, from the optimum that Newton's method finds. Data of fine-tuning are
DynaFed's (from a run of the package on the same network and clients), noise with uniform labels,
random real images, and all examples, for which delta and epsilon of Assumption 3 are 0. Constant
mean gradients of the two phases balance at the minimum of tau_1 L(D) + tau_2 L(D_syn); the table
compares that limit with the reached point.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import softmax

from fedjax_het.analysis.figures.style import FigureFormat, add_legend, make_panels, style_axes
from fedjax_het.analysis.render import TableSection, TextTable, format_number
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.papers.convergence_bounds import fit_gradient_error
from fedjax_het.papers.fedamp.theory import fit_rate
from fedjax_het.papers.programs import make_config_program
from fedjax_het.papers.softmax_regression import (
    ConvexFederation,
    SoftmaxRegression,
    make_convex_federation,
)
from fedjax_het.papers.table.table_run import write_table_files
from fedjax_het.runtime.session import simulate
from fedjax_het.utils.config import NonNegativeInt, PositiveInt
from fedjax_het.utils.errors import require
from fedjax_het.utils.io import make_output_directory

TITLE = "DynaFed, Theorem 1 and Lemma 3: rates on softmax regression with l2, digits."
NUM_SAMPLES = 150
DATA_COLORS = {
    "no fine-tuning": "#000000",
    "all examples": "#009E73",
    "real images": "#0072B2",
    "matched": "#D55E00",
    "untrained": "#777777",
}
CAPTION = (
    "tau_1 {local} steps of local training, tau_2 {server} of fine-tuning, eta_t = c / (t + gamma) "
    "with c = 2 / mu and gamma = 8 L / mu; {steps} steps in all. delta, epsilon: Assumption 3, fitted "
    "at the averages; the theorem needs delta L / mu below 1. Slopes: of the squared distance and of "
    "the gap L(w) - L(w*) over t + gamma in logarithms, second half of the logarithmic range; the "
    "theorem has -1. Distance²: to the optimum at the end; limit: of the minimum of tau_1 L(D) + "
    "tau_2 L(D_syn). Rate: mean of -log(distance² after / before fine-tuning) / sum of eta, first "
    "and last tenth of the rounds; positive is a contraction, which Lemma 3 claims. Nearer, lower: "
    "percent of all rounds in which fine-tuning lowers the distance, and the loss. Means over seeds."
)
_COLUMNS = {
    "delta": ("delta", ".3f"),
    "epsilon": ("epsilon", ".3f"),
    "delta L / mu": ("ratio", ".1f"),
    "Slope of distance²": ("distance_slope", "+.2f"),
    "Slope of gap": ("gap_slope", "+.2f"),
    "Gap": ("gap", ".2e"),
    "Distance²": ("distance", ".3g"),
    "Limit": ("limit", ".3g"),
    "Rate, first": ("first_rate", "+.2f"),
    "Rate, last": ("last_rate", "+.2f"),
    "Nearer": ("nearer", ".0f"),
    "Lower": ("lower", ".0f"),
}


@dataclass
class Arguments:
    """The command line."""

    seeds: tuple[NonNegativeInt, ...] = (1, 2, 3)
    """Seeds of the partition, of the synthesis and of the examples that clients draw."""
    steps: PositiveInt = 30_000
    """Number of steps T of each trajectory."""
    local_steps: PositiveInt = 24
    """Steps of local training in a round, tau_1; 24 in the paper's protocol on Fashion-MNIST."""
    server_steps: PositiveInt = 20
    """Steps of fine-tuning in a round, tau_2; 20 epochs of one batch in DynaFed."""
    iterations: PositiveInt = 500
    """Iterations of DynaFed's synthesis."""
    output_dir: Path = Path("results/dynafed-convergence")
    """Folder of the table."""
    pictures: tuple[FigureFormat, ...] = ()
    """Additional files of each figure: pdf, svg (default: PNG only)."""
    list: bool = False
    """Print the settings of the trajectories; compute nothing."""


class FineTuningData(NamedTuple):
    """Examples with soft labels."""

    features: np.ndarray
    "`[m, D]`."
    labels: np.ndarray
    "Probabilities, `[m, C]`."

    def compute_gradient(self, point: np.ndarray, l2: float) -> np.ndarray:
        """Compute the gradient of the mean cross-entropy and the penalty.

        Args:
          point: W, `[D, C]`.
          l2: coefficient of the penalty.

        Returns:
          The gradient, `[D, C]`.
        """
        errors = softmax(self.features @ point, axis=1) - self.labels
        return self.features.T @ errors / len(errors) + l2 * point

    def mix(self, loss: SoftmaxRegression, share: float) -> SoftmaxRegression:
        """Return (1 - share) times a loss plus share times the loss of these examples.

        A soft label is a weighted example of every class.

        Args:
          loss: the other loss.
          share: weight of these examples.

        Returns:
          The sum.
        """
        examples, classes = np.nonzero(self.labels)
        own_weights = share * self.labels[examples, classes] / len(self.labels)
        return SoftmaxRegression(
            np.concatenate([loss.features, self.features[examples]]),
            np.concatenate([loss.labels, classes]),
            np.concatenate([(1 - share) * loss.weights, own_weights]),
            loss.l2,
        )


def make_fine_tuning_data(
    federation: ConvexFederation, seed: int, iterations: int
) -> dict[str, FineTuningData]:
    """Make the data of fine-tuning by name, those of DynaFed from a run of the package.

    Args:
      federation: the problem.
      seed: seed of the run and of the draws.
      iterations: iterations of the synthesis.

    Returns:
      Data by name, without those of FedAvg.
    """
    loss, rng = federation.loss, np.random.default_rng(seed)
    one_hot, (num_clients, _) = np.eye(10), federation.clients.shape
    spec = RunSpec(
        "dynafed",
        "digits",
        model="mlp",
        network_options={"hidden": []},
        partition="classes_per_client",
        classes=2,
        num_clients=num_clients,
        participation=1.0,
        batch_size=10,
        local_optimizer="sgd",
        rounds=21,
        seed=seed,
        partition_seed=seed,
        hp={
            "local_lr": 0.02,
            "local_weight_decay": loss.l2,
            "step_size": 0.4,
            "step_size_lr": 1e-3,
        },
        options={"num_iterations": iterations, "num_samples": NUM_SAMPLES},
    )
    artifacts = simulate(spec, progress=False).artifacts
    images = np.asarray(artifacts["synthetic_images"], np.float64)
    matched = softmax(np.asarray(artifacts["synthetic_label_logits"], np.float64), axis=1)
    noise = rng.normal(size=(NUM_SAMPLES, loss.features.shape[1] - 1))
    used = federation.clients.ravel()
    drawn = rng.choice(used, NUM_SAMPLES, replace=False)

    def add_bias(features: np.ndarray) -> np.ndarray:
        return np.concatenate([features, np.ones((len(features), 1))], axis=1)

    return {
        "all examples": FineTuningData(loss.features[used], one_hot[loss.labels[used]]),
        "real images": FineTuningData(loss.features[drawn], one_hot[loss.labels[drawn]]),
        "matched": FineTuningData(add_bias(images.reshape(len(images), -1)), matched),
        "untrained": FineTuningData(add_bias(noise), np.full((NUM_SAMPLES, 10), 0.1)),
    }


def run_dynafed(
    federation: ConvexFederation,
    optimum: np.ndarray,
    data: FineTuningData | None,
    arguments: Arguments,
    seed: int,
) -> dict[str, np.ndarray]:
    """Run the steps of Eq. 6 from W = 0, with all clients.

    Args:
      federation: the problem.
      optimum: w*, `[D, C]`.
      data: data of fine-tuning; None: FedAvg.
      arguments: numbers of steps.
      seed: seed of the examples that clients draw.

    Returns:
      By round: `step` (t + gamma at its end), `sum` (of eta over fine-tuning); after the average
      (`average_...`) and at the end the squared distance and gap `L(w) - L(w*)`; `error` and
      `gradient` of Assumption 3 at the average.
    """
    loss, clients = federation.loss, federation.clients
    rng, point = np.random.default_rng(seed), np.zeros_like(optimum)
    lowest = loss.compute_value(optimum)
    offset, rows = 8 * loss.smoothness / loss.l2, []
    local_steps, server_steps = arguments.local_steps, arguments.server_steps if data else 0
    client_ids, one_hot = np.arange(len(clients)), np.eye(10)

    def measure(point: np.ndarray, prefix: str = "") -> dict[str, float]:
        distance = float(((point - optimum) ** 2).sum())
        return {f"{prefix}distance": distance, f"{prefix}gap": loss.compute_value(point) - lowest}

    for start in range(0, arguments.steps, local_steps + server_steps):
        etas = 2 / loss.l2 / (start + np.arange(local_steps + server_steps) + offset)
        models = np.repeat(point[None], len(clients), axis=0)
        for eta in etas[:local_steps]:
            drawn = clients[client_ids, rng.integers(clients.shape[1], size=len(clients))]
            features = loss.features[drawn]
            logits = (features[:, None] @ models)[:, 0]
            errors = softmax(logits, axis=1) - one_hot[loss.labels[drawn]]
            models -= eta * (features[:, :, None] * errors[:, None] + loss.l2 * models)
        point = models.mean(0)
        row = measure(point, "average_")
        if data:
            full = loss.compute_gradient(point)
            row["error"] = float(np.linalg.norm(data.compute_gradient(point, loss.l2) - full))
            row["gradient"] = float(np.linalg.norm(full))
            for eta in etas[local_steps:]:
                point = point - eta * data.compute_gradient(point, loss.l2)
        row |= {"step": start + len(etas) + offset, "sum": etas[local_steps:].sum()}
        rows.append(row | measure(point))
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def summarize_run(
    curves: dict[str, np.ndarray], condition_number: float, limit: float | None
) -> dict[str, float]:
    """Summarize a trajectory.

    Args:
      curves: curves of `run_dynafed`.
      condition_number: L / mu.
      limit: squared distance of the minimum of the weighted sum of both losses to the optimum; None
        for FedAvg.

    Returns:
      The columns of the table; NaN where FedAvg has no value.
    """
    step, tenth = curves["step"], max(1, len(curves["step"]) // 10)
    late = step >= np.sqrt(step[0] * step[-1])
    late_steps = pd.Series(step[late])
    summary: dict[str, float] = {
        "distance_slope": fit_rate(late_steps, pd.Series(curves["distance"][late])),
        "gap_slope": fit_rate(late_steps, pd.Series(curves["gap"][late])),
        "gap": curves["gap"][-1],
        "distance": curves["distance"][-1],
    }
    if limit is None:
        return {key: summary.get(key, np.nan) for key, _ in _COLUMNS.values()}
    bound = fit_gradient_error(curves["error"], curves["gradient"])
    ratios = curves["distance"] / curves["average_distance"]
    rates = -np.log(ratios) / curves["sum"]
    return summary | {
        "delta": bound.delta,
        "epsilon": bound.epsilon,
        "ratio": bound.delta * condition_number,
        "limit": limit,
        "first_rate": rates[:tenth].mean(),
        "last_rate": rates[-tenth:].mean(),
        "nearer": 100 * (ratios < 1).mean(),
        "lower": 100 * (curves["gap"] < curves["average_gap"]).mean(),
    }


def plot_convergence(curves_by_data: dict[str, list[dict[str, np.ndarray]]]):
    """Plot the squared distance and the gap by t + gamma, a line per run.

    Args:
      curves_by_data: curves of each seed, by name of the data.

    Returns:
      A figure; dotted lines are the rate 1 / (t + gamma).
    """
    from matplotlib.lines import Line2D

    titles = {"distance": "squared distance to the optimum", "gap": "L(w) - L(w*)"}
    figure, panels = make_panels(list(titles.values()), columns=2, size=(4.4, 3.4), sharey="none")
    for name, title in titles.items():
        panel = panels[title]
        for data, runs in curves_by_data.items():
            for curves in runs:
                panel.plot(curves["step"], curves[name], color=DATA_COLORS[data], lw=1.1)
        curves = curves_by_data["no fine-tuning"][0]
        step, bound = curves["step"], curves[name][-1] * curves["step"][-1] / curves["step"]
        panel.plot(step, bound, color="#444444", ls=":", lw=1.2)
        panel.set(xscale="log", yscale="log")
        panel.set_xlabel("t + gamma", fontsize=10)
        style_axes(panel)
    colors = {name: color for name, color in DATA_COLORS.items() if name in curves_by_data}
    handles: list[Any] = [Line2D([], [], color=c, lw=2, label=name) for name, c in colors.items()]
    handles.append(Line2D([], [], color="#444444", ls=":", label="C / (t + gamma)"))
    add_legend(figure, handles)
    return figure


def make_table(arguments: Arguments) -> int:
    """Run all trajectories, and write the table and the figure."""
    require(len(arguments.seeds) > 0, "seeds", arguments.seeds, "at least one seed")
    if arguments.list:
        for seed in arguments.seeds:
            for name in DATA_COLORS:
                print(f"seed {seed}, fine-tuning on {name}, {arguments.steps:,} steps")
        return 0
    curves_by_data: dict[str, list[dict[str, np.ndarray]]] = {name: [] for name in DATA_COLORS}
    rows = []
    for seed in arguments.seeds:
        federation = make_convex_federation(seed=seed)
        loss, optimum = federation.loss, federation.loss.minimize()
        data_by_name = make_fine_tuning_data(federation, seed, arguments.iterations)
        share = arguments.server_steps / (arguments.local_steps + arguments.server_steps)
        for name in DATA_COLORS:
            data = data_by_name.get(name)
            curves = run_dynafed(federation, optimum, data, arguments, seed)
            limit = ((data.mix(loss, share).minimize() - optimum) ** 2).sum() if data else None
            summary = summarize_run(curves, loss.smoothness / loss.l2, limit)
            rows.append({"data": name, "seed": seed, **summary})
            curves_by_data[name].append(curves)
    table = pd.DataFrame(rows)
    texts = []
    for name, own in table.groupby("data", sort=False):
        mean = own.mean(numeric_only=True)
        numbers = {label: format_number(mean[key], spec) for label, (key, spec) in _COLUMNS.items()}
        texts.append({"Fine-tuning on": name, **numbers, "Seeds": str(len(own))})
    caption = CAPTION.format(
        local=arguments.local_steps, server=arguments.server_steps, steps=f"{arguments.steps:,}"
    )
    text_table = TextTable(TITLE, ["Fine-tuning on"], [TableSection(texts)], [caption])
    directory = make_output_directory(arguments.output_dir)
    figures = {"convergence.png": plot_convergence(curves_by_data)}
    names = write_table_files(
        directory, "convergence", text_table, table, figures, formats=arguments.pictures
    )
    print(f"Written to {directory}: {', '.join(names)}.")
    return 0


main = make_config_program(Arguments, make_table, TITLE)
