"""Networks: parameter counts, initialisation, and values and gradients against oracles."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.markers import slow_case
from support.x64 import enable_x64

from fedjax_het.nn import (
    count_parameters,
    count_training_flops,
    make_model,
    micro_batched_value_and_grad,
)
from fedjax_het.nn.layers import Dropout, max_pool, max_pool_overlapping
from fedjax_het.utils.errors import ConfigError

KEY = jax.random.key(0)


def sum_of_cross_entropies(model, params, batch):
    logits, _ = model.apply({"params": params, "state": {}}, batch["x"], train=True)
    log_probabilities = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probabilities, batch["y"][:, None], axis=1).sum()


def random_batch(model, size, key=KEY):
    return {
        "x": jax.random.normal(key, (size, *model.input_shape)),
        "y": jnp.arange(size) % model.num_classes,
    }


def assert_trees_close(actual, expected, tolerance):
    """Leaf by leaf, relative to the largest entry of the whole expected tree."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * scale)


# Parameters


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "count"),
    [
        ("mlp", (28, 28, 1), 10, {}, 118_282),
        ("convnet", (28, 28, 1), 10, {}, 317_706),
        ("convnet", (32, 32, 3), 10, {}, 320_010),
        ("convnet", (32, 32, 3), 100, {}, 504_420),
        ("convnet", (28, 28, 1), 10, {"width": 32}, 24_138),
        ("convnet", (28, 28, 1), 10, {"width": 32, "norm": "none"}, 24_138 - 3 * 64),
        ("convnet", (8, 8, 1), 10, {"width": 4, "norm": "batch"}, 40 + 2 * 148 + 3 * 8 + 50),
        ("mlp", (8, 8, 1), 3, {"hidden": (5,)}, 64 * 5 + 5 + 5 * 3 + 3),
        ("cnn", (28, 28, 1), 10, {}, 582_026),
        ("cnn", (32, 32, 3), 10, {}, 878_538),
        ("lenet5", (28, 28, 1), 10, {}, 44_426),
        ("lenet5", (32, 32, 3), 10, {}, 62_006),
        ("fsl_cnn", (28, 28, 1), 45, {}, 1_409_197),
        ("fsl_cnn", (32, 32, 3), 10, {}, 545_098),
        ("fsl_cnn", (8, 8, 1), 10, {}, 320 + 18_496 + (9 * 64 + 1) * 128 + 1290),
        ("convnet", (28, 28, 1), 10, {"norm": "batch"}, 317_706),
        ("convnet", (32, 32, 3), 10, {"norm": "batch"}, 320_010),
        ("convnet", (32, 32, 3), 100, {"norm": "batch"}, 504_420),
        ("convnet", (64, 64, 3), 10, {"norm": "batch"}, 381_450),
        ("resnet18", (32, 32, 3), 10, {}, 11_181_642),
        ("resnet18", (64, 64, 3), 10, {"stem": "imagenet"}, 11_181_642),
        ("resnet18", (32, 32, 3), 10, {"stem": "cifar"}, 11_173_962),
        ("resnet18", (28, 28, 1), 10, {}, 11_181_642 - 2 * 49 * 64),
        ("resnet8", (32, 32, 3), 10, {}, 432 + 2 * 2304 + 13_824 + 512 + 55_296 + 2048 + 672 + 650),
        ("vgg11", (32, 32, 3), 10, {}, 9_225_610),
    ],
)
def test_parameter_counts(name, shape, classes, options, count):
    model = make_model(name, shape, classes, **options)
    variables = jax.eval_shape(model.init, KEY)
    assert count_parameters(variables) == count
    embed = partial(model.embed, train=False)
    features, logits, state = jax.eval_shape(embed, variables, jnp.ones((2, *shape)))
    assert logits.shape == (2, classes)
    assert features.shape == (2, variables["params"]["head"]["kernel"].shape[0])
    assert state == variables["state"]
    assert bool(state) == (name == "resnet18" or options.get("norm") == "batch")


def test_variables_are_plain_dicts():
    def check(tree):
        assert type(tree) is dict or isinstance(tree, jax.ShapeDtypeStruct)
        for branch in tree.values() if type(tree) is dict else ():
            check(branch)

    model = make_model("convnet", (8, 8, 1), 10, width=4, norm="batch")
    check(jax.eval_shape(model.init, KEY))


