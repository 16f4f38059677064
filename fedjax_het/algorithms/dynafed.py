"""DynaFed (Pi et al., CVPR 2023, arXiv:2211.10878)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedjax_het.algorithms.contract import Algorithm, HostWork
from fedjax_het.algorithms.entry import Entry
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
    fine_tune,
    j_by_start,
    make_synthesis,
    mixed_mode,
)
from fedjax_het.condensation.synthesis_config import check_step_size
from fedjax_het.engine.local import LocalTraining
from fedjax_het.engine.plan import Plan
from fedjax_het.engine.randomness import Purpose, key_for
from fedjax_het.engine.sharing import ALONE, Sharing
from fedjax_het.nn import Model

Tree = Any

NUM_SNAPSHOTS = 9  # of the synthetic images over the course of synthesis, the last one included
SNAPSHOT_IMAGES = 40

# Numeric settings of the synthesis: traced hyper-parameters, not options.
_NUMERIC = SynthesisHyperParameters._fields


@dataclass(frozen=True)
class DynaFedOptions(SynthesisOptions):
    PRESETS = SynthesisOptions.NAMED

    preset: str = "paper"
    fine_tune_epochs: Whole = 20
    "Over the synthetic data, each round."
    fine_tune_optimizer: Literal["adam", "sgd"] = "adam"

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

    Options are those of `SynthesisOptions`, those of `preset` "paper" or "code" where they are not
    given. Clients and traffic are those of `base`; the synthetic data never leave the server. A
    network with batch norm uses the synthetic batch's statistics and keeps its running ones (the
    paper has no such network).
    Cost: N iterations, once, each differentiating s' training steps (see `mixed_mode`); then 20
    steps a round; shared by the devices that share a federation.
    """
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
    return whole._replace(
        host_work=(*whole.host_work, synthesising),
        artifacts=lambda state: {
            **whole.artifacts(state),
            **_artifacts(fixed, state.server.own),
        },
        summary=lambda hp, state: {**whole.summary(hp, state), **_summary(state.server.own)},
    )


class _Fixed(NamedTuple):
    """What does not change in a run."""

    options: DynaFedOptions
    model: Model
    apply_params: Callable[..., jax.Array]  # (params, images[, state]) -> logits, in training mode
    synthesis: Synthesis
    at_once: int  # samples of an inner step
    pictured: np.ndarray  # which samples' images are kept over the iterations


def _fixed(model: Model, options: DynaFedOptions, sharing: Sharing) -> _Fixed:
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    blank = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
    _, unravel = ravel_pytree(blank["params"])

    def apply_params(params, images, state=blank["state"]):
        return model.apply({"params": params, "state": state}, images, train=True)[0]

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
    return _Fixed(options, model, apply_params, synthesis, at_once, pictured)


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
    variables, options = this_round.after, fixed.options
    average = ravel_pytree(variables["params"])[0]
    # Rounds beyond L fall outside the array and are dropped.
    trajectory = own.trajectory.at[this_round.number + 1].set(average, mode="drop")
    own = own._replace(trajectory=trajectory)

    def tuned(sharing: Sharing, variables, synthetic, key, lr):
        params = fine_tune(
            lambda p, x: fixed.apply_params(p, x, variables["state"]),
            variables["params"],
            synthetic,
            key,
            epochs=options.fine_tune_epochs,
            lr=lr,
            augment_strategy=options.augment_strategy,
            loss_scaling=options.loss_scaling,
            optimizer=options.fine_tune_optimizer,
            sharing=sharing,
        )
        return {**variables, "params": params}

    synthetic, key = fixed.synthesis.result(own.synthesis), key_for(this_round.key, Purpose.SERVER)
    args = variables, synthetic, key, hp["fine_tune_lr"]
    ready = own.iterations >= options.num_iterations
    return jax.lax.cond(ready, partial(plan.shared, tuned), lambda *args: variables, *args), own


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
    return {
        "synthesis_iterations": done,
        "synthesis_skipped": int(log.skipped.sum()),
        "synthesis_step_size": float(log.step_size[-1]),
        "matching_loss": float(np.nanmean(log.matching_loss[-last:])),
        "matching_loss_by_start": {str(t): j for t, j in j_by_start(log, last=last).items()},
    }


def _snapshot_interval(total: int) -> int:
    return max(1, (total - 1) // (NUM_SNAPSHOTS - 1))


def _snapshot_iterations(total: int) -> np.ndarray:
    return np.append(np.arange(NUM_SNAPSHOTS - 1) * _snapshot_interval(total), total)


ENTRY = Entry(
    "dynafed",
    dynafed,
    "FedAvg, fine-tuned on data synthesised from the global trajectory (Pi et al., 2023)",
    paper="Pi et al., CVPR 2023, arXiv:2211.10878",
    options=DynaFedOptions,
    numbers=dynafed_numbers,
    colour="#D55E00",
    refines="model",
)
