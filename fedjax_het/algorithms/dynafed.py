"""DynaFed (Pi et al., CVPR 2023, arXiv:2211.10878)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedjax_het.algorithms.contract import Algorithm, Holdings, HostWork, RoundInput, State
from fedjax_het.algorithms.entry import Entry, Rule
from fedjax_het.algorithms.refined import Round, refined
from fedjax_het.common.errors import is_whole
from fedjax_het.common.records import NonNegative, Whole, read
from fedjax_het.condensation import (
    Synthesis,
    SynthesisHyperParameters,
    SynthesisInfo,
    SynthesisNumbers,
    SynthesisOptions,
    SynthesisState,
    SyntheticData,
    fine_tune,
    j_by_start,
    make_synthesis,
    mixed_mode,
    soft_cross_entropy,
)
from fedjax_het.condensation.quality import random_subset
from fedjax_het.condensation.synthesis_config import check_step_size
from fedjax_het.engine.local import LocalTraining
from fedjax_het.engine.plan import Plan
from fedjax_het.engine.randomness import Purpose, Stream, host_rng, key_for
from fedjax_het.engine.sharing import ALONE, Sharing
from fedjax_het.engine.stretches import either
from fedjax_het.nn import Model

Tree = Any

NUM_SNAPSHOTS = 9  # of the synthetic images over the course of synthesis, the last one included
SNAPSHOT_IMAGES = 40
FINE_TUNE_BATCH = 256
CONTROL_DATA = "control_data"
CERTAIN = 20.0  # a class's logit, beside zeros

# Numeric settings of the synthesis: traced hyper-parameters, not options.
_NUMERIC = SynthesisHyperParameters._fields


@dataclass(frozen=True)
class DynaFedOptions(SynthesisOptions):
    PRESETS = SynthesisOptions.NAMED

    preset: str = "paper"
    fine_tune_epochs: Whole = 20
    "Over the synthetic data, each round."
    fine_tune_optimizer: Literal["adam", "sgd"] = "adam"
    "Of fine-tuning; new each round."
    synthetic: Literal["matched", "untrained", "real"] = "matched"
    """What the average is fine-tuned on: data whose training matches the trajectory, or a control:
    as many that nothing has matched, noise with uniform labels or real images. See `dynafed`."""

    @classmethod
    def adjusted(cls, given: dict[str, Any]) -> dict[str, Any]:
        """A count of samples of one kind replaces the preset's of the other; one target count is a
        list of one."""
        counts = given.get("target_counts")
        if is_whole(counts, 1):
            given = {**given, "target_counts": (counts,)}
        if given.get("num_samples") is not None:
            return {"samples_per_class": None, **given}
        if given.get("samples_per_class") is not None:
            return {"num_samples": None, **given}
        return given

    def check(self) -> None:
        super().check()
        check_step_size(SynthesisNumbers.preset(self.preset).step_size, self)


@dataclass(frozen=True)
class DynaFedNumbers(SynthesisNumbers):
    fine_tune_lr: NonNegative = 1e-4
    "Of fine-tuning."


def dynafed_numbers(options: DynaFedOptions, num_clients: int) -> DynaFedNumbers:
    """Learning rates of synthesis and fine-tuning; those of synthesis depend on the preset."""
    return DynaFedNumbers.preset(options.preset)


class DynaFedServer(NamedTuple):
    """What the server keeps besides the refined method's state. The shapes never change.

    trajectory [L + 1, P]: the initial model and the averages of the first L rounds.
    synthesis: the synthetic data in the making; used once `iterations` has reached N.
    log: one entry per iteration, [N] each; NaN or 0 where not reached.
    snapshots [NUM_SNAPSHOTS, <= SNAPSHOT_IMAGES, H, W, C]: images over the iterations.
    """

    trajectory: jax.Array
    synthesis: SynthesisState
    iterations: jax.Array
    log: SynthesisInfo
    snapshots: jax.Array


def dynafed(
    training: LocalTraining,
    plan: Plan,
    *,
    base: Callable[..., Algorithm],
    options: DynaFedOptions = read(DynaFedOptions, {}),
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
        return _control(training, plan, base(training, plan), options)
    fixed = _fixed(training.task.model, options, plan.sharing)
    refine = partial(_refine, fixed, plan)
    init = partial(_init, fixed)
    whole = refined(base(training, plan), refine, init=init, server_batch=fixed.at_once)
    synthesising = HostWork(
        "synthesis",
        before_round=options.trajectory_rounds,
        total=options.num_iterations,
        done=lambda state: int(state.server.own.iterations),
        advance=partial(_advance, fixed, plan),
    )

    def server_gradient(state: State, inputs: dict[str, Tree], variables: Tree) -> Tree:
        return _gradient(training.task.model, *_made(fixed, state.server.own), variables)

    return whole._replace(
        host_work=(*whole.host_work, synthesising),
        artifacts=lambda state: {
            **whole.artifacts(state),
            **_artifacts(fixed, state.server.own),
        },
        summary=lambda hp, state: {**whole.summary(hp, state), **_summary(state.server.own)},
        server_gradient=server_gradient,
    )


def _control(
    training: LocalTraining, plan: Plan, algorithm: Algorithm, options: DynaFedOptions
) -> Algorithm:
    """DynaFed over `algorithm`, on data that nothing has matched."""
    model, real = training.task.model, options.synthetic == "real"

    def data_of(inputs: dict[str, Tree]) -> SyntheticData:
        images, labels = inputs[CONTROL_DATA]
        images = training.task.normalise(images) if real else images
        return SyntheticData(images, labels, jnp.zeros(()))

    def refine(hp, own, this_round: Round):
        data = data_of(this_round.cohort.inputs)
        ready = this_round.number >= options.trajectory_rounds
        return _tuned(model, options, plan, hp, this_round, data, ready), own

    def server_gradient(state: State, inputs: dict[str, Tree], variables: Tree) -> Tree:
        ready = state.round >= options.trajectory_rounds
        return _gradient(model, data_of(inputs), ready, variables)

    num_samples = options.total_samples(model.num_classes)
    whole = refined(algorithm, refine, server_batch=min(FINE_TUNE_BATCH, num_samples))
    data = RoundInput(CONTROL_DATA, partial(_control_data, real, num_samples))
    return whole._replace(inputs=(*whole.inputs, data), server_gradient=server_gradient)


def _control_data(
    real: bool, num_samples: int, holdings: Sequence[Holdings]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Images and label logits, each federation's its own: real ones as stored with their classes,
    or noise as the network reads it with none."""

    def of(held: Holdings) -> tuple[np.ndarray, np.ndarray]:
        dataset = held.dataset
        classes = np.arange(num_samples) * dataset.num_classes // num_samples
        labels = np.zeros((num_samples, dataset.num_classes), np.float32)
        if real:
            positions = random_subset(dataset.train_labels, classes, seed=held.seed)
            labels[np.arange(num_samples), classes] = CERTAIN
            return dataset.train_images[positions], labels
        noise = host_rng(held.seed, Stream.CONTROL).normal(size=(num_samples, *dataset.input_shape))
        return noise.astype(np.float32), labels

    return [of(held) for held in holdings]


