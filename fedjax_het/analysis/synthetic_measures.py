"""Measures of the synthetic data of a run: matching, training dynamics, accuracy from scratch."""

from dataclasses import replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax.flatten_util import ravel_pytree

from fedjax_het.condensation import (
    DynamicsGap,
    ScratchAccuracies,
    SyntheticData,
    SyntheticTask,
    compare_dynamics,
    matching_loss,
    measure_scratch_accuracies,
    unroll,
)
from fedjax_het.condensation.augment import resolve_strategy
from fedjax_het.condensation.downstream_eval import HARD_LABEL_LOGIT, LR
from fedjax_het.config.resolve import USER_PROVIDED
from fedjax_het.core.client_loop import Examples
from fedjax_het.core.task import Task
from fedjax_het.data import Dataset, load_dataset
from fedjax_het.nn import make_model
from fedjax_het.runtime.progress import show_progress
from fedjax_het.runtime.result_display import format_run_label
from fedjax_het.runtime.results import Result
from fedjax_het.runtime.session import simulate
from fedjax_het.utils.arrays import make_key
from fedjax_het.utils.config import Bounds, PositiveInt, parameter_types, validate
from fedjax_het.utils.errors import require

_NUM_PROBES = 1000
_DEFAULT_STEPS = 20


class SyntheticMeasures(NamedTuple):
    """Measures of synthetic data; T starts, S steps.

    `measure_synthetic_data` returns it.

    Attributes:
      starts: `[T]`, rounds whose models training starts from; 0 is the initial model.
      matching_loss: `[T]`, J of the data from each start, the distance between the trained model
        and the later checkpoint over the distance between both checkpoints; NaN for methods that
        match no trajectory.
      dynamics: `[T, S]`, differences between training on the synthetic data and on real data.
      accuracies: accuracies of networks that train from scratch, and DD-Ranking's scores.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.condensation import DynamicsGap, ScratchAccuracies
      >>> from fedjax_het.analysis.synthetic_measures import SyntheticMeasures
      >>> gaps = DynamicsGap(*5 * [np.ones((2, 3))])
      >>> accuracies = ScratchAccuracies(*6 * [np.array([0.5])])
      >>> measures = SyntheticMeasures(np.arange(2), np.array([0.9, 0.7]), gaps, accuracies)
      >>> round(measures.summarize()["matching_loss"], 2), round(measures.summarize()["lrs"], 2)
      (0.8, 0.27)
    """

    starts: np.ndarray
    matching_loss: np.ndarray
    dynamics: DynamicsGap
    accuracies: ScratchAccuracies

    def by_start(self) -> pd.DataFrame:
        """Return J by start, gaps after the last step, and gradients before the first step."""
        columns = {"matching_loss": self.matching_loss}
        for name in ("logit_gap", "mean_logit_gap", "logit_change"):
            columns[name] = getattr(self.dynamics, name)[:, -1]
        for name in ("gradient_cosine", "gradient_error"):
            columns[name] = getattr(self.dynamics, name)[:, 0]
        return pd.DataFrame(columns, index=pd.Index(self.starts, name="start"))

    def by_step(self) -> pd.DataFrame:
        """Return the mean over starts of each difference, by step from 1."""
        means = {name: values.mean(0) for name, values in self.dynamics._asdict().items()}
        num_steps = self.dynamics.logit_gap.shape[1]
        return pd.DataFrame(means, index=pd.RangeIndex(1, num_steps + 1, name="step"))

    def summarize(self) -> dict[str, float]:
        """Return one number per measure: means over starts and networks.

        Returns:
          The columns of `by_start`; `relative_logit_gap`, the logit gap over the change of logits
          by training on real data; `accuracy` and `random_accuracy` from scratch;
          `improvement_over_random` (IOR), `hard_label_recovery` (HLR), `lrs` and `ars`.
        """
        table, accuracies = self.by_start(), self.accuracies
        return {
            **{str(name): float(value) for name, value in table.mean().items()},
            "relative_logit_gap": float((table["logit_gap"] / table["logit_change"]).mean()),
            "accuracy": float(accuracies.synthetic.mean()),
            "random_accuracy": float(accuracies.random.mean()),
            "improvement_over_random": float(accuracies.improvement_over_random.mean()),
            "hard_label_recovery": float(accuracies.hard_label_recovery.mean()),
            "lrs": float(accuracies.compute_lrs().mean()),
            "ars": float(accuracies.compute_ars().mean()),
        }


