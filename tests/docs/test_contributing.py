"""The paths, names and packages that the pages for developers mention exist."""

import pkgutil
import re

import pytest
from support.paths import ROOT

import fedjax_het

PACKAGE = ROOT / "fedjax_het"
ARCHITECTURE = (ROOT / "docs" / "developers" / "architecture.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
TEXT = CONTRIBUTING + ARCHITECTURE
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.DOTALL | re.MULTILINE)
IN_CODE = sorted(set(re.findall(r"`([^`\n]+)`", PROSE)))
IS_PATH = re.compile(r"[\w./]+/[\w.]*|[\w/]+\.(py|md|toml|yml)")
PATHS = [word for word in IN_CODE if IS_PATH.fullmatch(word)]
NAMES = [word for word in IN_CODE if re.fullmatch(r"\w+(\.\w+)+", word) and word not in PATHS]
LAYERS = ARCHITECTURE.split("## The layers")[1].split("\n## ")[0]
PICTURE = (ROOT / "docs" / "generate" / "architecture_picture.py").read_text()


def test_pages_have_content():
    assert len(PATHS) > 40 and len(NAMES) > 10


LINKS = re.findall(r"\]\(([^)#]+)\)", CONTRIBUTING)  # links within pages are in `test_docs`
DRAWN = re.findall(r'"(\w+/\w+\.py)"', PICTURE)


@pytest.mark.parametrize("path", [*PATHS, *LINKS, *DRAWN])
def test_paths_exist(path):
    assert (ROOT / path).exists() or (PACKAGE / path).exists()


@pytest.mark.parametrize("name", NAMES)
def test_names_resolve(name):
    outside = name.partition(".")[0] in ("fedjax_het", "jax")
    pkgutil.resolve_name(name if outside else f"fedjax_het.{name}")


def test_page_names_registering_functions():
    public = {name for name in fedjax_het.__all__ if name.startswith("register_")}
    assert {word for word in IN_CODE if word.startswith("register_")} == public


def test_map_has_every_package():
    packages = re.findall(r"^\| `(\w+)` \|", LAYERS, flags=re.MULTILINE)
    assert sorted(packages) == sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