class _Fixed(NamedTuple):
    """What does not change in a run."""

    options: DynaFedOptions
    model: Model
    synthesis: Synthesis
    at_once: int  # samples of an inner step
    pictured: np.ndarray  # which samples' images are kept over the iterations


def _fixed(model: Model, options: DynaFedOptions, sharing: Sharing) -> _Fixed:
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    blank = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
    _, unravel = ravel_pytree(blank["params"])

    def apply_params(params, images):
        return model.apply({**blank, "params": params}, images, train=True)[0]

    num_samples = options.total_samples(model.num_classes)
    at_once = min(options.inner_batch_size or num_samples, num_samples)
    if blank["state"] and at_once % sharing.parts:
        sharing = ALONE  # batch norm would see what fills up the last part

    synthesis = make_synthesis(
        options,
        apply_params,
        unravel,
        image_shape=model.input_shape,
        num_classes=model.num_classes,
        differentiation=partial(mixed_mode, micro_batch=model.micro_batch, sharing=sharing),
    )
    num_pictured = min(SNAPSHOT_IMAGES, num_samples)
    pictured = np.linspace(0, num_samples - 1, num_pictured).astype(int)
    return _Fixed(options, model, synthesis, at_once, pictured)


def _numbers(hp) -> SynthesisHyperParameters:
    return SynthesisHyperParameters(*(hp[name] for name in _NUMERIC))


