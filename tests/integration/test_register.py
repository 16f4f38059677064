"""A user's networks and methods: registered, passed to a run or a sweep, or from a file."""

import dataclasses
import json
import sys

import flax.linen as nn
import jax
import numpy as np
import pytest
from support.networks import TwoLayers
from support.small_runs import KilledError, make_killing_callback

import fedjax_het
from fedjax_het import (
    ConfigError,
    RunSpec,
    grid,
    load_dataset,
    load_results,
    measure_split,
    register_dataset,
    register_method,
    register_network,
    simulate,
    sweep,
)
from fedjax_het.algorithms import METHODS, get_possible_bases
from fedjax_het.algorithms.builders import build_federated_algorithm
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.fedopt import fedadam
from fedjax_het.algorithms.server_step import with_server_step
from fedjax_het.cli import main
from fedjax_het.core.local_training import make_local_sgd
from fedjax_het.runtime.sweep import plan_sweep

SETTINGS = {"num_clients": 4, "rounds": 2, "partition": "iid", "participation": 1.0}
FAST = {"ipc": 2, "steps": 2, "server_epochs": 1}

FILE = """
import flax.linen as nn
from fedjax_het import register_method, register_network
from fedjax_het.algorithms.fedavg import fedavg

class Small(nn.Module):
    num_classes: int
    hidden: int = 4

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(self.hidden)(x.reshape(x.shape[0], -1)))
        return nn.Dense(self.num_classes)(x)

register_network("small", Small, "a small one")
register_method("mine", fedavg, "FedAvg once more")
"""


def perceptron():
    """Return `TwoLayers` as a pair of functions."""

    def init(key, images, train):
        return TwoLayers(10).init(key, images)

    def apply(variables, images, train):
        return TwoLayers(10).apply(variables, images)

    return init, apply


def width_of(result):
    kernels = jax.tree.leaves(result.state.server.variables["params"])
    return {leaf.shape[-1] for leaf in kernels} - {10}


@pytest.mark.slow
def test_registered_and_passed_networks_are_equal():
    register_network("two_layers", TwoLayers)
    named = simulate(RunSpec("fedavg", model="two_layers", **SETTINGS))
    result = simulate(RunSpec("fedavg", **SETTINGS), network=TwoLayers)
    pair = simulate(RunSpec("fedavg", **SETTINGS), network=perceptron())
    assert np.isfinite(named.metrics["test_loss"]).all()
    for other in (result, pair):
        np.testing.assert_array_equal(other.metrics["test_loss"], named.metrics["test_loss"])
    assert (named.spec.model, result.spec.model) == ("two_layers", "user")


def test_network_options_reach_the_network():
    register_network("two_layers", TwoLayers)
    specs = [
        RunSpec("fedavg", model="two_layers", network_options={"hidden": size}, **SETTINGS)
        for size in (3, 5)
    ]
    assert len({spec.digest() for spec in specs}) == 2
    assert [width_of(simulate(spec)) for spec in specs] == [{3}, {5}]
    with pytest.raises(ConfigError, match="network 'two_layers' has no option 'hiden'"):
        RunSpec("fedavg", model="two_layers", network_options={"hiden": 3}, **SETTINGS).resolved()


def test_options_that_are_settings_have_one_digest():
    named = RunSpec("fedavg", model="convnet", width=16).digest()
    assert RunSpec("fedavg", model="convnet", network_options={"width": 16}).digest() == named
    with pytest.raises(ConfigError, match="width = 8: expected 16 as in network_options"):
        RunSpec("fedavg", model="convnet", width=8, network_options={"width": 16}).resolved()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedaf", "moon", "fedgen"])
def test_methods_that_read_features_take_user_networks(method):
    options = {"fedaf": FAST, "fedgen": {"generator_steps": 2}}.get(method, {})
    result = simulate(RunSpec(method, options=options, **SETTINGS), network=TwoLayers)
    assert np.isfinite(result.metrics["test_loss"]).all()


