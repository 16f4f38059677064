"""Kills, full disks and damaged files: nothing is lost, and the bits are the same.

`pytest -m long tests/integration/test_faults.py -s` goes through all methods and prints the counts by kind.
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
from support.paths import ROOT, TESTS, WORKERS
from support.small_runs import KilledError, assert_results_equal, make_killing_callback

from fedjax_het import ConfigError, Result, load_results, simulate, sweep
from fedjax_het.algorithms import METHODS
from fedjax_het.data import Partition
from fedjax_het.runtime import checkpointing, group_state, result_store
from fedjax_het.runtime.checkpointing import read_checkpoint, save_checkpoint
from fedjax_het.runtime.provenance import describe_environment
from fedjax_het.runtime.result_store import ResultNotWrittenError
from fedjax_het.utils.io import DamagedFileError

WORKER = WORKERS / "fault_worker.py"
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
METHOD = "scaffold"  # states at the server and at clients


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """A checkpoint after each round."""
    monkeypatch.setattr(group_state, "MAX_ROUNDS_PER_CHUNK", 1)
    monkeypatch.setattr("fedjax_het.runtime.long_phases.CHUNK_SECONDS", 0.0)
    monkeypatch.setattr(checkpointing, "CHECKPOINT_SECONDS", 0.0)


def run(folder=None, method=METHOD, **settings):
    given = {"dataset": make_user_dataset(), "placement": PLACEMENT, **settings}
    return simulate(make_short_spec(method), output_dir=folder, **given)


def make(folder, method=METHOD, **settings):
    given = {"dataset": make_user_dataset(), "placement": PLACEMENT, "progress": lambda line: None}
    return sweep(make_seed_specs(method), folder, **{**given, **settings})


@pytest.fixture(scope="module")
def whole():
    """The run that nothing happens to."""
    return run()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A folder with the checkpoint of a run that was stopped half-way."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(group_state, "MAX_ROUNDS_PER_CHUNK", 1)
        patch.setattr(checkpointing, "CHECKPOINT_SECONDS", 0.0)
        patch.setattr("fedjax_het.runtime.long_phases.CHUNK_SECONDS", 0.0)
        run(folder, progress=make_killing_callback(3))
    return folder


@pytest.fixture
def half(stopped, tmp_path):
    """The same, to be spoilt."""
    return Path(shutil.copytree(stopped, tmp_path / "half"))


def sealed_anew(path, arrays, record):
    """Write a checkpoint's arrays, by their names, under another record, with a checksum."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointing, "flatten_by_path", lambda tree: tree)
        save_checkpoint(path, arrays, record)


def one_line(caught):
    text = str(caught.value)
    assert "\n" not in text and text.isprintable()
    return text


# --- checkpoints -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DAMAGE_KINDS)
def test_a_damaged_checkpoint_is_an_error_in_a_run(half, kind):
    path = half / "checkpoint.npz"
    good, rng = path.read_bytes(), np.random.default_rng(DAMAGE_KINDS.index(kind))
    for _ in range(5):
        path.write_bytes(good)
        damage_file(path, kind, rng)
        for resume in (True, False):
            with pytest.raises(DamagedFileError) as caught:
                run(half, resume=resume)
            assert str(path) in one_line(caught) and "remove it" in one_line(caught)