def assert_uniform(values):
    """Uniform on ±1: variance 1/3 and fourth moment 1/5, within five standard errors."""
    assert 1 - 10 / values.size < np.abs(values).max() <= 1 + 1e-6
    assert abs(values.mean()) < 5 * np.sqrt(1 / 3 / values.size)
    assert abs((values**2).mean() - 1 / 3) < 5 * np.sqrt((1 / 5 - 1 / 9) / values.size)


@pytest.mark.parametrize(
    ("name", "shape", "is_glorot"),
    [
        *(
            ("mlp", (28, 28, 1), False),
            ("convnet", (32, 32, 3), False),
            ("cnn", (28, 28, 1), False),
        ),
        *(("fsl_cnn", (8, 8, 1), True), ("fsl_cnn", (8, 8, 3), True)),
    ],
)
def test_init_is_uniform(name, shape, is_glorot):
    """Weights and biases on ±1/sqrt(fan_in), or weights on ±sqrt(6 / (fan_in + fan_out)) alone."""
    params = jax.jit(make_model(name, shape, 100).init)(KEY)["params"]
    for layer, leaves in params.items():
        if layer.startswith("norm"):
            np.testing.assert_array_equal(leaves["scale"], 1)
            np.testing.assert_array_equal(leaves["bias"], 0)
            continue
        *field, fan_in, fan_out = leaves["kernel"].shape
        fans = np.prod(field) * np.array([fan_in, fan_out])
        bound = np.sqrt(6 / fans.sum()) if is_glorot else 1 / np.sqrt(fans[0])
        assert_uniform(np.asarray(leaves["kernel"], np.float64).ravel() / bound)
        if is_glorot:
            np.testing.assert_array_equal(leaves["bias"], 0)
        else:
            assert_uniform(np.asarray(leaves["bias"], np.float64) / bound)


@pytest.mark.slow
def test_resnet18_init_matches_torchvision():
    """Convolutions N(0, 2 / fan_out), norms one and zero, the head as everywhere."""
    params = jax.jit(make_model("resnet18", (8, 8, 3), 10, width=16).init)(KEY)["params"]

    def check(tree, path):
        if "kernel" in tree and path[-1] != "head":
            kernel = np.asarray(tree["kernel"], np.float64)
            assert set(tree) == {"kernel"}
            fan_out = kernel.shape[0] * kernel.shape[1] * kernel.shape[3]
            scaled = kernel.ravel() * np.sqrt(fan_out / 2)
            assert abs(scaled.mean()) < 5 / np.sqrt(scaled.size), path
            assert abs((scaled**2).mean() - 1) < 5 * np.sqrt(2 / scaled.size), path
            return 1
        if "scale" in tree:
            np.testing.assert_array_equal(tree["scale"], 1)
            np.testing.assert_array_equal(tree["bias"], 0)
            return 0
        return sum(check(tree[name], (*path, name)) for name in tree if name != "head")

    assert check(params, ("",)) == 20  # 17 of 3x3 (or the stem's) and three shortcuts
    bound = 1 / np.sqrt(8 * 16)
    assert 0.9 * bound < np.abs(params["head"]["kernel"]).max() <= bound
    assert np.abs(params["head"]["bias"]).max() <= bound


