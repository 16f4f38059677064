"""Compressors against NumPy, their bits by hand, error feedback, and the texts of the setting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.x64 import enable_x64

from fedjax_het import ConfigError, RunSpec
from fedjax_het.compression import (
    COMPRESSORS,
    QSGD,
    Sign,
    TopK,
    Uniform,
    format_compression,
    parse_compression,
)

RNG = np.random.default_rng(0)
TREE = {"b": RNG.normal(size=7), "w": RNG.normal(size=(5, 4))}
KEY = jax.random.key(3)


def as_arrays(tree=TREE):
    return jax.tree.map(jnp.asarray, tree)


def keep_largest(vector, count):
    kept = np.zeros_like(vector)
    positions = np.argsort(-np.abs(vector))[:count]
    kept[positions] = vector[positions]
    return kept


def take_signs(vector):
    return np.where(vector >= 0, 1, -1) * np.abs(vector).sum() / len(vector)


def round_to_steps(vector, bits):
    largest = np.abs(vector).max()
    values = np.linspace(-largest, largest, 2 ** (bits - 1) * 2 - 1)
    return values[np.abs(vector[:, None] - values).argmin(1)]


@pytest.mark.parametrize(
    ("make", "oracle"),
    [
        (
            lambda scope: TopK(fraction=0.3, scope=scope),
            lambda v: keep_largest(v, {27: 8, 7: 2, 20: 6}[len(v)]),
        ),
        (lambda scope: Sign(scope=scope), take_signs),
        (lambda scope: Uniform(bits=4, scope=scope), lambda v: round_to_steps(v, 4)),
    ],
    ids=["topk", "sign", "uniform"],
)
@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_decoded_values(make, oracle, scope):
    with enable_x64():
        decoded = jax.tree.map(np.asarray, make(scope).compress(as_arrays(), KEY))
    if scope == "model":
        flat = oracle(np.concatenate([TREE["b"], TREE["w"].ravel()]))
        expected = {"b": flat[:7], "w": flat[7:].reshape(5, 4)}
    else:
        expected = {name: oracle(a.ravel()).reshape(a.shape) for name, a in TREE.items()}
    for name, leaf in decoded.items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-12, atol=1e-12, err_msg=name)


def test_qsgd_is_unbiased_with_the_variance_of_random_rounding():
    vector, levels, draws = jnp.asarray(TREE["b"], jnp.float32), 3, 20_000
    keys = jax.random.split(KEY, draws)
    decoded = np.asarray(jax.vmap(lambda key: QSGD(levels=levels).compress(vector, key))(keys))
    norm = np.linalg.norm(TREE["b"])
    steps = decoded * levels / norm
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-5)
    rest = np.abs(TREE["b"]) * levels / norm % 1
    variance = (norm / levels) ** 2 * rest * (1 - rest)
    assert (np.abs(decoded.mean(0) - TREE["b"]) < 5 * np.sqrt(variance / draws) + 1e-6).all()
    np.testing.assert_allclose(decoded.var(0), variance, rtol=0.1)
    assert len(np.unique(decoded, axis=0)) > 10


def test_draws_of_tensors_are_independent():
    tree = {"a": jnp.ones(1000), "b": jnp.ones(1000)}
    decoded = QSGD(levels=1).compress(tree, KEY)
    assert 0.02 < np.mean(np.asarray(decoded["a"]) != np.asarray(decoded["b"])) < 0.2


SHAPES = {
    "b": jax.ShapeDtypeStruct((7,), jnp.float32),
    "w": jax.ShapeDtypeStruct((5, 4), jnp.float32),
}
BITS = {
    # round(0.1 * 27) = 3 entries of 32 bits, with positions of 5 bits
    "topk:fraction=0.1": 3 * (32 + 5),
    # 1 entry of 7 with 3 bits, 2 of 20 with 5 bits
    "topk:fraction=0.1,scope=tensor": 32 + 3 + 2 * (32 + 5),
    "topk:fraction=1": 27 * 32,
    "topk:fraction=0.9": 27 * 32,  # 24 * 37 bits are more than all entries as they are
    # -16 to 16 are 33 values: 6 bits
    "qsgd": 2 * 32 + 27 * 6,
    "qsgd:levels=1,scope=model": 32 + 27 * 2,
    "sign": 2 * 32 + 27,
    "uniform": 2 * 32 + 27 * 8,
    "uniform:bits=4,scope=model": 32 + 27 * 4,
}


@pytest.mark.parametrize("setting", BITS)
def test_bits_of_an_upload(setting):
    compressor = parse_compression(setting)
    assert compressor is not None
    assert compressor.count_bytes(SHAPES) == int(np.ceil(BITS[setting] / 8))


@pytest.mark.parametrize("name", COMPRESSORS)
def test_error_feedback_loses_nothing(name):
    compressor = COMPRESSORS[name].make(error_feedback=True)
    change = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), TREE)
    memory = jax.tree.map(lambda a: a[::-1] / 3, change)
    decoded, new_memory = compressor.compress_with_memory(change, memory, KEY)
    for parts in zip(*map(jax.tree.leaves, (decoded, new_memory, change, memory)), strict=True):
        sent, lost, new, old = map(np.asarray, parts)
        np.testing.assert_allclose(sent + lost, new + old, rtol=1e-6, atol=1e-6)
        assert np.abs(lost).max() > 1e-4


@pytest.mark.parametrize("name", COMPRESSORS)
def test_zero_and_empty_tensors(name):
    tree = {"empty": jnp.zeros((0, 3)), "zero": jnp.zeros(4)}
    for scope in ("model", "tensor"):
        decoded = COMPRESSORS[name].make(scope=scope).compress(tree, KEY)
        np.testing.assert_array_equal(decoded["zero"], np.zeros(4))
        assert decoded["empty"].shape == (0, 3)


def test_nonfinite_changes_stay_nonfinite():
    for kind in COMPRESSORS.values():
        for scope in ("model", "tensor"):
            decoded = kind.make(scope=scope).compress(jnp.array([1.0, jnp.nan, 2.0]), KEY)
            assert not np.isfinite(decoded).all(), kind.name


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("topk", "topk:fraction=0.01"),
        ("topk:error_feedback=true,fraction=0.1", "topk:fraction=0.1"),
        ("qsgd:scope=model", "qsgd:levels=16,scope=model"),
        ("sign:error_feedback=false", "sign:error_feedback=false"),
        ("sign", "sign"),
        ("none", None),
        (None, None),
        (Uniform(bits=4), "uniform:bits=4"),
    ],
)
def test_canonical_text(text, canonical):
    spec = RunSpec(model="mlp", compression=text).resolved()
    assert spec.compression == canonical
    assert format_compression(parse_compression(canonical)) == canonical
    assert spec.digest() == RunSpec(model="mlp", compression=canonical).resolved().digest()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topkk", "compression = 'topkk' is unknown: did you mean 'topk'"),
        ("topk:share=0.1", "compression topk = 'share' is unknown"),
        ("topk:fraction=0", r"compression topk:fraction = 0: expected a number in \(0, 1\]"),
        ("topk:fraction=0.1,0.2", r"compression topk:fraction = \[0.1, 0.2\]: expected one value"),
        ("topk:fraction", "compression = 'topk:fraction': expected topk:field=value"),
        ("none:bits=8", "compression = 'none:bits=8': expected none without fields"),
        (8, "compression = 8: expected one text such as"),
    ],
)
def test_wrong_compression_is_one_line(text, message):
    with pytest.raises(ConfigError, match=message) as raised:
        RunSpec(model="mlp", compression=text)
    assert "\n" not in str(raised.value)
