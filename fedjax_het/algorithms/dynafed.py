"""DynaFed (Pi et al., CVPR 2023, arXiv:2211.10878)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from fedjax_het.algorithms.base import Algorithm, FederationData, RoundInput, ServerStage, State
from fedjax_het.algorithms.builders import ServerStepContext, with_server_step
from fedjax_het.algorithms.spec import AlgorithmSpec, DefaultsRule
from fedjax_het.condensation import (
    SynthesisHyperParameters,
    SynthesisLog,
    SynthesisOptions,
    SyntheticData,
    TrajectoryMatching,
    TrajectorySynthesisState,
    fine_tune,
    mean_loss_by_start,
    soft_cross_entropies,
)
from fedjax_het.condensation.downstream_eval import random_subset
from fedjax_het.condensation.trajectory_matching import NUMERIC_PRESETS
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.resumable_loops import LoopRunner
from fedjax_het.core.rng import Purpose, Stream, fold_in_purpose, make_host_rng
from fedjax_het.core.server_parallelism import SINGLE_DEVICE, ServerParallelism
from fedjax_het.nn import Model
from fedjax_het.utils.config import NonNegativeFloat, NonNegativeInt, parse_config
from fedjax_het.utils.errors import is_integer_at_least

Tree = Any

NUM_SNAPSHOTS = 9  # of the synthetic images over the course of synthesis, the last one included
NUM_SNAPSHOT_IMAGES = 40
FINE_TUNE_BATCH_SIZE = 256
FINE_TUNE_OPTIMIZERS = {"adam": optax.adam, "sgd": optax.sgd}
CONTROL_DATA_INPUT = "control_data"
ONE_HOT_LOGIT = 20.0  # a class's logit, beside zeros


@dataclass(frozen=True)
class DynaFedOptions(SynthesisOptions):
    fine_tune_epochs: NonNegativeInt = 20
    "Over the synthetic data, each round."
    fine_tune_optimizer: Literal["adam", "sgd"] = "adam"
    "Of fine-tuning; new each round."
    synthetic: Literal["matched", "untrained", "real"] = "matched"
    """What the average is fine-tuned on: data whose training matches the trajectory, or a control:
    as many that nothing has matched, noise with uniform labels or real images. See `dynafed`."""

    @classmethod
    def normalize_values(cls, values: dict[str, Any]) -> dict[str, Any]:
        """A count of samples of one kind replaces the preset's of the other; one target count is a
        list of one."""
        counts = values.get("target_counts")
        if is_integer_at_least(counts, 1):
            values = {**values, "target_counts": (counts,)}
        if values.get("num_samples") is not None:
            return {"samples_per_class": None, **values}
        if values.get("samples_per_class") is not None:
            return {"num_samples": None, **values}
        return values


@dataclass(frozen=True)
class DynaFedHyperParameters(SynthesisHyperParameters):
    fine_tune_lr: NonNegativeFloat = 1e-4
    "Of fine-tuning."


def make_dynafed_hyperparameters(
    options: DynaFedOptions, num_clients: int
) -> DynaFedHyperParameters:
    """Learning rates of synthesis and fine-tuning; those of synthesis depend on the preset."""
    return DynaFedHyperParameters(**NUMERIC_PRESETS[options.preset])


class DynaFedStepState(NamedTuple):
    """What the server keeps besides the refined method's state. The shapes never change.

    trajectory [L + 1, P]: the initial model and the averages of the first L rounds.
    synthesis: the synthetic data in the making; used once `iterations` has reached N.
    log: one entry per iteration, [N] each; NaN or 0 where not reached.
    snapshots [NUM_SNAPSHOTS, <= NUM_SNAPSHOT_IMAGES, H, W, C]: images over the iterations.
    """

    trajectory: jax.Array
    synthesis: TrajectorySynthesisState
    num_iterations: jax.Array
    log: SynthesisLog
    snapshots: jax.Array


def dynafed(
    training: LocalTraining,
    plan: ExecutionPlan,
    *,
    base: Callable[..., Algorithm],
    options: DynaFedOptions = parse_config(DynaFedOptions, {}),
) -> Algorithm:
    """Any method `base` for L rounds; then, once, data are synthesised whose training dynamics
    are those of the global model; from round L + 1 on the average is fine-tuned on them.

    The fine-tuned model is what is evaluated and broadcast. Fine-tuning: `fine_tune_epochs` (20)
    epochs over the synthetic data in batches of 256, fresh Adam at `fine_tune_lr` (1e-4) each
    round, as the public code does for CIFAR-10; the paper states neither.

    `synthetic` "untrained" and "real" are the method's controls, for what of its gain is the
    matching's: from the same round on, with the same steps, the average is fine-tuned on the data
    that the synthesis begins with (noise from N(0, 1), uniform labels), or on random training
    images, as many of each class, with their labels (which no server has in the paper).

    Options are those of `SynthesisOptions`, those of `preset` "paper" or "code" where they are not
    given; of CIFAR-100 both have the code's 15 samples a class (the paper's 150 would be 1.5), and
    fine-tuning, which the paper does not state, is that of the code's script for the data set.
    Clients and traffic are those of `base`; the synthetic data never leave the server. A network
    with batch norm uses the synthetic batch's statistics and keeps its running ones (the paper has
    no such network).
    Cost: N iterations, once, each differentiating s' training steps (see `mixed_mode`); then 20
    steps a round; shared by the devices that share a federation.
    """
    if options.synthetic != "matched":
        return _build_control(training, plan, base(training, plan), options)
    setup = _make_setup(training.task.model, options, plan.server_parallelism)
    run_server_step = partial(_run_server_step, setup, plan)
    init_step_state = partial(_init_step_state, setup)
    wrapped_algorithm = with_server_step(
        base(training, plan),
        run_server_step,
        init_step_state=init_step_state,
        server_batch_size=setup.inner_batch_size,
    )
    synthesis_stage = ServerStage(
        "synthesis",
        before_round=options.trajectory_rounds,
        num_iterations=options.num_iterations,
        count_completed=lambda state: int(state.server.step_state.num_iterations),
        advance=partial(_advance_synthesis, setup, plan),
    )

    def server_gradient(state: State, inputs: dict[str, Tree], variables: Tree) -> Tree:
        return _compute_gradient(
            training.task.model, *_get_synthetic_data(setup, state.server.step_state), variables
        )

    return wrapped_algorithm._replace(
        server_stages=(*wrapped_algorithm.server_stages, synthesis_stage),
        artifacts=lambda state: {
            **wrapped_algorithm.artifacts(state),
            **_make_artifacts(setup, state.server.step_state),
        },
        summary=lambda hp, state: {
            **wrapped_algorithm.summary(hp, state),
            **_make_summary(state.server.step_state),
        },
        server_gradient=server_gradient,
    )


def _build_control(
    training: LocalTraining, plan: ExecutionPlan, algorithm: Algorithm, options: DynaFedOptions
) -> Algorithm:
    """DynaFed over `algorithm`, on data that nothing has matched."""
    model, uses_real_images = training.task.model, options.synthetic == "real"

    def make_control_data(inputs: dict[str, Tree]) -> SyntheticData:
        images, labels = inputs[CONTROL_DATA_INPUT]
        images = training.task.normalize(images) if uses_real_images else images
        return SyntheticData(images, labels, jnp.zeros(()))

    def run_server_step(hp, step_state, context: ServerStepContext):
        data = make_control_data(context.cohort.inputs)
        is_ready = context.round_index >= options.trajectory_rounds
        return _fine_tune_if_ready(model, options, plan, hp, context, data, is_ready), step_state

    def server_gradient(state: State, inputs: dict[str, Tree], variables: Tree) -> Tree:
        is_ready = state.round >= options.trajectory_rounds
        return _compute_gradient(model, make_control_data(inputs), is_ready, variables)

    num_samples = options.count_samples(model.num_classes)
    wrapped_algorithm = with_server_step(
        algorithm, run_server_step, server_batch_size=min(FINE_TUNE_BATCH_SIZE, num_samples)
    )
    control_input = RoundInput(
        CONTROL_DATA_INPUT, partial(_make_control_inputs, uses_real_images, num_samples)
    )
    return wrapped_algorithm._replace(
        round_inputs=(*wrapped_algorithm.round_inputs, control_input),
        server_gradient=server_gradient,
    )


def _make_control_inputs(
    uses_real_images: bool, num_samples: int, federations: Sequence[FederationData]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Images and label logits, each federation's its own: real ones as stored with their classes,
    or noise as the network reads it with none."""

    def make_control_input(federation: FederationData) -> tuple[np.ndarray, np.ndarray]:
        dataset = federation.dataset
        classes = np.arange(num_samples) * dataset.num_classes // num_samples
        labels = np.zeros((num_samples, dataset.num_classes), np.float32)
        if uses_real_images:
            positions = random_subset(dataset.train_labels, classes, seed=federation.seed)
            labels[np.arange(num_samples), classes] = ONE_HOT_LOGIT
            return dataset.train_images[positions], labels
        noise = make_host_rng(federation.seed, Stream.CONTROL).normal(
            size=(num_samples, *dataset.input_shape)
        )
        return noise.astype(np.float32), labels

    return [make_control_input(federation) for federation in federations]


