"""The persistent compilation cache: filled once, the user's own, never in the way."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import fedjax_het, jax, sys
from support.data import make_user_dataset
from support.small_runs import make_spec
if "run" in sys.argv:
    one_lane = fedjax_het.Placement(lanes=1)
    fedjax_het.simulate(make_spec(rounds=1), dataset=make_user_dataset(), placement=one_lane)
print(jax.config.jax_compilation_cache_dir)
"""


def start(folder, *words, **variables):
    environment = {**os.environ, "FEDJAX_HET_CACHE": str(folder), **variables}
    environment["PYTHONPATH"] = os.pathsep.join(["tests", os.environ.get("PYTHONPATH", ".")])
    command = [sys.executable, "-c", PROGRAM, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert not done.stderr, done.stderr
    return done.stdout.strip()


def entries(folder):
    return {path.name for path in folder.rglob("*-cache")}


@pytest.mark.slow
def test_a_second_start_compiles_nothing_new(tmp_path):
    folder = tmp_path / "cache"
    used = start(folder, "run")
    assert used.startswith(str(folder / "xla"))
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder, *folder.glob("**/")))
    first = entries(folder)
    assert any("jit_chunk" in name for name in first)
    start(folder, "run")
    new = entries(folder) - first
    # A small program near the least time that is worth keeping may be added late.
    assert not any("jit_chunk" in name or "jit_one" in name for name in new)


def test_a_cache_that_the_user_has_chosen_stands(tmp_path):
    chosen = str(tmp_path / "chosen")
    assert start(tmp_path / "cache", JAX_COMPILATION_CACHE_DIR=chosen) == chosen
    assert not (tmp_path / "cache").exists()


def test_a_cache_folder_that_is_a_file_is_done_without(tmp_path):
    (tmp_path / "cache").write_text("")
    assert start(tmp_path / "cache") == "None"
