"""Divergence: its round, found in losses, updates and states, and its metrics."""

import contextlib
import functools
import json
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.data import make_user_dataset
from support.markers import method_cases, slow_case
from support.small_runs import assert_results_equal, make_spec, run_spec, run_sweep

from fedjax_het import Placement
from fedjax_het.core import client_loop, evaluation, round_program
from fedjax_het.core.client_loop import Examples
from fedjax_het.core.evaluation import (
    evaluate,
    evaluate_clients,
    make_client_tests,
    place_evaluation_set,
)
from fedjax_het.core.execution_plan import make_execution_plan
from fedjax_het.core.task import Task
from fedjax_het.data import partition_from_clients
from fedjax_het.nn import Model
from fedjax_het.runtime import compiled_programs, group_init, group_state
from fedjax_het.runtime.build import prepare_group
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.runtime.group_init import init_group, init_states, list_programs
from fedjax_het.runtime.history import build_curves, get_latest_accuracy, record_rounds
from fedjax_het.runtime.long_phases import count_nonfinite_per_run
from fedjax_het.runtime.result_builder import summarize_metrics
from fedjax_het.tasks.classification import correct
from fedjax_het.utils.arrays import count_nonfinite

# --- accuracies of logits that are not finite ----------------------------------------------------

# Its logits are the three channels of its images.
READER = Model(
    "reader",
    (1, 1, 3),
    3,
    init=lambda key: {"params": {}, "state": {}},
    apply=lambda variables, x, *, train, key=None: (x[:, 0, 0, :], variables["state"]),
)
TASK = Task(READER, (0.0,) * 3, (1.0,) * 3)
NOTHING: dict = {"params": {}, "state": {}}
LABELS = np.array([0, 1, 2, 0, 1], np.int32)


def pictures(**bad):
    """Logits of which the first four are right; `bad` are others, by position."""
    logits = np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 2]]
    for place, value in bad.items():
        logits[int(place[1:]), 2] = value
    return logits[:, None, None, :]


def test_prediction_of_nan_logits_is_undefined():
    logits = jnp.array([[jnp.nan, 1, 2], [0, jnp.inf, 1], [0, 1, -jnp.inf], [0, 2, 1], [3, 2, 1]])
    right = np.asarray(correct(logits, jnp.array([0, 1, 1, 1, 1])))
    np.testing.assert_array_equal(right, [np.nan, np.nan, np.nan, 1, 0])


@functools.cache
def make_domain_evaluation(devices):
    """Return the plan of a number of devices, and its compiled evaluation of two domains."""
    plan = make_execution_plan(1, devices)
    return plan, jax.jit(lambda data: evaluate(TASK, plan, NOTHING, data, num_domains=2))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("devices", [1, 2])
def test_accuracy_of_nonfinite_logits_is_nan(value, devices):
    plan, evaluate_domains = make_domain_evaluation(devices)

    def compute(images):
        return evaluate_domains(
            place_evaluation_set(plan, images, LABELS, np.array([0, 0, 1, 1, 1]))
        )

    fine, lost = compute(pictures()), compute(pictures(p3=value))
    assert float(fine.accuracy) == np.float32(4 / 5) and np.isfinite(float(fine.loss))
    np.testing.assert_allclose(fine.domain_accuracy, [1, 2 / 3], rtol=1e-6)
    assert np.isnan(float(lost.accuracy))
    np.testing.assert_array_equal(lost.domain_accuracy, [1, np.nan])


