"""The methods against float64 oracles, limit identities and invariances."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close, assert_trees_all_equal
from problems import (
    BATCH,
    CLASSES,
    SIZES,
    blobs,
    builder_of,
    chosen,
    consecutive,
    defaults,
    small,
    softmax_gradient,
)

from fedjax_het.algorithms import METHODS, entry_of
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.fedprox import fedprox
from fedjax_het.algorithms.scaffold import scaffold
from fedjax_het.data import load_dataset
from fedjax_het.engine.contract import Batch
from fedjax_het.engine.plan import make_plan
from fedjax_het.nn import make_model

FAST_SYNTHESIS = {
    "num_iterations": 2,
    "inner_steps": 2,
    "trajectory_rounds": 3,
    "segment_length": 2,
    "num_samples": 6,
    "augment_strategy": "none",
}
FAST_CONDENSATION = {"ipc": 2, "steps": 3, "server_epochs": 2, "server_batch_size": 4}
FAST_DISTILLATION = {"distill_epochs": 3, "distill_batch_size": 4}
FAST_GENERATOR = {"generator_hidden": 5, "generator_noise": 2, "generator_steps": 3}
FAST = {
    "dynafed": FAST_SYNTHESIS,
    "feddm": FAST_CONDENSATION,
    "fedaf": FAST_CONDENSATION,
    "fedgen": FAST_GENERATOR,
    "feddf": FAST_DISTILLATION,
    "fedbe": {**FAST_DISTILLATION, "num_samples": 3},
}
# The mean logits of linear models are those of their mean: FedDF would follow rounding errors.
NUMBERS = {"feddf": {"server_lr": 0.7}}


def registered(name):
    """-> (build, settings of `small`) of a registered method, such that it is quick."""
    entry, options = entry_of(name, {}), FAST.get(name, {})
    numbers = defaults(entry, options) | {"local_lr": 0.1, **NUMBERS.get(name, {})}
    settings = {"hp": numbers, "scored": entry.scored[0]}
    return builder_of(entry, options), settings


# --- NumPy oracles, in float64 -------------------------------------------------------------


class Oracle:
    """Rounds of FedAvg, FedProx or SCAFFOLD by loops over clients, batches and parameters."""

    def __init__(self, federation, start, lr, *, mu=0.0, controls=None, averaging="uniform"):
        images, labels = blobs()
        self.x, self.y = images.reshape(len(images), -1).astype(np.float64), labels
        params = federation.model(start)
        self.server = [params["w"].astype(np.float64), params["b"].astype(np.float64)]
        self.f, self.lr, self.mu, self.controls = federation, lr, mu, controls
        zeros = [np.zeros_like(p) for p in self.server]
        self.c, self.c_k = zeros, [list(zeros) for _ in SIZES]
        self.averaging = averaging

    def round(self, r):
        clients = [k for k in self.f.scheduler.participants(r) if SIZES[k]]
        total = sum(SIZES[k] for k in clients)
        change, control_change = [0, 0], [0, 0]
        for k in clients:
            share = SIZES[k] / total if self.averaging == "weighted" else 1 / len(clients)
            moved, control = self.client(r, k)
            for i in range(2):
                change[i] = change[i] + share * (moved[i] - self.server[i])
                control_change[i] = control_change[i] + (control[i] - self.c_k[k][i])
            if self.controls:
                self.c_k[k] = control
        self.server = [s + d for s, d in zip(self.server, change, strict=True)]
        if self.controls:
            self.c = [c + d / len(SIZES) for c, d in zip(self.c, control_change, strict=True)]

    def client(self, r, k):
        w = [p.copy() for p in self.server]
        batches, sizes = self.f.scheduler.client_batches(r, k)
        if self.controls == "I":
            mine = self.f.scheduler.partition.client(k)
            full = softmax_gradient(*w, self.x[mine], self.y[mine])
            skip = -(-len(mine) // BATCH)
            batches, sizes = batches[skip:], sizes[skip:]
        for batch, size in zip(batches, sizes, strict=True):
            use = batch[:size]
            gradient = softmax_gradient(*w, self.x[use], self.y[use])
            for i in range(2):
                step = gradient[i] + self.mu * (w[i] - self.server[i])
                if self.controls:
                    step = step - self.c_k[k][i] + self.c[i]
                w[i] = w[i] - self.lr * step
        if self.controls == "I":
            return w, list(full)
        steps = len(batches) * self.lr  # the paper's form of option II
        control = [self.c_k[k][i] - self.c[i] + (self.server[i] - w[i]) / steps for i in range(2)]
        return w, control


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
@pytest.mark.parametrize(
    ("build", "hp", "controls"),
    [
        (fedavg, {}, None),
        (fedprox, {"prox_mu": 0.7}, None),
        (chosen(scaffold, option="II"), {}, "II"),
        (chosen(scaffold, option="I"), {}, "I"),
    ],
    ids=["fedavg", "fedprox", "scaffold-II", "scaffold-I"],
)
def test_three_rounds_equal_a_float64_oracle(build, hp, controls, averaging):
    federation = small(
        build,
        hp={"local_lr": 0.2, **hp},
        participation=0.7,
        averaging=averaging,
        epochs=2,
    )
    start = federation.start()
    oracle = Oracle(
        federation,
        start,
        0.2,
        mu=hp.get("prox_mu", 0.0),
        controls=controls,
        averaging=averaging,
    )
    state, _ = federation.run(3, start)
    for r in range(3):
        oracle.round(r)
    found = federation.model(state)
    np.testing.assert_allclose(found["w"], oracle.server[0], atol=2e-6)
    np.testing.assert_allclose(found["b"], oracle.server[1], atol=2e-6)
    if controls:
        np.testing.assert_allclose(state.server.extra["w"], oracle.c[0], atol=2e-6)
        own = np.stack([c[0] for c in oracle.c_k])
        np.testing.assert_allclose(state.clients.control["w"], own, atol=5e-6)


# --- limits --------------------------------------------------------------------------------


def test_fedprox_without_pull_is_fedavg():
    hp = {"local_lr": 0.2}
    plain, _ = small(fedavg, hp=hp).run(3)
    prox, _ = small(fedprox, hp={**hp, "prox_mu": 0.0}).run(3)
    assert_trees_all_equal(plain.server, prox.server)


def test_fedprox_with_a_strong_pull_stays_with_the_server():
    moved = {}
    for mu in (0.0, 1.0, 50.0):
        federation = small(fedprox, hp={"local_lr": 0.01, "prox_mu": mu}, epochs=20)
        _, info = federation.run(1, federation.start())
        moved[mu] = float(info.update_norm)
    assert moved[0.0] > 1.05 * moved[1.0] > 4 * moved[50.0] > 0, moved


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw"])
def test_scaffolds_first_round_with_zero_controls_is_fedavg(optimizer):
    hp = {"local_lr": 0.1, "local_momentum": 0.9, "local_weight_decay": 0.01}
    settings = {"hp": hp, "optimizer": optimizer, "epochs": 2, "keep": True}
    plain, _ = small(fedavg, **settings).run(1)
    controlled, _ = small(scaffold, **settings).run(1)
    assert_trees_all_close(
        plain.server.variables, controlled.server.variables, rtol=1e-6, atol=1e-7
    )
    again, _ = small(scaffold, **settings).run(2)
    plain, _ = small(fedavg, **settings).run(2)
    gap = np.abs(again.server.variables["params"]["w"] - plain.server.variables["params"]["w"])
    assert gap.max() > 1e-3  # from the second round on the controls act


def global_gradient_norm(federation, state):
    """Norm of the gradient of the mean of the clients' objectives at the global model."""
    params = {k: v.astype(np.float64) for k, v in federation.model(state).items()}
    images, labels = blobs()
    x = images.reshape(len(images), -1).astype(np.float64)
    gradients = [
        softmax_gradient(params["w"], params["b"], x[mine], labels[mine])
        for mine in (consecutive().client(k) for k, n in enumerate(SIZES) if n)
    ]
    return np.sqrt(sum(np.sum(np.mean([g[i] for g in gradients], 0) ** 2) for i in range(2)))


