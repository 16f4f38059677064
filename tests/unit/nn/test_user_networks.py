"""Users' networks: flax modules and pairs beside the package's own."""

import math
from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close, assert_trees_all_equal
from flax import nnx

from fedjax_het import ConfigError, RunSpec, register_network
from fedjax_het.nn import (
    NETWORKS,
    Model,
    add_projection_head,
    compute_network_digest,
    count_training_flops,
    make_model,
    norm_mask,
    to_model,
)
from fedjax_het.utils.registry import REQUIRED

KEY = jax.random.key(0)
SHAPE, CLASSES = (9, 8, 2), 4
IMAGES = jax.random.normal(jax.random.key(1), (4, *SHAPE))


class Lenet(nn.Module):
    """Convolutions of every plain kind, batch norm, dropout."""

    num_classes: int
    hidden: int = 7
    rate: float = 0.5

    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Conv(6, (5, 5))(x))
        x = nn.Conv(5, (3, 3), strides=2)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Conv(3, (2, 2), padding="VALID", use_bias=False)(x)
        x = nn.Conv(3, (3, 3), padding=((1, 1), (2, 0)))(nn.relu(x))
        x = nn.Conv(3, (3, 3), padding="CIRCULAR")(x)
        x = nn.Conv(6, (3, 3), feature_group_count=3)(x)
        x = nn.relu(nn.Dense(self.hidden)(x.reshape(len(x), -1)))
        x = nn.Dropout(self.rate, deterministic=not train)(x)
        return nn.Dense(self.num_classes)(x)


def linear(num_classes):
    """A pair without collections."""

    def init(key, images):
        size = images[0].size
        return {"w": jax.random.normal(key, (size, num_classes)), "b": jnp.zeros(num_classes)}

    def apply(params, images):
        return images.reshape(len(images), -1) @ params["w"] + params["b"]

    return init, apply


# --- values


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
def test_flax_model_matches_module(train):
    """Values, gradients and running statistics, with the package's convolutions in its place."""
    model, module = to_model(Lenet, SHAPE, CLASSES, rate=0.0), Lenet(CLASSES, rate=0.0)
    plain = module.init(KEY, IMAGES, train=False)
    variables = model.init(KEY)
    expected = {"params": plain["params"], "state": plain["batch_stats"]}
    assert_trees_all_equal(variables, expected)

    def loss(params, apply):
        logits, state = apply(params)
        return (jnp.sin(logits)).sum(), (logits, state)

    def by_flax(params):
        logits, new = module.apply(
            {**plain, "params": params}, IMAGES, train, mutable=["batch_stats"]
        )
        return logits, new["batch_stats"]

    def by_model(params):
        return model.apply({**variables, "params": params}, IMAGES, train=train)

    actual, wanted = (
        jax.jit(jax.value_and_grad(partial(loss, apply=apply), has_aux=True))(variables["params"])
        for apply in (by_model, by_flax)
    )
    assert_trees_all_close(actual, wanted, rtol=2e-5, atol=2e-5)


def test_flax_convolutions_use_conv2d():
    model = to_model(Lenet, SHAPE, CLASSES)
    variables = jax.eval_shape(model.init, KEY)
    program = str(jax.make_jaxpr(partial(model.apply, train=False))(variables, IMAGES))
    assert program.count("conv_general_dilated[") == 1  # that of groups
    assert program.count("conv2d[") == 5