@pytest.mark.parametrize("devices", [1, 2])
def test_client_with_nonfinite_logits_has_no_accuracy(devices):
    plan = make_execution_plan(2, devices)
    tests = partition_from_clients([np.array([0, 4]), np.array([], int), np.array([1, 2])])
    shape = evaluation.compute_client_tests_shape(plan, tests)
    placed = make_client_tests(plan, tests, shape)

    @jax.jit
    def compute(images):
        examples = Examples(images, jnp.asarray(LABELS))
        arguments = (placed, examples, 3, shape.num_groups)
        models = evaluation.ClientModelSource(lambda arrays, k: arrays, NOTHING)
        return evaluate_clients(TASK, plan, models, *arguments)

    fine, other, lost = (
        compute(pictures()),
        compute(pictures(p3=np.nan)),
        compute(pictures(p2=np.inf)),
    )
    for each in (fine, other):  # the fourth image is in nobody's test
        np.testing.assert_array_equal(each.accuracy, [0.5, np.nan, 1])
        assert bool(each.is_finite)
    np.testing.assert_array_equal(lost.accuracy, [0.5, np.nan, np.nan])
    assert not bool(lost.is_finite)


def test_client_mean_includes_all_clients_with_tests():
    class Measured:
        test_accuracy = test_loss = train_loss = update_norm = np.ones(2, np.float32)
        domain_accuracy, records, metrics, validation = None, {}, {}, {}
        client_accuracy = np.array([[0.5, np.nan, 1], [np.nan, np.nan, 1]], np.float32)

    tests = partition_from_clients([np.array([0]), np.array([], int), np.array([1])])
    spec = SimpleNamespace(attack={}, partition_seed=0)
    data = SimpleNamespace(
        dataset=make_user_dataset(), partition=tests, client_tests=tests, spec=spec
    )
    actual = build_curves(Measured, data)
    np.testing.assert_array_equal(actual["mean_client_accuracy"], [0.75, np.nan])
    # A client that never had finite logits is not one without a test.
    Measured.client_accuracy = np.array([[np.nan, np.nan, 1]] * 2, np.float32)
    actual = build_curves(Measured, data)
    assert np.isnan(actual["mean_client_accuracy"]).all()


# --- what is kept of a run that diverged ---------------------------------------------------------


def test_nonfinite_round_is_the_last():
    curves = {"train_loss": np.full(5, np.nan)}
    new = {"train_loss": np.arange(3.0)}
    assert record_rounds(curves, new, np.ones(3), 1, 3) is None
    assert record_rounds(curves, new, np.array([1.0, 0.0, 1.0]), 1, 3) == 3
    assert record_rounds(curves, new, np.array([1.0, 0.0, 1.0]), 1, 1) is None


def test_diverged_run_has_no_final_accuracy():
    names = ("test_accuracy", "train_loss", "test_loss", "client_accuracy", "mean_client_accuracy")
    metrics = {name: np.full(6, 0.5, np.float32) for name in names}
    metrics["client_accuracy"] = np.full((6, 2), 0.5, np.float32)
    fine, lost = summarize_metrics(metrics), summarize_metrics(metrics, has_diverged=True)
    assert (fine["diverged"], lost["diverged"]) == (False, True)
    assert fine["final_accuracy"] == fine["final_client_accuracy"] == 0.5
    gone = ("final_accuracy", "last_accuracy", "window_accuracy", "final_client_accuracy")
    assert all(lost[name] is None for name in gone)


def test_latest_accuracy_is_of_active_runs():
    going, none = np.array([0.5, np.nan]), np.full(2, np.nan)
    assert get_latest_accuracy([going]) == 0.5
    assert np.isnan(get_latest_accuracy([])) and np.isnan(get_latest_accuracy([none]))


# --- whole runs ----------------------------------------------------------------------------------


