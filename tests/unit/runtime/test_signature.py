"""Signatures: runs with equal static choices share objects, and dropped caches are empty."""

import functools

import jax
import optax
import pytest
from support.data import make_user_dataset

from fedjax_het import RunSpec
from fedjax_het.core import memory
from fedjax_het.core.optimizers import OPTIMIZERS
from fedjax_het.runtime import held_out_eval, signature
from fedjax_het.runtime.build import evict_programs
from fedjax_het.runtime.signature import build_signature


def build(optimizer=None):
    name = "sgd" if optimizer is None else "user"
    spec = RunSpec("fedavg", "user", model="mlp", num_clients=3, local_optimizer=name)
    return build_signature(spec.resolved(), make_user_dataset(), optimizer=optimizer)


def test_equal_choices_give_equal_signatures_with_one_network():
    first, second = build(), build()
    assert first == second and first.network is second.network
    assert first.training.task.model is second.training.task.model
    optimizer = optax.sgd(0.1)
    assert build(optimizer) == build(optimizer) != build(optax.sgd(0.1))


def test_another_optimizer_of_the_same_name_is_another_signature(monkeypatch):
    first = build()
    entry = OPTIMIZERS["sgd"]
    other = entry._replace(make=lambda *args, **kw: entry.make(*args, **kw))
    monkeypatch.setitem(OPTIMIZERS, "sgd", other)
    assert build() != first


@pytest.mark.slow
def test_eviction_empties_all_caches(monkeypatch):
    build_held_out = functools.lru_cache(lambda number: number)
    build_held_out(1)
    monkeypatch.setattr(held_out_eval, "_build_programs", build_held_out)
    signature.flops_per_sample(build())
    caches = (
        *(signature._make_network, signature._adapt_network, signature.flops_per_sample),
        build_held_out,
    )
    assert all(cache.cache_info().currsize for cache in caches)
    monkeypatch.setattr(memory, "is_near_mmap_limit", lambda: True)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    other_cache = functools.lru_cache(lambda: None)  # keeps the programs of other tests
    monkeypatch.setattr("fedjax_het.runtime.build.build_programs", other_cache)
    evict_programs()
    assert not any(cache.cache_info().currsize for cache in caches)
