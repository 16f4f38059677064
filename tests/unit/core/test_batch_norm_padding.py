"""Batch norm ignores the samples that fill up a minibatch, as PyTorch's on partial minibatches."""

import logging
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from chex import assert_trees_all_close
from support.algorithm_builders import bind_options, make_method_federation
from support.data import IMAGE_SHAPE, NUM_CLASSES, SERVER_EXAMPLES, make_user_dataset
from support.markers import slow_case
from support.networks import make_centered_model
from support.reference_loop import (
    ReferenceFedAvg,
    flatten_inputs,
    flatten_params,
    logit_gradient,
    server_batches,
)
from support.small_federation import make_small_federation, round_key
from support.small_runs import make_spec
from support.x64 import enable_x64

from fedjax_het import simulate
from fedjax_het.algorithms.dynafed import DynaFedOptions, _make_task
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.fedbn import fedbn
from fedjax_het.algorithms.fedmix import FedMixOptions, fedmix
from fedjax_het.algorithms.moon import _ContrastiveAux, _loss_and_gradient, moon
from fedjax_het.condensation import PoolTask, SoftLabelTargets, SyntheticPool
from fedjax_het.condensation.synthetic_pool import (
    _make_batch_loss,
    make_masked_shuffled_batches,
    train_on_synthetic_pool,
)
from fedjax_het.core.client_algorithm import Batch, ClientContext
from fedjax_het.core.local_training import ClientTrainState, LocalTraining, ServerMessage
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.core.server_parallelism import SINGLE_DEVICE
from fedjax_het.core.server_training import EpochRange
from fedjax_het.core.task import Task
from fedjax_het.nn import add_projection_head, make_model, to_model
from fedjax_het.nn.adapters import make_flax_model
from fedjax_het.nn.layers import BATCH_NORM_MOMENTUM, NORM_EPSILON, BatchNorm, Linear

HIDDEN = 5
NUM_REAL, BATCH = 5, 8

# --- the layer: PyTorch's formulas in NumPy ------------------------------------------------------


def normalize_rows(x, scale, bias):
    """Batch norm of rows `[n, C]`: output, batch mean and unbiased variance, and the backward pass.

    PyTorch's: the biased variance normalizes, the running one averages the unbiased variance.
    """
    mean, variance = x.mean(0), x.var(0)
    deviation = np.sqrt(variance + NORM_EPSILON)
    unit = (x - mean) / deviation

    def backward(slope):
        by_unit = slope * scale
        centered = by_unit - by_unit.mean(0) - unit * (by_unit * unit).mean(0)
        return centered / deviation, (slope * unit).sum(0), slope.sum(0)

    return unit * scale + bias, mean, x.var(0, ddof=1), backward


def test_layer_matches_pytorch_formulas():
    rng = np.random.default_rng(0)
    x = rng.normal(2, 3, (BATCH, 3, 2, 4))
    x[NUM_REAL:] *= 50  # of which nothing may be seen
    slope, scale, bias = rng.normal(size=x.shape), rng.normal(size=4), rng.normal(size=4)
    slope[NUM_REAL:] = 0  # their loss is masked
    old_mean, old_variance = rng.normal(size=4), rng.uniform(1, 2, 4)
    variables = {
        "params": {"scale": scale, "bias": bias},
        "state": {"mean": old_mean, "variance": old_variance},
    }
    mask = (np.arange(BATCH) < NUM_REAL).reshape(-1, 1, 1, 1)

    def forward(params, x):
        both = {**variables, "params": params}
        y, updates = BatchNorm().apply(both, x, True, mask=mask, mutable=["state"])
        return (y * slope).sum(), (y, updates["state"])

    inputs = jax.tree.map(jnp.float32, (variables["params"], x))
    gradients, (y, state) = jax.jit(jax.grad(forward, argnums=(0, 1), has_aux=True))(*inputs)
    rows, row_slopes = (array[:NUM_REAL].reshape(-1, 4) for array in (x, slope))
    expected, mean, variance, backward = normalize_rows(rows, scale, bias)
    by_x, by_scale, by_bias = backward(row_slopes)
    close = partial(np.testing.assert_allclose, rtol=1e-6, atol=2e-6)
    close(y[:NUM_REAL].reshape(-1, 4), expected)
    close(state["mean"], old_mean + BATCH_NORM_MOMENTUM * (mean - old_mean))
    close(state["variance"], old_variance + BATCH_NORM_MOMENTUM * (variance - old_variance))
    close(gradients[1][:NUM_REAL].reshape(-1, 4), by_x)
    assert (gradients[1][NUM_REAL:] == 0).all()
    close(gradients[0]["scale"], by_scale, rtol=1e-5)
    close(gradients[0]["bias"], by_bias, rtol=1e-5)


