"""Documentation pages: Python blocks run, commands are valid, links exist, tables are complete."""

import dataclasses
import importlib
import inspect
import io
import itertools
import pkgutil
import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
import tyro
import yaml
from PIL import Image
from support.documentation_pages import (
    BLOCK_LANGUAGES,
    PAGES,
    ROOT,
    find_anchors,
    find_code_blocks,
    find_commands,
    find_fences,
    find_links,
    read_page,
    relative_page_path,
)
from support.markers import slow_case

import fedjax_het
import fedjax_het.methods
from fedjax_het.utils.config import field_types, get_field_docs

DOCS = ROOT / "docs"
METHODS_PAGE = DOCS / "algorithms" / "index.md"
MEASURED = ("", "sweep_", "condensation_", "personalised_")
MEASUREMENTS = [*(f"experiments/{name}speed.py" for name in MEASURED), "experiments/scale.py"]

every_page = pytest.mark.parametrize("page", PAGES, ids=relative_page_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "code"),
    find_code_blocks("python"),
    ids=[
        f"{relative_page_path(page)}: {code.strip().splitlines()[-1]}"
        for page, code in find_code_blocks("python")
    ],
)
def test_python_block_runs(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, relative_page_path(page), "exec"), {"__name__": "page"})


def test_pages_have_content():
    assert len(PAGES) >= 35 and len(find_commands()) >= 70 and len(find_code_blocks("python")) >= 20


@every_page
def test_code_block_languages_are_tested(page):
    kinds = find_fences(page)
    assert set(kinds) <= {*BLOCK_LANGUAGES, ""}
    assert kinds.count("") == len(kinds) / 2
    assert sum(len(find_code_blocks(kind, [page])) for kind in BLOCK_LANGUAGES) == len(kinds) / 2


@every_page
def test_link_target_exists(page):
    for target in find_links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists() and file.is_relative_to(ROOT), target
        assert not anchor or anchor in find_anchors(file), target


@every_page
def test_dotted_name_resolves(page):
    for name in re.findall(r"`(fedjax_het(?:\.\w+)+)(?:\(.*?\))?`", read_page(page)):
        pkgutil.resolve_name(name)
    for path in re.findall(r"`((?:fedjax_het|tests|docs|notebooks)/[\w./-]+)`", read_page(page)):
        assert (ROOT / path).exists(), path


# --- commands -----------------------------------------------------------------------------------


# Commands that list many runs. Fast tests in `tests/papers` also list or execute these runs.
LONG_LISTS = {
    f"python experiments/{script}"
    for script in (
        *("table1.py", "table1.py --methods all", "fedaf/table2.py", "privacy/epsilon.py"),
        *("heterogeneity/atlas.py", "heterogeneity/systems.py"),
    )
}


def is_slow(command):
    """Whether a command resolves many runs."""
    return command in LONG_LISTS or ("experiments/" in command and "--preset" in command)


def list_distinct_commands():
    """The commands; those to which the test adds `--list`, without those that have it already."""
    commands = find_commands()
    return [
        command
        for command in commands
        if command.removesuffix(" --list") == command
        or command.removesuffix(" --list") not in commands
    ]


