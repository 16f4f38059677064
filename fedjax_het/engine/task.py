"""What is learned: a network, the normalisation of its inputs, and the training loss."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.engine.lanes import Batch


class Task(NamedTuple):
    """A classification task; static, closed over by compiled programs."""

    model: "Model"  # noqa: F821  (fedjax_het.nn.Model)
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

    def loss_and_gradient(self, variables, batch: Batch, key):
        """Mean cross-entropy in nats over the batch's samples -> (loss, gradient, variables).

        The gradient is of `variables["params"]`; the variables returned hold the new batch-norm
        statistics, if the network has any.
        """
        images = self.normalise(batch.images)
        count = jnp.maximum(batch.mask.sum(), 1)

        def loss(params):
            logits, state = self.model.apply(
                {**variables, "params": params}, images, train=True, key=key
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
            return (losses * batch.mask).sum() / count, state

        (value, state), gradient = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        return value, gradient, {**variables, "state": state}
