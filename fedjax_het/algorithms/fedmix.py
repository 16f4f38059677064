"""FedMix and NaiveMix (Yoon, Shin, Hwang and Yang, ICLR 2021, arXiv:2107.00233)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import optax

from fedjax_het.algorithms.base import Algorithm, federated
from fedjax_het.common.errors import is_whole, require, require_name
from fedjax_het.data import MeanBlocks
from fedjax_het.engine.local import Broadcast, Local, LocalTraining, descend, local_sgd
from fedjax_het.engine.plan import Plan
from fedjax_het.engine.randomness import MIXING_FOLD

NAIVEMIX_OPTIONS: dict[str, Any] = {"mean_size": None}
FEDMIX_OPTIONS: dict[str, Any] = {**NAIVEMIX_OPTIONS, "coefficient": "expansion"}
COEFFICIENTS = ("expansion", "printed")
FEDMIX_HP = {"mixup_lambda": 0.05}
NAIVEMIX_HP = {"mixup_lambda": 0.1}


def naivemix(training: LocalTraining, plan: Plan, *, mean_size: int | None = None) -> Algorithm:
    """Mixup with averages of other clients' data, in local training.

    Mean-augmented federated learning: before the first round every client cuts its data into blocks
    of `mean_size` examples (M_k; default: all it has, as in the paper's main table), and sends the
    mean image and the mean one-hot label of each; every client is sent all of them. In a step one
    pair (x_g, y_g) is drawn uniformly for the whole minibatch, and with lambda = `mixup_lambda`

        x' = (1 - lambda) x + lambda x_g,   loss = (1 - lambda) l(x', y) + lambda l(x', y_g).

    lambda = 0 is FedAvg. Images are mixed after normalisation. Averages of a client's own data are
    not left out. The mean label is taken as it is, so l(x', y_g) is the mean cross-entropy.

    Traffic: FedAvg's, and in the first round the averages: from each client its own, to each client
    everyone's. State: none besides FedAvg's; the averages are made anew from the data when a run is
    resumed. Memory on each device: all averages, 4 bytes a number.
    """
    return _mixed(training, plan, _naive, mean_size)


def fedmix(
    training: LocalTraining,
    plan: Plan,
    *,
    mean_size: int | None = None,
    coefficient: str = "expansion",
) -> Algorithm:
    """NaiveMix's averages, of which mixup's loss is taken to first order in lambda.

    With x' = (1 - lambda) x, and the derivative taken at x',

        loss = (1 - lambda) l(x', y) + lambda l(x', y_g) + (1 - lambda) lambda <dl(x', y)/dx', x_g>

    for every sample: the expansion in x_g of the loss above, without the term
    lambda^2 <dl(x', y_g)/dx', x_g>; the two differ by O(lambda^2). In the paper the last term has
    the coefficient lambda (`coefficient` "printed"), which differs by O(lambda^2) too; the default
    is that of the "expansion". The derivative is of each sample's own loss: that of the batch's
    mean loss, averaged over the batch once more, would make the term smaller by the batch size.

    The paper's lambda is 0.05 on CIFAR-10, 0.1 on CIFAR-100 and 0.2 on FEMNIST, for NaiveMix 0.1,
    0.1 and 0.2.
    lambda = 0 is FedAvg. With batch norm a sample's loss depends on the other samples' images too,
    which move along. Traffic and state: NaiveMix's. Cost of a step: the gradient of a gradient,
    about 3 times FedAvg's.
    """
    check_fedmix({"mean_size": mean_size, "coefficient": coefficient})
    return _mixed(training, plan, partial(_first_order, coefficient == "printed"), mean_size)


def _naive(strength, mean_image, mean_label, network: Callable, images, labels):
    mixed = (1 - strength) * images + strength * mean_image
    logits, state = network(mixed)
    own = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return (1 - strength) * own + strength * optax.softmax_cross_entropy(logits, mean_label), state


def _first_order(printed, strength, mean_image, mean_label, network: Callable, images, labels):
    def own_losses(images):
        logits, state = network(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.sum(), (losses, logits, state)  # whose gradients are each sample's own

    shrunk = (1 - strength) * images
    slopes, (own, logits, state) = jax.grad(own_losses, has_aux=True)(shrunk)
    along = (slopes * mean_image).reshape(len(images), -1).sum(1)
    others = optax.softmax_cross_entropy(logits, mean_label)
    coefficient = strength * (1 if printed else 1 - strength)
    return (1 - strength) * own + strength * others + coefficient * along, state


def _mixed(
    training: LocalTraining, plan: Plan, losses: Callable, mean_size: int | None
) -> Algorithm:
    """Local training on `losses(lambda, mean_image, mean_label, network, images, labels)`."""
    check_mix({"mean_size": mean_size})
    task, base = training.task, local_sgd(training)

    def step(hp, broadcast, local, batch, client, key):
        images, labels, count = broadcast.extra
        pair = jax.random.randint(jax.random.fold_in(key, MIXING_FOLD), (), 0, count)
        mean_image = task.normalise(images[pair])
        of = partial(losses, hp["mixup_lambda"], mean_image, labels[pair])
        loss, gradient, variables = task.loss_and_gradient(local.variables, batch, key, losses=of)
        variables, optimizer = descend(training, hp, variables, gradient, local.optimizer)
        return Local(variables, optimizer, local.memory), loss

    mixed = federated(
        training,
        plan,
        base._replace(step=step),
        send=lambda server, cohort: Broadcast(server.variables, cohort.averages),
    )
    return mixed._replace(averaging=MeanBlocks(mean_size))


def check_mix(options: dict[str, Any]) -> None:
    """Raise ConfigError unless averages are of a whole number of examples, or of all."""
    size = options["mean_size"]
    ok = size is None or is_whole(size, 1)
    require(ok, "mean_size", size, "a whole number >= 1, or None for all of a client's examples")


def check_fedmix(options: dict[str, Any]) -> None:
    """Raise ConfigError for an unknown coefficient besides."""
    check_mix(options)
    require_name("coefficient", options["coefficient"], COEFFICIENTS)


def check_mix_hp(hp: dict[str, float]) -> None:
    """Raise ConfigError unless lambda leaves something of the client's own examples."""
    value = hp["mixup_lambda"]
    require(0 <= value < 1, "hp mixup_lambda", value, "a share in [0, 1)")
