"""The methods against float64 oracles, limit identities and invariances."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import (
    assert_trees_all_close,
    assert_trees_all_equal,
    assert_trees_all_equal_shapes_and_dtypes,
)
from support.algorithm_builders import bind_options, fast_registered_builder
from support.data import BATCH_SIZE, CLIENT_SIZES, NUM_CLASSES, consecutive_partition
from support.markers import REPRESENTATIVE_METHODS, method_cases, slow_case
from support.networks import make_centered_model
from support.reference_loop import (
    CLIP_AND_DECAY,
    ClippedAndDecayed,
    ReferenceAdam,
    ReferenceFedAvg,
    flatten_params,
    run_and_compare,
)
from support.small_federation import make_small_federation
from support.two_layers import NUM_FEATURES

from fedjax_het.algorithms import METHODS
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.fedprox import fedprox
from fedjax_het.algorithms.scaffold import scaffold
from fedjax_het.core.client_algorithm import Batch
from fedjax_het.core.execution_plan import make_execution_plan
from fedjax_het.core.optimizers import LocalTrainingOptions
from fedjax_het.data import load_dataset
from fedjax_het.nn import make_model

# --- NumPy oracles, in float64 -------------------------------------------------------------


class Prox(ReferenceFedAvg):
    def descent_direction(self, model, batch):
        return super().descent_direction(model, batch) + self.hp["prox_mu"] * (
            model - self.global_vector
        )


class Scaffold(ReferenceFedAvg):
    """With option II of the paper's controls, in the paper's form."""

    control, moved = 0.0, 0.0  # the server's, and what a round adds to it

    def init_client_state(self, client):
        return np.zeros_like(self.global_vector)

    def descent_direction(self, model, batch):
        return (
            super().descent_direction(model, batch)
            - self.client_states[batch.client]
            + self.control
        )

    def new_control(self, client, model, steps):
        drift = (self.global_vector - model) / (steps * self.hp["local_lr"])
        return self.client_states[client] - self.control + drift

    def finish_client(self, client, model, steps):
        new = self.new_control(client, model, steps)
        self.moved = self.moved + self.client_weights()[client] * (new - self.client_states[client])
        self.client_states[client] = new

    def update_server(self, r, clients, models):
        super().update_server(r, clients, models)
        self.control, self.moved = self.control + self.moved, 0.0


class ScaffoldI(Scaffold):
    """With option I: the gradient at the server's model, measured in a first pass of its own."""

    def minibatches(self, r, client):
        return super().minibatches(r, client)[-(-self.client_sizes[client] // BATCH_SIZE) :]

    def new_control(self, client, model, steps):
        held = self.federation.scheduler.partition.client_indices(client)
        return self.gradient(self.global_vector, self.inputs[held], self.labels[held])


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
@pytest.mark.parametrize(
    ("build", "hp", "loop"),
    [
        (fedavg, {}, ReferenceFedAvg),
        (fedprox, {"prox_mu": 0.7}, Prox),
        (bind_options(scaffold, option="II"), {}, Scaffold),
        (bind_options(scaffold, option="I"), {}, ScaffoldI),
    ],
    ids=["fedavg", "fedprox", "scaffold-II", "scaffold-I"],
)
def test_three_rounds_match_float64_oracle(build, hp, loop, averaging):
    settings = {"participation": 0.7, "averaging": averaging, "epochs": 2}
    oracle = loop(make_small_federation(build, hp={"local_lr": 0.2, **hp}, **settings))
    state = run_and_compare(oracle, 3, atol=2e-6)
    if isinstance(oracle, Scaffold):
        control = oracle.params(oracle.control)["w"]
        np.testing.assert_allclose(state.server.extra["w"], control, atol=2e-6)
        own = np.stack([oracle.params(kept)["w"] for kept in oracle.client_states])
        np.testing.assert_allclose(state.clients.memory["w"], own, atol=5e-6)


class ClippedScaffold(ClippedAndDecayed, Scaffold):
    """The paper's controls (x - y) / (K local_lr), of steps with clipping and weight decay."""


@pytest.mark.parametrize("hp", CLIP_AND_DECAY, ids=" ".join)
def test_scaffold_with_clipping_and_decay(hp):
    details = LocalTrainingOptions(optional_hyperparameters=tuple(hp))
    settings = {"participation": 0.7, "epochs": 2, "details": details}
    build = bind_options(scaffold, option="II")
    oracle = ClippedScaffold(make_small_federation(build, hp={"local_lr": 0.2, **hp}, **settings))
    state = run_and_compare(oracle, 4, atol=2e-6)
    own = np.stack([oracle.params(kept)["w"] for kept in oracle.client_states])
    np.testing.assert_allclose(state.clients.memory["w"], own, atol=5e-6)
    assert oracle.num_clipped > 3 or "local_clip_norm" not in hp


# --- limits --------------------------------------------------------------------------------


def global_gradient_norm(federation, state):
    """Norm of the gradient of the mean of the clients' objectives at the global model."""
    loop, model = ReferenceFedAvg(federation), flatten_params(federation.global_params(state))
    held = [consecutive_partition().client_indices(k) for k, n in enumerate(CLIENT_SIZES) if n]
    gradients = [loop.gradient(model, loop.inputs[own], loop.labels[own]) for own in held]
    return np.linalg.norm(np.mean(gradients, 0))


def test_scaffold_reaches_joint_optimum():
    # Full batches, many local epochs: FedAvg's fixed point is not the optimum of the mean.
    settings = {"hp": {"local_lr": 0.1}, "epochs": 20, "batch_size": 20, "rounds": 400}
    norms = {}
    for name, build in (("fedavg", fedavg), ("scaffold", bind_options(scaffold))):
        federation = make_small_federation(build, **settings)
        state, _ = federation.run(400)
        norms[name] = global_gradient_norm(federation, state)
    assert norms["scaffold"] < 0.2 * norms["fedavg"], norms


@pytest.mark.parametrize("keep", [True, False])
def test_adam_moments_kept_or_reset(keep):
    federation = make_small_federation(
        fedavg, hp={"local_lr": 0.05}, sizes=(18,), optimizer="adam", keep=keep
    )
    state, _ = federation.run(3)
    oracle = ReferenceFedAvg(federation)
    w, adam = oracle.global_vector, ReferenceAdam()
    for r in range(3):
        adam = adam if keep else ReferenceAdam()
        for batch in oracle.minibatches(r, 0):
            w = adam.step(w, oracle.gradient(w, batch.x, batch.y), 0.05)
    oracle.assert_model(federation.global_params(state), model=w, atol=1e-5)
    assert (state.clients != ()) == keep


def test_server_lr_scales_change():
    half = make_small_federation(fedavg, hp={"local_lr": 0.1, "server_lr": 0.5})
    full = make_small_federation(fedavg, hp={"local_lr": 0.1})
    start = full.initial_state()
    a, b, origin = (
        half.train(1, start)["w"],
        full.train(1, start)["w"],
        full.global_params(start)["w"],
    )
    np.testing.assert_allclose(a - origin, 0.5 * (b - origin), atol=1e-7)


# --- every registered method ---------------------------------------------------------------


NEED_HEAD = (
    "ccvr",
    "fedaf",
    "feddecorr",
    "feddm",
    "fedgen",
    "fedproto",
    "fedrod",
    "levelled",
    "moon",
)


@pytest.mark.parametrize(
    ("name", "devices", "lanes"),
    [
        *method_cases(METHODS, 2, 1, quick=()),
        *method_cases(METHODS, 1, 3, quick=("scaffold",)),
        *(slow_case(name, 2, 2) for name in sorted(set(METHODS) - set(REPRESENTATIVE_METHODS))),
        *((name, 2, 2) for name in REPRESENTATIVE_METHODS),
    ],
)
def test_lanes_and_devices_do_not_change_results(name, devices, lanes):
    build, settings = fast_registered_builder(name)
    settings |= {"epochs": 2, "participation": 0.8}
    if lanes == 1 and name != "fednova":  # with what clients keep, and without
        settings |= {"optimizer": "momentum", "keep": True}
        settings["hp"] |= {"local_momentum": 0.5}
    if (
        (devices, lanes) == (2, 2) and name not in NEED_HEAD and "model" not in settings
    ):  # with running statistics
        settings |= {"model": make_centered_model()}
    reference, info = make_small_federation(build, **settings).run(4)
    plan = make_execution_plan(lanes, devices)
    federation = make_small_federation(build, plan=plan, **settings)
    start = plan.put(federation.initial_state())
    state, other_info = federation.run(4, start)
    assert_trees_all_close(state, reference, rtol=2e-5, atol=2e-6)
    assert_trees_all_close(other_info, info, rtol=2e-5, atol=2e-6)
    if lanes == 1:
        # Two collectives that are ready at once can be entered in different orders, which hangs
        # XLA's CPU devices. FedAF's clients need what all of them told, FedAMP's the distances that
        # devices share, CCVR's draws the new model: so that their second one waits for the first.
        # RoFSL's filter reads the clients' changes.
        two = ("ccvr", "fedaf", "fedamp", "heurfedamp", "rofsl")
        assert len(collectives(federation, start)) == (2 if name in two else 1)


def collectives(federation, state):
    """Those of a round's program."""
    arguments = federation.hp, state, jax.random.key(0), federation.cohort(0)
    text = jax.jit(federation.algorithm.round).lower(*arguments).compile().as_text()
    return re.findall(r" (all-reduce|all-gather|all-to-all|collective-permute)[.\w-]*\(", text)


@pytest.mark.parametrize(
    ("name", "base"),
    [(name, None) for name in METHODS]
    + [("feddf", base) for base in ("fednova", "fedavgm", "fedadam", "fedgen")]
    + [("dynafed", "fedgen"), ("fsl", "moon"), ("data_sharing", "fedmix")],
)
def test_round_keeps_structure_shapes_and_types(name, base):
    """Traced, not run."""
    build, settings = fast_registered_builder(name, base)
    federation = make_small_federation(build, **settings)
    start = jax.eval_shape(federation.initial_state)
    arguments = (federation.hp, start, jax.random.key(0), federation.cohort(0))
    state, info = jax.eval_shape(federation.algorithm.round, *arguments)
    assert_trees_all_equal_shapes_and_dtypes(state, start)
    assert info.models is None


# Clients of data_sharing always have data: the server's. Asynchronous servers wait for an update.
NEVER_EMPTY = ("data_sharing", "fedasync", "fedbuff")
HAVE_EMPTY_ROUNDS = [name for name in METHODS if name not in NEVER_EMPTY]
# Their servers store the round's model, labels, messages or draws.
STORE_ROUNDS = ("ccvr", "dynafed", "fedaf", "fedamp", "heurfedamp")
WITH_SERVER_STATE = (*REPRESENTATIVE_METHODS, "fedadam", "feddc")


@pytest.mark.parametrize("name", method_cases(HAVE_EMPTY_ROUNDS, quick=WITH_SERVER_STATE))
def test_empty_round_changes_nothing(name):
    """After a round that fills what clients and server keep."""
    build, settings = fast_registered_builder(name)
    settings |= {"sizes": (0, 0, 6), "participation": 0.34, "optimizer": "adam", "keep": True}
    federation = make_small_federation(build, rounds=30, **settings)
    present = federation.scheduler.work_counts.participants > 0
    r = int(np.flatnonzero(present[:-1] & ~present[1:])[0])
    states, round_ = [federation.initial_state()], jax.jit(federation.algorithm.round)
    for number in (r, r + 1):
        cohort = federation.cohort(number)
        state, info = round_(federation.hp, states[-1], jax.random.key(number), cohort)
        states.append(state)
    assert float(info.update_norm) == 0 and np.isnan(float(info.train_loss))
    _, before, after = states
    assert_trees_all_equal(*map(federation.global_params, (after, before)))
    assert_trees_all_equal(after.clients, before.clients)
    if name not in STORE_ROUNDS:
        assert_trees_all_equal(after.server, before.server)


@pytest.mark.parametrize("name", method_cases())
def test_absent_clients_keep_state(name):
    build, settings = fast_registered_builder(name)
    federation = make_small_federation(
        build, participation=0.5, epochs=2, optimizer="adam", keep=True, **settings
    )
    start = federation.initial_state()
    state, _ = federation.run(1, start)
    sizes = federation.scheduler.partition.sizes
    drawn = {int(k) for k in federation.scheduler.draw_cohort(0) if sizes[k]}
    leaves = jax.tree.leaves(state.clients)

    def rows(leaf):
        """By client, also where every class of a client has a row of its own."""
        return np.asarray(leaf).reshape(len(CLIENT_SIZES), -1)

    changed = {
        k
        for k in range(len(CLIENT_SIZES))
        for before, after in zip(jax.tree.leaves(start.clients), leaves, strict=True)
        if not np.array_equal(rows(before)[k], rows(after)[k])
    }
    assert changed == drawn


@pytest.mark.parametrize("name", METHODS)
def test_traffic_counts_sent_bytes(name):
    build, settings = fast_registered_builder(name)
    federation = make_small_federation(build, **settings)
    traffic = federation.algorithm.traffic(federation.hp, federation.initial_state())
    model = 4 * (4 * NUM_CLASSES + NUM_CLASSES)
    body = 4 * (4 * NUM_FEATURES + NUM_FEATURES)  # of the network of two layers
    head = 4 * (NUM_FEATURES * NUM_CLASSES + NUM_CLASSES)
    times = {"scaffold": 2, "feddc": 2, "separate": 0}.get(name, 1)
    condensed = 2 * 4 * 4  # two images of four floats
    generator = 4 * (
        (2 + NUM_CLASSES + 1) * 5 + 4 * 5 + (5 + 1) * 4
    )  # features are the four pixels
    expected = {
        "feddm": (model, 0, condensed),
        "fedaf": (model + 36, 2 * 36, condensed),
        "fedgen": (model + generator, model + 4 * NUM_CLASSES, 0),
        "fedcm": (2 * model, model, 0),
        "mofedsam": (2 * model, model, 0),
        "ifca": (4 * model, model + 4, 0),
        "qfedavg": (model, model + 4, 0),
        "fedexp": (model, model + 4, 0),  # the norm of the change
        "fedproto": (4 * 4 * NUM_CLASSES, 4 * 5 * NUM_CLASSES, 0),
        **dict.fromkeys(("fedper", "fedrep", "fedbabu"), (body, body, 0)),
        "lg_fedavg": (head, head, 0),
        "fedala": (body + head, body + head, 0),
    }
    assert traffic == expected.get(name, (times * model, times * model, 0))


# --- dropout -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dropping_on_digits():
    """-> a federation of the embedded digits whose network drops, for any plan."""
    digits = load_dataset("digits")
    images = digits.train_inputs[: sum(CLIENT_SIZES)].astype(np.float32) / 255

    def federation(plan=None):
        data = images, digits.train_labels[: sum(CLIENT_SIZES)]
        model = make_model("fsl_cnn", (8, 8, 1), 10)
        return make_small_federation(
            fedavg, hp={"local_lr": 0.05}, plan=plan, epochs=2, model=model, data=data
        )

    return federation


@pytest.mark.slow
def test_dropout_does_not_depend_on_placement(dropping_on_digits):
    """Masks follow seed, round, client and step: where a client is trained leaves no trace."""
    reference, info = dropping_on_digits().run(2)
    plan = make_execution_plan(2, 2)
    federation = dropping_on_digits(plan)
    state, other_info = federation.run(2, plan.put(federation.initial_state()))
    assert_trees_all_close(state, reference, rtol=2e-5, atol=1e-5)
    assert_trees_all_close(other_info, info, rtol=2e-5, atol=1e-5)


def test_dropout_depends_on_step_key(dropping_on_digits):
    federation = dropping_on_digits()
    images, labels = federation.examples
    batch = Batch(images[:8], labels[:8], jnp.ones(8), jnp.int32(0))
    variables = federation.task.model.init(jax.random.key(0))
    step = jax.jit(federation.task.loss_and_gradient)
    losses = [float(step(variables, batch, jax.random.key(seed))[0]) for seed in (0, 0, 1)]
    assert losses[0] == losses[1] and abs(losses[0] - losses[2]) > 1e-3
