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
from fedjax_het.common.pictures import (
    FIGURE_FORMATS_HELP,
    split_figure_formats,
    write_extra_formats,
)

_PACKAGE = "experiments"
_ITEM_PATTERN = re.compile(r"(all|table|fig)(\d*)")
_ITEM_KINDS = ("all", "table", "fig")


class ProgramMain(Protocol):
    """What `main` of a table's or figure's module is."""

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Takes the command line after the program's name (default: `sys.argv`); the exit status.

        0; 2 for a setting that cannot be used and when no run could be made; 130 after Ctrl-C.
        """
        ...


def make_function_program(function: Callable[..., int], description: str) -> ProgramMain:
    """`main` of a figure that is a function: its arguments are those of the command line."""

    def main(argv: Sequence[str] | None = None) -> int:
        return _run_command_line(function, function, argv, description)

    return main


def make_config_program(
    config_type: type, function: Callable[[Any], int], description: str | None = None
) -> ProgramMain:
    """`main` of a program whose arguments are a dataclass: `work` gets the record."""

    def main(argv: Sequence[str] | None = None) -> int:
        return _run_command_line(config_type, function, argv, description)

    return main


def _run_command_line(
    parsed_type: Callable[..., Any],
    function: Callable[..., int],
    argv: Sequence[str] | None,
    description: str | None,
) -> int:
    """`run_program` of a program that takes `--json`, `--quiet` and `--pictures` besides its own
    flags."""
    with manner.preserve_output_mode():
        arguments = manner.parse_output_flags(sys.argv[1:] if argv is None else argv)
        figure_formats, arguments = split_figure_formats(arguments)
        description_text = " ".join(
            filter(
                None, (description, manner.OUTPUT_FLAGS_HELP, f"--pictures: {FIGURE_FORMATS_HELP}")
            )
        )

        def run_with_figure_formats(*args: Any, **kwargs: Any) -> int:
            with write_extra_formats(figure_formats):
                return function(*args, **kwargs)

        return run_program(parsed_type, run_with_figure_formats, arguments, description_text)


class ProgramModule(NamedTuple):
    """A module with a program."""

    name: str
    """Below `experiments`: `dynafed.table5`."""
    path: Path

    @property
    def description(self) -> str:
        """Its docstring's first line; nothing of it is imported."""
        docstring = ast.get_docstring(ast.parse(self.path.read_text(encoding="utf-8"))) or ""
        return docstring.partition("\n")[0]


def find_programs() -> dict[str, ProgramModule]:
    """The programs by name: folder by folder, in each tables before figures, by number."""
    folder = find_experiments_folder()
    paths = [path for path in folder.rglob("*.py") if _ITEM_PATTERN.fullmatch(path.stem)]
    names = (".".join(path.relative_to(folder).with_suffix("").parts) for path in paths)
    modules = sorted(map(ProgramModule, names, paths), key=_sort_key)
    return {module.name: module for module in modules}


def load_program(name: str) -> ProgramMain:
    """`main` of the module `experiments.<name>`. ConfigError for a name that no program has."""
    require_name("table", name, find_programs())
    _import_experiments_package(find_experiments_folder())
    return importlib.import_module(f"{_PACKAGE}.{name}").main


def find_experiments_folder() -> Path:
    """The folder inside the installed package, else that of the checkout. ConfigError if there is
    neither."""
    package = Path(fedjax_het.__file__).resolve().parent
    checkout_folder = package.parent / _PACKAGE
    if (package / _PACKAGE).is_dir():
        return package / _PACKAGE
    # What lies beside an installed package is anyone's; only a checkout has the project's file.
    if (package.parent / "pyproject.toml").is_file() and checkout_folder.is_dir():
        return checkout_folder
    raise ConfigError(f"the folder {_PACKAGE} is missing from this installation of fedjax_het")


def _sort_key(module: ProgramModule) -> tuple[str, int, int]:
    folder, _, item = module.name.rpartition(".")
    match = _ITEM_PATTERN.fullmatch(item)
    assert match is not None
    return folder, _ITEM_KINDS.index(match[1]), int(match[2] or 0)


def _import_experiments_package(folder: Path) -> None:
    """Make `experiments` the package in this folder. ConfigError if it is another one already."""
    imported_package = sys.modules.get(_PACKAGE)
    if imported_package is not None:
        package_paths = [Path(path).resolve() for path in getattr(imported_package, "__path__", ())]
        if package_paths != [folder]:
            raise ConfigError(
                f"another module named {_PACKAGE} is imported already: {imported_package!r}"
            )
        return
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = module
    spec.loader.exec_module(module)