def test_init_depends_on_key():
    model = make_model("mlp", (8, 8, 1), 10)
    init = jax.jit(model.init)
    first, again, other = (init(jax.random.key(seed)) for seed in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first["params"]["head"]["kernel"], other["params"]["head"]["kernel"])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("convnext", (8, 8, 1), 10), "convnet"),
        (("convnet", (8, 8), 10), "series of shape"),
        (("mlp", (8, 8, 1, 1), 10), "input_shape"),
        (("convnet", (8, 8, 1), 0), "num_classes"),
        (("convnet", (8, 8, 1), 10, {"norm": "grop"}), "group"),
        (("convnet", (8, 8, 1), 10, {"depth": 4}), "1 to 3"),
        (("convnet", (8, 8, 1), 10, {"depth": 0}), "depth"),
        (("convnet", (8, 8, 1), 10, {"width": 0}), "width"),
        (("convnet", (8, 8, 1), 10, {"hidden": (3,)}), "hidden"),
        (("convnet", (8, 8, 1), 10, {"conv_impl": "winograd"}), "im2col"),
        (("mlp", (8, 8, 1), 10, {"width": 3}), "hidden"),
        (("mlp", (8, 8, 1), 10, {"norm": "group"}), "norm"),
        (("mlp", (8, 8, 1), 10, {"hidden": (0,)}), "hidden"),
        (("cnn", (28, 28, 1), 10, {"width": 3}), "cnn"),
        (("convnet", (8, 8, 1), 10, {"stem": "cifar"}), "stem"),
        (("resnet18", (8, 8, 1), 10, {"stem": "imagnet"}), "'imagenet'"),
        (("resnet18", (8, 8, 1), 10, {"norm": "group"}), "norm"),
        (("resnet18", (8, 8, 1), 10, {"width": -1}), "width"),
        (("cnn", (8, 8, 1), 10), "16x16"),
        (("lenet5", (8, 8, 1), 10), "16x16"),
        (("fsl_cnn", (8, 3, 1), 10), "4x4"),
        (("fsl_cnn", (8, 8, 1), 10, {"width": 8}), "width"),
    ],
)
def test_make_model_rejects_invalid_options(arguments, word):
    *positional, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises(ConfigError, match=word) as error:
        make_model(*positional, **options)
    assert "\n" not in str(error.value)


# Networks


def convolve_in_float64(x, kernel, padding, stride=1):
    x, kernel = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    x = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[:2], axis=(1, 2))
    return np.einsum("bhwirc,rcio->bhwo", windows[:, ::stride, ::stride], kernel)


def to_float64(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def dense(x, layer):
    return x.reshape(len(x), -1) @ layer["kernel"] + layer["bias"]


def convolve(x, layer, padding):
    return convolve_in_float64(x, layer["kernel"], padding) + layer["bias"]


def max_pool_in_float64(x):
    windows = np.lib.stride_tricks.sliding_window_view(x, (2, 2), axis=(1, 2))
    return windows[:, ::2, ::2].max((-2, -1))


def convnet_in_float64(params, x, *, first_padding, norm, depth):
    for block in range(1, depth + 1):
        x = convolve(x, params[f"conv{block}"], first_padding if block == 1 else 1)
        if norm != "none":
            axes = (1, 2) if norm == "group" else (0, 1, 2)
            x = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)
            x = x * params[f"norm{block}"]["scale"] + params[f"norm{block}"]["bias"]
        x = np.maximum(x, 0)
        x = x[:, : x.shape[1] // 2 * 2, : x.shape[2] // 2 * 2]
        x = (x[:, ::2, ::2] + x[:, 1::2, ::2] + x[:, ::2, 1::2] + x[:, 1::2, 1::2]) / 4
    return dense(x, params["head"])


def mlp_in_float64(params, x):
    for layer in ("hidden1", "hidden2"):
        x = np.maximum(dense(x, params[layer]), 0)
    return dense(x, params["head"])


def cnn_in_float64(params, x):
    for layer in ("conv1", "conv2"):
        x = max_pool_in_float64(np.maximum(convolve(x, params[layer], 0), 0))
    return dense(np.maximum(dense(x, params["hidden"]), 0), params["head"])


def lenet5_in_float64(params, x):
    for layer in ("conv1", "conv2"):
        x = max_pool_in_float64(np.maximum(convolve(x, params[layer], 0), 0))
    return mlp_in_float64(params, x)


def fsl_cnn_in_float64(params, x):
    """Gray images meet one pool and a second convolution without padding, color images two."""
    is_gray = x.shape[-1] == 1
    for layer, padding, pools in (("conv1", 1, not is_gray), ("conv2", int(not is_gray), True)):
        x = np.maximum(convolve(x, params[layer], padding), 0)
        x = max_pool_in_float64(x) if pools else x
    return dense(np.maximum(dense(x, params["hidden"]), 0), params["head"])


def perturbed(model, seed=0):
    """Variables away from where scales are one and shifts zero, drawn without compiling."""
    draw = np.random.default_rng(seed)
    variables = jax.eval_shape(model.init, KEY)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(draw.normal(0.3, 0.4, leaf.shape), jnp.float32),
        variables["params"],
    )
    state = jax.tree_util.tree_map_with_path(
        lambda path, leaf: (jnp.ones if path[-1].key == "variance" else jnp.zeros)(leaf.shape),
        variables["state"],
    )
    return {"params": params, "state": state}


