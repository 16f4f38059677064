"""LG-FedAvg against a float64 loop, and its limits."""

import numpy as np
import pytest
from chex import assert_trees_all_equal
from support.algorithm_builders import make_method_federation
from support.two_layers import (
    ReferenceLocalLayer,
    make_two_layer_model,
    run_and_compare_personal_models,
)

from fedjax_het import ConfigError, RunSpec, simulate
from fedjax_het.methods import num_bytes


def make_federation(name="lg_fedavg", options=None, **settings):
    settings = {"participation": 0.5, "epochs": 2, "client_test_model": "personal", **settings}
    hp = {"local_lr": 0.3, "server_lr": 0.7}
    return make_method_federation(name, options, hp=hp, model=make_two_layer_model(), **settings)


class ReferenceLGFedAvg(ReferenceLocalLayer):
    """Clients go on with their own body."""

    local_layer = "hidden"


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
def test_rounds_match_float64_loop(averaging):
    run_and_compare_personal_models(ReferenceLGFedAvg, make_federation(averaging=averaging))


def test_body_as_head_of_fedper():
    """FedPer whose head is the other layer has equal parts."""
    federation, other = make_federation(), make_federation("fedper", {"head_layers": ["hidden"]})
    (state, _), (expected, _) = federation.run(3), other.run(3)
    for k in range(federation.num_clients):
        assert_trees_all_equal(
            federation.personal_model(state, k), other.personal_model(expected, k)
        )


def test_single_client_is_fedavg():
    settings = {"sizes": (12,), "participation": 1.0}
    federation = make_federation(**settings)
    average = make_federation("fedavg", client_test_model="global", **settings)
    start = federation.initial_state()
    models = federation.personal_model(federation.run(1, start)[0], 0), average.train(1)
    # The server's step of 0.7 applies to the head only.
    assert_trees_all_equal(*(model["head"] for model in models))
    first = federation.personal_model(start, 0)["hidden"]["kernel"]
    own, averaged = (model["hidden"]["kernel"] - first for model in models)
    np.testing.assert_allclose(averaged, 0.7 * own, atol=1e-6)


SETTINGS = {"model": "mlp", "num_clients": 4, "participation": 1.0, "rounds": 2}


def test_head_layers_are_shared():
    options = {"head_layers": ["hidden2", "head"]}
    result = simulate(RunSpec("lg_fedavg", options=options, **SETTINGS))
    first, second = (result.model(k).variables["params"] for k in (0, 1))
    for layer in options["head_layers"]:
        assert_trees_all_equal(first[layer], second[layer])
    assert np.abs(first["hidden1"]["kernel"] - second["hidden1"]["kernel"]).max() > 1e-3
    shared = {layer: first[layer] for layer in options["head_layers"]}
    np.testing.assert_array_equal(result.metrics["bytes_up"], 4 * num_bytes(shared))


def test_wrong_layers_are_one_line():
    spec = RunSpec("lg_fedavg", options={"head_layers": ["head2"]}, **SETTINGS)
    with pytest.raises(ConfigError, match="head_layers = 'head2': expected layers of") as raised:
        simulate(spec)
    assert "\n" not in str(raised.value)
