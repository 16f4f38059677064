"""The papers' tables and figures as programs: found by their files, loaded by their names.

They lie in the folder `experiments`, a module each, which has a `main` (`Program`) and says in the
first line of its docstring what it makes. In a checkout that folder is beside the package; a wheel
carries it inside. Either way it is the package `experiments` of this process, whatever folder of
that name is in the current directory.
"""

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import fedjax_het
from fedjax_het.common import manner
from fedjax_het.common.command_line import run_program
from fedjax_het.common.errors import ConfigError, require_name
from fedjax_het.common.pictures import HELP, pictures_besides, taken_from

_PACKAGE = "experiments"
_ITEM = re.compile(r"(all|table|fig)(\d*)")
_KINDS = ("all", "table", "fig")


class Program(Protocol):
    """What `main` of a table's or figure's module is."""

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Takes the command line after the program's name (default: `sys.argv`); the exit status.

        0; 2 for a setting that cannot be used and when no run could be made; 130 after Ctrl-C.
        """
        ...


def function_program(work: Callable[..., int], about: str) -> Program:
    """`main` of a figure that is a function: its arguments are those of the command line."""

    def main(argv: Sequence[str] | None = None) -> int:
        return _run(work, work, argv, about)

    return main


def record_program(
    arguments: type, work: Callable[[Any], int], about: str | None = None
) -> Program:
    """`main` of a program whose arguments are a dataclass: `work` gets the record."""

    def main(argv: Sequence[str] | None = None) -> int:
        return _run(arguments, work, argv, about)

    return main


def _run(
    asked: Callable[..., Any],
    work: Callable[..., int],
    argv: Sequence[str] | None,
    about: str | None,
) -> int:
    """`run_program` of a program that takes `--json`, `--quiet` and `--pictures` besides its own
    flags."""
    with manner.scoped():
        words = manner.chosen_by(sys.argv[1:] if argv is None else argv)
        kinds, words = taken_from(words)
        said = " ".join(filter(None, (about, manner.HELP, f"--pictures: {HELP}")))

        def drawn(*read: Any, **given: Any) -> int:
            with pictures_besides(kinds):
                return work(*read, **given)

        return run_program(asked, drawn, words, said)


class Module(NamedTuple):
    """A module with a program."""

    name: str
    """Below `experiments`: `dynafed.table5`."""
    path: Path

    @property
    def description(self) -> str:
        """Its docstring's first line; nothing of it is imported."""
        docstring = ast.get_docstring(ast.parse(self.path.read_text(encoding="utf-8"))) or ""
        return docstring.partition("\n")[0]


def find_programs() -> dict[str, Module]:
    """The programs by name: folder by folder, in each tables before figures, by number."""
    folder = experiments_folder()
    paths = [path for path in folder.rglob("*.py") if _ITEM.fullmatch(path.stem)]
    names = (".".join(path.relative_to(folder).with_suffix("").parts) for path in paths)
    modules = sorted(map(Module, names, paths), key=_order)
    return {module.name: module for module in modules}


def load_program(name: str) -> Program:
    """`main` of the module `experiments.<name>`. ConfigError for a name that no program has."""
    require_name("table", name, find_programs())
    _import_package(experiments_folder())
    return importlib.import_module(f"{_PACKAGE}.{name}").main


def experiments_folder() -> Path:
    """The folder inside the installed package, else that of the checkout. ConfigError if there is
    neither."""
    package = Path(fedjax_het.__file__).resolve().parent
    beside = package.parent / _PACKAGE
    if (package / _PACKAGE).is_dir():
        return package / _PACKAGE
    # What lies beside an installed package is anyone's; only a checkout has the project's file.
    if (package.parent / "pyproject.toml").is_file() and beside.is_dir():
        return beside
    raise ConfigError(f"the folder {_PACKAGE} is missing from this installation of fedjax_het")


def _order(module: Module) -> tuple[str, int, int]:
    folder, _, item = module.name.rpartition(".")
    match = _ITEM.fullmatch(item)
    assert match is not None
    return folder, _KINDS.index(match[1]), int(match[2] or 0)


def _import_package(folder: Path) -> None:
    """Make `experiments` the package in this folder. ConfigError if it is another one already."""
    present = sys.modules.get(_PACKAGE)
    if present is not None:
        where = [Path(path).resolve() for path in getattr(present, "__path__", ())]
        if where != [folder]:
            raise ConfigError(f"another module named {_PACKAGE} is imported already: {present!r}")
        return
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = module
    spec.loader.exec_module(module)
