"""Kills, full disks and damaged files lose no result and change no bit.

`pytest -m long tests/integration/test_faults.py -s` goes through all methods and prints the counts
by kind.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.data import make_user_dataset
from support.fault_injection import (
    DAMAGE_KINDS,
    PLACEMENT,
    damage_file,
    make_seed_specs,
    make_short_spec,
    simulate_full_disk,
    simulate_read_only_folder,
)
from support.paths import WORKERS
from support.processes import start_python
from support.small_runs import (
    KilledError,
    assert_all_equal,
    assert_results_equal,
    make_killing_callback,
)

from fedjax_het import ConfigError, Result, load_results, simulate, sweep
from fedjax_het.algorithms import METHODS
from fedjax_het.data import Partition
from fedjax_het.runtime import checkpointing, group_state, long_phases, result_store
from fedjax_het.runtime.checkpointing import read_checkpoint, save_checkpoint
from fedjax_het.runtime.device_report import describe_environment
from fedjax_het.runtime.result_store import ResultNotWrittenError
from fedjax_het.utils.io import DamagedFileError

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
METHOD = "scaffold"  # states at the server and at clients


def checkpoint_every_round(monkeypatch):
    monkeypatch.setattr(group_state, "MAX_ROUNDS_PER_CHUNK", 1)
    monkeypatch.setattr(long_phases, "CHUNK_SECONDS", 0.0)
    monkeypatch.setattr(checkpointing, "CHECKPOINT_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    checkpoint_every_round(monkeypatch)


def run(folder=None, method=METHOD, spec=None, **settings):
    settings = {"dataset": make_user_dataset(), "placement": PLACEMENT, **settings}
    return simulate(spec or make_short_spec(method), output_dir=folder, **settings)


def make(folder, progress=None):
    settings = {"dataset": make_user_dataset(), "placement": PLACEMENT, "progress": progress}
    return sweep(make_seed_specs(METHOD), folder, **settings)


@pytest.fixture(scope="module")
def whole():
    """The run without faults."""
    return run()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A folder with the checkpoint of a run that was stopped after three rounds."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        checkpoint_every_round(patch)
        run(folder, progress=make_killing_callback(3))
    return folder


@pytest.fixture
def half(stopped, tmp_path):
    """A copy of that folder."""
    return Path(shutil.copytree(stopped, tmp_path / "half"))


def rewrite_checkpoint(path, arrays, record):
    """Write a checkpoint with a valid checksum from arrays by path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointing, "flatten_by_path", lambda tree: tree)
        save_checkpoint(path, arrays, record)


def get_line(caught):
    text = str(caught.value)
    assert "\n" not in text and text.isprintable()
    return text


# --- checkpoints -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DAMAGE_KINDS)
def test_damaged_checkpoint_ends_a_run(half, kind):
    path = half / "checkpoint.npz"
    good, rng = path.read_bytes(), np.random.default_rng(DAMAGE_KINDS.index(kind))
    for _ in range(5):
        path.write_bytes(good)
        damage_file(path, kind, rng)
        for resume in (True, False):
            with pytest.raises(DamagedFileError) as caught:
                run(half, resume=resume)
            assert str(path) in get_line(caught) and "remove it" in get_line(caught)


INVALID_VALUES = {
    "round": (-5, 10**9, 7, 2.0, True, "3", None),
    "lanes": (0, -1, "1", None),
    "blocks": (0, 1.5),
    "stopped": (-1, 10**9, "no"),
    "seconds": (-1.0, float("inf"), "1"),
    "work": ([], {"synthesis": -1}),
    "spec": ([], None, {}),
    "digest": (7, None),
    "jax": (None,),
}


@pytest.mark.parametrize("field", INVALID_VALUES)
def test_checkpoint_record_is_validated(half, field):
    path = half / "checkpoint.npz"
    record, arrays = read_checkpoint(path)
    without_field = {name: value for name, value in record.items() if name != field}
    for other in (*({**record, field: v} for v in INVALID_VALUES[field]), without_field):
        rewrite_checkpoint(path, arrays, other)
        with pytest.raises(DamagedFileError, match=field):
            run(half, resume=True)