@contextlib.contextmanager
def poisoned(monkeypatch, where, number, value=np.nan):
    """Put a number that is not finite into the state of the server or of every client.

    It appears after round `number`, from 0, or after more iterations of the work between rounds.
    """
    build, run_block = compiled_programs.build_algorithm, client_loop._run_block

    def spoilt(tree, due, place):
        leaves, structure = jax.tree.flatten(tree)
        leaf = leaves[place]
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size:
            flat = leaf.reshape(-1)
            bad = flat.at[0].set(jnp.where(due, value, flat[0]).astype(leaf.dtype))
            leaves[place] = bad.reshape(leaf.shape)
        return jax.tree.unflatten(structure, leaves)

    def algorithm_of(*args):
        algorithm = build(*args)

        def round_(hp, state, key, cohort):
            due = state.round == number
            if where == "clients" and algorithm.can_page_state:
                return algorithm.round({**hp, "due": due}, state, key, cohort)
            new, info = algorithm.round(hp, state, key, cohort)
            if where == "server":
                return new._replace(server=spoilt(new.server, due, 0)), info
            every = jax.vmap(partial(spoilt, due=due, place=-1))
            return new._replace(clients=every(new.clients)), info

        def spoilt_work(work):
            def advance(hp, state, key, count, server):
                new = work.advance(hp, state, key, count, server)
                return new._replace(server=spoilt(new.server, count > number, 0))

            return work._replace(advance=advance)

        if where == "work":
            return algorithm._replace(
                server_stages=tuple(map(spoilt_work, algorithm.server_stages))
            )
        return algorithm._replace(round=round_)

    def run_poisoned_block(client, *args):
        def end(context, *arguments):
            upload, state, output = client.end(context, *arguments)
            if "due" in context.hp and jax.tree.leaves(state):
                state = spoilt(state, context.hp["due"], -1)
            return upload, state, output

        return run_block(client._replace(end=end), *args)

    with monkeypatch.context() as patch:
        patch.setattr(compiled_programs, "build_algorithm", algorithm_of)
        patch.setattr(client_loop, "_run_block", run_poisoned_block)
        compiled_programs.build_programs.cache_clear()
        yield
    compiled_programs.build_programs.cache_clear()


def states_of(name):
    """The parts of a method's state that have numbers."""
    group = prepare_group([make_spec(name)], UserObjects(make_user_dataset()))
    state_of_group = init_group(group, group.prepared_runs)
    shapes = group_init.compute_state_shapes(state_of_group)

    def has(tree):
        leaves = jax.tree.leaves(tree)
        return bool(leaves) and jnp.issubdtype(leaves[-1].dtype, jnp.floating)

    return [part for part in ("server", "clients") if has(getattr(shapes, part))]


@pytest.mark.parametrize("name", method_cases(quick=["fedamp"]))
def test_nonfinite_state_is_found_in_its_round(monkeypatch, name):
    for where in states_of(name):
        # The server's in the second of three; clients' in the last, whose curves are whole.
        number = 1 if where == "server" else 2
        with poisoned(monkeypatch, where, number):
            actual = run_spec(make_spec(name, rounds=3))
        assert actual.summary["diverged"] and actual.summary["rounds"] == number + 1, where
        assert actual.summary["final_accuracy"] is None


def test_initial_state_may_have_nonfinite_numbers():
    group = prepare_group([make_spec("dynafed")], UserObjects(make_user_dataset()))
    state_of_group = init_group(group, group.prepared_runs)
    init_states(state_of_group)
    first = count_nonfinite_per_run(
        state_of_group.state, has_run_axis=state_of_group.group.runs_parallel
    )
    assert (first > 0).sum() == 4  # no loss yet at any start, no best one, an empty log of two
    assert count_nonfinite({"a": jnp.array([jnp.inf, 1]), "n": jnp.arange(3)}).tolist() == [1]
    assert count_nonfinite({"k": jax.random.key(0), "b": jnp.array(True)}).tolist() == []