BAD_RECORDS = {
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


@pytest.mark.parametrize("field", BAD_RECORDS)
def test_a_record_out_of_range_is_a_damaged_checkpoint(half, field):
    path = half / "checkpoint.npz"
    record, arrays = read_checkpoint(path)
    for value in BAD_RECORDS[field]:
        sealed_anew(path, arrays, {**record, field: value})
        with pytest.raises(DamagedFileError, match=field):
            run(half, resume=True)
    sealed_anew(path, arrays, {name: v for name, v in record.items() if name != field})
    with pytest.raises(DamagedFileError, match=field):
        run(half, resume=True)


def test_a_record_that_is_no_dict_and_arrays_of_nan_are_damaged_checkpoints(half):
    path = half / "checkpoint.npz"
    record, arrays = read_checkpoint(path)
    for other in ([], "x", 3, None):
        sealed_anew(path, arrays, other)
        with pytest.raises(DamagedFileError, match=r"record = .*expected a dict"):
            run(half, resume=True)
    (name, *_) = [name for name in arrays if "server" in name and "kernel" in name]
    sealed_anew(path, arrays | {name: np.full_like(arrays[name], np.nan)}, record)
    with pytest.raises(DamagedFileError, match="not finite"):
        run(half, resume=True)
    sealed_anew(path, arrays, record)
    run(half, resume=True)


def test_in_a_sweep_it_is_set_aside_and_the_others_go_on(tmp_path, whole, half, caplog):
    made = make(tmp_path / "whole").results
    folder = tmp_path / "sweep" / "unfinished" / made[0].digest()
    folder.mkdir(parents=True)
    path = folder / "checkpoint.npz"
    path.write_bytes((half / "checkpoint.npz").read_bytes())
    damage_file(path, "flipped", np.random.default_rng(0))
    again = make(tmp_path / "sweep").results
    (told,) = [r.getMessage() for r in caplog.records if "checkpoint" in r.getMessage()]
    assert str(path) in told and "\n" not in told
    assert [p.name for p in folder.iterdir()] == ["checkpoint.npz.damaged"]
    for a, b in zip(made, again, strict=True):
        assert_results_equal(a, b)


def test_another_version_or_device_is_refused_with_the_way_out(half, whole, tmp_path):
    path = half / "checkpoint.npz"
    record, arrays = read_checkpoint(path)
    for name, now in describe_environment().items():
        other = (not now) if isinstance(now, bool) else "0.0.1"
        sealed_anew(path, arrays, {**record, name: other})
        with pytest.raises(
            ConfigError, match=rf"{name} {other} -> {now}.*--resume-anyway"
        ) as caught:
            run(half, resume=True)
        one_line(caught)
    with pytest.raises(KilledError):  # and a second stop does not forget it
        run(half, resume_anyway=True, progress=make_killing_callback(1))
    resumed = run(half, resume=True)
    assert resumed.summary["begun_under"] == {**describe_environment(), name: other}
    assert_results_equal(resumed, whole)
    assert "begun_under" not in whole.summary


def test_a_run_leaves_another_configurations_checkpoint_alone(half, whole):
    path = half / "checkpoint.npz"
    before = path.read_bytes()
    for settings in ({"resume": True}, {}):
        with pytest.raises(ConfigError, match=r"another one's \(seed 0 -> 1.*output_dir") as caught:
            simulate(
                make_short_spec(METHOD, seed=1),
                dataset=make_user_dataset(),
                output_dir=half,
                **settings,
            )
        one_line(caught)
        with pytest.raises(ConfigError, match="expected one of this dataset"):
            run(half, dataset=make_user_dataset((9,) * 6), **settings)
    assert path.read_bytes() == before
    assert_results_equal(run(half), whole)  # its own, from the start
    assert not path.exists() and not list(half.glob("*.tmp"))


# --- what cannot be written ------------------------------------------------------------------


def rescued(error):
    """The results that an error names."""
    return [Result.load(path) for path in error.folder.glob("*[0-9a-f].json")]


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Where there is room."""
    (tmp_path / "home").mkdir()
    monkeypatch.setattr(result_store, "_list_fallback_parents", lambda: [tmp_path / "home"])
    return tmp_path / "home"


@pytest.mark.parametrize(
    "fault", [simulate_read_only_folder, lambda patch, folder: simulate_full_disk(patch, folder, 0)]
)
def test_a_run_on_a_full_disk_is_whole_and_said_to_be_elsewhere(
    fault, tmp_path, whole, places, monkeypatch, caplog
):
    folder = tmp_path / "full"
    with fault(monkeypatch, folder), pytest.raises(ResultNotWrittenError) as caught:
        run(folder)
    assert str(places) in one_line(caught) and str(folder) in one_line(caught)
    assert_results_equal(caught.value.results, whole)
    (kept,) = rescued(caught.value)
    assert_results_equal(kept, whole) and kept.summary == caught.value.results.summary
    partition = Partition.load(caught.value.folder / "partition.npz")
    assert partition.digest() == whole.partition.digest()
    warned = [r.getMessage() for r in caplog.records if "checkpoint" in r.getMessage()]
    assert len(warned) == 1 and "the run goes on" in warned[0]


def test_where_no_place_takes_it_the_error_has_the_result(tmp_path, whole, monkeypatch):
    monkeypatch.setattr(result_store, "_list_fallback_parents", lambda: [tmp_path / "home"])
    with (
        simulate_read_only_folder(monkeypatch, tmp_path),
        pytest.raises(ResultNotWrittenError, match="in no file") as c,
    ):
        run(tmp_path / "full")
    assert_results_equal(c.value.results, whole)


def test_a_value_that_json_does_not_have_costs_nothing(tmp_path, whole, monkeypatch):
    odd = {"np": np.float32(0.5), "nan": float("nan"), "set": {1}, "object": object(), 3: (1, 2)}
    whole = Result(whole.spec, whole.metrics, {**whole.summary, **odd}, whole.artifacts)
    kept = Result.load(whole.save(tmp_path))
    assert kept.summary["np"] == 0.5 and kept.summary["nan"] is None and kept.summary["3"] == [1, 2]
    assert "object" in kept.summary["object"]


def test_a_sweep_goes_on_where_results_cannot_be_written(tmp_path, places, monkeypatch):
    made, folder = make(tmp_path / "whole").results, tmp_path / "sweep"
    with (
        simulate_read_only_folder(monkeypatch, folder),
        pytest.raises(ResultNotWrittenError, match="3 results") as caught,
    ):
        make(folder)
    assert str(places) in one_line(caught)
    for a, b in zip(made, caught.value.results.results, strict=True):
        assert_results_equal(a, b)
    assert len(rescued(caught.value)) == 3
    for path in caught.value.folder.iterdir():
        path.rename(folder / path.name)
    assert len(load_results(folder)) == 3


# --- results ---------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".json", ".npz"])
def test_a_damaged_result_is_found_out_left_out_and_made_again(tmp_path, whole, suffix, caplog):
    path = whole.save(tmp_path)
    spoilt, rng = path.with_suffix(suffix), np.random.default_rng(0)
    good = spoilt.read_bytes()
    for kind in DAMAGE_KINDS * 10:
        spoilt.write_bytes(good)
        damage_file(spoilt, kind, rng)
        with pytest.raises(DamagedFileError) as caught:
            Result.load(path)
        assert str(path) in one_line(caught)
    with pytest.warns(UserWarning, match=path.name) as warned:
        assert len(load_results(tmp_path)) == 0
    assert len(warned) == 1
    if suffix == ".npz":  # one sweep is enough
        return
    assert all(made is not None for made in make(tmp_path).results)
    assert sum(path.name in record.getMessage() for record in caplog.records) == 1
    assert len(load_results(tmp_path)) == 3
    assert_results_equal(Result.load(path), whole)


BAD_RESULTS = {
    "a setting of a later version": (
        lambda r: r["spec"].update(wormhole=1),
        "wormhole.*made by",
    ),
    "a setting of another type": (lambda r: r["spec"].update(seed="1"), "seed = '1'"),
    "a level that is none": (lambda r: r["spec"].update(alpha=-1.0), "alpha"),
    "a number that is a text": (lambda r: r["summary"].update(final_accuracy="high"), "final_acc"),
    "no settings": (lambda r: r.pop("spec"), "spec"),
    "an unknown part": (lambda r: r.update(sumary={}), "sumary"),
}


@pytest.mark.parametrize("what", BAD_RESULTS)
def test_a_strangers_result_is_checked(tmp_path, whole, what):
    path = whole.save(tmp_path)
    change, said = BAD_RESULTS[what]
    record = json.loads(path.read_text())
    change(record)
    del record["checksum"]
    path.write_text(json.dumps(record))
    with pytest.raises(DamagedFileError, match=said) as caught:
        Result.load(path)
    one_line(caught)


def test_results_without_a_checksum_are_read(tmp_path, whole):
    path = whole.save(tmp_path)
    record = json.loads(path.read_text())
    path.write_text(json.dumps({"spec": record["spec"], "summary": record["summary"]}))
    assert_results_equal(Result.load(path), whole)


# --- the harness -----------------------------------------------------------------------------


def start(what, folder, method):
    environment = {**os.environ, "FEDJAX_HET_CHECKPOINT_SECONDS": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(TESTS)])
    words = [sys.executable, str(WORKER), what, str(folder), method]
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def kill_at_random(what, folder, method, number, rng):
    """Start it, and send a signal at a random moment after it has written something; -> whether
    it was killed, and not done before."""
    process = start(what, folder, method)
    seen = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}

    def has_written():
        return any(
            seen.get(path) != path.stat().st_mtime_ns
            for path in list(folder.rglob("*.npz"))
            if path.exists()
        )

    while process.poll() is None and not has_written():
        time.sleep(0.01)
    time.sleep(float(rng.uniform(0, 0.2)))
    process.send_signal(number)
    return process.wait() != 0


def check_run(folder, method, expected):
    assert_results_equal(run(folder, method, resume=True), expected)
    (path,) = (path for path in folder.glob("*.json"))
    assert_results_equal(Result.load(path), expected)
    assert not list(folder.glob(".*.tmp")) and not (folder / "checkpoint.npz").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
def test_a_run_killed_at_a_random_moment_goes_on(tmp_path, number, whole):
    kill_at_random("run", tmp_path, METHOD, number, np.random.default_rng(number))
    check_run(tmp_path, METHOD, whole)


def faults_of_files(folder, method, expected, rng, monkeypatch, counts):
    """Damage, a full disk at a random byte, and a read-only folder: a run each."""
    with pytest.raises(KilledError):
        run(folder, method, progress=make_killing_callback(int(rng.integers(1, 4))))
    kind = DAMAGE_KINDS[int(rng.integers(len(DAMAGE_KINDS)))]
    damage_file(folder / "checkpoint.npz", kind, rng)
    with pytest.raises(DamagedFileError):
        run(folder, method, resume=True)
    counts[f"checkpoint {kind}"] += 1
    (folder / "checkpoint.npz").unlink()

    with simulate_full_disk(monkeypatch, folder, int(rng.integers(0, 2_000_000))):
        try:
            found = run(folder, method)
        except ResultNotWrittenError as error:
            found = error.results
            (kept,) = rescued(error)
            assert_results_equal(kept, expected)
    assert_results_equal(found, expected)
    counts["disk full"] += 1

    path = found.save(folder)
    kind, suffix = (
        DAMAGE_KINDS[int(rng.integers(len(DAMAGE_KINDS)))],
        (".json", ".npz")[rng.integers(2)],
    )
    damage_file(path.with_suffix(suffix), kind, rng)
    with pytest.raises(DamagedFileError):
        Result.load(path)
    counts[f"result {kind}"] += 1
    assert_results_equal(run(folder, method, resume=True), expected)
    assert not list(folder.glob(".*.tmp"))


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_every_method_survives_every_fault(tmp_path, method, places, monkeypatch):
    rng, counts = np.random.default_rng(sorted(METHODS).index(method)), Counter()
    expected = run(None, method)
    for number in SIGNALS:
        folder = tmp_path / number.name
        folder.mkdir()
        killed = kill_at_random("run", folder, method, number, rng)
        counts[number.name if killed else "done before"] += 1
        check_run(folder, method, expected)
    faults_of_files(tmp_path / "files", method, expected, rng, monkeypatch, counts)
    print(f"\n{method}: {dict(counts)}")


@pytest.mark.long
@pytest.mark.parametrize("number", SIGNALS)
def test_a_sweep_survives_kills(tmp_path, number):
    rng, expected = np.random.default_rng(number), make(None).results
    for attempt in range(4):
        killed = kill_at_random("sweep", tmp_path, METHOD, number, rng)
        print(f"\nsweep, {number.name} {attempt}: {'killed' if killed else 'done before'}")
    for a, b in zip(make(tmp_path).results, expected, strict=True):
        assert_results_equal(a, b)
    assert not list(tmp_path.rglob(".*.tmp"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit")
def test_where_the_system_takes_no_file_the_command_prints_the_result(tmp_path):
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
