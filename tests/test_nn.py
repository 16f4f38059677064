"""Networks: parameter counts, initialisation, and values and gradients against oracles."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.errors import ConfigError
from fedjax_het.nn import (
    conv2d,
    count_parameters,
    make_model,
    micro_batched_value_and_grad,
)

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
    ],
)
def test_parameter_counts(name, shape, classes, options, count):
    model = make_model(name, shape, classes, **options)
    variables = model.init(KEY)
    assert count_parameters(variables) == count
    logits, state = model.apply(variables, jnp.ones((2, *shape)), train=False)
    assert logits.shape == (2, classes)
    assert jax.tree.structure(state) == jax.tree.structure(variables["state"])
    assert bool(variables["state"]) == (options.get("norm") == "batch")


def test_variables_are_plain_dicts():
    def check(tree):
        assert type(tree) is dict or isinstance(tree, jax.Array)
        for branch in tree.values() if type(tree) is dict else ():
            check(branch)

    check(make_model("convnet", (8, 8, 1), 10, width=4, norm="batch").init(KEY))


@pytest.mark.parametrize(("name", "shape"), [("mlp", (28, 28, 1)), ("convnet", (32, 32, 3))])
def test_initialisation_is_pytorchs(name, shape):
    """Every weight and bias uniform on ±1/sqrt(fan_in): bounds, mean and variance."""
    params = make_model(name, shape, 100).init(KEY)["params"]
    for layer, leaves in params.items():
        if layer.startswith("norm"):
            np.testing.assert_array_equal(leaves["scale"], 1)
            np.testing.assert_array_equal(leaves["bias"], 0)
            continue
        bound = 1 / np.sqrt(np.prod(leaves["kernel"].shape[:-1]))
        for leaf in leaves.values():
            values = np.asarray(leaf, np.float64).ravel() / bound
            assert np.abs(values).max() <= 1 + 1e-6
            assert np.abs(values).max() > 1 - 10 / values.size
            # Five standard errors; a uniform on ±1 has variance 1/3 and fourth moment 1/5.
            assert abs(values.mean()) < 5 * np.sqrt(1 / 3 / values.size)
            assert abs((values**2).mean() - 1 / 3) < 5 * np.sqrt((1 / 5 - 1 / 9) / values.size)


def test_init_depends_on_the_key_alone():
    model = make_model("mlp", (8, 8, 1), 10)
    first, again, other = (model.init(jax.random.key(seed)) for seed in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first["params"]["head"]["kernel"], other["params"]["head"]["kernel"])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("convnext", (8, 8, 1), 10), "convnet"),
        (("convnet", (8, 8), 10), "input_shape"),
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
    ],
)
def test_bad_options_name_what_would_be_right(arguments, word):
    *positional, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises(ConfigError, match=word) as error:
        make_model(*positional, **options)
    assert "\n" not in str(error.value)


# Convolution


def convolve_in_float64(x, kernel, padding):
    x, kernel = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    x = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[:2], axis=(1, 2))
    return np.einsum("bhwirc,rcio->bhwo", windows, kernel)


CONVOLUTIONS = [(3, 1), (3, 3), (5, 0), (5, 2), (5, 3), (1, 0)]


@pytest.mark.parametrize(("size", "padding"), CONVOLUTIONS)
@pytest.mark.parametrize("impl", ["native", "im2col"])
def test_convolution_against_numpy(size, padding, impl):
    x = jax.random.normal(KEY, (2, 9, 7, 3))
    kernel = jax.random.normal(jax.random.fold_in(KEY, 1), (size, size, 3, 4))
    expected = convolve_in_float64(x, kernel, padding)
    np.testing.assert_allclose(conv2d(x, kernel, padding, impl), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("size", "padding"), CONVOLUTIONS)
@pytest.mark.parametrize("clients", [0, 3])
def test_convolution_gradients_agree(size, padding, clients):
    """First and second reverse derivatives, with one kernel and with one per client."""
    lead = (clients,) if clients else ()
    x = jax.random.normal(KEY, (*lead, 2, 7, 8, 2))
    kernel = jax.random.normal(jax.random.fold_in(KEY, 1), (*lead, size, size, 2, 3)) / size

    def derivatives(impl):
        def loss(x, kernel):
            return jnp.sin(conv2d(x, kernel, padding, impl)).sum()

        def squared_gradient(x, kernel):
            return sum((g**2).sum() for g in jax.grad(loss, argnums=(0, 1))(x, kernel))

        both = [jax.grad(f, argnums=(0, 1)) for f in (loss, squared_gradient)]
        return [(jax.vmap(f) if clients else f)(x, kernel) for f in both]

    assert_trees_close(derivatives("im2col"), derivatives("native"), 1e-5)


# Networks


def forward_in_float64(params, x, first_padding, norm, depth):
    x, params = np.asarray(x, np.float64), jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    for block in range(1, depth + 1):
        conv = params[f"conv{block}"]
        x = convolve_in_float64(x, conv["kernel"], first_padding if block == 1 else 1)
        x = x + conv["bias"]
        if norm != "none":
            axes = (1, 2) if norm == "group" else (0, 1, 2)
            x = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)
            x = x * params[f"norm{block}"]["scale"] + params[f"norm{block}"]["bias"]
        x = np.maximum(x, 0)
        x = x[:, : x.shape[1] // 2 * 2, : x.shape[2] // 2 * 2]
        x = (x[:, ::2, ::2] + x[:, 1::2, ::2] + x[:, ::2, 1::2] + x[:, 1::2, 1::2]) / 4
    return x.reshape(len(x), -1) @ params["head"]["kernel"] + params["head"]["bias"]


def perturbed(variables):
    """Parameters away from where scales are one and shifts zero."""
    leaves, structure = jax.tree.flatten(variables["params"])
    moved = [
        leaf + 0.2 * jax.random.normal(jax.random.fold_in(KEY, 10 + i), leaf.shape)
        for i, leaf in enumerate(leaves)
    ]
    return {**variables, "params": jax.tree.unflatten(structure, moved)}


@pytest.mark.parametrize("norm", ["group", "batch", "none"])
@pytest.mark.parametrize(
    ("shape", "depth", "first_padding"),
    [((28, 28, 1), 3, 3), ((8, 8, 1), 3, 1), ((13, 10, 3), 2, 1)],
)
def test_convnet_against_numpy(norm, shape, depth, first_padding):
    model = make_model("convnet", shape, 5, width=6, depth=depth, norm=norm)
    variables = perturbed(model.init(KEY))
    x = jax.random.normal(jax.random.fold_in(KEY, 2), (3, *shape))
    expected = forward_in_float64(variables["params"], x, first_padding, norm, depth)
    logits, _ = model.apply(variables, x, train=True)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_mlp_against_numpy():
    model = make_model("mlp", (4, 5, 2), 3, hidden=(7, 6))
    variables = model.init(KEY)
    x = jax.random.normal(KEY, (5, 4, 5, 2))
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), variables["params"])
    expected = np.asarray(x, np.float64).reshape(5, -1)
    for layer in ("hidden1", "hidden2"):
        expected = np.maximum(expected @ params[layer]["kernel"] + params[layer]["bias"], 0)
    expected = expected @ params["head"]["kernel"] + params["head"]["bias"]
    np.testing.assert_allclose(model.apply(variables, x, train=True)[0], expected, atol=1e-5)


def test_instance_is_another_name_of_group():
    models = [make_model("convnet", (8, 8, 1), 4, width=3, norm=n) for n in ("group", "instance")]
    x = jax.random.normal(KEY, (2, 8, 8, 1))
    first, second = (m.apply(perturbed(m.init(KEY)), x, train=True)[0] for m in models)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("norm", ["group", "batch", "none"])
def test_network_gradients_agree_between_convolutions(norm):
    """Per-client weights under vmap, as lanes have them."""

    def gradients(impl):
        model = make_model("convnet", (8, 8, 1), 4, width=5, norm=norm, conv_impl=impl)
        clients = [perturbed(model.init(jax.random.key(seed))) for seed in range(3)]
        clients = jax.tree.map(lambda *leaves: jnp.stack(leaves), *clients)
        batch = random_batch(model, 4)

        def loss(params, state):
            logits, _ = model.apply({"params": params, "state": state}, batch["x"], train=True)
            return (logits**2).sum()

        return jax.vmap(jax.grad(loss))(clients["params"], clients["state"])

    assert_trees_close(gradients("im2col"), gradients("native"), 1e-5)


@pytest.mark.parametrize("impl", ["native", "im2col"])
def test_gradient_through_a_training_step(impl):
    """Trajectory matching's derivative: of a loss after one SGD step, by the training images.

    Against central differences in float64 along a random direction.
    """
    with jax.enable_x64(True):
        model = make_model("convnet", (8, 8, 1), 3, width=3, depth=2, conv_impl=impl)
        params = jax.tree.map(lambda p: p.astype(jnp.float64), perturbed(model.init(KEY))["params"])
        train, test = random_batch(model, 3), random_batch(model, 4, jax.random.fold_in(KEY, 3))
        train, test = jax.tree.map(
            lambda a: a.astype(jnp.float64) if a.ndim == 4 else a, (train, test)
        )

        def after_one_step(images):
            gradient = jax.grad(partial(sum_of_cross_entropies, model))(
                params, {**train, "x": images}
            )
            stepped = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
            return sum_of_cross_entropies(model, stepped, test)

        direction = jax.random.normal(jax.random.fold_in(KEY, 4), train["x"].shape, jnp.float64)
        slope = (jax.jit(jax.grad(after_one_step))(train["x"]) * direction).sum()
        step = 1e-6
        up, down = (
            jax.jit(after_one_step)(train["x"] + sign * step * direction) for sign in (1, -1)
        )
        assert slope.dtype == jnp.float64
        np.testing.assert_allclose(slope, (up - down) / (2 * step), rtol=1e-6)


# Batch normalisation


def test_running_statistics():
    """After two batches, by hand: 0.9 old + 0.1 new, variance unbiased; evaluation uses them."""
    model = make_model("convnet", (8, 8, 1), 4, width=3, depth=1, norm="batch")
    variables = perturbed(model.init(KEY))
    conv = jax.tree.map(lambda p: np.asarray(p, np.float64), variables["params"]["conv1"])
    mean, variance = np.zeros(3), np.ones(3)
    for seed in (1, 2):
        x = 2 * jax.random.normal(jax.random.key(seed), (5, 8, 8, 1)) + 1
        _, state = model.apply(variables, x, train=True)
        variables = {**variables, "state": state}
        features = convolve_in_float64(x, conv["kernel"], 1) + conv["bias"]
        mean = 0.9 * mean + 0.1 * features.mean((0, 1, 2))
        variance = 0.9 * variance + 0.1 * features.var((0, 1, 2), ddof=1)
    np.testing.assert_allclose(state["norm1"]["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(state["norm1"]["variance"], variance, rtol=1e-5)

    logits, unchanged = model.apply(variables, x, train=False)
    jax.tree.map(np.testing.assert_array_equal, unchanged, state)
    norm = jax.tree.map(lambda p: np.asarray(p, np.float64), variables["params"]["norm1"])
    y = (features - mean) / np.sqrt(variance + 1e-5) * norm["scale"] + norm["bias"]
    y = np.maximum(y, 0).reshape(5, 4, 2, 4, 2, 3).mean((2, 4)).reshape(5, -1)
    head = variables["params"]["head"]
    np.testing.assert_allclose(logits, y @ head["kernel"] + head["bias"], rtol=1e-4, atol=1e-4)


def test_statistics_stay_with_their_client():
    model = make_model("convnet", (8, 8, 1), 4, width=3, norm="batch")
    variables = model.init(KEY)
    x = jax.random.normal(KEY, (2, 5, 8, 8, 1)) * jnp.array([1.0, 9.0]).reshape(2, 1, 1, 1, 1)
    together = jax.vmap(lambda x: model.apply(variables, x, train=True))(x)
    for client in range(2):
        alone = model.apply(variables, x[client], train=True)
        assert_trees_close(jax.tree.map(lambda leaf: leaf[client], together), alone, 1e-5)  # noqa: B023


def test_evaluation_does_not_depend_on_the_rest_of_the_batch():
    for norm in ("group", "batch", "none"):
        model = make_model("convnet", (8, 8, 1), 4, width=3, norm=norm)
        variables = perturbed(model.init(KEY))
        x = jax.random.normal(KEY, (6, 8, 8, 1))
        whole, _ = model.apply(variables, x, train=False)
        part, _ = model.apply(variables, x[:2], train=False)
        np.testing.assert_allclose(whole[:2], part, rtol=1e-4, atol=1e-5)


# Micro-batches


@pytest.mark.parametrize("batch_size", [8, 10, 7])
@pytest.mark.parametrize("micro_batch", [None, 1, 4, 8, 100])
def test_micro_batches_change_nothing(batch_size, micro_batch):
    model = make_model("convnet", (8, 8, 1), 4, width=3)
    params = perturbed(model.init(KEY))["params"]
    batch = random_batch(model, batch_size)

    def loss(params, batch):
        value = sum_of_cross_entropies(model, params, batch)
        return value, {"count": jnp.ones_like(batch["y"]).sum()}

    expected = jax.value_and_grad(loss, has_aux=True)(params, batch)
    in_pieces = micro_batched_value_and_grad(loss, micro_batch, has_aux=True)
    assert_trees_close(jax.jit(in_pieces)(params, batch), expected, 1e-5)
    assert in_pieces(params, batch)[0][1]["count"] == batch_size


def test_micro_batches_under_vmap():
    model = make_model("convnet", (8, 8, 1), 4, width=3)
    clients = jax.vmap(model.init)(jax.random.split(KEY, 3))["params"]
    batch = random_batch(model, 8)
    loss = partial(sum_of_cross_entropies, model)
    in_pieces, whole = (
        jax.jit(jax.vmap(micro_batched_value_and_grad(loss, size), (0, None)))(clients, batch)
        for size in (2, None)
    )
    assert_trees_close(in_pieces, whole, 1e-5)


def test_micro_batch_hint():
    """1 MB of the first layer's activations; none where training mixes samples."""
    assert make_model("convnet", (28, 28, 1), 10).micro_batch == 2
    assert make_model("convnet", (32, 32, 3), 10, width=32).micro_batch == 8
    assert make_model("convnet", (32, 32, 3), 10, norm="batch").micro_batch is None
    assert make_model("mlp", (28, 28, 1), 10).micro_batch is None
