"""Attacks and rules of the user: equal to the package's own, from Python and files."""

import re
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het import RunSpec, register_aggregation, register_attack, simulate
from fedjax_het.aggregation import AGGREGATIONS, RobustAggregation
from fedjax_het.attacks import ATTACKS, LabelAttack, UpdateAttack
from fedjax_het.cli import main
from fedjax_het.utils.errors import ConfigError

SETTINGS = {"dataset": "digits", "model": "mlp", "num_clients": 5, "rounds": 2, "local_epochs": 1}
MODULE = """
from dataclasses import dataclass
from typing import ClassVar

import jax

from fedjax_het import register_attack
from fedjax_het.attacks import UpdateAttack


@register_attack
@dataclass(frozen=True, kw_only=True)
class FreeRider(UpdateAttack):
    "The update is zero."

    name: ClassVar[str] = "free_rider"

    def forge(self, updates, is_malicious, key):
        return jax.tree.map(lambda u: 0 * u, updates.changes)
"""


@pytest.fixture(autouse=True)
def registry():
    yield
    ATTACKS.reset()
    AGGREGATIONS.reset()


def assert_equal_runs(own, built_in, rtol=0.0):
    """Assert that a kind of the user gives the losses of a kind of the package."""
    losses = [
        simulate(RunSpec(**SETTINGS, **settings)).metrics["test_loss"]
        for settings in (own, built_in)
    ]
    np.testing.assert_allclose(*losses, rtol=rtol)


def test_update_attack_of_the_user():
    @register_attack
    @dataclass(frozen=True, kw_only=True)
    class Mirror(UpdateAttack):
        """The update with the other sign."""

        name: ClassVar[str] = "mirror"

        def forge(self, updates, is_malicious, key):
            return jax.tree.map(jnp.negative, updates.changes)

    assert ATTACKS["mirror"].description == "The update with the other sign"
    assert_equal_runs({"attack": "mirror:fraction=0.4"}, {"attack": "sign_flip:fraction=0.4"})


def test_label_attack_of_the_user():
    @register_attack
    @dataclass(frozen=True, kw_only=True)
    class Following(LabelAttack):
        """The label of the next class."""

        name: ClassVar[str] = "following"

        def make_label_map(self, num_classes):
            return np.roll(np.arange(num_classes), -1)

    built_in = "label_flip:fraction=0.4,labels=next"
    assert_equal_runs({"attack": "following:fraction=0.4"}, {"attack": built_in})


def test_rule_of_the_user():
    @register_aggregation
    @dataclass(frozen=True, kw_only=True)
    class Middle(RobustAggregation):
        """The median of each coordinate."""

        scale: float = 1.0
        name: ClassVar[str] = "middle"
        strength: ClassVar[str] = "scale"

        def combine(self, updates):
            return jax.tree.map(lambda u: self.scale * jnp.median(u, axis=0), updates.changes)

    assert_equal_runs({"aggregation": "middle"}, {"aggregation": "median"}, rtol=1e-5)


def test_attack_in_a_file_of_the_user(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(MODULE)
    command = [
        "run",
        "--import",
        str(path),
        "--dataset",
        "digits",
        "--model",
        "mlp",
        "--rounds",
        "1",
    ]
    assert main([*command, "--num-clients", "4", "--attack", "free_rider:fraction=1"]) == 0


@pytest.mark.parametrize(
    ("register", "base"),
    [(register_attack, UpdateAttack), (register_aggregation, RobustAggregation)],
)
def test_invalid_kinds(register, base):
    with pytest.raises(ConfigError, match="expected a subclass of"):
        register(dict)
    with pytest.raises(ConfigError, match=r"function (forge|combine) of Empty"):
        register(type("Empty", (base,), {"name": "empty"}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"attack": "sign_flip:fraction=0.05"},
            "attack sign_flip:fraction=0.05: no client of 5 is",
        ),
        ({"aggregation": "krum:selected=7"}, "krum:selected=7 averages all 5 updates"),
        ({"aggregation": "krum:fraction=0.4"}, "assumes 2 malicious of 5 updates: .* more than 6"),
        ({"aggregation": "trimmed_mean:fraction=0.1"}, "is the mean: it leaves out none of 5"),
        ({"aggregation": ["bucketing:size=5", "median"]}, "is the mean: one bucket of 5 updates"),
    ],
)
def test_settings_without_effect_are_logged(settings, message, caplog):
    simulate(RunSpec(**SETTINGS | settings | {"rounds": 1}))
    assert [r for r in caplog.records if re.search(message, r.getMessage())]


@pytest.mark.parametrize(
    ("attack", "dataset", "message"),
    [
        ("label_flip", "diabetes", "attack 'label_flip' reads classes"),
        ("backdoor", "breast_cancer", "attack 'backdoor' does not accept features"),
    ],
)
def test_data_that_an_attack_does_not_accept(attack, dataset, message):
    settings = SETTINGS | {"dataset": dataset, "partition": "iid"}
    with pytest.raises(ConfigError, match=message):
        simulate(RunSpec(**settings, attack=attack))


def test_selection_by_losses_has_no_example_level_privacy():
    settings = {"participation": 0.5, "system": "power_of_choice:losses=current,factor=2"}
    with pytest.raises(
        ConfigError, match="system = 'power_of_choice': expected no value with priv"
    ):
        simulate(RunSpec(**SETTINGS, **settings, privacy="example_level:noise_multiplier=1"))
