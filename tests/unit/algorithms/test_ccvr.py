"""CCVR against a float64 loop, its Gaussians, and the model that is evaluated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close, assert_trees_all_equal
from support.algorithm_builders import make_method_federation
from support.data import CLIENT_SIZES, NUM_CLASSES, consecutive_partition, make_blobs
from support.reference_loop import ReferenceFedAvg, flatten_inputs, flatten_params, logit_gradient
from support.small_federation import round_key
from support.two_layers import (
    NUM_FEATURES,
    compute_features,
    cross_entropy_gradient,
    make_two_layer_model,
)

from fedjax_het import ConfigError, RunSpec, simulate
from fedjax_het.algorithms.base import FederationData
from fedjax_het.algorithms.virtual_features import CLASS_BATCHES, draw_virtual_features
from fedjax_het.core.execution_plan import make_execution_plan
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.core.server_training import make_shuffled_batches
from fedjax_het.data import dataset_from_arrays

DRAWS, EPOCHS, BATCH = 9, 2, 4
OPTIONS = {"virtual_features": DRAWS, "calibration_epochs": EPOCHS, "calibration_batch_size": BATCH}
HP = {"local_lr": 0.3, "server_lr": 0.7, "calibration_lr": 0.1, "calibration_momentum": 0.8}


def make_federation(options=None, **settings):
    settings = {"model": make_two_layer_model(), **settings}
    return make_method_federation("ccvr", {**OPTIONS, **(options or {})}, HP, **settings)


def calibrated_params(federation, state):
    result = federation.algorithm.get_result_model(state)
    return jax.tree.map(np.asarray, result["params"])


class ReferenceCCVR(ReferenceFedAvg):
    """FedAvg; `calibrate` computes the model that is evaluated."""

    def loss_gradient(self, params, x, y):
        return cross_entropy_gradient(params, x, y)

    def pool_statistics(self, params):
        """Means and covariances of all classes by the paper's Eqs. 3 and 4."""
        images, labels = self.federation.data
        partition, pooled = consecutive_partition(self.client_sizes), []
        for c in range(NUM_CLASSES):
            parts = map(partition.client_indices, range(partition.num_clients))
            parts = [part[labels[part] == c] for part in parts]
            features = [
                compute_features(params, flatten_inputs(images[p])) for p in parts if len(p)
            ]
            sizes = np.array(list(map(len, features)))
            means = np.stack([z.mean(0) for z in features])
            mean, total = sizes @ means / sizes.sum(), sizes.sum()
            within = sum((len(z) - 1) * np.cov(z.T) for z in features if len(z) > 1)
            between = np.einsum("k,ki,kj->ij", sizes, means, means) - total * np.outer(mean, mean)
            pooled.append((mean, (within + between) / (total - 1)))
        return pooled

    def draw(self, params, key):
        """Virtual features with the package's noise, `[C, M, F]`."""
        images, labels = self.federation.data
        batches, draws = self.federation.inputs[CLASS_BATCHES.name], []
        for c in range(NUM_CLASSES):
            ids = [i for i, size in enumerate(batches.sizes) if size and batches.labels[i] == c]
            shape = (DRAWS, batches.positions.shape[1])
            noise = [jax.random.normal(jax.random.fold_in(key, i), shape) for i in ids]
            noise = [
                np.asarray(e, float)[:, : batches.sizes[i]] for e, i in zip(noise, ids, strict=True)
            ]
            positions = [np.asarray(batches.positions[i])[: batches.sizes[i]] for i in ids]
            positions = np.concatenate(positions)
            assert (labels[positions] == c).all() and len(positions) == (labels == c).sum()
            z = compute_features(params, flatten_inputs(images[positions]))
            centered = z - z.mean(0)
            noise = np.concatenate(noise, 1)
            draws.append(z.mean(0) + noise @ centered / np.sqrt(len(z) - 1))
        return np.stack(draws)

    def calibrate(self, r):
        params = self.params(self.global_vector)
        key = fold_in_purpose(round_key(r), Purpose.SERVER)
        draw_key, _, order_key = jax.random.split(key, 3)
        z = self.draw(params, draw_key).reshape(-1, NUM_FEATURES)
        y = np.repeat(np.arange(NUM_CLASSES), DRAWS)
        head = {name: params[name] for name in ("head/kernel", "head/bias")}
        velocity = dict.fromkeys(head, 0.0)
        batches = make_shuffled_batches(order_key, len(y), BATCH)
        for step in range(EPOCHS * batches.steps_per_epoch):
            index, mask = map(np.asarray, batches.take_step(step))
            index = index[mask > 0]
            rows = logit_gradient(z[index] @ head["head/kernel"] + head["head/bias"], y[index])
            gradient = {"head/kernel": z[index].T @ rows / len(index), "head/bias": rows.mean(0)}
            for name in head:
                velocity[name] = self.hp["calibration_momentum"] * velocity[name] + gradient[name]
                head[name] = head[name] - self.hp["calibration_lr"] * velocity[name]
        return flatten_params({**params, **head})


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
def test_rounds_match_float64_loop(averaging):
    federation = make_federation(participation=0.5, averaging=averaging, epochs=2)
    loop, state = ReferenceCCVR(federation), federation.initial_state()
    run_round = jax.jit(federation.algorithm.round)
    for r in range(4):
        loop.run_round(r)
        state, _ = run_round(federation.hp, state, round_key(r), federation.cohort(r))
        loop.assert_model(federation.global_params(state), atol=2e-6)  # clients go on from it
        expected = loop.calibrate(r)
        loop.assert_model(calibrated_params(federation, state), model=expected, atol=5e-6)
        assert np.abs(expected - loop.global_vector).max() > 1e-2


