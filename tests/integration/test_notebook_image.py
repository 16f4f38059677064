"""The package in what a notebook's image has: nothing there moves, and a run works at once."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

# Colab's at the end of 2025. The plugin comes without CUDA's libraries, which only a GPU needs.
IMAGE = {"jax": "0.7.2", "jaxlib": "0.7.2", "flax": "0.11.2", "optax": "0.2.5", "numpy": "2.0.2"}
PLUGIN = {"jax-cuda12-plugin": "0.7.2", "jax-cuda12-pjrt": "0.7.2"}

FIRST_CELL = """
import json, subprocess, sys
from importlib import metadata

import jax, numpy  # as the image's own start has done

def versions():
    return {name: metadata.version(name) for name in json.loads(sys.argv[2])}

before = versions()
subprocess.check_call([sys.executable, "-m", "pip", "install", "--quiet", sys.argv[1]])
import fedjax_het

fedjax_het.show_environment()
spec = fedjax_het.RunSpec("fedavg", "digits", model="mlp", num_clients=4, rounds=2)
result = fedjax_het.simulate(spec)
found = {"before": before, "after": versions(), "accuracy": result.summary["best_accuracy"]}
print(json.dumps(found))
"""


def _interpreters():
    """This one and, where there is one, Colab's, by version."""
    actual = {f"{sys.version_info[0]}.{sys.version_info[1]}": sys.executable}
    of_pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for python in (shutil.which("python3.12"), *of_pyenv.glob("3.12*/bin/python3.12")):
        if python and subprocess.run([python, "--version"], capture_output=True).returncode == 0:
            actual.setdefault("3.12", str(python))
    return actual


INTERPRETERS = _interpreters()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    (built,) = folder.glob("fedjax_het-*.whl")
    return built


@pytest.mark.long
@pytest.mark.parametrize("version", INTERPRETERS)
def test_installing_moves_nothing_of_a_notebooks_image(version, wheel, tmp_path):
    image = dict(IMAGE)
    if version == "3.13":
        image["numpy"] = "2.1.0"  # the first that it has
    subprocess.run(
        [INTERPRETERS[version], "-m", "venv", "--without-pip", tmp_path / "image"], check=True
    )
    python = tmp_path / "image/bin/python"
    _pip("--python", python, "install", "pip", *_pinned(image))
    _pip("--python", python, "install", "--no-deps", *_pinned(PLUGIN))
    there = json.dumps([*image, *PLUGIN])
    cell = subprocess.run(
        [python, "-c", FIRST_CELL, wheel, there], capture_output=True, text=True, cwd=tmp_path
    )
    assert cell.returncode == 0, cell.stderr
    *_, shown, actual = cell.stdout.splitlines()
    actual = json.loads(actual)
    assert actual["before"] == actual["after"] == {**image, **PLUGIN}
    assert actual["accuracy"] > 0.2
    assert "fedjax_het" in shown and "Restart" not in cell.stdout


def _pinned(versions):
    return [f"{name}=={version}" for name, version in versions.items()]


def _pip(*arguments):
    said = subprocess.run(
        [sys.executable, "-m", "pip", *map(str, arguments), "--quiet"],
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr
