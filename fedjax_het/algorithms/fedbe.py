"""FedBE (Chen and Chao, ICLR 2021, arXiv:2009.01974)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.contract import Algorithm
from fedjax_het.algorithms.distilling import DistillingOptions, Teachers, distilling
from fedjax_het.algorithms.entry import Entry
from fedjax_het.common.records import Count, Momentum, NonNegative, Positive, Record, Share, Whole
from fedjax_het.engine.ensemble import logits_of, sum_over_models, weighted_sum
from fedjax_het.engine.lanes import ClientModels
from fedjax_het.engine.local import LocalTraining
from fedjax_het.engine.plan import Plan

Tree = Any


@dataclass(frozen=True)
class FedBEOptions(DistillingOptions):
    PRESETS = {  # noqa: RUF012
        "paper": {},
        "code": {"posterior": "normalised", "cyclic": False, "over_classes": True},
    }

    preset: str = "paper"
    posterior: Literal["gaussian", "dirichlet", "normalised"] = "gaussian"
    "What models are drawn from; see `fedbe`."
    num_samples: Whole = 10
    "Models drawn from it."
    swa_start: Share = 0.5
    "Of the steps: from there on models are averaged."
    swa_every: Count = 1
    "Steps between those that are."
    cyclic: bool = True
    "Whether the rate falls to `swa_lr` in every `swa_every` steps, once models are averaged."
    over_classes: bool = False
    "Whether the loss is divided by the number of classes."


@dataclass(frozen=True)
class FedBENumbers(Record):
    distill_lr: NonNegative = 1e-3
    "SGD's, of the student."
    distill_momentum: Momentum = 0.9
    "SGD's, of the student."
    distill_weight_decay: NonNegative = 1e-5
    "SGD's, of the student."
    sharpening: Positive = 0.5
    "The temperature of the ensemble's prediction; 1 leaves it as it is."
    swa_lr: NonNegative | None = None
    "Where the rate falls to, in cycles."
    posterior_alpha: Positive | None = None
    "Of Dirichlet's."
    posterior_scale: NonNegative | None = None
    "Of the normalised one."


def fedbe(
    training: LocalTraining,
    plan: Plan,
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
    draw, num_samples = _POSTERIORS[options.posterior], options.num_samples
    swa_every = options.swa_every

    def ensemble(hp, teachers: Teachers, images, key):
        def predictions(variables):
            return jax.nn.softmax(logits_of(training.task, variables, images))

        total = sum_over_models(predictions, teachers.clients, len(images)) + predictions(
            teachers.after
        )
        if num_samples:
            sample = draw(hp, teachers)
            keys = jax.random.split(key, num_samples)
            total += jax.lax.map(lambda key: predictions(sample(key)), keys).sum(0)
        return jax.nn.softmax(jnp.log(total) / hp["sharpening"])

    def first(num_steps: int) -> int:
        """Steps before those whose models are averaged."""
        return int(options.swa_start * num_steps)

    def optimizer(hp, num_steps: int):
        def lr(done):
            into = jnp.maximum(done - first(num_steps), 0) % swa_every / max(swa_every - 1, 1)
            return hp["distill_lr"] + into * (hp["swa_lr"] - hp["distill_lr"])

        return optax.chain(
            optax.scale(1 / training.task.model.num_classes if options.over_classes else 1.0),
            optax.add_decayed_weights(hp["distill_weight_decay"]),
            optax.sgd(lr if options.cyclic else hp["distill_lr"], momentum=hp["distill_momentum"]),
        )

    def collects(num_steps: int):
        start = first(num_steps)
        return lambda done: (done > start) & ((done - start) % swa_every == 0)

    return distilling(training, plan, base, ensemble, optimizer, options, collects=collects)


def fedbe_numbers(options: FedBEOptions, num_clients: int) -> FedBENumbers:
    """Those of distillation, and what the posterior and the rate's cycles need."""
    return FedBENumbers(
        swa_lr=4e-4 if options.cyclic else None,
        posterior_alpha=1.0 if options.posterior == "dirichlet" else None,
        posterior_scale=0.1 if options.posterior == "normalised" else None,
    )


# Each is (hp, teachers) -> sample, and sample(key) a draw.


def _gaussian(hp, teachers: Teachers) -> Callable[[jax.Array], Tree]:
    params = teachers.clients.variables["params"]
    shares = _shares(teachers.clients)
    mean = weighted_sum(shares, params)
    squares = jax.tree.map(lambda w, mu: (w - mu) ** 2, params, mean)
    deviation = jax.tree.map(jnp.sqrt, weighted_sum(shares, squares))

    def sample(key):
        noise = optax.tree.random_like(key, mean)
        drawn = jax.tree.map(lambda mu, sd, e: mu + sd * e, mean, deviation, noise)
        return {**teachers.after, "params": drawn}

    return sample


def _dirichlet(hp, teachers: Teachers) -> Callable[[jax.Array], Tree]:
    logs = jnp.log(_shares(teachers.clients))  # -inf of those that are absent

    def sample(key):
        # Of gamma variates, of which Dirichlet's are the shares: their sum cancels.
        drawn = jax.random.loggamma(key, hp["posterior_alpha"], logs.shape)
        return weighted_sum(jax.nn.softmax(drawn + logs), teachers.clients.variables)

    return sample


def _normalised(hp, teachers: Teachers) -> Callable[[jax.Array], Tree]:
    shares, start = _shares(teachers.clients), teachers.before["params"]

    def fitted(w, start):
        changes = w - start
        axes = tuple(range(1, w.ndim))
        norms = jnp.sqrt((changes**2).sum(axes, keepdims=True))
        units = changes / jnp.maximum(norms, jnp.finfo(w.dtype).tiny)
        mean = weighted_sum(shares, units)
        variance = weighted_sum(shares, units**2) - mean**2
        return mean, jnp.sqrt(jnp.maximum(variance, 1e-5)), weighted_sum(shares, norms)

    tensors, shape = jax.tree.flatten(start)
    fits = [
        fitted(*both)
        for both in zip(jax.tree.leaves(teachers.clients.variables["params"]), tensors, strict=True)
    ]

    def sample(key):
        noise = jax.tree.leaves(optax.tree.random_like(key, start))
        drawn = [
            w + norm * (mean + hp["posterior_scale"] * deviation * e)
            for w, e, (mean, deviation, norm) in zip(tensors, noise, fits, strict=True)
        ]
        return {**teachers.after, "params": jax.tree.unflatten(shape, drawn)}

    return sample


_POSTERIORS = {"gaussian": _gaussian, "dirichlet": _dirichlet, "normalised": _normalised}


def _shares(models: ClientModels) -> jax.Array:
    return models.weights / jnp.maximum(models.weights.sum(), jnp.finfo(jnp.float32).tiny)


ENTRY = Entry(
    "fedbe",
    fedbe,
    "FedDF from a Bayesian ensemble of clients and models drawn between (Chen & Chao, 2021)",
    paper="Chen and Chao, ICLR 2021, arXiv:2009.01974",
    options=FedBEOptions,
    numbers=fedbe_numbers,
    colour="#88CCEE",
    dashes=(0, (2, 1.5)),
    refines="model",
    needs=("proxy_data",),
)
