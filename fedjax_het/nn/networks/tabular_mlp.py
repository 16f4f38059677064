"""A multi-layer perceptron of tables with numbers and categories."""

import flax.linen as nn
import jax.numpy as jnp

from fedjax_het.nn.adapters import make_flax_model
from fedjax_het.nn.layers import Embedding, Linear, apply_hidden_layers, to_widths
from fedjax_het.nn.model import Model
from fedjax_het.utils.config import PositiveInt
from fedjax_het.utils.input_kinds import InputShape, NumTokens


class TabularMlp(nn.Module):
    """The flax module of `tabular_mlp`.

    Attributes:
      num_classes: number of logits.
      num_tokens: number of categories of each array of categories, None for numbers, by name.
      hidden: widths of the hidden layers.
      embedding: width of the embedding of a category.
    """

    num_classes: int
    num_tokens: NumTokens
    hidden: tuple[int, ...]
    embedding: int

    @nn.compact
    def __call__(self, x, train):
        """Return features `[B, F]` and logits `[B, num_classes]` for arrays `[B, ...]` by name."""
        parts = []
        for name, num_tokens in self.num_tokens.items():
            part = x[name]
            if num_tokens is not None:
                part = Embedding(num_tokens, self.embedding, name=f"embedding_{name}")(part)
            parts.append(part.reshape(part.shape[0], -1))
        features = apply_hidden_layers(jnp.concatenate(parts, axis=1), self.hidden)
        return features, Linear(self.num_classes, name="head")(features)


def tabular_mlp(
    input_shape: InputShape,
    num_classes: int,
    num_tokens: NumTokens,
    *,
    hidden: tuple[PositiveInt, ...] | PositiveInt = (128, 128),
    embedding: PositiveInt = 8,
) -> Model:
    """Build a multi-layer perceptron of numbers and embedded categories, for tables.

    The input is a dictionary of arrays. Each category has an embedding of its own array. Weights
    and biases of the layers are drawn as PyTorch does by default, U(±1/√fan_in).

    Args:
      input_shape: shapes of the arrays by name.
      num_classes: number of logits.
      num_tokens: number of categories of each array of categories, None for numbers, by name.
      hidden: widths of the hidden layers, a list or one number.
      embedding: width of the embedding of a category.

    Returns:
      The model.
    """
    module = TabularMlp(num_classes, num_tokens, to_widths(hidden), embedding)
    return make_flax_model(module, input_shape, num_tokens=num_tokens, can_shard_batch=True)