def test_scaffold_reaches_the_joint_optimum_where_fedavg_drifts():
    # Full batches, many local epochs: FedAvg's fixed point is not the optimum of the mean.
    settings = {"hp": {"local_lr": 0.1}, "epochs": 20, "batch_size": 20, "rounds": 400}
    norms = {}
    for name, build in (("fedavg", fedavg), ("scaffold", scaffold)):
        federation = small(build, **settings)
        state, _ = federation.run(400)
        norms[name] = global_gradient_norm(federation, state)
    assert norms["scaffold"] < 0.2 * norms["fedavg"], norms


def test_one_client_with_all_data_is_plain_sgd():
    federation = small(fedavg, hp={"local_lr": 0.1}, sizes=(18,))
    state, _ = federation.run(3)
    images, labels = blobs((18,))
    x = images.reshape(18, -1).astype(np.float64)
    params = federation.model(federation.start())
    w, b = params["w"].astype(np.float64), params["b"].astype(np.float64)
    for r in range(3):
        batches, sizes = federation.scheduler.client_batches(r, 0)
        for batch, size in zip(batches, sizes, strict=True):
            use = batch[:size]
            dw, db = softmax_gradient(w, b, x[use], labels[use])
            w, b = w - 0.1 * dw, b - 0.1 * db
    np.testing.assert_allclose(federation.model(state)["w"], w, atol=2e-6)
    np.testing.assert_allclose(federation.model(state)["b"], b, atol=2e-6)