COMMANDS = [
    slow_case(command) if is_slow(command) else command for command in list_distinct_commands()
]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_valid(command, monkeypatch, tmp_path):
    words = shlex.split(command)
    if words[0] == "srun":  # starts the same command several times
        words = words[words.index("fedjax-het") :]
    if words[0] == "sbatch":  # starts the command in a batch job
        words = shlex.split(words[words.index("--wrap") + 1])
    match words:
        case ["pytest", *arguments]:
            assert all((ROOT / word).exists() for word in arguments if "/" in word)
        case ["ruff", *_] | ["mypy"] | ["mkdocs", "build" | "serve", *_]:
            pass
        case ["git", "clone", address]:
            assert address == project()["urls"]["Homepage"]
        case ["cd", folder]:
            assert folder == project()["name"]
        case ["pip", "install", target] | ["pip", "install", "-e", target]:
            base = "." if "-e" in words else project()["name"]
            assert target.startswith(base)
            extras = target.removeprefix(base).strip("[]")
            known = project()["optional-dependencies"]
            assert not extras or set(extras.split(",")) <= set(known)
        case ["python", script, *arguments] if script in MEASUREMENTS:
            understood_by_tyro(script, arguments)
        case ["python", script, *arguments] if script.startswith("experiments/accelerator/"):
            tyro.cli(runpy.run_path(str(ROOT / script))["Arguments"], args=arguments)
        case ["python", script] if script.startswith(("docs/", "notebooks/")):
            assert (ROOT / script).is_file()
        case ["python", script, *arguments] if script.startswith("experiments/"):
            # --list resolves every setting of every run, without running it.
            monkeypatch.chdir(tmp_path)
            arguments += [] if "--list" in arguments else ["--list"]
            monkeypatch.setattr(sys, "argv", [script, *arguments])
            with pytest.raises(SystemExit) as stop:
                runpy.run_path(str(ROOT / script), run_name="__main__")
            assert stop.value.code == 0
        case ["python", "-m", "fedjax_het.data.prepare", name]:
            from fedjax_het.data import DATASETS

            assert DATASETS[name].published is not None
        case ["fedjax-het", *arguments]:
            understood_by_the_command(arguments, monkeypatch)
        case _:
            pytest.fail(f"a page has a command that no test checks: {command}")


def is_small(words):
    """Return whether a command takes seconds: on digits, few rounds, no condensation."""
    if words[:1] != ["fedjax-het"] or {"--distributed", "--launcher"} & {*words}:
        return False
    if words[1] in ("list", "show", "devices") or words[1:] == ["table", "--list"]:
        return True
    if words[1] == "report":
        return Path(words[2]).is_dir()  # commands of the page create it
    said = dict(itertools.pairwise(words))
    few = int(said.get("--rounds", "99")) <= 5 and said.get("--dataset", "digits") == "digits"
    return (
        words[1] in ("run", "sweep") and few and said.get("--algorithm") not in ("fedaf", "feddm")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if find_commands([page])], ids=relative_page_path
)
def test_small_command_runs(page, monkeypatch, tmp_path):
    from fedjax_het import cli

    monkeypatch.chdir(tmp_path)
    for command in find_commands([page]):
        words = shlex.split(command)
        if is_small(words):
            assert cli.main(words[1:]) == 0, command


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def understood_by_tyro(script, arguments):
    target = re.search(r"from (experiments\.benchmarks\.\w+) import", (ROOT / script).read_text())
    tyro.cli(importlib.import_module(target[1]).Arguments, args=arguments)


def understood_by_the_command(arguments, monkeypatch):
    """Resolve the runs of a command, which checks every name and value."""
    from fedjax_het import cli
    from fedjax_het.cli.run import build_run_spec
    from fedjax_het.cli.sweep import build_run_specs

    checks = {
        "demo": lambda command: 0,
        "run": lambda command: build_run_spec(command).resolved() and 0,
        "sweep": lambda command: build_run_specs(command) and 0,
        "tune": lambda command: build_run_specs(command) and 0,
        "report": lambda command: 0,
    }
    for name, check in checks.items():
        command = cli.COMMANDS[name]
        monkeypatch.setattr(f"fedjax_het.cli.{command.module}.{command.function_name}", check)
    if arguments[:1] == ["table"] and not arguments[1].startswith("-"):
        arguments = [word for word in arguments if word != "--list"] + ["--list"]  # runs nothing
    joined = []  # this process has started its devices and can join no others
    monkeypatch.setattr("jax.distributed.initialize", lambda: joined.append(True))
    assert cli.main(arguments) == 0
    assert bool(joined) == ("--distributed" in arguments)


# --- tables and pages of entries ----------------------------------------------------------


