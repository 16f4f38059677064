"""The layers of the package import downwards only, lazily or for type checkers as well."""

import ast
from pathlib import Path

import pytest

import fedjax_het

PACKAGE = Path(fedjax_het.__file__).parent
# From the lowest layer to the highest; packages of one layer do not import each other.
LAYERS = (
    ("utils",),
    ("tasks",),
    ("data", "metrics", "nn"),
    ("compression", "skews", "aggregation", "privacy"),
    ("attacks",),
    ("core",),
    ("condensation", "systems"),
    ("algorithms",),
    ("methods",),  # a module that gathers what the file of a method imports
    ("config",),
    ("runtime",),
    ("tuning",),
    ("analysis",),
    ("papers",),
    ("cli",),
)
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def module_name(path: Path) -> str:
    """Return the dotted name of a file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported_modules(path: Path) -> set[str]:
    """Return the modules of the package that a file imports at any place."""
    actual = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            actual |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                actual.add(submodule if submodule in MODULES else node.module)
    return {name for name in actual if name.split(".")[0] == "fedjax_het"}


@pytest.mark.parametrize("package", list(RANKS))
def test_imports_point_downwards(package):
    upward = []
    for name, path in MODULES.items():
        if name.split(".")[1:2] != [package]:
            continue
        for target in imported_modules(path):
            target_package = target.split(".")[1] if "." in target else "the root of the package"
            if target_package in (package, "_version"):
                continue
            if RANKS.get(target_package, len(LAYERS)) >= RANKS[package]:
                upward.append(f"{name} imports {target}")
    assert not upward, upward


def test_every_package_has_a_layer():
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert packages | {"methods"} == set(RANKS)


def test_modules_import_each_other_in_no_circle():
    graph = {name: imported_modules(path) & set(MODULES) for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name in done:
            return
        for target in graph[name] - {name}:
            # A package's `__init__` gathers its modules; they may import one another directly.
            if not name.startswith(f"{target}."):
                visit(target, (*trail, name))
        done.add(name)

    for name in MODULES:
        visit(name, ())