@pytest.mark.parametrize("keep", [True, False])
def test_adams_moments_are_kept_or_reset(keep):
    federation = small(fedavg, hp={"local_lr": 0.05}, sizes=(18,), optimizer="adam", keep=keep)
    state, _ = federation.run(3)
    images, labels = blobs((18,))
    x = images.reshape(18, -1).astype(np.float64)
    params = federation.model(federation.start())
    w = [params["w"].astype(np.float64), params["b"].astype(np.float64)]
    m, v, t = [0.0, 0.0], [0.0, 0.0], 0
    for r in range(3):
        if not keep:
            m, v, t = [0.0, 0.0], [0.0, 0.0], 0
        batches, sizes = federation.scheduler.client_batches(r, 0)
        for batch, size in zip(batches, sizes, strict=True):
            gradient = softmax_gradient(*w, x[batch[:size]], labels[batch[:size]])
            t += 1
            for i in range(2):
                m[i] = 0.9 * m[i] + 0.1 * gradient[i]
                v[i] = 0.999 * v[i] + 0.001 * gradient[i] ** 2
                ratio = (m[i] / (1 - 0.9**t)) / (np.sqrt(v[i] / (1 - 0.999**t)) + 1e-8)
                w[i] = w[i] - 0.05 * ratio
    np.testing.assert_allclose(federation.model(state)["w"], w[0], atol=1e-5)
    assert (state.clients != ()) == keep


def test_server_lr_scales_the_change():
    half = small(fedavg, hp={"local_lr": 0.1, "server_lr": 0.5})
    full = small(fedavg, hp={"local_lr": 0.1})
    start = full.start()
    a, b = half.model(half.run(1, start)[0])["w"], full.model(full.run(1, start)[0])["w"]
    origin = full.model(start)["w"]
    np.testing.assert_allclose(a - origin, 0.5 * (b - origin), atol=1e-7)


def test_zero_learning_rate_changes_nothing():
    federation = small(fedavg, hp={"local_lr": 0.0})
    start = federation.start()
    state, info = federation.run(2, start)
    assert_trees_all_equal(federation.model(state), federation.model(start))
    assert float(info.update_norm) == 0


