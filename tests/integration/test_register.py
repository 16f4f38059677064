"""Methods that a user registers."""

import jax
import numpy as np
import pytest

import fedjax_het
from fedjax_het import ConfigError, RunSpec, grid, load_results, register_method, simulate, sweep
from fedjax_het.algorithms import METHODS, get_possible_bases
from fedjax_het.algorithms.builders import build_federated_algorithm
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.fedopt import fedadam
from fedjax_het.algorithms.server_step import with_server_step
from fedjax_het.core.local_training import make_local_sgd

SMALL = {"model": "mlp", "num_clients": 3, "rounds": 2, "partition": "iid", "participation": 1.0}


def scaled(factor):
    """FedAvg whose gradients are multiplied by factor * gradient_scale."""

    def build(training, plan):
        def scale(context, gradient, local, batch):
            return jax.tree.map(lambda g: factor * context.hp["gradient_scale"] * g, gradient), ()

        return build_federated_algorithm(training, plan, make_local_sgd(training, adjust=scale))

    return build


def register_scaled(factor):
    numbers, description = {"gradient_scale": 1.0}, "FedAvg with scaled gradients"
    register_method(
        "scaled", scaled(factor), description, hyperparameters=numbers, wrappable_as="model"
    )


def kept_back(training, plan, *, base):
    """The model that the round started from, whatever `base` made of it."""
    return with_server_step(base(training, plan), lambda hp, own, of: (of.variables_before, own))


def accuracies(algorithm, **settings):
    settings = {"local_optimizer": "sgd", "hp": {"local_lr": 0.1}, **SMALL, **settings}
    return simulate(RunSpec(algorithm, **settings)).metrics["train_loss"]


@pytest.mark.slow
def test_sweep_executes_a_registered_method(tmp_path):
    register_scaled(1.0)
    specs = grid(
        algorithm=["fedavg", "scaled"],
        hp={"gradient_scale": [1.0, 2.0], "local_lr": 0.1},
        local_optimizer="sgd",
        **SMALL,
    )
    made = sweep(specs, tmp_path, progress=lambda line: None)
    average, same, twice = (run.metrics["train_loss"] for run in made.results)
    np.testing.assert_array_equal(same, average)
    np.testing.assert_allclose(twice, accuracies("fedavg", hp={"local_lr": 0.2}), rtol=1e-5)
    assert twice[-1] < 0.99 * average[-1]
    assert set(load_results(tmp_path)["algorithm"]) == {"fedavg", "scaled"}


@pytest.mark.slow
def test_name_registered_again_is_the_new_method():
    register_scaled(1.0)
    register_method("held", kept_back, "stands still", wraps="model")
    over = {"options": {"base": "scaled"}}
    first, first_over = accuracies("scaled"), accuracies("held", **over)
    register_scaled(2.0)
    doubled = accuracies("fedavg", hp={"local_lr": 0.2})
    assert abs(doubled - first).max() > 1e-3
    np.testing.assert_allclose(accuracies("scaled"), doubled, rtol=1e-5)
    assert abs(accuracies("held", **over) - first_over).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "facts", "message"),
    [
        ("fedavg", {}, "name = 'fedavg': expected one that no method"),
        ("my method", {}, "name = 'my method': expected letters, digits"),
        ("mine", {"colur": "#000000"}, "argument = 'colur' is unknown: did you mean 'color'"),
        ("mine", {"wraps": "models"}, "wraps = 'models' is unknown: did you mean 'model'"),
        ("mine", {"server_step": "none"}, "server_step = 'none' is unknown"),
        ("mine", {"required_data": ("server",)}, "is unknown: did you mean 'server_data'"),
        ("mine", {"options": dict}, "options = <class 'dict'>: expected a class that is a Config"),
        ("mine", {"hyperparameters": {"rate": "fast"}}, "rate = 'fast': expected a finite number"),
        ("mine", {"wrappable_as": "model", "has_global_model": False}, "wrappable_as = 'model': e"),
    ],
)
def test_invalid_methods_are_rejected(name, facts, message):
    with pytest.raises(ConfigError, match=message):
        register_method(name, fedavg, **facts)


def test_unknown_protocol_is_rejected():
    register_method("mine", fedavg, protocol="fedaff")
    with pytest.raises(ConfigError, match="did you mean 'fedaf'"):
        RunSpec("mine").resolved()


def test_copied_server_optimizer_has_its_step():
    hyperparameters = METHODS["fedadam"].hyperparameters
    register_method("copied", fedadam, hyperparameters=hyperparameters, server_step="own")
    for protocol in ("dynafed", "fsl"):
        theirs, own = (RunSpec(n, protocol=protocol).resolved() for n in ("fedadam", "copied"))
        assert own.hp == theirs.hp


@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedavgm", "scaffold", "feddyn"])
def test_copied_method_has_its_defaults(name):
    register_method("copied", METHODS[name].build)
    for protocol in ("dynafed", "fsl"):
        theirs, own = (RunSpec(each, protocol=protocol).resolved() for each in (name, "copied"))
        assert (own.hp, own.options) == (theirs.hp, theirs.options)


def test_server_step_follows_from_hyperparameters():
    build = lambda training, plan: fedadam(training, plan)  # noqa: E731
    register_method("wrapped", build, hyperparameters={"server_lr": 0.03})
    register_method("mean", fedavg)
    found = {name: RunSpec(name, protocol="fsl").resolved().hp for name in ("wrapped", "mean")}
    assert (found["wrapped"]["server_lr"], found["mean"]["server_lr"]) == (0.03, 2.0)


def test_wrappable_method_is_a_possible_base():
    register_method("plain", fedavg)
    register_method("open", fedavg, wrappable_as="average")
    for name in ("dynafed", "feddf", "abavg"):
        bases = get_possible_bases(METHODS[name])
        assert "open" in bases and "plain" not in bases


def test_register_functions_are_public():
    kinds = ("method", "network", "dataset", "partition", "server_source")
    assert {f"register_{kind}" for kind in kinds} <= set(fedjax_het.__all__)


def test_deprecated_arguments_are_accepted():
    with pytest.warns(DeprecationWarning, match="refinable is deprecated, use wrappable_as"):
        entry = register_method("old", fedavg, refinable="average")
    assert entry.wrappable_as == "average"
