"""Many workers on one sweep: each run made once, whoever dies, to the same bits."""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from support.data import make_user_dataset
from support.paths import ROOT, TESTS, WORKERS
from support.small_runs import KilledError, assert_results_equal, make_spec, with_placement
from support.sweep_worker import specs_of

from fedjax_het import sweep
from fedjax_het.runtime import checkpointing, group_state, leases, sweep_log, work_queue
from fedjax_het.runtime.leases import Leases
from fedjax_het.runtime.result_store import load_results
from fedjax_het.runtime.sweep import plan_sweep
from fedjax_het.runtime.work_queue import WorkQueue

WORKER = WORKERS / "sweep_worker.py"
SPECS = [make_spec(seed=s) for s in range(4)]
AT_ONCE = {"spread": "runs", "devices": 1, "lanes": 1, "blocks": 1}


def make(specs, directory=None, **settings):
    settings = {
        "dataset": make_user_dataset(),
        "progress": lambda line: None,
        **AT_ONCE,
        **settings,
    }
    return sweep(specs, directory, **with_placement(settings))


@pytest.fixture(scope="module")
def whole():
    """The results of one worker in peace."""
    return make(SPECS).results


@pytest.fixture
def while_running(monkeypatch):
    """Do something in the middle of the first run; polls and chunks are short."""

    def during(event, at=3):
        calls = iter(range(10**6))

        def show(progress):
            if next(calls) == at:
                with monkeypatch.context() as quiet:
                    quiet.setattr(sweep_log, "show_progress", lambda *a, **k: nothing)
                    event()

        nothing = contextlib.nullcontext(lambda progress: None)
        monkeypatch.setattr(
            sweep_log, "show_progress", lambda *a, **k: contextlib.nullcontext(show)
        )

    monkeypatch.setattr(group_state, "MAX_ROUNDS_PER_CHUNK", 1)
    monkeypatch.setattr(checkpointing, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(work_queue, "POLL_SECONDS", 0.01)
    return during


class Enough(Exception):
    pass


def until_it_waits(lines):
    def told(line):
        lines.append(line)
        if line.startswith("waiting for"):
            raise Enough

    return told


# --- in one process ----------------------------------------------------------------------------


def test_a_second_worker_makes_what_the_first_is_not_at(tmp_path, while_running, whole):
    mine, theirs, states = [], [], []

    def second():
        states.extend(
            state for *_, state in plan_sweep(SPECS, tmp_path, dataset=make_user_dataset())
        )
        with pytest.raises(Enough):
            make(SPECS, tmp_path, progress=until_it_waits(theirs))

    while_running(second)
    made = make(SPECS, tmp_path, progress=mine.append)
    assert states == ["claimed", "missing", "missing", "missing"]
    assert [line[:5] for line in theirs[:3]] == ["[1/4]", "[2/4]", "[3/4]"]
    assert re.fullmatch(r"waiting for 1 run of other workers: \S+ \(process \d+\)", theirs[3])
    assert (len(mine) == 1 and mine[0].endswith("; about 0.0 s to go; 3 made by others")) or (
        mine[0].startswith("[1/4]")
    )
    for found, expected in zip(made.results, whole, strict=True):
        assert_results_equal(found, expected)
    assert len(load_results(tmp_path)) == 4 and not (tmp_path / "claims").exists()
    assert not list((tmp_path / "unfinished").iterdir())


def test_workers_begin_with_different_groups(tmp_path, while_running):
    specs = [*SPECS[:2], *(make_spec(seed=s, batch_size=5) for s in range(2))]
    theirs = []

    def second():
        with pytest.raises(Enough):
            make(specs, tmp_path, progress=stop_after_one)

    def stop_after_one(line):
        theirs.append(line)
        raise Enough

    while_running(second)
    first = make(specs, tmp_path)
    (result,) = [r for r in first.results[2:] if r.digest() in made_by_second(tmp_path, theirs)]
    assert result.spec.batch_size == 5 and result.spec.seed == 0


def made_by_second(directory, lines):
    """It made one run, the first of its group; results are written before they are told."""
    assert len(lines) == 1 and lines[0].startswith("[1/4]") and "seed 0" in lines[0]
    by_time = sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    return by_time[0].stem


def test_a_worker_whose_claim_is_gone_drops_its_run(tmp_path, while_running, whole):
    lines, saved = [], []
    thief = Leases(tmp_path / "claims")

    def steal():
        (path,) = (tmp_path / "claims").iterdir()
        path.unlink()
        assert thief.acquire(path.name)
        checkpoint = tmp_path / "unfinished" / path.name / "checkpoint.npz"
        saved.append((checkpoint, checkpoint.stat().st_mtime_ns))
        time.sleep(0.6)  # suspended, until a look is due

    def told(line):
        lines.append(line)
        if line.startswith("waiting"):
            (checkpoint, at) = saved[0]
            assert checkpoint.stat().st_mtime_ns == at, "what is another's was written"
            thief.close()

    while_running(steal)
    made = make(SPECS[:2], tmp_path, progress=told)
    assert "seed 0: left to the worker who took over" in lines[0]
    assert "seed 1" in lines[1] and lines[2].startswith("waiting for 1 run")
    assert "seed 0" in lines[3]
    for found, expected in zip(made.results, whole, strict=False):
        assert_results_equal(found, expected)


def test_a_dead_workers_run_goes_on_from_its_checkpoint(
    tmp_path, while_running, monkeypatch, whole
):
    def die():
        raise KilledError

    while_running(die, at=4)
    with monkeypatch.context() as patch:
        patch.setattr(Leases, "close", lambda self: self._closed.set())  # as kill -9 would
        with pytest.raises(KilledError):
            make(SPECS[:2], tmp_path)
    assert len(list((tmp_path / "claims").iterdir())) == 1
    monkeypatch.setattr(leases, "LEASE_SECONDS", 0.5)
    rounds = []
    show = contextlib.nullcontext(lambda progress: rounds.append(progress.done))
    monkeypatch.setattr(sweep_log, "show_progress", lambda *a, **k: show)
    made = make(SPECS[:2], tmp_path)
    assert 1 not in rounds[-9:] or rounds.count(1) == 1, "only the other run began at its start"
    assert len(rounds) < 2 * 9
    for found, expected in zip(made.results, whole, strict=False):
        assert_results_equal(found, expected)


def test_what_was_made_before_it_was_claimed_is_not_made_again(tmp_path, monkeypatch, whole):
    make(SPECS[1:2], tmp_path / "elsewhere")

    def late(self, digest, take=Leases.acquire):
        for path in (tmp_path / "elsewhere").glob(f"{digest}.*"):
            shutil.copy(path, tmp_path / "sweep")
        return take(self, digest)

    monkeypatch.setattr(Leases, "acquire", late)
    lines = []
    made = make(SPECS[:2], tmp_path / "sweep", progress=lines.append)
    assert len(lines) == 1 and "seed 0" in lines[0]
    for found, expected in zip(made.results, whole, strict=False):
        assert_results_equal(found, expected)


def test_workers_that_begin_together_compile_different_groups(tmp_path):
    specs = [*SPECS[:2], *(make_spec(seed=s, batch_size=5) for s in range(2))]
    named = {f"{i:016}": one.resolved() for i, one in enumerate(specs)}
    with Leases(tmp_path / "claims") as one, Leases(tmp_path / "claims") as two:
        shares = [WorkQueue(named, tmp_path, leases, print) for leases in (one, two)]
        first, second = (next(share.iterate_groups()) for share in shares)
        assert [job.spec.batch_size for job in first] == [4, 4]
        assert [job.spec.batch_size for job in second] == [5, 5]
        assert len(shares[1].acquire_slots(second, 1)) == 1 and not shares[0].acquire_slots(
            second[:1], 1
        )


def test_a_run_that_fails_gives_its_claim_back(tmp_path, while_running):
    def fail():
        raise RuntimeError("no more")

    while_running(fail)
    with pytest.raises(RuntimeError, match="no more"):
        make(SPECS, tmp_path)
    assert not (tmp_path / "claims").exists()


def test_how_devices_are_shared_out_does_not_depend_on_what_is_left(tmp_path):
    specs = [make_spec(seed=s) for s in range(8)]
    settings = {"dataset": make_user_dataset(), "progress": lambda line: None}
    together = sweep(specs, tmp_path, **settings).results
    for path in tmp_path.glob(f"{together[5].digest()}.*"):
        path.unlink()
    again = sweep(specs, tmp_path, **settings).results[5]
    assert again.summary["lanes"] == together[5].summary["lanes"]
    assert_results_equal(again, together[5])


# --- in several --------------------------------------------------------------------------------


def start(folder, log, count, rounds, seconds):
    environment = {
        **os.environ,
        "JAX_NUM_CPU_DEVICES": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)]),
    }
    with log.with_suffix(".output").open("w") as output:
        return subprocess.Popen(
            [sys.executable, str(WORKER), *map(str, (folder, log, count, rounds, seconds))],
            env=environment,
            stdout=output,
            stderr=output,
        )


