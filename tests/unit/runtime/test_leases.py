"""Leases have one owner at a time and expire by the clock of the watcher."""

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
    """A clock that stands still."""

    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now


def make_worker(folder, now=0.0):
    """Return a worker that renews its leases when it is told to."""
    return Leases(folder, clock=Clock(now))


def watch(watcher, seconds, also=lambda: None):
    """Let the watcher try every 5 seconds; return whether it acquired the lease."""
    for _ in range(int(seconds / 5)):
        watcher._clock.now += 5
        also()
        if watcher.acquire(RUN):
            return True
    return False


def test_lease_has_one_owner_until_release(tmp_path):
    one, two = make_worker(tmp_path / "claims"), make_worker(tmp_path / "claims")
    assert one.acquire(RUN) and one.acquire(RUN) and one.is_held(RUN)
    assert not two.acquire(RUN) and not two.is_held(RUN)
    assert two.list_other_owners() == {RUN: str(one.owner)} and one.list_other_owners() == {}
    two.release(RUN)  # which is not its own
    assert one.is_held(RUN)
    one.release(RUN)
    assert not one.is_held(RUN) and two.list_other_owners() == {} and two.acquire(RUN)
    two.close()
    assert not (tmp_path / "claims").exists()


def test_leases_without_folder(tmp_path):
    with Leases(None) as alone:
        assert alone.acquire(RUN) and alone.is_held(RUN) and alone.list_other_owners() == {}
        alone.release(RUN)


@pytest.mark.parametrize("ahead", [0.0, 3600.0, -3600.0, 1e9])
def test_silent_owner_expires_by_the_watchers_clock(tmp_path, ahead):
    one, two = make_worker(tmp_path), make_worker(tmp_path, now=ahead)
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


def test_suspension_of_the_watcher_is_no_silence(tmp_path):
    one, two = make_worker(tmp_path), make_worker(tmp_path)
    assert one.acquire(RUN) and not two.acquire(RUN)
    two._clock.now += 100 * LEASE_SECONDS  # both machines slept
    assert not two.acquire(RUN)
    one.renew_all()
    assert not watch(two, LEASE_SECONDS / 2)


@pytest.mark.parametrize("content", [b"", b"garbage", b"000000000001 [1]\n", b"\xff" * 40])
def test_invalid_file_expires(tmp_path, content):
    (tmp_path / RUN).write_bytes(content)
    two = make_worker(tmp_path)
    assert two.list_other_owners() == {RUN: "another worker"}
    assert not watch(two, LEASE_SECONDS - 5) and watch(two, 10)


def test_remove_file_puts_a_new_lease_back(tmp_path):
    dead, quick, late = (make_worker(tmp_path) for _ in range(3))
    assert dead.acquire(RUN)
    assert not watch(late, LEASE_SECONDS - 5)
    stale = (tmp_path / RUN).read_bytes()
    assert watch(quick, LEASE_SECONDS + 5)
    assert not late._remove_file(
        tmp_path / RUN, stale
    )  # which it had read before the quick one was there
    assert quick.is_held(RUN) and os.listdir(tmp_path) == [RUN]


def test_acquire_after_another_worker_was_faster(tmp_path, monkeypatch):
    one, two = make_worker(tmp_path), make_worker(tmp_path)
    monkeypatch.setattr(two, "find_owner", lambda digest: one.acquire(digest) and None)
    assert not two.acquire(RUN) and one.is_held(RUN)


def test_one_of_many_threads_acquires_an_expired_lease(tmp_path):
    for round_ in range(20):
        folder = tmp_path / str(round_)
        assert make_worker(folder).acquire(RUN)
        racers = [make_worker(folder) for _ in range(8)]
        for racer in racers:
            assert not watch(racer, LEASE_SECONDS)
            racer._clock.now += 5
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


def test_two_processes_execute_each_run_once(tmp_path):
    """Files of the log are created exclusively, so a second execution would fail."""
    (tmp_path / "log").mkdir()
    words = [sys.executable, "-c", RACER, str(tmp_path / "claims"), str(tmp_path / "log")]
    racers = [subprocess.Popen(words) for _ in range(2)]
    assert [racer.wait(120) for racer in racers] == [0, 0]
    assert len(os.listdir(tmp_path / "log")) == 200
    assert not (tmp_path / "claims").exists()


def test_heartbeat_thread_renews(tmp_path, monkeypatch):
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


def test_unwritable_folder_is_logged_once(tmp_path, caplog):
    (tmp_path / "claims").touch()
    with Leases(tmp_path / "claims") as claims:
        assert claims.acquire(RUN) and claims.is_held(RUN) and claims.acquire("b" * 16)
    (record,) = caplog.records
    assert "leases cannot be written" in record.message


def test_sigterm_exits_in_order():
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


def test_exit_on_sigterm_keeps_other_handlers(monkeypatch):
    actual = []
    before = signal.signal(signal.SIGTERM, lambda *_: actual.append(True))
    try:
        with module.exit_on_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
        assert actual == [True]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_owner_is_one_printable_line(tmp_path):
    one, two = make_worker(tmp_path), make_worker(tmp_path)
    one.owner = one.owner._replace(host="x\x1b[31m\ny")
    assert one.acquire(RUN)
    owner = two.list_other_owners()[RUN]
    assert owner.startswith("x") and " (process " in owner and owner.isprintable()
