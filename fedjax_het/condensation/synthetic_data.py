"""A small synthetic data set with soft labels, and training on it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_het.condensation.augment import DSA_STRATEGY, augment
from fedjax_het.core.client_loop import Examples
from fedjax_het.core.server_parallelism import SINGLE_DEVICE, ServerParallelism
from fedjax_het.core.server_training import (
    make_sequential_batches,
    make_shuffled_batches,
    train_on_examples,
)
from fedjax_het.nn.batch_axis import make_axis_argument
from fedjax_het.utils.errors import require_name

Tree = Any
# apply_params(params, images) -> logits; with `batch_axis` where devices share the images.
ApplyParams = Callable[..., Array]


class SyntheticData(NamedTuple):
    """What is learned.

    Attributes:
      images: `[M, H, W, C]` float32 in the normalised space of the network's input, unclipped.
      label_logits: `[M, num_classes]`; the soft label is `softmax(label_logits)`.
      step_size: `[]` learning rate of SGD on these data.
    """

    images: Array
    label_logits: Array
    step_size: Array


def soft_cross_entropies(
    logits: Array, label_logits: Array, *, scaling: str = "cross_entropy_over_classes"
) -> Array:
    """Each sample's cross-entropy of `softmax(logits)` under `softmax(label_logits)`, the soft
    label, in nats: `[B]` of two `[B, C]`.

    The scaling "cross_entropy_over_classes" divides by C: its mean is that over all B x C products,
    which is what DynaFed's code trains with, so that its step size 0.04 acts like 0.04 / C of plain
    "cross_entropy".
    """
    losses = -(jax.nn.softmax(label_logits) * jax.nn.log_softmax(logits)).sum(-1)
    return losses / logits.shape[-1] if scaling == "cross_entropy_over_classes" else losses


def soft_cross_entropy(
    logits: Array,
    label_logits: Array,
    *,
    scaling: str = "cross_entropy_over_classes",
    weights: Array | None = None,
) -> Array:
    """The mean of `soft_cross_entropies`, which `weights [B]` (default: ones) weigh."""
    losses = soft_cross_entropies(logits, label_logits, scaling=scaling)
    if weights is None:
        return losses.mean()
    return (weights * losses).sum() / weights.sum()


def fine_tune(
    apply_params: ApplyParams,
    params: Tree,
    synthetic: SyntheticData,
    key: Array,
    *,
    epochs: int,
    lr: Array | float,
    batch_size: int = 256,
    augment_strategy: str = DSA_STRATEGY,
    loss_scaling: str = "cross_entropy_over_classes",
    optimizer: str = "adam",
    momentum: Array | float = 0.0,
    server_parallelism: ServerParallelism = SINGLE_DEVICE,
) -> Tree:
    """Train the round's average on the synthetic data: DynaFed's server step.

    A fresh optimiser each call: "adam" (as in the code) or "sgd" with `momentum`. `lr` and
    `momentum` may be traced. An epoch is `ceil(M / batch_size)` steps: one for the usual 150
    samples, six for CIFAR-100's 1,500.

    Returns: params of the same structure.
    Errors: ConfigError: unknown optimizer.
    """
    require_name("optimizer", optimizer, ("adam", "sgd"))
    return _train(
        apply_params,
        params,
        synthetic,
        key,
        optimizer=optax.adam(lr) if optimizer == "adam" else optax.sgd(lr, momentum=momentum),
        epochs=epochs,
        batch_size=batch_size,
        augment_strategy=augment_strategy,
        loss_scaling=loss_scaling,
        server_parallelism=server_parallelism,
    )


def train_from_scratch(
    apply_params: ApplyParams,
    params: Tree,
    synthetic: SyntheticData,
    key: Array,
    *,
    epochs: int = 501,
    lr: Array | float | None = None,
    momentum: Array | float = 0.9,
    weight_decay: Array | float = 5e-4,
    batch_size: int = 256,
    augment_strategy: str = DSA_STRATEGY,
    loss_scaling: str = "cross_entropy_over_classes",
) -> Tree:
    """Train a network on the synthetic data alone: the quality check of DynaFed's Fig. 6.

    SGD at `lr` (default: the learned step size), which decays as in `make_step_decay_phases`, with a new
    momentum buffer; orders and augmentations go on.

    `params` are freshly initialised ones. vmap over them and `key` for several networks, and use
    different ones: the code trains three copies of the same initial network.

    Returns: params of the same structure.
    Cost: epochs * ceil(M / batch_size) steps.
    """
    for phase in make_step_decay_phases(synthetic.step_size if lr is None else lr, epochs):
        params = _train(
            apply_params,
            params,
            synthetic,
            key,
            optimizer=optax.chain(
                optax.add_decayed_weights(weight_decay), optax.sgd(phase.lr, momentum=momentum)
            ),
            epochs=phase.epochs,
            first_epoch=phase.first_epoch,
            batch_size=batch_size,
            augment_strategy=augment_strategy,
            loss_scaling=loss_scaling,
        )
    return params


class LearningRatePhase(NamedTuple):
    """Epochs `first_epoch` to `first_epoch + epochs - 1` of a training, at one rate."""

    lr: Array | float
    first_epoch: int
    epochs: int


def make_step_decay_phases(
    lr: Array | float, epochs: int
) -> tuple[LearningRatePhase, LearningRatePhase]:
    """A training from scratch in the public codes of distribution and trajectory matching: after
    epoch `epochs // 2 + 1`, counted from 0 (251 of 501), it goes on at a tenth of the rate."""
    num_early_epochs = min(epochs // 2 + 2, epochs)
    return LearningRatePhase(lr, 0, num_early_epochs), LearningRatePhase(
        lr * 0.1, num_early_epochs, epochs - num_early_epochs
    )


def _train(
    apply_params: ApplyParams,
    params: Tree,
    synthetic: SyntheticData,
    key: Array,
    *,
    optimizer: optax.GradientTransformation,
    epochs: int,
    first_epoch: int = 0,
    batch_size: int,
    augment_strategy: str,
    loss_scaling: str,
    server_parallelism: ServerParallelism = SINGLE_DEVICE,
) -> Tree:
    """Train on synthetic data; the steps' numbers select batches and augmentations.

    Batches and keys are those of the inner loop, see `trajectory.unroll`.
    """
    order_key, augment_key = jax.random.split(key)
    count = len(synthetic.images)
    is_full_batch = batch_size >= count  # then their order does not matter, and is left alone

    def loss_and_gradient(variables, batch, key):
        images = augment(key, batch.images, strategy=augment_strategy, batch_axis=batch.axis)

        def loss_sum(params):
            logits = apply_params(params, images, **make_axis_argument(batch.axis))
            losses = soft_cross_entropies(logits, batch.labels, scaling=loss_scaling)
            return (batch.mask * losses).sum()

        value, gradient = jax.value_and_grad(loss_sum)(variables["params"])
        weight = 1 / jnp.maximum(batch.mask.sum(), 1)
        return *jax.tree.map(lambda total: weight * total, (value, gradient)), variables

    return train_on_examples(
        {"params": params},
        Examples(synthetic.images, synthetic.label_logits),
        make_sequential_batches(count, count)
        if is_full_batch
        else make_shuffled_batches(order_key, count, batch_size),
        loss_and_gradient,
        optimizer=optimizer,
        epochs=epochs,
        first_epoch=first_epoch,
        key=augment_key,
        server_parallelism=server_parallelism,
    )[0]["params"]
