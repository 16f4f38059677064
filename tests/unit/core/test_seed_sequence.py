"""Generators of many nodes at once are those of one after the other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_het.core.rng import Stream, iter_host_rngs
from fedjax_het.core.work_items import ClientWork
from fedjax_het.data import partition_from_clients

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
def test_minibatches_are_those_of_a_loop_over_clients(passes, steps, stream):
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
    found, found_sizes = units.draw_batches(9, 2, chosen)
    assert found_sizes.tolist() == expected_sizes and found.shape == (len(expected), 4)
    for row, size, wanted in zip(found, found_sizes, expected, strict=True):
        assert set(row[:size].tolist()) == wanted
    alone = [units.draw_batches(9, 2, np.array([k])) for k in chosen]
    assert np.array_equal(found, np.concatenate([batches for batches, _ in alone]))