# --- every registered method ---------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("devices", "lanes"), [(2, 1), (1, 3), (2, 2)])
def test_lanes_and_devices_change_nothing(name, devices, lanes):
    build, settings = registered(name)
    settings |= {"epochs": 2, "participation": 0.8}
    reference, info = small(build, **settings).run(4)
    plan = make_plan(lanes, devices)
    federation = small(build, plan=plan, **settings)
    state, other_info = federation.run(4, plan.put(federation.start()))
    assert_trees_all_close(state, reference, rtol=2e-5, atol=2e-6)
    assert_trees_all_close(other_info, info, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", METHODS)
def test_a_round_keeps_structure_shapes_and_types(name):
    build, settings = registered(name)
    federation = small(build, **settings)
    start = federation.start()
    state, _ = federation.run(1, start)
    assert jax.tree.structure(state) == jax.tree.structure(start)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(start), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
    assert int(state.round) == 1


# Clients of data_sharing always have data: the server's.
@pytest.mark.parametrize("name", [name for name in METHODS if name != "data_sharing"])
def test_a_cohort_without_data_changes_nothing_and_an_empty_client_keeps_its_state(name):
    build, settings = registered(name)
    federation = small(
        build,
        sizes=(0, 0, 6),
        participation=0.34,
        rounds=30,
        optimizer="adam",
        keep=True,
        **settings,
    )
    r = int(np.flatnonzero(federation.scheduler.work.participants == 0)[0])
    start = federation.start()

    state, info = jax.jit(federation.algorithm.round)(
        federation.hp, start, jax.random.key(0), federation.cohort(r)
    )
    assert_trees_all_equal(federation.model(state), federation.model(start))
    assert_trees_all_equal(state.clients, start.clients)
    assert float(info.update_norm) == 0 and np.isfinite(float(info.train_loss))


@pytest.mark.parametrize("name", METHODS)
def test_clients_outside_the_cohort_keep_their_state(name):
    build, settings = registered(name)
    federation = small(build, participation=0.5, epochs=2, optimizer="adam", keep=True, **settings)
    start = federation.start()
    state, _ = federation.run(1, start)
    sizes = federation.scheduler.partition.sizes
    drawn = {int(k) for k in federation.scheduler.participants(0) if sizes[k]}
    leaves = jax.tree.leaves(state.clients)

    def rows(leaf):
        """By client, also where every class of a client has a row of its own."""
        return np.asarray(leaf).reshape(len(SIZES), -1)

    changed = {
        k
        for k in range(len(SIZES))
        for before, after in zip(jax.tree.leaves(start.clients), leaves, strict=True)
        if not np.array_equal(rows(before)[k], rows(after)[k])
    }
    assert changed == drawn


@pytest.mark.parametrize("name", METHODS)
def test_traffic_counts_what_is_sent(name):
    build, settings = registered(name)
    federation = small(build, **settings)
    traffic = federation.algorithm.traffic(federation.hp, federation.start())
    model = 4 * (4 * CLASSES + CLASSES)
    times = {"scaffold": 2, "feddc": 2, "separate": 0}.get(name, 1)
    condensed = 2 * 4 * 4  # two images of four floats
    generator = 4 * ((2 + CLASSES + 1) * 5 + 4 * 5 + (5 + 1) * 4)  # features are the four pixels
    expected = {
        "feddm": (model, 0, condensed),
        "fedaf": (model + 36, 2 * 36, condensed),
        "fedgen": (model + generator, model + 4 * CLASSES, 0),
    }
    assert traffic == expected.get(name, (times * model, times * model, 0))


def test_batch_norm_statistics_are_averaged_and_not_mixed_in_training():
    model = make_model("convnet", (8, 8, 1), 3, width=4, depth=2, norm="batch")
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.normal(size=(10, 8, 8, 1)).astype(np.float32))
    federation = small(
        fedavg, hp={"local_lr": 0.0}, model=model, sizes=(4, 6), batch_size=10
    )._replace()
    federation = federation._replace(
        examples=federation.examples._replace(
            images=images, labels=jnp.asarray(rng.integers(0, 3, 10), jnp.int32)
        )
    )
    start = federation.start()
    state, _ = federation.run(1, start)
    # With a step of zero the new statistics are the mean of what each client's batch gives.
    expected = []
    variables = federation.algorithm.global_model(start)
    for k, n in enumerate((4, 6)):
        batch, _ = federation.scheduler.client_batches(0, k)
        padded = images[batch[0]]
        _, new = model.apply(variables, federation.task.normalise(padded), train=True)
        expected.append(new)
        assert n <= 10
    mean = jax.tree.map(lambda *a: sum(a) / 2, *expected)
    assert_trees_all_close(
        federation.algorithm.global_model(state)["state"], mean, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", METHODS)
def test_a_round_on_several_devices_has_one_collective(name):
    # Two that are ready at once can be entered in different orders, which hangs XLA's CPU devices.
    build, settings = registered(name)
    federation = small(build, plan=make_plan(1, 2), optimizer="adam", keep=True, **settings)
    lowered = jax.jit(federation.algorithm.round).lower(
        federation.hp, federation.start(), jax.random.key(0), federation.cohort(0)
    )
    text = lowered.compile().as_text()
    collectives = re.findall(
        r" (all-reduce|all-gather|all-to-all|collective-permute)[.\w-]*\(", text
    )
    # FedAF's clients need what all of them told, so that their second one waits for the first.
    assert len(collectives) == (2 if name == "fedaf" else 1), collectives


# --- dropout -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dropping_on_digits():
    """-> a federation of the embedded digits whose network drops, for any plan."""
    digits = load_dataset("digits")
    images = digits.train_images[: sum(SIZES)].astype(np.float32) / 255

    def federation(plan=None):
        data = images, digits.train_labels[: sum(SIZES)]
        model = make_model("fsl_cnn", (8, 8, 1), 10)
        return small(fedavg, hp={"local_lr": 0.05}, plan=plan, epochs=2, model=model, data=data)

    return federation


def test_dropout_does_not_depend_on_lanes_and_devices(dropping_on_digits):
    """Masks follow seed, round, client and step: where a client is trained leaves no trace."""
    reference, info = dropping_on_digits().run(2)
    plan = make_plan(2, 2)
    federation = dropping_on_digits(plan)
    state, other_info = federation.run(2, plan.put(federation.start()))
    assert_trees_all_close(state, reference, rtol=2e-5, atol=1e-5)
    assert_trees_all_close(other_info, info, rtol=2e-5, atol=1e-5)


def test_dropout_acts_in_local_training_by_the_steps_key(dropping_on_digits):
    federation = dropping_on_digits()
    images, labels = federation.examples
    batch = Batch(images[:8], labels[:8], jnp.ones(8), jnp.int32(0))
    variables = federation.task.model.init(jax.random.key(0))
    step = jax.jit(federation.task.loss_and_gradient)
    losses = [float(step(variables, batch, jax.random.key(seed))[0]) for seed in (0, 0, 1)]
    assert losses[0] == losses[1] and abs(losses[0] - losses[2]) > 1e-3
