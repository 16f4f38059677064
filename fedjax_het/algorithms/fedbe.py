"""FedBE (Chen and Chao, ICLR 2021, arXiv:2009.01974)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.distilling import DISTILLING_OPTIONS, check_distilling, distilling
from fedjax_het.algorithms.refined import Round
from fedjax_het.engine.ensemble import logits_of, sum_over_models, weighted_sum
from fedjax_het.engine.lanes import ClientModels
from fedjax_het.engine.local import LocalTraining
from fedjax_het.engine.plan import Plan
from fedjax_het.errors import is_whole, require, require_name

Tree = Any

POSTERIORS = ("gaussian", "dirichlet")

FEDBE_OPTIONS: dict[str, Any] = {
    **DISTILLING_OPTIONS,
    "posterior": "gaussian",
    "num_samples": 10,
    "swa_start": 0.5,
    "swa_every": 1,
}


def fedbe_hyper_parameters(options: dict[str, Any], num_clients: int) -> dict[str, float]:
    """Those of distillation, and alpha of a Dirichlet posterior."""
    alpha = {"posterior_alpha": 1.0} if options["posterior"] == "dirichlet" else {}
    return {
        "distill_lr": 1e-3,
        "distill_momentum": 0.9,
        "distill_weight_decay": 1e-5,
        "sharpening": 0.5,
        **alpha,
    }


def fedbe(
    training: LocalTraining,
    plan: Plan,
    *,
    base: Callable[..., Algorithm],
    posterior: str = "gaussian",
    num_samples: int = 10,
    swa_start: float = 0.5,
    swa_every: int = 1,
    **distillation,
) -> Algorithm:
    """After each round of `base` the global model learns what a Bayesian ensemble says.

    The ensemble: the model that `base` made, the round's client models w_k, and `num_samples`
    models drawn from a distribution fitted to the w_k with their weights p_k in the average,

        gaussian:   N(mu, diag(sum_k p_k (w_k - mu)^2)), mu = sum_k p_k w_k
        dirichlet:  sum_k g_k p_k w_k / sum_k g_k p_k, g ~ Dir(posterior_alpha 1).

    Its mean prediction p over the server's examples, whose labels are not read, is sharpened to
    p^(1 / sharpening) / sum, and the global model learns that by SGD with momentum and weight decay
    for `distill_epochs` epochs. What comes out is the mean of the models that the steps pass
    through: every `swa_every`-th, once the share `swa_start` of the steps is done (stochastic
    weight averaging; the last model if none is). 0 epochs is `base`.

    Rates, momentum, decay, sharpening, samples, epochs and batches are those of the public code
    (hongyouc/FedBE), which averages every 25th model from the 500th of some 1,600 steps; with fewer
    examples there are fewer steps, hence a share, and every model. As there the rate is constant;
    the paper's is cyclic.
    Not as there: the Gaussian is the paper's, where the code draws normalised changes tensor by
    tensor with a tenth of the deviation; the loss is the mean over samples of KL, which the code
    divides by C besides. posterior_alpha is undefined there, and 1 here. Batch-norm statistics of a
    Gaussian's samples are those of the global model, since they may not be negative.

    Traffic and state: those of `base`. Cost: S + num_samples + 1 passes over the server's examples
    and the student's epochs, on every device alike; memory of the S models.
    """
    draw = {"gaussian": _gaussian, "dirichlet": _dirichlet}[posterior]

    def ensemble(hp, of: Round, models: ClientModels, images, key):
        def predictions(variables):
            return jax.nn.softmax(logits_of(training.task, variables, images))

        total = sum_over_models(predictions, models) + predictions(of.after)
        if num_samples:
            sample = draw(hp, models, of.after)
            keys = jax.random.split(key, num_samples)
            total += jax.lax.map(lambda key: predictions(sample(key)), keys).sum(0)
        return jax.nn.softmax(jnp.log(total) / hp["sharpening"])

    def optimizer(hp, num_steps: int):
        return optax.chain(
            optax.add_decayed_weights(hp["distill_weight_decay"]),
            optax.sgd(hp["distill_lr"], momentum=hp["distill_momentum"]),
        )

    def collects(num_steps: int):
        first = int(swa_start * num_steps)
        return lambda done: (done > first) & ((done - first) % swa_every == 0)

    return distilling(training, plan, base, ensemble, optimizer, collects=collects, **distillation)


def check_fedbe(options: dict[str, Any]) -> None:
    """Raise ConfigError unless the options make sense."""
    check_distilling(options)
    require_name("posterior", options["posterior"], POSTERIORS)
    for name, least in (("num_samples", 0), ("swa_every", 1)):
        ok = is_whole(options[name], least)
        require(ok, name, options[name], f"a whole number >= {least}")
    start = options["swa_start"]
    ok = isinstance(start, int | float) and not isinstance(start, bool) and 0 <= start <= 1
    require(ok, "swa_start", start, "a share in [0, 1]")


def check_fedbe_hp(hp: dict[str, float]) -> None:
    """Raise ConfigError for a sharpening or an alpha that is 0."""
    for name in ("sharpening", "posterior_alpha"):
        require(hp.get(name, 1) > 0, f"hp {name}", hp.get(name), "a number > 0")


def _gaussian(hp, models: ClientModels, middle: Tree) -> Callable[[jax.Array], Tree]:
    """key -> a draw; batch-norm statistics are those of `middle`."""
    params = models.variables["params"]
    shares = _shares(models)
    mean = weighted_sum(shares, params)
    squares = jax.tree.map(lambda w, mu: (w - mu) ** 2, params, mean)
    deviation = jax.tree.map(jnp.sqrt, weighted_sum(shares, squares))

    def sample(key):
        noise = optax.tree.random_like(key, mean)
        drawn = jax.tree.map(lambda mu, sd, e: mu + sd * e, mean, deviation, noise)
        return {**middle, "params": drawn}

    return sample


def _dirichlet(hp, models: ClientModels, middle: Tree) -> Callable[[jax.Array], Tree]:
    """key -> a draw, a mixture of the clients' variables."""
    logs = jnp.log(_shares(models))  # -inf of those that are absent

    def sample(key):
        # Of gamma variates, of which Dirichlet's are the shares: their sum cancels.
        drawn = jax.random.loggamma(key, hp["posterior_alpha"], logs.shape)
        return weighted_sum(jax.nn.softmax(drawn + logs), models.variables)

    return sample


def _shares(models: ClientModels) -> jax.Array:
    return models.weights / jnp.maximum(models.weights.sum(), jnp.finfo(jnp.float32).tiny)