@pytest.mark.slow
def test_sweep_tells_networks_apart(tmp_path):
    specs = grid(algorithm=["fedavg", "fedprox"], seed=[0, 1], **SETTINGS)

    def run_sweep(network):
        lines = []
        actual = sweep(specs, tmp_path, network=network, progress=lines.append)
        assert all(result is not None for result in actual.results)
        return actual, any("already" in line for line in lines)

    first, is_found = run_sweep(TwoLayers)
    assert not is_found and run_sweep(TwoLayers)[1]
    other, is_found = run_sweep(TwoLayers(10, hidden=9))
    assert not is_found
    digests = [{r.summary["network_digest"] for r in actual.results} for actual in (first, other)]
    assert digests[0] != digests[1]
    assert len(load_results(tmp_path)) == 8


class Layers(nn.Module):
    num_classes: int
    hidden: tuple[int, ...] = (8,)

    @nn.compact
    def __call__(self, x):
        x = x.reshape(x.shape[0], -1)
        for width in self.hidden:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.num_classes)(x)


def make_layers(num_classes, *, hidden=(8,)):
    """Return a network of a function with options."""
    return Layers(num_classes, tuple(hidden))


@pytest.mark.parametrize(
    "network",
    [
        pytest.param(Layers, id="class", marks=pytest.mark.slow),
        pytest.param(make_layers, id="function"),
    ],
)
def test_sweep_with_list_options_of_user_network(network, tmp_path):
    options = [{"hidden": [3, 5]}, {"hidden": [4]}]
    specs = grid(model="user", network_options=options, seed=0, **SETTINGS | {"rounds": 1})
    plan = plan_sweep(specs, tmp_path, network=network)
    assert len({digest for digest, _, _ in plan}) == 2
    actual = sweep(specs, tmp_path, network=network, progress=None)
    alone = simulate(specs[0], network=network)
    assert width_of(alone) == {3, 5}
    np.testing.assert_array_equal(
        alone.metrics["test_loss"], actual.results[0].metrics["test_loss"]
    )
    states = plan_sweep(specs, tmp_path, network=network)
    assert [state for _, _, state in states] == ["done", "done"]


def test_nested_options_of_user_network():
    def make_blocks(num_classes, *, blocks):
        return Layers(num_classes, tuple(width for block in blocks for width in block))

    spec = RunSpec("fedavg", network_options={"blocks": [[3, 5], [4]]}, **SETTINGS | {"rounds": 1})
    assert width_of(simulate(spec, network=make_blocks)) == {3, 4, 5}
    spec = dataclasses.replace(spec, network_options={"blocks": {"first": 3}})
    with pytest.raises(ConfigError, match=r"option blocks = \{'first': 3\}: expected a number"):
        simulate(spec, network=make_blocks)


def test_resume_rejects_another_network(tmp_path, monkeypatch):
    monkeypatch.setattr("fedjax_het.runtime.checkpointing.CHECKPOINT_SECONDS", 0)
    spec = RunSpec("fedavg", **SETTINGS)
    monkeypatch.setattr("fedjax_het.runtime.group_state.MAX_ROUNDS_PER_CHUNK", 1)
    with pytest.raises(KilledError):
        simulate(spec, network=TwoLayers, output_dir=tmp_path, progress=make_killing_callback(1))
    with pytest.raises(ConfigError, match="expected a checkpoint of this network"):
        simulate(spec, network=TwoLayers(10, hidden=9), output_dir=tmp_path, resume=True)


def test_name_registered_again_is_the_new_network():
    register_network("two_layers", TwoLayers)
    spec = RunSpec("fedavg", model="two_layers", **SETTINGS)
    assert width_of(simulate(spec)) == {6}
    register_network("two_layers", TwoLayers(10, hidden=9))
    assert width_of(simulate(spec)) == {9}


def test_missing_and_extra_networks_are_rejected():
    with pytest.raises(ConfigError, match="model = 'user': expected a network passed to the run"):
        simulate(RunSpec("fedavg", model="user", **SETTINGS))
    with pytest.raises(ConfigError, match="model = 'mlp': expected no name, as a network"):
        simulate(RunSpec("fedavg", model="mlp", **SETTINGS), network=TwoLayers)


