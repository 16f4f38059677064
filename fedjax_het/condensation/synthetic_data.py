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
    EpochRange,
    ServerTraining,
    make_sequential_batches,
    make_shuffled_batches,
    train_on_examples,
)
from fedjax_het.nn.batch_axis import BatchAxis, make_axis_argument
from fedjax_het.utils.former_names import FORMER_INPUT_NAMES, accept_former_fields
from fedjax_het.utils.registry import get_keyword_parameters

Tree = Any


@accept_former_fields(FORMER_INPUT_NAMES)
class SyntheticData(NamedTuple):
    """Synthetic inputs, soft labels and a step size, the result of DynaFed's synthesis.

    Attributes:
      inputs: `[M, ...]` float32 in the normalized space of the network's input, unclipped.
      label_logits: `[M, num_classes]`; the soft label is `softmax(label_logits)`.
      step_size: `[]`, learning rate of SGD on these data.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.condensation import SyntheticData
      >>> data = SyntheticData(jnp.zeros((6, 4, 4, 1)), jnp.zeros((6, 3)), jnp.float32(0.04))
      >>> data.inputs.shape
      (6, 4, 4, 1)
    """

    inputs: Array
    label_logits: Array
    step_size: Array


def soft_cross_entropies(
    logits: Array, label_logits: Array, *, scaling: str = "cross_entropy_over_classes"
) -> Array:
    """Return each sample's cross-entropy of `softmax(logits)` under its soft label, in nats.

    Args:
      logits: of the network, `[B, C]`.
      label_logits: `[B, C]`; the soft label is `softmax(label_logits)`.
      scaling: "cross_entropy", or "cross_entropy_over_classes", which divides by C. The mean of
        these terms is the mean over all B x C products. DynaFed's code trains with it, so its step
        size 0.04 acts like 0.04 / C of plain cross-entropy.

    Returns:
      The losses, `[B]`.
    """
    losses = -(jax.nn.softmax(label_logits) * jax.nn.log_softmax(logits)).sum(-1)
    return losses / logits.shape[-1] if scaling == "cross_entropy_over_classes" else losses


class SyntheticTask(NamedTuple):
    """Network, augmentation and loss of training on synthetic data, and how it is computed.

    Example:
      >>> from fedjax_het.condensation import SyntheticTask
      >>> task = SyntheticTask(lambda w, inputs: inputs.reshape(len(inputs), -1) @ w)
      >>> task.augment_strategy
      'color_crop_cutout_flip_scale_rotate'
    """

    apply_params: Callable[..., Array]
    """`apply_params(params, inputs) -> logits [B, C]`. It also receives `batch_axis` if devices
    share the inputs. An argument `sample_mask` receives `[B]`, 0 for inputs that fill up a
    batch."""
    augment_strategy: str = DSA_STRATEGY
    "Augmentation families, see `augment`."
    loss_scaling: str = "cross_entropy_over_classes"
    "See `soft_cross_entropies`."
    micro_batch: int | None = None
    "Samples at a time of a differentiable step, see `mixed_mode`."
    parallelism: ServerParallelism = SINGLE_DEVICE
    "Devices that share each step."
    input_layer: str | None = None
    """See `Model`; `apply_params` then takes `input_product`. None: there is no such layer."""

    def sum_losses(
        self,
        params: Tree,
        samples: tuple[Array, Array, Array],
        batch_axis: BatchAxis | None,
    ) -> Array:
        """Sum the weighted losses of augmented inputs.

        Args:
          params: parameters of the network.
          samples: inputs `[B, ...]`, label logits `[B, C]` and weights `[B]`.
          batch_axis: devices that share the batch, of which the arrays are the local part.

        Returns:
          The sum, `[]`.
        """
        inputs, label_logits, weights = samples
        arguments: dict[str, Any] = {**make_axis_argument(batch_axis)}
        if "sample_mask" in get_keyword_parameters(self.apply_params):
            arguments["sample_mask"] = (weights > 0).astype(weights.dtype)
        logits = self.apply_params(params, inputs, **arguments)
        losses = soft_cross_entropies(logits, label_logits, scaling=self.loss_scaling)
        return (weights * losses).sum()


def fine_tune(
    task: SyntheticTask,
    params: Tree,
    synthetic: SyntheticData,
    key: Array,
    *,
    optimizer: optax.GradientTransformation,
    epochs: EpochRange,
    batch_size: int = 256,
) -> Tree:
    """Train on the synthetic data: DynaFed's server step.

    The optimizer is new in each call. An epoch is `ceil(M / batch_size)` steps: one for the usual
    150 samples, six for CIFAR-100's 1,500. The index of a step determines its batch and its
    augmentation.

    Args:
      task: network, augmentation and loss.
      params: parameters at the start.
      synthetic: the synthetic data.
      key: key of the batches and augmentations.
      optimizer: the optimizer; its settings may be traced.
      epochs: the epochs.
      batch_size: samples per step.

    Returns:
      Parameters of the same structure.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from fedjax_het.condensation import SyntheticData, SyntheticTask, fine_tune
      >>> from fedjax_het.core.server_training import EpochRange
      >>> task = SyntheticTask(lambda w, inputs: inputs.reshape(len(inputs), -1) @ w)
      >>> data = SyntheticData(jnp.ones((6, 2, 2, 1)), jnp.zeros((6, 3)), jnp.float32(0.04))
      >>> settings = {"optimizer": optax.adam(0.1), "epochs": EpochRange(1)}
      >>> fine_tune(task, jnp.ones((4, 3)), data, jax.random.key(0), **settings).shape
      (4, 3)
    """
    order_key, augment_key = jax.random.split(key)
    count = len(synthetic.inputs)
    if batch_size >= count:  # the order does not matter, so it is not permuted
        batches = make_sequential_batches(count, count)
    else:
        batches = make_shuffled_batches(order_key, count, batch_size)

    def loss_and_gradient(variables, batch, key):
        inputs = augment(key, batch.inputs, strategy=task.augment_strategy, batch_axis=batch.axis)
        args = (variables["params"], (inputs, batch.labels, batch.mask), batch.axis)
        value, gradient = jax.value_and_grad(task.sum_losses)(*args)
        weight = 1 / jnp.maximum(batch.mask.sum(), 1)
        return *jax.tree.map(lambda total: weight * total, (value, gradient)), variables

    training = ServerTraining(
        loss_and_gradient, optimizer, augment_key, parallelism=task.parallelism
    )
    examples = Examples(synthetic.inputs, synthetic.label_logits)
    return train_on_examples(training, {"params": params}, examples, batches, epochs)["params"]
