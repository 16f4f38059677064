"""FedSAM, MoFedSAM and FedCM against float64 loops, and their limits."""

import jax
import numpy as np
import pytest
from chex import assert_trees_all_close
from support.algorithm_builders import make_method_federation
from support.networks import make_curved_model
from support.reference_loop import (
    CLIP_AND_DECAY,
    ClippedAndDecayed,
    ReferenceFedAvg,
    run_and_compare,
)
from support.two_layers import cross_entropy_gradient, make_two_layer_model

from fedjax_het import ConfigError, RunSpec, simulate
from fedjax_het.core.optimizers import LocalTrainingOptions

LR = 0.3
TWINS = np.ones((3, 2, 2, 1), np.float32), np.arange(3, dtype=np.int32)  # one of each class


class TwoLayers(ReferenceFedAvg):
    """Clients train a network with one hidden layer."""

    def loss_gradient(self, params, x, y):
        return cross_entropy_gradient(params, x, y)


class ReferenceFedSAM(TwoLayers):
    """Steps follow the gradient at a distance of rho uphill."""

    def descent_direction(self, model, batch):
        gradient = self.gradient(model, batch.x, batch.y)
        uphill = self.hp["fedsam_rho"] * gradient / np.linalg.norm(gradient)
        return self.gradient(model + uphill, batch.x, batch.y)


class ClientMomentum(ReferenceFedAvg):
    """A mixin: clients mix the last change of the server, per step and rate, into their steps."""

    weight_name, global_direction = "fedcm_alpha", 0.0

    def descent_direction(self, model, batch):
        weight, direction = self.hp[self.weight_name], super().descent_direction(model, batch)
        return weight * direction + (1 - weight) * self.global_direction

    def finish_client(self, client, model, steps):
        self.client_states[client] = steps

    def update_server(self, r, clients, models):
        steps = self.weighted_mean(clients, [self.client_states[k] for k in clients])
        change = self.global_vector - self.weighted_mean(clients, models)
        self.global_direction = change / (self.hp["local_lr"] * steps)
        super().update_server(r, clients, models)


class ReferenceFedCM(ClientMomentum, TwoLayers):
    """FedCM."""


class ClippedFedCM(ClippedAndDecayed, ReferenceFedCM):
    """FedCM, whose steps are clipped and have weight decay."""


class ReferenceMoFedSAM(ClientMomentum, ReferenceFedSAM):
    """MoFedSAM."""

    weight_name = "mofedsam_beta"


class MomentumFedCM(ReferenceFedCM):
    """FedCM with a local momentum of 0.9: the global direction is the mean of the mixtures."""

    def initial_client_model(self, client):
        self.buffer, self.mixtures = 0.0, []
        return super().initial_client_model(client)

    def local_step(self, model, batch):
        self.mixtures.append(self.descent_direction(model, batch))
        self.buffer = 0.9 * self.buffer + self.mixtures[-1]
        return model - LR * self.buffer

    def finish_client(self, client, model, steps):
        self.client_states[client] = (np.sum(self.mixtures, 0), steps)

    def update_server(self, r, clients, models):
        states = [self.client_states[k] for k in clients]
        sums, steps = (self.weighted_mean(clients, values) for values in zip(*states, strict=True))
        TwoLayers.update_server(self, r, clients, models)
        self.global_direction = sums / steps


CASES = {
    "fedsam": (ReferenceFedSAM, {"fedsam_rho": 0.5}),
    "mofedsam": (ReferenceMoFedSAM, {"fedsam_rho": 0.5, "mofedsam_beta": 0.4}),
    "fedcm": (ReferenceFedCM, {"fedcm_alpha": 0.3}),
}


def make_federation(name, hp, **settings):
    """A federation whose clients train two layers and come back."""
    hp = {"local_lr": LR, "server_lr": 0.8} | hp
    settings = {"participation": 0.5, "epochs": 2, "model": make_two_layer_model()} | settings
    return make_method_federation(name, hp=hp, **settings)


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
@pytest.mark.parametrize("name", CASES)
def test_rounds_match_float64_loop(name, averaging):
    make_loop, hp = CASES[name]
    loop = make_loop(make_federation(name, hp, averaging=averaging))
    run_and_compare(loop, 4, atol=2e-6)
    assert loop.count_repeat_clients() >= 2


def test_direction_is_mean_of_mixtures_under_momentum():
    hp = {"fedcm_alpha": 0.3, "local_momentum": 0.9}
    federation = make_federation("fedcm", hp, optimizer="momentum")
    run_and_compare(MomentumFedCM(federation), 3, atol=5e-6)


@pytest.mark.parametrize("hp", CLIP_AND_DECAY, ids=" ".join)
def test_fedcm_with_clipping_and_decay(hp):
    details = LocalTrainingOptions(optional_hyperparameters=tuple(hp))
    federation = make_federation("fedcm", {"fedcm_alpha": 0.6} | hp, details=details)
    run_and_compare(ClippedFedCM(federation), 4, atol=2e-6)


LIMITS = [
    ("fedsam", {"fedsam_rho": 0.0}, "fedavg", {}),
    ("fedcm", {"fedcm_alpha": 1.0}, "fedavg", {}),
    ("mofedsam", {"mofedsam_beta": 1.0}, "fedsam", {}),
    ("mofedsam", {"fedsam_rho": 0.0}, "fedcm", {}),
]


@pytest.mark.parametrize(("name", "hp", "other", "other_hp"), LIMITS)
def test_limit_is_other_method(name, hp, other, other_hp):
    settings = {"optimizer": "adam", "keep": True, "averaging": "weighted"}
    expected = make_federation(other, {"local_lr": 0.05} | other_hp, **settings).train(3)
    actual = make_federation(name, {"local_lr": 0.05} | hp, **settings).train(3)
    assert_trees_all_close(actual, expected, atol=1e-6)


def test_statistics_include_first_pass_only():
    """The running means of a hidden layer after a round without steps are the means of FedAvg."""
    settings = {"model": make_curved_model(centred=True), "participation": 1.0}
    hp = {"fedsam_rho": 5.0, "local_lr": 0.0}
    means = [
        make_federation(name, hp, **settings).run(1)[0].server.variables["state"]["mean"]
        for name in ("fedsam", "fedavg")
    ]
    np.testing.assert_allclose(*means, atol=1e-6)
    assert np.abs(means[0]).max() > 0.05


def test_zero_gradient_has_no_perturbation():
    """Equal images of all classes have a gradient of zero at weights of zero."""
    federation = make_federation("fedsam", {"fedsam_rho": 1.0}, sizes=(3,), data=TWINS)
    start = federation.initial_state()
    params = jax.tree.map(np.zeros_like, start.server.variables)
    start = start._replace(server=start.server._replace(variables=params))
    assert_trees_all_close(federation.train(1, start), params["params"], atol=1e-7)


@pytest.mark.parametrize(
    ("name", "hp", "message"),
    [
        ("fedsam", {"fedsam_rho": -0.1}, "fedsam_rho = -0.1: expected"),
        ("mofedsam", {"mofedsam_beta": 0.0}, "mofedsam_beta = 0.0: expected"),
        ("fedcm", {"fedcm_alpha": 1.5}, "fedcm_alpha = 1.5: expected"),
    ],
)
def test_bad_input_is_one_line(name, hp, message):
    with pytest.raises(ConfigError, match=message) as raised:
        simulate(RunSpec(name, hp=hp))
    assert "\n" not in str(raised.value)