# --- networks and losses: a minibatch that is filled up, and its real samples alone --------------


class UserNetwork(nn.Module):
    """A user's network with flax's batch norm, also in compiled and rematerialized layers."""

    num_classes: int

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(3, (3, 3))(x)
        x = nn.relu(nn.remat(nn.BatchNorm)(use_running_average=not train)(x))
        x = nn.relu(nn.jit(nn.BatchNorm)(use_running_average=not train)(x))
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Dense(5)(x.reshape(len(x), -1))))
        return nn.Dense(self.num_classes)(x)


class OwnLayerNetwork(nn.Module):
    """A user's network that centers its inputs itself."""

    num_classes: int

    @nn.compact
    def __call__(self, x, train, sample_mask=None):
        x = x.reshape(len(x), -1)
        mean = self.variable("statistics", "mean", jnp.zeros, x.shape[1:])
        if train:
            weights = jnp.ones(len(x)) if sample_mask is None else sample_mask
            x = x - (weights @ x) / weights.sum()
            mean.value += 0.5 * ((weights @ x) / weights.sum() - mean.value)
        return nn.Dense(self.num_classes)(x)


def pair_init(key):
    kernel = jax.random.normal(key, (int(np.prod(SHAPE)), 3))
    return {"params": {"kernel": kernel}, "statistics": {"mean": jnp.zeros(SHAPE)}}


def pair_apply(variables, x, train, sample_mask=None):
    mean = variables["statistics"]["mean"]
    if train:
        mean = x.mean(
            0, where=None if sample_mask is None else sample_mask[:, None, None, None] > 0
        )
    logits = (x - mean).reshape(len(x), -1) @ variables["params"]["kernel"]
    return logits, {"statistics": {"mean": mean}}


SHAPE = (8, 8, 3)
NETWORKS = {
    "convnet": lambda: make_model("convnet", SHAPE, 3, width=4, depth=2, norm="batch"),
    "resnet18 imagenet": lambda: make_model("resnet18", SHAPE, 3, width=2),
    "resnet18 cifar": lambda: make_model("resnet18", SHAPE, 3, width=2, stem="cifar"),
    "projection head": lambda: add_projection_head(NETWORKS["convnet"](), 4),
    "flax": lambda: to_model(UserNetwork, SHAPE, 3),
    "flax, own layer": lambda: to_model(OwnLayerNetwork, SHAPE, 3),
    "pair": lambda: to_model((pair_init, pair_apply), SHAPE, 3),
}


def make_batches(shape=SHAPE):
    """Return a minibatch that is filled up, and its real samples alone."""
    rng = np.random.default_rng(1)
    images, labels = rng.normal(size=(BATCH, *shape)), rng.integers(0, 3, BATCH)
    images[NUM_REAL:] *= 9
    mask = (np.arange(BATCH) < NUM_REAL).astype(np.float32)
    padded = jax.tree.map(jnp.asarray, Batch(images, labels, mask, np.int32(0)))
    return padded, padded._replace(**{f: getattr(padded, f)[:NUM_REAL] for f in padded._fields[:3]})


def assert_padding_has_no_effect(compute, *, tolerance=1e-6):
    """Compare `compute(batch)` of both minibatches; some layers compute in float32."""
    padded, real = make_batches()
    actual, expected = jax.jit(compute)(padded), jax.jit(compute)(real)
    assert_trees_all_close(actual, expected, rtol=tolerance, atol=tolerance)
    unmasked = jax.jit(compute)(padded._replace(mask=jnp.ones(BATCH)))
    with pytest.raises(AssertionError):
        assert_trees_all_close(unmasked, expected, rtol=1e-2, atol=1e-2)


