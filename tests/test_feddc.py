"""FedDC against a float64 loop, the optimum of heterogeneous quadratics, and its limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close, assert_trees_all_equal
from problems import SIZES, FlatLoop, four_rounds_beside, small
from test_feddyn import different_quadratics, distance

from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.feddc import feddc
from fedjax_het.algorithms.scaffold import scaffold
from fedjax_het.engine.lanes import Cohort


class Loop(FlatLoop):
    """The method as the paper and its code write it: g_i from how far theta_i went under SGD, the
    server's means over all clients' states."""

    def __init__(self, federation, start, *, averaging):
        super().__init__(federation, start, averaging=averaging)
        self.h, self.g = np.zeros((2, len(SIZES), len(self.w)))

    def round(self, r):
        clients = [k for k in self.f.scheduler.participants(r) if SIZES[k]]
        alpha, lr = self.hp["feddc_alpha"], self.hp["local_lr"]
        mean_g, models = self.g.mean(0), []
        for k in clients:
            theta, drift, g = self.w.copy(), self.h[k].copy(), self.g[k].copy()
            batches = list(zip(*self.f.scheduler.client_batches(r, k), strict=True))
            for batch, size in batches:
                slope = self.gradient(theta, batch[:size])
                slope = slope + alpha * (theta - (self.w - drift)) + mean_g - g
                theta = theta - lr * slope
            self.h[k] += theta - self.w
            self.g[k] = g - mean_g + (self.w - theta) / (len(batches) * lr)
            models.append(theta)
        target = self.mean(models, clients) + self.h.mean(0)
        self.w = self.w + self.hp["server_lr"] * (target - self.w)
        return clients


@pytest.mark.parametrize(
    ("averaging", "server_lr"), [("uniform", 1.0), ("weighted", 1.0), ("uniform", 0.6)]
)
def test_rounds_equal_a_float64_loop(averaging, server_lr):
    hp = {"feddc_alpha": 0.3, "server_lr": server_lr}
    state, loop = four_rounds_beside(Loop, feddc, averaging=averaging, hp=hp)
    for own, theirs in ((state.clients.drift, loop.h), (state.clients.gradient, loop.g)):
        rows = np.asarray(own["w"]).reshape(len(SIZES), -1)
        np.testing.assert_allclose(rows, theirs[:, :12], atol=1e-5)


def test_the_servers_means_are_of_all_clients():
    hp = {"local_lr": 0.1, "feddc_alpha": 0.3}
    federation = small(feddc, hp=hp, participation=0.5, averaging="weighted")
    state, _ = federation.run(5)
    means = jax.tree.map(lambda leaf: leaf.mean(0), state.clients)
    assert_trees_all_close(state.server.extra.drift, means.drift, atol=1e-6)
    assert_trees_all_close(state.server.extra.gradient, means.gradient, atol=1e-6)
    assert np.abs(means.drift["w"]).max() > 1e-2


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_it_reaches_the_joint_optimum_where_fedavg_does_not(participation):
    quadratics = different_quadratics()
    settings = {"participation": participation, "hp": {"local_lr": 0.1, "feddc_alpha": 0.3}}
    biased = distance(fedavg, quadratics, 400, hp={"local_lr": 0.1})
    assert distance(feddc, quadratics, 400, **settings) < min(1e-4, biased / 100)


def test_a_first_round_without_pull_is_fedavgs_some_steps_further():
    """All states are zero: theta_i are those of plain SGD, and the mean of h_i is S/K times their
    mean change."""
    hp = {"local_lr": 0.1}
    plain, limit = small(fedavg, hp=hp), small(feddc, hp={**hp, "feddc_alpha": 0.0})
    origin = plain.model(plain.start())
    after, found = plain.model(plain.run(1)[0]), limit.model(limit.run(1)[0])
    present = sum(size > 0 for size in SIZES)
    for name in origin:
        expected = origin[name] + (1 + present / len(SIZES)) * (after[name] - origin[name])
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