class _DynaFedSetup(NamedTuple):
    """What does not change in a run."""

    options: DynaFedOptions
    model: Model
    synthesis: TrajectoryMatching
    inner_batch_size: int  # samples of an inner step
    snapshot_samples: np.ndarray  # which samples' images are kept over the iterations


def _make_setup(
    model: Model, options: DynaFedOptions, server_parallelism: ServerParallelism
) -> _DynaFedSetup:
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    zero_variables = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
    _, unravel = ravel_pytree(zero_variables["params"])

    def apply_params(params, images, **axis_argument):
        return model.apply(
            {**zero_variables, "params": params}, images, train=True, **axis_argument
        )[0]

    num_samples = options.count_samples(model.num_classes)
    inner_batch_size = min(options.inner_batch_size or num_samples, num_samples)
    if zero_variables["state"] and inner_batch_size % server_parallelism.num_devices:
        server_parallelism = SINGLE_DEVICE  # batch norm would see what fills up the last part

    synthesis = TrajectoryMatching(
        options,
        apply_params,
        unravel,
        image_shape=model.input_shape,
        num_classes=model.num_classes,
        micro_batch=model.micro_batch,
        server_parallelism=server_parallelism,
    )
    num_snapshot_samples = min(NUM_SNAPSHOT_IMAGES, num_samples)
    snapshot_samples = np.linspace(0, num_samples - 1, num_snapshot_samples).astype(int)
    return _DynaFedSetup(options, model, synthesis, inner_batch_size, snapshot_samples)


