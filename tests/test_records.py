"""Typed settings: what their annotations allow, and what is said of all else."""

from dataclasses import FrozenInstanceError, dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import pytest

from fedjax_het.algorithms import METHODS
from fedjax_het.common.errors import ConfigError
from fedjax_het.common.records import (
    Bounds,
    Count,
    Decay,
    Momentum,
    NonNegative,
    Number,
    Positive,
    Record,
    Share,
    Whole,
    above,
    as_dict,
    at_least,
    documentation,
    numbers_of,
    read,
    record_of,
)


@dataclass(frozen=True)
class Mixed(Record):
    whole: Whole = 0
    count: Count = 3
    rate: NonNegative = 0.5
    scale: Positive = 1.0
    share: Share = 0.5
    momentum: Momentum = 0.9
    decay: Decay = 1.0
    any_number: float = -1.0
    at_two: Annotated[int, at_least(2)] = 2
    beyond: Annotated[float, above(-1)] = 0.0
    choice: Literal["I", "II"] = "II"
    flag: bool = False
    word: str = "a"
    sizes: tuple[Count, ...] = (1, 2)
    maybe: Positive | None = None
    maybe_choice: Literal["x", "y"] | None = None
    maybe_sizes: tuple[int, ...] | None = None


ALLOWED = [
    ("whole", 0, 0),
    ("whole", np.int64(7), 7),
    ("count", 1, 1),
    ("rate", 0, 0.0),
    ("rate", np.float32(0.25), 0.25),
    ("scale", 1e-9, 1e-9),
    ("share", 0, 0.0),
    ("share", 1, 1.0),
    ("momentum", 0, 0.0),
    ("decay", 1, 1.0),
    ("any_number", -1e9, -1e9),
    ("at_two", 2, 2),
    ("beyond", -0.99, -0.99),
    ("choice", "I", "I"),
    ("flag", True, True),
    ("word", "anything", "anything"),
    ("sizes", [4, 5], (4, 5)),
    ("sizes", (), ()),
    ("maybe", None, None),
    ("maybe", 2, 2.0),
    ("maybe_choice", "x", "x"),
    ("maybe_sizes", [0], (0,)),
]

REFUSED = [
    ("whole", -1, "whole = -1: expected a whole number >= 0"),
    ("whole", 1.5, "whole = 1.5: expected a whole number >= 0"),
    ("whole", True, "whole = True: expected a whole number"),
    ("whole", "3", "whole = '3': expected a whole number"),
    ("count", 0, "count = 0: expected a whole number >= 1"),
    ("rate", -0.1, "rate = -0.1: expected a finite number >= 0"),
    ("rate", float("nan"), "rate = nan: expected a finite number"),
    ("rate", float("inf"), "rate = inf: expected a finite number"),
    ("rate", True, "rate = True: expected a finite number"),
    ("rate", "fast", "rate = 'fast': expected a finite number"),
    ("scale", 0, "scale = 0: expected a finite number > 0"),
    ("share", 1.01, "share = 1.01: expected a share in [0, 1]"),
    ("share", -0.01, "share = -0.01: expected a share in [0, 1]"),
    ("momentum", 1, "momentum = 1: expected a number in [0, 1)"),
    ("decay", 0, "decay = 0: expected a number in (0, 1]"),
    ("any_number", float("inf"), "any_number = inf: expected a finite number"),
    ("at_two", 1, "at_two = 1: expected a whole number >= 2"),
    ("beyond", -1, "beyond = -1: expected a finite number > -1"),
    ("choice", "III", "choice = 'III' is unknown: did you mean 'II' or 'I'? (valid: I, II)"),
    ("flag", 1, "flag = 1: expected True or False"),
    ("word", 1, "word = 1: expected a word"),
    ("sizes", 4, "sizes = 4: expected a list"),
    ("sizes", "45", "sizes = '45': expected a list"),
    ("sizes", [4, 0], "sizes = 0: expected a whole number >= 1"),
    ("maybe", 0, "maybe = 0: expected a finite number > 0"),
    ("maybe_choice", "z", "maybe_choice = 'z' is unknown"),
    ("maybe_sizes", [0.5], "maybe_sizes = 0.5: expected a whole number"),
]


@pytest.mark.parametrize(("name", "value", "expected"), ALLOWED)
def test_what_fits_is_taken_as_its_type(name, value, expected):
    found = getattr(read(Mixed, {name: value}), name)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(("name", "value", "message"), REFUSED)
def test_what_does_not_fit_says_what_would(name, value, message):
    with pytest.raises(ConfigError) as found:
        read(Mixed, {name: value}, label="option ")
    assert str(found.value).startswith(f"option {message}")


def test_what_is_not_given_is_as_the_class_has_it():
    assert read(Mixed, {}) == Mixed()
    with pytest.raises(ConfigError, match="count = None: expected a whole number >= 1"):
        read(Mixed, {"count": None})
    with pytest.raises(FrozenInstanceError):
        Mixed().count = 4


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"option = 'cuont' is unknown: did you mean 'count'"):
        read(Mixed, {"cuont": 1})
    with pytest.raises(ConfigError, match=r"server option = 'q' is unknown: \(valid: whole, "):
        read(Mixed, {"q": 1}, name="server option")