def test_draws_have_pooled_means_and_covariances():
    federation = make_federation()
    loop, cohort = ReferenceCCVR(federation), federation.cohort(0)
    plan, count = make_execution_plan(1, 1, mesh_axis=None), 100_000
    variables = federation.task.model.init(jax.random.key(3))
    args = (federation.task, plan, variables, cohort, jax.random.key(1), count)
    draws, counts = jax.jit(draw_virtual_features, static_argnums=(0, 1, 5))(*args)
    labels = federation.data[1]
    np.testing.assert_array_equal(counts, np.bincount(labels))
    params = loop.params(
        flatten_params(
            {
                f"{layer}/{name}": leaf
                for layer, leaves in variables["params"].items()
                for name, leaf in leaves.items()
            }
        )
    )
    features = compute_features(params, flatten_inputs(federation.data[0]))
    for c, (mean, covariance) in enumerate(loop.pool_statistics(params)):
        np.testing.assert_allclose(covariance, np.cov(features[labels == c].T), atol=1e-12)
        error = 6 * np.sqrt(np.trace(covariance) / count)
        np.testing.assert_allclose(draws[c].mean(0), mean, atol=error)
        np.testing.assert_allclose(np.cov(draws[c].T), covariance, atol=0.02 * covariance.max())


@pytest.mark.parametrize("base", ["fedavg", "scaffold"])
def test_no_epochs_are_base(base):
    settings = {"participation": 0.7, "epochs": 2, "model": make_two_layer_model()}
    hp = {"local_lr": 0.3}
    federation = make_federation({"base": base, "calibration_epochs": 0}, **settings)
    plain = make_method_federation(base, hp={**hp, "server_lr": 0.7}, **settings)
    (state, info), (expected, plain_info) = federation.run(3), plain.run(3)
    assert_trees_all_equal(calibrated_params(federation, state), plain.global_params(expected))
    assert_trees_all_equal(state.server.inner, expected.server)
    assert_trees_all_equal((state.clients, info), (expected.clients, plain_info))


def test_new_head_does_not_depend_on_head_of_base():
    """After 0 epochs it is another draw of the head, and the body stays."""
    options = {"calibrates_new_head": True, "calibration_epochs": 0}
    federation = make_federation(options)
    state, _ = federation.run(1)
    result, sent = calibrated_params(federation, state), federation.global_params(state)
    assert_trees_all_equal(result["hidden"], sent["hidden"])
    key = fold_in_purpose(round_key(0), Purpose.SERVER)
    drawn = federation.task.model.init(jax.random.split(key, 3)[1])["params"]["head"]
    assert_trees_all_equal(result["head"], jax.tree.map(np.asarray, drawn))


