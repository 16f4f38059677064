"""Several workers on one sweep execute each run once, to the same bits, whichever worker dies."""

import contextlib
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from functools import partial

import pytest
from support.data import make_user_dataset
from support.paths import WORKERS
from support.processes import start_python
from support.small_runs import (
    KilledError,
    assert_all_equal,
    assert_results_equal,
    make_spec,
    run_sweep,
)
from support.sweep_worker import specs_of

from fedjax_het.runtime import checkpointing, group_state, leases, work_queue
from fedjax_het.runtime.leases import Leases
from fedjax_het.runtime.result_store import load_results
from fedjax_het.runtime.sweep import plan_sweep
from fedjax_het.runtime.work_queue import WorkQueue

SPECS = [make_spec(seed=s) for s in range(4)]
TWO_GROUPS = [*SPECS[:2], *(make_spec(seed=s, batch_size=5) for s in range(2))]


make = partial(run_sweep, spread="runs", devices=1, lanes=1, blocks=1)


@pytest.fixture(scope="module")
def whole():
    """The results of one worker."""
    return make(SPECS).results


@pytest.fixture
def while_running(monkeypatch):
    """Call a function in the middle of the first run; polls and chunks are short."""

    def during(event, at=3):
        calls, silent = iter(range(10**6)), contextlib.nullcontext(lambda progress: None)

        def show(progress):
            if next(calls) == at:
                with monkeypatch.context() as patch:
                    patch.setattr(work_queue, "show_progress", lambda *a, **k: silent)
                    event()

        shown = contextlib.nullcontext(show)
        monkeypatch.setattr(work_queue, "show_progress", lambda *a, **k: shown)

    monkeypatch.setattr(group_state, "MAX_ROUNDS_PER_CHUNK", 1)
    monkeypatch.setattr(checkpointing, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(work_queue, "POLL_SECONDS", 0.01)
    return during


class StopError(Exception):
    pass


def stop_at(start, lines):
    """Return a `progress` function that stores lines, and stops the sweep at one of them."""

    def progress(line):
        lines.append(line)
        if line.startswith(start):
            raise StopError

    return progress


# --- in one process ----------------------------------------------------------------------------


def test_second_worker_executes_the_other_runs(tmp_path, while_running, whole):
    first, second, states = [], [], []

    def work():
        plan = plan_sweep(SPECS, tmp_path, dataset=make_user_dataset())
        states.extend(state for *_, state in plan)
        with pytest.raises(StopError):
            make(SPECS, tmp_path, progress=stop_at("waiting for", second))

    while_running(work)
    results = make(SPECS, tmp_path, progress=first.append).results
    assert states == ["claimed", "missing", "missing", "missing"]
    assert [line[:5] for line in second[:3]] == ["[1/4]", "[2/4]", "[3/4]"]
    assert re.fullmatch(r"waiting for 1 run of other workers: \S+ \(process \d+\)", second[3])
    assert first[0].startswith("[1/4]") or (
        len(first) == 1 and first[0].endswith("; about 0.0 s to go; 3 by other workers")
    )
    assert_all_equal(results, whole)
    assert len(load_results(tmp_path)) == 4 and not (tmp_path / "claims").exists()
    assert not (tmp_path / "unfinished").exists()


def test_second_worker_begins_with_another_group(tmp_path, while_running):
    lines, digests = [], []

    def work():
        with pytest.raises(StopError):
            make(TWO_GROUPS, tmp_path, progress=stop_at("[1/4]", lines))
        # Results are written before they are reported.
        digests.extend(path.stem for path in tmp_path.glob("[0-9a-f]*.json"))

    while_running(work)
    results = make(TWO_GROUPS, tmp_path).results
    assert len(lines) == 1 and "seed 0" in lines[0]
    (result,) = [result for result in results if result.digest() in digests]
    assert result.spec.batch_size == 5 and result.spec.seed == 0


def test_simultaneous_workers_begin_with_different_groups(tmp_path):
    specs = {f"{i:016}": spec.resolved() for i, spec in enumerate(TWO_GROUPS)}
    with Leases(tmp_path / "claims") as one, Leases(tmp_path / "claims") as two:
        queues = [WorkQueue(specs, tmp_path, leases, print) for leases in (one, two)]
        first, second = (next(queue.iterate_groups()) for queue in queues)
        assert [job.spec.batch_size for job in first] == [4, 4]
        assert [job.spec.batch_size for job in second] == [5, 5]
        assert len(queues[1].acquire_slots(second, 1)) == 1
        assert not queues[0].acquire_slots(second[:1], 1)


def test_worker_without_its_lease_drops_the_run(tmp_path, while_running, whole):
    lines, saved, other = [], [], Leases(tmp_path / "claims")

    def steal():
        (path,) = (tmp_path / "claims").iterdir()
        path.unlink()
        assert other.acquire(path.name)
        checkpoint = tmp_path / "unfinished" / path.name / "checkpoint.npz"
        saved.append((checkpoint, checkpoint.stat().st_mtime_ns))
        time.sleep(0.6)  # until a check is due

    def progress(line):
        lines.append(line)
        if line.startswith("waiting"):
            (checkpoint, mtime) = saved[0]
            assert checkpoint.stat().st_mtime_ns == mtime
            other.close()

    while_running(steal)
    results = make(SPECS[:2], tmp_path, progress=progress).results
    assert "seed 0: left to the worker that acquired" in lines[0]
    assert "seed 1" in lines[1] and lines[2].startswith("waiting for 1 run")
    assert "seed 0" in lines[3]
    assert_all_equal(results, whole[:2])


def test_run_of_a_dead_worker_resumes(tmp_path, while_running, monkeypatch, whole):
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
    monkeypatch.setattr(work_queue, "show_progress", lambda *a, **k: show)
    results = make(SPECS[:2], tmp_path).results
    assert 1 not in rounds[-9:] or rounds.count(1) == 1  # only the other run began at its start
    assert len(rounds) < 2 * 9
    assert_all_equal(results, whole[:2])


def test_result_before_the_lease_is_not_repeated(tmp_path, monkeypatch, whole):
    make(SPECS[1:2], tmp_path / "elsewhere")

    def acquire_late(self, digest, acquire=Leases.acquire):
        for path in (tmp_path / "elsewhere").glob(f"{digest}.*"):
            shutil.copy(path, tmp_path / "sweep")
        return acquire(self, digest)

    monkeypatch.setattr(Leases, "acquire", acquire_late)
    lines = []
    results = make(SPECS[:2], tmp_path / "sweep", progress=lines.append).results
    assert len(lines) == 1 and "seed 0" in lines[0]
    assert_all_equal(results, whole[:2])


def test_failed_run_releases_its_lease(tmp_path, while_running):
    def fail():
        raise RuntimeError("no more")

    while_running(fail)
    with pytest.raises(RuntimeError, match="no more"):
        make(SPECS, tmp_path)
    assert not (tmp_path / "claims").exists()


def test_device_layout_is_independent_of_existing_results(tmp_path):
    specs = [make_spec(seed=s) for s in range(8)]
    expected = run_sweep(specs, tmp_path).results[5]
    for path in tmp_path.glob(f"{expected.digest()}.*"):
        path.unlink()
    again = run_sweep(specs, tmp_path).results[5]
    assert again.summary["lanes"] == expected.summary["lanes"]
    assert_results_equal(again, expected)


# --- in several processes ----------------------------------------------------------------------


class Workers:
    """Processes that execute one sweep, with a log each."""

    def __init__(self, folder, count, rounds, seconds):
        self.folder, self.logs = folder / "sweep", folder / "logs"
        self.count, self.rounds, self.seconds = count, rounds, seconds
        self.logs.mkdir(parents=True)
        self.numbers = iter(range(1000))

    def start(self):
        log = self.logs / f"{next(self.numbers)}.log"
        words = (WORKERS / "sweep_worker.py", self.folder, log)
        words = (*words, self.count, self.rounds, self.seconds)
        with log.with_suffix(".output").open("w") as output:
            return start_python(*words, output=output, JAX_NUM_CPU_DEVICES="1")

    def count_events(self, kind):
        """Return how often each seed has events of a kind, in all logs."""
        lines = [line for log in self.logs.glob("*.log") for line in log.read_text().splitlines()]
        return Counter(int(line.split()[1]) for line in lines if line.split()[0] == kind)

    def check(self, processes):
        """Wait; every run has a result, was executed once, to the bits of one worker."""
        for process in processes:
            assert process.wait(timeout=300) == 0, process.args
        assert sorted(load_results(self.folder)["seed"]) == list(range(self.count))
        assert max(self.count_events("made").values()) == 1
        lines, specs = [], specs_of(self.count, self.rounds)
        assert_all_equal(
            make(specs, self.folder, progress=lines.append).results, make(specs).results
        )
        assert all("are in" in line for line in lines)
        assert not (self.folder / "claims").exists()
        assert not (self.folder / "unfinished").exists()


@pytest.mark.slow
def test_killed_worker_is_replaced(tmp_path):
    workers = Workers(tmp_path, 4, 6, 0.2)
    killed = workers.start()
    while not workers.count_events("round") and killed.poll() is None:
        time.sleep(0.02)
    time.sleep(0.5)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    assert (workers.folder / "claims").exists()
    workers.seconds = 0.0
    workers.check([workers.start()])
    # At most one round was repeated.
    assert sum(workers.count_events("round").values()) <= 4 * 6 + 1


@pytest.mark.long
def test_three_of_eight_workers_are_killed(tmp_path):
    for count in (1, 8):
        workers, start = Workers(tmp_path / f"{count}", 48, 20, 0.1), time.perf_counter()
        processes = [workers.start() for _ in range(count)]
        if count == 8:
            while sum(workers.count_events("made").values()) < 5:
                time.sleep(0.1)
            killed = random.sample(processes, 3)
            for process in killed:
                time.sleep(random.uniform(0, 1.5))
                process.kill()
            assert [process.wait() for process in killed] == [-signal.SIGKILL] * 3
            processes = [process for process in processes if process not in killed]
        workers.check(processes)
        print(f"{count} workers: {time.perf_counter() - start:.1f} s")


@pytest.mark.long
def test_workers_are_stopped_again_and_again(tmp_path):
    """Each worker that is killed, terminated or interrupted is replaced by a new one."""
    workers, faults = Workers(tmp_path, 48, 30, 0.1), Counter()
    processes = [workers.start() for _ in range(3)]
    while sum(faults.values()) < 40 and any(process.poll() is None for process in processes):
        time.sleep(random.uniform(0.2, 1.5))
        i, number = random.randrange(3), random.choice(["SIGKILL", "SIGTERM", "SIGINT"])
        if processes[i].poll() is None:
            processes[i].send_signal(getattr(signal, number))
            processes[i].wait(120)
            faults[number] += 1
            processes[i] = workers.start()
    workers.check([*processes, workers.start()])
    print(dict(faults))


@pytest.mark.long
def test_lease_of_a_clock_that_is_an_hour_late_expires(tmp_path, monkeypatch):
    owner = Leases(tmp_path / "claims")
    digests = [digest for digest, *_ in plan_sweep(SPECS, tmp_path, dataset=make_user_dataset())]
    assert owner.acquire(digests[0])
    monkeypatch.setattr(leases, "LEASE_SECONDS", 3.0)
    hour_ago = time.time() - 3600
    os.utime(tmp_path / "claims" / digests[0], (hour_ago, hour_ago))
    start, lines = time.monotonic(), []
    assert all(make(SPECS, tmp_path, progress=lines.append).results)
    assert time.monotonic() - start > 3.0
    assert any(line.startswith("waiting for 1 run") for line in lines)
