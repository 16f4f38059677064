"""Recurrent networks of tokens and of series: LSTM (Hochreiter and Schmidhuber, 1997) and GRU."""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_het.nn.adapters import make_flax_model
from fedjax_het.nn.layers import Embedding, Linear, uniform_fan_in
from fedjax_het.nn.model import Model, Shape
from fedjax_het.utils.config import PositiveInt

Cell = Callable[[tuple[jax.Array, ...], jax.Array, jax.Array], tuple[jax.Array, ...]]
"""`cell(state, inputs, products) -> state` of one position. The first part of a state is the output
`[B, H]`. `inputs` and `products` are the products with the input and the state, `[B, gates H]`."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_positions(
    cell: Cell, inputs: jax.Array, kernel: jax.Array, bias: jax.Array, state: tuple[jax.Array, ...]
) -> jax.Array:
    """Run a recurrent cell over the positions of a sequence.

    The derivative by `kernel` is one matrix product over all positions. The derivative of a scan
    would add a product to an array of the kernel's size at each position, which is several times
    slower on a CPU.

    Args:
      cell: the cell.
      inputs: products with the inputs of all positions, `[T, B, gates H]`.
      kernel: weights of the state, `[H, gates H]`.
      bias: bias of the products with the state, `[gates H]`.
      state: the state before the first position, arrays `[B, H]`.

    Returns:
      The outputs of all positions, `[T, B, H]`.
    """
    return _run_forward(cell, inputs, kernel, bias, state)[0]


def _run_forward(cell, inputs, kernel, bias, state):
    def step(state, inputs):
        products = state[0] @ kernel + bias
        new_state = cell(state, inputs, products)
        return new_state, (new_state[0], (state, products))

    outputs, stored = jax.lax.scan(step, state, inputs)[1]
    return outputs, (inputs, kernel, stored)


def _run_backward(cell, residuals, output_gradients):
    inputs, kernel, (states, products) = residuals

    def step(state_gradient, position):
        state, inputs, products, output_gradient = position
        output, *others = state_gradient
        gradient = (output + output_gradient, *others)
        state_gradient, input_gradient, product_gradient = jax.vjp(cell, state, inputs, products)[
            1
        ](gradient)
        output, *others = state_gradient
        state_gradient = (output + product_gradient @ kernel.T, *others)
        return state_gradient, (input_gradient, product_gradient)

    zeros = jax.tree.map(lambda array: jnp.zeros_like(array[0]), states)
    positions = (states, inputs, products, output_gradients)
    state_gradient, (input_gradients, product_gradients) = jax.lax.scan(
        step, zeros, positions, reverse=True
    )
    kernel_gradient = jnp.einsum("tbh,tbg->hg", states[0], product_gradients)
    bias_gradient = product_gradients.sum((0, 1))
    return input_gradients, kernel_gradient, bias_gradient, state_gradient


run_positions.defvjp(_run_forward, _run_backward)


class RecurrentLayer(nn.Module):
    """A recurrent layer over the positions of a sequence, from a state of zeros.

    Attributes:
      features: number of outputs of a position, H.
    """

    features: int

    def run(self, cell: Cell, x: jax.Array, num_gates: int, num_states: int, bias: jax.Array):
        """Return the outputs `[B, T, H]` of a cell for `x` `[B, T, F]`.

        Args:
          cell: the cell.
          x: the sequences.
          num_gates: number of products with the input and with the state.
          num_states: number of arrays of the state.
          bias: bias of the products with the state, `[gates H]`.

        Returns:
          The outputs of all positions.
        """
        init, width = uniform_fan_in(self.features), num_gates * self.features
        kernel = self.param("kernel", init, (x.shape[-1], width))
        input_bias = self.param("bias", init, (width,))
        state_kernel = self.param("state_kernel", init, (self.features, width))
        inputs = jnp.swapaxes(x @ kernel + input_bias, 0, 1)
        state = (jnp.zeros((x.shape[0], self.features), inputs.dtype),) * num_states
        outputs = run_positions(cell, inputs, state_kernel, bias.astype(inputs.dtype), state)
        return jnp.swapaxes(outputs, 0, 1)


def run_lstm_cell(state, inputs, products):
    """Compute the hidden state and the memory of an LSTM after a position.

    Args:
      state: the state before the position, arrays `[B, H]`.
      inputs: products with the input, `[B, gates H]`.
      products: products with the state, `[B, gates H]`.

    Returns:
      The state after the position; its first array is the output.
    """
    width = state[0].shape[-1]
    scales = jnp.repeat(jnp.array([0.5, 0.5, 0.5, 1.0], inputs.dtype), width)
    # The sigmoid as a tanh, and one tanh of all gates: a CPU computes it in a third of the time.
    *gates, candidate = jnp.split(jnp.tanh(scales * (inputs + products)), 4, axis=-1)
    input_gate, forget_gate, output_gate = (0.5 + 0.5 * gate for gate in gates)
    memory = forget_gate * state[1] + input_gate * candidate
    return output_gate * jnp.tanh(memory), memory


def run_gru_cell(state, inputs, products):
    """Compute the hidden state of a GRU after a position.

    Args:
      state: the state before the position, arrays `[B, H]`.
      inputs: products with the input, `[B, gates H]`.
      products: products with the state, `[B, gates H]`.

    Returns:
      The state after the position; its first array is the output.
    """
    width = state[0].shape[-1]
    gate_inputs, candidate_inputs = jnp.split(inputs, [2 * width], axis=-1)
    gate_products, candidate_products = jnp.split(products, [2 * width], axis=-1)
    gates = 0.5 + 0.5 * jnp.tanh(0.5 * (gate_inputs + gate_products))  # the sigmoid
    reset, update = jnp.split(gates, 2, axis=-1)
    candidate = jnp.tanh(candidate_inputs + reset * candidate_products)
    return ((1 - update) * candidate + update * state[0],)


class Lstm(RecurrentLayer):
    """An LSTM layer with one bias for each gate."""

    @nn.compact
    def __call__(self, x):
        """Return `[B, T, H]` for `x` `[B, T, F]`."""
        return self.run(run_lstm_cell, x, 4, 2, jnp.zeros(4 * self.features))


class Gru(RecurrentLayer):
    """A GRU layer (Cho et al., 2014) with the bias of the state's product of PyTorch and cuDNN."""

    @nn.compact
    def __call__(self, x):
        """Return `[B, T, H]` for `x` `[B, T, F]`."""
        bias = self.param("state_bias", uniform_fan_in(self.features), (self.features,))
        bias = jnp.concatenate([jnp.zeros(2 * self.features, bias.dtype), bias])
        return self.run(run_gru_cell, x, 3, 1, bias)


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