def test_class_without_examples_has_no_virtual_features():
    images, labels = make_blobs()
    federation = make_federation(data=(images, np.minimum(labels, 1)))
    loop = ReferenceCCVR(federation)
    state, _ = federation.run(1)
    args = (federation.task, make_execution_plan(1, 1, mesh_axis=None))
    variables = federation.algorithm.global_model(state)
    draws, counts = draw_virtual_features(
        *args, variables, federation.cohort(0), jax.random.key(0), 3
    )
    assert counts[2] == 0 and not draws[2].any() and np.abs(draws[:2]).min() > 0
    # A step on a batch of the absent class would raise its bias.
    before = loop.federation.global_params(state)["head"]["bias"]
    assert calibrated_params(federation, state)["head"]["bias"][2] < before[2]


def test_batches_of_several_federations_have_equal_shapes():
    def make_data(sizes, seed):
        images, labels = make_blobs(sizes, seed)
        dataset = dataset_from_arrays(images, labels, images, labels, num_classes=NUM_CLASSES)
        return FederationData(dataset, consecutive_partition(sizes), None, 1, seed=seed)

    federations = [make_data(CLIENT_SIZES, 0), make_data((300, 40), 1)]
    both = CLASS_BATCHES.make_inputs(federations)
    assert_trees_all_close(*(jax.tree.map(lambda a: jnp.zeros(a.shape), b) for b in both))
    for federation, batches in zip(federations, both, strict=True):
        count, parts = batches.sizes.sum(), zip(batches.positions, batches.sizes, strict=True)
        positions = np.concatenate([row[:size] for row, size in parts])
        np.testing.assert_array_equal(np.sort(positions), np.arange(count))
        assert count == federation.partition.sizes.sum()


SETTINGS = {"model": "mlp", "num_clients": 4, "participation": 0.5, "rounds": 8}


@pytest.mark.slow
def test_evaluated_rounds_are_calibrated():
    """The accuracies are those of the calibrated model, which the result contains."""
    run = lambda name, **kwargs: simulate(RunSpec(name, **SETTINGS, **kwargs))  # noqa: E731
    options = {"virtual_features": 20, "calibration_epochs": 2}
    hp = {"calibration_lr": 0.05}
    plain, every = run("fedavg"), run("ccvr", options=options, hp=hp)
    rarely = run("ccvr", options=options, hp=hp, eval_every=2)
    accuracy, other = (r.metrics["test_accuracy"] for r in (every, rarely))
    assert np.abs(accuracy - plain.metrics["test_accuracy"]).max() > 1e-3
    np.testing.assert_array_equal(np.where(np.isnan(other), accuracy, other), accuracy)
    assert np.isnan(other[0])
    for name in ("train_loss", "update_norm"):
        np.testing.assert_allclose(every.metrics[name], plain.metrics[name], rtol=1e-6)
    result, sent = every.model().variables["params"], plain.model().variables["params"]
    assert_trees_all_close(result["hidden1"], sent["hidden1"], atol=1e-6)
    assert np.abs(result["head"]["kernel"] - sent["head"]["kernel"]).max() > 1e-3
    statistics = 4 * 10 * (1 + 128 + 128**2)
    model = sum(leaf.size for leaf in jax.tree.leaves(sent)) * 4
    for direction, size in (("bytes_up", statistics), ("bytes_down", model)):
        extra = every.summary[direction] - plain.summary[direction]
        assert extra == 4 * size, direction


def test_network_without_features_is_one_line():
    import flax.linen as nn

    class Pooled(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Conv(10, (3, 3))(x).mean((1, 2))

    with pytest.raises(ConfigError, match=r"^network has no known `embed`") as raised:
        simulate(RunSpec("ccvr", **{**SETTINGS, "model": None}), network=Pooled())
    assert "\n" not in str(raised.value)