def _init_step_state(setup: _DynaFedSetup, hp, key, variables) -> DynaFedStepState:
    """The server's state before the first round."""
    flat_params = ravel_pytree(variables["params"])[0]
    length = setup.options.num_iterations
    return DynaFedStepState(
        jnp.zeros((setup.options.trajectory_rounds + 1, flat_params.size)).at[0].set(flat_params),
        setup.synthesis.init(hp, fold_in_purpose(key, Purpose.SERVER)),
        jnp.int32(0),
        SynthesisLog(
            jnp.full(length, jnp.nan),
            jnp.zeros(length, jnp.int32),
            jnp.zeros(length, bool),
            jnp.full(length, jnp.nan),
        ),
        jnp.zeros((NUM_SNAPSHOTS, len(setup.snapshot_samples), *setup.model.input_shape)),
    )


def _run_server_step(
    setup: _DynaFedSetup,
    plan: ExecutionPlan,
    hp,
    step_state: DynaFedStepState,
    context: ServerStepContext,
):
    """The round's average is kept, if it is of the trajectory, and fine-tuned once the data are
    there."""
    flat_average = ravel_pytree(context.variables_after["params"])[0]
    # Rounds beyond L fall outside the array and are dropped.
    trajectory = step_state.trajectory.at[context.round_index + 1].set(flat_average, mode="drop")
    step_state = step_state._replace(trajectory=trajectory)
    return _fine_tune_if_ready(
        setup.model, setup.options, plan, hp, context, *_get_synthetic_data(setup, step_state)
    ), step_state


