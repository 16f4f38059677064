"""Type checkers and editors see the public names with their types, and report wrong calls."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

import fedjax_het

# Lines that end with "# wrong" have one error each, all other lines have none.
USER_FILE = """\
from fedjax_het import (
    RunSpec,
    dataset_from_arrays,
    grid,
    load_dataset,
    register_method,
    simulate,
    sweep,
)
from fedjax_het.methods import (
    Algorithm,
    Config,
    ExecutionPlan,
    LocalTraining,
    build_federated_algorithm,
    make_local_sgd,
)

spec = RunSpec("fedprox", "digits", alpha=0.1, learning_rate=0.05, hp={"prox_mu": 0.01})
data = load_dataset("digits")
result = simulate(spec, dataset=data, progress=None)
print(result.metrics["test_accuracy"].shape, result.spec.num_clients, spec.digest().upper())
dataset_from_arrays(data.train_inputs, [0, 1], data.test_inputs, data.test_labels)
print(data.train_inputs.shape, spec.resolved().num_clients + 1)
for each in sweep(grid(algorithm=["fedavg", "fedprox"], seed=range(3))).results:
    print(each)


def fedavg(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
    return build_federated_algorithm(training, plan, make_local_sgd(training))


def with_options(training: LocalTraining, plan: ExecutionPlan, options: Config) -> Algorithm:
    return fedavg(training, plan)


register_method("own", fedavg)
register_method("own", with_options)

simulate(spec, datset=None)  # wrong
simulate("fedavg")  # wrong
RunSpec(alpha="x")  # wrong
RunSpec(averaging="mean")  # wrong
dataset_from_arrays(data, data, data, data)  # wrong
register_method("own", lambda training: fedavg(training, None))  # wrong
RunSpec("fedavg", rounds=2.5)  # wrong
RunSpec("fedavg", lr=0.1)  # wrong
RunSpec("fedavg", "digits", "mlp")  # wrong
result.metricz  # wrong
spec.resolved().num_clients.upper()  # wrong
"""
WRONG_LINES = {
    number for number, line in enumerate(USER_FILE.splitlines(), 1) if line.endswith("# wrong")
}


def write_project(folder: Path, text: str) -> Path:
    path = folder / "user_file.py"
    path.write_text(text)
    return path


def run_pyright(path: Path) -> list[dict]:
    """Return the messages of basedpyright, with the checks of pyright alone."""
    config = {"typeCheckingMode": "standard", "pythonVersion": "3.11", "extraPaths": [str(ROOT)]}
    (path.parent / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    ran = subprocess.run(
        [*command, "-p", str(path.parent)], cwd=path.parent, capture_output=True, text=True
    )
    assert ran.stdout, ran.stderr
    return json.loads(ran.stdout)["generalDiagnostics"]


@pytest.mark.slow
def test_pyright_reports_wrong_calls(tmp_path):
    public = [name for name in fedjax_het.__all__ if not name.startswith("_")]
    text = USER_FILE + "import fedjax_het\n"
    text += "".join(f"reveal_type(fedjax_het.{name})\n" for name in public)
    messages = run_pyright(write_project(tmp_path, text))
    errors = {m["range"]["start"]["line"] + 1 for m in messages if m["severity"] == "error"}
    assert errors == WRONG_LINES, messages
    revealed = [m["message"] for m in messages if m["message"].startswith("Type of ")]
    assert len(revealed) == len(public)
    assert not [text for text in revealed if text.endswith(('is "Any"', 'is "Unknown"'))]
    (simulate,) = (text for text in revealed if text.startswith('Type of "fedjax_het.simulate"'))
    assert "spec: RunSpec" in simulate and "-> Result" in simulate


@pytest.mark.slow
def test_mypy_reports_wrong_calls(tmp_path):
    path = write_project(tmp_path, USER_FILE)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--follow-imports=silent"]
    command += ["--ignore-missing-imports", "--cache-dir", str(tmp_path / "cache"), str(path)]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "MYPYPATH": str(ROOT)},
    )
    lines = [line for line in ran.stdout.splitlines() if ": error: " in line]
    assert {int(line.split(":")[1]) for line in lines} == WRONG_LINES, ran.stdout + ran.stderr


def test_names_of_type_checkers_and_imports_are_equal():
    tree = ast.parse(Path(fedjax_het.__file__).read_text())
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imported = {}
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom) and statement.module is not None
        for alias in statement.names:
            assert alias.name == alias.asname  # a re-export
            imported[alias.name] = statement.module.removeprefix("fedjax_het.")
    assert imported == fedjax_het._MODULES


def test_completion_lists_public_names():
    assert sorted(dir(fedjax_het)) == sorted(fedjax_het.__all__)
    with pytest.raises(AttributeError) as raised:
        fedjax_het.simulat  # noqa: B018
    assert (raised.value.name, raised.value.obj) == ("simulat", fedjax_het)  # "did you mean"
    assert "simulate" in dir(fedjax_het) and "importlib" not in dir(fedjax_het)
