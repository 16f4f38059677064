"""FedBE (Chen and Chao, ICLR 2021, arXiv:2009.01974)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.ensemble_distillation import (
    DistillationOptions,
    TeacherModels,
    build_distillation,
)
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.distillation import compute_logits, compute_weighted_sum, sum_over_models
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.utils.arrays import normalize_weights
from fedjax_het.utils.config import (
    Config,
    MomentumCoefficient,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SearchRange,
    UnitInterval,
)
from fedjax_het.utils.input_kinds import count_rows

Tree = Any


@dataclass(frozen=True)
class FedBEOptions(DistillationOptions):
    """Choices of FedBE."""

    PRESETS = {  # noqa: RUF012
        "paper": {},
        "code": {"posterior": "normalised", "cyclic": False, "over_classes": True},
    }

    preset: str = "paper"
    posterior: Literal["gaussian", "dirichlet", "normalised"] = "gaussian"
    "Distribution that models are drawn from: Gaussian, Dirichlet or normalized changes."
    num_samples: NonNegativeInt = 10
    "Number of models drawn from the distribution."
    swa_start: UnitInterval = 0.5
    "Fraction of the steps after which models are averaged."
    swa_every: PositiveInt = 1
    "Number of steps from one averaged model to the next."
    cyclic: bool = True
    "Whether the rate falls to `swa_lr` in every `swa_every` steps while models are averaged."
    over_classes: bool = False
    "Whether the loss is divided by the number of classes."


@dataclass(frozen=True)
class FedBEHyperParameters(Config):
    """Hyperparameters of FedBE."""

    distill_lr: Annotated[NonNegativeFloat, SearchRange(0.0001, 0.01)] = 1e-3
    "Learning rate of the student's SGD."
    distill_momentum: MomentumCoefficient = 0.9
    "Momentum of the student's SGD."
    distill_weight_decay: NonNegativeFloat = 1e-5
    "Weight decay of the student's SGD."
    sharpening: PositiveFloat = 0.5
    "Temperature of the ensemble's prediction; 1 leaves it unchanged."
    swa_lr: NonNegativeFloat | None = None
    "Rate at the end of each cycle."
    posterior_alpha: PositiveFloat | None = None
    "Concentration of the Dirichlet posterior."
    posterior_scale: NonNegativeFloat | None = None
    "Scale of the noise of the normalized posterior."


def fedbe(
    training: LocalTraining,
    plan: ExecutionPlan,
    *,
    base: Callable[..., Algorithm],
    options: FedBEOptions,
) -> Algorithm:
    """FedBE: the global model learns the prediction of a Bayesian ensemble (Algorithm 1).

    The ensemble contains the model of the base's round, the round's client models w_k and
    `num_samples` drawn models. Their distribution is fitted to the w_k with weights p_k:

        gaussian:    N(mu, diag(sum_k p_k (w_k - mu)^2)), mu = sum_k p_k w_k
        dirichlet:   sum_k g_k p_k w_k / sum_k g_k p_k, g ~ Dir(posterior_alpha 1)
        normalised:  tensor by tensor, w + r (m + posterior_scale s e), e ~ N(0, 1), with the mean m
                     and variance s^2 (1e-5 at least) of the w_k - w divided by their norms, r the
                     mean of these norms, and w the model at the start of the round.

    Its mean prediction p over the server's examples, whose labels are not read, is sharpened to
    p^(1 / sharpening) / sum. The global model learns this prediction by SGD with momentum and
    weight decay for `distill_epochs` epochs. The result is the mean of every `swa_every`-th model
    after the fraction `swa_start` of the steps (stochastic weight averaging). Without such a model
    the result is the last model. 0 epochs is `base`.

    Presets:
      paper: gaussian; the mean over samples of KL. While models are averaged the rate falls from
        `distill_lr` to `swa_lr` in every `swa_every` steps (`cyclic`; it is constant if `swa_every`
        is 1).
      code: the public code (hongyouc/FedBE): normalised, a constant rate, and the loss divided by
        the number of classes (`over_classes`).
    Rates, momentum, decay, sharpening, samples, epochs and batches follow the code in both presets.

    Traffic and client state equal the traffic and state of `base`. Cost: S + num_samples + 1 passes
    over the server's examples, the student's epochs, and memory for S models. The devices of a
    federation share the work.

    Departures: the paper averages every 25th model from the 250th step, the code from the 500th, of
    some 1,600. Fewer examples give fewer steps. The start is therefore a fraction of the steps
    here, and every model is averaged. posterior_alpha is undefined in the code, and 1 here. A draw
    has the batch-norm statistics of the global model, since statistics may not be negative
    (Dirichlet's are mixed like the weights).

    Args:
      training: the choices of local training.
      plan: where the clients run, and the devices that share the server's work.
      base: `base(training, plan)`, the method whose model is distilled.
      options: choices of the method.

    Returns:
      The method.
    """
    make_sampler, num_samples = _POSTERIOR_SAMPLERS[options.posterior], options.num_samples
    swa_every = options.swa_every

    def predict_ensemble(hp, teachers: TeacherModels, inputs, key):
        def predict(variables):
            return jax.nn.softmax(compute_logits(training.task, variables, inputs))

        total = sum_over_models(predict, teachers.client_models, count_rows(inputs), teachers.loops)
        total += predict(teachers.variables_after)
        if num_samples:
            sample = make_sampler(hp, teachers)
            keys = jax.random.split(key, num_samples)
            total += jax.lax.map(lambda key: predict(sample(key)), keys).sum(0)
        return jax.nn.softmax(jnp.log(total) / hp["sharpening"])

    def make_optimizer(hp, num_steps: int):
        start = int(options.swa_start * num_steps)
        lr, num_classes = hp["distill_lr"], training.task.model.num_classes

        def cyclic_lr(step):
            fraction = jnp.maximum(step - start, 0) % swa_every / max(swa_every - 1, 1)
            return lr + fraction * (hp["swa_lr"] - lr)

        optimizer = optax.chain(
            optax.scale(1 / num_classes if options.over_classes else 1.0),
            optax.add_decayed_weights(hp["distill_weight_decay"]),
            optax.sgd(cyclic_lr if options.cyclic else lr, momentum=hp["distill_momentum"]),
        )
        return optimizer, lambda step: (step > start) & ((step - start) % swa_every == 0)

    return build_distillation(training, plan, base, predict_ensemble, make_optimizer, options)


def _make_hyperparameters(options: FedBEOptions, num_clients: int) -> FedBEHyperParameters:
    """Return the numbers of distillation, of the posterior and of the rate's cycles."""
    return FedBEHyperParameters(
        swa_lr=4e-4 if options.cyclic else None,
        posterior_alpha=1.0 if options.posterior == "dirichlet" else None,
        posterior_scale=0.1 if options.posterior == "normalised" else None,
    )


# Each posterior is a function (hp, teachers) -> sample; `sample(key)` draws a model's variables.


def _make_gaussian_sampler(hp, teachers: TeacherModels) -> Callable[[jax.Array], Tree]:
    params, weights = (
        teachers.client_models.variables["params"],
        normalize_weights(teachers.client_models.weights),
    )
    mean = compute_weighted_sum(weights, params)
    squares = jax.tree.map(lambda w, mu: (w - mu) ** 2, params, mean)
    deviation = jax.tree.map(jnp.sqrt, compute_weighted_sum(weights, squares))

    def sample(key):
        noise = optax.tree.random_like(key, mean)
        params = jax.tree.map(lambda mu, sd, e: mu + sd * e, mean, deviation, noise)
        return {**teachers.variables_after, "params": params}

    return sample


def _make_dirichlet_sampler(hp, teachers: TeacherModels) -> Callable[[jax.Array], Tree]:
    log_weights = jnp.log(
        normalize_weights(teachers.client_models.weights)
    )  # -inf of absent clients

    def sample(key):
        # Shares of gamma variates are Dirichlet's: their sum cancels.
        log_gammas = jax.random.loggamma(key, hp["posterior_alpha"], log_weights.shape)
        weights = jax.nn.softmax(log_gammas + log_weights)
        return compute_weighted_sum(weights, teachers.client_models.variables)

    return sample


def _make_normalized_sampler(hp, teachers: TeacherModels) -> Callable[[jax.Array], Tree]:
    weights, start = (
        normalize_weights(teachers.client_models.weights),
        teachers.variables_before["params"],
    )

    def fit_tensor(w, start):
        changes = w - start
        axes = tuple(range(1, w.ndim))
        norms = jnp.sqrt((changes**2).sum(axes, keepdims=True))
        unit_changes = changes / jnp.maximum(norms, jnp.finfo(w.dtype).tiny)
        mean = compute_weighted_sum(weights, unit_changes)
        variance = compute_weighted_sum(weights, unit_changes**2) - mean**2
        deviation = jnp.sqrt(jnp.maximum(variance, 1e-5))
        return mean, deviation, compute_weighted_sum(weights, norms)

    start_leaves, structure = jax.tree.flatten(start)
    client_leaves = jax.tree.leaves(teachers.client_models.variables["params"])
    fits = list(map(fit_tensor, client_leaves, start_leaves))

    def sample(key):
        noise = jax.tree.leaves(optax.tree.random_like(key, start))
        leaves = [
            w + norm * (mean + hp["posterior_scale"] * deviation * e)
            for w, e, (mean, deviation, norm) in zip(start_leaves, noise, fits, strict=True)
        ]
        return {**teachers.variables_after, "params": jax.tree.unflatten(structure, leaves)}

    return sample


_POSTERIOR_SAMPLERS = {
    "gaussian": _make_gaussian_sampler,
    "dirichlet": _make_dirichlet_sampler,
    "normalised": _make_normalized_sampler,
}


SPEC = AlgorithmSpec(
    "fedbe",
    fedbe,
    "FedDF from a Bayesian ensemble of clients' models and drawn models (Chen & Chao, 2021)",
    title="FedBE",
    paper="Chen and Chao, ICLR 2021, arXiv:2009.01974",
    options=FedBEOptions,
    hyperparameters=_make_hyperparameters,
    color="#88CCEE",
    dashes=(0, (2, 1.5)),
    wraps="model",
    required_data=("proxy_data",),
    needs_classes=True,
)