def _init(fixed: _Fixed, hp, key, variables) -> DynaFedServer:
    """The server's state before the first round."""
    vector = ravel_pytree(variables["params"])[0]
    length = fixed.options.num_iterations
    return DynaFedServer(
        jnp.zeros((fixed.options.trajectory_rounds + 1, vector.size)).at[0].set(vector),
        fixed.synthesis.init(_numbers(hp), key_for(key, Purpose.SERVER)),
        jnp.int32(0),
        SynthesisInfo(
            jnp.full(length, jnp.nan),
            jnp.zeros(length, jnp.int32),
            jnp.zeros(length, bool),
            jnp.full(length, jnp.nan),
        ),
        jnp.zeros((NUM_SNAPSHOTS, len(fixed.pictured), *fixed.model.input_shape)),
    )


def _refine(fixed: _Fixed, plan: Plan, hp, own: DynaFedServer, this_round: Round):
    """The round's average is kept, if it is of the trajectory, and fine-tuned once the data are
    there."""
    average = ravel_pytree(this_round.after["params"])[0]
    # Rounds beyond L fall outside the array and are dropped.
    trajectory = own.trajectory.at[this_round.number + 1].set(average, mode="drop")
    own = own._replace(trajectory=trajectory)
    return _tuned(fixed.model, fixed.options, plan, hp, this_round, *_made(fixed, own)), own


def _made(fixed: _Fixed, own: DynaFedServer) -> tuple[SyntheticData, jax.Array]:
    """The data, and whether they are ready."""
    ready = own.iterations >= fixed.options.num_iterations
    return fixed.synthesis.result(own.synthesis), ready


def _tuned(
    model: Model,
    options: DynaFedOptions,
    plan: Plan,
    hp,
    this_round: Round,
    data: SyntheticData,
    ready: jax.Array,
) -> Tree:
    """The round's average fine-tuned on the data, if these are `ready`."""

    def tuned(sharing: Sharing, variables, synthetic, key, lr):
        def apply_params(params, images):
            return model.apply({**variables, "params": params}, images, train=True)[0]

        params = fine_tune(
            apply_params,
            variables["params"],
            synthetic,
            key,
            epochs=options.fine_tune_epochs,
            lr=lr,
            batch_size=FINE_TUNE_BATCH,
            augment_strategy=options.augment_strategy,
            loss_scaling=options.loss_scaling,
            optimizer=options.fine_tune_optimizer,
            sharing=sharing,
        )
        return {**variables, "params": params}

    key = key_for(this_round.key, Purpose.SERVER)
    args = this_round.after, data, key, hp["fine_tune_lr"]
    return either(ready, partial(plan.shared, tuned), lambda *args: this_round.after, *args)