@pytest.mark.slow
def test_flax_dropout_follows_key():
    model = to_model(Lenet, SHAPE, CLASSES)
    variables = model.init(KEY)
    apply = jax.jit(partial(model.apply, variables, IMAGES, train=True))
    first, again, other = (apply(key=jax.random.key(seed))[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert abs(first - other).max() > 1e-3
    whole = to_model(Lenet, SHAPE, CLASSES, rate=0.0).apply(variables, IMAGES, train=True)[0]
    np.testing.assert_allclose(apply()[0], whole, rtol=1e-5, atol=1e-6)


# --- what methods ask for


def test_flax_features_head_and_norms():
    model = to_model(Lenet, SHAPE, CLASSES)
    variables = model.init(KEY)
    features, logits, state = model.embed(variables, IMAGES, train=True, key=KEY)
    same, same_state = model.apply(variables, IMAGES, train=True, key=KEY)
    assert features.shape == (4, 7) and model.head.path == ("Dense_1",)
    again = model.head.apply(model.head.get_parameters(variables), features)
    np.testing.assert_allclose(again, logits, rtol=1e-6)
    assert_trees_all_close((logits, state), (same, same_state), rtol=1e-5, atol=1e-6)
    marked = norm_mask(model, variables)
    assert sum(jax.tree.leaves(marked)) == 4 and all(jax.tree.leaves(marked["state"]))


def test_projection_head():
    model = add_projection_head(to_model(Lenet, SHAPE, CLASSES), 3)
    variables = model.init(KEY)
    assert "Dense_1" not in variables["params"]
    z, logits, _ = model.embed(variables, IMAGES, train=False)
    assert z.shape == (4, 3)
    again = model.head.apply(model.head.get_parameters(variables), z)
    np.testing.assert_allclose(again, logits, rtol=1e-6)


class Deterministic(nn.Module):
    """Features with the logits, another flag, two collections, a head within another module."""

    num_classes: int

    @nn.compact
    def __call__(self, x, deterministic=True):
        class Last(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(4, name="out")(x)

        seen = self.variable("count", "steps", lambda: jnp.zeros((), jnp.int32))
        if not deterministic:
            seen.value += 1
        x = nn.BatchNorm(use_running_average=deterministic, name="norm")(x)
        x = x.reshape(len(x), -1)
        return x, Last(name="last")(x)


def test_flax_collections_and_nested_head():
    model = to_model(Deterministic, SHAPE, CLASSES)
    variables = model.init(KEY)
    assert set(variables["state"]) == {"count", "batch_stats"}
    _, state = model.apply(variables, IMAGES, train=True)
    assert int(state["count"]["steps"]) == 1
    assert int(model.apply(variables, IMAGES, train=False)[1]["count"]["steps"]) == 0
    assert model.head.path == ("last", "out")
    marked = norm_mask(model, variables)
    assert all(jax.tree.leaves(marked["state"]["batch_stats"])) and marked["params"]["norm"]["bias"]
    assert not marked["state"]["count"]["steps"]
    projected = add_projection_head(model, 3)
    projected.embed(projected.init(KEY), IMAGES, train=False)


def test_flax_module_without_head():
    class Pooled(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Conv(CLASSES, (3, 3))(x).mean((1, 2))

    model = to_model(Pooled(), SHAPE, CLASSES)
    assert model.embed is None and model.head is None
    with pytest.raises(ConfigError, match=r"^network has no known `embed`.*, nor `head`"):
        add_projection_head(model)


# --- pairs


def test_training_flops_without_products():
    pair = (lambda key: {"w": jnp.ones(CLASSES)}, lambda p, x: x[:, 0, :CLASSES, 0] * p["w"])
    assert count_training_flops(to_model(pair, SHAPE, CLASSES)) == 0


def test_pair_signatures():
    init, apply = linear(CLASSES)
    model = to_model(lambda num_classes: linear(num_classes), SHAPE, CLASSES)
    variables = model.init(KEY)
    assert variables["state"] == {} and set(variables["params"]) == {"w", "b"}
    expected = apply(init(KEY, IMAGES), IMAGES)
    np.testing.assert_array_equal(model.apply(variables, IMAGES, train=True)[0], expected)

    def stateful_init(key, images, train):
        assert train is False
        return {"params": init(key, images), "seen": {"batches": jnp.zeros(())}}

    def stateful_apply(variables, images, train):
        seen = variables["seen"]["batches"]
        return apply(variables["params"], images), {"seen": {"batches": seen + 1.0 * train}}

    model = to_model((stateful_init, stateful_apply), SHAPE, CLASSES)
    variables = model.init(KEY)
    assert float(model.apply(variables, IMAGES, train=True)[1]["batches"]) == 1
    assert float(model.apply(variables, IMAGES, train=False)[1]["batches"]) == 0

    module = Lenet(CLASSES)
    of_module = to_model((module.init, module.apply), SHAPE, CLASSES)
    assert of_module.head.path == ("Dense_1",)


# --- the registry


def test_network_options():
    register_network("lenet", Lenet)
    assert NETWORKS["lenet"].description == "Convolutions of every plain kind, batch norm, dropout"
    assert NETWORKS["lenet"].options == {"hidden": 7, "rate": 0.5}
    params = make_model("lenet", SHAPE, CLASSES, hidden=3).init(KEY)["params"]
    assert params["Dense_0"]["bias"].shape == (3,)
    assert NETWORKS["mlp"].options == {"hidden": (128, 128)}
    assert {"width", "depth", "norm"} <= set(NETWORKS["convnet"].options)
    register_network("asking", lambda input_shape, size: Lenet(CLASSES, size))
    assert NETWORKS["asking"].options == {"size": REQUIRED}
    with pytest.raises(ConfigError, match="network 'asking' needs size"):
        make_model("asking", SHAPE, CLASSES)


def test_network_digest():
    networks = ((Lenet, {}), (Lenet, {"hidden": 8}), (Lenet, {"rate": 0.25}), (linear(CLASSES), {}))
    digests = {
        compute_network_digest(to_model(network, SHAPE, CLASSES, **options))
        for network, options in networks
    }
    assert len(digests) == 4
    assert compute_network_digest(to_model(Lenet, SHAPE, CLASSES, "other")) in digests


def scale_compiled(constant):
    return jax.jit(lambda x: constant * x)


def scale_gradient(constant):
    @jax.custom_vjp
    def scale(x):
        return x

    scale.defvjp(lambda x: (x, None), lambda _, gradient: (constant * gradient,))
    return scale


@pytest.mark.parametrize("make_scale", [scale_compiled, scale_gradient])
def test_digests_cover_inner_constants(make_scale):
    class Net(nn.Module):
        scale: Callable

        @nn.compact
        def __call__(self, x, train=False):
            return nn.Dense(CLASSES)(self.scale(x.reshape(len(x), -1)))

    size = math.prod(SHAPE)
    constants = np.arange(size, dtype=np.float32), np.ones(size, np.float32)
    digests = {
        compute_network_digest(to_model(Net(make_scale(jnp.asarray(constant))), SHAPE, CLASSES))
        for constant in (*constants, constants[0])
    }
    assert len(digests) == 2


# --- what cannot be used


def never(num_classes):
    raise RuntimeError("out of order")


class NoFlag(nn.Module):
    layer: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES)(self.layer(x).reshape(len(x), -1))


class GrowingState(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        seen = self.variable("seen", "batches", lambda: jnp.zeros(()))
        if train:
            seen.value = jnp.zeros(3)
        return nn.Dense(CLASSES)(x.reshape(len(x), -1))


class Twice(nn.Module):
    @nn.compact
    def __call__(self, x):
        logits = nn.Dense(CLASSES)(x.reshape(len(x), -1))
        return logits, logits


class TwoLayers(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = nn.relu(nn.Dense(5)(x.reshape(len(x), -1)))
        return nn.Dense(CLASSES)(hidden), nn.Dense(CLASSES)(hidden)


class Swapped(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = nn.relu(nn.Dense(CLASSES)(x.reshape(len(x), -1)))
        return nn.Dense(CLASSES)(hidden), hidden


class EarlyFeatures(nn.Module):
    @nn.compact
    def __call__(self, x):
        features = nn.Dense(5)(x.reshape(len(x), -1))
        return features, nn.Dense(CLASSES)(nn.Dense(6)(features))


def pair_of(params, apply=lambda params, x: jnp.zeros((len(x), CLASSES))):
    return (lambda key: params), apply


class Features(nn.Module):
    """Returns features by other operations than the layer reads, and in a compiled function."""

    @nn.jit
    @nn.compact
    def __call__(self, x):
        hidden = nn.Dense(5)(x.reshape(len(x), -1))
        return nn.relu(hidden), nn.Dense(CLASSES)(nn.relu(hidden))


def test_logits_may_repeat_the_operations_of_features():
    model = to_model(Features(), SHAPE, CLASSES)
    features, logits, _ = model.embed(model.init(KEY), IMAGES, train=False)
    assert features.shape == (len(IMAGES), 5) and logits.shape == (len(IMAGES), CLASSES)


class TwoOutputs(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(int(np.prod(SHAPE)), CLASSES, rngs=rngs)

    def __call__(self, x):
        logits = self.layer(x.reshape(len(x), -1))
        return x, logits


def make_two_outputs(rngs):
    return TwoOutputs(rngs)


BAD = {
    "no network": (3, {}, "network 'user' = 3: expected a flax.linen module or its class"),
    "makes none": (lambda num_classes: 3, {}, "network 'user' = 3: expected a flax"),
    "option": (Lenet, {"hiden": 3}, r"has no option 'hiden' \(it takes hidden, rate\); did you me"),
    "fails": (never, {}, r"network 'user': never fails \(RuntimeError: out of order\)"),
    "classes": (nn.Dense(3), {}, r"Dense.__call__ of images .* gives float32 .*: expected logits"),
    "few classes": (Lenet(3), {}, r"float32 \(2, 3\): expected logits, floats \(2, 4\)"),
    "batch norm": (NoFlag(nn.BatchNorm()), {}, r"but its batch norm \(layer\) requires one"),
    "dropout": (NoFlag(nn.Dropout(0.5)), {}, r"NoFlag.__call__ has no argument train.* dropout"),
    "state": (GrowingState(), {}, r"turns state\['batches'\], float32 \(\), into float32 \(3,\)"),
    "text": (pair_of({"a": {"w": "x"}}), {}, r"params\['a'\]\['w'\] of the variables is a str"),
    "integers": (pair_of({"w": jnp.zeros(3, int)}), {}, r"params\['w'\] of the variables is of ty"),
    "twice": (Twice(), {}, r"Twice returns one array twice: expected logits, or \(features"),
    "two layers": (TwoLayers(), {}, r"network 'user': TwoLayers returns two arrays, \(2, 4\) and"),
    "swapped": (
        Swapped(),
        {},
        r"Swapped returns two arrays.*expected logits \[B, C\], or \(features",
    ),
    "early features": (
        EarlyFeatures(),
        {},
        r"returns features \(2, 5\), but its last nn.Dense reads",
    ),
    "pair of features": (
        pair_of({"w": jnp.zeros(3)}, lambda p, x: (x, jnp.zeros((len(x), CLASSES)))),
        {},
        "apply returns two values, and the second one is no dict of collections: expected logits",
    ),
    "nnx": (
        make_two_outputs,
        {},
        r"TwoOutputs returns a tuple: expected one array, the logits; for",
    ),
    "statistics": (
        pair_of({"params": {"w": jnp.zeros(3)}, "stats": {"mean": jnp.zeros(3)}}),
        {},
        r"apply returns no new stats in training: expected \(logits, {'stats': ...}\), or",
    ),
    "no logits": (pair_of({"w": jnp.zeros(3)}, lambda p, x: "cat"), {}, "not a valid JAX type"),
}


@pytest.mark.parametrize("case", BAD)
def test_to_model_rejects_invalid_networks(case, monkeypatch):
    network, options, message = BAD[case]
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *a, **k: pytest.fail("compiled"))
    with pytest.raises(ConfigError, match=message) as error:
        to_model(network, SHAPE, CLASSES, **options)
    named = str(error.value).removeprefix("hiden = 3: ")  # what was written comes first
    assert "\n" not in named and named.startswith("network 'user'")


def test_register_network_rejects_invalid_names():
    with pytest.raises(
        ConfigError, match="name = 'mlp': expected a name that no network of the pack"
    ):
        register_network("mlp", Lenet)
    with pytest.raises(ConfigError, match="network 'seven' = 7: expected"):
        register_network("seven", 7)
    register_network("lenet", Lenet)
    with pytest.raises(ConfigError, match="model = 'lennet' is unknown: did you mean 'lenet'"):
        RunSpec(model="lennet").resolved()


def test_user_model():
    model = make_model("mlp", SHAPE, CLASSES)
    assert isinstance(to_model(model, SHAPE, CLASSES), Model)
    with pytest.raises(ConfigError, match=r"'user' = .*: expected one of \(4, 4, 1\) inputs"):
        to_model(model, (4, 4, 1), CLASSES)
