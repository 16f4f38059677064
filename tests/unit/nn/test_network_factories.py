"""Networks made by functions of `rngs` (flax.nnx) or of `key` (modules of one example)."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.markers import slow_case

from fedjax_het import ConfigError, RunSpec, register_network, simulate
from fedjax_het.nn import make_model, to_model

SHAPE, CLASSES = (8, 8, 1), 10
IMAGES = jax.random.normal(jax.random.key(1), (4, *SHAPE))
KEY = jax.random.key(0)


class Net(nnx.Module):
    """Convolution, batch norm, dropout and a list of layers."""

    def __init__(self, num_classes: int = 10, hidden: int = 16, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.first = nnx.Linear(256, hidden, rngs=rngs)
        self.last = nnx.Linear(hidden, num_classes, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x))).reshape(len(x), -1)
        return self.last(self.dropout(nnx.relu(self.first(x))))


def test_nnx_equals_module():
    """Evaluation, training without dropout, and running statistics, against the module itself."""
    model = to_model(Net, SHAPE, CLASSES, hidden=12)
    variables = model.init(KEY)
    assert variables["params"]["last"]["kernel"].shape == (12, CLASSES)
    assert variables["state"]["norm"].keys() == {"mean", "var"}
    module = Net(CLASSES, 12, rngs=nnx.Rngs(KEY))
    module.eval()
    np.testing.assert_allclose(model.apply(variables, IMAGES, train=False)[0], module(IMAGES))
    module.train()
    module.dropout.deterministic = True
    logits, state = model.apply(variables, IMAGES, train=True)
    np.testing.assert_allclose(logits, module(IMAGES), rtol=1e-6)
    np.testing.assert_allclose(state["norm"]["mean"], module.norm.mean[...], rtol=1e-6)
    assert model.norm_layers() == {("norm",)}
    assert model.apply(variables, IMAGES, train=False)[1] is variables["state"]


def test_nnx_dropout_follows_key():
    model = to_model(lambda rngs: Net(rngs=rngs), SHAPE, CLASSES)
    variables = model.init(KEY)
    keys = [jax.random.key(seed) for seed in (1, 1, 2)]
    first, again, other = (model.apply(variables, IMAGES, train=True, key=k)[0] for k in keys)
    np.testing.assert_array_equal(first, again)
    assert abs(first - other).max() > 1e-3


@jax.tree_util.register_dataclass
@dataclass
class Linear:
    """A module of one example, as in equinox; `inference` switches dropout off."""

    weight: Any
    bias: Any
    inference: bool = False

    def __call__(self, x, key=None):
        x = x.reshape(-1)
        if not self.inference:
            x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0)
        return x @ self.weight + self.bias


def make_linear(key, num_classes, scale: float = 0.1):
    return Linear(scale * jax.random.normal(key, (64, num_classes)), jnp.zeros(num_classes))


def test_single_example_module_is_mapped():
    model = to_model(make_linear, SHAPE, CLASSES, scale=0.2)
    variables = model.init(KEY)
    assert sorted(variables["params"]) == ["bias", "weight"]
    module = make_linear(KEY, CLASSES, 0.2)
    expected = IMAGES.reshape(4, -1) @ module.weight + module.bias
    for train in (False, True):
        logits = model.apply(variables, IMAGES, train=train)[0]
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)
    same = jnp.repeat(IMAGES[:1], 4, 0)
    dropped = model.apply(variables, same, train=True, key=KEY)[0]
    assert len(np.unique(np.asarray(dropped), axis=0)) == 4  # each example has its own key


@pytest.mark.slow
def test_runs_by_name_and_by_object():
    register_network("nnx_net", Net)
    spec = RunSpec(
        "fedavg", model="nnx_net", num_clients=3, rounds=1, network_options={"hidden": 8}
    )
    assert np.isfinite(simulate(spec).metrics["train_loss"]).all()
    spec = RunSpec("fedavg", num_clients=3, rounds=1)
    assert np.isfinite(simulate(spec, network=make_linear).metrics["train_loss"]).all()


class NnxCnn(nnx.Module):
    """The network `cnn` in flax.nnx."""

    def __init__(self, num_classes, *, rngs):
        self.convs = nnx.List(
            nnx.Conv(*channels, (5, 5), padding="VALID", rngs=rngs) for channels in CHANNELS
        )
        self.hidden = nnx.Linear(64, 512, rngs=rngs)
        self.head = nnx.Linear(512, num_classes, rngs=rngs)

    def __call__(self, x):
        for conv in self.convs:
            x = nnx.max_pool(nnx.relu(conv(x)), (2, 2), (2, 2))
        return self.head(nnx.relu(self.hidden(x.reshape(len(x), -1))))


class EquinoxCnn(eqx.Module):
    """The network `cnn` in equinox, for one image `[H, W, C]`."""

    convs: list
    hidden: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, num_classes, *, key):
        keys = jax.random.split(key, 4)
        self.convs = [
            eqx.nn.Conv2d(*channels, 5, key=k) for channels, k in zip(CHANNELS, keys, strict=False)
        ]
        self.hidden = eqx.nn.Linear(64, 512, key=keys[2])
        self.head = eqx.nn.Linear(512, num_classes, key=keys[3])

    def __call__(self, x):
        x = x.transpose(2, 0, 1)
        for conv in self.convs:
            x = eqx.nn.MaxPool2d(2, 2)(jax.nn.relu(conv(x)))
        x = x.transpose(1, 2, 0).reshape(-1)  # the order of flax
        return self.head(jax.nn.relu(self.hidden(x)))


CHANNELS = ((1, 32), (32, 64))


def convert_to_nnx(params):
    convs = {str(i): params[f"conv{i + 1}"] for i in range(2)}
    return {"convs": convs, "hidden": params["hidden"], "head": params["head"]}


def convert_to_equinox(params):
    converted = {}
    for i in range(2):
        layer = params[f"conv{i + 1}"]
        converted[f"convs[{i}].weight"] = layer["kernel"].transpose(3, 2, 0, 1)
        converted[f"convs[{i}].bias"] = layer["bias"][:, None, None]
    for name in ("hidden", "head"):
        converted[f"{name}.weight"] = params[name]["kernel"].T
        converted[f"{name}.bias"] = params[name]["bias"]
    return converted


@pytest.mark.parametrize(
    ("network", "convert"), [slow_case(NnxCnn, convert_to_nnx), (EquinoxCnn, convert_to_equinox)]
)
def test_cnn_equals_linen(network, convert):
    """Logits and gradients of the CNN in each library, from equal weights."""
    shape = (16, 16, 1)
    images = jax.random.normal(jax.random.key(2), (3, *shape))
    linen, other = make_model("cnn", shape, CLASSES), to_model(network, shape, CLASSES)
    variables, template = linen.init(KEY), other.init(KEY)
    converted = convert(variables["params"])
    assert jax.tree.map(jnp.shape, converted) == jax.tree.map(jnp.shape, template["params"])

    def compute(model, variables):
        def sum_squares(params):
            logits, _ = model.apply({**variables, "params": params}, images, train=True)
            return jnp.sum(logits**2), logits

        return jax.jit(jax.grad(sum_squares, has_aux=True))(variables["params"])

    gradients, logits = compute(linen, variables)
    other_gradients, other_logits = compute(other, {**template, "params": converted})
    np.testing.assert_allclose(other_logits, logits, atol=1e-6)
    for expected, actual in zip(
        jax.tree.leaves(convert(gradients)), jax.tree.leaves(other_gradients), strict=True
    ):
        np.testing.assert_allclose(actual, expected, atol=1e-6 * float(abs(expected).max()))


class StatefulNet(eqx.Module):
    """Batch norm and dropout in equinox."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, num_classes, *, key):
        first, last = jax.random.split(key)
        self.first = eqx.nn.Linear(64, 12, key=first)
        self.norm = eqx.nn.BatchNorm(12, axis_name="batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.5)
        self.last = eqx.nn.Linear(12, num_classes, key=last)

    def __call__(self, x, state, key=None):
        x, state = self.norm(self.first(x.reshape(-1)), state)
        return self.last(self.dropout(jax.nn.relu(x), key=key)), state


def make_stateful_net(key, num_classes=CLASSES):
    return eqx.nn.make_with_state(StatefulNet)(num_classes, key=key)


def test_equinox_state():
    """Batch statistics in training, and running statistics in evaluation, against equinox."""
    model = to_model(make_stateful_net, SHAPE, CLASSES)
    variables = model.init(KEY)
    module, state = make_stateful_net(KEY)

    @eqx.filter_jit
    def run(module, state):
        return jax.vmap(module, (0, None), (0, None), axis_name="batch")(IMAGES, state)

    training = eqx.tree_at(lambda m: m.dropout.inference, module, True)
    expected, new_state = run(training, state)
    logits, stats = model.apply(variables, IMAGES, train=True)
    np.testing.assert_allclose(logits, expected, atol=1e-6)
    for actual, wanted in zip(jax.tree.leaves(stats), jax.tree.leaves(new_state), strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-6)
    expected, _ = run(eqx.nn.inference_mode(module), new_state)
    evaluated = {**variables, "state": stats}
    logits, kept = model.apply(evaluated, IMAGES, train=False)
    np.testing.assert_allclose(logits, expected, atol=1e-6)
    assert kept is evaluated["state"]
    dropped = [model.apply(variables, IMAGES, train=True, key=jax.random.key(i))[0] for i in (1, 2)]
    assert abs(dropped[0] - dropped[1]).max() > 1e-3
    result = simulate(RunSpec("fedavg", num_clients=3, rounds=1), network=make_stateful_net)
    assert np.isfinite(result.metrics["train_loss"]).all()


WITH_WEIGHTS = "with weights: expected a function that draws them, for example lambda rngs: "
FAULTS = {
    f"network 'user' is a Net {WITH_WEIGHTS}Net(rngs=rngs)": lambda: Net(rngs=nnx.Rngs(0)),
    f"network 'user' is a Linear {WITH_WEIGHTS}": lambda: make_linear(KEY, 3),
    f"network 'user' is a Net {WITH_WEIGHTS}": lambda: lambda: Net(rngs=nnx.Rngs(0)),
    "a function of rngs returned a int: expected an nnx module": lambda: lambda rngs: 3,
    "a function of key returned a int: expected a module": lambda: lambda key: 3,
    "gives float32 (2, 5): expected logits, floats (2, 10)": lambda: lambda rngs: Net(5, rngs=rngs),
}


@pytest.mark.parametrize("message", FAULTS)
def test_faults_are_one_line(message):
    with pytest.raises(ConfigError) as raised:
        to_model(FAULTS[message](), SHAPE, CLASSES)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_methods_with_features_name_the_networks_that_have_them():
    with pytest.raises(ConfigError, match=r"the output of its last nn\.Dense"):
        simulate(RunSpec("moon", num_clients=3, rounds=1), network=make_linear)
