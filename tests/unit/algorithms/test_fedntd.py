"""FedNTD against a float64 loop, and its limits."""

import numpy as np
import pytest
from support.reference_loop import (
    ReferenceFedAvg,
    flatten_params,
    logit_gradient,
    run_four_rounds_and_compare,
    softmax,
)
from support.small_federation import make_small_federation
from support.two_layers import backpropagate, compute_logits, make_two_layer_model

from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.fedntd import fedntd


class ReferenceFedNTD(ReferenceFedAvg):
    """Clients distill the logits of the classes that are not true."""

    def descent_direction(self, model, batch):
        params, received = self.params(model), self.params(self.global_vector)
        beta, tau = self.hp["fedntd_beta"], self.hp["fedntd_tau"]
        logits, targets = (compute_logits(p, batch.x) for p in (params, received))
        rows = logit_gradient(logits, batch.y)
        for row, own, target, y in zip(rows, logits, targets, batch.y, strict=True):
            others = np.arange(len(own)) != y
            # tau^2 times the gradient of the divergence, which is 1 / tau times the difference.
            row[others] += beta * tau * (softmax(own[others] / tau) - softmax(target[others] / tau))
        return flatten_params(backpropagate(params, batch.x, rows / len(batch.y)))


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
def test_rounds_match_float64_loop(averaging):
    run_four_rounds_and_compare(
        ReferenceFedNTD,
        fedntd,
        averaging=averaging,
        hp={"fedntd_beta": 1.7, "fedntd_tau": 2.5, "server_lr": 0.7},
        model=make_two_layer_model(),
    )


def test_beta_0_is_fedavg():
    settings = {"participation": 0.5, "epochs": 2, "optimizer": "momentum", "keep": True}
    hp = {"local_lr": 0.1, "local_momentum": 0.5}
    average = make_small_federation(fedavg, hp=hp, **settings).train(3)
    hp |= {"fedntd_beta": 0.0, "fedntd_tau": 1.0}
    distilled = make_small_federation(fedntd, hp=hp, **settings).train(3)
    for name, leaf in average.items():
        np.testing.assert_allclose(distilled[name], leaf, rtol=1e-6, atol=1e-7)


def test_large_beta_keeps_differences_of_other_classes():
    """For images of one class, the logits of the other two keep their difference."""
    images = np.random.default_rng(0).normal(size=(8, 2, 2, 1)).astype(np.float32)
    differences = []
    for beta in (0.0, 100.0):
        federation = make_small_federation(
            fedntd,
            hp={"local_lr": 0.02, "fedntd_beta": beta, "fedntd_tau": 1.0},
            sizes=(8,),
            data=(images, np.zeros(8, np.int32)),
            epochs=200,
        )
        start = federation.initial_state()
        before, after = (
            images.reshape(8, -1) @ params["w"] + params["b"]
            for params in (federation.global_params(start), federation.train(1, start))
        )
        change = (after - before)[:, 1] - (after - before)[:, 2]
        differences.append(np.abs(change).max())
    assert differences[1] < 0.1 * differences[0]
