"""Claims: one owner at a time, dead ones replaced, no clock but the watcher's own."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from fedjax_het.runtime import leases as module
from fedjax_het.runtime.leases import LEASE_SECONDS, Leases

RUN = "0123456789abcdef"


class Clock:
    """A machine's, which moves when it is told to."""

    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now


def worker(folder, machine=None, now=0.0):
    """One that beats by hand, on a machine of its own."""
    made = Leases(folder, clock=Clock(now))
    made._heartbeat_thread = threading.current_thread()
    if machine is not None:
        made.owner = made.owner._replace(machine_id=machine)
    return made


def watch(watcher, seconds, also=lambda: None):
    """Let the watcher look every few seconds: whether it could take the run in the end."""
    for _ in range(int(seconds / 5)):
        watcher._clock.now += 5
        also()
        if watcher.acquire(RUN):
            return True
    return False


def test_a_run_is_one_workers_until_it_is_given_back(tmp_path):
    one, two = worker(tmp_path / "claims", "a"), worker(tmp_path / "claims", "b")
    assert one.acquire(RUN) and one.acquire(RUN) and one.is_held(RUN)
    assert not two.acquire(RUN) and not two.is_held(RUN)
    assert two.list_other_owners() == {RUN: str(one.owner)} and one.list_other_owners() == {}
    two.release(RUN)  # which is not its own
    assert one.is_held(RUN)
    one.release(RUN)
    assert not one.is_held(RUN) and two.list_other_owners() == {} and two.acquire(RUN)
    two.close()
    assert not (tmp_path / "claims").exists()


def test_without_a_folder_everything_is_ones_own(tmp_path):
    with Leases(None) as alone:
        assert alone.acquire(RUN) and alone.is_held(RUN) and alone.list_other_owners() == {}
        alone.release(RUN)


@pytest.mark.parametrize("ahead", [0.0, 3600.0, -3600.0, 1e9])
def test_an_owner_elsewhere_is_dead_after_a_lease_of_silence_by_the_watchers_clock(tmp_path, ahead):
    one, two = worker(tmp_path, "a"), worker(tmp_path, "b", now=ahead)
    assert one.acquire(RUN)
    assert not watch(two, 3 * LEASE_SECONDS, also=one.renew_all)
    assert not watch(two, LEASE_SECONDS - 5)
    assert one.is_held(RUN)
    assert watch(two, 10)
    assert two.is_held(RUN) and not one.is_held(RUN)
    content = (tmp_path / RUN).read_bytes()
    one.renew_all()  # woken up
    one.release(RUN)
    assert (tmp_path / RUN).read_bytes() == content
    assert os.listdir(tmp_path) == [RUN]


def test_who_was_suspended_does_not_take_its_own_absence_for_the_owners_silence(tmp_path):
    one, two = worker(tmp_path, "a"), worker(tmp_path, "b")
    assert one.acquire(RUN) and not two.acquire(RUN)
    two._clock.now += 100 * LEASE_SECONDS  # both machines slept
    assert not two.acquire(RUN)
    one.renew_all()
    assert not watch(two, LEASE_SECONDS / 2)


