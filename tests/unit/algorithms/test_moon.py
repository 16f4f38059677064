"""MOON against a float64 loop with hand-made gradients, its limits, and its projection head."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from support.algorithm_builders import bind_options
from support.data import NUM_CLASSES, make_user_dataset
from support.reference_loop import ReferenceFedAvg, flatten_params, logit_gradient, run_and_compare
from support.small_federation import make_small_federation

from fedjax_het import Placement, simulate
from fedjax_het.algorithms.moon import (
    _ContrastiveAux,
    _loss_and_gradient,
    compute_contrastive_losses,
    moon,
)
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.core.client_algorithm import Batch, ClientContext, ClientInfo
from fedjax_het.core.local_training import ClientTrainState, LocalTraining, ServerMessage
from fedjax_het.core.task import Task
from fedjax_het.nn import Model, add_projection_head, count_parameters, make_model

HIDDEN = 3


def hidden_model() -> Model:
    """tanh features, of which the classifier is linear."""

    def init(key):
        shapes = {
            "w1": (4, HIDDEN),
            "b1": (HIDDEN,),
            "w2": (HIDDEN, NUM_CLASSES),
            "b2": (NUM_CLASSES,),
        }
        keys = jax.random.split(key, len(shapes))
        draw = lambda key, shape: 0.5 * jax.random.normal(key, shape)  # noqa: E731
        params = {n: draw(k, shapes[n]) for n, k in zip(shapes, keys, strict=True)}
        return {"params": params, "state": {}}

    def embed(variables, x, *, train, key=None):
        p = variables["params"]
        z = jnp.tanh(x.reshape(len(x), -1) @ p["w1"] + p["b1"])
        return z, z @ p["w2"] + p["b2"], variables["state"]

    def apply(variables, x, **how):
        return embed(variables, x, **how)[1:]

    return Model("hidden", (2, 2, 1), NUM_CLASSES, init, apply, None, embed=embed)


def cosine(a, b):
    """Of rows, and its gradient by the first."""
    sizes = [np.linalg.norm(v, axis=1, keepdims=True) for v in (a, b)]
    value = (a * b).sum(1, keepdims=True) / (sizes[0] * sizes[1])
    return value, b / (sizes[0] * sizes[1]) - value * a / sizes[0] ** 2


def features(p, x):
    return np.tanh(x @ p["w1"] + p["b1"])


def gradients(p, x, y, received, previous, mu, tau):
    """Of the mean of cross-entropy + mu * contrastive loss, in float64."""
    z = features(p, x)
    logits = z @ p["w2"] + p["b2"]
    slope = logit_gradient(logits, y)
    to_z = slope @ p["w2"].T
    if previous is not None:
        (near, d_near), (far, d_far) = (
            cosine(z, features(other, x)) for other in (received, previous)
        )
        share = np.exp(far / tau) / (np.exp(near / tau) + np.exp(far / tau))
        to_z = to_z + mu / tau * share * (d_far - d_near)
    inner = to_z * (1 - z**2)
    actual = {"w1": x.T @ inner, "b1": inner.sum(0), "w2": z.T @ slope, "b2": slope.sum(0)}
    return {name: total / len(y) for name, total in actual.items()}


class Contrastive(ReferenceFedAvg):
    """Clients keep the model of their last round."""

    def descent_direction(self, model, batch):
        kept = self.client_states[batch.client]
        previous = None if kept is None else self.params(kept)
        models = (self.params(self.global_vector), previous)
        numbers = (self.hp["moon_mu"], self.hp["moon_tau"])
        return flatten_params(gradients(self.params(model), batch.x, batch.y, *models, *numbers))

    def finish_client(self, client, model, steps):
        self.client_states[client] = model


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
def test_rounds_match_float64_loop(averaging):
    lr, mu, tau = 0.3, 2.0, 0.4
    federation = make_small_federation(
        bind_options(moon),
        hp={"local_lr": lr, "moon_mu": mu, "moon_tau": tau},
        model=hidden_model(),
        participation=0.5,
        averaging=averaging,
        epochs=2,
    )
    loop = Contrastive(federation)
    state = run_and_compare(loop, 4, atol=1e-5)
    assert loop.count_repeat_clients() >= 2
    for k, kept in enumerate(loop.client_states):
        assert int(state.clients.memory.has_trained[k]) == (kept is not None)
        if kept is not None:
            previous = state.clients.memory.variables["params"]["w1"][k]
            np.testing.assert_allclose(previous, loop.params(kept)["w1"], atol=1e-5)


# --- limits --------------------------------------------------------------------------------


def test_contrastive_loss_matches_paper():
    z, z_global, z_previous = np.random.default_rng(0).normal(size=(3, 5, 7))
    tau = 0.3
    near, far = (np.exp(cosine(z, other)[0][:, 0] / tau) for other in (z_global, z_previous))
    actual = compute_contrastive_losses(*map(jnp.float32, (z, z_global, z_previous)), tau)
    np.testing.assert_allclose(actual, -np.log(near / (near + far)), rtol=1e-5)
    nothing = jnp.zeros((5, 7))
    one = jnp.float32(z)
    for three in ((nothing, one, one), (one, nothing, nothing), (nothing, nothing, nothing)):
        slope = jax.grad(lambda z, *others: compute_contrastive_losses(z, *others, tau).sum())(
            *three
        )
        assert np.isfinite(slope).all()


# --- networks ------------------------------------------------------------------------------


def slopes(model, key=0, mask=None, previous_state=None, received_state=None):
    """The gradient on a batch of noise, the three models being drawn apart."""
    task = Task(model, (0.0,), (1.0,))
    one, received, previous = (model.init(jax.random.key(k)) for k in range(3))
    received = {**received, "state": received_state or received["state"]}
    previous = {**previous, "state": previous_state or previous["state"]}
    rng = np.random.default_rng(key)
    images = jnp.float32(rng.normal(size=(8, *model.input_shape)))
    mask = jnp.ones(8) if mask is None else jnp.float32(mask)
    batch = Batch(images, jnp.arange(8) % 3, mask, jnp.int32(0))
    local = ClientTrainState(one, (), _ContrastiveAux(previous, jnp.float32(1)))
    hp = {"moon_tau": jnp.float32(0.5)}
    facts = ClientInfo(jnp.int32(0), jnp.int32(8), jnp.int32(1), images)
    context = ClientContext(hp, ServerMessage(received), facts, jax.random.key(0))
    return jax.jit(partial(_loss_and_gradient, LocalTraining(task, "sgd")))(context, local, batch)


def test_micro_batches_and_padding_have_no_effect():
    model = make_model("mlp", (2, 2, 1), 3, hidden=(6,))
    whole = slopes(model._replace(micro_batch=None))
    pieces = slopes(model._replace(micro_batch=2))
    assert_trees_all_close(pieces, whole, rtol=1e-4, atol=1e-6)
    half = slopes(model._replace(micro_batch=None), mask=[1, 1, 1, 1, 0, 0, 0, 0])
    assert abs(float(half[0]) - float(whole[0])) > 1e-3


def test_other_models_are_in_evaluation_mode():
    """Their running statistics matter, and stay as they are."""
    model = make_model("convnet", (4, 4, 1), 3, width=3, depth=1, norm="batch")
    usual = slopes(model)
    state = jax.tree.map(lambda leaf: leaf + 0.5, model.init(jax.random.key(0))["state"])
    for other in ({"received_state": state}, {"previous_state": state}):
        actual = slopes(model, **other)
        gap = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), actual[1], usual[1])
        assert max(jax.tree.leaves(gap)) > 1e-4
        assert_trees_all_close(actual[2], usual[2])


def test_projection_head():
    body = make_model("convnet", (4, 4, 1), 3, width=3, depth=1, norm="batch")
    model = add_projection_head(body, 5)
    variables = model.init(jax.random.key(1))
    features, size = 2 * 2 * 3, 5
    left_out = features * 3 + 3
    added = features**2 + features + features * size + size + size * 3 + 3
    assert count_parameters(variables) == (
        count_parameters(body.init(jax.random.key(1))) - left_out + added
    )
    images = jnp.float32(np.random.default_rng(0).normal(size=(6, 4, 4, 1)))
    z, logits, state = model.embed(variables, images, train=True)
    params = jax.tree.map(np.float64, variables["params"])
    whole = {**variables["params"], "head": body.init(jax.random.key(0))["params"]["head"]}
    inner, _, inner_state = body.embed({**variables, "params": whole}, images, train=True)
    one, two, last = (params[name] for name in ("projection1", "projection2", "head"))
    middle = np.maximum(np.float64(inner) @ one["kernel"] + one["bias"], 0)
    expected = middle @ two["kernel"] + two["bias"]
    np.testing.assert_allclose(z, expected, atol=1e-5)
    np.testing.assert_allclose(logits, expected @ last["kernel"] + last["bias"], atol=1e-5)
    assert_trees_all_close(state, inner_state)
    for name, fan_in in (("projection1", features), ("projection2", features), ("head", size)):
        drawn = np.abs(params[name]["kernel"])
        assert 0.5 * fan_in**-0.5 < drawn.max() <= fan_in**-0.5


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"base": "moon"}])
def test_run_trains_network_with_head(options):
    settings = {"num_clients": 4, "rounds": 3, "partition": "iid", "protocol": "fedaf"}
    settings |= {"model": "mlp", "batch_size": 8, "local_epochs": 8, "seed": 1}
    name, hp = ("fsl" if options else "moon"), {"local_lr": 0.05, "server_lr": 1.0}
    spec = RunSpec(name, "user", options={**options, "projection": 6}, hp=hp, **settings)
    result = simulate(spec, dataset=make_user_dataset(), placement=Placement(lanes=1, devices=1))
    server = result.state.server
    params = (server.inner if options else server).variables["params"]
    assert params["projection2"]["kernel"].shape == (128, 6)
    assert params["head"]["kernel"].shape == (6, NUM_CLASSES)
    assert result.metrics["test_accuracy"][-1] > 0.5