def perturbed_clients(model):
    """Variables of three clients, stacked."""
    clients = [perturbed(model, seed) for seed in range(3)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *clients)


def train_apply(model):
    return jax.jit(partial(model.apply, train=True))


@pytest.mark.parametrize(
    ("name", "shape", "options", "oracle", "tolerance"),
    [
        ("mlp", (4, 5, 2), {"hidden": (7, 6)}, mlp_in_float64, 1e-5),
        ("cnn", (17, 20, 2), {}, cnn_in_float64, 1e-5),
        ("lenet5", (17, 20, 2), {}, lenet5_in_float64, 1e-5),
        ("fsl_cnn", (9, 8, 1), {}, fsl_cnn_in_float64, 1e-5),
        ("fsl_cnn", (9, 8, 3), {}, fsl_cnn_in_float64, 1e-5),
        *(
            (
                *("convnet", shape, {"width": 6, "depth": depth, "norm": norm}),
                partial(convnet_in_float64, first_padding=padding, norm=norm, depth=depth),
                1e-4,
            )
            for norm in ("group", "batch", "none")
            for shape, depth, padding in (((28, 28, 1), 3, 3), ((13, 10, 3), 2, 1))
        ),
    ],
)
def test_network_matches_numpy(name, shape, options, oracle, tolerance):
    model = make_model(name, shape, 3, **options)
    variables = perturbed(model)
    x = jax.random.normal(jax.random.fold_in(KEY, 2), (3, *shape))
    expected = oracle(to_float64(variables["params"]), np.asarray(x, np.float64))
    logits, _ = train_apply(model)(variables, x)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance * np.abs(expected).max())


# Dropout


@pytest.mark.parametrize("rate", [0.25, 0.5])
def test_dropout_preserves_mean(rate):
    """A share `rate` is zero, in every column and row; the others are 1 / (1 - rate)."""
    x = jnp.ones((200, 13, 11))
    y = np.asarray(Dropout(rate).apply({}, x, True, rngs={"dropout": KEY}))
    assert y.shape == x.shape
    np.testing.assert_allclose(np.unique(y), [0, 1 / (1 - rate)], rtol=1e-6)
    dropped = (y == 0).reshape(200, -1)
    error = np.sqrt(rate * (1 - rate))
    assert abs(dropped.mean() - rate) < 5 * error / np.sqrt(dropped.size)
    for axis in (0, 1):  # no column or row has a rate of its own
        spread = 5 * error / np.sqrt(dropped.shape[axis])
        assert np.abs(dropped.mean(axis) - rate).max() < spread
    related = np.corrcoef(dropped.T.astype(float)) - np.eye(13 * 11)
    assert np.abs(related).max() < 6 / np.sqrt(200)  # quarters of a word are independent too


@pytest.mark.slow
def test_dropout_masks_gradient():
    """A quarter of the hidden layer's inputs and half of its outputs are dropped in training."""
    model = make_model("fsl_cnn", (28, 28, 1), 5)
    variables = model.init(KEY)
    params = variables["params"]
    for layer, bias in (("conv2", 3.0), ("hidden", 300.0)):  # all that is dropped was positive
        params[layer]["bias"] += bias
    x = jax.random.uniform(KEY, (1, 28, 28, 1))

    def gradient(key):
        def first_logit(params):
            return model.apply({**variables, "params": params}, x, train=True, key=key)[0][0, 0]

        return np.asarray(jax.grad(first_logit)(params)["hidden"]["kernel"])

    masked = gradient(jax.random.key(1)) == 0
    inputs, outputs = masked.all(1), masked.all(0)
    np.testing.assert_array_equal(masked, inputs[:, None] | outputs)
    assert abs(inputs.mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / inputs.size)
    assert abs(outputs.mean() - 0.5) < 5 * np.sqrt(0.25 / outputs.size)
    assert (gradient(None) != 0).all()


