"""What is learned: a network, the normalisation of its inputs, and the training loss."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.engine.lanes import Batch
from fedjax_het.nn import Model, micro_batched_value_and_grad


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

    def loss_and_gradient(self, variables, batch: Batch, key, *, train: bool = True):
        """Mean cross-entropy in nats over the batch's samples -> (loss, gradient, variables).

        Labels are classes, or probabilities `[B, C]` of them.

        The gradient is of `variables["params"]`; the variables returned hold the new batch-norm
        statistics, if the network has any. `train` False: of the network as it is evaluated.
        """

        def loss_sum(params, batch):
            logits, state = self.model.apply(
                {**variables, "params": params},
                self.normalise(batch["images"]),
                train=train,
                key=key,
            )
            labels = batch["labels"]
            if labels.ndim == 2:
                losses = optax.softmax_cross_entropy(logits, labels)
            else:
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return (losses * batch["mask"]).sum(), state

        gradient_of = micro_batched_value_and_grad(loss_sum, self.model.micro_batch, has_aux=True)
        samples = {"images": batch.images, "labels": batch.labels, "mask": batch.mask}
        (value, state), gradient = gradient_of(variables["params"], samples)
        count = jnp.maximum(batch.mask.sum(), 1)
        gradient = jax.tree.map(lambda g: g / count, gradient)
        return value / count, gradient, {**variables, "state": state}