def build_task(result: Result, dataset: Dataset, network: Any = None) -> Task:
    """Return the network of a run and the normalization of its inputs.

    Args:
      result: result of the run.
      dataset: its data set.
      network: network of the user that the run had; only for a loaded result.

    Returns:
      The task.

    Raises:
      ConfigError: if the run had a network of the user, and the result has no final state.
    """
    spec = result.spec.resolved()
    if spec.model == USER_PROVIDED:
        return result.model(network=network).task
    model = make_model(spec.model, dataset.input_shape, dataset.num_classes, **spec.model_options)
    return Task(model, dataset.mean, dataset.std)


def load_synthetic_data(result: Result, num_classes: int) -> SyntheticData:
    """Return the synthetic data of a run as the network receives them.

    Args:
      result: result of a run of DynaFed, FedDM or FedAF.
      num_classes: number of classes.

    Returns:
      The data of the server or of all clients. Without a learned step size it is NaN.

    Raises:
      ConfigError: if the result has no synthetic data.
    """
    artifacts = result.artifacts
    if "condensed_images" in artifacts:
        inputs = np.asarray(artifacts["condensed_images"], np.float32)
        labels = np.repeat(artifacts["condensed_classes"], inputs.shape[1])
        logits = HARD_LABEL_LOGIT * jax.nn.one_hot(labels, num_classes)
        all_inputs = jnp.asarray(inputs.reshape(-1, *inputs.shape[2:]))
        return SyntheticData(all_inputs, logits, jnp.float32(jnp.nan))
    is_complete = "synthetic_images" in artifacts and result.summary.get("synthesis_iterations", 1)
    expected = "a run of dynafed with synthetic data, or of feddm or fedaf"
    require(bool(is_complete), "result", format_run_label(result.spec), expected)
    names = ("synthetic_images", "synthetic_label_logits", "synthetic_step_size")
    return SyntheticData(*(jnp.asarray(artifacts[name]) for name in names))


def load_trajectory(result: Result, **user_objects: Any) -> np.ndarray:
    """Return the trajectory `[L + 1, P]` of a run of DynaFed.

    A result without a state has none: its first L rounds run again, with a single iteration of the
    synthesis.

    Args:
      result: result of the run.
      user_objects: `dataset` and `network` of the user that the run had.

    Returns:
      Parameters of the initial model and after each of the L rounds.

    Raises:
      ConfigError: for a result without a state whose run synthesized data more than once.
    """
    spec = result.spec
    if result.state is not None:
        return np.asarray(result.state.server.step_state.trajectory)
    count = spec.options.get("max_syntheses", 1)
    require(count == 1, "max_syntheses of a result without a state", count, "1")
    rounds = spec.options["trajectory_rounds"]
    options = {**spec.options, "num_iterations": 1, "synthetic": "matched"}
    with show_progress(f"trajectory of {format_run_label(spec)}", transient=True) as show:
        shortened_spec = replace(spec, rounds=rounds, options=options)
        shortened_run = simulate(shortened_spec, progress=show, **user_objects)
    return np.asarray(shortened_run.state.server.step_state.trajectory)


