"""A small transformer of tokens and of series (Vaswani et al., 2017)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_het.nn.adapters import make_flax_model
from fedjax_het.nn.layers import Embedding, Linear
from fedjax_het.nn.model import Model, Shape
from fedjax_het.utils.config import PositiveInt
from fedjax_het.utils.errors import require


class TransformerBlock(nn.Module):
    """Self-attention and a two-layer perceptron, each after layer norm and with a residual.

    Attributes:
      width: width of a position.
      heads: number of attention heads.
      is_causal: whether a position attends to earlier positions and itself alone.
    """

    width: int
    heads: int
    is_causal: bool

    @nn.compact
    def __call__(self, x):
        """Return `[B, T, width]` for `x` `[B, T, width]`."""
        mask = nn.make_causal_mask(x[..., 0]) if self.is_causal else None
        attention = nn.MultiHeadDotProductAttention(self.heads, name="attention")
        x += attention(nn.LayerNorm(name="norm1")(x), mask=mask)
        y = nn.LayerNorm(name="norm2")(x)
        y = Linear(self.width, name="output")(jax.nn.gelu(Linear(4 * self.width, name="hidden")(y)))
        return x + y


class Transformer(nn.Module):
    """The flax module of `transformer`.

    Attributes:
      num_classes: number of logits.
      num_tokens: number of different tokens; None for series.
      per_token: whether there are logits for each position; otherwise for the mean position.
      width: width of a position.
      num_layers: number of blocks.
      heads: number of attention heads.
    """

    num_classes: int
    num_tokens: int | None
    per_token: bool
    width: int
    num_layers: int
    heads: int

    @nn.compact
    def __call__(self, x, train):
        """Return features and logits `[B, num_classes]`, or `[B, T, num_classes]` per token."""
        if self.num_tokens is not None:
            x = Embedding(self.num_tokens, self.width, name="embedding")(x)
        else:
            x = Linear(self.width, name="embedding")(x)
        init = nn.initializers.normal(0.02)
        x += self.param("positions", init, (x.shape[1], self.width))
        for i in range(self.num_layers):
            x = TransformerBlock(self.width, self.heads, self.per_token, name=f"block{i + 1}")(x)
        x = nn.LayerNorm(name="norm")(x)
        features = x if self.per_token else jnp.mean(x, axis=1)
        return features, Linear(self.num_classes, name="head")(features)


def transformer(
    input_shape: Shape,
    num_classes: int,
    num_tokens: int | None = None,
    per_token: bool = False,
    *,
    width: PositiveInt = 64,
    layers: PositiveInt = 2,
    heads: PositiveInt = 4,
) -> Model:
    """Build a transformer for tokens or series, by default with two blocks of width 64.

    Layer norm precedes attention and perceptron, positions are learned, and there is no dropout.
    With logits for each position, a position attends to earlier positions and itself alone;
    otherwise the logits are of the mean over all positions.

    Args:
      input_shape: (T,) of tokens, or (T, F) of series.
      num_classes: number of logits.
      num_tokens: number of different tokens; None for series.
      per_token: whether there are logits for each position.
      width: width of a position.
      layers: number of blocks.
      heads: number of attention heads, which divides `width`.

    Returns:
      The model.

    Raises:
      ConfigError: if `heads` does not divide `width`.
    """
    require(width % heads == 0, "heads", heads, f"a divisor of width = {width}")
    module = Transformer(num_classes, num_tokens, per_token, width, layers, heads)
    return make_flax_model(module, input_shape, num_tokens=num_tokens, can_shard_batch=True)
