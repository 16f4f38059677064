"""FedDC against a float64 loop, the optimum of heterogeneous quadratics, and its limits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close, assert_trees_all_equal
from support.data import SIZES
from support.oracle import Loop, four_rounds_beside
from support.problems import small
from support.quadratics import different_quadratics, distance

from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.feddc import feddc
from fedjax_het.algorithms.scaffold import scaffold
from fedjax_het.engine.lanes import Cohort


class DC(Loop):
    """The method as the paper and its code write it: g_i from how far theta_i went under SGD, the
    server's means over all clients' states. `kept`: h_i and g_i."""

    def first(self, client):
        return np.zeros_like(self.vector), np.zeros_like(self.vector)

    def before_round(self, r):
        self.mean_g = self.weights() @ np.array([g for _, g in self.kept])

    def slope(self, model, batch):
        drift, g = self.kept[batch.client]
        pull = self.hp["feddc_alpha"] * (model - (self.vector - drift))
        return super().slope(model, batch) + pull + self.mean_g - g

    def end(self, client, model, steps):
        drift, g = self.kept[client]
        went = (self.vector - model) / (steps * self.hp["local_lr"])
        self.kept[client] = drift + model - self.vector, g - self.mean_g + went

    def serve(self, r, clients, models):
        mean_drift = self.weights() @ np.array([drift for drift, _ in self.kept])
        self.vector = self.towards(self.mean(clients, models) + mean_drift)


@pytest.mark.parametrize(
    ("averaging", "server_lr"), [("uniform", 1.0), ("weighted", 1.0), ("uniform", 0.6)]
)
def test_rounds_equal_a_float64_loop(averaging, server_lr):
    hp = {"feddc_alpha": 0.3, "server_lr": server_lr}
    state, loop = four_rounds_beside(DC, feddc, averaging=averaging, hp=hp)
    for at, own in enumerate((state.clients.drift, state.clients.gradient)):
        theirs = [loop.params(kept[at])["w"] for kept in loop.kept]
        np.testing.assert_allclose(own["w"], theirs, atol=1e-5)


def test_the_servers_means_are_of_all_clients():
    hp = {"local_lr": 0.1, "feddc_alpha": 0.3}
    federation = small(feddc, hp=hp, participation=0.5, averaging="weighted")
    state, _ = federation.run(5)
    means = jax.tree.map(partial(np.average, axis=0, weights=SIZES), state.clients)
    assert_trees_all_close(state.server.extra.drift, means.drift, atol=1e-6)
    assert_trees_all_close(state.server.extra.gradient, means.gradient, atol=1e-6)
    assert np.abs(means.drift["w"]).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_it_reaches_the_joint_optimum_where_fedavg_does_not(participation):
    quadratics = different_quadratics()
    settings = {"participation": participation, "hp": {"local_lr": 0.1, "feddc_alpha": 0.3}}
    biased = distance(fedavg, quadratics, 400, hp={"local_lr": 0.1})
    assert distance(feddc, quadratics, 400, **settings) < min(1e-4, biased / 100)


def test_a_first_round_without_pull_is_fedavgs_some_steps_further():
    """All states are zero: theta_i are those of plain SGD, and the mean of h_i is S/K times their
    mean change, here all of it, as all K that hold data take part."""
    hp = {"local_lr": 0.1}
    plain, limit = small(fedavg, hp=hp), small(feddc, hp={**hp, "feddc_alpha": 0.0})
    origin = plain.model(plain.start())
    after, found = plain.model(plain.run(1)[0]), limit.model(limit.run(1)[0])
    for name in origin:
        expected = origin[name] + 2 * (after[name] - origin[name])
        np.testing.assert_allclose(found[name], expected, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_without_pull_its_gradients_are_scaffolds(optimizer):
    """Also under Adam, where (w - theta) / (steps lr) is no gradient."""
    settings = {"optimizer": optimizer, "epochs": 2}
    control, _ = small(scaffold, hp={"local_lr": 0.1}, **settings).run(1)
    state, _ = small(feddc, hp={"local_lr": 0.1, "feddc_alpha": 0.0}, **settings).run(1)
    assert_trees_all_close(state.clients.gradient, control.clients.control, atol=1e-6)
    assert_trees_all_close(state.server.extra.gradient, control.server.extra, atol=1e-6)


def test_a_round_without_data_changes_nothing():
    hp = {"local_lr": 0.2, "feddc_alpha": 0.3}
    federation = small(feddc, hp=hp, sizes=(0, 0, 6), participation=0.34, rounds=30)
    present = federation.scheduler.work.participants > 0
    r = int(np.flatnonzero(present[:-1] & ~present[1:])[0])
    states, round_ = [federation.start()], jax.jit(federation.algorithm.round)
    for number in (r, r + 1):
        cohort = Cohort(federation.scheduler.round(number), federation.examples)
        states.append(round_(federation.hp, states[-1], jax.random.key(number), cohort)[0])
    assert float(jnp.abs(states[1].server.extra.drift["w"]).max()) > 1e-3
    assert_trees_all_equal(states[2].server, states[1].server)
