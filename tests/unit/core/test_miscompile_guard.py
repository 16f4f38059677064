"""The guard against a jaxlib whose compiled programs return wrong numbers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.x64 import enable_x64

from fedjax_het.core import miscompile_guard
from fedjax_het.core.miscompile_guard import VerifiedJit, compute_relative_error

pytestmark = pytest.mark.usefixtures("private_cache")  # results of earlier checks do not count

ROWS = 40_961  # jax-ml/jax#39103: on jaxlib 0.10.2, a fifth of these come out wrong


def squared_norms(vectors):
    matrix = jnp.eye(3)
    return jax.vmap(lambda v: ((matrix @ v) ** 2).sum())(vectors)


def vectors():
    return jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32))


def expected(x):
    return (np.asarray(x, np.float64) ** 2).sum(1)


def test_verify_replaces_known_wrong_program(caplog):
    x, program = vectors(), VerifiedJit(squared_norms, name="squared norms")
    wrong_before = compute_relative_error(program(x), expected(x)) > 0.01
    program.verify((x,))
    assert compute_relative_error(program(x), expected(x)) < 1e-5
    assert program.is_unfused == wrong_before == ("squared norms" in caplog.text)
    if miscompile_guard.is_affected_platform():
        assert wrong_before, "the known bug does not show: is the guard still needed?"


def test_has_matmul_reduce_fusion():
    def suspected(function):
        compiled = jax.jit(function).lower(vectors()).compile().as_text()
        return miscompile_guard.has_matmul_reduce_fusion(compiled)

    matrix = jnp.eye(3)
    if miscompile_guard.is_affected_platform():  # others may fuse other things, or nothing
        assert suspected(squared_norms)
    assert not suspected(lambda x: (x**2).sum(1))
    assert not suspected(lambda x: x @ matrix)
    assert not suspected(lambda x: jnp.sin(x).sum(0) @ matrix)


def test_verify_skips_programs_without_fusion(monkeypatch):
    monkeypatch.setattr(miscompile_guard, "is_affected_platform", lambda: True)
    monkeypatch.setattr(
        miscompile_guard, "compute_relative_error", lambda *args: pytest.fail("compared")
    )
    program = VerifiedJit(lambda x: (x**2).sum(1))
    program.verify((vectors(),))
    assert not program.is_unfused


@pytest.fixture
def all_suspected(monkeypatch):
    monkeypatch.setattr(miscompile_guard, "is_affected_platform", lambda: True)
    monkeypatch.setattr(miscompile_guard, "has_matmul_reduce_fusion", lambda compiled: True)
    monkeypatch.setattr(
        miscompile_guard, "UNFUSED_COMPILER_OPTIONS", {}
    )  # an option that other backends may not know


@pytest.mark.slow
def test_run_verifies_its_programs(monkeypatch):
    from support.data import make_user_dataset

    from fedjax_het import RunSpec, simulate

    seen = []
    monkeypatch.setattr(
        VerifiedJit, "verify", lambda self, example, part="": seen.append((self._name, part))
    )
    options = {"preset": "code", "num_iterations": 1, "inner_steps": 1, "trajectory_rounds": 2}
    options["segment_length"] = 1
    spec = RunSpec(
        "dynafed", "user", model="mlp", partition="iid", num_clients=3, rounds=3, options=options
    )
    simulate(spec, dataset=make_user_dataset())
    assert seen == [
        ("dynafed rounds", "rounds"),
        ("synthesis", ""),
        ("dynafed rounds", "synthesis"),
    ]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_verify_replaces_wrong_program(all_suspected, is_wrong):
    program, x = VerifiedJit(lambda x: x * 2, donate_argnums=0), jnp.linspace(0.0, 1.0, 9)
    if is_wrong:
        program.program = jax.jit(lambda x: x * 2 + (x > 0.5))  # as a wrong fusion would
    expected = 2 * np.asarray(x)
    program.verify((x,))
    assert program.is_unfused == is_wrong
    np.testing.assert_array_equal(program(x), expected)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_verify_accepts_a_zero_that_is_rounding(all_suspected, is_wrong):
    """A gradient that is zero differs by 100 % between two right programs."""

    def compute(x, order=1, offset=0.0):
        return {"zero": (1.1 * x)[:, ::order].sum(1) - 1.1 * x.sum(1) + offset, "sum": x.sum(1)}

    x = jnp.asarray(np.random.default_rng(0).normal(size=(200, 500)).astype(np.float32))
    program = VerifiedJit(compute)
    program.program = jax.jit(partial(compute, order=-1, offset=0.01 * is_wrong))
    error = compute_relative_error(program(x), program._unfused_program(x))
    assert error > 0.1
    program.verify((x,))
    assert program.is_unfused == is_wrong


@pytest.mark.slow
@pytest.mark.skipif(not miscompile_guard.is_affected_platform(), reason="no guard")
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_guard_accepts_the_attention_of_a_transformer(optimizer):
    """The gradient of the bias of the keys is zero: the softmax does not change with it."""
    from fedjax_het import RunSpec, simulate

    options = {"width": 16, "layers": 1}
    settings = {"model": "transformer", "num_clients": 2, "rounds": 1, "local_epochs": 1}
    settings |= {"local_optimizer": optimizer, "network_options": options}
    result = simulate(RunSpec(dataset="cylinder_bell_funnel", **settings))
    assert not result.summary["unfused"]


def test_verify_stores_right_programs(monkeypatch, all_suspected):
    compared = []
    x = jnp.arange(5.0)

    def verify(function, part="", error=0.0):
        monkeypatch.setattr(
            miscompile_guard, "compute_relative_error", lambda *args: compared.append(1) or error
        )
        VerifiedJit(function).verify((x,), part)
        return len(compared)

    assert verify(lambda x: x**2) == 1
    assert verify(lambda x: x**2) == 1  # the same program of another start
    assert verify(lambda x: x**2, "tuning") == 2
    assert verify(lambda x: x**3) == 3
    assert verify(lambda x: x**4, error=1.0) == 5  # a second time with rounded arguments
    assert verify(lambda x: x**4, error=1.0) == 7  # a wrong program is compared again
    monkeypatch.setenv("XLA_FLAGS", "--another")
    assert verify(lambda x: x**2) == 8


def test_verify_repeats_for_switches_of_jax(monkeypatch, all_suspected):
    compared, program = [], VerifiedJit(lambda x: x @ x)
    monkeypatch.setattr(
        miscompile_guard, "compute_relative_error", lambda *args: compared.append(1) or 0.0
    )
    for _ in range(2):
        for enabled, matmul_precision in ((False, "highest"), (True, "highest"), (False, None)):
            with enable_x64(enabled), jax.default_matmul_precision(matmul_precision):
                program.verify((jnp.asarray(np.eye(3)),))
    assert len(compared) == 3


def test_relative_error_ignores_idle_rows():
    rng = np.random.default_rng(0)
    base = rng.normal(size=(50, 4, 3))
    want, got = base.copy(), base.copy()
    want[[3, 7]] += 0.1
    got[[3, 7]] += 0.1
    got[7, 0, 0] += 0.01
    expected = 0.01 / np.sqrt(2 * 12 * 0.1**2)
    assert compute_relative_error(got, want, base) == pytest.approx(expected, rel=1e-3)
    moved = got.copy()
    moved[20] += 1.0  # where nothing should have happened
    assert compute_relative_error(moved, want, base) > 1


def test_relative_error_compares_changes():
    base = {"w": np.full(1000, 10.0)}
    want = {"w": base["w"] + 1e-3}
    slightly_off = {"w": want["w"] + 1e-7}
    one_wrong = {"w": want["w"].copy()}
    one_wrong["w"][3] -= 1e-3
    assert compute_relative_error(slightly_off, want, base) < 1e-3
    assert compute_relative_error(one_wrong, want, base) > 0.02
    assert compute_relative_error(one_wrong, want) < 1e-5


def test_relative_error_of_nan():
    assert compute_relative_error(np.array([np.nan, 1.0]), np.array([0.0, 1.0])) == np.inf
    assert compute_relative_error(np.array([np.nan, 1.0]), np.array([np.nan, 1.0])) == 0
