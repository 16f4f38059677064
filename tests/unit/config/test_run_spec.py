"""`RunSpec`: errors at construction, learning rates as settings, hashes, help, representation."""

import dataclasses
import inspect
import logging
import pickle
import pydoc

import pytest

from fedjax_het import ConfigError, RunSpec, grid
from fedjax_het.config.settings import HYPERPARAMETER_SETTINGS

INVALID = {
    "number": (dict(alpha=-1), "alpha = -1: expected a finite number > 0"),
    "list": (dict(alpha=[0.1, 1]), "alpha = [0.1, 1]: expected a finite number"),
    "list of names": (dict(model=["mlp", "cnn"]), "model = ['mlp', 'cnn'] is unknown"),
    "list of hyperparameters": (dict(hp={"prox_mu": [0.1, 1]}), "hp = 'prox_mu' is unknown"),
    "name": (dict(partition="dirchlet"), "partition = 'dirchlet' is unknown: did you mean"),
    "combination": (dict(partition="iid", alpha=0.1), "alpha = 0.1: expected no value: partition"),
    "base": (dict(algorithm="abavg", options={"base": "ditto"}), "options base = 'ditto'"),
    "no base": (
        dict(algorithm="feddecorr", options={"base": None}),
        "options base = None: expected a method (fedavg, fedprox,",
    ),
    "no option": (
        dict(algorithm="dynafed", options={"segment_length": None}),
        "options segment_length = None: expected a whole number >= 1",
    ),
    "not a number": (
        dict(algorithm="fedsam", hp={"fedsam_rho": float("nan")}),
        "hp fedsam_rho = nan: expected a finite number >= 0",
    ),
    "infinite option": (
        dict(partition="dirichlet", partition_options={"alpha": float("inf")}),
        "alpha = inf: expected a number in [1e-06, 1e+06]",
    ),
    "infinite option of a user's network": (
        dict(model="user", network_options={"rate": float("inf")}),
        "network_options rate = inf: expected a finite number",
    ),
    "learning rate": (
        dict(learning_rate=-1),
        "learning_rate = -1: expected a finite number >= 0",
    ),
    "two rates": (
        dict(learning_rate=0.1, hp={"local_lr": 0.2}),
        "learning_rate, hp local_lr = (0.1, 0.2): expected one of the two names",
    ),
    "in hp": (dict(hp={"local_lr": -1}), "hp local_lr = -1: expected a finite number >= 0"),
    "text": (dict(momentum="x"), "momentum = 'x': expected a number in [0, 1)"),
    "no momentum": (
        dict(local_optimizer="adam", momentum=0.9),
        "momentum = 0.9: expected no value: local optimizer adam has no momentum (momentum, ",
    ),
    "no local training": (
        dict(algorithm="fedaf", learning_rate=0.1),
        "learning_rate = 0.1: expected no value: clients of fedaf condense their data",
    ),
    "no server rate": (
        dict(algorithm="fedamp", server_learning_rate=1.0),
        "server_learning_rate = 1.0: expected no value: fedamp has no server learning rate",
    ),
    "short name": (dict(lr=0.1), "setting = 'lr' is unknown: did you mean 'learning_rate'?"),
    "hyperparameter": (dict(server_lr=1), "did you mean 'server_learning_rate'?"),
    "object": (dict(model=dict), "expected a name; pass an object to simulate(network=...)"),
    "unknown": (dict(epochz=1), "setting = 'epochz' is unknown"),
}


@pytest.mark.parametrize("case", INVALID)
def test_constructor_rejects_settings(case):
    settings, message = INVALID[case]
    with pytest.raises(ConfigError) as raised:
        RunSpec(**settings)
    assert message in str(raised.value) and len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("option", ["partition_options", "server_options", "network_options"])
def test_constructor_rejects_list_of_option_values(option):
    settings = {
        "partition_options": {
            "partition": "dirichlet_capped",
            "partition_options": {"min_size": [1, 2]},
        },
        "server_options": {"algorithm": "feddf", "server_options": {"size": [20, 30]}},
        "network_options": {"model": "cnn", "network_options": {"kernel": [3, 5]}},
    }[option]
    with pytest.raises(ConfigError, match=rf"{option} \w+ = \["):
        RunSpec(**settings)


def test_only_method_and_data_set_are_positional():
    with pytest.raises(ConfigError, match="argument 3 = 'mlp': expected a setting by name"):
        RunSpec("fedavg", "digits", "mlp")
    assert RunSpec("fedprox", "digits") == RunSpec(algorithm="fedprox", dataset="digits")


def test_objects_may_be_passed_later():
    """A network has options, and an optimizer has hyperparameters, that no setting names."""
    spec = RunSpec(network_options={"channels": 3}, hp={"local_bound": 0.1})
    for message in ("channels", "local_bound"):
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(
                spec, **({"hp": {}} if message == "channels" else {"network_options": {}})
            ).resolved()


def test_construction_logs_nothing(caplog):
    with caplog.at_level(logging.DEBUG):
        RunSpec("fedbn", model="mlp")
    assert not caplog.records


def test_stored_settings_of_another_process_load():
    spec = RunSpec.from_dict({"algorithm": "of_another_process", "hp": {"local_lr": 0.1}})
    assert (spec.algorithm, spec.learning_rate, spec.hp) == ("of_another_process", 0.1, {})
    with pytest.raises(ConfigError, match="of_another_process"):
        spec.resolved()
    assert RunSpec.from_dict(spec.to_dict()) == spec


# --- learning rates