def measure_synthetic_data(
    result: Result,
    *,
    data: SyntheticData | None = None,
    trajectory: np.ndarray | None = None,
    dataset: Dataset | None = None,
    network: Any = None,
    num_networks: PositiveInt = 3,
    epochs: PositiveInt = 300,
    num_steps: PositiveInt | None = None,
    num_real: PositiveInt = 2000,
    real_accuracy: Annotated[float, Bounds(0, 1)] | None = None,
) -> SyntheticMeasures:
    """Measure how well the synthetic data of DynaFed, FedDM or FedAF replace real data.

    DynaFed's starts are the models of its trajectory. FedDM and FedAF have a new network and the
    final model as starts, no J, and step size 0.01. Each target of J is the model `segment_length`
    rounds after the start.

    Args:
      result: result of a run of DynaFed, FedDM or FedAF.
      data: other data to measure in place of the run's, such as a control.
      trajectory: the result of `load_trajectory`, to load it once for several data.
      dataset: the user's data set that the run had.
      network: the user's network that the run had.
      num_networks: number of networks that train from scratch.
      epochs: number of epochs from scratch.
      num_steps: number of steps from each start (default: `inner_steps` of the run, or 20).
      num_real: number of random real images for the training on real data.
      real_accuracy: accuracy of a network that trains on all real images, in [0, 1], if it is
        known.

    Returns:
      The measures.

    Raises:
      ConfigError: if the result has no synthetic data, or an argument does not fit.

    Example:
      >>> from fedjax_het import RunSpec, simulate
      >>> from fedjax_het.analysis.synthetic_measures import measure_synthetic_data
      >>> options = {"ipc": 1, "steps": 2, "server_epochs": 1}
      >>> spec = RunSpec(
      ...     "feddm", "digits", model="mlp", num_clients=3, rounds=1, options=options
      ... )
      >>> result = simulate(spec, progress=False)
      >>> measures = measure_synthetic_data(result, num_networks=1, epochs=1, num_steps=2)
      >>> measures.starts.tolist(), measures.dynamics.logit_gap.shape
      ([0, 1], (2, 2))
    """
    arguments = locals()
    for name, annotation in parameter_types(measure_synthetic_data).items():
        validate(name, arguments[name], annotation)
    spec = result.spec.resolved()
    if dataset is None:
        require(spec.dataset != USER_PROVIDED, "dataset", dataset, "the user's data of the run")
        dataset = load_dataset(spec.dataset, normalization=spec.normalization)
    if data is None:
        data = load_synthetic_data(result, dataset.num_classes)
    task, options = build_task(result, dataset, network), spec.options
    num_steps = num_steps or options.get("inner_steps", _DEFAULT_STEPS)
    key = make_key(spec.seed)
    variables = task.model.init(key)
    vector, unravel = ravel_pytree(variables["params"])
    if trajectory is not None and "segment_length" in options:
        expected = (options["trajectory_rounds"] + 1, vector.size)
        require(trajectory.shape == expected, "trajectory", trajectory.shape, f"shape {expected}")

    def apply(params: Any, inputs: jax.Array) -> jax.Array:
        return task.model.apply({**variables, "params": params}, inputs, train=True)[0]

    strategy, shape = options.get("augment_strategy", "none"), task.model.input_shape
    recipe = {
        "augment_strategy": resolve_strategy(strategy, shape, "augment_strategy"),
        "loss_scaling": options.get("loss_scaling", "cross_entropy"),
    }
    synthetic_task = SyntheticTask(apply, **recipe)
    accuracies = measure_scratch_accuracies(
        *(task.model, data, dataset),
        **recipe,
        seed=spec.seed,
        num_networks=num_networks,
        epochs=epochs,
        real_accuracy=real_accuracy,
    )
    if not np.isfinite(data.step_size):
        data = data._replace(step_size=jnp.float32(LR))

    def measure_matching_loss(start: jax.Array, target: jax.Array) -> jax.Array:
        end = unroll(
            *(synthetic_task, unravel, start, data, key),
            num_steps=num_steps,
            batch_size=options["inner_batch_size"],
            momentum=options.get("inner_momentum", 0.0),
        )
        return matching_loss(end, start, target, distance=options["distance"])

    if "segment_length" in options:
        user_objects = {"dataset": dataset, "network": network}
        own = load_trajectory(result, **user_objects) if trajectory is None else trajectory
        models, length = jnp.asarray(own), options["segment_length"]
        starts, targets = models[:-length], models[length:]
        rounds = np.arange(len(starts))
        pairs = jax.lax.map(lambda pair: measure_matching_loss(*pair), (starts, targets))
        losses = np.asarray(pairs)
    else:
        trees, rounds = [variables["params"]], np.zeros(1, int)
        if result.models is not None:
            trees.append(result.model(network=network).variables["params"])
            rounds = np.array([0, result.rounds])
        starts = jnp.stack([ravel_pytree(tree)[0] for tree in trees])
        losses = np.full(len(starts), np.nan)
    positions = np.random.default_rng(spec.seed).permutation(len(dataset.train_labels))[:num_real]
    labels = HARD_LABEL_LOGIT * jax.nn.one_hot(dataset.train_labels[positions], dataset.num_classes)
    real = Examples(task.normalize(jnp.asarray(dataset.train_inputs[positions])), labels)
    probes = task.normalize(jnp.asarray(dataset.test_inputs[:_NUM_PROBES]))
    compare = partial(compare_dynamics, synthetic_task, num_steps=num_steps)
    dynamics = jax.lax.map(lambda start: compare(unravel(start), data, real, probes), starts)
    return SyntheticMeasures(rounds, losses, jax.device_get(dynamics), accuracies)
