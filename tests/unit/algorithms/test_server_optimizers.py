"""FedAvgM, FedAdagrad, FedAdam, FedYogi, FedNova: float64 loops, closed forms and their limits."""

import numpy as np
import pytest
from support.algorithm_builders import bind_options
from support.data import CLIENT_SIZES
from support.markers import slow_case
from support.reference_loop import ReferenceFedAvg, flatten_params, run_and_compare
from support.small_federation import make_small_federation

from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.fednova import fednova
from fedjax_het.algorithms.fedopt import (
    AdaptiveServerHyperParameters,
    fedadagrad,
    fedadam,
    fedavgm,
    fedyogi,
)
from fedjax_het.systems import Dropout, PartialWork
from fedjax_het.utils.errors import ConfigError

LR = 0.2
# Changes of the blobs' weights are 0.01 to 0.3: a tau that matters beside them.
ADAPTIVE = {**vars(AdaptiveServerHyperParameters()), "server_lr": 0.3, "server_tau": 0.05}


class Momentum(ReferenceFedAvg):
    """SGD with momentum of the clients' own, and of each a_i: what a gradient of 1 in every step
    adds up to."""

    def initial_client_model(self, client):
        self.buffer, self.unit, self.work = 0.0, 0.0, 0.0
        return super().initial_client_model(client)

    def local_step(self, model, batch):
        local = self.hp["local_momentum"]
        self.buffer = local * self.buffer + self.descent_direction(model, batch)
        self.unit = local * self.unit + 1
        self.work += self.unit
        return model - LR * self.buffer

    def finish_client(self, client, model, steps):
        self.client_states[client] = self.work


class AvgM(Momentum):
    """The paper's, and what options make of it."""

    m, damped, nesterov = 0.0, False, False

    def update_server(self, r, clients, models):
        change, beta = (
            self.weighted_mean(clients, models) - self.global_vector,
            self.hp["server_momentum"],
        )
        self.m = beta * self.m - (1 - beta if self.damped else 1) * change
        ahead = beta * self.m - change if self.nesterov else self.m
        self.global_vector = self.global_vector - self.hp["server_lr"] * ahead


class Nesterov(AvgM):
    nesterov = True


class Damped(AvgM):
    damped = True


class Adam(Momentum):
    """Reddi et al.'s Algorithm 2."""

    m, v = 0.0, None

    def update_server(self, r, clients, models):
        beta1, beta2, tau = (self.hp[f"server_{name}"] for name in ("beta1", "beta2", "tau"))
        change = self.weighted_mean(clients, models) - self.global_vector
        v = np.full_like(self.global_vector, tau**2) if self.v is None else self.v
        self.m, self.v = beta1 * self.m + (1 - beta1) * change, self.square(v, beta2, change)
        self.global_vector = self.global_vector + self.hp["server_lr"] * self.m / (
            np.sqrt(self.v) + tau
        )

    def square(self, v, beta2, change):
        return beta2 * v + (1 - beta2) * change**2


class Yogi(Adam):
    def square(self, v, beta2, change):
        return v - (1 - beta2) * change**2 * np.sign(v - change**2)


class Adagrad(Adam):
    def square(self, v, beta2, change):
        return v + change**2


class Nova(Momentum):
    def update_server(self, r, clients, models):
        work = [self.client_states[k] for k in clients]
        steps = [(model - self.global_vector) / a for model, a in zip(models, work, strict=True)]
        change = self.weighted_mean(clients, work) * self.weighted_mean(clients, steps)
        self.global_vector = self.global_vector + self.hp["server_lr"] * change


MOMENTUM = {"server_lr": 0.7, "server_momentum": 0.8}
CASES = {
    "fedavgm": (bind_options(fedavgm), MOMENTUM, AvgM),
    "nesterov": (bind_options(fedavgm, nesterov=True), MOMENTUM, Nesterov),
    "damped": (bind_options(fedavgm, damped=True), {**MOMENTUM, "server_lr": 2.0}, Damped),
    "fedadam": (fedadam, ADAPTIVE, Adam),
    "fedyogi": (fedyogi, ADAPTIVE, Yogi),
    "fedadagrad": (fedadagrad, ADAPTIVE, Adagrad),
    "fednova": (fednova, {"server_lr": 0.7}, Nova),
}


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
@pytest.mark.parametrize(
    ("name", "momentum"), [*((name, 0.0) for name in CASES), ("fednova", 0.9), ("fedavgm", 0.9)]
)
def test_rounds_match_float64_loop(name, momentum, averaging):
    build, hp, make_loop = CASES[name]
    federation = make_small_federation(
        build,
        hp={"local_lr": LR, "local_momentum": momentum, **hp},
        optimizer="momentum" if momentum else "sgd",
        participation=0.7,
        averaging=averaging,
        epochs=2,
    )
    loop = make_loop(federation)
    run_and_compare(loop, 3, atol=5e-6)
    works = [{loop.client_states[k] for k in clients} for clients in loop.history]
    assert max(map(len, works)) > 1  # clients made different numbers of steps


