"""What the pages for developers name is there, and imports go as their map of rooms says."""

import ast
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
ROOMS = re.findall(r"^\| `(\w+)` \|", ARCHITECTURE.split("## The host")[0], flags=re.MULTILINE)
PICTURE = (ROOT / "docs" / "generate" / "architecture_picture.py").read_text()


def test_there_is_something_to_check():
    assert len(PATHS) > 40 and len(NAMES) > 10


LINKS = re.findall(r"\]\(([^)#]+)\)", CONTRIBUTING)  # a page's own are in `test_docs`
DRAWN = re.findall(r'"(\w+/\w+\.py)"', PICTURE)


@pytest.mark.parametrize("path", [*PATHS, *LINKS, *DRAWN])
def test_a_path_exists(path):
    assert (ROOT / path).exists() or (PACKAGE / path).exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_name_resolves(name):
    outside = name.partition(".")[0] in ("fedjax_het", "jax")
    pkgutil.resolve_name(name if outside else f"fedjax_het.{name}")


def test_all_that_registers_is_named():
    public = {name for name in fedjax_het.__all__ if name.startswith("register_")}
    assert {word for word in IN_CODE if word.startswith("register_")} == public


def test_the_map_has_every_room():
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(ROOMS) == rooms | {"experiments"} and len(ROOMS) == len(set(ROOMS))


@pytest.mark.parametrize("room", ROOMS[:-1])
def test_a_room_imports_from_those_above_it(room):
    wrong = []
    for path in sorted((PACKAGE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
                if node.module == "fedjax_het":
                    modules = [f"fedjax_het.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                continue
            for module in modules:
                package, *rest = module.split(".")
                below = ROOMS[ROOMS.index(room) + 1 :]
                if package == "experiments" or (
                    package == "fedjax_het" and rest[:1] and rest[0] in below
                ):
                    wrong.append((path.name, module))
    assert not wrong
