"""What the methods that distil the clients' models into the server's share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.refined import Round, refined
from fedjax_het.common.errors import is_whole, require
from fedjax_het.engine.ensemble import distilled
from fedjax_het.engine.lanes import ClientModels
from fedjax_het.engine.local import LocalTraining
from fedjax_het.engine.plan import Plan
from fedjax_het.engine.randomness import SERVER_FOLD
from fedjax_het.engine.server import steps_per_epoch

Tree = Any

DISTILLING_OPTIONS: dict[str, Any] = {"distill_epochs": 20, "distill_batch_size": 128}


def over_models(
    training: LocalTraining,
    plan: Plan,
    base: Callable[..., Algorithm],
    refine: Callable[[Any, Round, ClientModels], Tree],
) -> Algorithm:
    """`base`, whose global model becomes `refine(hp, round, models)` of all its clients' models."""
    algorithm = base(training._replace(hands_out_models=True), plan)

    def refined_model(hp, own, of: Round):
        assert of.models is not None, "the base is not one that hands out its clients' models"
        return refine(hp, of, of.models), own

    return refined(algorithm, refined_model)


def distilling(
    training: LocalTraining,
    plan: Plan,
    base: Callable[..., Algorithm],
    ensemble: Callable[[Any, Round, ClientModels, jax.Array, jax.Array], jax.Array],
    optimizer: Callable[[Any, int], optax.GradientTransformation],
    *,
    distill_epochs: int,
    distill_batch_size: int,
    collects: Callable[[int], Callable | None] = lambda num_steps: None,
) -> Algorithm:
    """`base`, whose global model learns each round what an ensemble says of the server's examples.

    A round in which no client has data teaches nothing.

    Args:
      ensemble(hp, round, models, images, key) -> targets, `[n_0, C]` probabilities.
      optimizer(hp, num_steps); collects(num_steps): see `distilled`.
    """
    task = training.task

    def refine(hp, of: Round, models: ClientModels):
        images = of.cohort.server.examples.images
        draw_key, key = jax.random.split(jax.random.fold_in(of.key, SERVER_FOLD))
        num_steps = distill_epochs * steps_per_epoch(len(images), distill_batch_size)
        return distilled(
            task,
            of.after,
            images,
            ensemble(hp, of, models, images, draw_key),
            key,
            optimizer=optimizer(hp, num_steps),
            batch_size=distill_batch_size,
            num_steps=jnp.where(models.present.any(), num_steps, 0),
            collects=collects(num_steps),
        )

    return over_models(training, plan, base, refine)


def check_distilling(options: dict[str, Any]) -> None:
    """Raise ConfigError unless epochs and batches are whole numbers."""
    for name, least in (("distill_epochs", 0), ("distill_batch_size", 1)):
        ok = is_whole(options[name], least)
        require(ok, name, options[name], f"a whole number >= {least}")
