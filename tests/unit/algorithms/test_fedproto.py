"""FedProto against a float64 loop, its limit, and its predictions."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.algorithm_builders import make_method_federation
from support.data import BATCH_SIZE, CLIENT_SIZES, NUM_CLASSES
from support.reference_loop import ReferenceFedAvg, flatten_params, logit_gradient
from support.two_layers import (
    NUM_FEATURES,
    backpropagate,
    compute_features,
    compute_logits,
    make_two_layer_model,
)

from fedjax_het import ConfigError, RunSpec, simulate


class ReferenceFedProto(ReferenceFedAvg):
    """Every client has its own model; `prototypes` are those of the server by class."""

    distance = "samples"

    def __init__(self, federation, **settings):
        super().__init__(federation, **settings)
        self.prototypes = {}

    def init_client_state(self, client):
        return self.global_vector

    def initial_client_model(self, client):
        return self.client_states[client]

    def minibatches(self, r, client):
        """Without the last pass, which only measures."""
        batches = super().minibatches(r, client)
        return batches[: len(batches) - -(-self.client_sizes[client] // BATCH_SIZE)]

    def descent_direction(self, model, batch):
        params, n = self.params(model), len(batch.y)
        features = compute_features(params, batch.x)
        rows = logit_gradient(compute_logits(params, batch.x), batch.y) / n
        pull = np.zeros_like(features)
        for c, prototype in self.prototypes.items():
            held = batch.y == c
            if not held.any():
                continue
            if self.distance == "samples":
                pull[held] = 2 * (features[held] - prototype) / (n * NUM_FEATURES)
            else:
                pull[held] = 2 * (features[held].mean(0) - prototype) / held.sum()
        gradient = backpropagate(params, batch.x, rows, self.hp["fedproto_lambda"] * pull)
        return flatten_params(gradient)

    def finish_client(self, client, model, steps):
        self.client_states[client] = model

    def update_server(self, r, clients, models):
        features, labels = [], []
        for client, model in zip(clients, models, strict=True):
            held = self.federation.scheduler.partition.client_indices(client)
            features.append(compute_features(self.params(model), self.inputs[held]))
            labels.append(self.labels[held])
        features, labels = map(np.concatenate, (features, labels))
        self.prototypes |= {c: features[labels == c].mean(0) for c in np.unique(labels)}


class ByClasses(ReferenceFedProto):
    distance = "classes"


def make_federation(options=None, hp=None, **settings):
    settings = {"model": make_two_layer_model(), "client_test_model": "personal"} | settings
    return make_method_federation(
        "fedproto", options, hp={"local_lr": 0.3, **(hp or {})}, **settings
    )


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
@pytest.mark.parametrize(
    ("make_loop", "strength"),
    [(ReferenceFedProto, 3.0), (ByClasses, 0.2)],
    ids=["samples", "classes"],
)
def test_rounds_match_float64_loop(make_loop, strength, averaging):
    federation = make_federation(
        {"distance": make_loop.distance},
        {"fedproto_lambda": strength},
        participation=0.5,
        averaging=averaging,
        epochs=2,
    )
    start = federation.initial_state()
    loop = make_loop(federation, params=federation.personal_model(start, 0))
    for r in range(4):
        loop.run_round(r)
    assert loop.count_repeat_clients() >= 2
    state, _ = federation.run(4, start)
    for k in range(len(CLIENT_SIZES)):
        actual = federation.personal_model(state, k)
        loop.assert_model(actual, model=loop.client_states[k], atol=4e-6)
    for c, prototype in loop.prototypes.items():
        np.testing.assert_allclose(state.server.features[c], prototype, atol=4e-6)


def test_lambda_0_is_separate():
    settings = {"model": make_two_layer_model(), "participation": 0.5, "epochs": 2}
    alone = make_method_federation(
        "separate", hp={"local_lr": 0.3}, client_test_model="client", **settings
    ).train(3)
    shared = make_federation(hp={"fedproto_lambda": 0.0}, **settings).train(3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), shared, alone)


def test_classes_without_examples_have_no_prototype():
    """Until a client has them; afterwards they keep it."""
    labels = np.repeat([0, 1], [4, 6]).astype(np.int32)
    images = np.random.default_rng(0).normal(size=(10, 2, 2, 1)).astype(np.float32)
    settings = {"sizes": (4, 6), "data": (images, labels), "participation": 0.5, "rounds": 12}
    federation = make_federation(hp={"fedproto_lambda": 1.0}, **settings)
    state, round_ = federation.initial_state(), jax.jit(federation.algorithm.round)
    seen = set()
    for r in range(6):
        before, clients = state, np.asarray(federation.scheduler.draw_cohort(r)).tolist()
        state, info = round_(federation.hp, state, jax.random.key(r), federation.cohort(r))
        seen |= set(clients)
        assert set(np.flatnonzero(state.server.is_present)) == seen
        assert np.isfinite(info.train_loss)
        for c in {0, 1, 2} - set(clients):
            np.testing.assert_array_equal(state.server.features[c], before.server.features[c])
    assert seen == {0, 1}


@pytest.mark.parametrize("prediction", ["prototypes", "head"])
def test_prediction(prediction):
    federation = make_federation({"prediction": prediction}, epochs=3)
    state, _ = federation.run(2)
    images, _ = federation.data
    model = federation.algorithm.personal_model or federation.task.model
    predict = lambda state: np.asarray(  # noqa: E731
        model.apply(
            federation.algorithm.personal_variables(federation.hp, state, 2), images, train=False
        )[0]
    )
    params = {
        f"{layer}/{name}": np.asarray(leaf, np.float64)
        for layer, leaves in federation.personal_model(state, 2).items()
        for name, leaf in leaves.items()
    }
    x = images.reshape(len(images), -1).astype(np.float64)
    features, by_head = compute_features(params, x), compute_logits(params, x).argmax(1)
    gaps = features[:, None] - np.asarray(state.server.features, np.float64)
    nearest = np.square(gaps).sum(-1).argmin(1)
    assert (nearest != by_head).any()
    expected = nearest if prediction == "prototypes" else by_head
    np.testing.assert_array_equal(predict(state).argmax(1), expected)
    absent = state._replace(server=jax.tree.map(jnp.zeros_like, state.server))
    np.testing.assert_array_equal(predict(absent).argmax(1), by_head)


def test_traffic_counts_prototypes():
    federation = make_federation()
    traffic = federation.algorithm.traffic(federation.hp, federation.initial_state())
    size = 4 * NUM_CLASSES * NUM_FEATURES
    assert traffic[:2] == (size, size + 4 * NUM_CLASSES)


def test_network_without_features_is_one_line():
    class Pooled(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Conv(10, (3, 3))(x).mean((1, 2))

    with pytest.raises(ConfigError, match=r"^network has no known `embed`") as raised:
        simulate(RunSpec("fedproto", num_clients=4, rounds=1), network=Pooled())
    assert "\n" not in str(raised.value)
