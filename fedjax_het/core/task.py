"""The learning task: a network, the normalization of its inputs, and the training loss."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.core.client_algorithm import Batch
from fedjax_het.nn import Model, micro_batched_value_and_grad
from fedjax_het.tasks import Classification, TaskKind
from fedjax_het.tasks.classification import compute_cross_entropies
from fedjax_het.utils.input_kinds import count_rows, map_arrays


def per_sample_cross_entropy(network: Callable, inputs: jax.Array, labels: jax.Array):
    """Compute each sample's cross-entropy in nats, see `Task.loss_and_gradient`.

    Args:
      network: `network(inputs) -> (logits, state)`.
      inputs: normalized inputs, `[B, ...]`.
      labels: classes, int32 `[B]`, or probabilities, float32 `[B, C]`.

    Returns:
      Losses, float32 `[B]`, and the network's state.
    """
    logits, state = network(inputs)
    return compute_cross_entropies(logits, labels), state


def _normalize(inputs: jax.Array, mean: tuple[float, ...], std: tuple[float, ...]) -> jax.Array:
    if inputs.dtype == jnp.int32:
        return inputs
    max_value = 255.0 if inputs.dtype == jnp.uint8 else 1.0
    scale = (1 / (max_value * np.asarray(std))).astype(np.float32)
    shift = (-np.asarray(mean) / np.asarray(std)).astype(np.float32)
    return inputs.astype(jnp.float32) * scale + shift


class Task(NamedTuple):
    """A task that a network learns; static, closed over by compiled programs.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.core.task import Task
      >>> from fedjax_het.nn import make_model
      >>> task = Task(make_model("mlp", (2, 2, 1), 3), mean=(0.5,), std=(0.5,))
      >>> task.normalize(jnp.full((1, 2, 2, 1), 255, jnp.uint8))[0, 0, 0].tolist()
      [1.0]
    """

    model: Model
    "The network."
    mean: Any
    "Mean of each channel or feature, of images scaled to [0, 1]; () for tokens; or by name."
    std: Any
    "Standard deviation of each channel or feature, in the unit of `mean`."
    kind: TaskKind = Classification()
    "The meaning of labels and outputs, with the loss and the score of an example."
    label_shape: tuple[int, ...] = ()
    "Shape of the label of one example."
    label_dtype: str = "int32"
    "Type of the labels."

    def normalize(self, inputs: Any) -> Any:
        """Return float32 network inputs (x - mean) / std of stored inputs, and tokens unchanged.

        Images of type uint8 are divided by 255. One multiply and one add per value fuse with the
        gather of the inputs. Inputs of several arrays are a dictionary.
        """
        return map_arrays(_normalize, inputs, self.mean, self.std)

    def quantize(self, inputs: jax.Array, bits: int) -> jax.Array:
        """Round network inputs to 2**bits levels of the pixel range [0, 1], and clip them to it.

        Args:
          inputs: normalized inputs of values in [0, 1], float32 `[..., C]`.
          bits: bits of each value, at most 16. With 8 bits, inputs that were uint8 do not change.

        Returns:
          Normalized inputs of the levels, float32.
        """
        mean, std = (np.asarray(values, np.float32) for values in (self.mean, self.std))
        max_level = 2**bits - 1
        levels = jnp.round(jnp.clip(inputs * std + mean, 0, 1) * max_level)
        return self.normalize(levels / max_level)

    def compute_sample_losses(self, network: Callable, inputs: jax.Array, labels: jax.Array):
        """Compute the loss of each sample by the task's kind.

        Args:
          network: `network(inputs) -> (outputs, state)`.
          inputs: normalized inputs, `[B, ...]`.
          labels: labels as stored, `[B, ...]`.

        Returns:
          Losses, float32 `[B]`, and the network's state.
        """
        outputs, state = network(inputs)
        return self.kind.compute_losses(outputs, labels), state

    def loss_and_gradient(
        self,
        variables: Any,
        batch: Batch,
        key: jax.Array | None,
        *,
        train: bool = True,
        sample_losses: Callable | None = None,
        extra_sample_arrays: tuple = (),
        regularizer: Callable | None = None,
    ):
        """Compute the mean loss over the samples of a batch, and its gradient.

        Args:
          variables: `{"params": ..., "state": ...}`.
          batch: the minibatch; labels are classes, or probabilities `[B, C]` of them.
          key: PRNG key of dropout.
          train: False for the network as it is evaluated.
          sample_losses: `sample_losses(network, inputs, labels, *extra) -> (losses [B], state)`,
            where `network(inputs) -> (logits, state)` and the inputs are normalized. It may receive
            a part of the batch. `network` masks the samples that fill up the batch in batch norm;
            for inputs of another number of samples, pass it `sample_mask`. Default: the losses of
            the task's kind.
          extra_sample_arrays: further arguments of `sample_losses`, arrays with one entry per
            sample.
          regularizer: `regularizer(features, mask) -> term`, a scalar that is added to the mean
            loss. The features `[B, F]` are the features in the call of `network` whose state
            `sample_losses` returns. The network needs `embed`.

        Returns:
          The loss, in nats for cross-entropies, the gradient of `variables["params"]`, and the
          variables with the new batch-norm statistics, if the network has any.
        """
        sample_losses = sample_losses or self.compute_sample_losses
        batch_axis, micro_batch = batch.axis, self.model.micro_batch
        if regularizer is not None:
            micro_batch = None  # the term depends on all samples together
            assert batch_axis is None, "regularizers are terms of clients, whose batches are whole"

        def loss_sum(params, samples):
            inputs, labels, mask, extra = samples

            def network(inputs, sample_mask=mask):
                sample_mask = sample_mask if len(sample_mask) == count_rows(inputs) else None
                arguments = self.model.make_batch_arguments(sample_mask, batch_axis)
                arguments |= {"train": train, "key": key}
                network_variables = {**variables, "params": params}
                if regularizer is None:
                    return self.model.apply(network_variables, inputs, **arguments)
                assert self.model.embed is not None
                features, logits, state = self.model.embed(network_variables, inputs, **arguments)
                # The state reaches the result from inside transformations, and so do features.
                return logits, (state, features)

            losses, state = sample_losses(network, self.normalize(inputs), labels, *extra)
            total = (losses * mask).sum()
            if regularizer is None:
                return total, state
            state, features = state
            return total + jnp.maximum(mask.sum(), 1) * regularizer(features, mask), state

        value_and_grad = micro_batched_value_and_grad(loss_sum, micro_batch, has_aux=True)
        samples = batch.inputs, batch.labels, batch.mask, extra_sample_arrays
        (loss_total, state), gradient = value_and_grad(variables["params"], samples)
        num_samples = jnp.maximum(batch.mask.sum(), 1)
        gradient = jax.tree.map(lambda g: g / num_samples, gradient)
        return loss_total / num_samples, gradient, {**variables, "state": state}
