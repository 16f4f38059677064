"""A multi-layer perceptron."""

import flax.linen as nn

from fedjax_het.nn.adapters import make_flax_model
from fedjax_het.nn.layers import Linear, apply_hidden_layers, to_widths
from fedjax_het.nn.model import Model, Shape
from fedjax_het.utils.config import PositiveInt


class Mlp(nn.Module):
    """The flax module of `mlp`.

    Attributes:
      num_classes: number of logits.
      hidden: widths of the hidden layers.
    """

    num_classes: int
    hidden: tuple[int, ...]

    @nn.compact
    def __call__(self, x, train):
        """Return features `[B, F]` and logits `[B, num_classes]` for inputs `[B, ...]`."""
        x = apply_hidden_layers(x.reshape(x.shape[0], -1), self.hidden)
        return x, Linear(self.num_classes, name="head")(x)


def mlp(
    input_shape: Shape,
    num_classes: int,
    *,
    hidden: tuple[PositiveInt, ...] | PositiveInt = (128, 128),
) -> Model:
    """Build a multi-layer perceptron with ReLU, by default with two hidden layers of 128.

    The network has 118,282 parameters for 28x28x1. Weights and biases are drawn as PyTorch does by
    default, U(±1/√fan_in).

    Args:
      input_shape: shape of the input of one example.
      num_classes: number of logits.
      hidden: widths of the hidden layers, a list or one number.

    Returns:
      The model.
    """
    widths = to_widths(hidden)
    return make_flax_model(
        Mlp(num_classes, widths),
        input_shape,
        can_shard_batch=True,
        input_layer="hidden1" if widths else "head",
    )