@pytest.mark.parametrize(
    ("placement", "chunk"),
    [
        slow_case({"devices": 1, "lanes": 1}, 16),
        slow_case({"devices": 1, "lanes": 3}, 16),
        slow_case({"devices": 2, "lanes": 2}, 1),
        slow_case({"devices": 1, "client_state": "host"}, 2),
    ],
)
def test_diverged_round_is_independent_of_placement(monkeypatch, placement, chunk):
    monkeypatch.setattr(group_state, "MAX_ROUNDS_PER_CHUNK", chunk)
    with poisoned(monkeypatch, "clients", 2, value=-np.inf):
        actual = run_spec(make_spec("scaffold", rounds=6), **placement)
    assert (actual.summary["diverged"], actual.summary["rounds"]) == (True, 3)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedavg", {"hp": {"server_lr": 3e38}}),  # finite weights, infinite logits
        slow_case("fedavg", {"hp": {"local_lr": 1e30}}),
        slow_case("fedadam", {"hp": {"server_lr": 1e30}}),
        slow_case("feddm", {"hp": {"image_lr": 1e38}}),
        slow_case("apfl", {"hp": {"local_lr": 1e30}}),
    ],
)
def test_divergence_in_the_only_round_is_recorded(name, settings):
    actual = run_spec(make_spec(name, rounds=1, **settings))
    assert actual.summary["diverged"] and actual.summary["rounds"] == 1
    assert actual.summary["final_accuracy"] is None
    measured = "mean_client_accuracy" if name == "apfl" else "test_accuracy"
    assert np.isnan(actual.metrics[measured]).all()


def test_diverged_run_in_parallel_stops_alone():
    specs = [make_spec(rounds=3, hp={"server_lr": rate}) for rate in (3e38, 1.0)]
    sweep_result = run_sweep(specs, spread="runs")
    lost, fine = sweep_result.results
    assert (lost.summary["diverged"], lost.summary["rounds"]) == (True, 1)
    assert not fine.summary["diverged"] and sweep_result.to_summary("x")["diverged"] == 1
    assert_results_equal(fine, run_sweep(specs[1:], spread="runs").results[0])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rounds_before"), [("fsl", 0), slow_case("dynafed", 4)])
def test_diverged_server_stage_ends_the_run(monkeypatch, tmp_path, name, rounds_before):
    with poisoned(monkeypatch, "work", 0):
        actual = run_spec(make_spec(name), output_dir=tmp_path)
    assert (actual.summary["diverged"], actual.summary["rounds"]) == (True, rounds_before)
    known = np.isfinite(actual.metrics["train_loss"])
    assert known.sum() == rounds_before
    (saved,) = tmp_path.glob("*.json")
    assert json.loads(saved.read_text())["summary"]["diverged"] is True


# --- what the check costs ------------------------------------------------------------------------


def compiled_rounds(name, spread):
    placement = Placement(devices=2, spread=spread, lanes=1)
    group = prepare_group([make_spec(name)], UserObjects(make_user_dataset()), placement=placement)
    program, inputs = list_programs(init_group(group, group.prepared_runs))["rounds"]
    return program.lower(*inputs).compile().as_text()


@contextlib.contextmanager
def unchecked(monkeypatch):
    """Remove the check of states."""
    with monkeypatch.context() as patch:
        nothing = lambda *args, **settings: jnp.zeros(1, jnp.int32)  # noqa: E731
        patch.setattr(round_program, "count_nonfinite_state", nothing)
        patch.setattr(client_loop, "has_no_new_nonfinite", lambda *states: jnp.array(True))
        compiled_programs.build_programs.cache_clear()
        yield
    compiled_programs.build_programs.cache_clear()


@pytest.mark.parametrize(
    "name", [slow_case("scaffold"), slow_case("fedamp"), slow_case("dynafed"), "fedavg"]
)
def test_check_adds_no_collective(monkeypatch, name):
    def collectives(text):
        return re.findall(r" (all-reduce|all-gather|all-to-all|collective-permute)[.\w-]*\(", text)

    with unchecked(monkeypatch):
        without = collectives(compiled_rounds(name, "lanes"))
    assert collectives(compiled_rounds(name, "lanes")) == without and without


@pytest.mark.parametrize("name", method_cases(quick=()))
def test_check_changes_no_result_and_finds_no_divergence(monkeypatch, name):
    with unchecked(monkeypatch):
        without = run_spec(make_spec(name, rounds=3))
    checked = run_spec(make_spec(name, rounds=3))
    assert not checked.summary["diverged"] and checked.summary["rounds"] == 3
    # Two programs, which a compiler may fuse otherwise: on some processors last bits differ.
    assert_results_equal(checked, without, rtol=1e-5, atol=1e-6)