@pytest.mark.parametrize("how", ["killed", "reused"])
def test_an_owner_of_this_machine_is_dead_when_its_process_is(tmp_path, how):
    one, two = worker(tmp_path), worker(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as process:
        started = module._read_start_ticks(process.pid)
        one.owner = one.owner._replace(pid=process.pid, start_ticks=started)
        if how == "reused":
            one.owner = one.owner._replace(start_ticks=started - 1)
        assert one.acquire(RUN)
        assert two.acquire(RUN) == (how == "reused")
        process.kill()
        time.sleep(0.05)  # not collected yet by its parent, this process
        assert two.acquire(RUN) and two.is_held(RUN) and not one.is_held(RUN)


def test_the_same_number_on_another_machine_is_another_process(tmp_path):
    one, two = worker(tmp_path, "a"), worker(tmp_path)
    one.owner = one.owner._replace(pid=2**22 - 1, start_ticks=1)
    assert one.acquire(RUN) and not two.acquire(RUN)


@pytest.mark.parametrize("content", [b"", b"garbage", b"000000000001 [1]\n", b"\xff" * 40])
def test_what_is_no_claim_is_taken_over_after_a_lease(tmp_path, content):
    (tmp_path / RUN).write_bytes(content)
    two = worker(tmp_path, "b")
    assert two.list_other_owners() == {RUN: "another worker"}
    assert not watch(two, LEASE_SECONDS - 5) and watch(two, 10)


def test_a_live_claim_in_a_dead_ones_place_is_put_back(tmp_path):
    dead, quick, late = (worker(tmp_path, machine) for machine in "abc")
    assert dead.acquire(RUN)
    assert not watch(late, LEASE_SECONDS - 5)
    stale = (tmp_path / RUN).read_bytes()
    assert watch(quick, LEASE_SECONDS + 5)
    assert not late._remove_file(RUN, stale)  # which it had read before the quick one was there
    assert quick.is_held(RUN) and os.listdir(tmp_path) == [RUN]


def test_of_two_who_saw_that_it_is_free_the_first_gets_it(tmp_path, monkeypatch):
    one, two = worker(tmp_path, "a"), worker(tmp_path, "b")
    monkeypatch.setattr(two, "find_owner", lambda digest: one.acquire(digest) and None)
    assert not two.acquire(RUN) and one.is_held(RUN)


def test_of_many_who_race_for_a_dead_ones_run_one_gets_it(tmp_path):
    for round_ in range(20):
        dead = worker(tmp_path / str(round_))
        dead.owner = dead.owner._replace(start_ticks=-1)
        assert dead.acquire(RUN)
        racers = [worker(tmp_path / str(round_)) for _ in range(8)]
        start, won = threading.Barrier(8), []

        def race(racer, start=start, won=won):
            start.wait()
            won.append(racer.acquire(RUN))

        threads = [threading.Thread(target=race, args=[racer]) for racer in racers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(racer.is_held(RUN) for racer in racers) <= 1
        assert sum(won) >= 1
        assert any(racer.acquire(RUN) for racer in racers)


RACER = """
import sys, pathlib
from fedjax_het.runtime.leases import Leases
folder, log = map(pathlib.Path, sys.argv[1:3])
with Leases(folder) as claims:
    for i in range(200):
        name = f"{i:016x}"
        if claims.acquire(name):
            if not (log / name).exists():
                assert claims.is_held(name)
                (log / name).open("x")
            claims.release(name)
"""


def test_processes_that_race_make_each_run_once(tmp_path):
    """Each file of the log is made exclusively: a second maker would fail."""
    (tmp_path / "log").mkdir()
    words = [sys.executable, "-c", RACER, str(tmp_path / "claims"), str(tmp_path / "log")]
    racers = [subprocess.Popen(words) for _ in range(2)]
    assert [racer.wait(120) for racer in racers] == [0, 0]
    assert len(os.listdir(tmp_path / "log")) == 200
    assert not (tmp_path / "claims").exists()


def test_a_thread_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LEASE_SECONDS", 0.06)
    with Leases(tmp_path) as claims:
        assert claims.acquire(RUN)
        contents = set()
        for _ in range(200):
            contents.add((tmp_path / RUN).read_bytes()[:12])
            time.sleep(0.01)
            if len(contents) > 3:
                break
        assert len(contents) > 3
        assert json.loads((tmp_path / RUN).read_bytes()[13:])[0] == claims.owner.host
    assert not claims._heartbeat_thread.is_alive()


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "claims").touch()
    with Leases(tmp_path / "claims") as claims:
        assert claims.acquire(RUN) and claims.is_held(RUN) and claims.acquire("b" * 16)
    (record,) = caplog.records
    assert "no claims can be written" in record.message


def test_sigterm_ends_the_program_in_order():
    code = (
        "import os, signal\n"
        "from fedjax_het.runtime.leases import exit_on_sigterm\n"
        "try:\n"
        "    with exit_on_sigterm():\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "finally:\n"
        "    print('given back')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 128 + signal.SIGTERM and done.stdout == "given back\n"


def test_anothers_handler_of_sigterm_is_left_alone(monkeypatch):
    found = []
    before = signal.signal(signal.SIGTERM, lambda *_: found.append(True))
    try:
        with module.exit_on_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
        assert found == [True]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_owners_name_is_one_printable_line(tmp_path):
    one, two = worker(tmp_path, "a"), worker(tmp_path, "b")
    one.owner = one.owner._replace(host="x\x1b[31m\ny")
    assert one.acquire(RUN)
    assert two.list_other_owners()[RUN].startswith("x[31my (process ")
