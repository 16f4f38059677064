"""FedDyn and FedDC against float64 loops, the optimum of heterogeneous quadratics, their limits."""

from functools import partial

import jax
import numpy as np
import pytest
from chex import assert_trees_all_close
from support.algorithm_builders import bind_options
from support.data import CLIENT_SIZES
from support.networks import make_centered_model
from support.quadratics import distance_to_optimum, make_heterogeneous_quadratics
from support.reference_loop import (
    CLIP_AND_DECAY,
    ClippedAndDecayed,
    ReferenceFedAvg,
    run_and_compare,
    run_four_rounds_and_compare,
)
from support.small_federation import make_small_federation

from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.feddc import feddc
from fedjax_het.algorithms.feddyn import feddyn
from fedjax_het.algorithms.scaffold import scaffold
from fedjax_het.core.client_loop import Cohort
from fedjax_het.core.optimizers import LocalTrainingOptions

HP = {"local_lr": 0.1, "feddyn_alpha": 0.3, "feddc_alpha": 0.3}
AVERAGING = [("uniform", 1.0), ("weighted", 1.0), ("uniform", 0.6)]

# --- float64 loops -------------------------------------------------------------------------


class Dyn(ReferenceFedAvg):
    """FedDyn's Algorithm 1, with h_i (`client_states`) and h as the paper writes them."""

    h = 0.0

    def init_client_state(self, client):
        return np.zeros_like(self.global_vector)

    def descent_direction(self, model, batch):
        pull = self.hp["feddyn_alpha"] * (model - self.global_vector)
        return super().descent_direction(model, batch) - self.client_states[batch.client] + pull

    def finish_client(self, client, model, steps):
        drift = model - self.global_vector
        self.client_states[client] = self.client_states[client] - self.hp["feddyn_alpha"] * drift

    def update_server(self, r, clients, models):
        alpha = self.hp["feddyn_alpha"]
        for share, model in zip(self.client_weights()[clients], models, strict=True):
            self.h = self.h - alpha * share * (model - self.global_vector)
        self.global_vector = self.step_towards(self.weighted_mean(clients, models) - self.h / alpha)


class DC(ReferenceFedAvg):
    """FedDC as the paper and its code write it: g_i from how far theta_i went under SGD, the
    server's means over all clients' states. `client_states`: h_i and g_i."""

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


@pytest.mark.parametrize(("averaging", "server_lr"), AVERAGING)
def test_feddyn_rounds_match_float64_loop(averaging, server_lr):
    hp = {"feddyn_alpha": 0.3, "server_lr": server_lr}
    state, loop = run_four_rounds_and_compare(Dyn, feddyn, averaging=averaging, hp=hp)
    own = 0.3 * np.asarray(state.clients.memory["w"])
    theirs = [loop.params(kept)["w"] for kept in loop.client_states]
    np.testing.assert_allclose(own, theirs, atol=5e-6)
    server = 0.3 * np.asarray(state.server.extra["w"])
    np.testing.assert_allclose(server, loop.params(loop.h)["w"], atol=5e-6)


@pytest.mark.parametrize(("averaging", "server_lr"), AVERAGING)
def test_feddc_rounds_match_float64_loop(averaging, server_lr):
    hp = {"feddc_alpha": 0.3, "server_lr": server_lr}
    state, loop = run_four_rounds_and_compare(DC, feddc, averaging=averaging, hp=hp)
    for at, own in enumerate(state.clients.memory):
        theirs = [loop.params(kept[at])["w"] for kept in loop.client_states]
        np.testing.assert_allclose(own["w"], theirs, atol=1e-5)


class ClippedDC(ClippedAndDecayed, DC):
    """FedDC in the paper's form, of steps with clipping and weight decay."""


@pytest.mark.parametrize("hp", CLIP_AND_DECAY, ids=" ".join)
def test_feddc_with_clipping_and_decay(hp):
    details = LocalTrainingOptions(optional_hyperparameters=tuple(hp))
    settings = {"participation": 0.5, "epochs": 2, "details": details}
    hp = {"local_lr": 0.2, "feddc_alpha": 0.3, **hp}
    loop = ClippedDC(make_small_federation(feddc, hp=hp, **settings))
    state = run_and_compare(loop, 4, atol=5e-6)
    own = [loop.params(gradient)["w"] for _, gradient in loop.client_states]
    np.testing.assert_allclose(state.clients.memory.gradient["w"], own, atol=1e-5)
    assert loop.num_clipped > 3 or "local_clip_norm" not in hp


