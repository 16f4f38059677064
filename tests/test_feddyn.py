"""FedDyn against a float64 loop, the optimum of heterogeneous quadratics, and its limits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from problems import SIZES, FlatLoop, four_rounds_beside, linear_model, small

from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.feddyn import feddyn
from fedjax_het.common.errors import ConfigError
from fedjax_het.engine.lanes import Cohort
from fedjax_het.nn import Model
from fedjax_het.settings.spec import RunSpec

# --- a float64 loop ------------------------------------------------------------------------


class Loop(FlatLoop):
    """The paper's Algorithm 1 on softmax regression, with h_i and h as it writes them."""

    def __init__(self, federation, start, *, averaging):
        super().__init__(federation, start, averaging=averaging)
        hp = self.hp
        self.alpha, self.lr, self.server_lr = hp["feddyn_alpha"], hp["local_lr"], hp["server_lr"]
        self.h, self.h_k = np.zeros_like(self.w), np.zeros((len(SIZES), len(self.w)))

    def round(self, r):
        clients = [k for k in self.f.scheduler.participants(r) if SIZES[k]]
        models = []
        for k in clients:
            theta = self.w.copy()
            for batch, size in zip(*self.f.scheduler.client_batches(r, k), strict=True):
                pull = self.alpha * (theta - self.w)
                theta -= self.lr * (self.gradient(theta, batch[:size]) - self.h_k[k] + pull)
            self.h_k[k] -= self.alpha * (theta - self.w)
            models.append(theta)
        self.h -= self.alpha / len(SIZES) * sum(theta - self.w for theta in models)
        target = self.mean(models, clients) - self.h / self.alpha
        self.w += self.server_lr * (target - self.w)
        return clients


@pytest.mark.parametrize(
    ("averaging", "server_lr"), [("uniform", 1.0), ("weighted", 1.0), ("uniform", 0.6)]
)
def test_rounds_equal_a_float64_loop(averaging, server_lr):
    hp = {"feddyn_alpha": 0.3, "server_lr": server_lr}
    state, loop = four_rounds_beside(Loop, feddyn, averaging=averaging, hp=hp)
    own = 0.3 * np.asarray(state.clients.shift["w"]).reshape(len(SIZES), -1)
    np.testing.assert_allclose(own, loop.h_k[:, :12], atol=5e-6)
    server = 0.3 * np.asarray(state.server.extra["w"]).ravel()
    np.testing.assert_allclose(server, loop.h[:12], atol=5e-6)


# --- quadratics ----------------------------------------------------------------------------

DIMENSIONS = 5


class Quadratics(NamedTuple):
    """Client k's loss is 1/2 (theta - optimum_k)' hessian_k (theta - optimum_k); in place of a
    `Task`, k being the label of all its examples."""

    hessians: np.ndarray  # [K, P, P]
    optima: np.ndarray  # [K, P]

    def loss_and_gradient(self, variables, batch, key):
        away = variables["params"]["theta"] - jnp.float32(self.optima)[batch.labels[0]]
        slope = jnp.float32(self.hessians)[batch.labels[0]] @ away
        return away @ slope / 2, {"theta": slope}, variables

    def joint_optimum(self):
        """Of the mean of the losses."""
        slopes = np.einsum("kij,kj->i", self.hessians, self.optima)
        return np.linalg.solve(self.hessians.sum(0), slopes)


def different_quadratics(clients=6):
    """Eigenvalues from 0.2 to 3 along axes of each client's own."""
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.normal(size=(clients, DIMENSIONS, DIMENSIONS)))[0]
    values = rng.uniform(0.2, 3, size=(clients, 1, DIMENSIONS))
    return Quadratics((axes * values) @ axes.transpose(0, 2, 1), rng.normal(size=(clients, 5)))


