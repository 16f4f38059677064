"""Typed settings: valid values of annotations, and messages about invalid values."""

from dataclasses import FrozenInstanceError, dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import pytest

from fedjax_het.algorithms import METHODS
from fedjax_het.utils.config import (
    Bounds,
    Config,
    DecayFactor,
    HyperParameter,
    MomentumCoefficient,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    config_to_dict,
    document_fields,
    hyperparameters_of,
    make_config_class,
    parse_config,
)
from fedjax_het.utils.errors import ConfigError


@dataclass(frozen=True)
class Mixed(Config):
    whole: NonNegativeInt = 0
    count: PositiveInt = 3
    rate: NonNegativeFloat = 0.5
    scale: PositiveFloat = 1.0
    share: UnitInterval = 0.5
    momentum: MomentumCoefficient = 0.9
    decay: DecayFactor = 1.0
    any_number: float = -1.0
    at_two: Annotated[int, Bounds(2)] = 2
    beyond: Annotated[float, Bounds(-1, open_low=True)] = 0.0
    choice: Literal["I", "II"] = "II"
    flag: bool = False
    word: str = "a"
    sizes: tuple[PositiveInt, ...] = (1, 2)
    maybe: PositiveFloat | None = None
    maybe_choice: Literal["x", "y"] | None = None
    maybe_sizes: tuple[int, ...] | None = None


ALLOWED = [
    ("whole", np.int64(7), 7),
    ("rate", np.float32(0.25), 0.25),
    ("scale", 1e-9, 1e-9),
    ("share", 0, 0.0),
    ("momentum", 0, 0.0),
    ("decay", 1, 1.0),
    ("at_two", 2, 2),
    ("beyond", -0.99, -0.99),
    ("choice", "I", "I"),
    ("flag", True, True),
    ("sizes", [4, 5], (4, 5)),
    ("maybe", None, None),
    ("maybe_choice", "x", "x"),
    ("maybe_sizes", [0], (0,)),
]

REFUSED = [
    ("whole", -1, "whole = -1: expected a whole number >= 0"),
    ("whole", True, "whole = True: expected a whole number"),
    ("whole", "3", "whole = '3': expected a whole number"),
    ("count", 0, "count = 0: expected a whole number >= 1"),
    ("rate", -0.1, "rate = -0.1: expected a finite number >= 0"),
    ("rate", float("nan"), "rate = nan: expected a finite number"),
    ("rate", "fast", "rate = 'fast': expected a finite number"),
    ("scale", 0, "scale = 0: expected a finite number > 0"),
    ("share", 1.01, "share = 1.01: expected a number in [0, 1]"),
    ("momentum", 1, "momentum = 1: expected a number in [0, 1)"),
    ("decay", 0, "decay = 0: expected a number in (0, 1]"),
    ("at_two", 1, "at_two = 1: expected a whole number >= 2"),
    ("beyond", -1, "beyond = -1: expected a finite number > -1"),
    ("choice", "III", "choice = 'III' is unknown: did you mean 'II'?"),
    ("flag", 1, "flag = 1: expected True or False"),
    ("word", 1, "word = 1: expected a word"),
    ("sizes", 4, "sizes = 4: expected a list"),
    ("sizes", [4, 0], "sizes[1] = 0: expected a whole number >= 1"),
    ("maybe", 0, "maybe = 0: expected a finite number > 0"),
    ("maybe_choice", "z", "maybe_choice = 'z' is unknown"),
    ("maybe_sizes", [0.5], "maybe_sizes[0] = 0.5: expected a whole number"),
]


@pytest.mark.parametrize(("name", "value", "expected"), ALLOWED)
def test_parse_config_converts_valid_values(name, value, expected):
    actual = getattr(parse_config(Mixed, {name: value}), name)
    assert actual == expected and type(actual) is type(expected)


@pytest.mark.parametrize(("name", "value", "message"), REFUSED)
def test_parse_config_rejects_invalid_values(name, value, message):
    with pytest.raises(ConfigError) as error_info:
        parse_config(Mixed, {name: value})
    assert str(error_info.value).startswith(message)


def test_parse_config_uses_defaults():
    assert parse_config(Mixed, {}) == Mixed()
    with pytest.raises(ConfigError, match="count = None: expected a whole number >= 1"):
        parse_config(Mixed, {"count": None})
    with pytest.raises(FrozenInstanceError):
        Mixed().count = 4


def test_parse_config_suggests_similar_names():
    with pytest.raises(ConfigError, match=r"option = 'cuont' is unknown: did you mean 'count'"):
        parse_config(Mixed, {"cuont": 1})
    with pytest.raises(ConfigError, match=r"option = 'q' is unknown: expected whole, "):
        parse_config(Mixed, {"q": 1})


