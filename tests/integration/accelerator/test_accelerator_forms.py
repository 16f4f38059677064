"""What an accelerator is given in the place of a CPU's form comes to the same."""

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.small_runs import make_spec, run_spec

from fedjax_het.condensation import augment as augmentation
from fedjax_het.core import client_rows, device_exchange
from fedjax_het.core.evaluation import CPU_BATCH_SIZE, evaluate, place_evaluation_set
from fedjax_het.core.execution_plan import ExecutionPlan, make_execution_plan
from fedjax_het.core.task import Task
from fedjax_het.nn import make_model
from fedjax_het.runtime.compiled_programs import build_programs
from fedjax_het.tasks import classification as task_module


@pytest.fixture
def on_gpu():
    """Plans take their devices for GPUs; programs are still a CPU's."""
    build_programs.cache_clear()
    with mock.patch.object(ExecutionPlan, "platform", "gpu"):
        yield
    build_programs.cache_clear()


def _put_back(plan, states, rows):
    new = jax.tree.map(lambda a: -jnp.arange(rows.size * a[0].size, dtype=a.dtype) - 1, states)
    new = jax.tree.map(lambda n, a: n.reshape(*rows.shape, *a.shape[1:]), new, states)
    return jax.jit(lambda *args: client_rows.scatter_client_states(plan, *args))(states, new, rows)


def test_scatter_client_states(request):
    states = {"a": jnp.arange(15.0).reshape(5, 3), "b": jnp.arange(5), "none": ()}
    rows = jnp.array([[[4, 5], [0, 5]], [[5, 2], [7, 5]]])  # from 5 on they are unused
    plan = make_execution_plan(2, mesh_axis=None, blocks=2)
    one_by_one = _put_back(plan, states, rows)
    request.getfixturevalue("on_gpu")
    text = jax.jit(lambda *args: client_rows.scatter_client_states(plan, *args)).lower(
        states["a"], jnp.zeros((2, 2, 2, 3)), rows
    )
    assert "while" not in text.as_text() and "scatter" in text.as_text()
    at_once = _put_back(plan, states, rows)
    jax.tree.map(np.testing.assert_array_equal, at_once, one_by_one)
    np.testing.assert_array_equal(at_once["b"], [-3, 1, -6, 3, -1])


def test_evaluation_batches_on_accelerator(request):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (1100, 6, 6, 1), np.uint8)
    labels = rng.integers(0, 3, 1100).astype(np.int32)
    model = make_model("mlp", (6, 6, 1), 3, hidden=[5])
    task, variables = Task(model, (0.5,), (0.5,)), model.init(jax.random.key(0))
    plan = make_execution_plan(1, mesh_axis=None, blocks=2)
    few = place_evaluation_set(plan, images, labels)
    in_turn = evaluate(task, plan, variables, few)
    request.getfixturevalue("on_gpu")
    many = place_evaluation_set(plan, images, labels)
    assert few.labels.shape == (2, 3, CPU_BATCH_SIZE) and many.labels.shape == (2, 1, 550)
    at_once = evaluate(task, plan, variables, many)
    assert at_once.accuracy == in_turn.accuracy
    np.testing.assert_allclose(at_once.loss, in_turn.loss, rtol=1e-6)


def test_evaluation_batches_fit_memory(on_gpu):
    plan = make_execution_plan(1, devices=1)
    images = np.zeros((10_000, 32, 32, 3), np.uint8)
    sizes = {}
    for gigabytes in (0.1, 16, 140):
        known = mock.patch(
            "fedjax_het.core.evaluation.memory_limit_bytes", lambda _, g=gigabytes: int(g * 1e9)
        )
        with known:
            labels = place_evaluation_set(plan, images, np.zeros(len(images), np.int32)).labels
        sizes[gigabytes] = labels.shape[1:]
        assert labels.size - len(images) < labels.shape[1]  # hardly any padding
    assert sizes == {0.1: (40, 250), 16: (11, 910), 140: (2, 5000)}


def _elsewhere():
    """What is traced inside is as it is for other platforms than CPUs."""

    def chosen(*args, cpu, default):
        return default(*args)

    return mock.patch.object(jax.lax, "platform_dependent", chosen)


def _augmented(key, images):
    return augmentation.augment(key, images, strategy=augmentation.DSA_STRATEGY)


def test_augmentation_without_host_branch():
    images = jax.random.normal(jax.random.key(1), (3, 8, 8, 2))

    def gradient(key, images):
        return jax.grad(lambda images: (_augmented(key, images) ** 2).sum())(images)

    def compiled():
        return jax.jit(lambda *args: gradient(*args)).lower(key, images).compile().as_text()

    key = jax.random.key(0)
    assert " conditional(" in compiled()
    with _elsewhere():
        assert " conditional(" not in compiled()


def test_augmentation_family():
    images = jax.random.normal(jax.random.key(1), (3, 8, 8, 2))
    keys = [jax.random.key(seed) for seed in range(12)]
    by_branch = [jax.jit(_augmented)(key, images) for key in keys]

    with _elsewhere():
        by_choice = [jax.jit(lambda *args: _augmented(*args))(key, images) for key in keys]
    for one, other in zip(by_branch, by_choice, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert len({float(a[0, 3, 3, 0]) for a in by_branch}) > 4  # several families were drawn


def test_loss_by_selection_and_by_indexing():
    logits = jnp.concatenate([jax.random.normal(jax.random.key(0), (6, 4)), jnp.eye(4) * 80])
    labels = jnp.array([0, 1, 2, 3, 3, 1, 0, 0, 1, 2])

    def of(losses, logits):
        return jax.value_and_grad(lambda logits: (losses(logits, labels) ** 2).sum())(logits)

    picked, chosen = (
        of(losses, logits)
        for losses in (task_module._cross_entropy_by_gather, task_module._cross_entropy_by_mask)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), picked, chosen
    )
    # A class that cannot be costs nothing where it is not the label, and all where it is.
    logits = logits.at[:, 0].set(-jnp.inf)
    losses = task_module._cross_entropy_by_mask(logits, labels)
    np.testing.assert_array_equal(jnp.isfinite(losses), labels != 0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["apfl"])
def test_run_with_accelerator_forms(method, request):
    asked = make_spec(method, rounds=3, participation=0.4, local_epochs=2)
    on_cpu = run_spec(asked, lanes=2, devices=1)
    request.getfixturevalue("on_gpu")
    elsewhere = run_spec(asked, lanes=2, devices=1)
    for name, values in on_cpu.metrics.items():
        np.testing.assert_allclose(values, elsewhere.metrics[name], rtol=1e-5, err_msg=name)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    jax.tree.map(close, on_cpu.state, elsewhere.state)


def test_collectives_of_upload(request):
    plan = make_execution_plan(1, devices=2)
    sums, rows = jnp.ones(1000), jnp.ones((1, 1, 3))

    def lowered():
        mapped = jax.shard_map(
            lambda sums, rows: device_exchange.exchange_between_devices(
                plan, {"a": sums, "b": 2 * sums}, rows
            ),
            mesh=plan.mesh,
            in_specs=(P(), P()),
            out_specs=P(),
            check_vma=False,
        )
        return jax.jit(mapped).lower(sums, rows).as_text()

    assert "all_reduce" not in lowered() and "tensor<2x2003x" in lowered()
    request.getfixturevalue("on_gpu")
    text = lowered()
    gathered = [line for line in text.splitlines() if "stablehlo.all_gather" in line]
    assert "all_reduce" in text and len(gathered) == 1 and "1000" not in gathered[0]
