"""Docstrings: their examples run, they document arguments, and they start with plain words.

A package is added to `DOCTESTED` once its docstrings follow the rules. Ruff checks their form: see
`per-file-ignores` in `pyproject.toml`, which lists the same packages.
"""

import ast
import doctest
import importlib
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.markers import slow_case

import fedjax_het
from fedjax_het.utils.config import VALIDATED_FUNCTIONS
from fedjax_het.utils.registry import Registry

DOCTESTED = (
    "fedjax_het.algorithms",
    "fedjax_het.analysis",
    "fedjax_het.cli",
    "fedjax_het.condensation",
    "fedjax_het.config",
    "fedjax_het.core",
    "fedjax_het.data",
    "fedjax_het.metrics",
    "fedjax_het.nn",
    "fedjax_het.papers",
    "fedjax_het.runtime",
    "fedjax_het.utils",
)
# Packages without `__all__`, of which every public function and class has an example.
EXAMPLE_IN_EVERY_DOCSTRING = ("fedjax_het.metrics",)

ROOT = Path(fedjax_het.__file__).parent.parent
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
OPENINGS = ("What", "Of", "The same", "Those", "That which", "So many", "As many", "One that")
OPENING_PATTERN = re.compile(rf"({'|'.join(OPENINGS)})\b")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def list_modules(packages: tuple[str, ...]) -> list[str]:
    """Return the names of all modules of the packages."""
    names = []
    for package in packages:
        folder = ROOT / package.replace(".", "/")
        files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
        for path in files:
            parts = path.relative_to(ROOT).with_suffix("").parts
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def find_source(module: str) -> Path:
    """Return the source file of a module."""
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def iter_docstrings(module: str) -> Iterator[tuple[str, int, str]]:
    """Yield name, line and text of every docstring, those of constants and fields included."""
    tree = ast.parse(find_source(module).read_text(encoding="utf-8"))
    stack: list[tuple[str, ast.AST]] = [("", tree)]
    while stack:
        name, node = stack.pop()
        body = getattr(node, "body", [])
        for previous, child in zip([None, *body], body, strict=False):
            if isinstance(child, DEFINITIONS):
                stack.append((f"{name}.{child.name}".lstrip("."), child))
            is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if is_text and isinstance(child.value.value, str):
                target = previous.target if isinstance(previous, ast.AnnAssign) else None
                if isinstance(previous, ast.Assign):
                    target = previous.targets[0]
                suffix = f".{target.id}" if isinstance(target, ast.Name) else ""
                yield f"{name}{suffix}".lstrip("."), child.lineno, child.value.value


