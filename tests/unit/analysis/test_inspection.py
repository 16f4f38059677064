"""Descriptions of entries by name."""

import pytest

from fedjax_het import describe
from fedjax_het.analysis.inspection import REGISTRIES, format_by_protocol
from fedjax_het.config.protocols import PROTOCOLS
from fedjax_het.utils.registry import get_argument_docs


def test_all_entries_of_a_name_are_described():
    text = describe("drift")
    assert "drift (skews): " in text and "drift (metrics): " in text and "--skew drift:" in text
    assert describe("fedprox").startswith("fedprox: ")


OPTION_KINDS = {
    "data sources": "hf",
    "partitions": "dirichlet_capped",
    "networks": "convnet",
    "server's examples": "held_out",
    "skews": "label",
}


@pytest.mark.parametrize("title", OPTION_KINDS)
def test_every_option_has_a_description(title):
    registry, describe_entry = REGISTRIES[title]
    lines = [line for name in registry for line in describe_entry(registry[name])]
    options = [line for line in lines if line.startswith("  ")]
    assert len(options) >= 3
    assert [line for line in options if not line.partition(": ")[2].strip()] == []
    assert any(
        line.startswith("options (--") for line in describe(OPTION_KINDS[title]).splitlines()
    )


def test_option_shows_its_default_and_the_text_of_the_docstring():
    lines = describe("dirichlet_capped").splitlines()
    assert "  min_size = 10: smallest number of examples of a client, at most N / K." in lines
    assert any(line.startswith("  alpha (required): ") for line in lines)


def test_argument_docs_are_in_one_line_each():
    def function(first, second, third):
        """Do nothing.

        Args:
          first: a text
            of two lines.
          second: a text with a colon: here.
        """

    expected = {"first": "a text of two lines.", "second": "a text with a colon: here."}
    assert get_argument_docs(function) == expected
    assert get_argument_docs(len.__class__.__call__) == get_argument_docs(None) == {}


def test_protocols_with_equal_values_share_one_text():
    values = dict.fromkeys(PROTOCOLS, 1.0)
    assert format_by_protocol(values) == format_by_protocol(values, first="standard") == "1"
    values |= {"dynafed": 2, "fedaf": None, "fsl": 2}
    text = format_by_protocol(values, first="standard")
    assert text == "1; dynafed, fsl 2; fedaf —"
    names = ", ".join(name for name, value in values.items() if value == 1.0)
    assert format_by_protocol(values) == f"{names} 1; dynafed, fsl 2; fedaf —"
    text = format_by_protocol(values, {"dynafed": 3, "standard": 1.0}, first="standard")
    assert text == "1; dynafed 2 (digits 3); fedaf —; fsl 2"
