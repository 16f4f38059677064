"""A small synthetic data set with soft labels, and training on it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from fedjax_het.common.errors import require_name
from fedjax_het.condensation.augment import DSA_STRATEGY, augment
from fedjax_het.engine.server import epoch_batch, steps_per_epoch

ApplyParams = Callable[[Any, Array], Array]
LOSS_SCALINGS = ("cross_entropy_over_classes", "cross_entropy")


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


def soft_cross_entropy(
    logits: Array,
    label_logits: Array,
    *,
    scaling: str = "cross_entropy_over_classes",
    weights: Array | None = None,
) -> Array:
    """Cross-entropy of `softmax(logits)` under the soft labels `softmax(label_logits)`, in nats.

    Both are `[B, C]`; `weights [B]` (default: ones) weigh the mean over samples. The scaling
    "cross_entropy_over_classes" divides by C: it is the mean over all B x C products, which is
    what DynaFed's code trains with, so that its step size 0.04 acts like 0.04 / C of plain
    "cross_entropy".
    """
    losses = -(jax.nn.softmax(label_logits) * jax.nn.log_softmax(logits)).sum(-1)
    if scaling == "cross_entropy_over_classes":
        losses = losses / logits.shape[-1]
    if weights is None:
        return losses.mean()
    return (weights * losses).sum() / weights.sum()


def fine_tune(
    apply_params: ApplyParams,
    params: Any,
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
) -> Any:
    """Train the round's average on the synthetic data: DynaFed's server step.

    A fresh optimiser each call: "adam" (as in the code) or "sgd" with `momentum`. `lr` and
    `momentum` may be traced. An epoch is `ceil(M / batch_size)` steps: one for the usual 150
    samples, six for CIFAR-100's 1,500.

    Returns: params of the same structure.
    Errors: ConfigError: unknown optimizer.
    """
    require_name("optimizer", optimizer, ("adam", "sgd"))
    tx = optax.adam(lr) if optimizer == "adam" else _sgd(lr, momentum)
    steps = epochs * steps_per_epoch(len(synthetic.images), batch_size)
    return _train(
        apply_params,
        tx,
        params,
        synthetic,
        key,
        jnp.arange(steps),
        batch_size,
        augment_strategy,
        loss_scaling,
    )


def train_from_scratch(
    apply_params: ApplyParams,
    params: Any,
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
) -> Any:
    """Train a network on the synthetic data alone: the quality check of DynaFed's Fig. 6.

    SGD at `lr` (default: the learned step size); after epoch `epochs // 2 + 1` (counted from 0, as
    in the code: 251 of 501) it goes on at a tenth of it, with a new momentum buffer.

    `params` are freshly initialised ones. vmap over them and `key` for several networks, and use
    different ones: the code trains three copies of the same initial network.

    Returns: params of the same structure.
    """
    lr = synthetic.step_size if lr is None else lr
    per_epoch = steps_per_epoch(len(synthetic.images), batch_size)
    decay_from, total = min(epochs // 2 + 2, epochs) * per_epoch, epochs * per_epoch
    for rate, steps in ((lr, range(decay_from)), (lr * 0.1, range(decay_from, total))):
        tx = optax.chain(optax.add_decayed_weights(weight_decay), _sgd(rate, momentum))
        params = _train(
            apply_params,
            tx,
            params,
            synthetic,
            key,
            jnp.asarray(steps, jnp.int32),
            batch_size,
            augment_strategy,
            loss_scaling,
        )
    return params


def _train(
    apply_params: ApplyParams,
    tx: optax.GradientTransformation,
    params: Any,
    synthetic: SyntheticData,
    key: Array,
    steps: Array,
    batch_size: int,
    augment_strategy: str,
    loss_scaling: str,
) -> Any:
    """Train on synthetic data for `steps`, whose numbers select batches and augmentations."""

    def loss(params: Any, images: Array, labels: Array, weights: Array | None) -> Array:
        logits = apply_params(params, images)
        return soft_cross_entropy(logits, labels, scaling=loss_scaling, weights=weights)

    def step(carry, index):
        params, optimizer_state = carry
        batch = synthetic_batch(synthetic, key, index, batch_size, augment_strategy)
        gradient = jax.grad(loss)(params, *batch)
        updates, optimizer_state = tx.update(gradient, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), None

    return lax.scan(step, (params, tx.init(params)), steps)[0][0]


def synthetic_batch(
    synthetic: SyntheticData, key: Array, step: Array, batch_size: int | None, strategy: str
) -> tuple[Array, Array, Array | None]:
    """Augmented images, label logits and weights (None: equal) of one training step."""
    order_key, augment_key = jax.random.split(key)
    images, labels, weights = synthetic.images, synthetic.label_logits, None
    if batch_size is not None and batch_size < len(images):
        index, weights = epoch_batch(order_key, step, len(images), batch_size)
        images, labels = images[index], labels[index]
    images = augment(jax.random.fold_in(augment_key, step), images, strategy=strategy)
    return images, labels, weights


def _sgd(lr: Array | float, momentum: Array | float) -> optax.GradientTransformation:
    """PyTorch's SGD: `buffer <- momentum * buffer + gradient; params <- params - lr * buffer`."""
    return optax.chain(optax.trace(momentum), optax.scale_by_learning_rate(lr))