def _get_synthetic_data(
    setup: _DynaFedSetup, step_state: DynaFedStepState
) -> tuple[SyntheticData, jax.Array]:
    """The data, and whether they are ready."""
    is_ready = step_state.num_iterations >= setup.options.num_iterations
    return setup.synthesis.get_result(step_state.synthesis), is_ready


def _fine_tune_if_ready(
    model: Model,
    options: DynaFedOptions,
    plan: ExecutionPlan,
    hp,
    context: ServerStepContext,
    data: SyntheticData,
    is_ready: jax.Array,
) -> Tree:
    """The round's average fine-tuned on the data, if these are `ready`."""

    def fine_tune_on_shard(server_parallelism: ServerParallelism, variables, synthetic, key, lr):
        def apply_params(params, images, **axis_argument):
            return model.apply(
                {**variables, "params": params}, images, train=True, **axis_argument
            )[0]

        params = fine_tune(
            apply_params,
            variables["params"],
            synthetic,
            key,
            optimizer=FINE_TUNE_OPTIMIZERS[options.fine_tune_optimizer](lr),
            epochs=options.fine_tune_epochs,
            batch_size=FINE_TUNE_BATCH_SIZE,
            augment_strategy=options.augment_strategy,
            loss_scaling=options.loss_scaling,
            server_parallelism=server_parallelism,
        )
        return {**variables, "params": params}

    key = fold_in_purpose(context.key, Purpose.SERVER)
    args = context.variables_after, data, key, hp["fine_tune_lr"]

    def run_fine_tuning(loops: LoopRunner, *args):
        return plan.shard_server_work(fine_tune_on_shard, *args, loops=loops)

    return context.cohort.loops.cond(
        is_ready,
        run_fine_tuning,
        lambda *args: context.variables_after,
        *args,
    )


def _advance_synthesis(
    setup: _DynaFedSetup, plan: ExecutionPlan, hp, state, key, num_iterations, server_examples=None
):
    """The state after `count` more iterations of the synthesis."""
    synthesis, snapshot_samples = setup.synthesis, setup.snapshot_samples
    snapshot_interval = _get_snapshot_interval(setup.options.num_iterations)

    def run_iterations(
        server_parallelism: ServerParallelism, hp, step_state: DynaFedStepState, key, num_iterations
    ):
        return jax.lax.fori_loop(
            0, num_iterations, lambda _, step_state: run_iteration(hp, step_state, key), step_state
        )

    def run_iteration(hp, step_state: DynaFedStepState, key):
        n = step_state.num_iterations
        images = step_state.synthesis.data.images[snapshot_samples]
        is_snapshot_due = (n % snapshot_interval == 0) & (
            n // snapshot_interval < NUM_SNAPSHOTS - 1
        )
        slot = jnp.where(
            is_snapshot_due, n // snapshot_interval, NUM_SNAPSHOTS
        )  # beyond the end: dropped
        snapshots = step_state.snapshots.at[slot].set(images, mode="drop")
        synthesis_state, info = synthesis.run(
            hp, step_state.synthesis, step_state.trajectory, key, n, num_iterations=1
        )
        log = jax.tree.map(lambda entries, new: entries.at[n].set(new[0]), step_state.log, info)
        return step_state._replace(
            synthesis=synthesis_state,
            num_iterations=n + 1,
            log=log,
            snapshots=snapshots.at[-1].set(synthesis_state.data.images[snapshot_samples]),
        )

    step_state = plan.shard_server_work(
        run_iterations, hp, state.server.step_state, key, num_iterations
    )
    return state._replace(server=state.server._replace(step_state=step_state))