def test_checkpoint_without_record_or_with_nan(half):
    path = half / "checkpoint.npz"
    record, arrays = read_checkpoint(path)
    name = next(name for name in arrays if "server" in name and "kernel" in name)
    with_nan = arrays | {name: np.full_like(arrays[name], np.nan)}
    cases = [(arrays, other, r"record = .*expected a dict") for other in ([], "x", 3, None)]
    for other_arrays, other_record, expected in [*cases, (with_nan, record, "not finite")]:
        rewrite_checkpoint(path, other_arrays, other_record)
        with pytest.raises(DamagedFileError, match=expected):
            run(half, resume=True)
    rewrite_checkpoint(path, arrays, record)
    run(half, resume=True)


def test_sweep_sets_a_damaged_checkpoint_aside(tmp_path, half, caplog):
    expected = make(tmp_path / "whole").results
    folder = tmp_path / "sweep" / "unfinished" / expected[0].digest()
    path = Path(shutil.copytree(half, folder)) / "checkpoint.npz"
    damage_file(path, "flipped", np.random.default_rng(0))
    again = make(tmp_path / "sweep").results
    (line,) = [r.getMessage() for r in caplog.records if "checkpoint" in r.getMessage()]
    assert str(path) in line and "\n" not in line
    assert [p.name for p in folder.iterdir()] == ["checkpoint.npz.damaged"]
    assert_all_equal(expected, again)


def test_resume_requires_the_version_and_device(half, whole):
    path = half / "checkpoint.npz"
    record, arrays = read_checkpoint(path)
    for name, now in describe_environment().items():
        other = (not now) if isinstance(now, bool) else "0.0.1"
        rewrite_checkpoint(path, arrays, {**record, name: other})
        expected = rf"{name} {other} -> {now}.*--resume-anyway"
        with pytest.raises(ConfigError, match=expected) as caught:
            run(half, resume=True)
        get_line(caught)
    with pytest.raises(KilledError):  # a second stop keeps the note
        run(half, resume_anyway=True, progress=make_killing_callback(1))
    resumed = run(half, resume=True)
    assert resumed.summary["begun_under"] == {**describe_environment(), name: other}
    assert_results_equal(resumed, whole)
    assert "begun_under" not in whole.summary


def test_checkpoint_of_another_run_is_kept(half, whole):
    path = half / "checkpoint.npz"
    before = path.read_bytes()
    for settings in ({"resume": True}, {}):
        expected = r"has another \(seed 0 -> 1.*output_dir"
        with pytest.raises(ConfigError, match=expected) as caught:
            run(half, spec=make_short_spec(METHOD, seed=1), **settings)
        get_line(caught)
        with pytest.raises(ConfigError, match="expected a checkpoint of this dataset"):
            run(half, dataset=make_user_dataset((9,) * 6), **settings)
    assert path.read_bytes() == before
    assert_results_equal(run(half), whole)  # its own run starts again
    assert not path.exists() and not list(half.glob("*.tmp"))


# --- folders that cannot be written ----------------------------------------------------------


