"""FedExP against a float64 loop, its limits, and the mean of two global models."""

import jax
import numpy as np
import pytest
from chex import assert_trees_all_close
from support.algorithm_builders import make_method_federation
from support.reference_loop import ReferenceFedAvg, run_and_compare

from fedjax_het import ConfigError, RunSpec, simulate
from fedjax_het.methods import num_bytes

HP = {"local_lr": 0.2, "fedexp_epsilon": 1e-3, "server_lr": 0.9}
LAST = {"average_iterates": False}


class ReferenceFedExP(ReferenceFedAvg):
    """The server's step grows with the disagreement of the clients."""

    previous = None

    def update_server(self, r, clients, models):
        changes = [model - self.global_vector for model in models]
        change = self.weighted_mean(clients, changes)
        mean_square = self.weighted_mean(clients, [np.sum(c**2) for c in changes])
        self.eta = max(1, mean_square / (2 * (np.sum(change**2) + self.hp["fedexp_epsilon"])))
        self.previous = self.global_vector
        self.global_vector = self.global_vector + self.hp["server_lr"] * self.eta * change


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
def test_rounds_match_float64_loop(averaging):
    settings = {"hp": HP, "participation": 0.5, "averaging": averaging, "epochs": 2}
    federation = make_method_federation("fedexp", LAST, **settings)
    loop, state, etas = ReferenceFedExP(federation), federation.initial_state(), []
    for r in range(4):
        loop.run_round(r)
        state, info = jax.jit(federation.algorithm.round)(
            federation.hp, state, jax.random.key(r), federation.cohort(r)
        )
        np.testing.assert_allclose(info.records["extrapolation"], loop.eta, rtol=1e-5)
        etas.append(loop.eta)
    assert max(etas) > 1.02
    loop.assert_model(federation.global_params(state), atol=2e-6)
    averaged = make_method_federation("fedexp", **settings)
    mean = (loop.global_vector + loop.previous) / 2
    loop.assert_model(averaged.train(4), model=mean, atol=2e-6)
    assert_trees_all_close(averaged.train(1), federation.train(1), atol=1e-7)


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
def test_large_epsilon_is_fedavg(averaging):
    settings = {"participation": 0.5, "averaging": averaging, "optimizer": "adam", "keep": True}
    hp = HP | {"fedexp_epsilon": 1e6}
    actual = make_method_federation("fedexp", LAST, hp=hp, **settings).train(3)
    hp = {"local_lr": 0.2, "server_lr": 0.9}
    assert_trees_all_close(actual, make_method_federation("fedavg", hp=hp, **settings).train(3))


def test_one_client_is_fedavg():
    settings = {"sizes": (9,)}
    federation = make_method_federation("fedexp", LAST, hp=HP, **settings)
    run_and_compare(ReferenceFedAvg(federation), 2, atol=1e-6)


def test_server_step_moves_both_models():
    """A step that changes nothing leaves the models of the clients as they are."""
    federation = make_method_federation("fedexp", hp=HP)
    state, _ = federation.run(2)
    algorithm = federation.algorithm
    model = algorithm.global_model(state)
    assert_trees_all_close(algorithm.with_global_model(state, model), state, atol=1e-7)
    moved = jax.tree.map(lambda w: w + 1, model)
    new_state = algorithm.with_global_model(state, moved)
    assert_trees_all_close(algorithm.global_model(new_state), moved, atol=1e-6)
    shifted = jax.tree.map(lambda w: w + 1, state.server.variables)
    assert_trees_all_close(new_state.server.variables, shifted, atol=1e-6)


def test_traffic_is_a_model_and_a_number():
    federation = make_method_federation("fedexp", hp=HP)
    state = federation.initial_state()
    size = num_bytes(state.server.variables)
    assert federation.algorithm.traffic(federation.hp, state) == (size, size + 4, 0)


def test_records_and_bad_input():
    run = RunSpec("fedexp", model="mlp", num_clients=4, rounds=2, participation=1.0)
    assert (simulate(run).metrics["extrapolation"] >= 1).all()
    with pytest.raises(ConfigError, match=r"fedexp_epsilon = 0.0: expected") as raised:
        simulate(RunSpec("fedexp", hp={"fedexp_epsilon": 0.0}))
    assert "\n" not in str(raised.value)