def rows_of(page, head):
    """Return the cells of each row of the table whose first column has this title."""
    _, actual, rest = read_page(page).partition(f"\n| {head} |")
    assert actual, f"{relative_page_path(page)} has no table of a {head}"
    table = rest.split("\n\n")[0]
    return [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]


def names_in(page, head):
    """Return the names in the first column of a table."""
    return [name for row in rows_of(page, head) for name in re.findall(r"`(\w+)`", row[0])]


def test_tables_name_every_entry():
    from fedjax_het.algorithms import METHODS
    from fedjax_het.config.protocols import PROTOCOLS

    for head, page, entries in (
        ("method", "algorithms/index.md", METHODS),
        ("protocol", "guide/protocols.md", PROTOCOLS),
    ):
        assert sorted(names_in(DOCS / page, head)) == sorted(entries), head


def test_registry_tables_have_every_entry():
    from registry_tables import MARKER, make_registry_table

    from fedjax_het.analysis.inspection import REGISTRIES

    for title in MARKER.findall("".join(map(read_page, PAGES))):
        rows = make_registry_table(title).splitlines()[2:]
        assert [row.split("`")[1] for row in rows] == list(REGISTRIES[title][0])
        num_columns = 1 if title in ("data sets", "tasks") else 2  # with or without options
        assert all(row.count(" | ") == num_columns and " |  | " not in row for row in rows)


def test_variable_table_is_complete():
    from fedjax_het.utils.env import VARIABLES

    names = names_in(DOCS / "start" / "install.md", "variable")
    assert sorted(names) == sorted(variable.name for variable in VARIABLES)


def test_extras_table_is_complete():
    names = names_in(DOCS / "start" / "install.md", "extra")
    assert sorted(names) == sorted(project()["optional-dependencies"])


def rows_of_methods():
    """Return (entries, text, paper, file) of each row of the table of methods."""
    from fedjax_het.algorithms import METHODS

    for names, lines, *paper, link in rows_of(METHODS_PAGE, "method"):
        entries = [METHODS[name] for name in re.findall(r"`(\w+)`", names)]
        yield entries, lines, "".join(paper).strip(" |"), re.search(r"\((.*?)\)", link)[1]


def test_method_table_has_papers_and_files():
    from method_pages import find_builder_function

    for entries, _, paper, link in rows_of_methods():
        for entry in entries:
            module = find_builder_function(entry.build).__module__
            assert link == f"../../{module.replace('.', '/')}.py", entry.name
            assert paper == re.sub(r",? ?arXiv:\S+$", "", entry.paper), entry.name


def test_method_table_names_existing_options():
    for entries, lines, *_ in rows_of_methods():
        words = re.findall(r"`(\w+)`", lines)
        numbers = words[words.index("hp") + 1 :] if "hp" in words else []
        for entry in entries:
            assert set(numbers) <= entry.collect_hyperparameters("sgd", {}, 10).keys(), entry.name
            kinds = field_types(entry.options).values()
            known = {*entry.option_names, *entry.options.PRESETS, "hp", *numbers}
            known |= {choice for kind in kinds for choice in choices_of(kind)}
            assert set(words) <= known, entry.name


