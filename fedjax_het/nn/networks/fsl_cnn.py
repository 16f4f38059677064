"""FSL's CNNs (Mai, La and Zhang, arXiv 2210.02614)."""

import flax.linen as nn
import jax

from fedjax_het.nn.adapters import make_flax_model
from fedjax_het.nn.batch_axis import BatchAxis
from fedjax_het.nn.conv_products import ConvImpl
from fedjax_het.nn.layers import Conv, Dropout, Linear, max_pool
from fedjax_het.nn.model import Model, count_cached_samples
from fedjax_het.utils.errors import require

FILTERS, HIDDEN = (32, 64), 128


class FslCnn(nn.Module):
    """The flax module of `fsl_cnn`.

    The convolutions process the batch in pieces, which is as fast as micro-batches of the whole
    network. Micro-batches are no option: dropout masks would have to be drawn for every
    micro-batch.

    Attributes:
      num_classes: number of logits.
      conv_impl: implementation of convolutions, see `conv2d`.
    """

    num_classes: int
    conv_impl: str

    @nn.compact
    def __call__(self, x, train, batch_axis: BatchAxis | None = None):
        """Return features `[B, hidden]` and logits `[B, num_classes]` for images `[B, H, W, C]`."""
        is_grayscale = x.shape[-1] == 1
        for block, features in enumerate(FILTERS):
            is_last = block + 1 == len(FILTERS)
            padding = 0 if is_grayscale and is_last else 1
            x = Conv(features, 3, padding, self.conv_impl, True, True, name=f"conv{block + 1}")(x)
            if is_last or not is_grayscale:
                x = max_pool(x)
            x = jax.nn.relu(x)  # after the pool: equal, and fewer numbers
        x = Dropout(0.25, name="dropout1")(x.reshape(x.shape[0], -1), train, batch_axis)
        x = jax.nn.relu(Linear(HIDDEN, True, name="hidden")(x))
        x = Dropout(0.5, name="dropout2")(x, train, batch_axis)
        return x, Linear(self.num_classes, True, name="head")(x)


def fsl_cnn(
    input_shape: tuple[int, int, int], num_classes: int, *, conv_impl: ConvImpl = "auto"
) -> Model:
    """Build FSL's CNN with dropout, for grayscale (Table II) or color images (Table III).

    Both have 32 and 64 filters of 3x3, each with ReLU, then dropout of 1/4, a hidden layer of 128
    with ReLU, and dropout of 1/2:

    * One channel (Table II): the first convolution has padding, the second none and a 2x2 max pool;
      1,409,197 parameters for 28x28x1 and 45 classes.
    * More channels (Table III): both convolutions have padding and a 2x2 max pool; 545,098
      parameters for 32x32x3 and 10 classes.

    Weights are drawn as Keras does, U(±√(6 / (fan_in + fan_out))), and biases are zero: the paper
    does not specify the initialization.

    Args:
      input_shape: height, width (at least 4 pixels) and channels.
      num_classes: number of logits.
      conv_impl: implementation of convolutions, see `conv2d`.

    Returns:
      The model.

    Raises:
      ConfigError: if images are smaller than 4x4.
    """
    require(min(input_shape[:2]) >= 4, "input_shape", input_shape, "at least 4x4 for fsl_cnn")
    return make_flax_model(
        FslCnn(num_classes, conv_impl),
        input_shape,
        cached_samples=count_cached_samples(*input_shape[:2], FILTERS[0]),
        can_shard_batch=True,
    )