def test_dropout_follows_key():
    model = make_model("fsl_cnn", (8, 8, 3), 5)
    variables = perturbed(model)
    x = jnp.broadcast_to(jax.random.normal(KEY, (8, 8, 3)), (4, 8, 8, 3))

    apply = jax.jit(model.apply, static_argnames="train")

    def logits(train, key):
        return np.asarray(apply(variables, x, train=train, key=key)[0])

    first, other = jax.random.key(1), jax.random.key(2)
    np.testing.assert_array_equal(logits(True, first), logits(True, first))
    assert not np.isclose(logits(True, first), logits(True, other)).all(1).any()
    assert not np.isclose(logits(True, first)[1:], logits(True, first)[0]).all(1).any()
    for plain in (logits(False, first), logits(False, None), logits(True, None)):
        np.testing.assert_array_equal(plain, logits(False, other))
        np.testing.assert_allclose(plain, plain[:1].repeat(4, 0), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("mlp", (4, 5, 2), {"hidden": (7, 6)}),
        ("fsl_cnn", (8, 8, 1), {}),
        ("convnet", (8, 8, 1), {"width": 3, "depth": 1}),
        ("convnet", (8, 8, 1), {"width": 3, "depth": 1, "norm": "batch"}),
        ("cnn", (16, 16, 1), {}),
        ("resnet18", (8, 8, 1), {"width": 2}),
    ],
)
@pytest.mark.parametrize("train", [True, False])
def test_features_are_input_of_head(name, shape, options, train):
    model = make_model(name, shape, 4, **options)
    variables = perturbed(model)
    x = jax.random.normal(KEY, (3, *shape))
    features, logits, state = jax.jit(partial(model.embed, train=train))(variables, x)
    head = to_float64(variables["params"]["head"])
    expected = np.asarray(features, np.float64) @ head["kernel"] + head["bias"]
    tolerance = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance)
    alone = model.head.apply(model.head.get_parameters(variables), features)
    np.testing.assert_allclose(alone, expected, rtol=0, atol=tolerance)
    same, same_state = jax.jit(partial(model.apply, train=train))(variables, x)
    np.testing.assert_allclose(same, logits, rtol=0, atol=tolerance)
    assert_trees_close(same_state, state, 1e-5) if state else None
    assert features.ndim == 2 and float(features.min()) >= 0  # pooled or not, after a ReLU


