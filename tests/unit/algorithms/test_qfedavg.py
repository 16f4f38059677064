"""q-FedAvg against a float64 loop, its limit FedAvg, and its fairness."""

import numpy as np
import pytest
from chex import assert_trees_all_close
from support.algorithm_builders import make_method_federation
from support.data import BATCH_SIZE, CLIENT_SIZES
from support.reference_loop import (
    ReferenceFedAvg,
    cross_entropy,
    flatten_params,
    name_leaves,
    run_and_compare,
)
from support.two_layers import compute_logits, cross_entropy_gradient, make_two_layer_model

from fedjax_het import ConfigError, RunSpec, simulate
from fedjax_het.core.optimizers import LocalTrainingOptions

HP = {"local_lr": 0.2, "server_lr": 0.9}


class ReferenceQFedAvg(ReferenceFedAvg):
    """Clients weigh by powers of their losses, the server's step is bounded."""

    def minibatches(self, r, client):
        return super().minibatches(r, client)[-(-self.client_sizes[client] // BATCH_SIZE) :]

    def loss_gradient(self, params, x, y):
        return cross_entropy_gradient(params, x, y)

    def loss(self, client, model):
        held = self.federation.scheduler.partition.client_indices(client)
        logits = compute_logits(self.params(model), self.inputs[held])
        return cross_entropy(logits, self.labels[held])

    def update_server(self, r, clients, models):
        q, lipschitz = self.hp["qfedavg_q"], 1 / self.hp["local_lr"]
        losses = [self.loss(k, self.global_vector) for k in clients]
        gradients = [lipschitz * (self.global_vector - model) for model in models]
        pairs = list(zip(losses, gradients, strict=True))
        step = self.weighted_mean(clients, [f**q * g for f, g in pairs])
        bounds = [q * f ** (q - 1) * np.sum(g**2) + lipschitz * f**q for f, g in pairs]
        step = step / self.weighted_mean(clients, bounds)
        self.global_vector = self.global_vector - self.hp["server_lr"] * step


def make_federation(name="qfedavg", hp=None, **settings):
    hp = HP | (hp or {})
    settings = {"participation": 0.5, "epochs": 2, "model": make_two_layer_model()} | settings
    return make_method_federation(name, hp=hp, **settings)


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
@pytest.mark.parametrize("q", [0.5, 3.0])
def test_rounds_match_float64_loop(q, averaging):
    loop = ReferenceQFedAvg(make_federation(hp={"qfedavg_q": q}, averaging=averaging))
    run_and_compare(loop, 4, atol=1e-6)
    assert loop.count_repeat_clients() >= 2


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
def test_q_of_zero_is_fedavg(averaging):
    settings = {"batch_size": max(CLIENT_SIZES), "averaging": averaging, "epochs": 3}
    actual = make_federation(hp={"qfedavg_q": 0.0}, **settings).train(3)
    assert_trees_all_close(actual, make_federation("fedavg", **settings).train(3), atol=1e-6)


def test_local_steps_follow_a_whole_pass():
    """The measured loss does not depend on the number of local steps."""
    details = LocalTrainingOptions(num_steps=1)
    settings = {"details": details, "batch_size": max(CLIENT_SIZES), "hp": {"qfedavg_q": 2.0}}
    one_epoch = make_federation(**{**settings, "details": LocalTrainingOptions()}, epochs=1)
    assert_trees_all_close(make_federation(**settings).train(2), one_epoch.train(2), atol=1e-6)


def test_larger_q_makes_losses_more_equal():
    """Full batches: the variance of the clients' losses decreases with q."""
    variances = []
    for q in (0.0, 4.0):
        hp = {"qfedavg_q": q, "local_lr": 0.1, "server_lr": 1.0}
        federation = make_federation(hp=hp, batch_size=20, participation=1.0, rounds=150)
        loop = ReferenceQFedAvg(federation)
        vector = flatten_params(name_leaves(federation.train(150)))
        variances.append(np.var([loop.loss(k, vector) for k in np.flatnonzero(CLIENT_SIZES)]))
    assert variances[1] < 0.8 * variances[0], variances


def test_bad_input_is_one_line():
    with pytest.raises(ConfigError, match=r"qfedavg_q = -1.0: expected") as raised:
        simulate(RunSpec("qfedavg", hp={"qfedavg_q": -1.0}))
    assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match="lr_step_schedule"):
        make_federation(details=LocalTrainingOptions(lr_schedule="cosine"))
