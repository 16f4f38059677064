"""FedLC against a float64 loop, and its limit."""

import numpy as np
import pytest
from support.reference_loop import (
    ReferenceFedAvg,
    flatten_params,
    logit_gradient,
    run_four_rounds_and_compare,
)
from support.small_federation import make_small_federation
from support.two_layers import backpropagate, compute_logits, make_two_layer_model

from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.fedlc import fedlc


class ReferenceFedLC(ReferenceFedAvg):
    """Clients calibrate their logits."""

    def descent_direction(self, model, batch):
        params, counts = self.params(model), self.class_counts(batch.client)
        with np.errstate(divide="ignore"):
            margins = self.hp["fedlc_tau"] * counts.astype(float) ** -0.25
        logits = compute_logits(params, batch.x) - margins
        rows = logit_gradient(logits, batch.y) / len(batch.y)
        return flatten_params(backpropagate(params, batch.x, rows))


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
def test_rounds_match_float64_loop(averaging):
    _, loop = run_four_rounds_and_compare(
        ReferenceFedLC,
        fedlc,
        averaging=averaging,
        hp={"fedlc_tau": 1.5, "server_lr": 0.7},
        model=make_two_layer_model(),
    )
    counts = np.stack([loop.class_counts(k) for k in loop.history[0]])
    assert (counts == 0).any() and len(np.unique(counts)) > 3


def test_tau_0_is_fedavg():
    settings = {"participation": 0.5, "epochs": 2, "optimizer": "momentum", "keep": True}
    hp = {"local_lr": 0.1, "local_momentum": 0.5}
    average = make_small_federation(fedavg, hp=hp, **settings).train(3)
    calibrated = make_small_federation(fedlc, hp={**hp, "fedlc_tau": 0.0}, **settings).train(3)
    for name, leaf in average.items():
        np.testing.assert_allclose(calibrated[name], leaf, rtol=1e-6, atol=1e-7)


def test_logits_of_absent_classes_do_not_move():
    """Every client lacks one class, whose column of the last layer stays in the first round."""
    settings = {"hp": {"local_lr": 0.3, "fedlc_tau": 0.1}, "sizes": (8,)}
    federation = make_small_federation(fedlc, **settings)
    (absent,) = np.flatnonzero(ReferenceFedAvg(federation).class_counts(0) == 0)
    start = federation.initial_state()
    before, after = federation.global_params(start), federation.train(2, start)
    np.testing.assert_array_equal(after["w"][:, absent], before["w"][:, absent])
    assert np.abs(after["w"] - before["w"]).max() > 0.1
