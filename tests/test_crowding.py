"""A process that compiles programs without end, and the memory maps that it may have."""

import gc

import jax
import jax.numpy as jnp
import pytest
from support.data import user_dataset

from fedjax_het import RunSpec, simulate
from fedjax_het.engine import crowding
from fedjax_het.running.programs import make_room_for_programs, program_of

needs_maps = pytest.mark.skipif(not crowding.maps_in_use(), reason="this system tells no maps")


def run(rounds):
    spec = RunSpec("fedavg", "user", model="mlp", partition="iid", num_clients=3, rounds=rounds)
    return simulate(spec, dataset=user_dataset())


@pytest.mark.slow
@needs_maps
def test_programs_are_let_go_where_it_is_crowded(monkeypatch):
    run(1)
    gc.collect()
    held = crowding.maps_in_use()
    make_room_for_programs()
    assert program_of.cache_info().currsize > 0  # there is room
    monkeypatch.setattr(crowding, "most_maps", lambda: held)
    make_room_for_programs()
    assert program_of.cache_info().currsize == 0
    assert crowding.maps_in_use() < held


@pytest.mark.slow
def test_a_run_makes_room_before_its_programs(monkeypatch):
    dropped = []
    monkeypatch.setattr(crowding, "is_crowded", lambda: True)
    monkeypatch.setattr(jax, "clear_caches", lambda: dropped.append(program_of.cache_info()))
    run(1)
    assert dropped and dropped[0].currsize == 0


def test_what_was_let_go_is_compiled_again(monkeypatch):
    double = jax.jit(lambda x: 2 * x)
    double(jnp.ones(3))
    monkeypatch.setattr(crowding, "most_maps", lambda: 1)
    crowding.make_room()
    assert (double(jnp.ones(3)) == 2).all()


def test_without_a_limit_nothing_is_let_go(monkeypatch):
    monkeypatch.setattr(crowding, "most_maps", lambda: None)
    crowding.make_room(lambda: pytest.fail("there is room"))
