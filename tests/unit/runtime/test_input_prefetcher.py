"""Inputs of the next calls are made by a thread, which keeps to what will be called."""

import threading
from types import SimpleNamespace

import pytest

from fedjax_het.runtime.runner import InputPrefetcher


def runs_that_tell(rounds=10, ahead=2, fails_at=None):
    made, gate = [], threading.Event()

    def call(first, count):
        gate.wait(10)
        made.append((first, count, threading.current_thread() is threading.main_thread()))
        if first == fails_at:
            raise MemoryError(f"round {first}")
        return first, count

    runs = SimpleNamespace(
        total_rounds=rounds, limits=SimpleNamespace(num_prefetch=ahead), build_chunk_inputs=call
    )
    return runs, made, gate


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_calls_are_made_in_a_thread(depth):
    runs, made, gate = runs_that_tell(ahead=depth)
    gate.set()
    with InputPrefetcher(runs) as ahead:
        assert ahead.get(0, 4) == (0, 4)  # nothing was there
        ahead.prefetch(4, 4)
        assert ahead.get(4, 4) == (4, 4)
        ahead.prefetch(8, 4)
        assert ahead.get(8, 2) == (8, 2)  # what is left
        ahead.prefetch(10, 4)
    in_thread = [(4, 4, False), (8, 2, False)]
    assert made == [(0, 4, True), *in_thread]


def test_another_length_drops_what_was_made():
    runs, made, gate = runs_that_tell(rounds=100)
    with InputPrefetcher(runs) as ahead:
        ahead.prefetch(0, 4)
        gate.set()
        assert ahead.get(0, 8) == (0, 8)
        ahead.prefetch(8, 8)
        assert ahead.get(8, 8) == (8, 8)
        ahead.prefetch(16, 8)
        assert ahead.get(16, 8) == (16, 8)
    assert made.count((24, 8, False)) <= 1 and not [each for each in made if each[0] > 24]
    assert (16, 8, True) not in made


def test_what_fails_in_the_thread_fails_where_it_is_taken():
    runs, _, gate = runs_that_tell(fails_at=4)
    gate.set()
    with InputPrefetcher(runs) as ahead:
        ahead.prefetch(0, 4)
        assert ahead.get(0, 4) == (0, 4)
        with pytest.raises(MemoryError, match="round 4"):
            ahead.get(4, 4)


def test_its_thread_ends_with_it():
    runs, made, gate = runs_that_tell()
    with pytest.raises(KeyboardInterrupt), InputPrefetcher(runs) as ahead:
        ahead.prefetch(0, 4)
        gate.set()
        raise KeyboardInterrupt
    assert not [each for each in threading.enumerate() if "schedules" in each.name]
    assert len(made) <= 2
