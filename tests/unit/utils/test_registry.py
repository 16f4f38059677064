"""Registries of named entries, of the package and of users."""

from typing import NamedTuple

import pytest

from fedjax_het.utils.errors import ConfigError
from fedjax_het.utils.registry import Registry


class Tool(NamedTuple):
    name: str
    description: str


@pytest.fixture
def tools() -> Registry[Tool]:
    records = (Tool("hammer", "for nails"), Tool("saw", "for boards"))
    return Registry("tool", records, argument="tool_name")


def test_registry_is_a_mapping(tools):
    tools.add(Tool("awl", "for holes"))
    assert list(tools) == ["hammer", "saw", "awl"]
    assert len(tools) == 3 and "awl" in tools and "axe" not in tools
    assert tools["awl"].description == tools.get("awl").description == "for holes"
    assert tools.get("axe") is None
    assert {name: record.name for name, record in tools.items()} == {name: name for name in tools}
    assert tools.built_in == {"hammer", "saw"}
    with pytest.raises(KeyError):
        tools["axe"]


def test_registry_suggests_similar_names(tools):
    assert tools.require("saw").description == "for boards"
    with pytest.raises(ConfigError, match=r"tool_name = 'hamer' is unknown: did you mean 'hammer'"):
        tools.require("hamer")
    tools.add(Tool("screwdriver", ""))
    with pytest.raises(ConfigError, match=r"tool_name = 'skrewdriver'.*'screwdriver'"):
        tools.require("skrewdriver")


def test_registry_replaces_and_resets_user_entries(tools):
    tools.add(Tool("awl", "blunt"))
    tools.add(Tool("awl", "sharp"))
    assert tools["awl"].description == "sharp" and len(tools) == 3
    tools.reset()
    assert list(tools) == ["hammer", "saw"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("saw", "name = 'saw': expected a name that no tool of the package has"),
        ("my tool", "name = 'my tool': expected letters, digits and underscores"),
        ("", "name = '': expected letters"),
        (3, "name = 3: expected letters"),
    ],
)
def test_registry_rejects_invalid_names(tools, name, message):
    with pytest.raises(ConfigError, match=message):
        tools.add(Tool(name, "another"))
    assert list(tools) == ["hammer", "saw"] and tools["saw"].description == "for boards"


def test_registry_rejects_duplicate_names():
    with pytest.raises(ValueError, match="two records of the registry of tools"):
        Registry("tool", (Tool("saw", ""), Tool("saw", "")))
