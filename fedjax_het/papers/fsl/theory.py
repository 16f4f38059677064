"""FSL's theorems on a strongly convex problem: rates, drifts, Eq. 10, and the weight gamma.

python experiments/fsl/theory.py                  minutes on 2 cores
python experiments/fsl/theory.py --preset quick   a minute

The clients have parts of the digits with two labels each, and the loss is softmax regression with
l2 (`papers.softmax_regression`), so L, the optimum and all constants of the theorems are known. The
package's FSL trains; all measurements are in float64.

`theory_rates.md` and its figure: the lowest mean ||grad F~||^2 of T rounds at the step of Corollary
1, whose first term depends on K S T alone, and the bound of Theorem 2. Columns `clients` and
`server` are the drifts E^(c) and E^(0) of the proofs in units of their bounds (Lemmas 4 and 5).

`theory_server.md` and its figure: Eq. 10, the variance of the server's gradient against n / n_0 -
1; the limit of large gamma, which is SGD on the server's data; and a diminishing gamma.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.fsl import FSLOptions, fsl
from fedjax_het.analysis.figures.style import PALETTE, add_note, make_panels, style_axes
from fedjax_het.analysis.render import TableSection, TextTable, format_number
from fedjax_het.core.client_loop import Cohort, Examples
from fedjax_het.core.execution_plan import ExecutionPlan, make_execution_plan
from fedjax_het.core.gradient_diagnostics import GRADIENT_GAP_NAMES
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.optimizers import LocalTrainingOptions
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.core.schedule import RoundSettings, Scheduler
from fedjax_het.core.server_training import train_on_server
from fedjax_het.core.task import Task
from fedjax_het.core.work_items import ClientWork
from fedjax_het.data import make_server_data, partition_from_clients
from fedjax_het.papers.convergence_bounds import compute_progress_terms
from fedjax_het.papers.fedamp.theory import fit_rate
from fedjax_het.papers.programs import make_config_program
from fedjax_het.papers.softmax_regression import (
    NUM_CLASSES,
    ConvexFederation,
    SoftmaxRegression,
    make_convex_federation,
    stack_params,
)
from fedjax_het.papers.table.table_run import write_table_files
from fedjax_het.utils.arrays import make_key
from fedjax_het.utils.errors import require_name
from fedjax_het.utils.io import make_output_directory

NUM_CLIENTS, CLIENT_SIZE = 20, 60
BATCH_SIZE, SERVER_SIZE = 10, 50
SERVER_SIZES = (10, 20, 50, 100, 200, 500)
STEP_SCALES = (0.025, 0.4)  # of Corollary 1's step; with the first, (13) holds
LIMIT_STEP, LIMIT_GAMMAS = 0.25, (1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)
DECAY_STEP, DECAYED_GAMMAS = 0.1, (1.0, 4.0)
TITLE = "FSL, Theorem 2 and Corollary 1: the lowest squared gradient in T rounds."
CAPTION = (
    "Softmax regression with l2 0.1, digits, 20 clients with two labels each, a server with 50 "
    "examples. T: the lowest mean of ||grad F~(x_t)||^2, t < T, over seeds. Slope: of its logarithm "
    "over the logarithm of T; -0.5 by the corollary's first term. Bound: Theorem 2's at the largest T "
    "with the measured constants. Distance²: mean of ||x_T - x~*||^2. clients, server: the drifts "
    "E^(c) and E^(0) in units of Lemmas 4 and 5, the largest of the rounds."
)
SERVER_TITLE = "FSL: Eq. 10, the limit of large gamma, and a diminishing gamma."
SERVER_CAPTION = (
    "Eq. 10: mean of ||grad f_0 - grad F||^2 over draws of D_0, with its standard error. Reference: "
    "the right-hand side. Equal classes: draws with equal class counts, the package's default. "
    "Distance: of x_T from SGD's on D_0 with equal minibatches, in units of the length of SGD's path "
    "from x_0 to x_T, gamma eta_0 being constant. F - F*: excess of the clients' loss."
)


# --- FSL on the convex problem ---------------------------------------------------------------


class Setting(NamedTuple):
    """A run of FSL; eta_g = sqrt(S), and E_s as in the paper."""

    local_steps: int = 5
    "K."
    cohort_size: int = 10
    "S."
    gamma: float = 1.0
    "Weight of the server's loss."
    gamma_decay: float = 1.0
    "Factor of gamma from round to round."

    @property
    def server_lr(self) -> float:
        """eta_g."""
        return math.sqrt(self.cohort_size)

    @property
    def server_epochs(self) -> int:
        """E_s = ceil(K B / n_0), the paper's rule."""
        return -(-self.local_steps * BATCH_SIZE // SERVER_SIZE)

    @property
    def server_steps(self) -> int:
        """K_0."""
        return self.server_epochs * SERVER_SIZE // BATCH_SIZE

    @property
    def theorem_arguments(self) -> dict[str, Any]:
        """Arguments of `compute_progress_terms` in addition to the measured curves."""
        return {
            "gamma": self.gamma,
            "server_lr": self.server_lr,
            "num_clients": NUM_CLIENTS,
            "cohort_size": self.cohort_size,
            "client_steps": self.local_steps,
            "server_steps": self.server_steps,
        }


SETTINGS = (
    *(Setting(local_steps=K) for K in (1, 5, 20)),
    *(Setting(cohort_size=S) for S in (1, NUM_CLIENTS)),
    *(Setting(gamma=gamma) for gamma in (0.0, 0.5, 2.0)),
)


class Preset(NamedTuple):
    """Sizes of the measurements."""

    rounds: tuple[int, ...]
    "T, ascending."
    seeds: tuple[int, ...]
    "Seeds of cohorts and minibatches."
    draws: int
    "Draws of D_0."
    settings: tuple[Setting, ...] = SETTINGS
    "Settings of the rates."


PRESETS = {
    "cpu": Preset((32, 128, 512), (1, 2, 3), 400),
    "quick": Preset((4, 16), (1, 2), 40, (Setting(), Setting(gamma=0.0))),
}


@dataclass
class Arguments:
    """The command line."""

    preset: str = "cpu"
    """Size of the measurements: cpu (minutes) or quick (a minute)."""
    output_dir: Path = Path("results/fsl-theory")
    """Folder of the tables and figures."""
    list: bool = False
    """Print the settings of the rates; compute nothing."""


class Problem(NamedTuple):
    """The clients, and the server with its examples."""

    federation: ConvexFederation
    server_examples: np.ndarray
    "Positions of D_0, `[n_0]`."

    @property
    def shape(self) -> tuple[int, int]:
        """D and C of a model."""
        return self.federation.loss.features.shape[1], NUM_CLASSES

    @property
    def server_loss(self) -> SoftmaxRegression:
        """f_0."""
        return self.federation.loss.with_weights(self.server_examples)

    @property
    def client_losses(self) -> list[SoftmaxRegression]:
        """f_1 to f_N."""
        return [self.federation.loss.with_weights(client) for client in self.federation.clients]

    def mix(self, gamma: float) -> SoftmaxRegression:
        """Return F~ = (F + gamma f_0) / (1 + gamma)."""
        weights = self.federation.loss.weights + gamma * self.server_loss.weights
        return self.federation.loss._replace(weights=weights / (1 + gamma))

    @property
    def smoothness(self) -> float:
        """L of Assumption 1, the largest of the clients and the server."""
        return max(loss.smoothness for loss in [self.server_loss, *self.client_losses])


def make_problem() -> Problem:
    """Return clients with two labels each, and a server with examples of all classes."""
    federation = make_convex_federation(NUM_CLIENTS)
    partition = partition_from_clients(list(federation.clients))
    server = make_server_data("iid", federation.dataset, partition, 0, {"size": SERVER_SIZE})
    return Problem(federation, server.indices)


class Trajectory(NamedTuple):
    """The models of runs, and the drifts of their rounds; `[settings, seeds, T, ...]`."""

    points: np.ndarray
    "x_0 to x_T, float64 `[..., T + 1, D, C]`."
    client_drift: np.ndarray
    "Mean of ||x^(i)_{t,k} - x_t||^2 over k < K and clients, `[..., T]`: samples of E^(c)."
    server_drift: np.ndarray
    "Mean of ||w_{t,k} - x_t||^2 over k < K_0, `[..., T]`: samples of E^(0)."


def record_drift(task: Task, name: str) -> Task:
    """Return a task that adds ||params - anchor||^2 to `state[name]` at every gradient.

    The network must have no state. Local training and the server carry the record like batch-norm
    statistics from step to step, and FedAvg averages it.

    Args:
      task: the task.
      name: `client` or `server`.

    Returns:
      The task.
    """

    class DriftTask(type(task)):  # type: ignore[misc]
        def loss_and_gradient(self, variables: Any, *args: Any, **settings: Any):
            record = variables["state"]
            loss, gradient, _ = super().loss_and_gradient(
                {**variables, "state": {}}, *args, **settings
            )
            drift = optax.tree.sub(variables["params"], record["anchor"])
            total = record[name] + optax.tree.norm(drift, squared=True)
            return loss, gradient, {**variables, "state": {**record, name: total}}

    return DriftTask(*task)


def fsl_with_drifts(training: LocalTraining, plan: ExecutionPlan, options: FSLOptions) -> Algorithm:
    """FSL whose global model's `state` has the sums over steps of both drifts of the last round.

    Sum `client` is the mean over the round's clients.

    Args:
      training: the choices of local training; the network has no state.
      plan: where the clients run.
      options: options of FSL.

    Returns:
      The method; `init` takes variables whose state is empty.
    """

    def make_base(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
        return fedavg(training._replace(task=record_drift(task, "client")), plan)

    def with_record(variables: Any) -> Any:
        params, zero = variables["params"], jnp.zeros(())
        return {"params": params, "state": {"anchor": params, "client": zero, "server": zero}}

    task = training.task
    training = training._replace(task=record_drift(task, "server"))
    algorithm = fsl(training, plan, base=make_base, options=options)
    assert algorithm.global_model and algorithm.with_global_model
    get_model, set_model = algorithm.global_model, algorithm.with_global_model

    def run_round(hp, state, key, cohort):
        return algorithm.round(hp, set_model(state, with_record(get_model(state))), key, cohort)

    def init(hp, key, variables, num_clients):
        return algorithm.init(hp, key, with_record(variables), num_clients)

    return algorithm._replace(init=init, round=run_round)


class Trainer:
    """Runs FSL with several settings and seeds in one program, all from one initial model.

    Args:
      problem: clients and server.
      local_steps: K.
      cohort_size: S.
    """

    def __init__(self, problem: Problem, local_steps: int = 5, cohort_size: int = 10):
        self._setting = setting = Setting(local_steps, cohort_size)
        self._problem, plan = problem, make_execution_plan(1, 1, mesh_axis=None)
        dataset, _, clients, task = problem.federation
        images, labels = jnp.asarray(dataset.train_inputs), jnp.asarray(dataset.train_labels)
        examples, positions = Examples(images, labels), problem.server_examples
        server = Examples(images[positions], labels[positions])
        local = LocalTrainingOptions(num_steps=local_steps)
        training = LocalTraining(task, "sgd", None, batch_size=BATCH_SIZE, options=local)
        options = FSLOptions(server_epochs=setting.server_epochs)
        algorithm = fsl_with_drifts(training, plan, options)
        get_model, make_round = algorithm.global_model, algorithm.round
        assert get_model
        self._variables = variables = task.model.init(make_key(0))

        def init(hp, key):
            return algorithm.init(hp, key, variables, len(clients))

        def run_round(hp, state, key, schedule):
            key = jax.random.fold_in(key, state.round)
            state, _ = make_round(hp, state, key, Cohort(schedule, examples, server))
            return state, get_model(state)

        self._init = jax.jit(jax.vmap(jax.vmap(init, (None, 0)), (0, None)))
        by_seed = jax.vmap(run_round, (None, 0, 0, 0))
        self._run_round = jax.jit(jax.vmap(by_seed, (0, 0, None, None)))

    def train(
        self, settings: Sequence[Setting], steps: Sequence[float], preset: Preset, rounds: int
    ) -> Trajectory:
        """Run FSL.

        Args:
          settings: settings with K and S of the trainer.
          steps: K_0 eta_0 = K eta_l eta_g of each setting.
          preset: seeds of the cohorts and minibatches.
          rounds: T.

        Returns:
          The models and drifts, with leading axes of settings and seeds.
        """
        K, S, server_lr = (
            self._setting.local_steps,
            self._setting.cohort_size,
            self._setting.server_lr,
        )
        clients, seeds = self._problem.federation.clients, preset.seeds
        partition = partition_from_clients(list(clients))
        work = ClientWork(partition, 0, BATCH_SIZE, extra_batches=K)
        round_settings = [RoundSettings(seed, rounds, S / len(clients)) for seed in seeds]
        schedulers = [Scheduler(work, own, 1, 1) for own in round_settings]
        hp = {
            "server_lr": jnp.full(len(settings), server_lr),
            "local_lr": jnp.array(steps) / (K * server_lr),
            "gamma": jnp.array([setting.gamma for setting in settings]),
            "gamma_decay": jnp.array([setting.gamma_decay for setting in settings]),
        }
        keys = jnp.stack([make_key(seed) for seed in seeds])
        state, models = self._init(hp, keys), []
        for r in range(rounds):
            schedules = [scheduler.make_round(r) for scheduler in schedulers]
            schedule = jax.tree.map(lambda *arrays: np.stack(arrays), *schedules)
            state, model = self._run_round(hp, state, keys, schedule)
            models.append(jax.device_get(model))
        shape = (len(settings), len(seeds), *self._problem.shape)
        start = np.broadcast_to(stack_params(self._variables["params"]), shape)
        points = np.stack([start, *(stack_params(model["params"]) for model in models)], axis=2)
        client, server = (
            np.stack([model["state"][name] for model in models], axis=2)
            for name in ("client", "server")
        )
        return Trajectory(points, client / K, server / self._setting.server_steps)


# --- measurements in float64 -----------------------------------------------------------------


def measure_gradients(problem: Problem, points: np.ndarray) -> dict[str, np.ndarray]:
    """Measure the metrics of `core.gradient_diagnostics.measure_gradient_gaps` in float64.

    The noises are the exact variances of a minibatch that is drawn without replacement.

    Args:
      problem: clients and server.
      points: models, `[P, D, C]`.

    Returns:
      Values `[P]` by metric, and `cosine`, of the gradients of f_0 and F.
    """
    loss, rows = problem.federation.loss, []
    for point in points:
        logit_gradients = loss.compute_logit_gradients(point)

        def compute(examples, logit_gradients=logit_gradients, point=point):
            """Return the gradient of the mean over examples, and the noise of a minibatch."""
            n, own = len(examples), logit_gradients[examples]
            features = loss.features[examples]
            gradient = features.T @ own / n
            squares = (features**2).sum(1) * (own**2).sum(1)
            variance = squares.mean() - _squared_norm(gradient)
            return gradient + loss.l2 * point, (n / BATCH_SIZE - 1) / (n - 1) * variance

        gradient = loss.compute_gradient(point)
        server, server_noise = compute(problem.server_examples)
        gradients, noises = zip(*map(compute, problem.federation.clients), strict=True)
        norm, server_norm = np.linalg.norm(gradient), np.linalg.norm(server)
        row = {
            "client_gap": np.mean([_squared_norm(own - gradient) for own in gradients]),
            "server_gap": _squared_norm(server - gradient),
            "gradient_norm": norm,
            "server_norm": server_norm,
            "client_noise": np.mean(noises),
            "server_noise": server_noise,
            "cosine": np.vdot(gradient, server) / (norm * server_norm),
        }
        rows.append(row)
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _squared_norm(array: np.ndarray) -> float:
    return float(np.vdot(array, array))


def bound_drifts(
    setting: Setting, curves: dict[str, np.ndarray], step: float, smoothness: float
) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return the bounds of Lemmas 4 and 5, as a function of E^(c).

    Args:
      setting: K, S and gamma.
      curves: values of `measure_gradients` at x_t.
      step: K_0 eta_0.
      smoothness: L.

    Returns:
      `bound(client_drift) -> (bound of E^(c), bound of E^(0))`.
    """
    K, S, gamma = setting.local_steps, setting.cohort_size, setting.gamma
    squared_norm, noise, gap = (
        curves["gradient_norm"] ** 2,
        curves["client_noise"],
        curves["client_gap"],
    )
    cohort_noise = noise / (K * S) + (NUM_CLIENTS - S) / (NUM_CLIENTS - 1) * gap / S
    server_noise = gamma**2 * curves["server_noise"] / (3 * setting.server_steps)
    server_squared_norm = 4 / 3 * gamma**2 * curves["server_norm"] ** 2
    client_bound = 4 * (step / setting.server_lr) ** 2 * (squared_norm + noise / (2 * K) + gap)

    def bound(client_drift):
        terms = smoothness**2 * client_drift + squared_norm + server_squared_norm
        return client_bound, 12 * step**2 * (terms + cohort_noise + server_noise)

    return bound


def measure_rates(problem: Problem, preset: Preset) -> pd.DataFrame:
    """Measure the lowest mean squared gradient of F~ at two scales of Corollary 1's step.

    Args:
      problem: clients and server.
      preset: numbers of rounds and seeds.

    Returns:
      A row per setting, scale and T.
    """
    rows, smoothness = [], problem.smoothness
    groups: dict[tuple[int, int], list[Setting]] = {}
    for setting in preset.settings:
        groups.setdefault((setting.local_steps, setting.cohort_size), []).append(setting)
    for (K, S), settings in groups.items():
        trainer = Trainer(problem, K, S)
        cases = [(setting, scale) for scale in STEP_SCALES for setting in settings]
        optima = {setting.gamma: problem.mix(setting.gamma).minimize() for setting in settings}
        for rounds in preset.rounds:
            steps = [choose_step(*case, rounds) for case in cases]
            own_steps = [step / smoothness for step in steps]
            runs = trainer.train([setting for setting, _ in cases], own_steps, preset, rounds)
            for (setting, scale), step, *arrays in zip(cases, steps, *runs, strict=True):
                optimum = optima[setting.gamma]
                case = measure_case(problem, setting, step, Trajectory(*arrays), optimum)
                if scale != min(STEP_SCALES):
                    case["bound"] = math.nan  # beyond (13)
                rows.append(
                    {**setting._asdict(), "scale": scale, "T": rounds, "step": step, **case}
                )
    return pd.DataFrame(rows)


def choose_step(setting: Setting, scale: float, rounds: int) -> float:
    """Choose K_0 eta_0 L by Corollary 1.

    Args:
      setting: K, S and gamma.
      scale: factor; with the smallest of `STEP_SCALES` the step also obeys (11) and (13).
      rounds: T.

    Returns:
      The step.
    """
    work = setting.local_steps * setting.cohort_size
    step = scale * math.sqrt(work / rounds) / (1 + setting.gamma)
    if scale == min(STEP_SCALES):
        zeros = dict.fromkeys(GRADIENT_GAP_NAMES, np.zeros(1))
        step = min(step, compute_progress_terms(zeros, **setting.theorem_arguments).step)
    return step


def measure_case(
    problem: Problem, setting: Setting, step: float, run: Trajectory, optimum: np.ndarray
) -> dict[str, float]:
    """Measure the runs of one setting.

    Args:
      problem: clients and server.
      setting: the setting.
      step: K_0 eta_0 L.
      run: runs with a leading axis of seeds.
      optimum: x~*, of F~.

    Returns:
      `lowest`, the lowest mean of ||grad F~||^2; `bound`, Theorem 2's with the largest measured
      distances and noises; `distance`, the mean of ||x_T - x~*||^2; `client` and `server`, the
      largest of the rounds' drifts in units of their bounds.
    """
    rounds, mixed = run.client_drift.shape[1], problem.mix(setting.gamma)
    smoothness = problem.smoothness

    def mean_square(t: int) -> float:
        return float(np.mean([_squared_norm(mixed.compute_gradient(x)) for x in run.points[:, t]]))

    lowest = min(mean_square(t) for t in np.unique(np.linspace(0, rounds - 1, 48).astype(int)))
    sampled = np.unique(np.geomspace(1, rounds, 6).astype(int)) - 1
    seeds = [measure_gradients(problem, points[sampled]) for points in run.points]
    curves = {name: np.stack([curve[name] for curve in seeds]) for name in seeds[0]}
    drifts = run.client_drift[:, sampled], run.server_drift[:, sampled]
    bounds = bound_drifts(setting, curves, step / smoothness, smoothness)(drifts[0])
    client, server = (
        (drift.mean(0) / bound.mean(0)).max() for drift, bound in zip(drifts, bounds, strict=True)
    )
    largest = {name: np.array([curve.max()]) for name, curve in curves.items()}
    terms = compute_progress_terms(largest, **setting.theorem_arguments, step=step)
    start = run.points[0, 0]
    decrease = mixed.compute_value(start) - mixed.compute_value(optimum)
    bound = decrease * smoothness / (rounds * step) + float(terms.noise[0] + terms.drift[0])
    return {
        "lowest": lowest,
        "bound": bound / terms.descent_factor,
        "distance": float(np.mean([_squared_norm(x - optimum) for x in run.points[:, -1]])),
        "client": float(client),
        "server": float(server),
    }


def measure_variance(problem: Problem, draws: int) -> pd.DataFrame:
    """Measure Eq. 10 at x = 0 and at the optimum of F.

    Args:
      problem: clients.
      draws: number of draws of D_0 per size.

    Returns:
      A row per point and n_0: the mean of ||grad f_0 - grad F||^2 over simple random draws and
      over the package's draws with equal class counts, and Eq. 10.
    """
    loss, clients = problem.federation.loss, problem.federation.clients
    examples, partition = clients.ravel(), partition_from_clients(list(clients))
    n, rng, rows = clients.size, np.random.default_rng(0), []
    for name, point in (("0", np.zeros(problem.shape)), ("optimum", loss.minimize())):
        own = loss.compute_logit_gradients(point)
        gradients = (loss.features[:, :, None] * own[:, None, :]).reshape(len(own), -1)
        mean = gradients[examples].mean(0)
        variance = np.mean([_squared_norm(g - mean) for g in gradients[examples]])
        for size in SERVER_SIZES:
            drawn = [rng.choice(examples, size, replace=False) for _ in range(draws)]
            balanced = [
                make_server_data("iid", problem.federation.dataset, partition, k, {"size": size})
                for k in range(draws)
            ]
            random_gaps, balanced_gaps = (
                [_squared_norm(gradients[positions].mean(0) - mean) for positions in draw]
                for draw in (drawn, [server.indices for server in balanced])
            )
            row = {"point": name, "n0": size, "formula": (n / size - 1) / (n - 1) * variance}
            row |= {"measured": np.mean(random_gaps), "balanced": np.mean(balanced_gaps)}
            rows.append({**row, "error": np.std(random_gaps, ddof=1) / math.sqrt(draws)})
    return pd.DataFrame(rows)


def train_on_server_alone(
    problem: Problem, step: float, rounds: int, seeds: Sequence[int]
) -> np.ndarray:
    """Return x_T `[seeds, D, C]` of SGD on D_0, with the minibatches of FSL's server.

    Args:
      problem: the server.
      step: gamma K_0 eta_0.
      rounds: T.
      seeds: seeds of the minibatches.

    Returns:
      The models.
    """
    setting, (dataset, _, _, task) = Setting(), problem.federation
    images, labels = jnp.asarray(dataset.train_inputs), jnp.asarray(dataset.train_labels)
    examples = Examples(images[problem.server_examples], labels[problem.server_examples])

    @jax.jit
    @jax.vmap
    def run(key):
        def run_round(variables, r):
            round_key = fold_in_purpose(jax.random.fold_in(key, r), Purpose.SERVER)
            new = train_on_server(
                *(task, variables, examples, round_key),
                batch_size=BATCH_SIZE,
                lr=step / setting.server_steps,
                epochs=setting.server_epochs,
            )
            return new, ()

        return jax.lax.scan(run_round, task.model.init(make_key(0)), jnp.arange(rounds))[0]

    models = run(jnp.stack([make_key(seed) for seed in seeds]))
    return stack_params(jax.device_get(models)["params"])


def measure_limit(problem: Problem, preset: Preset) -> pd.DataFrame:
    """Measure the distance of FSL from SGD on D_0 at growing gamma, gamma eta_0 being constant.

    Args:
      problem: clients and server.
      preset: numbers of rounds and seeds.

    Returns:
      A row per gamma with `distance`, in units of ||x_T - x_0|| of SGD.
    """
    step, rounds = LIMIT_STEP / problem.smoothness, preset.rounds[-1]
    settings = [Setting(gamma=gamma) for gamma in LIMIT_GAMMAS]
    steps = [step / gamma for gamma in LIMIT_GAMMAS]
    runs = Trainer(problem).train(settings, steps, preset, rounds)
    alone = train_on_server_alone(problem, step, rounds, preset.seeds)
    length = np.linalg.norm(alone - runs.points[0, 0, 0], axis=(1, 2))
    distance = np.linalg.norm(runs.points[:, :, -1] - alone, axis=(2, 3)) / length
    return pd.DataFrame({"gamma": LIMIT_GAMMAS, "distance": distance.mean(1)})


def measure_decay(problem: Problem, preset: Preset) -> pd.DataFrame:
    """Measure F - F* along runs with constant and diminishing gamma.

    Args:
      problem: clients and server.
      preset: numbers of rounds and seeds.

    Returns:
      A row per setting and measured round with the mean over seeds, `excess`.
    """
    rounds, loss = 2 * preset.rounds[-1], problem.federation.loss
    lowest = loss.compute_value(loss.minimize())
    last = DECAYED_GAMMAS[0] / 100  # gamma of the last round
    settings = [Setting(gamma=gamma) for gamma in (0.0, *DECAYED_GAMMAS)]
    settings.append(Setting(gamma=4.0, gamma_decay=(last / 4.0) ** (1 / rounds)))
    steps = [DECAY_STEP / problem.smoothness] * len(settings)
    runs, rows = Trainer(problem).train(settings, steps, preset, rounds), []
    for setting, points in zip(settings, runs.points, strict=True):
        name = f"gamma {setting.gamma:g}"
        name += f" to {last:g}" if setting.gamma_decay < 1 else ""
        for t in np.unique(np.linspace(0, rounds, 40).astype(int)):
            excess = np.mean([loss.compute_value(x) for x in points[:, t]]) - lowest
            rows.append({"setting": name, "round": t, "excess": excess})
    return pd.DataFrame(rows)


# --- files -----------------------------------------------------------------------------------


def make_rates_table(rates: pd.DataFrame) -> TextTable:
    """Format the rates, a row per setting and a column per T.

    Args:
      rates: as `measure_rates` returns it.

    Returns:
      A section per scale of the steps.
    """
    sections = []
    for scale, scale_rows in rates.groupby("scale"):
        texts = []
        for (K, S, gamma), rows in scale_rows.groupby(["local_steps", "cohort_size", "gamma"]):
            text = {"K": f"{K}", "S": f"{S}", "gamma": f"{gamma:g}"}
            text |= {f"T {row.T}": f"{row.lowest:.3g}" for row in rows.itertuples()}
            last = rows.iloc[-1]
            text |= {
                "Slope": format_number(fit_rate(rows["T"], rows["lowest"]), "+.2f"),
                "Bound": format_number(last["bound"], ".3g"),
                "Distance²": f"{last['distance']:.3g}",
                "clients": f"{last['client']:.2f}",
                "server": f"{last['server']:.2f}",
            }
            texts.append(text)
        title = f"K_0 eta_0 L = {scale:g} sqrt(K S / T) / (1 + gamma)"
        title += ", at most (13)" if scale == min(STEP_SCALES) else ", beyond (13)"
        sections.append(TableSection(texts, title, {"Step": title}))
    return TextTable(TITLE, ["K", "S", "gamma"], sections, [CAPTION])


def plot_rates(rates: pd.DataFrame):
    """Plot the lowest squared gradient against K S T, a panel per varied setting.

    Args:
      rates: as `measure_rates` returns it.

    Returns:
      The figure; lines that coincide depend on K S T alone, as Corollary 1's first term.
    """
    names = {"K": "local_steps", "S": "cohort_size", "gamma": "gamma"}
    figure, panels = make_panels(
        [f"by {name}" for name in names], columns=3, size=(3.6, 3.2), sharey="all"
    )
    base = Setting()
    for (name, column), panel in zip(names.items(), panels.values(), strict=True):
        others = [other for other in names.values() if other != column]
        own = rates[(rates[others] == [getattr(base, other) for other in others]).all(axis=1)]
        values = sorted(own[column].unique())
        for (value, color), scale in product(zip(values, PALETTE, strict=False), STEP_SCALES):
            line = own[(own[column] == value) & (own["scale"] == scale)]
            is_small = scale == min(STEP_SCALES)
            label = None if is_small else f"{name} {value:g}"
            style = "--" if is_small else "-"
            work = line["local_steps"] * line["cohort_size"] * line["T"]
            panel.plot(work, line["lowest"], style, color=color, marker="o", ms=4, label=label)
        work, top = np.array([300.0, 1e5]), rates["lowest"].max()
        panel.plot(work, top * (work / work[0]) ** -0.5, ":", color="#444444", label="(KST)^-1/2")
        panel.set(xscale="log", yscale="log")
        panel.set_xlabel("K S T", fontsize=10)
        panel.legend(fontsize=8)
        style_axes(panel)
    next(iter(panels.values())).set_ylabel("lowest mean ||grad F~||²", fontsize=10)
    add_note(figure, "solid: large steps; dashed: steps within condition (13)")
    return figure


def _plot_server(variance: pd.DataFrame, limit: pd.DataFrame, decay: pd.DataFrame):
    """Plot Eq. 10, the limit of large gamma, and constant and diminishing gamma."""
    titles = ("Eq. 10", "large gamma: SGD on the server's data", "diminishing gamma")
    figure, panels = make_panels(titles, columns=3, size=(3.8, 3.2), sharey="none")
    equation, limits, decays = panels.values()
    n = NUM_CLIENTS * CLIENT_SIZE
    for (point, rows), color in zip(variance.groupby("point"), PALETTE, strict=False):
        x = n / rows["n0"] - 1
        equation.plot(x, rows["formula"], "-", color=color, label=f"Eq. 10, x = {point}")
        equation.plot(x, rows["measured"], "o", color=color, ms=4, label="random draws")
        equation.plot(x, rows["balanced"], "x", color=color, ms=5, label="equal class counts")
    equation.set_xlabel("n / n_0 - 1", fontsize=10)
    equation.set_ylabel("mean ||grad f_0 - grad F||²", fontsize=10)
    limits.plot(limit["gamma"], limit["distance"], "o-", color=PALETTE[0], label="FSL")
    first = limit.iloc[0]
    bound = first["distance"] * first["gamma"] / limit["gamma"]
    limits.plot(limit["gamma"], bound, ":", color="#444444", label="1 / gamma")
    limits.set_xlabel("gamma", fontsize=10)
    limits.set_ylabel("relative distance of x_T", fontsize=10)
    for (name, rows), color in zip(decay.groupby("setting", sort=False), PALETTE, strict=False):
        decays.plot(rows["round"], rows["excess"], color=color, label=name)
    decays.set_xlabel("round t", fontsize=10)
    decays.set_ylabel("F(x_t) - F*", fontsize=10)
    for panel in panels.values():
        panel.set(yscale="log")
        panel.legend(fontsize=7)
        style_axes(panel)
    for panel in (equation, limits):
        panel.set_xscale("log")
    return figure


def _make_server_table(
    variance: pd.DataFrame, limit: pd.DataFrame, decay: pd.DataFrame
) -> TextTable:
    """Format the measurements of `theory_server.png`."""
    equation = [
        {
            "Case": f"Eq. 10, x = {row.point}, n_0 {row.n0}",
            "Value": f"{row.measured:.4g} ± {row.error:.2g}",
            "Reference": f"{row.formula:.4g}",
            "Equal classes": f"{row.balanced:.4g}",
        }
        for row in variance.itertuples()
    ]
    limits = [
        {"Case": f"distance from SGD on D_0, gamma {row.gamma:g}", "Value": f"{row.distance:.3g}"}
        for row in limit.itertuples()
    ]
    decays = [
        {"Case": f"F - F* at the end, {name}", "Value": f"{rows['excess'].iloc[-1]:.3g}"}
        for name, rows in decay.groupby("setting", sort=False)
    ]
    empty = dict.fromkeys(("Reference", "Equal classes"), "")
    texts = [
        {**text, **({} if "Reference" in text else empty)} for text in equation + limits + decays
    ]
    sections = [TableSection(texts)]
    return TextTable(SERVER_TITLE, ["Case"], sections, [SERVER_CAPTION])


def measure_theory(arguments: Arguments) -> int:
    """Measure, print and write the tables and figures."""
    require_name("preset", arguments.preset, PRESETS)
    preset = PRESETS[arguments.preset]
    if arguments.list:
        for setting in preset.settings:
            print(f"K {setting.local_steps}, S {setting.cohort_size}, gamma {setting.gamma:g}")
        return 0
    directory = make_output_directory(arguments.output_dir)
    problem = make_problem()
    rates = measure_rates(problem, preset)
    figures = {"theory_rates.png": plot_rates(rates)}
    names = write_table_files(directory, "theory_rates", make_rates_table(rates), rates, figures)
    parts = (
        measure_variance(problem, preset.draws),
        measure_limit(problem, preset),
        measure_decay(problem, preset),
    )
    frame = pd.concat(parts, keys=("variance", "limit", "decay"), names=["part"])
    figures = {"theory_server.png": _plot_server(*parts)}
    frame = frame.reset_index(level=0).reset_index(drop=True)
    names += write_table_files(
        directory, "theory_server", _make_server_table(*parts), frame, figures
    )
    print(f"Written to {directory}: {', '.join(names)}.")
    return 0


main = make_config_program(Arguments, measure_theory, __doc__)
