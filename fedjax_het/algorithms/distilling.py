"""What the methods that distil the clients' models into the server's share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.contract import Algorithm
from fedjax_het.algorithms.refined import Round, refined, server_examples
from fedjax_het.common.arrays import AnyArray
from fedjax_het.common.records import Count, Record, Whole
from fedjax_het.engine.ensemble import distilled
from fedjax_het.engine.lanes import ClientModels
from fedjax_het.engine.local import LocalTraining
from fedjax_het.engine.plan import Plan
from fedjax_het.engine.randomness import Purpose, key_for
from fedjax_het.engine.server import steps_per_epoch
from fedjax_het.engine.sharing import Sharing

Tree = Any


@dataclass(frozen=True)
class DistillingOptions(Record):
    distill_epochs: Whole = 20
    "Over the server's examples, each round."
    distill_batch_size: Count = 128
    "Of the server's examples."


class Teachers(NamedTuple):
    """Of whom an ensemble is made."""

    clients: ClientModels
    before: Tree  # the variables that the round started from
    after: Tree  # those that the base made of its clients' work


def over_models(
    training: LocalTraining,
    plan: Plan,
    base: Callable[..., Algorithm],
    refine: Callable[[Any, Round, ClientModels], Tree],
    server_batch: int,
) -> Algorithm:
    """`base`, whose global model becomes `refine(hp, round, models)` of all its clients' models."""
    algorithm = base(training._replace(hands_out_models=True), plan)

    def refined_model(hp, own, this_round: Round):
        assert this_round.models is not None, (
            "the base is not one that hands out its clients' models"
        )
        return refine(hp, this_round, this_round.models), own

    return refined(algorithm, refined_model, server_batch=server_batch)


def distilling(
    training: LocalTraining,
    plan: Plan,
    base: Callable[..., Algorithm],
    ensemble: Callable[[Any, Teachers, AnyArray, jax.Array], jax.Array],
    optimizer: Callable[[Any, int], optax.GradientTransformation],
    options: DistillingOptions,
    *,
    collects: Callable[[int], Callable | None] = lambda num_steps: None,
) -> Algorithm:
    """`base`, whose global model learns each round what an ensemble says of the server's examples.

    A round in which no client has data teaches nothing.

    Args:
      ensemble(hp, teachers, images, key) -> targets, `[n, C]` probabilities, each of its image
        by itself; it may see a part of the server's.
      optimizer(hp, num_steps); collects(num_steps): see `distilled`.
    """
    task = training.task

    def refine(hp, this_round: Round, models: ClientModels):
        images = server_examples(this_round).images
        key = key_for(this_round.key, Purpose.SERVER)
        before, after = this_round.before, this_round.after
        return plan.shared(learn, hp, before, after, models, images, key)

    def learn(sharing: Sharing, hp, before, after, models: ClientModels, images, key):
        draw_key, key = jax.random.split(key)
        batch_size = options.distill_batch_size
        num_steps = options.distill_epochs * steps_per_epoch(len(images), batch_size)
        teachers = Teachers(models, before, after)
        targets = sharing.for_each_sample(
            lambda images: ensemble(hp, teachers, images, draw_key), images
        )
        return distilled(
            task,
            after,
            images,
            targets,
            key,
            optimizer=optimizer(hp, num_steps),
            batch_size=batch_size,
            epochs=jnp.where(models.present.any(), options.distill_epochs, 0),
            most_epochs=options.distill_epochs,
            collects=collects(num_steps),
            sharing=sharing,
        )

    return over_models(training, plan, base, refine, options.distill_batch_size)
