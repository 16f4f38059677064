"""FedBE (Chen and Chao, ICLR 2021, arXiv:2009.01974)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.ensemble_distillation import (
    DistillationOptions,
    TeacherModels,
    build_distillation_algorithm,
)
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_loop import ClientModels
from fedjax_het.core.distillation import compute_logits, compute_weighted_sum, sum_over_models
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.utils.config import (
    Config,
    MomentumCoefficient,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
)

Tree = Any


@dataclass(frozen=True)
class FedBEOptions(DistillationOptions):
    PRESETS = {  # noqa: RUF012
        "paper": {},
        "code": {"posterior": "normalised", "cyclic": False, "over_classes": True},
    }

    preset: str = "paper"
    posterior: Literal["gaussian", "dirichlet", "normalised"] = "gaussian"
    "What models are drawn from; see `fedbe`."
    num_samples: NonNegativeInt = 10
    "Models drawn from it."
    swa_start: UnitInterval = 0.5
    "Of the steps: from there on models are averaged."
    swa_every: PositiveInt = 1
    "Steps between those that are."
    cyclic: bool = True
    "Whether the rate falls to `swa_lr` in every `swa_every` steps, once models are averaged."
    over_classes: bool = False
    "Whether the loss is divided by the number of classes."


@dataclass(frozen=True)
class FedBEHyperParameters(Config):
    distill_lr: NonNegativeFloat = 1e-3
    "SGD's, of the student."
    distill_momentum: MomentumCoefficient = 0.9
    "SGD's, of the student."
    distill_weight_decay: NonNegativeFloat = 1e-5
    "SGD's, of the student."
    sharpening: PositiveFloat = 0.5
    "The temperature of the ensemble's prediction; 1 leaves it as it is."
    swa_lr: NonNegativeFloat | None = None
    "Where the rate falls to, in cycles."
    posterior_alpha: PositiveFloat | None = None
    "Of Dirichlet's."
    posterior_scale: NonNegativeFloat | None = None
    "Of the normalised one."


def fedbe(
    training: LocalTraining,
    plan: ExecutionPlan,
    *,
    base: Callable[..., Algorithm],
    options: FedBEOptions = FedBEOptions(),
) -> Algorithm:
    """After each round of `base` the global model learns what a Bayesian ensemble says.

    The ensemble: the model that `base` made, the round's client models w_k, and `num_samples`
    models drawn from a distribution fitted to the w_k with their weights p_k in the average,

        gaussian:    N(mu, diag(sum_k p_k (w_k - mu)^2)), mu = sum_k p_k w_k
        dirichlet:   sum_k g_k p_k w_k / sum_k g_k p_k, g ~ Dir(posterior_alpha 1)
        normalised:  tensor by tensor, w + r (m + posterior_scale s e), e ~ N(0, 1), with the mean m
                     and variance s^2 (1e-5 at least) of the w_k - w divided by their norms, r the
                     mean of these norms, and w what the round started from.

    Its mean prediction p over the server's examples, whose labels are not read, is sharpened to
    p^(1 / sharpening) / sum, and the global model learns that by SGD with momentum and weight decay
    for `distill_epochs` epochs. What comes out is the mean of the models that the steps pass
    through: every `swa_every`-th, once the share `swa_start` of the steps is done (stochastic
    weight averaging; the last model if none is). 0 epochs is `base`.

    Presets:
      paper: gaussian; where models are averaged the rate falls from `distill_lr` to `swa_lr` in
        every `swa_every` steps (`cyclic`; it stays where that is 1); the mean over samples of KL.
      code: the public code (hongyouc/FedBE): normalised, a constant rate, and the loss divided by
        the number of classes (`over_classes`).
    Rates, momentum, decay, sharpening, samples, epochs and batches are those of the code in both.
    The paper averages every 25th model from the 250th step, the code from the 500th, of some 1,600;
    with fewer examples there are fewer steps, hence a share, and every model. posterior_alpha is
    undefined in the code, and 1 here. Batch-norm statistics of a draw are those of the global
    model (Dirichlet's are mixed like the weights), since they may not be negative.

    Traffic and state: those of `base`. Cost: S + num_samples + 1 passes over the server's examples
    and the student's epochs, both shared by the devices that share a federation; memory of the S
    models.
    """
    make_sampler, num_samples = _POSTERIOR_SAMPLERS[options.posterior], options.num_samples
    swa_every = options.swa_every

    def predict_ensemble(hp, teachers: TeacherModels, images, key):
        def predict(variables):
            return jax.nn.softmax(compute_logits(training.task, variables, images))

        total = sum_over_models(predict, teachers.client_models, len(images), teachers.loops)
        total += predict(teachers.variables_after)
        if num_samples:
            sample = make_sampler(hp, teachers)
            keys = jax.random.split(key, num_samples)
            total += jax.lax.map(lambda key: predict(sample(key)), keys).sum(0)
        return jax.nn.softmax(jnp.log(total) / hp["sharpening"])

    def first_averaged_step(num_steps: int) -> int:
        """Steps before those whose models are averaged."""
        return int(options.swa_start * num_steps)

    def make_optimizer(hp, num_steps: int):
        def lr_schedule(step):
            cycle_fraction = (
                jnp.maximum(step - first_averaged_step(num_steps), 0)
                % swa_every
                / max(swa_every - 1, 1)
            )
            return hp["distill_lr"] + cycle_fraction * (hp["swa_lr"] - hp["distill_lr"])

        return optax.chain(
            optax.scale(1 / training.task.model.num_classes if options.over_classes else 1.0),
            optax.add_decayed_weights(hp["distill_weight_decay"]),
            optax.sgd(
                lr_schedule if options.cyclic else hp["distill_lr"], momentum=hp["distill_momentum"]
            ),
        )

    def make_swa_predicate(num_steps: int):
        start = first_averaged_step(num_steps)
        return lambda step: (step > start) & ((step - start) % swa_every == 0)

    return build_distillation_algorithm(
        training,
        plan,
        base,
        predict_ensemble,
        make_optimizer,
        options,
        make_swa_predicate=make_swa_predicate,
    )


def make_fedbe_hyperparameters(options: FedBEOptions, num_clients: int) -> FedBEHyperParameters:
    """Those of distillation, and what the posterior and the rate's cycles need."""
    return FedBEHyperParameters(
        swa_lr=4e-4 if options.cyclic else None,
        posterior_alpha=1.0 if options.posterior == "dirichlet" else None,
        posterior_scale=0.1 if options.posterior == "normalised" else None,
    )


# Each is (hp, teachers) -> sample, and sample(key) a draw.


def _make_gaussian_sampler(hp, teachers: TeacherModels) -> Callable[[jax.Array], Tree]:
    params = teachers.client_models.variables["params"]
    client_weights = _normalized_weights(teachers.client_models)
    mean = compute_weighted_sum(client_weights, params)
    squares = jax.tree.map(lambda w, mu: (w - mu) ** 2, params, mean)
    deviation = jax.tree.map(jnp.sqrt, compute_weighted_sum(client_weights, squares))

    def sample(key):
        noise = optax.tree.random_like(key, mean)
        params = jax.tree.map(lambda mu, sd, e: mu + sd * e, mean, deviation, noise)
        return {**teachers.variables_after, "params": params}

    return sample


def _make_dirichlet_sampler(hp, teachers: TeacherModels) -> Callable[[jax.Array], Tree]:
    log_weights = jnp.log(
        _normalized_weights(teachers.client_models)
    )  # -inf of those that are absent

    def sample(key):
        # Of gamma variates, of which Dirichlet's are the shares: their sum cancels.
        log_gammas = jax.random.loggamma(key, hp["posterior_alpha"], log_weights.shape)
        return compute_weighted_sum(
            jax.nn.softmax(log_gammas + log_weights), teachers.client_models.variables
        )

    return sample


def _make_normalized_sampler(hp, teachers: TeacherModels) -> Callable[[jax.Array], Tree]:
    client_weights, start = (
        _normalized_weights(teachers.client_models),
        teachers.variables_before["params"],
    )

    def fit_tensor(w, start):
        changes = w - start
        axes = tuple(range(1, w.ndim))
        norms = jnp.sqrt((changes**2).sum(axes, keepdims=True))
        unit_changes = changes / jnp.maximum(norms, jnp.finfo(w.dtype).tiny)
        mean = compute_weighted_sum(client_weights, unit_changes)
        variance = compute_weighted_sum(client_weights, unit_changes**2) - mean**2
        return (
            mean,
            jnp.sqrt(jnp.maximum(variance, 1e-5)),
            compute_weighted_sum(client_weights, norms),
        )

    start_leaves, treedef = jax.tree.flatten(start)
    tensor_fits = [
        fit_tensor(*leaf_pair)
        for leaf_pair in zip(
            jax.tree.leaves(teachers.client_models.variables["params"]), start_leaves, strict=True
        )
    ]

    def sample(key):
        noise = jax.tree.leaves(optax.tree.random_like(key, start))
        leaves = [
            w + norm * (mean + hp["posterior_scale"] * deviation * e)
            for w, e, (mean, deviation, norm) in zip(start_leaves, noise, tensor_fits, strict=True)
        ]
        return {**teachers.variables_after, "params": jax.tree.unflatten(treedef, leaves)}

    return sample


_POSTERIOR_SAMPLERS = {
    "gaussian": _make_gaussian_sampler,
    "dirichlet": _make_dirichlet_sampler,
    "normalised": _make_normalized_sampler,
}


def _normalized_weights(client_models: ClientModels) -> jax.Array:
    return client_models.weights / jnp.maximum(
        client_models.weights.sum(), jnp.finfo(jnp.float32).tiny
    )


SPEC = AlgorithmSpec(
    "fedbe",
    fedbe,
    "FedDF from a Bayesian ensemble of clients and models drawn between (Chen & Chao, 2021)",
    paper="Chen and Chao, ICLR 2021, arXiv:2009.01974",
    options=FedBEOptions,
    hyperparameters=make_fedbe_hyperparameters,
    color="#88CCEE",
    dashes=(0, (2, 1.5)),
    wraps="model",
    required_data=("proxy_data",),
)
