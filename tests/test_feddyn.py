"""FedDyn against a float64 loop, the optimum of heterogeneous quadratics, and its limits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from support.data import SIZES
from support.networks import linear_model
from support.oracle import Loop, four_rounds_beside
from support.problems import small
from support.quadratics import Quadratics, different_quadratics, distance

from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.feddyn import feddyn
from fedjax_het.common.errors import ConfigError
from fedjax_het.engine.lanes import Cohort
from fedjax_het.settings.spec import RunSpec

# --- a float64 loop ------------------------------------------------------------------------


class Dyn(Loop):
    """The paper's Algorithm 1, with h_i (`kept`) and h as it writes them."""

    h = 0.0

    def first(self, client):
        return np.zeros_like(self.vector)

    def slope(self, model, batch):
        pull = self.hp["feddyn_alpha"] * (model - self.vector)
        return super().slope(model, batch) - self.kept[batch.client] + pull

    def end(self, client, model, steps):
        self.kept[client] = self.kept[client] - self.hp["feddyn_alpha"] * (model - self.vector)

    def serve(self, r, clients, models):
        alpha = self.hp["feddyn_alpha"]
        for share, model in zip(self.weights()[clients], models, strict=True):
            self.h = self.h - alpha * share * (model - self.vector)
        self.vector = self.towards(self.mean(clients, models) - self.h / alpha)


@pytest.mark.parametrize(
    ("averaging", "server_lr"), [("uniform", 1.0), ("weighted", 1.0), ("uniform", 0.6)]
)
def test_rounds_equal_a_float64_loop(averaging, server_lr):
    hp = {"feddyn_alpha": 0.3, "server_lr": server_lr}
    state, loop = four_rounds_beside(Dyn, feddyn, averaging=averaging, hp=hp)
    own = 0.3 * np.asarray(state.clients.shift["w"])
    theirs = [loop.params(kept)["w"] for kept in loop.kept]
    np.testing.assert_allclose(own, theirs, atol=5e-6)
    server = 0.3 * np.asarray(state.server.extra["w"])
    np.testing.assert_allclose(server, loop.params(loop.h)["w"], atol=5e-6)


# --- quadratics ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_it_reaches_the_joint_optimum_where_fedavg_does_not(participation, server_lr):
    quadratics = different_quadratics()
    hp = {"local_lr": 0.1, "feddyn_alpha": 0.3, "server_lr": server_lr}
    settings = {"participation": participation, "hp": hp}
    biased = distance(fedavg, quadratics, 400, hp={"local_lr": 0.1})
    assert biased > 0.02  # with everyone in every round, so that it is bias and no noise
    assert distance(feddyn, quadratics, 400, **settings) < min(1e-4, biased / 100)


@pytest.mark.slow
def test_clients_that_are_alike_have_fedavgs_fixed_point():
    one = different_quadratics()
    alike = Quadratics(one.hessians[:1].repeat(6, 0), one.optima[:1].repeat(6, 0))
    for build in (fedavg, feddyn):
        assert distance(build, alike, 400) < 1e-5


# --- limits --------------------------------------------------------------------------------


def test_a_first_round_without_pull_is_fedavgs_some_steps_further():
    """As alpha vanishes, theta_i are those of plain SGD and h/alpha = -S/K times their mean change:
    w moves by 1 + S/K times that, here twice, as all K that hold data take part."""
    start = small(fedavg, hp={"local_lr": 0.1}).start()
    plain = small(fedavg, hp={"local_lr": 0.1}, epochs=2)
    limit = small(feddyn, hp={"local_lr": 0.1, "feddyn_alpha": 1e-9}, epochs=2)
    origin, after = plain.model(start), plain.model(plain.run(1)[0])
    found = limit.model(limit.run(1)[0])
    for name in origin:
        expected = origin[name] + 2 * (after[name] - origin[name])
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
        mean = jax.tree.map(partial(np.average, axis=0, weights=SIZES), state.clients.shift)
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
