"""The pages do what they say: their Python blocks run, their commands are understood."""

import importlib.util
import re
import runpy
import shlex
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from fedjax_het.common.records import field_types

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = README + "".join(
    (ROOT / "experiments" / f"{n}.md").read_text() for n in ("RESULTS", "SPEED")
)
TEST_COMMAND = 'pip install -e ".[test]" && pytest'


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES, flags=re.DOTALL | re.MULTILINE)


KINDS = ("", "sweep_", "condensation_", "personalised_")
MEASUREMENTS = [*(f"experiments/{name}speed.py" for name in KINDS), "experiments/scale.py"]
COMMANDS = [
    command
    for block in blocks("bash")
    for line in block.splitlines()
    for command in line.split(" && ")
]


@pytest.mark.slow
@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.strip().split("\n")[-1])
def test_a_python_block_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_every_block_is_of_a_kind_that_is_tested():
    kinds = re.findall(r"^```(\w*)$", PAGES, flags=re.MULTILINE)
    assert set(kinds) == {"python", "bash", "bibtex", ""}  # "" closes
    assert kinds.count("") == len(kinds) / 2
    assert sum(len(blocks(kind)) for kind in ("python", "bash", "bibtex")) == len(kinds) / 2


def test_a_link_leads_to_a_file():
    links = [target for target in re.findall(r"\]\(([^)]+)\)", README) if "://" not in target]
    assert any(target.startswith("fedjax_het/algorithms/") for target in links)
    assert not [target for target in links if not (ROOT / target).is_file()]


def test_the_citation_is_of_this_version():
    import fedjax_het

    (entry,) = blocks("bibtex")
    assert f"version = {{{fedjax_het.__version__}}}" in entry


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_understood(command, monkeypatch, tmp_path):
    words = shlex.split(command)
    if words[0] == "srun":  # starts the same command several times
        words = words[words.index("fedjax-het") :]
    if words[0] == "sbatch":  # the same in a batch job
        words = shlex.split(words[words.index("--wrap") + 1])
    match words:
        case ["pytest"]:
            pass
        case ["pip", "install", "-e", target]:
            extra = target.removeprefix(".").strip("[]")
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            assert not extra or extra in project["optional-dependencies"]
        case ["python", script, *arguments] if script in MEASUREMENTS:
            understood_by_tyro(script, arguments)
        case ["python", script, *arguments] if script.startswith("experiments/"):
            # --list makes every setting of every run, checks it and runs nothing.
            monkeypatch.chdir(tmp_path)
            arguments += [] if "--list" in arguments else ["--list"]
            monkeypatch.setattr(sys, "argv", [script, *arguments])
            with pytest.raises(SystemExit) as stop:
                runpy.run_path(str(ROOT / script), run_name="__main__")
            assert stop.value.code == 0
        case ["python", "-m", "fedjax_het.data.prepare", name]:
            from fedjax_het.data import DATASETS

            assert DATASETS[name].source is not None
        case ["fedjax-het", *arguments]:
            from fedjax_het import cli
            from fedjax_het.cli.run import spec_of
            from fedjax_het.cli.sweep import specs_of

            # What would run is resolved, so that every name and value in it is checked.
            checks = {
                "run": lambda command: spec_of(command).resolved() and 0,
                "sweep": lambda command: specs_of(command) and 0,
                "report": lambda command: 0,
            }
            for name, check in checks.items():
                command = cli.COMMANDS[name]._replace(work=check)
                monkeypatch.setitem(cli.COMMANDS, name, command)
            if arguments[:1] == ["table"] and not arguments[1].startswith("-"):
                arguments = [word for word in arguments if word != "--list"] + [
                    "--list"
                ]  # resolves every run and makes none
            joined = []  # this process has used its devices: too late for it to join others
            monkeypatch.setattr("jax.distributed.initialize", lambda: joined.append(True))
            assert cli.main(arguments) == 0
            assert bool(joined) == ("--distributed" in arguments)
        case _:
            pytest.fail(f"the README has a command that no test checks: {command}")


def understood_by_tyro(script, arguments):
    import tyro

    spec = importlib.util.spec_from_file_location("script", ROOT / script)
    module = importlib.util.module_from_spec(spec)
    sys.modules["script"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    tyro.cli(module.Arguments, args=arguments)


def test_the_tables_name_everything_there_is():
    from fedjax_het.algorithms import METHODS
    from fedjax_het.data import DATASETS, PARTITIONS, SERVER_SOURCES
    from fedjax_het.nn import NETWORKS

    cells = re.findall(r"^\| (`.*?) \|", README, flags=re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == {*METHODS, *DATASETS, *PARTITIONS, *SERVER_SOURCES, *NETWORKS}


def rows_of_methods():
    """(its records, and the cells after the names) of each row of the table of methods."""
    from fedjax_het.algorithms import METHODS

    for cells in re.findall(
        r"^\| (`.*?) \| (.*?) \| (.*?) \| \[.*?\]\((.*?)\) \|$", README, re.MULTILINE
    ):
        names = re.findall(r"`(\w+)`", cells[0])
        yield [METHODS[name] for name in names], *cells[1:]


def test_the_table_of_methods_has_their_papers_and_files():
    from fedjax_het.algorithms import METHODS

    rows = list(rows_of_methods())
    assert sum(len(entries) for entries, *_ in rows) == len(METHODS)
    for entries, _, paper, link in rows:
        for entry in entries:
            build = entry.build
            while isinstance(build, partial):
                build = build.func
            assert link == f"{build.__module__.replace('.', '/')}.py", entry.name
            assert paper == re.sub(r",? ?arXiv:\S+$", "", entry.paper), entry.name


def test_the_table_of_methods_names_options_and_numbers_that_there_are():
    for entries, text, *_ in rows_of_methods():
        words = re.findall(r"`(\w+)`", text)
        numbers = words[words.index("hp") + 1 :] if "hp" in words else []
        for entry in entries:
            assert set(numbers) <= entry.hyper_parameters("sgd", {}, 10).keys(), entry.name
            kinds = field_types(entry.options).values()
            known = {*entry.option_names, *entry.options.PRESETS, "hp", *numbers}
            known |= {choice for kind in kinds for choice in choices_of(kind)}
            assert set(words) <= known, entry.name


def choices_of(kind):
    """The values of a `Literal`, or of one inside a union."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return [choice for part in get_args(kind) for choice in choices_of(part)]


def test_ci_runs_the_readmes_test_command():
    assert TEST_COMMAND in [line for block in blocks("bash") for line in block.splitlines()]
    last = (ROOT / ".ci" / "run").read_text().strip().splitlines()[-1]
    assert last == TEST_COMMAND
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