def test_config_to_dict_round_trip():
    changed = parse_config(Mixed, {"sizes": [7], "maybe": 3, "flag": True})
    values = config_to_dict(changed)
    assert values["sizes"] == [7] and values["maybe"] == 3.0 and values["maybe_sizes"] is None
    assert parse_config(Mixed, values) == changed


@dataclass(frozen=True)
class Sized(Config):
    PRESETS: ClassVar = {"paper": {}, "code": {"steps": 30, "rate": 0.1}}
    preset: str = "paper"
    steps: PositiveInt = 10
    rate: PositiveFloat | None = None
    epochs: PositiveInt | None = None

    @classmethod
    def normalize_values(cls, arguments):
        return {"preset": "code", **arguments} if "rate" in arguments else arguments

    def with_derived_fields(self):
        return self if self.epochs else Sized(self.preset, self.steps, self.rate, 2 * self.steps)

    def check(self):
        if self.steps > 99:
            raise ConfigError(f"steps = {self.steps}: expected at most 99")


def test_preset_provides_unset_fields():
    assert parse_config(Sized, {}) == Sized("paper", 10, None, 20)
    assert parse_config(Sized, {"preset": "code"}) == Sized("code", 30, 0.1, 60)
    assert parse_config(Sized, {"preset": "code", "steps": 4}) == Sized("code", 4, 0.1, 8)
    with pytest.raises(ConfigError, match="steps = None: expected a whole number"):
        parse_config(Sized, {"preset": "code", "steps": None})
    assert parse_config(Sized, {"preset": "code", "rate": None}).rate is None  # a valid value


def test_derived_fields_and_checks():
    assert parse_config(Sized, {"rate": 0.7}) == Sized("code", 30, 0.7, 60)
    assert parse_config(Sized, {"epochs": 5}).epochs == 5
    with pytest.raises(ConfigError, match="steps = 100: expected at most 99"):
        parse_config(Sized, {"steps": 100})
    with pytest.raises(ConfigError, match=r"preset = 'papr' is unknown: did you mean 'paper'"):
        parse_config(Sized, {"preset": "papr"})


def test_hyperparameters_of_config():
    @dataclass(frozen=True)
    class Numbers(Config):
        rate: NonNegativeFloat = 0.1
        decay: DecayFactor = 1.0
        left_out: PositiveFloat | None = None

    assert hyperparameters_of(Numbers()) == {
        "rate": HyperParameter(0.1, Bounds(0)),
        "decay": HyperParameter(1.0, Bounds(0, 1, open_low=True)),
    }
    expected = HyperParameter(2.0, Bounds(0, open_low=True))
    assert hyperparameters_of(Numbers(left_out=2))["left_out"] == expected


def test_make_config_class():
    result = make_config_class("mine_numbers", {"rate": 1})
    assert issubclass(result, Config) and result() == result(rate=1.0)
    assert hyperparameters_of(result()) == {"rate": HyperParameter(1.0, Bounds(0))}
    for value in (-1, "fast", None, True):
        with pytest.raises(ConfigError, match=r"rate = .*: expected a finite number >= 0"):
            make_config_class("mine_numbers", {"rate": value})


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        (Bounds(), (-1e300, 0, 1e300), ()),
        (Bounds(2), (2, 3), (1.999, -2)),
        (Bounds(2, open_low=True), (2.001,), (2, 1)),
        (Bounds(0, 1), (0, 1), (-0.001, 1.001)),
        (Bounds(0, 1, True, True), (0.001, 0.999), (0, 1)),
    ],
)
def test_bounds_contain_values(bounds, inside, outside):
    assert all(map(bounds.contains, inside)) and not any(map(bounds.contains, outside))
    assert not bounds.contains(float("nan"))


def test_document_fields():
    words = {name: text for name, (text, _) in document_fields(Mixed).items()}
    expected = {"count": "a whole number >= 1", "choice": "I or II"}
    expected |= {"maybe": "a number > 0 or None", "decay": "a number in (0, 1]"}
    assert expected.items() <= words.items()
    assert words["sizes"] == "a list, each a whole number >= 1"
    presets = document_fields(METHODS["fedgen"].options)["fedgen_preset"][0]
    assert presets == "cifar or mnist or emnist"
    words = document_fields(METHODS["fedmix"].options)
    assert words["mean_size"][1].startswith("Number of examples in an average, M_k")
    assert words["coefficient"][1].startswith("Coefficient of the derivative")
    assert words["coefficient"][0] == "expansion or printed"


@pytest.mark.parametrize("method", METHODS)
def test_method_options_round_trip(method):
    kind = METHODS[method].options
    for preset in kind.PRESETS or (None,):
        arguments = {} if preset is None else {kind.PRESET_FIELD: preset}
        filled = parse_config(kind, arguments)
        assert parse_config(kind, config_to_dict(filled)) == filled
        assert document_fields(kind).keys() == config_to_dict(filled).keys()
