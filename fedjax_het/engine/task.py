"""What is learned: a network, the normalisation of its inputs, and the training loss."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.engine.contract import Batch
from fedjax_het.nn import Model, micro_batched_value_and_grad


def cross_entropies(network: Callable, images: jax.Array, labels: jax.Array):
    """Every sample's cross-entropy in nats, see `Task.loss_and_gradient`."""
    logits, state = network(images)
    if labels.ndim == 2:
        return optax.softmax_cross_entropy(logits, labels), state
    return jax.lax.platform_dependent(logits, labels, cpu=_by_row, default=_by_choice), state


_by_row = optax.softmax_cross_entropy_with_integer_labels


def _by_choice(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The same numbers, for accelerators: the gradient of what is picked by position is a scatter,
    an operation of its own."""
    own = labels[..., None] == jnp.arange(logits.shape[-1])
    return jax.nn.logsumexp(logits, axis=-1) - jnp.where(own, logits, 0).sum(-1)


class Task(NamedTuple):
    """A classification task; static, closed over by compiled programs."""

    model: Model
    mean: tuple[float, ...]  # per channel, of images scaled to [0, 1]
    std: tuple[float, ...]

    def normalise(self, images: jax.Array) -> jax.Array:
        """Stored images -> float32 network input: (x / 255 - mean) / std; floats are not divided.

        Written as one multiply and one add per value, so that it fuses with the gather.
        """
        unit = 255.0 if images.dtype == jnp.uint8 else 1.0
        scale = (1 / (unit * np.asarray(self.std))).astype(np.float32)
        shift = (-np.asarray(self.mean) / np.asarray(self.std)).astype(np.float32)
        return images.astype(jnp.float32) * scale + shift

    def loss_and_gradient(
        self,
        variables,
        batch: Batch,
        key,
        *,
        train: bool = True,
        losses: Callable = cross_entropies,
        more: tuple = (),
    ):
        """Mean loss in nats over the batch's samples -> (loss, gradient, variables).

        Labels are classes, or probabilities `[B, C]` of them.

        The gradient is of `variables["params"]`; the variables returned hold the new batch-norm
        statistics, if the network has any. `train` False: of the network as it is evaluated.

        losses(network, images, labels, *more) -> (each sample's loss [B], network's state), where
          `network(images) -> (logits, state)` and the images are normalised; default:
          cross-entropy. It may see a part of the batch. more: arrays with an entry per sample.
        """

        def loss_sum(params, batch):
            def network(images):
                return self.model.apply(
                    {**variables, "params": params}, images, train=train, key=key
                )

            images = self.normalise(batch["images"])
            each, state = losses(network, images, batch["labels"], *batch["more"])
            return (each * batch["mask"]).sum(), state

        gradient_of = micro_batched_value_and_grad(loss_sum, self.model.micro_batch, has_aux=True)
        samples = {
            "images": batch.images,
            "labels": batch.labels,
            "mask": batch.mask,
            "more": more,
        }
        (value, state), gradient = gradient_of(variables["params"], samples)
        count = jnp.maximum(batch.mask.sum(), 1)
        gradient = jax.tree.map(lambda g: g / count, gradient)
        return value / count, gradient, {**variables, "state": state}