def logged(logs, what):
    """How often each seed, of these words, in all logs."""
    lines = [line for log in logs.glob("*.log") for line in log.read_text().splitlines()]
    return Counter(int(line.split()[1]) for line in lines if line.split()[0] == what)


def check(folder, logs, count, rounds):
    """Every run there, none made twice, to the bits of one worker in peace, nothing left over."""
    results = load_results(folder)
    assert sorted(results["seed"]) == list(range(count))
    made = logged(logs, "made")
    assert max(made.values()) == 1
    expected = make(specs_of(count, rounds)).results
    found = make(specs_of(count, rounds), folder, progress=no_more).results
    for one, other in zip(found, expected, strict=True):
        assert_results_equal(one, other)
    assert not (folder / "claims").exists()
    assert not list((folder / "unfinished").iterdir())


def no_more(line):
    assert "are in" in line, line


def ended(process):
    assert process.wait(timeout=300) == 0, process.args


@pytest.mark.slow
def test_two_processes_one_of_them_killed(tmp_path):
    folder, logs = tmp_path / "sweep", tmp_path / "logs"
    logs.mkdir()
    settings = (4, 6, 0.2)
    killed = start(folder, logs / "0.log", *settings)
    while not logged(logs, "round") and killed.poll() is None:
        time.sleep(0.02)
    time.sleep(0.5)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    assert (folder / "claims").exists()
    done = logged(logs, "round")
    again = start(folder, logs / "1.log", *settings[:2], 0.0)
    ended(again)
    check(folder, logs, *settings[:2])
    assert sum(logged(logs, "round").values()) <= 4 * 6 + 1, f"begun again, not gone on: {done}"


