"""A user's kind of skew: registered, from a file of the command line, and with mistakes."""

import dataclasses
import json
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from fedjax_het import ConfigError, RunSpec, register_skew, simulate
from fedjax_het.cli import main
from fedjax_het.runtime.identity import collect_function_digests
from fedjax_het.skews import SKEWS, AmountSkew, DriftSkew, FeatureSkew, LabelSkew
from fedjax_het.utils.config import UnitInterval

SETTINGS = {"model": "mlp", "num_clients": 3, "rounds": 2, "local_epochs": 1, "partition": "iid"}

FILE = """
from dataclasses import dataclass
from typing import ClassVar

from fedjax_het import register_skew
from fedjax_het.skews import FeatureSkew
from fedjax_het.utils.config import UnitInterval


@register_skew
@dataclass(frozen=True, kw_only=True)
class Fade(FeatureSkew):
    "Darker images, of increasing strength over clients."

    amount: UnitInterval = 1.0
    name: ClassVar[str] = "fade"
    strength: ClassVar[str] = "amount"

    @staticmethod
    def transform(images, parameters, shared, keys):
        return (1 - parameters) * images
"""


@pytest.fixture(autouse=True)
def registry():
    yield
    SKEWS.reset()


def make_kind(base, **functions):
    """Return a kind of skew with the name `mine` and the given functions."""
    variables = {
        "__annotations__": {"amount": UnitInterval},
        "__module__": __name__,
        "amount": 1.0,
        "name": "mine",
        "strength": "amount",
    }
    return dataclass(frozen=True, kw_only=True)(type("Mine", (base,), variables | functions))


def test_skew_of_a_file_on_the_command_line(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    options = ["--model", "mlp", "--rounds", "1", "--num-clients", "3", "--json"]
    records = []
    for skew in ("fade:amount=0", "fade:levels=equal", "contrast:amount=0"):
        assert main(["run", "--import", str(path), "--skew", skew, *options]) == 0
        records.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    faded, plain = records[1], records[2]
    assert records[0]["final_accuracy"] == plain["final_accuracy"]
    assert faded["functions"].keys() == {"skew fade"} and "functions" not in records[0]
    assert main(["list", "--import", str(path), "skews"]) == 0
    assert "Darker images" in capsys.readouterr().out


def test_black_images_give_chance_level_and_the_class_is_part_of_the_identity():
    def black(images, parameters, shared, keys):
        return (1 - parameters) * images

    register_skew(make_kind(FeatureSkew, transform=staticmethod(black), levels="equal"))
    spec = RunSpec(skew="mine:levels=equal", **SETTINGS)
    result = simulate(spec)
    # Every client sees equal images, whose best loss is the entropy of the classes.
    assert result.metrics["train_loss"][-1] == pytest.approx(np.log(10), abs=0.05)
    digests = collect_function_digests(spec.resolved())
    other = make_kind(FeatureSkew, transform=staticmethod(lambda images, *_: images + 1))
    register_skew(other)
    assert digests != collect_function_digests(spec.resolved()) and digests


INVALID = {
    "no class": (int, "kind = .*: expected a subclass of FeatureSkew, LabelSkew"),
    "no function": (make_kind(FeatureSkew), "function transform of Mine"),
    "no dataclass": (
        type("Mine", (FeatureSkew,), {"transform": staticmethod(lambda *a: a[0])}),
        "dataclass",
    ),
    "no name": (make_kind(LabelSkew, change_labels=lambda *a: a[2], name=None), "Mine.name = None"),
    "no strength": (
        make_kind(LabelSkew, change_labels=lambda *a: a[2], strength="size"),
        "Mine.strength = 'size'",
    ),
    "built-in name": (make_kind(LabelSkew, change_labels=lambda *a: a[2], name="noise"), "name"),
    "partition": (make_kind(LabelSkew, change_labels=lambda *a: a[2], name="label"), "Mine.name"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_class_is_one_line(case):
    kind, message = INVALID[case]
    with pytest.raises(ConfigError, match=message) as caught:
        register_skew(kind)
    assert "\n" not in str(caught.value)


def raise_error(*args):
    raise ValueError("no")


INVALID_VALUES = {
    "shape": (FeatureSkew, "transform", staticmethod(lambda i, *a: i[:, 1:]), "images"),
    "error": (FeatureSkew, "transform", staticmethod(raise_error), "fails .ValueError: no"),
    "labels": (LabelSkew, "change_labels", lambda s, r, c, labels, n: labels + 5, "from 0 to 9"),
    "clients": (AmountSkew, "select_examples", lambda s, r, c, y, n: c[1:], "3 arrays"),
    "positions": (AmountSkew, "select_examples", lambda s, r, c, y, n: [[-1]] * 3, "position"),
    "repeats": (AmountSkew, "select_examples", lambda s, r, c, y, n: [[3, 3]] * 3, "3 2 times"),
    "phases": (DriftSkew, "select_active", lambda s, r, c, y, n: [c], "10 lists"),
}


@pytest.mark.parametrize("case", INVALID_VALUES)
def test_invalid_return_value_is_one_line(case):
    base, name, function, message = INVALID_VALUES[case]
    register_skew(make_kind(base, **{name: function}))
    with pytest.raises(ConfigError, match=f"skew 'mine'.*{message}") as caught:
        simulate(RunSpec(skew="mine", **SETTINGS))
    assert "\n" not in str(caught.value)


def test_fields_need_defaults():
    @dataclass(frozen=True, kw_only=True)
    class Mine(LabelSkew):
        amount: float
        name: ClassVar[str] = "mine"
        strength: ClassVar[str] = "amount"

        def change_labels(self, rng, clients, labels, num_classes):
            return labels

    assert "amount" in {field.name for field in dataclasses.fields(Mine)}
    with pytest.raises(ConfigError, match="field amount of Mine"):
        register_skew(Mine)