def test_command_line_imports_a_file(tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    assert main(["list", "--import", "mine.py"]) == 0
    text = capsys.readouterr().out
    assert "a small one" in text and "FedAvg once more" in text
    words = "--algorithm mine --model small --network-option hidden=3 --num-clients 4 --rounds 1"
    assert main(["--import", "mine.py", "run", "--quiet", *words.split()]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["algorithm"] == "mine"


@pytest.mark.parametrize("name", ["nowhere.py", "no_such_module"])
def test_missing_import_is_one_line(name, capsys):
    assert main(["list", "--import", name]) == 2
    assert f"import = '{name}': expected a" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, message",
    [
        ("import jax\nx = = 1", "line 2: SyntaxError: invalid syntax"),
        ("\nimport nowhere", "line 2: ModuleNotFoundError: No module named 'nowhere'"),
        ("import numpy\n\nnumpy.zeros('x').sum()", "line 3: TypeError: 'str' object"),
    ],
)
def test_error_of_an_import_is_one_line(text, message, tmp_path, capsys, monkeypatch):
    (tmp_path / "faulty.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("faulty.py", "faulty"):
        monkeypatch.delitem(sys.modules, "faulty", raising=False)
        assert main(["list", "--import", name]) == 2
        error = capsys.readouterr().err
        assert f"--import = '{name}': {tmp_path / 'faulty.py'}, {message}" in error
        assert error.count("\n") == 1


# --- methods

SMALL = {**SETTINGS, "model": "mlp", "num_clients": 3}


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
    # Scaled gradients equal a scaled learning rate without weight decay.
    defaults = {"local_optimizer": "sgd", "hp": {"local_lr": 0.1}, "weight_decay": 0.0}
    settings = {**defaults, **SMALL, **settings}
    return simulate(RunSpec(algorithm, **settings)).metrics["train_loss"]


@pytest.mark.slow
def test_sweep_executes_a_registered_method(tmp_path):
    register_scaled(1.0)
    specs = grid(
        algorithm=["fedavg", "scaled"],
        hp={"gradient_scale": [1.0, 2.0], "local_lr": 0.1},
        local_optimizer="sgd",
        weight_decay=0.0,
        **SMALL,
    )
    outcome = sweep(specs, tmp_path, progress=lambda line: None)
    average, same, twice = (run.metrics["train_loss"] for run in outcome.results)
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
        ("fedavg", {}, "name = 'fedavg': expected a name that no method"),
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
        assert own.hyperparameters == theirs.hyperparameters


@pytest.mark.parametrize(
    "name", ["fedadam", "fedyogi", "fedadagrad", "fedavgm", "scaffold", "feddyn"]
)
def test_copied_method_has_its_defaults(name):
    register_method("copied", METHODS[name].build)
    for protocol in ("dynafed", "fsl"):
        theirs, own = (RunSpec(each, protocol=protocol).resolved() for each in (name, "copied"))
        assert (own.hyperparameters, own.options) == (theirs.hyperparameters, theirs.options)


def test_server_step_follows_from_hyperparameters():
    build = lambda training, plan: fedadam(training, plan)  # noqa: E731
    register_method("wrapped", build, hyperparameters={"server_lr": 0.03})
    register_method("mean", fedavg)
    actual = {
        name: RunSpec(name, protocol="fsl").resolved().hyperparameters
        for name in ("wrapped", "mean")
    }
    assert (actual["wrapped"]["server_lr"], actual["mean"]["server_lr"]) == (0.03, 2.0)


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


def test_functions_of_data_sets_that_fail_are_named_in_one_line():
    def load(*, data_dir=None):
        raise OSError("no disk\nat all")

    register_dataset("broken_disk", load)
    with pytest.raises(ConfigError, match="dataset = 'broken_disk': its function fails") as error:
        load_dataset("broken_disk")
    assert "\n" not in str(error.value)


def test_measures_of_a_table_need_no_choice():
    spec = RunSpec(dataset="diabetes", model="mlp", partition="iid", num_clients=4)
    assert list(measure_split(spec).values) == ["gradient_dissimilarity", "gradient_variance"]