def iter_functions(module: str) -> Iterator[tuple[str, ast.FunctionDef, list[str]]]:
    """Yield name, node and parameters of public functions and of methods of public classes."""
    tree = ast.parse(find_source(module).read_text(encoding="utf-8"))
    owners = [("", tree)]
    owners += [
        (f"{node.name}.", node)
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    for prefix, owner in owners:
        for node in owner.body:
            if isinstance(node, FUNCTIONS) and not node.name.startswith("_"):
                arguments = node.args
                named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                variadic = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
                parameters = [a.arg for a in (*named, *variadic)]
                is_static = any(
                    isinstance(decorator, ast.Name) and decorator.id == "staticmethod"
                    for decorator in node.decorator_list
                )
                if prefix and not is_static:
                    parameters = parameters[1:]
                yield f"{prefix}{node.name}", node, parameters


TOP_MODULES = ("fedjax_het", "fedjax_het.__main__", "fedjax_het._startup", "fedjax_het.methods")
MODULES = [*TOP_MODULES, *list_modules(DOCTESTED)]
# Examples that compile whole runs or training loops, as tests of these modules do.
EXPENSIVE_EXAMPLES = (
    "analysis.synthetic_measures",
    *("condensation.downstream_eval", "condensation.trajectory_matching"),
    *("core.private_gradients", "nn.generator"),
    *("runtime.split_measures", "runtime.sweep"),
    *("runtime.synthetic_dataset", "runtime.trained_model"),
)


@pytest.fixture
def reset_registries():
    """Remove what the examples register."""
    functions = dict(VALIDATED_FUNCTIONS)
    yield
    VALIDATED_FUNCTIONS.clear()
    VALIDATED_FUNCTIONS.update(functions)
    for module in [module for name, module in sys.modules.items() if name.startswith("fedjax_het")]:
        for value in list(vars(module).values()):
            if isinstance(value, Registry):
                value.reset()


@pytest.mark.parametrize(
    "module",
    [
        slow_case(module) if module.removeprefix("fedjax_het.") in EXPENSIVE_EXAMPLES else module
        for module in MODULES
    ],
)
def test_examples_run(module, reset_registries):
    """Every example runs without any name that it does not import, so it can be copied."""
    importlib.import_module(module)
    parser, output = doctest.DocTestParser(), io.StringIO()
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    for name, line, text in iter_docstrings(module):
        if ">>>" in text:
            source = str(find_source(module))
            example = parser.get_doctest(text, {}, f"{module}.{name}", source, line - 1)
            runner.run(example, out=output.write)
    assert runner.failures == 0, output.getvalue()


@pytest.mark.parametrize("package", DOCTESTED)
def test_every_public_name_has_an_example(package):
    module = importlib.import_module(package)
    exported = [
        name
        for name in getattr(module, "__all__", ())
        if inspect.isclass(getattr(module, name)) or inspect.isroutine(getattr(module, name))
    ]
    texts = {
        name: text
        for module in list_modules((package,))
        for name, _, text in iter_docstrings(module)
    }
    if package in EXAMPLE_IN_EVERY_DOCSTRING:
        exported = [name for name in texts if name and "." not in name and name[0] != "_"]
    missing = [name for name in exported if ">>>" not in texts.get(name, "")]
    assert not missing, f"{package}: no example of {', '.join(missing)}"


def test_methods_names_have_examples():
    """Names of packages that are not yet in `DOCTESTED` are left out."""
    methods = importlib.import_module("fedjax_het.methods")
    missing = [
        name
        for name, value in vars(methods).items()
        if inspect.isclass(value) or inspect.isroutine(value)
        if value.__module__.startswith(DOCTESTED) and ">>>" not in (value.__doc__ or "")
    ]
    assert not missing, f"no example of {', '.join(missing)}"


def test_package_names_have_examples():
    missing = []
    for name in fedjax_het.__all__:
        value = getattr(fedjax_het, name)
        if name != "__version__":
            texts = {key: text for key, _, text in iter_docstrings(value.__module__)}
            missing += [] if ">>>" in texts.get(value.__qualname__, "") else [name]
    assert not missing, f"fedjax_het: no example of {', '.join(missing)}"


@pytest.mark.parametrize("module", MODULES)
def test_functions_document_arguments_and_results(module):
    problems = []
    for name, node, parameters in iter_functions(module):
        text = ast.get_docstring(node) or ""
        if not text:
            problems.append(f"{name}: no docstring")
        if len(parameters) < 2 or not text:
            continue
        if not re.search(r"^Args:$", text, re.MULTILINE):
            problems.append(f"{name}: no section Args")
        is_none = isinstance(node.returns, ast.Constant) and node.returns.value is None
        if not is_none and not re.search(r"^(Returns|Yields):$", text, re.MULTILINE):
            problems.append(f"{name}: no section Returns")
    assert not problems, f"{module}: {'; '.join(problems)}"


@pytest.mark.parametrize("module", MODULES)
def test_texts_open_with_plain_words(module):
    texts = [(line, text) for _, line, text in iter_docstrings(module)]
    with find_source(module).open("rb") as file:
        tokens = list(tokenize.tokenize(file.readline))
    previous_line = -1
    for token in tokens:
        if token.type == tokenize.COMMENT:
            is_own_line = token.line.strip().startswith("#")
            # The second line of a comment may start with any word.
            if not (is_own_line and token.start[0] == previous_line + 1):
                texts.append((token.start[0], token.string.lstrip("# ")))
            previous_line = token.start[0] if is_own_line else -1
    actual = [f"line {line}: {text[:60]!r}" for line, text in texts if OPENING_PATTERN.match(text)]
    assert not actual, f"{module}: {'; '.join(actual)}"


@pytest.mark.parametrize("module", MODULES)
def test_angle_brackets_are_code(module):
    """HTML shows `<name>` outside of code as nothing."""
    for name, line, text in iter_docstrings(module):
        prose = re.sub(r"`[^`]*`|^ *>>>.*$", "", text, flags=re.MULTILINE)
        assert not re.search(r"<[a-z_]+>", prose), f"{module}, {name}, line {line}"


def test_checks_find_violations():
    """The checks see docstrings of constants, methods and wrapped functions."""
    names = {name for name, _, _ in iter_docstrings("fedjax_het.data.partition")}
    assert {"", "make_partition", "Partition.summarize"} <= names
    names = {name for name, _, _ in iter_docstrings("fedjax_het.utils.registry")}
    assert "REQUIRED" in names
    parameters = {name: names for name, _, names in iter_functions("fedjax_het.data.partition")}
    assert parameters["Partition.label_counts"] == ["labels", "num_classes"]
    assert "parameters" in parameters["make_partition"]
    assert OPENING_PATTERN.match("Of all clients") and not OPENING_PATTERN.match("Offsets")
