"""FedDC against a float64 loop, the optimum of heterogeneous quadratics, and its limits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close, assert_trees_all_equal
from support.data import CLIENT_SIZES
from support.quadratics import distance_to_optimum, make_heterogeneous_quadratics
from support.reference_loop import ReferenceFedAvg, run_four_rounds_and_compare
from support.small_federation import make_small_federation

from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.feddc import feddc
from fedjax_het.algorithms.scaffold import scaffold
from fedjax_het.core.client_loop import Cohort


class DC(ReferenceFedAvg):
    """The method as the paper and its code write it: g_i from how far theta_i went under SGD, the
    server's means over all clients' states. `kept`: h_i and g_i."""

    def init_client_state(self, client):
        return np.zeros_like(self.global_vector), np.zeros_like(self.global_vector)

    def before_round(self, r):
        self.mean_g = self.client_weights() @ np.array([g for _, g in self.client_states])

    def descent_direction(self, model, batch):
        drift, g = self.client_states[batch.client]
        pull = self.hp["feddc_alpha"] * (model - (self.global_vector - drift))
        return super().descent_direction(model, batch) + pull + self.mean_g - g

    def finish_client(self, client, model, steps):
        drift, g = self.client_states[client]
        went = (self.global_vector - model) / (steps * self.hp["local_lr"])
        self.client_states[client] = drift + model - self.global_vector, g - self.mean_g + went

    def update_server(self, r, clients, models):
        mean_drift = self.client_weights() @ np.array([drift for drift, _ in self.client_states])
        self.global_vector = self.step_towards(self.weighted_mean(clients, models) + mean_drift)


@pytest.mark.parametrize(
    ("averaging", "server_lr"), [("uniform", 1.0), ("weighted", 1.0), ("uniform", 0.6)]
)
def test_rounds_equal_a_float64_loop(averaging, server_lr):
    hp = {"feddc_alpha": 0.3, "server_lr": server_lr}
    state, loop = run_four_rounds_and_compare(DC, feddc, averaging=averaging, hp=hp)
    for at, own in enumerate(state.clients.memory):
        theirs = [loop.params(kept[at])["w"] for kept in loop.client_states]
        np.testing.assert_allclose(own["w"], theirs, atol=1e-5)


def test_the_servers_means_are_of_all_clients():
    hp = {"local_lr": 0.1, "feddc_alpha": 0.3}
    federation = make_small_federation(feddc, hp=hp, participation=0.5, averaging="weighted")
    state, _ = federation.run(5)
    means = jax.tree.map(partial(np.average, axis=0, weights=CLIENT_SIZES), state.clients.memory)
    assert_trees_all_close(state.server.extra.drift, means.drift, atol=1e-6)
    assert_trees_all_close(state.server.extra.gradient, means.gradient, atol=1e-6)
    assert np.abs(means.drift["w"]).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_it_reaches_the_joint_optimum_where_fedavg_does_not(participation):
    quadratics = make_heterogeneous_quadratics()
    settings = {"participation": participation, "hp": {"local_lr": 0.1, "feddc_alpha": 0.3}}
    biased = distance_to_optimum(fedavg, quadratics, 400, hp={"local_lr": 0.1})
    assert distance_to_optimum(feddc, quadratics, 400, **settings) < min(1e-4, biased / 100)


def test_a_first_round_without_pull_is_fedavgs_some_steps_further():
    """All states are zero: theta_i are those of plain SGD, and the mean of h_i is S/K times their
    mean change, here all of it, as all K that hold data take part."""
    hp = {"local_lr": 0.1}
    plain, limit = (
        make_small_federation(fedavg, hp=hp),
        make_small_federation(feddc, hp={**hp, "feddc_alpha": 0.0}),
    )
    origin = plain.global_params(plain.initial_state())
    after, found = plain.global_params(plain.run(1)[0]), limit.global_params(limit.run(1)[0])
    for name in origin:
        expected = origin[name] + 2 * (after[name] - origin[name])
        np.testing.assert_allclose(found[name], expected, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_without_pull_its_gradients_are_scaffolds(optimizer):
    """Also under Adam, where (w - theta) / (steps lr) is no gradient."""
    settings = {"optimizer": optimizer, "epochs": 2}
    control, _ = make_small_federation(scaffold, hp={"local_lr": 0.1}, **settings).run(1)
    state, _ = make_small_federation(
        feddc, hp={"local_lr": 0.1, "feddc_alpha": 0.0}, **settings
    ).run(1)
    assert_trees_all_close(state.clients.memory.gradient, control.clients.memory, atol=1e-6)
    assert_trees_all_close(state.server.extra.gradient, control.server.extra, atol=1e-6)


def test_a_round_without_data_changes_nothing():
    hp = {"local_lr": 0.2, "feddc_alpha": 0.3}
    federation = make_small_federation(feddc, hp=hp, sizes=(0, 0, 6), participation=0.34, rounds=30)
    present = federation.scheduler.work_counts.participants > 0
    r = int(np.flatnonzero(present[:-1] & ~present[1:])[0])
    states, round_ = [federation.initial_state()], jax.jit(federation.algorithm.round)
    for number in (r, r + 1):
        cohort = Cohort(federation.scheduler.make_round(number), federation.examples)
        states.append(round_(federation.hp, states[-1], jax.random.key(number), cohort)[0])
    assert float(jnp.abs(states[1].server.extra.drift["w"]).max()) > 1e-3
    assert_trees_all_equal(states[2].server, states[1].server)
