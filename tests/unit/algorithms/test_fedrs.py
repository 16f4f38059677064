"""FedRS against a float64 loop, and its limits."""

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

from fedjax_het import ConfigError, RunSpec, simulate
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.fedrs import fedrs


class ReferenceFedRS(ReferenceFedAvg):
    """Clients restrict the logits of classes that they lack."""

    def descent_direction(self, model, batch):
        params = self.params(model)
        is_present = self.class_counts(batch.client) > 0
        factors = np.where(is_present, 1, self.hp["fedrs_alpha"])
        logits = factors * compute_logits(params, batch.x)
        rows = factors * logit_gradient(logits, batch.y) / len(batch.y)
        return flatten_params(backpropagate(params, batch.x, rows))


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
def test_rounds_match_float64_loop(averaging):
    _, loop = run_four_rounds_and_compare(
        ReferenceFedRS,
        fedrs,
        averaging=averaging,
        hp={"fedrs_alpha": 0.4, "server_lr": 0.7},
        model=make_two_layer_model(),
    )
    assert (np.stack([loop.class_counts(k) for k in loop.history[0]]) == 0).any()


def test_alpha_1_is_fedavg():
    settings = {"participation": 0.5, "epochs": 2, "optimizer": "momentum", "keep": True}
    hp = {"local_lr": 0.1, "local_momentum": 0.5}
    average = make_small_federation(fedavg, hp=hp, **settings).train(3)
    restricted = make_small_federation(fedrs, hp={**hp, "fedrs_alpha": 1.0}, **settings).train(3)
    for name, leaf in average.items():
        np.testing.assert_allclose(restricted[name], leaf, rtol=1e-6, atol=1e-7)


def test_alpha_0_keeps_absent_columns():
    settings = {"hp": {"local_lr": 0.3, "fedrs_alpha": 0.0}, "sizes": (8,)}
    federation = make_small_federation(fedrs, **settings)
    (absent,) = np.flatnonzero(ReferenceFedAvg(federation).class_counts(0) == 0)
    start = federation.initial_state()
    before, after = federation.global_params(start), federation.train(2, start)
    np.testing.assert_array_equal(after["w"][:, absent], before["w"][:, absent])
    assert np.abs(after["w"] - before["w"]).max() > 0.1


def test_alpha_above_1_is_one_line():
    with pytest.raises(ConfigError, match="fedrs_alpha") as raised:
        simulate(RunSpec("fedrs", model="mlp", rounds=1, hp={"fedrs_alpha": 1.5}))
    assert "\n" not in str(raised.value)
