"""FedPer against a float64 loop, and the choice of its head."""

import jax
import numpy as np
import pytest
from support.algorithm_builders import make_method_federation
from support.two_layers import (
    ReferenceLocalLayer,
    make_two_layer_model,
    run_and_compare_personal_models,
)

from fedjax_het import ConfigError, RunSpec, simulate
from fedjax_het.methods import num_bytes
from fedjax_het.nn import make_model


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
def test_rounds_match_float64_loop(averaging):
    federation = make_method_federation(
        "fedper",
        hp={"local_lr": 0.3, "server_lr": 0.7},
        model=make_two_layer_model(),
        participation=0.5,
        averaging=averaging,
        epochs=2,
        client_test_model="personal",
    )
    run_and_compare_personal_models(ReferenceLocalLayer, federation)


SETTINGS = {"model": "mlp", "num_clients": 4, "participation": 1.0, "rounds": 2}


def test_head_layers_stay_at_clients():
    options = {"head_layers": ["hidden2", "head"]}
    result = simulate(RunSpec("fedper", options=options, **SETTINGS))
    first, second = (result.model(k).variables["params"] for k in (0, 1))
    np.testing.assert_array_equal(first["hidden1"]["kernel"], second["hidden1"]["kernel"])
    for layer in options["head_layers"]:
        assert np.abs(first[layer]["kernel"] - second[layer]["kernel"]).max() > 1e-3
    np.testing.assert_array_equal(result.metrics["bytes_up"], 4 * num_bytes(first["hidden1"]))


def test_default_head_is_last_layer():
    default, named = (
        simulate(RunSpec("fedper", options=options, **SETTINGS))
        for options in ({}, {"head_layers": ["head"]})
    )
    jax.tree.map(
        np.testing.assert_array_equal, default.model(1).variables, named.model(1).variables
    )


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            ["head2"],
            "head_layers = 'head2': expected layers of the network: head, hidden1, hidden2",
        ),
        (["head", "hidden1", "hidden2"], "expected not all layers of the network"),
    ],
)
def test_wrong_layers_are_one_line(layers, message):
    with pytest.raises(ConfigError, match=message) as raised:
        simulate(RunSpec("fedper", options={"head_layers": layers}, **SETTINGS))
    assert "\n" not in str(raised.value)


def test_network_without_head():
    import flax.linen as nn

    class Pooled(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Conv(10, (3, 3))(x).mean((1, 2))

    layers = r"a `Model` with `head`, or options head_layers with the paths of layers \(of Conv_0\)"
    with pytest.raises(ConfigError, match=f"^network has no known `head`.*{layers}$"):
        simulate(RunSpec("fedper", **{**SETTINGS, "model": None}), network=Pooled())


def test_head_layers_may_be_a_text():
    layers = RunSpec("fedper", options={"head_layers": "hidden2, head"}).resolved().options
    assert (
        layers == RunSpec("fedper", options={"head_layers": ["hidden2", "head"]}).resolved().options
    )
    assert layers["head_layers"] == ["hidden2", "head"]
    with pytest.raises(ConfigError, match="head_layers = 'head,': expected words with commas"):
        RunSpec("fedper", options={"head_layers": "head,"})


def test_paths_reach_nested_layers():
    from fedjax_het.algorithms.local_parameters import HeadOptions, select_head

    model = make_model("resnet18", (8, 8, 3), 10, width=2)
    variables = jax.eval_shape(model.init, jax.random.key(0))
    block = next(name for name in variables["params"] if "conv1" in variables["params"][name])
    options = HeadOptions(head_layers=(f"{block}/conv1", "head"))
    leaves = select_head(model, variables, options=options)
    expected = (variables["params"][block]["conv1"], variables["params"]["head"])
    assert len(leaves) == len(jax.tree.leaves(expected))