def _advance(fixed: _Fixed, plan: Plan, hp, state, key, count, server=None):
    """The state after `count` more iterations of the synthesis."""
    synthesis, pictured = fixed.synthesis, fixed.pictured
    every = _snapshot_interval(fixed.options.num_iterations)

    def iterations(sharing: Sharing, hp, own: DynaFedServer, key, count):
        return jax.lax.fori_loop(0, count, lambda _, own: iteration(hp, own, key), own)

    def iteration(hp, own: DynaFedServer, key):
        n = own.iterations
        images = own.synthesis.data.images[pictured]
        due = (n % every == 0) & (n // every < NUM_SNAPSHOTS - 1)
        slot = jnp.where(due, n // every, NUM_SNAPSHOTS)  # beyond the end: dropped
        snapshots = own.snapshots.at[slot].set(images, mode="drop")
        made, info = synthesis.run(
            _numbers(hp), own.synthesis, own.trajectory, key, n, num_iterations=1
        )
        log = jax.tree.map(lambda entries, new: entries.at[n].set(new[0]), own.log, info)
        return own._replace(
            synthesis=made,
            iterations=n + 1,
            log=log,
            snapshots=snapshots.at[-1].set(made.data.images[pictured]),
        )

    own = plan.shared(iterations, hp, state.server.own, key, count)
    return state._replace(server=state.server._replace(own=own))


def _gradient(model: Model, data: SyntheticData, ready: jax.Array, variables: Tree) -> Tree:
    """Of the mean cross-entropy on the data, as they are; NaN before they are `ready`."""

    def loss(params):
        logits = model.apply({**variables, "params": params}, data.images, train=False)[0]
        return soft_cross_entropy(logits, data.label_logits, scaling="cross_entropy")

    gradient = jax.grad(loss)(variables["params"])
    return jax.tree.map(lambda g: jnp.where(ready, g, jnp.nan), gradient)


def _artifacts(fixed: _Fixed, own: DynaFedServer) -> dict[str, Any]:
    data = fixed.synthesis.result(own.synthesis)
    return {
        "synthetic_images": data.images,
        "synthetic_label_logits": data.label_logits,
        "synthetic_step_size": data.step_size,
        "snapshots": own.snapshots,
        "snapshot_samples": fixed.pictured,
        "snapshot_iterations": _snapshot_iterations(fixed.options.num_iterations),
        **own.log._asdict(),
    }


def _summary(own: DynaFedServer) -> dict[str, Any]:
    done = int(own.iterations)
    if not done:
        return {"synthesis_iterations": 0}
    log = jax.tree.map(lambda entries: np.asarray(entries)[:done], own.log)
    last = max(1, done // 5)
    losses = log.matching_loss[-last:]
    known = np.isfinite(losses)
    return {
        "synthesis_iterations": done,
        "synthesis_skipped": int(log.skipped.sum()),
        "synthesis_step_size": float(log.step_size[-1]),
        "matching_loss": float(np.nanmean(np.where(known, losses, np.nan)))
        if known.any()
        else None,
        "matching_loss_by_start": {str(t): j for t, j in j_by_start(log, last=last).items()},
    }


def _snapshot_interval(total: int) -> int:
    return max(1, (total - 1) // (NUM_SNAPSHOTS - 1))


def _snapshot_iterations(total: int) -> np.ndarray:
    return np.append(np.arange(NUM_SNAPSHOTS - 1) * _snapshot_interval(total), total)


def _fifteen(settings: Mapping[str, Any], entry: Entry) -> int | None:
    """Samples of each class, unless a run says how many in total."""
    return None if settings["options"].get("num_samples") else 15


def _epochs_of_cifar10(settings: Mapping[str, Any], entry: Entry) -> int | None:
    """Those of the public code's script for alpha 0.16."""
    return 15 if settings["alpha"] == 0.16 else None


def _remarks(run: Any, entry: Entry) -> list[str]:
    options = entry.own_options(run.options)
    assert isinstance(options, DynaFedOptions)
    check_step_size(run.hp["step_size"], options, name="hp step_size")
    last = options.trajectory_rounds
    if run.rounds > last:
        return []
    assert entry.base is not None
    name = entry.base.name
    return [f"rounds = {run.rounds}: this is {name}, as data are synthesised after round {last}"]


ENTRY = Entry(
    "dynafed",
    dynafed,
    "FedAvg, fine-tuned on data synthesised from the global trajectory (Pi et al., 2023)",
    paper="Pi et al., CVPR 2023, arXiv:2211.10878",
    options=DynaFedOptions,
    numbers=dynafed_numbers,
    colour="#D55E00",
    refines="model",
    remarks=_remarks,
    rules=(
        Rule(
            datasets=("cifar100",),
            options={"samples_per_class": _fifteen, "fine_tune_epochs": 8},
        ),
        Rule(datasets=("cifar10",), options={"fine_tune_epochs": _epochs_of_cifar10}),
        Rule(datasets=("cinic10",), hp={"fine_tune_lr": 2.5e-4}),
    ),
)
