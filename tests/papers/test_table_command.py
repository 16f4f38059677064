"""`fedjax-het table`: the papers' tables by name, whatever folder it is called from."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module

import pytest
from support.paths import ROOT

from fedjax_het.cli import main
from fedjax_het.papers.dynafed.tables import NETWORKS
from fedjax_het.papers.programs import find_programs, load_program
from fedjax_het.papers.reported import load_reported_values


def test_list_has_every_item(capsys):
    assert main(["table", "--list"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    for paper in ("dynafed", "fedaf", "fedamp", "fsl"):
        for item in set(load_reported_values(paper)["item"]) - {"table1"}:
            assert f"{paper}.{item}" in lines
    assert {"table1", "all"} <= set(lines)
    assert not [name for name, text in lines.items() if not re.match(r"[A-Z].*[.)]$", text)]
    order = list(lines)
    assert order.index("fsl.table1") < order.index("fsl.fig2") < order.index("fsl.fig10")


@pytest.mark.parametrize("name", find_programs())
def test_every_program_has_main_and_help(name, capsys):
    module = import_module(f"experiments.{name}")
    assert load_program(name) is module.main
    with pytest.raises(SystemExit) as stop:
        main(["table", name, "--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: fedjax-het table {name} ") and "--preset" in printed


def test_arguments_reach_program(tmp_path, capsys):
    words = ["--models", "mlp", "--seeds", "0", "--list", "--output-dir", str(tmp_path)]
    assert main(["table", "dynafed.table5", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows, alphas = NETWORKS["rows"], NETWORKS["alphas"]
    assert len(lines) == len(rows) * len(alphas)
    assert all("missing" in line and "mlp" in line for line in lines)
    before = sys.argv
    assert main(["table", "dynafed.table5", "--preset", "papr"]) == 2
    assert sys.argv is before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dynafed.tabel5"], "table = 'dynafed.tabel5' is unknown: did you mean 'dynafed.table5'"),
        (["speed"], "table = 'speed' is unknown"),
        ([], "table --list"),
    ],
)
def test_unknown_table_has_exit_status_2(words, message, capsys):
    assert main(["table", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


@pytest.mark.parametrize("name", ["across", "composition", "fedamp.fig3", "fsl.fig1"])
def test_figures_without_runs(name, tmp_path, capsys):
    main = import_module(f"experiments.{name}").main
    assert main(["--show", "--output-dir", str(tmp_path)]) == 0
    assert re.search(r"There is no run to (show|draw)\.\n$", capsys.readouterr().out)
    assert not list(tmp_path.iterdir())


def test_list_marks_runs_of_another_version(capsys):
    folder = ROOT / "experiments" / "fedaf" / "results" / "table1-cpu"
    words = ["--preset", "cpu", "--rounds", "10", "--list", "--output-dir", str(folder)]
    assert load_program("fedaf.table1")(words) == 0
    states = [line.split("  ")[1].strip() for line in capsys.readouterr().out.splitlines()]
    assert states.count("kept (version 0.6.0)") == 5 and states.count("missing") == 8


@pytest.mark.parametrize("name", ["fedaf.table2", "fedamp.table3"])
def test_table_without_alpha_rejects_alphas(name, capsys, tmp_path):
    assert load_program(name)(["--alphas", "0.1", "--output-dir", str(tmp_path)]) == 2
    assert "alphas = '0.1': expected no value: " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("installed", [False, True], ids=["checkout", "installed"])
def test_local_experiments_folder_is_ignored(installed, tmp_path):
    """Not the current directory's, which Python would import first, nor one beside the package."""
    here, site = tmp_path / "here", tmp_path / "site"
    for folder in (here, site):
        (folder / "experiments").mkdir(parents=True)
        for name in ("__init__.py", "table1.py"):
            (folder / "experiments" / name).write_text("raise SystemExit('a stranger')\n")
    if installed:  # as a wheel has it
        shutil.copytree(ROOT / "fedjax_het", site / "fedjax_het")
    environment = {**os.environ, "PYTHONPATH": str(site if installed else ROOT)}
    for words in (["--list"], ["table1", "--methods", "fedavg", "--list"]):
        command = [sys.executable, "-m", "fedjax_het", "table", *words]
        done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "fedavg, digits" in done.stdout or "DynaFed's Table 1" in done.stdout


def test_wheel_has_package_only():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["packages"] == ["fedjax_het"]  # none at the top but ours


@pytest.mark.slow
@pytest.mark.parametrize("script", ["table1.py", "dynafed/table5.py", "fsl/fig11.py"])
def test_script_and_module_are_equal(script, tmp_path):
    module = "experiments." + script.removesuffix(".py").replace("/", ".")
    words = ["--preset", "quick", "--seeds", "0", "--list", "--output-dir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = {
        subprocess.run(
            [sys.executable, *start, *words],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for start in ([f"experiments/{script}"], ["-m", module])
    }
    assert len(printed) == 1 and "missing" in printed.pop()


def test_no_program_is_loaded_by_path():
    files = list((ROOT / "experiments").rglob("*.py"))
    loads = re.compile(r"run_path|spec_from_file_location|SHARED\[")
    assert not [path.name for path in files if loads.search(path.read_text())]
