"""Methods of one's own, named at runtime."""

import jax
import numpy as np
import pytest

import fedjax_het
from fedjax_het import ConfigError, Entry, RunSpec, grid, load_results, register, simulate, sweep
from fedjax_het.algorithms.building import federated
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.refined import refined
from fedjax_het.engine.local import local_sgd

SMALL = {"model": "mlp", "num_clients": 3, "rounds": 2, "partition": "iid", "participation": 1.0}


def scaled(factor):
    """FedAvg whose gradients are multiplied by factor * gradient_scale."""

    def build(training, plan):
        def scale(hp, gradient, local, broadcast, batch, client):
            return jax.tree.map(lambda g: factor * hp["gradient_scale"] * g, gradient), ()

        return federated(training, plan, local_sgd(training, adjust=scale))

    return Entry(build, "FedAvg with scaled gradients", hp={"gradient_scale": 1.0})


def kept_back(training, plan, *, base):
    """The model that the round started from, whatever `base` made of it."""
    return refined(base(training, plan), lambda hp, own, of: (of.before, own))


def accuracies(algorithm, **settings):
    settings = {"local_optimizer": "sgd", "hp": {"local_lr": 0.1}, **SMALL, **settings}
    return simulate(RunSpec(algorithm, **settings)).metrics["train_loss"]


def test_a_registered_method_is_in_sweeps_beside_the_others(tmp_path):
    register("scaled", scaled(1.0))
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


def test_a_name_given_again_stands_for_the_new_method_and_its_programs_are_made_anew():
    register("scaled", scaled(1.0))
    register("held", Entry(kept_back, "stands still", bases=("fedavg", "scaled")))
    over = {"options": {"base": "scaled"}}
    first, first_over = accuracies("scaled"), accuracies("held", **over)
    register("scaled", scaled(2.0))
    doubled = accuracies("fedavg", hp={"local_lr": 0.2})
    assert abs(doubled - first).max() > 1e-3
    np.testing.assert_allclose(accuracies("scaled"), doubled, rtol=1e-5)
    assert abs(accuracies("held", **over) - first_over).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "entry", "message"),
    [
        ("fedavg", Entry(fedavg, ""), "name = 'fedavg': expected one that no method"),
        ("my method", Entry(fedavg, ""), "name = 'my method': expected letters, digits"),
        ("mine", Entry(fedavg, "", protocol="fedaff"), "did you mean 'fedaf'"),
        ("mine", Entry(kept_back, "", bases=("fedavg", "fedsam")), "base = 'fedsam' is unknown"),
    ],
)
def test_what_cannot_be_registered_says_why(name, entry, message):
    with pytest.raises(ConfigError, match=message):
        register(name, entry)


def test_they_are_public():
    assert {"Entry", "register"} <= set(fedjax_het.__all__)