def _compute_gradient(
    model: Model, data: SyntheticData, is_ready: jax.Array, variables: Tree
) -> Tree:
    """Of the mean cross-entropy on the data, as they are; NaN before they are `ready`."""

    def loss(params):
        logits = model.apply({**variables, "params": params}, data.images, train=False)[0]
        return soft_cross_entropies(logits, data.label_logits, scaling="cross_entropy").mean()

    gradient = jax.grad(loss)(variables["params"])
    return jax.tree.map(lambda g: jnp.where(is_ready, g, jnp.nan), gradient)


def _make_artifacts(setup: _DynaFedSetup, step_state: DynaFedStepState) -> dict[str, Any]:
    data = setup.synthesis.get_result(step_state.synthesis)
    return {
        "synthetic_images": data.images,
        "synthetic_label_logits": data.label_logits,
        "synthetic_step_size": data.step_size,
        "snapshots": step_state.snapshots,
        "snapshot_samples": setup.snapshot_samples,
        "snapshot_iterations": _get_snapshot_iterations(setup.options.num_iterations),
        **step_state.log._asdict(),
    }


def _make_summary(step_state: DynaFedStepState) -> dict[str, Any]:
    num_completed = int(step_state.num_iterations)
    if not num_completed:
        return {"synthesis_iterations": 0}
    log = jax.tree.map(lambda entries: np.asarray(entries)[:num_completed], step_state.log)
    num_last = max(1, num_completed // 5)
    losses = log.matching_loss[-num_last:]
    is_finite = np.isfinite(losses)
    return {
        "synthesis_iterations": num_completed,
        "synthesis_skipped": int(log.skipped.sum()),
        "synthesis_step_size": float(log.step_size[-1]),
        "matching_loss": float(np.nanmean(np.where(is_finite, losses, np.nan)))
        if is_finite.any()
        else None,
        "matching_loss_by_start": {
            str(t): j for t, j in mean_loss_by_start(log, num_last=num_last).items()
        },
    }


def _get_snapshot_interval(num_iterations: int) -> int:
    return max(1, (num_iterations - 1) // (NUM_SNAPSHOTS - 1))


def _get_snapshot_iterations(num_iterations: int) -> np.ndarray:
    return np.append(
        np.arange(NUM_SNAPSHOTS - 1) * _get_snapshot_interval(num_iterations), num_iterations
    )


def _default_samples_per_class(
    settings: Mapping[str, Any], algorithm_spec: AlgorithmSpec
) -> int | None:
    """Samples of each class, unless a run says how many in total."""
    return None if settings["options"].get("num_samples") else 15


def _default_cifar10_fine_tune_epochs(
    settings: Mapping[str, Any], algorithm_spec: AlgorithmSpec
) -> int | None:
    """Those of the public code's script for alpha 0.16."""
    return 15 if settings["alpha"] == 0.16 else None


def _settings_warnings(run: Any, algorithm_spec: AlgorithmSpec) -> list[str]:
    options = algorithm_spec.parse_method_options(run.options)
    assert isinstance(options, DynaFedOptions)
    options.check_step_size(run.hp["step_size"], "hp step_size")
    last_trajectory_round = options.trajectory_rounds
    if run.rounds > last_trajectory_round:
        return []
    assert algorithm_spec.base is not None
    base_name = algorithm_spec.base.name
    return [
        f"rounds = {run.rounds}: this is {base_name}, as data are synthesised after round {last_trajectory_round}"
    ]


SPEC = AlgorithmSpec(
    "dynafed",
    dynafed,
    "FedAvg, fine-tuned on data synthesised from the global trajectory (Pi et al., 2023)",
    paper="Pi et al., CVPR 2023, arXiv:2211.10878",
    options=DynaFedOptions,
    hyperparameters=make_dynafed_hyperparameters,
    color="#D55E00",
    wraps="model",
    settings_warnings=_settings_warnings,
    rules=(
        DefaultsRule(
            datasets=("cifar100",),
            options={"samples_per_class": _default_samples_per_class, "fine_tune_epochs": 8},
        ),
        DefaultsRule(
            datasets=("cifar10",), options={"fine_tune_epochs": _default_cifar10_fine_tune_epochs}
        ),
        DefaultsRule(datasets=("cinic10",), hp={"fine_tune_lr": 2.5e-4}),
    ),
)
