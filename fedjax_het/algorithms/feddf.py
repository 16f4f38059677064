"""FedDF (Lin et al., NeurIPS 2020, arXiv:2006.07242)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm, written_out
from fedjax_het.algorithms.distilling import check_distilling, distilling
from fedjax_het.algorithms.refined import Round
from fedjax_het.common.errors import require, require_name
from fedjax_het.engine.ensemble import logits_of, sum_over_models
from fedjax_het.engine.lanes import ClientModels
from fedjax_het.engine.local import LocalTraining
from fedjax_het.engine.plan import Plan

FEDDF_OPTIONS: dict[str, Any] = {
    "preset": "paper",
    "distill_epochs": None,
    "distill_batch_size": None,
    "annealed": None,
}
_PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"distill_epochs": 20, "distill_batch_size": 64, "annealed": True},
    "fedaux": {"distill_epochs": 1, "distill_batch_size": 128, "annealed": False},
}
_HP = {"paper": {"distill_lr": 1e-3, "distill_clip": 5.0}, "fedaux": {"distill_lr": 5e-5}}


def feddf(
    training: LocalTraining,
    plan: Plan,
    *,
    base: Callable[..., Algorithm],
    annealed: bool,
    preset: str = "",
    **distillation,
) -> Algorithm:
    """After each round of `base` the global model w learns what its clients' models say together:

        min_w mean_x KL(softmax(mean_k f(x; w_k)) || softmax(f(x; w)))

    over the server's examples x, whose labels are not read. The teachers w_k are the round's client
    models in evaluation mode, all alike, whatever their weights in the average; the student starts
    from what `base` made of them, and learns by Adam, new every round, for `distill_epochs` epochs
    in batches of `distill_batch_size`. 0 epochs is `base`.

    Presets:
      paper: the authors' code (epfml/federated-learning-public-code). `distill_lr` 1e-3, which a
        cosine takes to 0 over the steps (`annealed`); gradients are clipped to a norm of
        `distill_clip` (5); batches of 64, as at its clients. Its at most 10,000 minibatches end
        when accuracy on labelled validation data has not improved for 1,000, and the best student
        of these is kept; here there are 20 epochs, and the last is kept, since the server's
        examples are to be few and without labels. Teachers are not dropped.
      fedaux: what the authors of DynaFed built on (fedaux). One epoch at 5e-5 in batches of 128,
        neither annealed nor clipped. There teachers are in training mode, and Adam's moments are
        kept from round to round; not so here.

    The mean of linear models' logits is that of their mean: there FedDF has nothing to learn from
    a uniform average. Batch norm is the student's as in training.

    Traffic and state: those of `base`. Cost: a pass of each of the S clients' models over the
    server's examples and the student's epochs, on every device alike; memory of the S models.
    """

    def ensemble(hp, of: Round, models: ClientModels, images, key):
        total = sum_over_models(lambda one: logits_of(training.task, one, images), models)
        return jax.nn.softmax(total / jnp.maximum(models.present.sum(), 1))

    def optimizer(hp, num_steps: int):
        lr = hp["distill_lr"]
        if annealed:
            lr = optax.cosine_decay_schedule(lr, max(num_steps, 1))
        clip = [optax.clip_by_global_norm(hp["distill_clip"])] if "distill_clip" in hp else []
        return optax.chain(*clip, optax.adam(lr))

    return distilling(training, plan, base, ensemble, optimizer, **distillation)


def feddf_hyper_parameters(options: dict[str, Any], num_clients: int) -> dict[str, float]:
    """The preset's rate, and its bound on gradients if it has one."""
    return _HP[options["preset"]]


def fill_feddf(options: dict[str, Any]) -> dict[str, Any]:
    """The options with the preset's choices written out."""
    return written_out(options, _PRESETS[options["preset"]])


def check_feddf(options: dict[str, Any]) -> None:
    """Raise ConfigError unless every choice is one that there is."""
    require_name("preset", options["preset"], _PRESETS)
    options = fill_feddf(options)
    check_distilling(options)
    annealed = options["annealed"]
    require(isinstance(annealed, bool), "annealed", annealed, "True or False")


def check_feddf_hp(hp: dict[str, float]) -> None:
    """Raise ConfigError for a clip that lets nothing through."""
    clip = hp.get("distill_clip", 1)
    require(clip > 0, "hp distill_clip", clip, "a norm > 0")
