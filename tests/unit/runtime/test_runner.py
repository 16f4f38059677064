"""Prefetching of inputs, and the length of chunks."""

import threading
import time
from types import SimpleNamespace

import pytest
from support.small_runs import make_spec, run_spec, sweep_specs

from fedjax_het.runtime import checkpointing, group_init, placement, program_memory, runner
from fedjax_het.runtime.input_prefetcher import InputPrefetcher


def make_group_state(total_rounds=10, num_prefetch=2, fails_at=None):
    """Return a state that records calls of its inputs, the calls, and an event they wait for."""
    calls, event = [], threading.Event()

    def build_chunk_inputs(first, count):
        event.wait(10)
        calls.append((first, count, threading.current_thread() is threading.main_thread()))
        if first == fails_at:
            raise MemoryError(f"round {first}")
        return first, count

    limits = SimpleNamespace(num_prefetch=num_prefetch)
    group_state = SimpleNamespace(
        total_rounds=total_rounds, limits=limits, build_chunk_inputs=build_chunk_inputs
    )
    return group_state, calls, event


@pytest.mark.parametrize("num_prefetch", [1, 2])
def test_prefetcher_makes_the_next_inputs_in_a_thread(num_prefetch):
    group_state, calls, event = make_group_state(num_prefetch=num_prefetch)
    event.set()
    with InputPrefetcher(group_state) as prefetcher:
        assert prefetcher.get(0, 4) == (0, 4)  # nothing was there
        prefetcher.prefetch(4, 4)
        assert prefetcher.get(4, 4) == (4, 4)
        prefetcher.prefetch(8, 4)
        assert prefetcher.get(8, 2) == (8, 2)  # the rest
        prefetcher.prefetch(10, 4)
    assert calls == [(0, 4, True), (4, 4, False), (8, 2, False)]


def test_prefetcher_drops_inputs_of_another_length():
    group_state, calls, event = make_group_state(total_rounds=100)
    with InputPrefetcher(group_state) as prefetcher:
        prefetcher.prefetch(0, 4)
        event.set()
        for first in (0, 8, 16):
            assert prefetcher.get(first, 8) == (first, 8)
            if first < 16:
                prefetcher.prefetch(first + 8, 8)
    assert calls.count((24, 8, False)) <= 1 and not [call for call in calls if call[0] > 24]
    assert (16, 8, True) not in calls


def test_prefetcher_raises_errors_of_its_thread():
    group_state, _, event = make_group_state(fails_at=4)
    event.set()
    with InputPrefetcher(group_state) as prefetcher:
        prefetcher.prefetch(0, 4)
        assert prefetcher.get(0, 4) == (0, 4)
        with pytest.raises(MemoryError, match="round 4"):
            prefetcher.get(4, 4)


def test_prefetcher_ends_its_thread():
    group_state, calls, event = make_group_state()
    with pytest.raises(KeyboardInterrupt), InputPrefetcher(group_state) as prefetcher:
        prefetcher.prefetch(0, 4)
        event.set()
        raise KeyboardInterrupt
    assert not [thread for thread in threading.enumerate() if "schedules" in thread.name]
    assert len(calls) <= 2


def test_callbacks_do_not_shorten_chunks(monkeypatch):
    chunks, run_chunk = [], runner._run_chunk

    def record_chunk(group_state, prefetcher, count):
        chunks.append((group_state.rounds_done, count))
        return run_chunk(group_state, prefetcher, count)

    monkeypatch.setattr(runner, "_run_chunk", record_chunk)
    monkeypatch.setattr("fedjax_het.runtime.long_phases.CHUNK_SECONDS", 1e9)
    monkeypatch.setattr(checkpointing, "CHECKPOINT_SECONDS", 1e9)
    with monkeypatch.context() as patch:  # without callbacks no status is built
        patch.setattr("fedjax_het.runtime.callbacks.CallbackRunner._build_status", None)
        run_spec(make_spec(rounds=40, eval_every=2))
    expected = [(0, 1), (1, 16), (17, 16), (33, 7)]
    assert chunks == expected
    run_spec(make_spec(rounds=40, eval_every=2), callbacks=[lambda status: None])
    assert chunks == 2 * expected


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (placement.Planner, "choose_num_lanes"),
        (group_init, "_trace_programs"),
        (program_memory, "compute_compiled_bytes"),
        (runner, "init_states"),
        (runner, "verify_round_program"),
    ],
)
def test_compile_seconds_include(owner, name, monkeypatch):
    function = getattr(owner, name)

    def call_slowly(*args, **kwargs):
        time.sleep(1)
        return function(*args, **kwargs)

    spec = make_spec(rounds=1)
    run_spec(spec)  # what it compiles is in memory afterwards
    fast = run_spec(spec).summary
    monkeypatch.setattr(owner, name, call_slowly)
    slow = run_spec(spec).summary
    assert slow["compile_seconds"] > fast["compile_seconds"] + 0.5
    assert slow["compile_seconds"] <= slow["wall_seconds"] and slow["round_seconds"] < 0.5


def test_runs_in_step_share_compile_seconds():
    for result in sweep_specs([make_spec(rounds=2, seed=seed) for seed in range(4)]):
        summary = result.summary
        parts = ("compile_seconds", "round_seconds", "server_seconds")
        assert summary["made_together"] > 1
        assert sum(summary[name] for name in parts) <= summary["wall_seconds"]
