"""IFCA against a float64 loop, its clusters, and its limit FedAvg."""

import jax
import numpy as np
import pytest
from chex import assert_trees_all_close
from support.algorithm_builders import make_method_federation
from support.data import BATCH_SIZE, CLIENT_SIZES, NUM_CLASSES, make_blobs
from support.reference_loop import (
    ReferenceFedAvg,
    cross_entropy,
    flatten_params,
    name_leaves,
)
from support.two_layers import compute_logits, cross_entropy_gradient, make_two_layer_model

from fedjax_het import ConfigError, RunSpec, simulate
from fedjax_het.algorithms import METHODS

NUM_CLUSTERS = 3


def make_two_groups(sizes=CLIENT_SIZES):
    """Examples of clients, every second of which has other names of the classes."""
    images, labels = make_blobs(sizes)
    group = np.repeat(np.arange(len(sizes)) % 2, sizes)
    return images, ((labels + group) % NUM_CLASSES).astype(np.int32)


def make_federation(num_clusters=NUM_CLUSTERS, **settings):
    settings = {"data": make_two_groups(), "model": make_two_layer_model()} | settings
    options, hp = {"num_clusters": num_clusters}, {"local_lr": 0.3}
    return make_method_federation("ifca", options, hp, client_test_model="personal", **settings)


def get_cluster_vectors(state):
    """The models of the clusters in float64."""
    params = state.server.variables["params"]
    num_clusters = len(jax.tree.leaves(params)[0])
    rows = [jax.tree.map(lambda leaf, j=j: leaf[j], params) for j in range(num_clusters)]
    return [flatten_params(name_leaves(row)) for row in rows]


class ReferenceIFCA(ReferenceFedAvg):
    """Clients train the model of the smallest loss, averages within clusters."""

    def __init__(self, federation, state):
        super().__init__(federation, params=federation.personal_model(state, 0))
        self.clusters = get_cluster_vectors(state)
        self.client_states, self.sizes = [0] * len(self.client_sizes), []

    def minibatches(self, r, client):
        num_batches = -(-self.client_sizes[client] // BATCH_SIZE)
        return super().minibatches(r, client)[num_batches:]

    def loss_gradient(self, params, x, y):
        return cross_entropy_gradient(params, x, y)

    def loss(self, client, model):
        held = self.federation.scheduler.partition.client_indices(client)
        return cross_entropy(
            compute_logits(self.params(model), self.inputs[held]), self.labels[held]
        )

    def initial_client_model(self, client):
        losses = [self.loss(client, model) for model in self.clusters]
        self.client_states[client] = int(np.argmin(losses))
        return self.clusters[self.client_states[client]]

    def update_server(self, r, clients, models):
        chosen = np.array([self.client_states[k] for k in clients])
        weights = self.client_weights()[clients]
        self.sizes.append([(chosen == j).sum() for j in range(len(self.clusters))])
        for j in set(chosen):
            share = weights * (chosen == j)
            self.clusters[j] = np.average(models, axis=0, weights=share)


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
def test_rounds_match_float64_loop(averaging):
    federation = make_federation(participation=0.7, averaging=averaging, epochs=2)
    state = federation.initial_state()
    loop, run_round = ReferenceIFCA(federation, state), jax.jit(federation.algorithm.round)
    for r in range(4):
        loop.run_round(r)
        key, cohort = jax.random.key(r), federation.cohort(r)
        state, info = run_round(federation.hp, state, key, cohort)
        np.testing.assert_array_equal(info.records["cluster_sizes"], loop.sizes[-1])
    assert loop.count_repeat_clients() >= 2
    assert any(0 in sizes for sizes in loop.sizes) and any(min(s[:2]) for s in loop.sizes)
    np.testing.assert_allclose(get_cluster_vectors(state), loop.clusters, atol=2e-6)
    for k, cluster in enumerate(loop.client_states):
        model = federation.personal_model(state, k)
        loop.assert_model(model, model=loop.clusters[cluster], atol=2e-6)


def test_clusters_are_groups_of_clients():
    """Clients of both groups separate, and untrained clients have no cluster."""
    sizes = (20, 20, 0, 20, 20, 20)
    settings = {"data": make_two_groups(sizes), "sizes": sizes, "epochs": 5, "rounds": 30}
    federation = make_federation(2, **settings)
    state, _ = federation.run(30)
    clusters = np.asarray(federation.algorithm.artifacts(state)["clusters"])
    assert clusters[2] == -1
    assert clusters[0] == clusters[4] != clusters[1] == clusters[3] == clusters[5]


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
def test_one_cluster_is_fedavg(averaging):
    settings = {"batch_size": max(CLIENT_SIZES), "averaging": averaging, "participation": 0.7}
    settings |= {"data": make_two_groups(), "model": make_two_layer_model()}
    settings |= {"optimizer": "adam", "keep": True, "epochs": 2}
    federation = make_federation(1, **settings)
    state, _ = federation.run(3)
    expected = make_method_federation("fedavg", hp={"local_lr": 0.3}, **settings).train(3)
    assert_trees_all_close(federation.personal_model(state, 0), expected, atol=1e-6)


def test_traffic_and_initial_models():
    federation = make_federation()
    state = federation.initial_state()
    first, *others = get_cluster_vectors(state)
    size = 4 * len(first)
    traffic = federation.algorithm.traffic(federation.hp, state)
    assert traffic == (NUM_CLUSTERS * size, size + 4, 0)
    plain = make_method_federation("fedavg", model=make_two_layer_model())
    expected = plain.global_params(plain.initial_state())
    assert_trees_all_close(federation.personal_model(state, 0), expected)
    assert min(np.abs(first - other).max() for other in others) > 0.1
    assert np.abs(others[0] - others[1]).max() > 0.1


def test_trace_does_not_grow_with_clusters():
    def count_operations(num_clusters):
        federation = make_federation(num_clusters)
        return len(str(jax.make_jaxpr(federation.initial_state)()).splitlines())

    assert count_operations(20) == count_operations(3)


def test_artifacts_and_bad_input():
    run = {"model": "mlp", "num_clients": 4, "rounds": 2, "participation": 1.0}
    result = simulate(RunSpec("ifca", options={"num_clusters": 2}, **run))
    assert result.artifacts["clusters"].shape == (4,)
    np.testing.assert_array_equal(result.metrics["cluster_sizes"].sum(1), 4)
    spec = RunSpec("ifca", num_clients=4, options={"num_clusters": 6}).resolved()
    (warning,) = METHODS["ifca"].settings_warnings(spec, METHODS["ifca"])
    assert warning.startswith("num_clusters = 6 exceeds num_clients = 4: at least 2 models train")
    with pytest.raises(ConfigError, match=r"num_clusters = 0: expected") as raised:
        simulate(RunSpec("ifca", options={"num_clusters": 0}, **run))
    assert "\n" not in str(raised.value)
