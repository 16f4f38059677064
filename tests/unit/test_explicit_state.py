"""Traced code gets all that it depends on as arguments."""

import ast
from pathlib import Path

import pytest

import fedjax_het

PACKAGE = Path(fedjax_het.__file__).parent
TRACED_PACKAGES = ("core", "nn", "condensation", "algorithms")
MODULES = sorted(path for name in TRACED_PACKAGES for path in (PACKAGE / name).rglob("*.py"))


def find_ambient_state(source: str) -> list[str]:
    """Return the context variables, thread-local variables and `global` statements of a module."""
    actual = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Global):
            actual.append(f"line {node.lineno}: global {', '.join(node.names)}")
        elif isinstance(node, ast.Import):
            names = {alias.name for alias in node.names} & {"contextvars"}
            actual += [f"line {node.lineno}: import {name}" for name in names]
        elif isinstance(node, ast.ImportFrom) and node.module == "contextvars":
            actual.append(f"line {node.lineno}: from contextvars import ...")
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "threading.local":
            actual.append(f"line {node.lineno}: threading.local")
    return actual


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_traced_code_has_no_ambient_state(path):
    assert find_ambient_state(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "from contextvars import ContextVar",
        "import contextvars",
        "import threading\nstate = threading.local()",
        "def set_mode(mode):\n    global _mode\n    _mode = mode",
    ],
)
def test_ambient_state_is_found(source):
    assert len(find_ambient_state(source)) == 1
