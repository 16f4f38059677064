"""Recurrent networks of tokens and of series: LSTM (Hochreiter and Schmidhuber, 1997) and GRU."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_het.nn.adapters import make_flax_model
from fedjax_het.nn.layers import Embedding, Linear, uniform_fan_in
from fedjax_het.nn.model import Model, Shape
from fedjax_het.utils.config import PositiveInt


class RecurrentLayer(nn.Module):
    """A recurrent layer over the positions of a sequence, from a state of zeros.

    The products with the inputs of all positions are one matrix product before the scan.

    Attributes:
      features: number of outputs of a position, H.
      num_gates: number of products with the input and with the state, 4 or 3.
    """

    features: int
    num_gates: int = 1

    def setup_gates(self, x):
        """Return the products `[T, B, gates H]` with the inputs, and the weights of the state."""
        init = uniform_fan_in(self.features)
        width = self.num_gates * self.features
        kernel = self.param("kernel", init, (x.shape[-1], width))
        bias = self.param("bias", init, (width,))
        state_kernel = self.param("state_kernel", init, (self.features, width))
        return jnp.swapaxes(x @ kernel + bias, 0, 1), state_kernel


class Lstm(RecurrentLayer):
    """An LSTM layer with one bias for each gate."""

    num_gates: int = 4

    @nn.compact
    def __call__(self, x):
        """Return `[B, T, H]` for `x` `[B, T, F]`."""
        gates, state_kernel = self.setup_gates(x)
        zeros = jnp.zeros((x.shape[0], self.features), gates.dtype)

        def step(carry, gates):
            hidden, cell = carry
            parts = jnp.split(gates + hidden @ state_kernel, 4, axis=-1)
            input_gate, forget_gate, output_gate = map(jax.nn.sigmoid, parts[:3])
            cell = forget_gate * cell + input_gate * jnp.tanh(parts[3])
            hidden = output_gate * jnp.tanh(cell)
            return (hidden, cell), hidden

        return jnp.swapaxes(jax.lax.scan(step, (zeros, zeros), gates)[1], 0, 1)


class Gru(RecurrentLayer):
    """A GRU layer (Cho et al., 2014) with the bias of the state's product of PyTorch and cuDNN."""

    num_gates: int = 3

    @nn.compact
    def __call__(self, x):
        """Return `[B, T, H]` for `x` `[B, T, F]`."""
        gates, state_kernel = self.setup_gates(x)
        state_bias = self.param("state_bias", uniform_fan_in(self.features), (self.features,))
        zeros = jnp.zeros((x.shape[0], self.features), gates.dtype)

        def step(hidden, gates):
            inputs = jnp.split(gates, 3, axis=-1)
            states = jnp.split(hidden @ state_kernel, 3, axis=-1)
            reset = jax.nn.sigmoid(inputs[0] + states[0])
            update = jax.nn.sigmoid(inputs[1] + states[1])
            candidate = jnp.tanh(inputs[2] + reset * (states[2] + state_bias))
            hidden = (1 - update) * candidate + update * hidden
            return hidden, hidden

        return jnp.swapaxes(jax.lax.scan(step, zeros, gates)[1], 0, 1)


class RecurrentNetwork(nn.Module):
    """The flax module of `lstm` and `gru`.

    Attributes:
      num_classes: number of logits.
      num_tokens: number of different tokens; None for series.
      per_token: whether there are logits for each position; otherwise for the last one.
      layer: class of the recurrent layers.
      hidden: width of the recurrent layers.
      num_layers: number of recurrent layers.
      embedding: width of the embedding of a token.
    """

    num_classes: int
    num_tokens: int | None
    per_token: bool
    layer: type[RecurrentLayer]
    hidden: int
    num_layers: int
    embedding: int

    @nn.compact
    def __call__(self, x, train):
        """Return features and logits `[B, num_classes]`, or `[B, T, num_classes]` per token."""
        if self.num_tokens is not None:
            x = Embedding(self.num_tokens, self.embedding, name="embedding")(x)
        for i in range(self.num_layers):
            x = self.layer(self.hidden, name=f"recurrent{i + 1}")(x)
        features = x if self.per_token else x[:, -1]
        return features, Linear(self.num_classes, name="head")(features)


def lstm(
    input_shape: Shape,
    num_classes: int,
    num_tokens: int | None = None,
    per_token: bool = False,
    *,
    hidden: PositiveInt = 256,
    layers: PositiveInt = 2,
    embedding: PositiveInt = 8,
) -> Model:
    """Build an LSTM for tokens or series, by default with two layers of 256.

    The defaults are LEAF's network for Shakespeare. Weights are drawn as PyTorch does,
    U(±1/√hidden). The last position, or each position per token, has a fully connected layer.

    Args:
      input_shape: (T,) of tokens, or (T, F) of series.
      num_classes: number of logits.
      num_tokens: number of different tokens; None for series.
      per_token: whether there are logits for each position.
      hidden: width of the recurrent layers.
      layers: number of recurrent layers.
      embedding: width of the embedding of a token.

    Returns:
      The model.
    """
    module = RecurrentNetwork(num_classes, num_tokens, per_token, Lstm, hidden, layers, embedding)
    return make_flax_model(module, input_shape, num_tokens=num_tokens, can_shard_batch=True)


def gru(
    input_shape: Shape,
    num_classes: int,
    num_tokens: int | None = None,
    per_token: bool = False,
    *,
    hidden: PositiveInt = 256,
    layers: PositiveInt = 2,
    embedding: PositiveInt = 8,
) -> Model:
    """Build a GRU for tokens or series, by default with two layers of 256.

    Weights are drawn as PyTorch does, U(±1/√hidden). The last position, or each position per token,
    has a fully connected layer.

    Args:
      input_shape: (T,) of tokens, or (T, F) of series.
      num_classes: number of logits.
      num_tokens: number of different tokens; None for series.
      per_token: whether there are logits for each position.
      hidden: width of the recurrent layers.
      layers: number of recurrent layers.
      embedding: width of the embedding of a token.

    Returns:
      The model.
    """
    module = RecurrentNetwork(num_classes, num_tokens, per_token, Gru, hidden, layers, embedding)
    return make_flax_model(module, input_shape, num_tokens=num_tokens, can_shard_batch=True)