# --- quadratics ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize(("build", "server_lr"), [(feddyn, 1.0), (feddyn, 0.5), (feddc, 1.0)])
def test_joint_optimum_is_reached(build, server_lr, participation):
    quadratics = make_heterogeneous_quadratics()
    settings = {"participation": participation, "hp": {**HP, "server_lr": server_lr}}
    biased = distance_to_optimum(fedavg, quadratics, 400, hp={"local_lr": 0.1})
    assert biased > 0.02  # with all clients in every round, so that it is bias and no noise
    assert distance_to_optimum(build, quadratics, 400, **settings) < min(1e-4, biased / 100)


# --- limits --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "hp", "epochs"),
    [(feddyn, {"feddyn_alpha": 1e-9}, 2), (feddc, {"feddc_alpha": 0.0}, 1)],
)
def test_first_round_without_pull_extends_fedavg(build, hp, epochs):
    """As alpha vanishes, theta_i are those of plain SGD, and the server adds S/K times their mean
    change (-h/alpha, or the mean of h_i), here all of it, as all K that hold data take part."""
    plain = make_small_federation(fedavg, hp={"local_lr": 0.1}, epochs=epochs)
    limit = make_small_federation(build, hp={"local_lr": 0.1, **hp}, epochs=epochs)
    origin = plain.global_params(plain.initial_state())
    after, actual = plain.train(1), limit.train(1)
    for name in origin:
        expected = origin[name] + 2 * (after[name] - origin[name])
        np.testing.assert_allclose(actual[name], expected, atol=1e-6)


@pytest.mark.parametrize("build", [feddyn, feddc])
def test_server_means_cover_all_clients(build):
    """Clients' states change in their own rounds only."""
    federation = make_small_federation(build, hp=HP, participation=0.5, averaging="weighted")
    state, seen = federation.initial_state(), set()
    round_ = jax.jit(federation.algorithm.round)
    for r in range(5):
        before = np.asarray(jax.tree.leaves(state.clients.memory)[-1])
        cohort = Cohort(federation.scheduler.make_round(r), federation.examples)
        state, _ = round_(federation.hp, state, jax.random.key(r), cohort)
        after = np.asarray(jax.tree.leaves(state.clients.memory)[-1])
        drawn = {int(k) for k in federation.scheduler.draw_cohort(r) if CLIENT_SIZES[k]}
        assert set(np.flatnonzero((after != before).any((1, 2)))) == drawn
        seen |= drawn
        mean = jax.tree.map(partial(np.average, axis=0, weights=CLIENT_SIZES), state.clients.memory)
        assert_trees_all_close(state.server.extra, mean, atol=1e-6)
    assert len(seen) > 3 and max(np.abs(a).max() for a in jax.tree.leaves(mean)) > 1e-2


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_feddc_gradients_match_scaffold(optimizer):
    """Also under Adam, where (w - theta) / (steps lr) is no gradient."""
    settings = {"optimizer": optimizer, "epochs": 2, "hp": {"local_lr": 0.1, "feddc_alpha": 0.0}}
    control, state = (
        make_small_federation(build, **settings).run(1)[0]
        for build in (bind_options(scaffold), feddc)
    )
    assert_trees_all_close(state.clients.memory.gradient, control.clients.memory, atol=1e-6)
    assert_trees_all_close(state.server.extra.gradient, control.server.extra, atol=1e-6)


def test_feddyn_averages_batch_norm_statistics():
    """h has no part in them, nor has server_lr."""
    settings = {"hp": {**HP, "server_lr": 0.5}, "model": make_centered_model()}
    federations = [make_small_federation(build, **settings) for build in (fedavg, feddyn)]
    states = [each.run(1)[0].server.variables["state"]["first"]["mean"] for each in federations]
    assert np.abs(states[0]).max() > 1e-3
    np.testing.assert_allclose(*states, rtol=1e-6)