@pytest.mark.long
def test_eight_workers_of_whom_three_are_killed(tmp_path):
    settings = (48, 20, 0.1)
    seconds = {}
    for count in (1, 8):
        folder, logs = tmp_path / f"sweep{count}", tmp_path / f"logs{count}"
        logs.mkdir()
        began = time.perf_counter()
        workers = [start(folder, logs / f"{i}.log", *settings) for i in range(count)]
        if count == 8:
            while sum(logged(logs, "made").values()) < 5:
                time.sleep(0.1)
            killed = random.sample(workers, 3)
            for worker in killed:
                time.sleep(random.uniform(0, 1.5))
                worker.kill()
            assert [worker.wait() for worker in killed] == [-signal.SIGKILL] * 3
            workers = [worker for worker in workers if worker not in killed]
        for worker in workers:
            ended(worker)
        seconds[count] = time.perf_counter() - began
        check(folder, logs, *settings[:2])
    print({f"{count} workers": f"{took:.1f} s" for count, took in seconds.items()})


@pytest.mark.long
def test_three_workers_under_fire(tmp_path):
    """Killed, terminated and interrupted again and again, each time replaced by a new one."""
    folder, logs = tmp_path / "sweep", tmp_path / "logs"
    logs.mkdir()
    settings, numbers, faults = (48, 30, 0.1), iter(range(1000)), Counter()

    def new():
        return start(folder, logs / f"{next(numbers)}.log", *settings)

    workers = [new() for _ in range(3)]
    while sum(faults.values()) < 40 and any(worker.poll() is None for worker in workers):
        time.sleep(random.uniform(0.2, 1.5))
        i = random.randrange(3)
        how = random.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        if workers[i].poll() is None:
            workers[i].send_signal(how)
            workers[i].wait(120)
            faults[how.name] += 1
            workers[i] = new()
    workers.append(new())
    for worker in workers:
        ended(worker)
    check(folder, logs, *settings[:2])
    print(dict(faults))


@pytest.mark.long
def test_lease_of_a_clock_that_is_an_hour_late_expires(tmp_path, monkeypatch):
    owner = Leases(tmp_path / "claims")
    digests = [digest for digest, *_ in plan_sweep(SPECS, tmp_path, dataset=make_user_dataset())]
    assert owner.acquire(digests[0])
    monkeypatch.setattr(leases, "LEASE_SECONDS", 3.0)
    hour_ago = time.time() - 3600
    os.utime(tmp_path / "claims" / digests[0], (hour_ago, hour_ago))
    owner._closed.set()  # it dies
    began, lines = time.monotonic(), []
    made = make(SPECS, tmp_path, progress=lines.append)
    assert time.monotonic() - began > 3.0
    assert any(line.startswith("waiting for 1 run") for line in lines)
    assert all(made.results)
