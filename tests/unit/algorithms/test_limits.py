"""Settings with which a method does what another one does, and from which round on it does not."""

import jax
import numpy as np
import pytest
from chex import assert_trees_all_close
from support.algorithm_builders import FAST_GENERATOR, make_method_federation
from support.markers import slow_case
from support.networks import make_centered_model

from fedjax_het.algorithms import METHODS
from fedjax_het.nn import make_model

HP = {"local_lr": 0.1, "local_momentum": 0.9, "local_weight_decay": 0.01, "server_lr": 1.0}
MLP = make_model("mlp", (2, 2, 1), 3, hidden=(6,))
KEPT = {"optimizer": "adam", "keep": True}
STEPS = {"distill_epochs": 2, "distill_batch_size": 4}
UNGUIDED = {"generated_weight": 0.0, "distilled_weight": 0.0}
# Methods with options and hyperparameters: at the limit, and beside it (None: there is none).
LIMITS = [
    pytest.param("fedprox", {"prox_mu": 0.0}, {"prox_mu": 2.0}, "fedavg", {}),
    pytest.param("fedbn", {}, None, "fedavg", KEPT, id="fedbn without norms"),
    pytest.param("moon", {"moon_mu": 0.0}, {"moon_mu": 30.0}, "fedavg", {"model": MLP}),
    *(
        pytest.param("fedavgm", {**form, "server_momentum": 0.0}, form, "fedavg", {})
        for form in ({}, {"nesterov": True}, {"damped": True})
    ),
    *(
        pytest.param(name, {"mixup_lambda": 0.0}, {"mixup_lambda": 0.2}, "fedavg", settings)
        for name in ("fedmix", "naivemix")
        for settings in ({}, KEPT)
    ),
    slow_case("fedgen", {**FAST_GENERATOR, **UNGUIDED}, FAST_GENERATOR, "fedavg", KEPT),
    slow_case("fedgen", {**FAST_GENERATOR, "guided_steps": 0}, FAST_GENERATOR, "fedavg", KEPT),
    *(
        pytest.param(name, {"base": base, "gamma": 0.0}, {"base": base, "gamma": 1.0}, base, {})
        for name in ("fsl", "fsl_p")
        for base in ("fedavg", "fedprox", "scaffold")
    ),
    *(
        slow_case(name, {"base": base, "distill_epochs": 0}, {"base": base, **STEPS}, base, {})
        for name in ("feddf", "fedbe")
        for base in ("fedavg", "scaffold", "feddyn")
    ),
    *(
        slow_case(
            name,
            {**options, "base": "fedprox", "prox_mu": 0.0},
            {**options, "base": "fedprox", "prox_mu": 2.0},
            name,
            {},
        )
        for name, options in (("feddf", STEPS), ("fedbe", STEPS), ("abavg", {}))
    ),
]


def make_with(name, values, **settings):
    """A federation of a method, with values of its options and of its hyperparameters."""
    options = {key: value for key, value in values.items() if key in METHODS[name].option_names}
    hp = {key: value for key, value in values.items() if key not in options}
    return make_method_federation(name, options, HP | hp, **settings)


def max_gap(params, other_params):
    gaps = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, other_params)
    return max(jax.tree.leaves(gaps))


@pytest.mark.parametrize(("name", "limit", "beside", "other", "settings"), LIMITS)
def test_limit_is_other_method(name, limit, beside, other, settings):
    settings = {"participation": 0.7, **settings}
    options = {key: limit[key] for key in STEPS if key in limit} if name == other else {}
    expected = make_with(other, options, **settings)
    actual = make_with(name, limit, **settings)
    (state, info), (plain, plain_info) = actual.run(3), expected.run(3)
    assert_trees_all_close(actual.global_params(state), expected.global_params(plain), atol=1e-6)
    assert_trees_all_close(info, plain_info, rtol=1e-5, atol=1e-6)
    if beside is not None:
        moved = make_with(name, beside, **settings).train(3)
        assert max_gap(moved, expected.global_params(plain)) > 1e-3


@pytest.mark.parametrize(
    ("name", "values", "settings"),
    [
        ("scaffold", {}, {"optimizer": "adamw", "keep": True, "epochs": 2}),
        *(
            slow_case("scaffold", {}, {"optimizer": optimizer, "keep": True, "epochs": 2})
            for optimizer in ("sgd", "momentum", "adam")
        ),
        pytest.param("fedbn", {}, {"model": make_centered_model()}, id="fedbn"),
        pytest.param("moon", {"moon_mu": 30.0}, {"model": MLP}, id="moon"),
        slow_case("fedgen", FAST_GENERATOR, {}),
    ],
)
def test_first_round_is_fedavg(name, values, settings):
    actual, plain = make_with(name, values, **settings), make_with("fedavg", {}, **settings)
    assert_trees_all_close(actual.train(1), plain.train(1), rtol=1e-6, atol=1e-6)
    assert max_gap(actual.train(2), plain.train(2)) > 1e-3