@pytest.mark.parametrize("setting", HYPERPARAMETER_SETTINGS)
def test_setting_equals_hyperparameter(setting):
    name, method = HYPERPARAMETER_SETTINGS[setting], {"local_optimizer": "momentum", "model": "mlp"}
    spec = RunSpec("fedprox", **method, **{setting: 0.5}, hp={"prox_mu": 0.1})
    other = RunSpec("fedprox", **method, hp={name: 0.5, "prox_mu": 0.1})
    assert spec == other and spec.digest() == other.digest() and hash(spec) == hash(other)
    assert other.hp == {"prox_mu": 0.1} and getattr(other, setting) == 0.5
    assert spec.hyperparameters == {name: 0.5, "prox_mu": 0.1}
    assert spec.to_dict()["hp"] == {name: 0.5, "prox_mu": 0.1} and setting not in spec.to_dict()
    assert getattr(spec.resolved(), setting) == 0.5 and name not in spec.resolved().hp
    assert RunSpec.from_dict(spec.to_dict()) == spec


def test_digest_is_that_of_version_0_6():
    settings = dict(protocol="dynafed", local_optimizer="sgd", model="mlp", alpha=0.1)
    assert RunSpec("fedprox", **settings, learning_rate=0.05).digest() == "25e1257667e8b327"


def test_replace_changes_learning_rate():
    spec = RunSpec(learning_rate=0.1)
    assert dataclasses.replace(spec, learning_rate=0.2).learning_rate == 0.2
    assert dataclasses.replace(spec, learning_rate=0.3).hyperparameters["local_lr"] == 0.3
    assert dataclasses.replace(spec, hp={"local_lr": spec.learning_rate}) == spec
    assert dataclasses.replace(spec.resolved(), learning_rate=0.2).resolved().learning_rate == 0.2


def test_resolved_spec_has_learning_rates():
    resolved = RunSpec(protocol="dynafed").resolved()
    assert resolved.learning_rate == 0.001 and resolved.server_learning_rate == 1
    assert resolved.hp == {} and resolved.hyperparameters == {"local_lr": 0.001, "server_lr": 1}
    assert pickle.loads(pickle.dumps(resolved)) == resolved
    assert type(pickle.loads(pickle.dumps(resolved))) is type(resolved)


def test_grid_sweeps_learning_rates():
    specs = grid(algorithm=["fedavg", "fedaf"], protocol="own", learning_rate=[0.1, 0.2])
    assert [(spec.algorithm, spec.learning_rate) for spec in specs] == [
        ("fedavg", 0.1),
        ("fedavg", 0.2),
        ("fedaf", None),
    ]
    assert specs[0] == RunSpec("fedavg", protocol="own", learning_rate=0.1)
    for settings, message in (
        ({"algorithm": "fedaf"}, "learning_rate: none of the methods (fedaf) has it"),
        (
            {"hp": {"local_lr": 0.1}},
            "learning_rate, hp local_lr = ([0.1, -1], [0.1]): expected one of the two names",
        ),
        ({}, "learning_rate = -1: expected a finite number >= 0"),
    ):
        with pytest.raises(ConfigError) as raised:
            grid(**settings, learning_rate=[0.1, -1])
        assert message in str(raised.value)


# --- equality, help, representation


def test_equal_specs_have_equal_hashes():
    specs = [RunSpec(), RunSpec(seed=0), RunSpec(hp={"local_lr": 1}), RunSpec(learning_rate=1.0)]
    assert len({*specs, RunSpec(seed=1)}) == 3
    resolved = RunSpec().resolved()
    assert hash(resolved) == hash(RunSpec.from_dict(resolved.to_dict()))


def test_signature_is_short():
    signature = inspect.signature(RunSpec)
    assert "Bounds" not in str(signature) and "Annotated" not in str(signature)
    parameters = signature.parameters
    assert parameters["num_clients"].annotation == int | None
    assert parameters["alpha"].annotation == float | None
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["algorithm", "dataset"]


def test_help_documents_every_field():
    doc = RunSpec.__doc__
    attributes = doc[doc.index("Attributes:") : doc.index("Example:")]
    for field in dataclasses.fields(RunSpec):
        assert f"\n      {field.name}: " in attributes, field.name
    text = " ".join(pydoc.render_doc(RunSpec).replace("|", " ").split())
    assert "Concentration of the Dirichlet partition, > 0. Small" in text  # its limits once
    assert "Number of clients in the federation. Allowed: >= 1." in text
    assert "such as npz:scans.npz. Default: 'digits'." in text


def test_representation_is_the_call():
    spec = RunSpec("fedprox", alpha=0.1, learning_rate=0.05, hp={"prox_mu": 0.01})
    text = "RunSpec('fedprox', 'digits', alpha=0.1, learning_rate=0.05, hp={'prox_mu': 0.01})"
    assert repr(spec) == text and eval(repr(spec)) == spec
    for method in ("fedavg", "dynafed", "fedaf"):
        resolved = RunSpec(method).resolved()
        lines = repr(resolved).splitlines()
        assert len(lines) <= 10 and max(map(len, lines)) <= 100 and "None" not in repr(resolved)
        assert lines[0].startswith(f"ResolvedRunSpec('{method}', 'digits', protocol='")


def test_html_is_escaped():
    spec = RunSpec.from_dict({"algorithm": "<b>x</b>", "alpha": 0.1})
    html = spec._repr_html_()
    assert "&lt;b&gt;x" in html and "<b>" not in html and ">alpha<" in html