def resnet18_in_float64(variables, x, stem, train):
    """Written out from the architecture's description: stages of two blocks of two convolutions."""
    params, state = (to_float64(variables[part]) for part in ("params", "state"))

    def normalised(x, params, state):
        mean, variance = state["mean"], state["variance"]
        if train:
            mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        return (x - mean) / np.sqrt(variance + 1e-5) * params["scale"] + params["bias"]

    size, stride = (7, 2) if stem == "imagenet" else (3, 1)
    x = convolve_in_float64(x, params["conv"]["kernel"], size // 2, stride)
    x = np.maximum(normalised(x, params["norm"], state["norm"]), 0)
    if stem == "imagenet":
        padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
        x = windows[:, ::2, ::2].max((-2, -1))
    for stage in range(1, 5):
        for block in (1, 2):
            name = f"stage{stage}_block{block}"
            layers, running = params[name], state[name]
            stride = 2 if block == 1 and stage > 1 else 1
            y = convolve_in_float64(x, layers["conv1"]["kernel"], 1, stride)
            y = np.maximum(normalised(y, layers["conv1_norm"], running["conv1_norm"]), 0)
            y = convolve_in_float64(y, layers["conv2"]["kernel"], 1)
            y = normalised(y, layers["conv2_norm"], running["conv2_norm"])
            assert ("shortcut" in layers) == (stride == 2)
            if stride == 2:
                x = convolve_in_float64(x, layers["shortcut"]["kernel"], 0, 2)
                x = normalised(x, layers["shortcut_norm"], running["shortcut_norm"])
            x = np.maximum(x + y, 0)
    return dense(x.mean((1, 2)), params["head"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stem", "shape", "train"),
    [("imagenet", (33, 22, 3), 0), ("imagenet", (32, 32, 3), 1), ("cifar", (9, 10, 1), 1)],
)
def test_resnet18_matches_numpy(stem, shape, train):
    model = make_model("resnet18", shape, 3, stem=stem, width=3)
    variables = perturbed(model)
    variables["state"] = jax.tree.map(lambda leaf: leaf + 0.5, variables["state"])
    x = jax.random.normal(jax.random.fold_in(KEY, 5), (6, *shape))
    expected = resnet18_in_float64(variables, x, stem, train)
    logits, state = jax.jit(partial(model.apply, train=train))(variables, x)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3 * np.abs(expected).max())
    same = jax.tree.map(np.array_equal, state, variables["state"])
    assert not any(jax.tree.leaves(same)) if train else all(jax.tree.leaves(same))


@pytest.mark.parametrize(
    ("pool", "window", "padding", "height", "width"),
    [
        *((max_pool, 2, 0, height, width) for height, width in ((6, 4), (5, 7))),
        *((max_pool_overlapping, 3, 1, height, width) for height, width in ((6, 5), (1, 4))),
    ],
)
def test_max_pool_gradient(pool, window, padding, height, width):
    """The gradient of a window, of stride 2, goes to its largest number alone."""
    draw = np.random.default_rng(0)
    x = draw.permutation(height * width * 6).reshape(2, height, width, 3) - 300.0  # all negative
    pooled, backward = jax.vjp(jax.jit(pool), jnp.float32(x))
    sides = [(side + 2 * padding - window) // 2 + 1 for side in (height, width)]
    assert pooled.shape == (2, *sides, 3)
    weights = draw.normal(size=pooled.shape)
    expected, gradient = np.zeros(pooled.shape), np.zeros_like(x)
    for b, i, j, c in np.ndindex(pooled.shape):
        top, left = max(2 * i - padding, 0), max(2 * j - padding, 0)
        part = x[b, top : 2 * i - padding + window, left : 2 * j - padding + window, c]
        expected[b, i, j, c] = part.max()
        row, column = np.unravel_index(part.argmax(), part.shape)
        gradient[b, top + row, left + column, c] += weights[b, i, j, c]
    np.testing.assert_array_equal(pooled, expected)
    np.testing.assert_allclose(backward(jnp.float32(weights))[0], gradient, rtol=1e-6)


def test_max_pool_gradient_at_tie():
    """Of equal numbers one takes the whole gradient, or they share it: it adds up either way."""
    _, backward = jax.vjp(max_pool, jnp.ones((1, 2, 2, 1)))
    assert float(backward(jnp.ones((1, 1, 1, 1)))[0].sum()) == 1


def test_instance_norm_equals_group_norm():
    models = [make_model("convnet", (8, 8, 1), 4, width=3, norm=n) for n in ("group", "instance")]
    x = jax.random.normal(KEY, (2, 8, 8, 1))
    first, second = (train_apply(m)(perturbed(m), x)[0] for m in models)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        *(
            ("convnet", (8, 8, 1), {"width": 5, "depth": 2, "norm": norm})
            for norm in ("group", "batch", "none")
        ),
        *(slow_case("fsl_cnn", shape, {}) for shape in ((10, 9, 1), (24, 20, 3))),
    ],
)
def test_gradients_agree_between_impls(name, shape, options):
    """Weights and keys of each client under vmap, as lanes have them."""

    def value_and_gradient(impl):
        model = make_model(name, shape, 4, **options, conv_impl=impl)
        clients, keys, batch = (
            perturbed_clients(model),
            jax.random.split(KEY, 3),
            random_batch(model, 6),
        )

        def loss(params, state, key):
            variables = {"params": params, "state": state}
            return (model.apply(variables, batch["x"], train=True, key=key)[0] ** 2).sum()

        program = jax.jit(jax.vmap(jax.value_and_grad(loss)))
        return program(clients["params"], clients["state"], keys)

    (value, gradient), (expected, other) = map(value_and_gradient, ("im2col", "native"))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert_trees_close(gradient, other, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "options", "impl", "scale"),
    [
        ("convnet", 4, {"width": 3, "depth": 2}, "auto", 1),
        ("cnn", 16, {}, "auto", 0.02),
        ("convnet", 4, {"width": 3, "depth": 2}, "native", 1),
    ],
)
def test_gradient_through_training_step(name, size, options, impl, scale):
    """Trajectory matching's derivative: of a loss after one SGD step, by the training images.

    Against central differences in float64 along a random direction.
    """
    with enable_x64(True):
        model = make_model(name, (size, size, 1), 3, **options, conv_impl=impl)
        params = jax.tree.map(lambda p: scale * p.astype(jnp.float64), perturbed(model)["params"])
        train, test = random_batch(model, 3), random_batch(model, 4, jax.random.fold_in(KEY, 3))
        train, test = jax.tree.map(
            lambda a: a.astype(jnp.float64) if a.ndim == 4 else a, (train, test)
        )

        def after_one_step(images):
            loss = partial(sum_of_cross_entropies, model)
            gradient = jax.grad(loss)(params, {**train, "x": images})
            stepped = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
            return sum_of_cross_entropies(model, stepped, test)

        direction = jax.random.normal(jax.random.fold_in(KEY, 4), train["x"].shape, jnp.float64)
        evaluate = jax.jit(jax.value_and_grad(after_one_step))
        slope = (evaluate(train["x"])[1] * direction).sum()
        step = 1e-6
        up, down = (evaluate(train["x"] + sign * step * direction)[0] for sign in (1, -1))
        assert slope.dtype == jnp.float64
        np.testing.assert_allclose(slope, (up - down) / (2 * step), rtol=1e-6)


