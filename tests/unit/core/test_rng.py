"""The tree of keys: host generators equal NumPy's, and a round draws once per key."""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import primitives
from support.algorithm_builders import default_hyper_parameters, make_builder
from support.markers import method_cases
from support.small_federation import make_small_federation, round_key
from support.small_runs import FAST_OPTIONS

from fedjax_het.algorithms import get_algorithm_spec
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.core.rng import Stream, iter_host_rngs
from fedjax_het.core.work_items import ClientWork
from fedjax_het.data import partition_from_clients
from fedjax_het.nn import make_model

# FSL over FedGen once had one key for two.
COMPOSED = [("fsl", "fedgen"), ("fsl_p", "fedgen"), ("data_sharing", "fedmix")]
# Where the same is meant to be drawn again, from one place of the code.
MEANT = {
    "client_condensation.py:_perturb_variables": "all classes of a client condense with one network",
    "unrolling.py": "the derivative takes the step's minibatch and augmentation again",
    "augment.py": "one transformation for real and synthetic images; and the derivative's again",
}
PACKAGE = "fedjax_het"


@pytest.fixture
def drawn(monkeypatch):
    """{key as bytes: places of the code} of all that is drawn or split while jit is off."""
    actual = {}

    def recording(primitive):
        usual = primitive.impl

        def impl(keys, **params):
            for row in np.asarray(jax.random.key_data(keys)).reshape(-1, 2):
                actual.setdefault(row.tobytes(), []).append(_places())
            return usual(keys, **params)

        monkeypatch.setattr(primitive, "impl", impl)

    for primitive in (primitives.random_bits_p, primitives.random_split_p):
        recording(primitive)
    return actual


def federation_of(name, base=None):
    options = {**FAST_OPTIONS.get(name, {}), **({"base": base} if base else {})}
    if base:
        options |= FAST_OPTIONS.get(base, {})
    entry = get_algorithm_spec(name, options)
    test_model = (entry.base or entry).evaluated_models[0]
    hp = {"local_lr": 0.1, **default_hyper_parameters(entry, options)}
    model = make_model("mlp", (2, 2, 1), 3)
    arguments = {"hp": hp, "model": model, "sizes": (5, 3, 4), "client_test_model": test_model}
    return make_small_federation(make_builder(entry, options), **arguments)


def _places():
    """The package's functions that are being run, the innermost first."""
    files = ((Path(frame.filename), frame.function) for frame in inspect.stack(0))
    return [f"{file.name}:{name}" for file, name in files if PACKAGE in file.parts]


def repeated(drawn):
    """The places that share a key, but for those that are meant to."""

    def is_meant(draws):
        return any(
            all(any(place.startswith(meant) for place in places) for places in draws)
            for meant in MEANT
        )

    return [draws for draws in drawn.values() if len(draws) > 1 and not is_meant(draws)]


def one_round(federation, drawn):
    """A round, and what is done between rounds."""
    state = federation.initial_state()
    with jax.disable_jit():
        drawn.clear()
        state, _ = federation.algorithm.round(
            federation.hp, state, round_key(0), federation.cohort(0)
        )
        for number, work in enumerate(federation.algorithm.server_stages):
            key = jax.random.fold_in(jax.random.key(5), number)
            state = work.advance(federation.hp, state, key, jnp.int32(2), federation.server)


@pytest.mark.parametrize("name", method_cases(quick=["fedavg"]))
def test_round_draws_once_per_key(name, drawn):
    one_round(federation_of(name), drawn)
    assert not repeated(drawn)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "base"), COMPOSED)
def test_wrapped_round_draws_once_per_key(name, base, drawn):
    one_round(federation_of(name, base), drawn)
    assert drawn and not repeated(drawn)


@pytest.mark.slow
def test_dropout_draws_once_per_key(drawn):
    data = np.zeros((8, 4, 4, 1), np.float32), np.zeros(8, np.int32)
    arguments = {"sizes": (5, 3), "data": data, "model": make_model("fsl_cnn", (4, 4, 1), 3)}
    one_round(make_small_federation(fedavg, hp={"local_lr": 0.1}, **arguments), drawn)
    assert len(drawn) > 3 and not repeated(drawn)


def test_collector_finds_repeated_key(drawn):
    key = jax.random.key(0)
    with jax.disable_jit():
        jax.random.normal(key, (3,)), jax.random.permutation(key, 4)
        jax.random.split(jax.random.key(1))
    assert len(repeated(drawn)) == 1 and len(drawn) >= 3


WORD = st.integers(0, 2**32 - 1)
LARGE = st.one_of(st.integers(0, 3), WORD, st.integers(2**32 - 1, 2**130))
IDS = st.lists(WORD, min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(LARGE, st.lists(LARGE, max_size=4), IDS, st.lists(LARGE, max_size=2))
def test_host_rngs_equal_default_rng(seed, before, ids, after):
    """The pool has room for more words and for fewer; some numbers have several words."""
    many = iter_host_rngs(seed, Stream.BATCHES, *before, np.array(ids), *after)
    for i, mine in zip(ids, many, strict=True):
        theirs = np.random.default_rng([seed, 3, *before, i, *after])
        assert mine.bit_generator.state == theirs.bit_generator.state
        assert np.array_equal(mine.permutation(50), theirs.permutation(50))
        assert mine.random(dtype=np.float32) == theirs.random(dtype=np.float32)  # half a word left


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("steps", [None, 2, 0])
@pytest.mark.parametrize("stream", [Stream.BATCHES, Stream.TUNING])
def test_batches_equal_loop_over_clients(passes, steps, stream):
    sizes, rng = (0, 1, 5, 8, 9, 23), np.random.default_rng(1)
    held = [rng.permutation(100)[:size] for size in sizes]
    units = ClientWork(partition_from_clients(held), passes, 4, max_num_steps=steps, stream=stream)
    chosen = np.array([5, 0, 2, 3, 1, 4])
    expected, expected_sizes = [], []
    for k in chosen:
        mine, rng = np.sort(held[k]), np.random.default_rng([9, stream, 2, k])
        batches = []
        for _ in range(passes):
            order = rng.permutation(mine)
            batches += [order[first : first + 4] for first in range(0, len(order), 4)]
        batches = batches if steps is None else batches[:steps]
        expected_sizes += [len(batch) for batch in batches]
        # Filled up with the pass's own, from its first on.
        expected += [set(batch.tolist()) for batch in batches]
    actual, found_sizes = units.draw_batches(9, 2, chosen)
    assert found_sizes.tolist() == expected_sizes and actual.shape == (len(expected), 4)
    for row, size, wanted in zip(actual, found_sizes, expected, strict=True):
        assert set(row[:size].tolist()) == wanted
    alone = [units.draw_batches(9, 2, np.array([k])) for k in chosen]
    assert np.array_equal(actual, np.concatenate([batches for batches, _ in alone]))