def load_rescued(error):
    return [Result.load(path) for path in error.folder.glob("*[0-9a-f].json")]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The folder that results are written to instead."""
    (tmp_path / "home").mkdir()
    monkeypatch.setattr(result_store, "_list_fallback_parents", lambda: [tmp_path / "home"])
    return tmp_path / "home"


@pytest.mark.parametrize(
    "fault", [simulate_read_only_folder, lambda patch, folder: simulate_full_disk(patch, folder, 0)]
)
def test_run_writes_to_the_fallback_folder(fault, tmp_path, whole, home, monkeypatch, caplog):
    folder = tmp_path / "full"
    with fault(monkeypatch, folder), pytest.raises(ResultNotWrittenError) as caught:
        run(folder)
    assert str(home) in get_line(caught) and str(folder) in get_line(caught)
    (rescued,) = load_rescued(caught.value)
    for result in (caught.value.results, rescued):
        assert_results_equal(result, whole)
    partition = Partition.load(next(caught.value.folder.glob("*.partition.npz")))
    assert partition.digest() == whole.partition.digest()
    (line,) = [r.getMessage() for r in caplog.records if "checkpoint" in r.getMessage()]
    assert "the run continues" in line


def test_error_has_the_result_without_any_folder(tmp_path, whole, home, monkeypatch):
    with (
        simulate_read_only_folder(monkeypatch, tmp_path),
        pytest.raises(ResultNotWrittenError, match="in no file") as caught,
    ):
        run(tmp_path / "full")
    assert_results_equal(caught.value.results, whole)


def test_sweep_writes_to_the_fallback_folder(tmp_path, home, monkeypatch):
    expected, folder = make(tmp_path / "whole").results, tmp_path / "sweep"
    with (
        simulate_read_only_folder(monkeypatch, folder),
        pytest.raises(ResultNotWrittenError, match="3 results") as caught,
    ):
        make(folder)
    assert str(home) in get_line(caught)
    assert_all_equal(expected, caught.value.results.results)
    assert len(load_rescued(caught.value)) == 3
    for path in caught.value.folder.iterdir():
        path.rename(folder / path.name)
    assert len(load_results(folder)) == 3


# --- results ---------------------------------------------------------------------------------


def test_summary_values_that_json_cannot_hold(tmp_path, whole):
    odd = {"np": np.float32(0.5), "nan": float("nan"), "set": {1}, "object": object(), 3: (1, 2)}
    result = Result(whole.spec, whole.metrics, {**whole.summary, **odd}, whole.artifacts)
    summary = Result.load(result.save(tmp_path)).summary
    assert summary["np"] == 0.5 and summary["nan"] is None and summary["3"] == [1, 2]
    assert "object" in summary["object"]


@pytest.mark.parametrize("suffix", [".json", ".npz"])
def test_damaged_result_is_skipped_and_replaced(tmp_path, whole, suffix, caplog):
    path = whole.save(tmp_path)
    damaged, rng = path.with_suffix(suffix), np.random.default_rng(0)
    good = damaged.read_bytes()
    for kind in DAMAGE_KINDS * 10:
        damaged.write_bytes(good)
        damage_file(damaged, kind, rng)
        with pytest.raises(DamagedFileError) as caught:
            Result.load(path)
        assert str(path) in get_line(caught)
    with pytest.warns(UserWarning, match=path.name) as warned:
        assert len(load_results(tmp_path)) == 0
    assert len(warned) == 1
    lines = []
    assert all(result is not None for result in make(tmp_path, progress=lines.append).results)
    assert len(lines) == 3 and "seed 0" in lines[0]
    assert sum(path.name in record.getMessage() for record in caplog.records) == 1
    assert len(load_results(tmp_path)) == 3
    assert_results_equal(Result.load(path), whole)
    damaged.unlink()
    with pytest.raises(DamagedFileError if suffix == ".npz" else FileNotFoundError):
        Result.load(path)
    make(tmp_path, progress=lines.append)
    assert len(lines) == 5 and "2 of 3 runs" in lines[3] and "seed 0" in lines[4]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda r: r["spec"].update(wormhole=1), "wormhole.*made by"),
        (lambda r: r["spec"].update(seed="1"), "seed = '1'"),
        (lambda r: r["spec"].update(alpha=-1.0), "alpha"),
        (lambda r: r["summary"].update(final_accuracy="high"), "final_acc"),
        (lambda r: r.pop("spec"), "spec"),
        (lambda r: r.update(sumary={}), "sumary"),
        (lambda r: (r.pop("arrays"), r["summary"].update(later=1)), None),  # of an old version
    ],
)
def test_result_file_is_validated(tmp_path, whole, change, expected):
    path = whole.save(tmp_path)
    record = json.loads(path.read_text())
    change(record)
    del record["checksum"]
    path.write_text(json.dumps(record))
    if expected is None:
        assert_results_equal(Result.load(path), whole)
        return
    with pytest.raises(DamagedFileError, match=expected) as caught:
        Result.load(path)
    get_line(caught)


# --- kills -----------------------------------------------------------------------------------


def kill_at_random(kind, folder, method, number, rng):
    """Start a process, send a signal after it has written a file; return whether it was killed."""
    words = (WORKERS / "fault_worker.py", kind, folder, method)
    process = start_python(*words, FEDJAX_HET_CHECKPOINT_SECONDS="0")
    seen = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}

    def has_written():
        paths = [path for path in folder.rglob("*.npz") if path.exists()]
        return any(seen.get(path) != path.stat().st_mtime_ns for path in paths)

    while process.poll() is None and not has_written():
        time.sleep(0.01)
    time.sleep(float(rng.uniform(0, 0.2)))
    process.send_signal(number)
    return process.wait() != 0


def check_run(folder, method, expected):
    assert_results_equal(run(folder, method, resume=True), expected)
    (path,) = folder.glob("*.json")
    assert_results_equal(Result.load(path), expected)
    assert not list(folder.glob(".*.tmp")) and not (folder / "checkpoint.npz").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
def test_killed_run_resumes(tmp_path, number, whole):
    kill_at_random("run", tmp_path, METHOD, number, np.random.default_rng(number))
    check_run(tmp_path, METHOD, whole)


def check_file_faults(folder, method, expected, rng, monkeypatch, counts):
    """Run with a damaged checkpoint, a disk that is full at a random byte, and a damaged result."""
    with pytest.raises(KilledError):
        run(folder, method, progress=make_killing_callback(int(rng.integers(1, 4))))
    kind = DAMAGE_KINDS[int(rng.integers(len(DAMAGE_KINDS)))]
    damage_file(folder / "checkpoint.npz", kind, rng)
    with pytest.raises(DamagedFileError):
        run(folder, method, resume=True)
    (folder / "checkpoint.npz").unlink()
    with simulate_full_disk(monkeypatch, folder, int(rng.integers(0, 2_000_000))):
        try:
            actual = run(folder, method)
        except ResultNotWrittenError as error:
            actual = error.results
            (rescued,) = load_rescued(error)
            assert_results_equal(rescued, expected)
    assert_results_equal(actual, expected)
    path, suffix = actual.save(folder), (".json", ".npz")[rng.integers(2)]
    damage_file(path.with_suffix(suffix), kind, rng)
    with pytest.raises(DamagedFileError):
        Result.load(path)
    counts.update([f"checkpoint {kind}", "disk full", f"result {kind}"])
    assert_results_equal(run(folder, method, resume=True), expected)
    assert not list(folder.glob(".*.tmp"))


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_every_method_survives_every_fault(tmp_path, method, home, monkeypatch):
    rng, counts = np.random.default_rng(sorted(METHODS).index(method)), Counter()
    expected = run(None, method)
    for number in SIGNALS:
        folder = tmp_path / number.name
        folder.mkdir()
        killed = kill_at_random("run", folder, method, number, rng)
        counts[number.name if killed else "done before"] += 1
        check_run(folder, method, expected)
    check_file_faults(tmp_path / "files", method, expected, rng, monkeypatch, counts)
    print(f"\n{method}: {dict(counts)}")


@pytest.mark.long
@pytest.mark.parametrize("number", SIGNALS)
def test_killed_sweep_resumes(tmp_path, number):
    rng, expected = np.random.default_rng(number), make(None).results
    for attempt in range(4):
        killed = kill_at_random("sweep", tmp_path, METHOD, number, rng)
        print(f"\nsweep, {number.name} {attempt}: {'killed' if killed else 'done before'}")
    assert_all_equal(make(tmp_path).results, expected)
    assert not list(tmp_path.rglob(".*.tmp"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit")
def test_command_prints_the_result_without_any_file(tmp_path):
    words = "-m fedjax_het run --model mlp --rounds 2 --num-clients 4 --participation 1"
    command = f'ulimit -f 1; exec "{sys.executable}" {words} --output-dir "{tmp_path / "full"}"'
    environment = {**os.environ, "FEDJAX_HET_CHECKPOINT_SECONDS": "0", "HOME": str(tmp_path)}
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "0"
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["rounds"] == 2
    last = done.stderr.strip().splitlines()[-1]
    assert "File too large" in last and "in no file" in last
    assert done.stderr.count("checkpoint = ") == 1