def choices_of(kind):
    """Return the values of a `Literal`, which may be inside a union."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return [choice for part in get_args(kind) for choice in choices_of(part)]


def test_table_links_papers():
    from site_hooks import link_papers

    from fedjax_het.algorithms import METHODS

    linked = link_papers(read_page(METHODS_PAGE))
    for entry in METHODS.values():
        if "arXiv:" in entry.paper:
            assert f"](https://arxiv.org/abs/{entry.paper.partition('arXiv:')[2]}) |" in linked


def test_every_method_has_formula():
    from method_pages import FORMULAS

    from fedjax_het.algorithms import METHODS

    assert sorted(FORMULAS) == sorted(METHODS.built_in)


@pytest.mark.parametrize("name", ["fedprox", "dynafed", "fedamp", "per_fedavg"])
def test_method_page_is_complete(name):
    from method_pages import link_arxiv, make_method_page

    from fedjax_het.algorithms import METHODS
    from fedjax_het.papers.reported import load_reported_values

    page, entry = make_method_page(name), METHODS[name]
    assert page.startswith(f"# {name}\n") and link_arxiv(entry.paper) in page and "<math" in page
    options = set(entry.option_names) - {"base"}
    names = {word for word in re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)}
    assert names >= options | set(entry.collect_method_hyperparameters({}, 10))
    for setting in ("--rounds", "--local-epochs", "--batch-size"):
        assert f"| `{setting}` |" in page
    paper = {"dynafed": "dynafed", "fedamp": "fedamp"}.get(name)
    if paper:
        values = load_reported_values(paper)
        assert page.count(f"| {paper}, table") == (values["method"] == name).sum()
        assert "## Measured and reported values" in page


def test_every_method_option_has_description():
    from fedjax_het.algorithms import METHODS
    from fedjax_het.utils.config import document_fields

    silent = set()
    for name in METHODS.built_in:
        entry = METHODS[name]
        for kind in (entry.options, type(entry.make_hyperparameter_record({}, num_clients=10))):
            silent |= {
                (name, field) for field, (_, text) in document_fields(kind).items() if not text
            }
    assert silent == set()


@pytest.mark.slow
def test_method_page_command_is_valid(monkeypatch):
    from method_pages import FORMULAS, make_method_page

    for name in FORMULAS:
        page = make_method_page(name)
        (command,) = re.findall(r"^```bash\nfedjax-het (.*)\n```$", page, flags=re.MULTILINE)
        understood_by_the_command(shlex.split(command), monkeypatch)
        assert "## Settings by protocol" in page, name
        formulas = re.findall(r"<math.*?</math>", page)
        assert formulas and not any("\\" in each for each in formulas), name


def test_docstring_to_markdown():
    from method_pages import docstring_to_markdown

    text = (
        "w <- w + a * b_k, a * `c_k`.\n\n    x = <l, y>\n\nPresets:\n"
        "  one: of *this*,\n    and that.\n  two: other\nLast.\n\n| a | b |\n|---|---|\n| 1 | 2 |"
    )
    assert docstring_to_markdown(text) == (
        "<p>w &lt;- w + a * b_k, a * <code>c_k</code>.</p>\n\n```text\nx = <l, y>\n```\n\n"
        '<p>Presets:</p>\n\n<p class="hangs">one: of *this*, and that.</p>\n\n'
        '<p class="hangs">two: other</p>\n\n<p>Last.</p>\n\n| a | b |\n|---|---|\n| 1 | 2 |'
    )


def test_formulas_explain_their_symbols():
    from method_pages import FORMULAS, describe_symbols

    assert describe_symbols(FORMULAS["fedavg"]) == (
        "*S: clients of the round; p: their weights (`averaging`); F: a client's loss; "
        "SGD: local training; η<sub>g</sub>: `server_lr`.*"
    )
    assert "η: `local_lr`" in describe_symbols(FORMULAS["scaffold"])
    assert describe_symbols("x") == ""


def test_api_page_shows_plain_defaults():
    pytest.importorskip("griffe", reason="the extra docs")
    from api_pages import load_package

    assert str(load_package()["RunSpec"].parameters["alpha"].default) == "None"


def test_notebook_page_has_a_button_for_its_badge():
    from notebook_pages import adapt_to_site

    text = "[![Open in Colab](https://c/badge.svg)](https://c/n.ipynb)\n![png](a.png)"
    assert adapt_to_site(text) == (
        "[Open in Colab](https://c/n.ipynb){ .md-button }\n![Figure drawn by the cell above](a.png)"
    )


def test_repository_links():
    from repository_links import convert_links

    moved = convert_links(
        "[a](../data/index.md#b) [c](../../README.md) [d](../../fedjax_het/nn) [e](https://f)\n"
        "```python\ng[h](../../i)\n```",
        source="docs/guide/x.md",
        uri="guide/x.md",
        pages={"README.md": "index.md"},
        repository="https://r",
    )
    assert moved == (
        "[a](../data/index.md#b) [c](../index.md) [d](https://r/fedjax_het/nn) [e](https://f)\n"
        "```python\ng[h](../../i)\n```"
    )


def test_dark_variant_of_a_plot_keeps_hues_and_contrast():
    from dark_pictures import INK, PAPER, make_dark_variant

    pixels = np.full((40, 40, 3), 255, np.uint8)
    pixels[0], pixels[1] = 0, (0, 114, 178)  # text, and FedAvg's blue
    dark = read_pixels(make_dark_variant(encode_png(pixels)))
    assert tuple(dark[0, 0]) == INK and tuple(dark[2, 0]) == PAPER
    red, green, blue = dark[1, 0]
    assert red < green < blue and blue > 178
    images = encode_png(np.arange(4800, dtype=np.uint8).reshape(40, 40, 3))
    assert make_dark_variant(images) == images


def test_pages_have_dark_variants_of_pictures():
    from site_hooks import convert_page_links

    config = SimpleNamespace(repo_url="https://r")
    text = "![a plot](docs/images/a.png)\n![b](b.png#gh-dark-mode-only)\n```text\n![c](c.png)\n```"
    assert convert_page_links(text, "README.md", config) == (
        "![a plot](images/a.png#only-light)![a plot](images/a-dark.png#only-dark)\n"
        "![b](https://r/blob/main/b.png#gh-dark-mode-only)\n```text\n![c](c.png)\n```"
    )


def test_readme_pictures_show_one_plot():
    from dark_pictures import make_dark_variant

    images = DOCS / "images"
    expected = read_pixels(make_dark_variant((images / "alpha-light.png").read_bytes()))
    dark = read_pixels((images / "alpha-dark.png").read_bytes())
    assert np.abs(expected.astype(int) - dark).mean() < 1


def encode_png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def read_pixels(content):
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


# --- API ----------------------------------------------------------------------------------------


def list_api_entries():
    """Return the objects that the pages of the API document, by import path."""
    from api_pages import list_entries, list_pages

    paths = [path for page in list_pages() for path in list_entries(page)]
    assert len(paths) == len(set(paths))
    return {path: pkgutil.resolve_name(path) for path in paths}


def test_api_documents_every_public_name_once():
    entries = list_api_entries()
    names = [path.rpartition(".")[2] for path in entries]
    assert len(names) == len(set(names))
    public = {name: getattr(fedjax_het, name) for name in fedjax_het.__all__}
    public |= {n: value for n, value in vars(fedjax_het.methods).items() if not n.startswith("_")}
    del public["__version__"]  # which the page of the environment names
    for name, value in public.items():
        package = "fedjax_het" if name in fedjax_het.__all__ else "fedjax_het.methods"
        assert entries.get(f"{package}.{name}") is value, name


def test_api_entries_are_complete():
    problems = []
    for path, value in list_api_entries().items():
        text = inspect.getdoc(value) or ""
        items = set(re.findall(r"^ +\*{0,2}(\w+): ", text, flags=re.MULTILINE))
        sections = set(re.findall(r"^(\w+):$", text, flags=re.MULTILINE))
        if inspect.isclass(value) or inspect.isroutine(value):
            problems += [f"{path}: no example"] * (">>>" not in text)
        if inspect.isroutine(value):
            signature = inspect.signature(value)
            problems += [f"{path}: {name}" for name in signature.parameters if name not in items]
            if signature.return_annotation not in (None, "None") and "Returns" not in sections:
                problems.append(f"{path}: no section Returns")
        elif inspect.isclass(value):
            is_record = dataclasses.is_dataclass(value)
            fields = [field.name for field in dataclasses.fields(value)] if is_record else []
            documented = items | get_field_docs(value).keys()
            for name in (*fields, *getattr(value, "_fields", ())):
                problems += [f"{path}: {name}"] * (name[0] != "_" and name not in documented)
    assert not problems, problems


def test_api_groups_have_a_line_per_name():
    from api_pages import MARKER, insert_groups, list_pages

    text = insert_groups(read_page(DOCS / "api" / "index.md"))
    assert MARKER not in text and text.count("\n## ") == len(list_pages())
    for path in list_api_entries():
        row = rf"^\| \[`{path.rpartition('.')[2]}`\]\([\w-]+\.md#{path}\) \| [A-Z].+ \|$"
        assert re.search(row, text, re.MULTILINE), path


def test_navigation_has_every_page():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    names = re.findall(r"([\w/-]+\.md)$", navigation, flags=re.MULTILINE)
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    from site_hooks import SHOWN

    shown = {page for page in SHOWN.values() if not page.startswith("tutorials/")}
    assert sorted(names) == sorted(pages | shown)


@pytest.mark.slow
def test_site_builds_without_warning(tmp_path):
    mkdocs = pytest.importorskip("mkdocs.commands.build", reason="the extra docs")
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path))
    mkdocs.build(config)
    from fedjax_het.algorithms import METHODS

    for name in METHODS.built_in:
        assert "<math" in (tmp_path / "algorithms" / name / "index.html").read_text()
    pictures = 0
    for page in tmp_path.rglob("index.html"):
        for image in re.findall(r"<img[^>]*>", page.read_text()):
            (source,), (alt,) = (re.findall(rf'{n}="([^"]+)"', image) for n in ("src", "alt"))
            assert len(alt.split()) > 3, (page, source)
            path = page.parent / source.partition("#")[0]
            assert path.is_file(), (page, source)  # no picture is fetched
            assert re.search("#(gh-light-mode|gh-dark-mode)-only$|#only-(light|dark)$", source)
            pictures += 1
    assert pictures > 10


# --- files for hosts ----------------------------------------------------------------------------

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_has_jobs(path):
    workflow = yaml.safe_load(path.read_text())
    assert {"name", True, "jobs", "permissions"} <= set(workflow)  # "on" is YAML's true
    for job in workflow["jobs"].values():
        assert job["runs-on"] and all({"uses", "run"} & set(step) for step in job["steps"])


def steps_of(name):
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    return [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]


def test_workflows_run_documented_commands():
    from test_readme import TEST_COMMAND

    assert TEST_COMMAND in steps_of("tests")
    assert "mkdocs build --strict" in steps_of("docs")
    assert any("python -m build" in step for step in steps_of("publish"))


def test_version_matrix_matches_project():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    rows = workflow["jobs"]["rows"]["strategy"]["matrix"]["include"]
    assert [row["python"] for row in rows] == ["3.12", "3.11", "3.12", "3.13"]
    floors = dict(re.findall(r"(\w+)==([\d.]+)", rows[0]["versions"]))
    text = " ".join(project()["dependencies"])
    for name, version in floors.items():
        least = re.search(rf"\b{name}>=([\d.]+)", text)[1]
        assert version == least or version == f"{least}.2", name
    contributing = re.sub(r"\s+", " ", read_page(ROOT / "CONTRIBUTING.md"))
    for row in rows[:2]:
        for name, version in re.findall(r"(\w+)==([\d.]+)", row["versions"]):
            assert re.search(rf"{name} {re.escape(version)}", contributing, re.IGNORECASE), name


def test_issue_templates_are_forms():
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    forms = [yaml.safe_load(path.read_text()) for path in sorted(folder.glob("[!c]*.yml"))]
    assert len(forms) == 2
    for form in forms:
        assert form["name"] and form["description"] and form["body"]
        for part in form["body"]:
            assert part["type"] == "textarea" and part["attributes"]["label"]