def distance(build, quadratics, rounds, *, steps=10, **settings):
    """Of the global model from the joint optimum, after rounds of that many gradient steps."""
    clients = len(quadratics.optima)
    start = {"params": {"theta": jnp.zeros(DIMENSIONS)}, "state": {}}
    model = Model("quadratic", (1, 1, 1), clients, lambda key: start, apply=None)
    federation = small(
        lambda training, plan: build(training._replace(task=quadratics), plan),
        model=model,
        sizes=(4,) * clients,
        data=(np.zeros((4 * clients, 1, 1, 1), np.float32), np.repeat(np.arange(clients), 4)),
        epochs=steps,
        rounds=rounds,
        **{"hp": {"local_lr": 0.1, "feddyn_alpha": 0.3}, **settings},
    )
    theta = federation.model(federation.run(rounds)[0])["theta"]
    return float(np.linalg.norm(theta - quadratics.joint_optimum()))


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_it_reaches_the_joint_optimum_where_fedavg_does_not(participation, server_lr):
    quadratics = different_quadratics()
    hp = {"local_lr": 0.1, "feddyn_alpha": 0.3, "server_lr": server_lr}
    settings = {"participation": participation, "hp": hp}
    biased = distance(fedavg, quadratics, 400, hp={"local_lr": 0.1})
    assert biased > 0.02  # with everyone in every round, so that it is bias and no noise
    assert distance(feddyn, quadratics, 400, **settings) < min(1e-4, biased / 100)


def test_clients_that_are_alike_have_fedavgs_fixed_point():
    one = different_quadratics()
    alike = Quadratics(one.hessians[:1].repeat(6, 0), one.optima[:1].repeat(6, 0))
    for build in (fedavg, feddyn):
        assert distance(build, alike, 400) < 1e-5


# --- limits --------------------------------------------------------------------------------


def test_a_first_round_without_pull_is_fedavgs_some_steps_further():
    """As alpha vanishes, theta_i are those of plain SGD and h/alpha = -S/K times their mean change:
    w moves by 1 + S/K times that."""
    start = small(fedavg, hp={"local_lr": 0.1}).start()
    plain = small(fedavg, hp={"local_lr": 0.1}, epochs=2)
    limit = small(feddyn, hp={"local_lr": 0.1, "feddyn_alpha": 1e-9}, epochs=2)
    origin, after = plain.model(start), plain.model(plain.run(1)[0])
    found = limit.model(limit.run(1)[0])
    present = sum(size > 0 for size in SIZES)
    for name in origin:
        expected = origin[name] + (1 + present / len(SIZES)) * (after[name] - origin[name])
        np.testing.assert_allclose(found[name], expected, atol=1e-6)


def test_h_is_the_mean_of_the_clients_and_theirs_only_move_in_their_rounds():
    federation = small(
        feddyn,
        hp={"local_lr": 0.1, "feddyn_alpha": 0.3},
        participation=0.5,
        averaging="weighted",
    )
    state, seen = federation.start(), set()
    round_ = jax.jit(federation.algorithm.round)
    for r in range(5):
        before = np.asarray(state.clients.shift["w"])
        cohort = Cohort(federation.scheduler.round(r), federation.examples)
        state, _ = round_(federation.hp, state, jax.random.key(r), cohort)
        moved = (np.asarray(state.clients.shift["w"]) != before).any((1, 2))
        drawn = {int(k) for k in federation.scheduler.participants(r) if SIZES[k]}
        assert set(np.flatnonzero(moved)) == drawn
        seen |= drawn
        mean = jax.tree.map(lambda leaf: leaf.mean(0), state.clients.shift)
        assert_trees_all_close(state.server.extra, mean, atol=1e-6)
    assert len(seen) > 3


def test_batch_norm_statistics_are_averaged():
    """h has no part in them, nor has server_lr."""
    linear = linear_model()

    def init(key):
        return {**linear.init(key), "state": {"mean": jnp.zeros(4)}}

    def apply(variables, x, *, train, key=None):
        logits, _ = linear.apply(variables, x, train=train)
        mean = 0.9 * variables["state"]["mean"] + 0.1 * x.mean(0).ravel()
        return logits, {"mean": mean}

    model = linear._replace(init=init, apply=apply, embed=None)
    hp = {"local_lr": 0.1, "feddyn_alpha": 0.3, "server_lr": 0.5}
    states = []
    for build in (fedavg, feddyn):
        federation = small(build, hp=hp, model=model)
        states.append(federation.run(1)[0].server.variables["state"]["mean"])
    assert np.abs(states[0]).max() > 1e-3
    np.testing.assert_allclose(*states, rtol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, -0.1])
def test_alpha_is_positive(alpha):
    with pytest.raises(ConfigError, match="feddyn_alpha"):
        RunSpec("feddyn", hp={"feddyn_alpha": alpha}).resolved()