def to_float64(tree):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float64), tree)


def make_task(network):
    with enable_x64(False):  # flax's statistics are float32
        task = Task(NETWORKS[network](), (0.0,) * 3, (1.0,) * 3)
    return task, to_float64(jax.jit(task.model.init)(jax.random.key(0)))


@pytest.mark.parametrize(
    "network",
    [
        name if name in ("convnet", "projection head", "pair") else slow_case(name)
        for name in NETWORKS
    ],
)
def test_padding_has_no_effect_on_network(network):
    """On loss, gradient and running statistics."""
    with enable_x64():
        task, variables = make_task(network)
        assert_padding_has_no_effect(lambda batch: task.loss_and_gradient(variables, batch, None))


@pytest.mark.slow
def test_padding_has_no_effect_on_moon():
    with enable_x64():
        task, variables = make_task("projection head")
        other = to_float64(task.model.init(jax.random.key(1)))
        local = ClientTrainState(variables, (), _ContrastiveAux(other, jnp.float64(3)))
        hp = {"moon_tau": jnp.float64(0.5)}
        context = ClientContext(hp, ServerMessage(other), client=None, key=None)
        training = LocalTraining(task, "sgd")
        assert_padding_has_no_effect(
            lambda batch: _loss_and_gradient(training, context, local, batch), tolerance=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("coefficient", ["expansion", slow_case("printed")])
def test_padding_has_no_effect_on_fedmix(coefficient):
    """Its derivatives by images pass through the statistics of the minibatch."""
    rng = np.random.default_rng(0)
    data = rng.normal(size=(13, *SHAPE)).astype(np.float32), rng.integers(0, 3, 13)
    build = partial(fedmix, options=FedMixOptions(coefficient=coefficient, mean_size=4))
    hp = {"local_lr": 0.1, "mixup_lambda": 0.4}
    models = []
    for batch_size in (3, 5):  # the client's three samples, alone and filled up
        federation = make_small_federation(
            build, hp=hp, model=NETWORKS["convnet"](), data=data, sizes=(3,), batch_size=batch_size
        )
        state, _ = federation.run(1)
        models.append(federation.algorithm.global_model(state))
    assert_trees_all_close(*models, atol=1e-6)


@pytest.mark.parametrize("matching", [False, slow_case(True)])
def test_padding_has_no_effect_on_pool(matching):
    """FedDM's and FedAF's server."""
    with enable_x64():
        model = NETWORKS["convnet"]()
        variables = to_float64(jax.jit(model.init)(jax.random.key(0)))
        soft = jax.nn.softmax(jnp.arange(9.0).reshape(3, 3) % 4)
        targets = SoftLabelTargets(soft, jnp.ones(3, bool), jnp.float64(2), jnp.float64(2))
        loss = _make_batch_loss(PoolTask(model, targets if matching else None))
        assert_padding_has_no_effect(lambda batch: loss(variables, batch, None))


def test_padding_has_no_effect_on_dynafed():
    with enable_x64():
        model = NETWORKS["convnet"]()
        variables = to_float64(jax.jit(model.init)(jax.random.key(0)))
        task = _make_task(model, variables, DynaFedOptions(), SINGLE_DEVICE)

        def mean_loss(params, batch):
            samples = batch.inputs, jnp.eye(3)[batch.labels] * 4, batch.mask / batch.mask.sum()
            return task.sum_losses(params, samples, None)

        compute = lambda batch: jax.value_and_grad(mean_loss)(variables["params"], batch)  # noqa: E731
        assert_padding_has_no_effect(compute)


@pytest.mark.parametrize(("takes_mask", "batch_size"), [(True, 4), (False, 4), (False, 1)])
def test_warns_of_networks_without_mask(takes_mask, batch_size, caplog):
    """Three of six clients have 9 examples, the others 8."""
    model = make_centered_model()._replace(takes_sample_mask=takes_mask)
    spec = make_spec(rounds=1, batch_size=batch_size, model=None)
    with caplog.at_level(logging.WARNING):
        simulate(spec, dataset=make_user_dataset(), network=model, progress=None)
    warnings = [line for line in caplog.messages if "sample_mask" in line]
    assert len(warnings) == (not takes_mask and batch_size == 4)
    assert all("3 clients" in line for line in warnings)


# --- rounds of methods: plain loops in NumPy float64 ---------------------------------------------


class OneHiddenLayer(nn.Module):
    """A hidden layer with batch norm; returns features and logits."""

    @nn.compact
    def __call__(self, x, train):
        x = Linear(HIDDEN, name="hidden")(x.reshape(len(x), -1))
        x = jax.nn.relu(BatchNorm(name="norm")(x[:, None, None], train)[:, 0, 0])
        return x, Linear(NUM_CLASSES, name="head")(x)


def get_leaves(variables):
    """Return weights and running statistics by name, float64."""
    params, statistics = variables["params"], variables["state"]["norm"]
    leaves = {f"{layer}_{name}": a for layer, part in params.items() for name, a in part.items()}
    leaves |= {name: statistics[name] for name in ("mean", "variance")}
    return {name: np.asarray(leaf, np.float64) for name, leaf in leaves.items()}


NORM_NAMES = ("norm_scale", "norm_bias", "mean", "variance")


def compute_features(p, x):
    """Return the features in evaluation mode."""
    hidden = x @ p["hidden_kernel"] + p["hidden_bias"]
    unit = (hidden - p["mean"]) / np.sqrt(p["variance"] + NORM_EPSILON)
    return np.maximum(unit * p["norm_scale"] + p["norm_bias"], 0)


def cosine_and_gradient(a, b):
    sizes = [np.linalg.norm(v, axis=1, keepdims=True) for v in (a, b)]
    value = (a * b).sum(1, keepdims=True) / (sizes[0] * sizes[1])
    return value, b / (sizes[0] * sizes[1]) - value * a / sizes[0] ** 2


class BatchNormLoop(ReferenceFedAvg):
    """FedAvg of a network with batch norm, in minibatches without padding; running statistics are
    averaged like weights."""

    def feature_slope(self, batch, z):
        """Gradient of further terms by the features."""
        return 0.0

    def sgd_step(self, model, x, y, lr, feature_slope=None):
        p = self.params(model)
        hidden = x @ p["hidden_kernel"] + p["hidden_bias"]
        out, mean, variance, backward = normalize_rows(hidden, p["norm_scale"], p["norm_bias"])
        z = np.maximum(out, 0)
        slope = logit_gradient(z @ p["head_kernel"] + p["head_bias"], y) / len(y)
        by_z = slope @ p["head_kernel"].T
        if feature_slope is not None:
            by_z = by_z + feature_slope(z)
        by_hidden, by_scale, by_bias = backward(by_z * (out > 0))
        slopes = {"head_kernel": z.T @ slope, "head_bias": slope.sum(0)}
        slopes |= {"norm_scale": by_scale, "norm_bias": by_bias}
        slopes |= {"hidden_kernel": x.T @ by_hidden, "hidden_bias": by_hidden.sum(0)}
        moved = {name: p[name] - lr * value for name, value in slopes.items()}
        for name, new in (("mean", mean), ("variance", variance)):
            moved[name] = p[name] + BATCH_NORM_MOMENTUM * (new - p[name])
        return flatten_params(moved)

    def local_step(self, model, batch):
        feature_slope = partial(self.feature_slope, batch)
        return self.sgd_step(model, batch.x, batch.y, self.hp["local_lr"], feature_slope)

    def run_sgd(self, model, x, y, batches, lr):
        for index in batches:
            model = self.sgd_step(model, x[index], y[index], lr)
        return model


class FedBNLoop(BatchNormLoop):
    def initial_client_model(self, client):
        body, own = self.params(self.global_vector), self.client_states[client]
        return flatten_params(body if own is None else body | {n: own[n] for n in NORM_NAMES})

    def finish_client(self, client, model, steps):
        self.client_states[client] = self.params(model)


class MOONLoop(BatchNormLoop):
    def feature_slope(self, batch, z):
        previous = self.client_states[batch.client]
        if previous is None:
            return 0.0
        others = self.params(self.global_vector), previous
        (near, by_near), (far, by_far) = (
            cosine_and_gradient(z, compute_features(p, batch.x)) for p in others
        )
        tau = self.hp["moon_tau"]
        share = 1 / (1 + np.exp((near - far) / tau))
        return self.hp["moon_mu"] / tau * share * (by_far - by_near) / len(z)

    def finish_client(self, client, model, steps):
        self.client_states[client] = self.params(model)


class FSLLoop(BatchNormLoop):
    """FSL, one epoch; the server's 7 examples are a minibatch of 4 and one of 3."""

    def update_server(self, r, clients, models):
        average = self.average_models(clients, models)
        key = fold_in_purpose(round_key(r), Purpose.SERVER)
        batches = list(server_batches(key, 1, len(SERVER_EXAMPLES[1])))
        steps = np.mean([len(self.minibatches(r, k)) for k in clients])
        lr = self.hp["gamma"] * self.hp["local_lr"] * steps / len(batches)
        x, y = flatten_inputs(SERVER_EXAMPLES[0]), SERVER_EXAMPLES[1]
        self.global_vector = self.run_sgd(average, x, y, batches, lr)


LOOPS = {
    "fedavg": (BatchNormLoop, fedavg, {}),
    "fedbn": (FedBNLoop, fedbn, {}),
    "moon": (MOONLoop, bind_options(moon), {"moon_mu": 2.0, "moon_tau": 0.4}),
    "fsl": (FSLLoop, None, {"gamma": 0.8}),
}


@pytest.mark.parametrize("name", LOOPS)
def test_rounds_match_float64_loop(name):
    """Clients have 7, 0, 12, 3, 9 and 20 examples, in minibatches of 4."""
    make_loop, build, hp = LOOPS[name]
    # A client of 9 or 7 examples would end with one example, whose batch norm has no variance.
    sizes = (7, 0, 10, 3, 6, 11)
    settings = {"model": make_flax_model(OneHiddenLayer(), IMAGE_SHAPE), "sizes": sizes}
    hp = {"local_lr": 0.1, **hp}
    if build is None:
        options = {"server_epochs": 1}
        federation = make_method_federation(name, options, {"server_lr": 1.0, **hp}, **settings)
    else:
        federation = make_small_federation(build, hp=hp, **settings)
    variables = federation.algorithm.global_model(federation.initial_state())
    loop = make_loop(federation, params=get_leaves(variables))
    for r in range(2):
        loop.run_round(r)
    state, _ = federation.run(2)
    loop.assert_model(get_leaves(federation.algorithm.global_model(state)), atol=1e-6)


def test_pool_training_matches_float64_loop():
    """FedDM's server: 11 images in minibatches of 4, 4 and 3."""
    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(13, *IMAGE_SHAPE)), rng.integers(0, NUM_CLASSES, 13)
    pool = SyntheticPool(jnp.float32(images), jnp.int32(labels), jnp.arange(13) < 11)
    model = make_flax_model(OneHiddenLayer(), IMAGE_SHAPE)
    variables, key = model.init(jax.random.key(0)), jax.random.key(1)
    settings = {"optimizer": optax.sgd(0.1), "epochs": EpochRange(2), "batch_size": 4}
    trained = train_on_synthetic_pool(PoolTask(model), variables, pool, key, **settings)
    federation = make_small_federation(fedavg, hp={"local_lr": 0.1}, model=model)
    loop = BatchNormLoop(federation, params=get_leaves(variables))
    plan = make_masked_shuffled_batches(key, pool.is_valid, 4)
    steps = [jax.tree.map(np.asarray, plan.take_step(step)) for step in range(6)]
    batches = [index[mask > 0] for index, mask in steps]
    assert [len(index) for index in batches] == [4, 4, 3, 4, 4, 3]
    vector = loop.run_sgd(loop.global_vector, flatten_inputs(images), labels, batches, 0.1)
    loop.assert_model(get_leaves(trained), model=vector, atol=1e-6)