@pytest.mark.parametrize("name", ["fedavg", "fedadam", "fednova"])
def test_rounds_with_partial_work_and_dropout_match_float64_loop(name):
    build, hp, make_loop = CASES.get(name, (fedavg, {}, Momentum))
    federation = make_small_federation(
        build,
        hp={"local_lr": LR, "local_momentum": 0.9, **hp},
        optimizer="momentum",
        averaging="weighted",
        epochs=4,
        systems=(PartialWork(stragglers=0.7, unit="steps"), Dropout(probability=0.4)),
    )
    loop = make_loop(federation)
    run_and_compare(loop, 3, atol=5e-6)
    assert len({len(clients) for clients in loop.history}) > 1  # clients dropped out
    steps = [
        {len(loop.minibatches(r, k)) for r in range(3)}
        for k, size in enumerate(CLIENT_SIZES)
        if size
    ]
    assert max(map(len, steps)) > 1  # a client made different numbers of steps


# --- closed forms and limits ---------------------------------------------------------------


def changes_of(build, hp, **settings):
    """-> (change of the global model in a first round, that of FedAvg)."""
    moved = []
    for one, own in ((build, hp), (fedavg, {})):
        federation = make_small_federation(one, hp={"local_lr": LR, **own}, **settings)
        before, after = federation.initial_state(), federation.run(1)[0]
        moved.append(federation.global_params(after)["w"] - federation.global_params(before)["w"])
    return moved


@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedadagrad"])
def test_first_adaptive_step_has_no_bias_correction(name):
    beta1, beta2, tau, lr = 0.7, 0.9, 0.05, 0.3
    hp = {"server_beta1": beta1, "server_beta2": beta2, "server_tau": tau, "server_lr": lr}
    actual, change = changes_of(CASES[name][0], hp)
    assert (np.abs(change) > tau).any() and (np.abs(change) < tau).any()  # either sign of Yogi's
    square = beta2 * tau**2 + (1 - beta2) * change**2
    if name == "fedyogi":
        square = tau**2 + (1 - beta2) * change**2 * np.sign(change**2 - tau**2)
    if name == "fedadagrad":
        square = tau**2 + change**2
    expected = lr * (1 - beta1) * change / (np.sqrt(square) + tau)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_adaptive_step_with_large_tau_is_fedavg():
    """sqrt(v) + tau is 2 tau on entries far below tau: a step of FedAvg with server_lr / 2 tau."""
    hp = {"server_beta1": 0.0, "server_beta2": 0.0, "server_tau": 1e3, "server_lr": 1e3}
    actual, change = changes_of(fedadam, hp)
    np.testing.assert_allclose(actual, change, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("optimizer", [slow_case("sgd"), slow_case("momentum"), "adam"])
def test_fednova_with_equal_steps_is_fedavg(optimizer):
    settings = {"hp": {"local_lr": 0.1, "local_momentum": 0.9}, "optimizer": optimizer, "epochs": 2}
    settings |= {"participation": 0.7, "averaging": "weighted"}
    for sizes, alike in (((8, 7, 5, 8, 6, 8), True), (CLIENT_SIZES, False)):
        plain, nova = (
            make_small_federation(build, sizes=sizes, **settings).run(3)[0]
            for build in (fedavg, fednova)
        )
        gap = plain.server.variables["params"]["w"] - nova.server.variables["params"]["w"]
        assert (np.abs(gap).max() < 1e-6) == alike


def test_fednova_weighs_clients_not_steps():
    """In the limit of small steps its change is tau_eff times the mean of the clients' mean
    gradients, where FedAvg's is the mean of their sums."""
    federation = make_small_federation(fednova, hp={"local_lr": 1e-4})
    loop = ReferenceFedAvg(federation)
    moved = flatten_params(federation.train(1)) - loop.global_vector
    sums, steps = [], []
    for k in np.flatnonzero(CLIENT_SIZES):
        batches = loop.minibatches(0, k)
        sums.append(sum(loop.gradient(loop.global_vector, batch.x, batch.y) for batch in batches))
        steps.append(len(batches))
    means = [total / count for total, count in zip(sums, steps, strict=True)]
    expected = -1e-4 * np.mean(steps) * np.mean(means, 0)
    np.testing.assert_allclose(moved, expected, atol=2e-7)
    gap = loop.params(moved + 1e-4 * np.mean(sums, 0))["w"]
    assert np.abs(gap).max() > 5e-6  # FedAvg's is another


def test_fednova_rejects_kept_momentum():
    with pytest.raises(ConfigError, match="optimizer_state = 'keep'"):
        make_small_federation(
            fednova, hp={"local_lr": LR, "local_momentum": 0.9}, optimizer="momentum", keep=True
        )


# --- the server's state --------------------------------------------------------------------