# Batch normalization


def test_batch_norm_running_statistics():
    """After two batches, by hand: 0.9 old + 0.1 new, variance unbiased; evaluation uses them."""
    model = make_model("convnet", (8, 8, 1), 4, width=3, depth=1, norm="batch")
    variables = perturbed(model)
    conv = to_float64(variables["params"]["conv1"])
    mean, variance = np.zeros(3), np.ones(3)
    for seed in (1, 2):
        x = 2 * jax.random.normal(jax.random.key(seed), (5, 8, 8, 1)) + 1
        _, state = train_apply(model)(variables, x)
        variables = {**variables, "state": state}
        features = convolve(x, conv, 1)
        mean = 0.9 * mean + 0.1 * features.mean((0, 1, 2))
        variance = 0.9 * variance + 0.1 * features.var((0, 1, 2), ddof=1)
    np.testing.assert_allclose(state["norm1"]["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(state["norm1"]["variance"], variance, rtol=1e-5)

    logits, unchanged = jax.jit(partial(model.apply, train=False))(variables, x)
    jax.tree.map(np.testing.assert_array_equal, unchanged, state)
    norm = to_float64(variables["params"]["norm1"])
    y = (features - mean) / np.sqrt(variance + 1e-5) * norm["scale"] + norm["bias"]
    y = np.maximum(y, 0).reshape(5, 4, 2, 4, 2, 3).mean((2, 4)).reshape(5, -1)
    head = variables["params"]["head"]
    np.testing.assert_allclose(logits, dense(y, head), rtol=1e-4, atol=1e-4)


def test_batch_norm_under_vmap():
    model = make_model("convnet", (8, 8, 1), 4, width=3, depth=1, norm="batch")
    apply = partial(train_apply(model), perturbed(model))
    x = jax.random.normal(KEY, (2, 5, 8, 8, 1)) * jnp.array([1.0, 9.0]).reshape(2, 1, 1, 1, 1)
    together = jax.jit(jax.vmap(apply))(x)
    for client in range(2):
        theirs = jax.tree.map(lambda leaf, client=client: leaf[client], together)
        assert_trees_close(theirs, apply(x[client]), 1e-5)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_evaluation_is_per_sample(norm):
    model = make_model("convnet", (8, 8, 1), 4, width=3, depth=1, norm=norm)
    apply = jax.jit(partial(model.apply, perturbed(model), train=False))
    x = jax.random.normal(KEY, (6, 8, 8, 1))
    np.testing.assert_allclose(apply(x)[0][:2], apply(x[:2])[0], rtol=1e-4, atol=1e-5)


# Micro-batches


@pytest.mark.parametrize("batch_size", [8, 10, 7])
@pytest.mark.parametrize("micro_batch", [None, 1, 4, 100])
def test_micro_batches_match_closed_form(batch_size, micro_batch):
    """Least squares in closed form, with a sum beside the loss."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(batch_size, 3)), draw.normal(size=batch_size)
    weights = draw.normal(size=3)

    def loss(weights, batch):
        error = batch["x"] @ weights - batch["y"]
        return (error**2).sum(), {"error": error.sum()}

    in_pieces = jax.jit(micro_batched_value_and_grad(loss, micro_batch, has_aux=True))
    (value, aux), gradient = in_pieces(jnp.float32(weights), {"x": x, "y": y})
    error = x @ weights - y
    np.testing.assert_allclose(value, (error**2).sum(), rtol=1e-5)
    np.testing.assert_allclose(aux["error"], error.sum(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, 2 * x.T @ error, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("batch_size", "micro_batch", "pieces"), [(32, 8, 4), (10, 8, 2), (7, 4, 1)]
)
def test_micro_batches_loop(batch_size, micro_batch, pieces):
    """The program loops over equal pieces on CPU, and does not split where none is large enough."""

    def loss(weights, x):
        return (x @ weights).sum()

    program = jax.make_jaxpr(micro_batched_value_and_grad(loss, micro_batch))
    text = str(program(jnp.ones(3), jnp.ones((batch_size, 3))))
    on_cpu = jax.default_backend() == "cpu"
    assert (f"length={pieces}" in text) == (on_cpu and pieces > 1)


def test_micro_batches_under_vmap():
    """A ConvNet with one set of weights per client, under vmap as lanes are."""
    model = make_model("convnet", (8, 8, 1), 4, width=3, depth=1)
    clients, batch = perturbed_clients(model)["params"], random_batch(model, 8)
    loss = partial(sum_of_cross_entropies, model)
    in_pieces, whole = (
        jax.jit(jax.vmap(micro_batched_value_and_grad(loss, size), (0, None)))(clients, batch)
        for size in (2, None)
    )
    assert_trees_close(in_pieces, whole, 1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "options", "micro_batch", "cached_samples"),
    [
        ("convnet", (28, 28, 1), {}, 2, 2),
        ("convnet", (32, 32, 3), {"width": 32}, 4, 4),
        ("convnet", (32, 32, 3), {"width": 32, "norm": "batch"}, None, 4),  # mixes samples
        ("fsl_cnn", (32, 32, 3), {}, None, 4),  # a dropout mask is of the whole batch
        ("resnet18", (32, 32, 3), {"stem": "imagenet"}, None, 32),  # 8x8 pixels of 64 channels
        ("resnet18", (32, 32, 3), {"stem": "cifar"}, None, 2),
        ("mlp", (28, 28, 1), {}, None, None),
    ],
)
def test_micro_batch_hint(name, shape, options, micro_batch, cached_samples):
    """Half a megabyte of the first layer's activations; none where training mixes samples."""
    model = make_model(name, shape, 10, **options)
    assert (model.micro_batch, model.cached_samples) == (micro_batch, cached_samples)


# Arithmetic


CNN = 24 * 24 * 32 * (5 * 5), 8 * 8 * 64 * (5 * 5 * 32) + 4 * 4 * 64 * 512 + 512 * 10
CONVNET = 64 * 4 * 27, 16 * 4 * 36 + 2 * 2 * 4 * 10
# Of 8x8 images and 4 filters the last stage sees one pixel; a shortcut of 1x1 begins stages 2 to 4.
RESNET = (
    64 * 4 * 9,
    4 * 64 * 4 * 9 * 4
    + sum(p * w * (w // 2) * (9 + 1 + 3 * 9 * 2) for p, w in ((16, 8), (4, 16), (1, 32)))
    + 8 * 4 * 10,
)


@pytest.mark.parametrize("impl", ["native", "im2col"])
@pytest.mark.parametrize(
    ("name", "shape", "options", "products"),
    [
        ("cnn", (28, 28, 1), {}, CNN),
        ("convnet", (8, 8, 3), {"width": 4, "depth": 2}, CONVNET),
        ("resnet18", (8, 8, 1), {"width": 4, "stem": "cifar"}, RESNET),
    ],
)
def test_training_flops(name, shape, options, products, impl):
    """By hand: outputs times what each sums over; no input gradient for the first layer."""
    first, others = products
    model = make_model(name, shape, 10, conv_impl=impl, **options)
    assert count_training_flops(model) == 2 * (2 * first + 3 * others)