def test_a_record_is_read_from_its_values():
    changed = read(Mixed, {"sizes": [7], "maybe": 3, "flag": True})
    values = as_dict(changed)
    assert values["sizes"] == [7] and values["maybe"] == 3.0 and values["maybe_sizes"] is None
    assert read(Mixed, values) == changed


@dataclass(frozen=True)
class Sized(Record):
    PRESETS: ClassVar = {"paper": {}, "code": {"steps": 30, "rate": 0.1}}
    preset: str = "paper"
    steps: Count = 10
    rate: Positive | None = None
    epochs: Count | None = None

    @classmethod
    def adjusted(cls, given):
        return {"preset": "code", **given} if "rate" in given else given

    def completed(self):
        return self if self.epochs else Sized(self.preset, self.steps, self.rate, 2 * self.steps)

    def check(self):
        if self.steps > 99:
            raise ConfigError(f"steps = {self.steps}: expected at most 99")


def test_a_preset_fills_what_is_not_given():
    assert read(Sized, {}) == Sized("paper", 10, None, 20)
    assert read(Sized, {"preset": "code"}) == Sized("code", 30, 0.1, 60)
    assert read(Sized, {"preset": "code", "steps": 4}) == Sized("code", 4, 0.1, 8)
    assert read(Sized, {"preset": "code", "steps": None}).steps == 30
    assert read(Sized, {"preset": "code", "rate": None}).rate is None, "given, where it can be"


def test_what_follows_comes_before_the_preset_and_after_it():
    assert read(Sized, {"rate": 0.7}) == Sized("code", 30, 0.7, 60)
    assert read(Sized, {"epochs": 5}).epochs == 5
    with pytest.raises(ConfigError, match="steps = 100: expected at most 99"):
        read(Sized, {"steps": 100})
    with pytest.raises(ConfigError, match=r"option preset = 'papr' is unknown: did you mean 'pape"):
        read(Sized, {"preset": "papr"}, label="option ")


def test_numbers_are_named_with_their_ranges():
    @dataclass(frozen=True)
    class Numbers(Record):
        rate: NonNegative = 0.1
        decay: Decay = 1.0
        left_out: Positive | None = None

    assert numbers_of(Numbers()) == {
        "rate": Number(0.1, Bounds(0)),
        "decay": Number(1.0, Bounds(0, 1, open_low=True)),
    }
    assert numbers_of(Numbers(left_out=2))["left_out"] == Number(2.0, Bounds(0, open_low=True))


def test_a_record_can_be_made_of_defaults():
    made = record_of("mine_numbers", {"rate": 1})
    assert issubclass(made, Record) and made() == made(rate=1.0)
    assert numbers_of(made()) == {"rate": Number(1.0, Bounds(0))}
    for value in (-1, "fast", None, True):
        with pytest.raises(ConfigError, match=r"rate = .*: expected a finite number >= 0"):
            record_of("mine_numbers", {"rate": value})


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        (Bounds(), (-1e300, 0, 1e300), ()),
        (at_least(2), (2, 3), (1.999, -2)),
        (above(2), (2.001,), (2, 1)),
        (Bounds(0, 1), (0, 1), (-0.001, 1.001)),
        (Bounds(0, 1, True, True), (0.001, 0.999), (0, 1)),
    ],
)
def test_bounds(bounds, inside, outside):
    assert all(map(bounds.allow, inside)) and not any(map(bounds.allow, outside))
    assert not bounds.allow(float("nan"))


def test_documentation_says_what_a_field_may_be():
    words = documentation(Mixed)
    assert words["count"][0] == "a whole number >= 1"
    assert words["choice"][0] == "I or II"
    assert words["sizes"][0] == "a list, each a whole number >= 1"
    assert words["maybe"][0] == "a number > 0 or None"
    assert words["decay"][0] == "a number in (0, 1]"


def test_documentation_names_the_presets():
    assert (
        documentation(METHODS["fedgen"].options)["fedgen_preset"][0] == "cifar or mnist or emnist"
    )


def test_documentation_has_the_text_after_a_field_and_a_parents():
    words = documentation(METHODS["fedmix"].options)
    assert words["mean_size"][1] == "M_k: examples in an average; None: all that a client has."
    assert words["coefficient"][1].startswith("Of the term with the derivative")
    assert words["coefficient"][0] == "expansion or printed"


@pytest.mark.parametrize("method", METHODS)
def test_a_methods_options_survive_being_written_out(method):
    kind = METHODS[method].options
    for preset in kind.PRESETS or (None,):
        given = {} if preset is None else {kind.PRESET_FIELD: preset}
        filled = read(kind, given)
        assert read(kind, as_dict(filled)) == filled
        assert documentation(kind).keys() == as_dict(filled).keys()
