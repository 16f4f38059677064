"""FedDyn against a float64 loop, the optimum of heterogeneous quadratics, and its limits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from support.data import CLIENT_SIZES
from support.networks import make_linear_model
from support.quadratics import Quadratics, distance_to_optimum, make_heterogeneous_quadratics
from support.reference_loop import ReferenceFedAvg, run_four_rounds_and_compare
from support.small_federation import make_small_federation

from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.feddyn import feddyn
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.core.client_loop import Cohort
from fedjax_het.utils.errors import ConfigError

# --- a float64 loop ------------------------------------------------------------------------


class Dyn(ReferenceFedAvg):
    """The paper's Algorithm 1, with h_i (`kept`) and h as it writes them."""

    h = 0.0

    def init_client_state(self, client):
        return np.zeros_like(self.global_vector)

    def descent_direction(self, model, batch):
        pull = self.hp["feddyn_alpha"] * (model - self.global_vector)
        return super().descent_direction(model, batch) - self.client_states[batch.client] + pull

    def finish_client(self, client, model, steps):
        self.client_states[client] = self.client_states[client] - self.hp["feddyn_alpha"] * (
            model - self.global_vector
        )

    def update_server(self, r, clients, models):
        alpha = self.hp["feddyn_alpha"]
        for share, model in zip(self.client_weights()[clients], models, strict=True):
            self.h = self.h - alpha * share * (model - self.global_vector)
        self.global_vector = self.step_towards(self.weighted_mean(clients, models) - self.h / alpha)


@pytest.mark.parametrize(
    ("averaging", "server_lr"), [("uniform", 1.0), ("weighted", 1.0), ("uniform", 0.6)]
)
def test_rounds_equal_a_float64_loop(averaging, server_lr):
    hp = {"feddyn_alpha": 0.3, "server_lr": server_lr}
    state, loop = run_four_rounds_and_compare(Dyn, feddyn, averaging=averaging, hp=hp)
    own = 0.3 * np.asarray(state.clients.memory["w"])
    theirs = [loop.params(kept)["w"] for kept in loop.client_states]
    np.testing.assert_allclose(own, theirs, atol=5e-6)
    server = 0.3 * np.asarray(state.server.extra["w"])
    np.testing.assert_allclose(server, loop.params(loop.h)["w"], atol=5e-6)


# --- quadratics ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_it_reaches_the_joint_optimum_where_fedavg_does_not(participation, server_lr):
    quadratics = make_heterogeneous_quadratics()
    hp = {"local_lr": 0.1, "feddyn_alpha": 0.3, "server_lr": server_lr}
    settings = {"participation": participation, "hp": hp}
    biased = distance_to_optimum(fedavg, quadratics, 400, hp={"local_lr": 0.1})
    assert biased > 0.02  # with everyone in every round, so that it is bias and no noise
    assert distance_to_optimum(feddyn, quadratics, 400, **settings) < min(1e-4, biased / 100)


@pytest.mark.slow
def test_clients_that_are_alike_have_fedavgs_fixed_point():
    one = make_heterogeneous_quadratics()
    alike = Quadratics(one.hessians[:1].repeat(6, 0), one.optima[:1].repeat(6, 0))
    for build in (fedavg, feddyn):
        assert distance_to_optimum(build, alike, 400) < 1e-5


# --- limits --------------------------------------------------------------------------------


def test_a_first_round_without_pull_is_fedavgs_some_steps_further():
    """As alpha vanishes, theta_i are those of plain SGD and h/alpha = -S/K times their mean change:
    w moves by 1 + S/K times that, here twice, as all K that hold data take part."""
    start = make_small_federation(fedavg, hp={"local_lr": 0.1}).initial_state()
    plain = make_small_federation(fedavg, hp={"local_lr": 0.1}, epochs=2)
    limit = make_small_federation(feddyn, hp={"local_lr": 0.1, "feddyn_alpha": 1e-9}, epochs=2)
    origin, after = plain.global_params(start), plain.global_params(plain.run(1)[0])
    found = limit.global_params(limit.run(1)[0])
    for name in origin:
        expected = origin[name] + 2 * (after[name] - origin[name])
        np.testing.assert_allclose(found[name], expected, atol=1e-6)


def test_h_is_the_mean_of_the_clients_and_theirs_only_move_in_their_rounds():
    federation = make_small_federation(
        feddyn,
        hp={"local_lr": 0.1, "feddyn_alpha": 0.3},
        participation=0.5,
        averaging="weighted",
    )
    state, seen = federation.initial_state(), set()
    round_ = jax.jit(federation.algorithm.round)
    for r in range(5):
        before = np.asarray(state.clients.memory["w"])
        cohort = Cohort(federation.scheduler.make_round(r), federation.examples)
        state, _ = round_(federation.hp, state, jax.random.key(r), cohort)
        moved = (np.asarray(state.clients.memory["w"]) != before).any((1, 2))
        drawn = {int(k) for k in federation.scheduler.draw_cohort(r) if CLIENT_SIZES[k]}
        assert set(np.flatnonzero(moved)) == drawn
        seen |= drawn
        mean = jax.tree.map(partial(np.average, axis=0, weights=CLIENT_SIZES), state.clients.memory)
        assert_trees_all_close(state.server.extra, mean, atol=1e-6)
    assert len(seen) > 3


def test_batch_norm_statistics_are_averaged():
    """h has no part in them, nor has server_lr."""
    linear = make_linear_model()

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
        federation = make_small_federation(build, hp=hp, model=model)
        states.append(federation.run(1)[0].server.variables["state"]["mean"])
    assert np.abs(states[0]).max() > 1e-3
    np.testing.assert_allclose(*states, rtol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, -0.1])
def test_alpha_is_positive(alpha):
    with pytest.raises(ConfigError, match="feddyn_alpha"):
        RunSpec("feddyn", hp={"feddyn_alpha": alpha}).resolved()
