"""Networks of tokens and of series against oracles in float64, and their checks."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.x64 import enable_x64

from fedjax_het.nn import NETWORKS, count_training_flops, make_model, to_model
from fedjax_het.nn.networks.recurrent import run_gru_cell, run_lstm_cell, run_positions
from fedjax_het.utils.errors import ConfigError

RNG = np.random.default_rng(0)


def get_outputs(model, inputs):
    variables = jax.tree.map(lambda a: 1.5 * a, jax.jit(model.init)(jax.random.key(0)))
    outputs, _ = jax.jit(partial(model.apply, train=True))(variables, jnp.asarray(inputs))
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), variables["params"])
    return np.asarray(outputs), params


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def run_lstm(params, x):
    width = params["state_kernel"].shape[0]
    hidden = cell = np.zeros((len(x), width))
    outputs = []
    for t in range(x.shape[1]):
        gates = x[:, t] @ params["kernel"] + params["bias"] + hidden @ params["state_kernel"]
        i, f, o, g = (gates[:, k * width : (k + 1) * width] for k in range(4))
        cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
        hidden = sigmoid(o) * np.tanh(cell)
        outputs.append(hidden)
    return np.stack(outputs, 1)


def run_gru(params, x):
    width = params["state_kernel"].shape[0]
    hidden, outputs = np.zeros((len(x), width)), []
    for t in range(x.shape[1]):
        own, state = x[:, t] @ params["kernel"] + params["bias"], hidden @ params["state_kernel"]
        r, z = (sigmoid(own[:, k : k + width] + state[:, k : k + width]) for k in (0, width))
        n = np.tanh(own[:, 2 * width :] + r * (state[:, 2 * width :] + params["state_bias"]))
        hidden = (1 - z) * n + z * hidden
        outputs.append(hidden)
    return np.stack(outputs, 1)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(("name", "run_layer"), [("lstm", run_lstm), ("gru", run_gru)])
def test_recurrent_network(name, run_layer, per_token):
    tokens = RNG.integers(0, 7, (3, 5))
    model = make_model(name, (5,), 4, 7, per_token, hidden=6, layers=2, embedding=3)
    outputs, params = get_outputs(model, tokens)
    x = params["embedding"]["embedding"][tokens]
    for layer in ("recurrent1", "recurrent2"):
        x = run_layer(params[layer], x)
    expected = x @ params["head"]["kernel"] + params["head"]["bias"]
    expected = expected if per_token else expected[:, -1]
    assert model.output_shape == expected.shape[1:] and model.is_per_token == per_token
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


def test_recurrent_network_of_series():
    series = RNG.normal(size=(2, 5, 3))
    outputs, params = get_outputs(make_model("gru", (5, 3), 4, hidden=6, layers=1), series)
    x = run_gru(params["recurrent1"], series)[:, -1]
    expected = x @ params["head"]["kernel"] + params["head"]["bias"]
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_derivatives_of_recurrent_layers(cell):
    """First and second derivatives by all arguments equal the derivatives of the plain scan."""
    run_cell, num_gates, num_states = {"lstm": (run_lstm_cell, 4, 2), "gru": (run_gru_cell, 3, 1)}[
        cell
    ]
    shapes = [(4, 2, 3 * num_gates), (3, 3 * num_gates), (3 * num_gates,)]
    arguments = [jnp.asarray(RNG.normal(size=shape)) for shape in shapes]
    state = tuple(jnp.asarray(RNG.normal(size=(2, 3))) for _ in range(num_states))
    weights = jnp.asarray(RNG.normal(size=(4, 2, 3)))

    def run_scan(inputs, kernel, bias, state):
        def step(state, inputs):
            state = run_cell(state, inputs, state[0] @ kernel + bias)
            return state, state[0]

        return jax.lax.scan(step, state, inputs)[1]

    def sum_outputs(run, *arguments):
        return jnp.sum(weights * run(*arguments) ** 2)

    def sum_gradients(run, *arguments):
        gradients = jax.grad(partial(sum_outputs, run), (0, 1, 2, 3))(*arguments)
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(gradients))

    with enable_x64():
        arguments = [*(a.astype(jnp.float64) for a in arguments)]
        state = tuple(a.astype(jnp.float64) for a in state)
        for function in (sum_outputs, sum_gradients):
            actual, expected = (
                jax.grad(partial(function, run), (0, 1, 2, 3))(*arguments, state)
                for run in (partial(run_positions, run_cell), run_scan)
            )
            for leaf, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
                np.testing.assert_allclose(leaf, other, rtol=1e-9, atol=1e-11)


def test_fasttext_ignores_padding():
    tokens = np.array([[3, 1, 0, 0], [2, 2, 5, 1], [0, 0, 0, 0]])
    outputs, params = get_outputs(make_model("fasttext", (4,), 3, 6, embedding=4), tokens)
    vectors = params["embedding"]["embedding"]
    means = np.stack([vectors[[3, 1]].mean(0), vectors[[2, 2, 5, 1]].mean(0), np.zeros(4)])
    expected = means @ params["head"]["kernel"] + params["head"]["bias"]
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


def test_cnn1d():
    series = RNG.normal(size=(2, 18, 3))
    outputs, params = get_outputs(make_model("cnn1d", (18, 3), 4, width=2, hidden=5), series)
    x = series
    for name in ("conv1", "conv2"):
        kernel, bias = params[name]["kernel"][:, 0], params[name]["bias"]
        windows = np.lib.stride_tricks.sliding_window_view(x, 5, axis=1)  # [B, T - 4, F, 5]
        x = np.maximum(np.einsum("btfk,kfo->bto", windows, kernel) + bias, 0)
        x = x[:, : x.shape[1] // 2 * 2].reshape(len(x), -1, 2, x.shape[2]).max(2)
    x = x.reshape(2, -1) @ params["hidden"]["kernel"] + params["hidden"]["bias"]
    expected = np.maximum(x, 0) @ params["head"]["kernel"] + params["head"]["bias"]
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)


def test_transformer_per_token_is_causal():
    tokens = RNG.integers(0, 7, (1, 6))
    changed = tokens.copy()
    changed[0, 4] = (changed[0, 4] + 1) % 7
    model = make_model("transformer", (6,), 7, 7, True, width=8, layers=2, heads=2)
    before, after = (get_outputs(model, x)[0][0] for x in (tokens, changed))
    np.testing.assert_allclose(before[:4], after[:4], rtol=1e-5, atol=1e-6)
    assert np.abs(before[4:] - after[4:]).max(1).min() > 1e-3


def test_transformer_of_series_reads_all_positions():
    series = RNG.normal(size=(1, 6, 2))
    model = make_model("transformer", (6, 2), 3, width=8, layers=1, heads=2)

    def sum_outputs(x):
        variables = model.init(jax.random.key(0))
        return model.apply(variables, x, train=False)[0][0, 0]

    gradient = jax.jit(jax.grad(sum_outputs))(jnp.asarray(series))
    assert np.abs(gradient[0]).max(1).min() > 1e-4


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("transformer", (6,), 7, 7), {"width": 6, "heads": 4}, "a divisor of width = 6"),
        (("cnn1d", (10, 3), 2), {}, "at least 16 positions"),
        (("lstm", (8, 8, 1), 10), {}, "does not accept image"),
        (("fasttext", (6, 2), 7), {}, "does not accept series"),
        (("lstm", (6,), 7), {}, "does not accept features"),
        (("fasttext", (6,), 7, 7, True), {}, "expected a network of task next_token: lstm"),
        (("resnet8", (8, 8, 1), 10), {"groups": 3}, "a divisor of width = 16"),
        (("vgg11", (8, 8, 1), 10), {}, "at least 16x16"),
    ],
)
def test_invalid_arguments(arguments, options, message):
    with pytest.raises(ConfigError, match=message) as error:
        make_model(*arguments, **options)
    assert "\n" not in str(error.value)


class TokenNetwork(nn.Module):
    num_tokens: int
    num_classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(nn.Embed(self.num_tokens, 4)(x))


def test_network_of_a_user_per_token():
    model = to_model(TokenNetwork, (6,), 5, num_tokens=5, per_token=True)
    assert model.output_shape == (6, 5) and model.head.path == ("Dense_0",)
    with pytest.raises(ConfigError, match=r"expected logits, floats \(2, 5\)"):
        to_model(TokenNetwork, (6,), 5, num_tokens=5)


@pytest.mark.parametrize(("cell", "gates"), [("lstm", 4), ("gru", 3)])
@pytest.mark.parametrize("per_token", [False, True])
def test_training_flops_count_all_positions(cell, gates, per_token):
    length, tokens, hidden, embedding, classes = 7, 11, 5, 3, 11
    options = {"hidden": hidden, "layers": 2, "embedding": embedding}
    model = make_model(cell, (length,), classes, tokens, per_token, **options)
    first = length * embedding * gates * hidden
    others = length * 3 * hidden * gates * hidden  # two products with states, one with outputs
    others += (length if per_token else 1) * hidden * classes
    assert count_training_flops(model) == 2 * (2 * first + 3 * others)


@pytest.mark.parametrize(
    ("name", "shape", "arguments", "left_out"),
    [
        ("resnet8", (12, 3), {}, "cnn1d"),
        ("cnn1d", (40,), {"num_tokens": 60, "per_token": True}, "fasttext"),
        ("lstm", (20, 3, 1), {}, "convnet"),
    ],
)
def test_messages_suggest_networks_that_fit(name, shape, arguments, left_out):
    with pytest.raises(ConfigError, match=r"model=(.*) accepts these inputs$") as error:
        make_model(name, shape, 10, **arguments)
    suggested = str(error.value).partition("model=")[2].removesuffix(" accepts these inputs")
    names = suggested.split(" or ")
    assert left_out not in names and names == [n for n in NETWORKS if n in names]
    for suggestion in names:
        model = make_model(suggestion, shape, 10, **arguments)
        assert model.is_per_token == arguments.get("per_token", False)
