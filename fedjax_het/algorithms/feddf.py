"""FedDF (Lin et al., NeurIPS 2020, arXiv:2006.07242)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.distilling import DISTILLING_OPTIONS, check_distilling, distilling
from fedjax_het.algorithms.refined import Round
from fedjax_het.engine.ensemble import logits_of, sum_over_models
from fedjax_het.engine.lanes import ClientModels
from fedjax_het.engine.local import LocalTraining
from fedjax_het.engine.plan import Plan
from fedjax_het.errors import require

FEDDF_HP = {"distill_lr": 1e-3, "distill_clip": 5.0}
FEDDF_OPTIONS = DISTILLING_OPTIONS


def feddf(
    training: LocalTraining, plan: Plan, *, base: Callable[..., Algorithm], **options
) -> Algorithm:
    """After each round of `base` the global model w learns what its clients' models say together:

        min_w mean_x KL(softmax(mean_k f(x; w_k)) || softmax(f(x; w)))

    over the server's examples x, whose labels are not read. The teachers w_k are the round's client
    models in evaluation mode, all alike, whatever their weights in the average; the student starts
    from what `base` made of them.

    As in the public code (epfml/federated-learning-public-code): Adam, new every round, at
    `distill_lr` (1e-3), which a cosine takes to 0 over the steps; gradients are clipped to a norm
    of `distill_clip` (5). Not as there: its at most 10,000 minibatches end when accuracy on
    labelled validation data has not improved for 1,000, and the best student of these is kept;
    here there are `distill_epochs` (20) epochs in batches of `distill_batch_size` (128), and the
    last is kept, since the server's examples are to be few and without labels. 0 epochs is `base`.
    Teachers are not dropped. Batch norm is the student's as in training.

    The mean of linear models' logits is that of their mean: there FedDF has nothing to learn from
    a uniform average.

    Traffic and state: those of `base`. Cost: a pass of each of the S clients' models over the
    server's examples and the student's epochs, on every device alike; memory of the S models.
    """
    check_distilling(options)

    def ensemble(hp, of: Round, models: ClientModels, images, key):
        total = sum_over_models(lambda one: logits_of(training.task, one, images), models)
        return jax.nn.softmax(total / jnp.maximum(models.present.sum(), 1))

    def optimizer(hp, num_steps: int):
        schedule = optax.cosine_decay_schedule(hp["distill_lr"], max(num_steps, 1))
        return optax.chain(optax.clip_by_global_norm(hp["distill_clip"]), optax.adam(schedule))

    return distilling(training, plan, base, ensemble, optimizer, **options)


def check_feddf_hp(hp: dict[str, float]) -> None:
    """Raise ConfigError for a clip that lets nothing through."""
    require(hp["distill_clip"] > 0, "hp distill_clip", hp["distill_clip"], "a norm > 0")
