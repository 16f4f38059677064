"""FedALA against a float64 loop, its limits, and the end of the first learning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close, assert_trees_all_equal
from support.algorithm_builders import make_method_federation
from support.data import BATCH_SIZE, CLIENT_SIZES
from support.reference_loop import cross_entropy
from support.two_layers import (
    ReferenceTwoLayers,
    compute_logits,
    make_two_layer_model,
    run_and_compare_personal_models,
)

from fedjax_het import RunSpec, simulate
from fedjax_het.core.execution_plan import make_execution_plan
from fedjax_het.core.optimizers import LocalTrainingOptions

EPOCHS = 13  # three more than the losses whose deviation is compared


def make_federation(name="fedala", options=None, hp=None, **settings):
    settings = {"participation": 0.5, "epochs": 2, "client_test_model": "personal", **settings}
    hp = {"local_lr": 0.3, "server_lr": 0.7, **(hp or {})}
    return make_method_federation(name, options, hp=hp, model=make_two_layer_model(), **settings)


class ReferenceFedALA(ReferenceTwoLayers):
    """The first passes learn the weights of the mixture, the others train from it."""

    max_passes = EPOCHS

    def __init__(self, federation, *, params):
        super().__init__(federation, params=params)
        self.num_passes_made = []

    def init_client_state(self, client):
        return {"model": self.global_vector, "weights": 1.0, "has_learned": False}

    def personal_vector(self, client):
        return self.client_states[client]["model"]

    def mix(self, client, weights):
        own = self.personal_vector(client)
        mixture = own + (self.global_vector - own) * weights
        return self.select_layer("head", mixture, self.global_vector)

    def train_client(self, r, client):
        batches, state = self.minibatches(r, client), self.client_states[client]
        steps_per_pass = -(-self.client_sizes[client] // BATCH_SIZE)
        num_extra = self.max_passes * steps_per_pass
        passes = np.array_split(np.arange(num_extra), self.max_passes)
        weights = state["weights"]
        if any(self.history):  # not in the first round
            num_passes = 1 if state["has_learned"] else self.max_passes
            used = [[batches[step] for step in steps] for steps in passes[:num_passes]]
            weights = self.learn_weights(client, used, weights)
            state["has_learned"] = True
        model = self.mix(client, weights)
        for batch in batches[num_extra:]:
            model = self.local_step(model, batch)
        state |= {"model": model, "weights": weights}
        return model

    def learn_weights(self, client, passes, weights):
        num_used, losses = max(int(self.hp["ala_share"] * self.client_sizes[client]), 1), []
        gap = self.global_vector - self.personal_vector(client)
        for batches in passes:
            loss, rest = 0.0, num_used
            for batch in batches:
                x, y = batch.x[:rest], batch.y[:rest]
                rest -= len(y)
                if not len(y):
                    continue
                model = self.mix(client, weights)
                loss += cross_entropy(compute_logits(self.params(model), x), y) * len(y) / num_used
                step = self.hp["ala_lr"] * self.gradient(model, x, y) * gap
                weights = np.clip(weights - step, 0, 1)
            losses.append(loss)
            if len(losses) > 10 and np.std(losses[-10:]) < self.hp["ala_threshold"]:
                break
        self.num_passes_made.append(len(losses))
        return weights


@pytest.mark.parametrize(
    ("averaging", "threshold", "settings", "num_passes"),
    [
        ("uniform", 0.0931, {}, {1, 11, 12}),
        ("uniform", 0.087, {}, {1, 11, EPOCHS}),
        ("weighted", 10.0, {"details": LocalTrainingOptions(num_steps=3)}, {1, 11}),
    ],
)
def test_rounds_match_float64_loop(averaging, threshold, settings, num_passes):
    hp = {"ala_lr": 5.0, "ala_threshold": threshold}
    federation = make_federation(
        options={"initial_epochs": EPOCHS}, hp=hp, averaging=averaging, **settings
    )
    loop, state = run_and_compare_personal_models(ReferenceFedALA, federation, rounds=6, atol=5e-6)
    assert set(loop.num_passes_made) == num_passes
    weights = [loop.client_states[k]["weights"] for k in range(len(CLIENT_SIZES))]
    assert any(np.min(w) < 0.5 for w in weights)
    loop.assert_model(federation.global_params(state), atol=5e-6)


# --- limits ----------------------------------------------------------------------------------

# With one minibatch in a pass all passes are equal up to the order of the examples.
WHOLE = {"batch_size": 32}


def test_without_learning_is_fedavg():
    federation = make_federation(options={"initial_epochs": 2}, hp={"ala_lr": 0.0}, **WHOLE)
    average = make_federation("fedavg", client_test_model="client", **WHOLE)
    (state, info), (expected, expected_info) = federation.run(4), average.run(4)
    assert_trees_all_close(
        federation.global_params(state), average.global_params(expected), atol=1e-6
    )
    for k in range(len(CLIENT_SIZES)):
        models = federation.personal_model(state, k), average.personal_model(expected, k)
        assert_trees_all_close(*models, atol=1e-6)
    np.testing.assert_allclose(info.train_loss, expected_info.train_loss, rtol=1e-5)


def test_zero_weights_are_fedper():
    """Clients go on with their own heads."""
    federation = make_federation(options={"initial_epochs": 1}, hp={"ala_lr": 0.0}, **WHOLE)
    other = make_federation("fedper", **WHOLE)
    start = federation.initial_state()
    memory = start.clients.memory
    memory = memory._replace(weights=jax.tree.map(jnp.zeros_like, memory.weights))
    state, _ = federation.run(4, start._replace(clients=start.clients._replace(memory=memory)))
    expected, _ = other.run(4)
    for k in range(len(CLIENT_SIZES)):
        heads = (
            f.personal_model(s, k)["head"] for f, s in ((federation, state), (other, expected))
        )
        assert_trees_all_close(*heads, atol=1e-6)


# --- learning --------------------------------------------------------------------------------


def test_first_round_does_not_learn():
    federation = make_federation(participation=1.0)
    state, _ = federation.run(1)
    assert not state.clients.memory.has_learned.any()
    assert all((leaf == 1).all() for leaf in state.clients.memory.weights)
    state, _ = federation.run(2)
    assert state.clients.memory.has_learned.tolist() == [int(n > 0) for n in CLIENT_SIZES]


def test_lanes_change_nothing():
    """Lanes whose clients learn, idle and train at once."""
    settings = {"options": {"initial_epochs": 3}, "hp": {"ala_lr": 5.0}}
    reference, info = make_federation(**settings).run(4)
    federation = make_federation(plan=make_execution_plan(3, 1), **settings)
    state, other_info = federation.run(4)
    assert_trees_all_close(state, reference, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(other_info.train_loss, info.train_loss, rtol=1e-5)


SETTINGS = {"model": "mlp", "num_clients": 4, "participation": 1.0, "rounds": 2}


def test_mixture_is_of_head_layers():
    options = {"head_layers": ["hidden2", "head"], "initial_epochs": 2}
    result = simulate(RunSpec("fedala", options=options, **SETTINGS))
    head = {layer: result.model(0).variables["params"][layer] for layer in options["head_layers"]}
    weights = result.state.clients.memory.weights
    shapes = sorted(leaf.shape[1:] for leaf in weights)
    assert shapes == sorted(leaf.shape for leaf in jax.tree.leaves(head))
    assert any((leaf < 1).any() for leaf in weights)


@pytest.mark.slow
def test_batch_norm_statistics_are_of_training():
    """Passes that learn or idle leave no trace: their number changes nothing at rate 0."""
    settings = {**SETTINGS, "model": "convnet", "width": 4, "depth": 1, "norm": "batch"}
    settings |= {"batch_size": 2048, "hp": {"ala_lr": 0.0}, "num_clients": 2}
    one, three = (
        simulate(RunSpec("fedala", options={"initial_epochs": n}, **settings)).model(0)
        for n in (1, 3)
    )
    assert_trees_all_close(one.variables["state"], three.variables["state"], rtol=1e-3, atol=1e-4)
    assert_trees_all_equal(*(jax.tree.map(jnp.shape, m.variables) for m in (one, three)))
