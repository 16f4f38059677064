"""fastText, the classifier of mean embeddings (Joulin et al., 2017)."""

import flax.linen as nn
import jax.numpy as jnp

from fedjax_het.nn.adapters import make_flax_model
from fedjax_het.nn.layers import Embedding, Linear
from fedjax_het.nn.model import Model, Shape
from fedjax_het.utils.config import PositiveInt


class FastText(nn.Module):
    """The flax module of `fasttext`.

    Attributes:
      num_classes: number of logits.
      num_tokens: number of different tokens.
      embedding: width of the embedding of a token.
    """

    num_classes: int
    num_tokens: int
    embedding: int

    @nn.compact
    def __call__(self, x, train):
        """Return features `[B, embedding]` and logits `[B, num_classes]` for tokens `[B, T]`."""
        vectors = Embedding(self.num_tokens, self.embedding, name="embedding")(x)
        is_word = (x > 0)[..., None]
        features = (vectors * is_word).sum(1) / jnp.maximum(is_word.sum(1), 1)
        return features, Linear(self.num_classes, name="head")(features)


def fasttext(
    input_shape: Shape, num_classes: int, num_tokens: int, *, embedding: PositiveInt = 32
) -> Model:
    """Build fastText: the mean embedding of the tokens, and a fully connected layer.

    Token 0 is padding, which the mean leaves out.

    Args:
      input_shape: (T,) of tokens.
      num_classes: number of logits.
      num_tokens: number of different tokens.
      embedding: width of the embedding of a token.

    Returns:
      The model.
    """
    module = FastText(num_classes, num_tokens, embedding)
    return make_flax_model(module, input_shape, num_tokens=num_tokens, can_shard_batch=True)
