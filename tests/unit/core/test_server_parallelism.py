"""The server's work shared by the devices of a federation: the same numbers, a part of the work."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from chex import assert_trees_all_close
from support.algorithm_builders import fast_registered_builder
from support.markers import slow_case
from support.small_federation import make_small_federation
from support.small_runs import (
    KilledError,
    assert_results_equal,
    make_killing_callback,
    make_spec,
    run_spec,
)
from support.x64 import enable_x64

from fedjax_het import ConfigError, Placement
from fedjax_het.condensation import SyntheticData, SyntheticTask, fine_tune
from fedjax_het.condensation.augment import augment
from fedjax_het.condensation.synthetic_pool import (
    PoolTask,
    SoftLabelTargets,
    SyntheticPool,
    make_decayed_sgd,
    train_on_synthetic_pool,
)
from fedjax_het.core import autotune, autotune_workloads
from fedjax_het.core.client_loop import Examples
from fedjax_het.core.distillation import compute_logits
from fedjax_het.core.execution_plan import make_execution_plan
from fedjax_het.core.server_training import (
    EpochRange,
    ServerTraining,
    make_shuffled_batches,
    train_on_examples,
    train_on_server,
)
from fedjax_het.core.task import Task
from fedjax_het.nn import make_model
from fedjax_het.nn.batch_axis import take_local_rows
from fedjax_het.runtime import checkpointing

DEVICES = min(2, len(jax.devices()))
PLAN = make_execution_plan(1, DEVICES, has_sharded_server=True)
ALONE = make_execution_plan(1, 1)
SHAPE, CLASSES = (8, 8, 1), 3
NETWORKS = {
    "mlp": ("mlp", {}),
    "group norm": ("convnet", {"width": 4, "depth": 2}),
    "batch norm": ("convnet", {"width": 4, "depth": 2, "norm": "batch"}),
    "dropout": ("fsl_cnn", {}),
    # Not in pieces, whose loops' operations are counted once.
    "dropout, whole": ("fsl_cnn", {"conv_impl": "native"}),
}
KEY = jax.random.key(3)


def network(kind):
    name, options = NETWORKS[kind]
    shape = (32, 32, 3) if name == "fsl_cnn" else SHAPE
    return make_model(name, shape, CLASSES, **options)


def examples_for(model, count):
    images = np.random.default_rng(0).normal(size=(count, *model.input_shape))
    return Examples(jnp.asarray(images), jnp.arange(count) % CLASSES)


def on(plan, work, *args):
    return jax.jit(lambda *args: plan.shard_server_work(work, *args))(*plan.put(args))


def on_both(work, *args):
    return on(PLAN, work, *args), on(ALONE, work, *args)


# --- the same numbers ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*map(slow_case, ("mlp", "group norm", "dropout")), "batch norm"])
@pytest.mark.parametrize("batch_size", [slow_case(6), 4])
def test_train_on_server_shared(kind, batch_size):
    """Batches that are full, and an epoch whose last one is not."""
    with enable_x64(True):
        model = network(kind)
        task = Task(model, (0.1,), (2.0,))
        start = jax.tree.map(lambda a: a.astype(float), jax.jit(model.init)(jax.random.key(0)))

        def learn(sharing, *args):
            settings = {"batch_size": batch_size, "lr": 0.1, "epochs": 2}
            return train_on_server(task, *args, **settings, server_parallelism=sharing)

        shared, alone = on_both(learn, start, examples_for(model, 18), KEY)
        assert_trees_all_close(shared, alone, rtol=1e-6, atol=1e-9)  # some layers are float32
        moved = optax.tree.norm(optax.tree.sub(alone["params"], start["params"]))
        assert moved > 0.1


@pytest.mark.parametrize("batch_size", [slow_case(5), 3])
def test_train_on_examples_with_uneven_batches(batch_size):
    """The last part is filled up, which changes nothing but batch norm: that takes them whole."""
    for kind in ("mlp", "batch norm"):
        model = network(kind)

        def learn(sharing, variables, examples, key, model=model):
            batches = make_shuffled_batches(key, 11, batch_size)
            arguments = Task(model, (0.0,), (1.0,)).loss_and_gradient
            training = ServerTraining(arguments, optax.sgd(0.1), parallelism=sharing)
            return train_on_examples(training, variables, examples, batches, EpochRange(1))

        start = jax.jit(model.init)(jax.random.key(0))
        shared, alone = on_both(learn, start, examples_for(model, 11), KEY)
        assert_trees_all_close(shared, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("matching", [slow_case(None), "batch", slow_case("exact")])
def test_train_on_synthetic_pool_shared(matching):
    model = network("batch norm")
    start, data = jax.jit(model.init)(jax.random.key(0)), examples_for(model, 10)
    pool = SyntheticPool(data.inputs.astype(jnp.float32), data.labels, jnp.arange(10) != 4)
    soft = jax.nn.softmax(jnp.asarray(np.random.default_rng(1).normal(size=(CLASSES, CLASSES))))
    knowledge = SoftLabelTargets(
        soft.astype(jnp.float32), jnp.arange(CLASSES) > 0, *jnp.float32([2, 3])
    )

    optimizer = make_decayed_sgd(0.1, 0.5, 0.01)
    settings = {"optimizer": optimizer, "epochs": EpochRange(2), "batch_size": 4}

    def learn(sharing, variables, pool, knowledge, key):
        targets = None if matching is None else knowledge
        task = PoolTask(model, targets, matching == "exact", sharing)
        return train_on_synthetic_pool(task, variables, pool, key, **settings)

    shared, alone = on_both(learn, start, pool, knowledge, KEY)
    assert_trees_all_close(shared, alone, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("kind", "batch_size"), [slow_case("mlp", 6), ("mlp", 4), slow_case("batch norm", 5)]
)
def test_fine_tune_shared(kind, batch_size):
    """Batches that the devices cannot share evenly are filled up, which batch norm masks."""
    model = network(kind)
    variables, data = jax.jit(model.init)(jax.random.key(0)), examples_for(model, 6)
    labels = 3 * jax.nn.one_hot(data.labels, CLASSES)
    synthetic = SyntheticData(data.inputs.astype(jnp.float32), labels, jnp.float32(0.1))

    def tuned(sharing, params, synthetic, key):
        def apply_params(params, x, *, sample_mask=None, batch_axis=None):
            arguments = model.make_batch_arguments(sample_mask, batch_axis)
            return model.apply({**variables, "params": params}, x, train=True, **arguments)[0]

        optimizer, task = optax.sgd(1e-2), SyntheticTask(apply_params, parallelism=sharing)
        settings = {"optimizer": optimizer, "epochs": EpochRange(3), "batch_size": batch_size}
        return fine_tune(task, params, synthetic, key, **settings)

    shared, alone = on_both(tuned, variables["params"], synthetic, KEY)
    assert_trees_all_close(shared, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "strategy", [*map(slow_case, ("crop", "cutout", "flip", "rotate")), "color"]
)
@pytest.mark.parametrize("siamese", [False, slow_case(True)])
def test_augment_shared(siamese, strategy):
    images = examples_for(network("mlp"), 6).inputs.astype(jnp.float32)

    def changed(sharing, images, key):
        def of(images):
            how = {"strategy": strategy, "siamese": siamese}
            return augment(key, images, batch_axis=sharing.batch_axis, **how)

        return sharing.map_samples(of, images)

    assert_trees_all_close(*on_both(changed, images, KEY), atol=1e-5)


@pytest.mark.parametrize("count", [6, 7])
def test_map_samples_keeps_order(count):
    def doubled(sharing, numbers):
        return sharing.map_samples(lambda own: 2 * own, numbers)

    actual = on(PLAN, doubled, np.arange(count))
    np.testing.assert_array_equal(actual, 2 * np.arange(count))


def test_take_local_rows():
    def sums(sharing, a):
        own = take_local_rows(a, sharing.batch_axis)
        return jax.lax.all_gather(own.sum(), "lanes")

    actual = on(PLAN, sums, np.arange(1, 8))
    assert len(actual) == DEVICES and sum(actual.tolist()) == 28
    if DEVICES == 2:
        np.testing.assert_array_equal(actual, [10, 18])


REFINING = ["ccvr", "fedftg", "fedgen", "feddf", "fedbe", "abavg", "dynafed", "feddm", "fedaf"]


@pytest.mark.parametrize("name", ["fsl_p", *map(slow_case, ["fsl", *REFINING])])
def test_rounds_shared(name):
    build, settings = fast_registered_builder(name)
    settings |= {"epochs": 2, "participation": 0.8}
    reference, info = make_small_federation(build, **settings).run(4)
    federation = make_small_federation(build, plan=PLAN, **settings)
    assert federation.algorithm.server_batch_size > 0
    state, other_info = federation.run(4, PLAN.put(federation.initial_state()))
    assert_trees_all_close(state, reference, rtol=2e-5, atol=2e-6)
    assert_trees_all_close(other_info, info, rtol=2e-5, atol=2e-6)


# --- whole runs ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dynafed", "fsl"])
def test_run_shared_and_resumed(name, tmp_path, monkeypatch):
    """Synthesis and pretraining, too, which are between rounds."""
    placed = {"server_work": "shared", "devices": DEVICES}
    shared, alone = run_spec(make_spec(name), **placed), run_spec(make_spec(name))
    for curve in ("test_loss", "train_loss"):
        np.testing.assert_allclose(shared.metrics[curve], alone.metrics[curve], rtol=2e-3)
    if DEVICES > 1:
        assert "server's work shared" in shared.summary["lanes"]
    monkeypatch.setattr(checkpointing, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr("fedjax_het.runtime.long_phases.CHUNK_SECONDS", 0.0)
    with pytest.raises(KilledError):
        run_spec(make_spec(name), **placed, output_dir=tmp_path, progress=make_killing_callback(6))
    resumed = run_spec(make_spec(name), **placed, output_dir=tmp_path, resume=True)
    assert_results_equal(resumed, shared)


def test_placement_rejects_server_work():
    with pytest.raises(ConfigError, match="server_work"):
        Placement(server_work="both")


# --- a part of the work ----------------------------------------------------------------------


def compiled(plan, work, *args):
    placed = plan.put(args)
    return jax.jit(lambda *args: plan.shard_server_work(work, *args)).lower(*placed).compile()


def share_of_operations(work, *args):
    """What a device of two does, of what one alone does."""
    shared, alone = (compiled(plan, work, *args).cost_analysis()["flops"] for plan in (PLAN, ALONE))
    return shared / alone


def training_work(model):
    def learn(sharing, variables, examples, key):
        # Devices do not share the work of batch norm on its few numbers of a channel.
        how = {"batch_size": 32, "lr": 0.1, "epochs": 2}
        return train_on_server(
            Task(model, (0.0,), (1.0,)), variables, examples, key, server_parallelism=sharing, **how
        )

    return learn, jax.jit(model.init)(jax.random.key(0)), examples_for(model, 64), KEY


@pytest.mark.parametrize(
    "kind", ["mlp", "group norm", slow_case("batch norm"), slow_case("dropout, whole")]
)
def test_shared_training_splits_work(kind):
    assert share_of_operations(*training_work(network(kind))) == pytest.approx(1 / DEVICES, rel=0.2)


def test_shared_pass_splits_work():
    model = network("group norm")

    def passed(sharing, variables, images):
        task = Task(model, (0.0,), (1.0,))
        return sharing.map_samples(lambda x: compute_logits(task, variables, x), images)

    work = passed, jax.jit(model.init)(jax.random.key(0)), examples_for(model, 64).inputs
    assert share_of_operations(*work) == pytest.approx(1 / DEVICES, rel=0.2)


@pytest.mark.parametrize("kind", ["mlp", slow_case("group norm"), slow_case("dropout")])
def test_step_has_one_collective(kind):
    """Two that are ready at once could hang XLA's CPU devices."""
    text = compiled(PLAN, *training_work(network(kind))).as_text()
    assert len(re.findall(r" (all-reduce|all-gather)[.\w-]*\(", text)) == (DEVICES > 1)


