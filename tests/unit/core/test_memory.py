"""A process that compiles programs without end, and the memory maps that it may have."""

import gc
import math

import jax
import jax.numpy as jnp
import pytest
from support.data import make_user_dataset

from fedjax_het import RunSpec, simulate
from fedjax_het.core import memory
from fedjax_het.runtime import held_out_eval
from fedjax_het.runtime.build import evict_programs
from fedjax_het.runtime.compiled_programs import build_programs

needs_maps = pytest.mark.skipif(not memory.count_memory_maps(), reason="this system tells no maps")


def run(rounds, **settings):
    settings |= {"model": "mlp", "partition": "iid", "num_clients": 3}
    spec = RunSpec("fedavg", "user", rounds=rounds, **settings)
    return simulate(spec, dataset=make_user_dataset())


@pytest.mark.slow
@needs_maps
def test_programs_are_evicted_near_mmap_limit(monkeypatch):
    run(1, held_out_clients=1)
    caches = build_programs, held_out_eval._build_programs
    gc.collect()
    held = memory.count_memory_maps()
    evict_programs()
    assert all(cache.cache_info().currsize for cache in caches)  # there is room
    monkeypatch.setattr(memory, "read_max_memory_maps", lambda: held)
    evict_programs()
    assert not any(cache.cache_info().currsize for cache in caches)
    assert memory.count_memory_maps() < held


@pytest.mark.slow
def test_run_evicts_programs_first(monkeypatch):
    dropped = []
    monkeypatch.setattr(memory, "is_near_mmap_limit", lambda: True)
    monkeypatch.setattr(jax, "clear_caches", lambda: dropped.append(build_programs.cache_info()))
    run(1)
    assert dropped and dropped[0].currsize == 0


@pytest.mark.slow
def test_evicted_program_is_compiled_again(monkeypatch):
    double = jax.jit(lambda x: 2 * x)
    double(jnp.ones(3))
    monkeypatch.setattr(memory, "read_max_memory_maps", lambda: 1)
    memory.evict_programs_if_needed()
    assert (double(jnp.ones(3)) == 2).all()


def test_no_eviction_without_limit(monkeypatch):
    monkeypatch.setattr(memory, "read_max_memory_maps", lambda: math.inf)
    memory.evict_programs_if_needed(lambda: pytest.fail("there is room"))


@pytest.mark.slow
@needs_maps
def test_number_of_programs_is_bounded(monkeypatch):
    """Every cache that holds a network also holds its programs, about 100 memory maps each."""
    monkeypatch.setattr(memory, "is_near_mmap_limit", lambda: False)
    data, num_maps = make_user_dataset(), []
    for width in range(memory.MAX_CACHED_PROGRAMS + 6):
        options = {"hidden": [3 + width]}
        settings = {"network_options": options, "partition": "iid", "num_clients": 3, "rounds": 1}
        simulate(RunSpec("fedavg", "user", model="mlp", **settings), dataset=data)
        num_maps.append(memory.count_memory_maps())
    gc.collect()
    first, last = num_maps[memory.MAX_CACHED_PROGRAMS - 1], num_maps[-1]
    assert last - first < 0.5 * (first - num_maps[0])
