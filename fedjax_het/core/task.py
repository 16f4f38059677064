"""What is learned: a network, the normalisation of its inputs, and the training loss."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.core.client_algorithm import Batch
from fedjax_het.nn import Model, micro_batched_value_and_grad
from fedjax_het.nn.batch_axis import make_axis_argument


def per_sample_cross_entropy(network: Callable, images: jax.Array, labels: jax.Array):
    """Every sample's cross-entropy in nats, see `Task.loss_and_gradient`."""
    logits, state = network(images)
    if labels.ndim == 2:
        return optax.softmax_cross_entropy(logits, labels), state
    return jax.lax.platform_dependent(
        logits, labels, cpu=_cross_entropy_by_gather, default=_cross_entropy_by_mask
    ), state


_cross_entropy_by_gather = optax.softmax_cross_entropy_with_integer_labels


def _cross_entropy_by_mask(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The same numbers, for accelerators: the gradient of what is picked by position is a scatter,
    an operation of its own."""
    is_label = labels[..., None] == jnp.arange(logits.shape[-1])
    return jax.nn.logsumexp(logits, axis=-1) - jnp.where(is_label, logits, 0).sum(-1)


class Task(NamedTuple):
    """A classification task; static, closed over by compiled programs."""

    model: Model
    mean: tuple[float, ...]  # per channel, of images scaled to [0, 1]
    std: tuple[float, ...]

    def normalize(self, images: jax.Array) -> jax.Array:
        """Stored images -> float32 network input: (x / 255 - mean) / std; floats are not divided.

        Written as one multiply and one add per value, so that it fuses with the gather.
        """
        max_value = 255.0 if images.dtype == jnp.uint8 else 1.0
        scale = (1 / (max_value * np.asarray(self.std))).astype(np.float32)
        shift = (-np.asarray(self.mean) / np.asarray(self.std)).astype(np.float32)
        return images.astype(jnp.float32) * scale + shift

    def loss_and_gradient(
        self,
        variables,
        batch: Batch,
        key,
        *,
        train: bool = True,
        sample_losses: Callable = per_sample_cross_entropy,
        extra_sample_arrays: tuple = (),
    ):
        """Mean loss in nats over the batch's samples -> (loss, gradient, variables).

        Labels are classes, or probabilities `[B, C]` of them.

        The gradient is of `variables["params"]`; the variables returned hold the new batch-norm
        statistics, if the network has any. `train` False: of the network as it is evaluated.

        losses(network, images, labels, *more) -> (each sample's loss [B], network's state), where
          `network(images) -> (logits, state)` and the images are normalised; default:
          cross-entropy. It may see a part of the batch. more: arrays with an entry per sample.
        """

        batch_axis = batch.axis

        def loss_sum(params, batch):
            def network(images):
                return self.model.apply(
                    {**variables, "params": params},
                    images,
                    train=train,
                    key=key,
                    **make_axis_argument(batch_axis),
                )

            images = self.normalize(batch["images"])
            losses, state = sample_losses(network, images, batch["labels"], *batch["more"])
            return (losses * batch["mask"]).sum(), state

        value_and_grad = micro_batched_value_and_grad(
            loss_sum, self.model.micro_batch, has_aux=True
        )
        samples = {
            "images": batch.images,
            "labels": batch.labels,
            "mask": batch.mask,
            "more": extra_sample_arrays,
        }
        (loss_total, state), gradient = value_and_grad(variables["params"], samples)
        num_samples = jnp.maximum(batch.mask.sum(), 1)
        gradient = jax.tree.map(lambda g: g / num_samples, gradient)
        return loss_total / num_samples, gradient, {**variables, "state": state}