# --- the choice ------------------------------------------------------------------------------


@pytest.fixture
def choose(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDJAX_HET_CACHE", str(tmp_path))
    timed, batch_sizes = [], []

    def choose(alone, shared_, model=None, **settings):
        def time_one(task, batch_size, devices, *, is_sharded):
            timed.append(is_sharded)
            batch_sizes.append(batch_size)
            return shared_ if is_sharded else alone

        monkeypatch.setattr(autotune, "time_server_step", time_one)
        task = Task(model or network("mlp"), (0.0,), (1.0,))
        devices = jax.devices()[:DEVICES]
        return autotune.choose_server_sharding(
            task, **{"batch_size": 8, "devices": devices, "label": "mlp", **settings}
        )

    choose.batch_sizes = batch_sizes
    choose.timed, choose.file = timed, tmp_path / "lanes.json"
    return choose


@pytest.mark.skipif(DEVICES < 2, reason="there is nothing to share with")
def test_choose_server_sharding_by_speed(choose):
    assert choose(1.0, 0.6)
    assert choose(1.0, 2.0)  # as remembered
    assert choose.timed == [False, True] and json.loads(choose.file.read_text())
    assert not choose(1.0, 0.95, label="other")


@pytest.mark.skipif(DEVICES < 2, reason="there is nothing to share with")
def test_choose_server_sharding_times_no_batch_beyond_memory(choose):
    assert choose(1.0, 0.6, batch_size=10**9)
    assert set(choose.batch_sizes) == {autotune.MAX_SERVER_BATCH_SIZE}


def test_choose_server_sharding_without_timing(choose):
    assert not choose(1.0, 0.1, devices=jax.devices()[:1])
    mixing = network("mlp")._replace(can_shard_batch=False)
    assert not choose(1.0, 0.1, model=mixing) and not choose.timed


def test_time_server_step():
    task = Task(network("mlp"), (0.0,), (1.0,))
    devices = jax.devices()[:DEVICES]
    for shared in (False, True):
        assert autotune_workloads.time_server_step(task, 4, devices, is_sharded=shared) > 0
