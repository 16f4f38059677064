"""Server learning: FSL against loops in float64, its limits, pretraining, data sharing, gaps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close, assert_trees_all_equal
from support.algorithm_builders import make_method_federation
from support.data import (
    BATCH_SIZE,
    CLIENT_SIZES,
    NUM_CLASSES,
    SERVER_EXAMPLES,
    consecutive_partition,
    make_blobs,
    make_user_dataset,
)
from support.markers import slow_case
from support.reference_loop import (
    ReferenceFedAvg,
    flatten_inputs,
    flatten_params,
    run_and_compare,
    server_batches,
    softmax_gradient,
)
from support.small_federation import (
    make_full_pass_scheduler,
    make_small_federation,
    round_key,
)
from support.small_runs import (
    KilledError,
    assert_results_equal,
    make_killing_callback,
    make_spec,
    sweep_specs,
)

from fedjax_het import ConfigError, RunSpec, simulate
from fedjax_het.algorithms import METHODS, get_algorithm_spec
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.pretraining import with_pretraining
from fedjax_het.core.client_loop import Cohort
from fedjax_het.core.execution_plan import make_execution_plan
from fedjax_het.core.gradient_diagnostics import measure_gradient_gaps
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.core.server_training import make_shuffled_batches
from fedjax_het.data import dataset_from_arrays, make_partition, partition_from_clients
from fedjax_het.runtime.data_assignment import UserObjects

HP = {"local_lr": 0.1, "server_lr": 1.4, "gamma": 0.8}


def make_federation(name, options=None, hp=None, **settings):
    return make_method_federation(name, options, {**HP, **(hp or {})}, **settings)


class ServerLearning(ReferenceFedAvg):
    """Algorithm 1: FedAvg's average learns from the server's examples too, after the clients or,
    where it is not incremental, beside them."""

    def __init__(self, federation, *, epochs, incremental, rule="paper"):
        super().__init__(federation)
        self.epochs, self.incremental, self.rule = epochs, incremental, rule

    def update_server(self, r, clients, models):
        average = self.average_models(clients, models)
        key = fold_in_purpose(round_key(r), Purpose.SERVER)
        batches = list(server_batches(key, self.epochs, len(SERVER_EXAMPLES[1])))
        steps = np.mean([len(self.minibatches(r, k)) for k in clients])
        reach = self.hp["server_lr"] * self.hp["local_lr"] * steps
        if self.rule == "moved":
            whole = self.gradient(
                self.global_vector, flatten_inputs(SERVER_EXAMPLES[0]), SERVER_EXAMPLES[1]
            )
            reach = np.linalg.norm(average - self.global_vector) / np.linalg.norm(whole)
        lr = self.hp["gamma"] * self.hp.get("gamma_decay", 1) ** r * reach / len(batches)
        begun = average if self.incremental else self.global_vector
        learnt = self.run_sgd(
            begun, flatten_inputs(SERVER_EXAMPLES[0]), SERVER_EXAMPLES[1], batches, lr
        )
        self.global_vector = average + (learnt - begun)


@pytest.mark.parametrize("name", ["fsl", "fsl_p"])
@pytest.mark.parametrize("options", [{}, {"server_epochs": 3}, {"server_rate": "moved"}])
def test_three_rounds_match_algorithm_1(name, options):
    federation = make_federation(name, options, participation=0.7)
    epochs, rule = options.get("server_epochs", 2), options.get("server_rate", "paper")
    loop = ServerLearning(federation, epochs=epochs, incremental=name == "fsl", rule=rule)
    run_and_compare(loop, 3, atol=5e-6)


@pytest.mark.parametrize("name", ["fsl", "fsl_p"])
def test_gamma_decays_by_round(name):
    federation = make_federation(name, hp={"gamma_decay": 0.5})
    run_and_compare(ServerLearning(federation, epochs=2, incremental=name == "fsl"), 3, atol=5e-6)
    start = federation.initial_state()
    first, last = (
        flatten_params(federation.train(1, start._replace(round=jnp.int32(r)))) for r in (0, 40)
    )
    plain = make_federation(name, hp={"gamma": 0.0}).train(1)
    np.testing.assert_allclose(last, flatten_params(plain), atol=1e-6)
    assert np.abs(first - last).max() > 1e-2


@pytest.mark.parametrize(
    ("base", "optimizer", "hp"),
    [
        ("fedavg", "momentum", {"local_momentum": 0.9}),
        slow_case("fedavg", "adam", {"local_lr": 0.01}),
        slow_case("fedadam", "sgd", {"server_lr": 0.03}),
        slow_case("feddyn", "sgd", {}),
        ("fedprox", "adamw", {"local_weight_decay": 0.1, "local_lr": 0.01}),
    ],
)
def test_gamma_weighs_server_step_under_any_optimizer(base, optimizer, hp):
    """A single step of the server's, from where the round began, is gamma times as long as the
    clients' move. (By the paper's rule: 0.4 times that of SGD with momentum, a 25th with Adam.)"""
    one_batch = tuple(array[:BATCH_SIZE] for array in SERVER_EXAMPLES)
    settings = {"hp": hp, "optimizer": optimizer, "server": (one_batch, 1)}
    once = {"base": base, "server_epochs": 1}
    alone = make_federation(base, **settings)
    start = flatten_params(alone.global_params(alone.initial_state()))
    clients, paper, both = (
        flatten_params(federation.train(1))
        for federation in (
            alone,
            make_federation("fsl_p", once, **settings),
            make_federation("fsl_p", {**once, "server_rate": "moved"}, **settings),
        )
    )
    servers = np.linalg.norm(both - clients)
    np.testing.assert_allclose(servers, HP["gamma"] * np.linalg.norm(clients - start), rtol=2e-3)
    assert not np.isclose(np.linalg.norm(paper - clients), servers, rtol=0.1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, None),
        ({"local_optimizer": "adam"}, "local_optimizer = 'adam'"),
        ({"options": {"base": "fedadam"}}, "base = 'fedadam'"),
        ({"local_optimizer": "adam", "options": {"server_rate": "moved"}}, None),
    ],
)
def test_warns_where_gamma_differs_from_paper(settings, said):
    run_spec = RunSpec("fsl", "digits", model="mlp", **settings).resolved()
    entry = get_algorithm_spec("fsl", run_spec.options)
    remarks = entry.settings_warnings(run_spec, entry)
    assert not remarks if said is None else (len(remarks) == 1 and remarks[0].startswith(said))


def test_fsl_with_frozen_clients_is_sgd():
    rate = 0.05
    per_client = np.mean([-(-n // BATCH_SIZE) for n in CLIENT_SIZES if n])
    gamma = rate * -(-sum(CLIENT_SIZES) // BATCH_SIZE) / (1e-7 * per_client)
    hp = {"server_lr": 1.0, "local_lr": 1e-7, "gamma": gamma}
    federation = make_federation("fsl", hp=hp, server=(make_blobs(), 1))
    x, y = flatten_inputs(make_blobs()[0]), make_blobs()[1]
    loop = ReferenceFedAvg(federation)
    model = start = loop.global_vector
    for r in range(3):
        batches = server_batches(fold_in_purpose(round_key(r), Purpose.SERVER), 1, len(y))
        model = loop.run_sgd(model, x, y, batches, rate)
    actual = federation.train(3)
    np.testing.assert_allclose(actual["w"], loop.params(model)["w"], atol=3e-6)
    assert np.abs(loop.params(model - start)["w"]).max() > 0.05


def test_scaffold_option_one_counts_local_steps():
    """Option I passes over the data once more to measure: K is without that."""
    rates = []
    for option in ("I", "II"):  # clients and controls aside, only the rate is left
        hp = {"local_lr": 1e-6, "gamma": 1e5}
        federation = make_federation("fsl", {"base": "scaffold", "option": option}, hp)
        rates.append(federation.train(1))
    assert_trees_all_close(rates[0], rates[1], atol=2e-4)
    start = federation.global_params(federation.initial_state())
    assert np.abs(rates[0]["w"] - start["w"]).max() > 1e-2


# --- pretraining -----------------------------------------------------------------------------


def pretrained_fedavg(epochs, **settings):
    def build(training, plan):
        return with_pretraining(fedavg(training, plan), training, plan, epochs, len(CLIENT_SIZES))

    return make_small_federation(build, hp={**HP, "pretrain_lr": 0.2}, **settings)


@pytest.mark.parametrize("pieces", [(5,), (2, 3), (1, 1, 1, 1, 1)])
def test_pretraining_is_sgd_in_any_pieces(pieces):
    federation = pretrained_fedavg(5)
    (work,) = federation.algorithm.server_stages
    state, key = federation.initial_state(), jax.random.key(11)
    loop = ReferenceFedAvg(federation)
    for count in pieces:
        state = work.advance(federation.hp, state, key, jnp.int32(count), federation.server)
    assert work.count_completed(state) == work.num_iterations == 5
    batches = server_batches(key, 5, len(SERVER_EXAMPLES[1]))
    model = loop.run_sgd(
        loop.global_vector, flatten_inputs(SERVER_EXAMPLES[0]), SERVER_EXAMPLES[1], batches, 0.2
    )
    loop.assert_model(federation.global_params(state), model=model, atol=3e-6)


def test_states_derive_from_pretrained_model():
    entry = get_algorithm_spec("ditto", {})  # clients' own models begin as the global one

    def build(training, plan):
        inner = entry.build_algorithm(training, plan, {})
        return with_pretraining(inner, training, plan, 2, len(CLIENT_SIZES))

    hp = {**HP, "ditto_lambda": 1.0, "pretrain_lr": 0.2}
    federation = make_small_federation(build, hp=hp, client_test_model="personal")
    state = federation.initial_state()
    untrained = federation.global_params(state)
    state = federation.algorithm.server_stages[0].advance(
        federation.hp, state, jax.random.key(0), jnp.int32(2), federation.server
    )
    for k in range(len(CLIENT_SIZES)):
        assert_trees_all_equal(federation.personal_model(state, k), federation.global_params(state))
    assert np.abs(federation.global_params(state)["w"] - untrained["w"]).max() > 1e-2


# --- whole runs ------------------------------------------------------------------------------


def spec(algorithm="fsl", **more):
    common = {"partition": "classes_per_client", "classes": 2, "rounds": 4, "protocol": "fsl"}
    common |= {"gradient_gaps": None, "options": {}, "hp": {"local_lr": 0.05}}
    if METHODS[algorithm].requires_server_examples:
        common |= {"server_options": {"size": 6}, "pretrain_epochs": 0}
    return make_spec(algorithm, **{**common, **more})


def run(spec_, dataset=None, **settings):
    return simulate(spec_, dataset=dataset or make_user_dataset(), **settings)


def with_server(images, labels, data=None):
    data = data or make_user_dataset()
    return dataclasses.replace(data, server_inputs=images, server_labels=labels)


def test_data_sharing_is_fedavg_with_server_examples():
    shared = run(spec("data_sharing"))
    images, _ = make_blobs()
    drawn = shared.summary["server"]
    assert drawn["num_examples"] == 6
    own = shared.partition
    group = prepared(spec("data_sharing"))
    added = group.prepared_runs[0].server_data.indices
    # A client may hold what the server has: in data of its own, where that is there twice.
    data = make_user_dataset()
    held = [np.sort(np.concatenate([own.client_indices(k), added])) for k in range(own.num_clients)]
    twice = dataclasses.replace(
        data,
        train_inputs=data.train_inputs[np.concatenate(held)],
        train_labels=data.train_labels[np.concatenate(held)],
    )
    both = consecutive_partition([len(positions) for positions in held])
    plain = run(spec("fedavg", partition="iid", classes=None), partition=both, dataset=twice)
    for name in ("test_accuracy", "test_loss", "train_loss", "client_samples"):
        np.testing.assert_array_equal(shared.metrics[name], plain.metrics[name], err_msg=name)
    once = 6 * 6 * (images[0].nbytes + 4)
    np.testing.assert_array_equal(
        shared.metrics["bytes_down"] - plain.metrics["bytes_down"], [once, 0, 0, 0]
    )


def prepared(spec_, dataset=None):
    from fedjax_het.runtime.build import prepare_group

    return prepare_group([spec_], UserObjects(dataset or make_user_dataset()))


@pytest.mark.slow
def test_data_sharing_of_pool_is_fedavg():
    data, (images, labels) = make_user_dataset(), SERVER_EXAMPLES
    named = {"server_data": "user", "server_options": {}}
    shared = run(spec("data_sharing", **named), with_server(images, labels))
    larger = dataset_from_arrays(
        np.concatenate([data.train_inputs, images]),
        np.concatenate([data.train_labels, labels]),
        data.test_inputs,
        data.test_labels,
        num_classes=NUM_CLASSES,
        mean=data.mean,
        std=data.std,
    )
    pool = len(data.train_labels) + np.arange(len(labels))
    own = shared.partition
    both = [np.concatenate([own.client_indices(k), pool]) for k in range(own.num_clients)]
    plain = run(
        spec("fedavg", partition="iid", classes=None),
        larger,
        partition=partition_from_clients(both),
    )
    np.testing.assert_array_equal(shared.metrics["train_loss"], plain.metrics["train_loss"])
    np.testing.assert_array_equal(shared.metrics["test_loss"], plain.metrics["test_loss"])


def test_server_epochs_follow_paper():
    from fedjax_het.runtime.group_init import init_group

    group = prepared(spec(local_epochs=2))
    (federation,) = group.prepared_runs
    held = len(federation.partition.indices)
    kept = init_group(group, group.prepared_runs).cached_inputs
    assert int(kept["method_inputs"]["server_epochs"]) == -(-2 * held // (6 * 6))
    assert len(kept["server_examples"].labels) == 6


@pytest.mark.slow
def test_pretraining_is_shown_and_resumed(eager, tmp_path):
    seen = []
    longer = spec(pretrain_epochs=40)
    whole = run(longer, progress=seen.append)
    assert seen[0].phase == "pretraining" and seen[-1].phase == "rounds"
    with pytest.raises(KilledError):
        run(longer, output_dir=tmp_path, progress=make_killing_callback(2))
    assert_results_equal(run(longer, output_dir=tmp_path, resume=True), whole)
    # A round later, methods that do the same are the same: gamma 0 is FedAvg.
    plain = run(
        spec("fedavg", pretrain_epochs=40, server_options={"size": 6}, hp={"local_lr": 0.05})
    )
    frozen = run(spec(pretrain_epochs=40, hp={"local_lr": 0.05, "gamma": 0.0}))
    np.testing.assert_array_equal(plain.metrics["test_loss"], frozen.metrics["test_loss"])
    assert plain.metrics["test_loss"][0] != run(spec("fedavg")).metrics["test_loss"][0]


@pytest.mark.slow
def test_seeds_draw_different_server_examples():
    specs = [spec(seed=s) for s in range(3)]
    for one, result in zip(specs, sweep_specs(specs, spread="runs"), strict=True):
        alone = run(one)
        np.testing.assert_allclose(
            alone.metrics["test_loss"], result.metrics["test_loss"], rtol=2e-4
        )
    drawn = {tuple(prepared(one).prepared_runs[0].server_data.indices) for one in specs}
    assert len(drawn) == 3


@pytest.mark.slow
def test_dynafed_tunes_its_base():
    options = {
        "num_iterations": 2,
        "inner_steps": 2,
        "preset": "code",
        "trajectory_rounds": 2,
        "segment_length": 2,
        "num_samples": 6,
        "fine_tune_epochs": 2,
    }
    common = {"protocol": "dynafed", "partition": "iid", "classes": None, "hp": {}}
    plain = run(spec("dynafed", options=options, **common))
    common["hp"] = {"prox_mu": 0.0}
    same = run(spec("dynafed", options={**options, "base": "fedprox"}, **common))
    np.testing.assert_allclose(plain.metrics["test_loss"], same.metrics["test_loss"], rtol=1e-5)
    common["hp"] = {}
    over = run(spec("dynafed", options={**options, "base": "scaffold"}, **common))
    alone = run(spec("scaffold", **common))
    np.testing.assert_allclose(
        over.metrics["test_loss"][:2], alone.metrics["test_loss"][:2], rtol=1e-5
    )
    gap = np.abs(over.metrics["test_loss"][2:] - alone.metrics["test_loss"][2:])
    assert (gap > 1e-4).all()


def test_default_base():
    named = spec(options={"base": "fedavg"})
    assert named.digest() == spec().digest()
    over = spec(options={"base": "fedprox"}).resolved()
    assert over.options["base"] == "fedprox" and "prox_mu" in over.hp
    assert over.resolved() == over


# --- gradients -------------------------------------------------------------------------------


def softmax_gradients(params, groups):
    w, b = (np.asarray(params[name], np.float64) for name in ("w", "b"))
    return [np.concatenate([g.ravel() for g in softmax_gradient(w, b, x, y)]) for x, y in groups]


@pytest.mark.parametrize(("lanes", "spread"), [(1, None), (1, "lanes"), (2, "lanes")])
def test_gaps_match_full_gradients(lanes, spread):
    plan = make_execution_plan(lanes, None if spread else 1, mesh_axis=spread)
    federation = make_federation("fsl", plan=plan)
    variables = federation.initial_state().server.inner.variables
    scheduler, noises = make_full_pass_scheduler(plan), []
    cohort = Cohort(scheduler.make_round(0), federation.examples, federation.server)
    actual = jax.jit(lambda v: measure_gradient_gaps(federation.task, plan, v, cohort))(variables)
    x, y = flatten_inputs(make_blobs()[0]), make_blobs()[1]
    clients = [
        (x[c], y[c])
        for c in map(consecutive_partition().client_indices, range(len(CLIENT_SIZES)))
        if len(c)
    ]
    (whole, server, *own) = softmax_gradients(
        variables["params"],
        [(x, y), (flatten_inputs(SERVER_EXAMPLES[0]), SERVER_EXAMPLES[1]), *clients],
    )
    np.testing.assert_allclose(actual["server_gap"], ((server - whole) ** 2).sum(), rtol=1e-4)
    expected = np.mean([((g - whole) ** 2).sum() for g in own])
    np.testing.assert_allclose(actual["client_gap"], expected, rtol=1e-4)
    np.testing.assert_allclose(actual["gradient_norm"], np.linalg.norm(whole), rtol=1e-4)
    np.testing.assert_allclose(actual["server_norm"], np.linalg.norm(server), rtol=1e-4)

    def noise(x, y, batches, around):
        """The mean square over examples of their minibatch's gradient, around all examples'."""
        gradients = softmax_gradients(variables["params"], [(x[b], y[b]) for b in batches])
        squares = [((g - around) ** 2).sum() for g in gradients]
        return np.average(squares, weights=[len(b) for b in batches])

    for c, mine in zip((c for c, size in enumerate(CLIENT_SIZES) if size), own, strict=True):
        drawn = zip(*scheduler.client_batches(0, c), strict=True)
        noises.append(noise(x, y, [whole[:size] for whole, size in drawn], mine))
    np.testing.assert_allclose(actual["client_noise"], np.mean(noises), rtol=1e-3)
    sx, sy = flatten_inputs(SERVER_EXAMPLES[0]), SERVER_EXAMPLES[1]
    steps = -(-len(sy) // BATCH_SIZE)
    batches = make_shuffled_batches(jax.random.key(0), len(sy), BATCH_SIZE)
    positions = map(batches.take_step, range(steps))
    first = [np.asarray(index)[np.asarray(mask) > 0] for index, mask in positions]
    np.testing.assert_allclose(actual["server_noise"], noise(sx, sy, first, server), rtol=1e-3)


@pytest.mark.slow
def test_equal_data_have_no_gap():
    images, labels = make_blobs((12,))
    data = dataset_from_arrays(images, labels, images, labels, num_classes=NUM_CLASSES)
    alike = partition_from_clients([np.arange(12)] * 6)
    settings = {"server_data": "user", "server_options": {}, "gradient_gaps": 2}
    result = run(
        spec(partition="iid", classes=None, **settings),
        with_server(images, labels, data),
        partition=alike,
    )
    measured = np.arange(4) % 2 == 0
    for name in ("client_gap", "server_gap"):
        np.testing.assert_array_equal(np.isfinite(result.metrics[name]), measured)
        np.testing.assert_allclose(result.metrics[name][measured], 0, atol=1e-6)
    skewed = run(spec(gradient_gaps=2))
    assert (skewed.metrics["client_gap"][measured] > 1e-3).all()


@pytest.mark.slow
def test_measuring_gaps_does_not_change_results():
    plain, measured = run(spec()), run(spec(gradient_gaps=1))
    for name in ("test_accuracy", "test_loss", "train_loss"):
        np.testing.assert_allclose(plain.metrics[name], measured.metrics[name], rtol=1e-5)


# --- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    {
        "examples without a use": ({"algorithm": "fedavg", "server_data": "iid"}, "server_data"),
        "unknown source": ({"server_data": "cloud"}, "cloud"),
        "negative pretraining": ({"pretrain_epochs": -1}, "pretrain_epochs = -1"),
        "no model to pretrain": (
            {"algorithm": "fedamp", "pretrain_epochs": 2, "protocol": "fedamp", "classes": None}
            | {"partition": "iid"},
            "pretrain_epochs = 2",
        ),
        "empty D_0": ({"server_options": {"size": 0}}, "size = 0"),
        "more classes than there are": ({"classes": 4}, "^classes = 4"),
        "classes of another partition": ({"partition": "iid"}, "classes = 2"),
    }.values(),
    ids=lambda value: str(value)[:40],
)
def test_rejects_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        run(spec(**settings))


def test_rejects_unknown_server_labels():
    images, labels = SERVER_EXAMPLES
    with pytest.raises(ConfigError, match="label"):
        run(
            spec(server_data="user", server_options={}),
            with_server(images, np.full_like(labels, NUM_CLASSES)),
        )


@pytest.mark.parametrize(("clients", "owners"), [(5, [3, 3, 4]), (6, [4, 4, 4])])
def test_uneven_shards_have_one_size(clients, owners):
    """Every client has its two labels; which label goes to one client more is drawn."""
    labels = np.repeat(np.arange(3), 40)
    partition = make_partition(
        "classes_per_client", labels, 3, num_clients=clients, seed=0, classes_per_client=2
    )
    counts = partition.label_counts(labels, 3)
    assert ((counts > 0).sum(1) == 2).all() and len(set(counts[counts > 0])) == 1
    assert sorted((counts > 0).sum(0)) == owners
