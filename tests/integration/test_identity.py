"""The identity of results: whatever decides a run's numbers is in its name or is compared."""

import dataclasses
import importlib
import json
import os
import shutil
import string
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from support.data import make_user_dataset
from support.small_runs import (
    KilledError,
    assert_results_equal,
    make_killing_callback,
    make_spec,
    run_spec,
    run_sweep,
)
from support.tfds_data import write_tfds_dataset

from fedjax_het import (
    ConfigError,
    Result,
    RunSpec,
    analysis,
    federation,
    load_curves,
    load_dataset,
    load_results,
    make_partition,
    register_dataset,
    register_method,
    register_metric,
    register_network,
    register_optimizer,
    register_partition,
    register_server_source,
    simulate,
    sweep,
)
from fedjax_het.cli import main
from fedjax_het.data import dataset_from_arrays
from fedjax_het.methods import build_federated_algorithm, make_local_sgd
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.runtime.device_report import describe_environment
from fedjax_het.runtime.identity import (
    RegisteredIdentity,
    collect_function_digests,
    compute_class_names_digest,
    hash_functions,
    list_function_changes,
)
from fedjax_het.runtime.result_store import select_newest
from fedjax_het.runtime.sweep import plan_sweep

SMALL = {"model": "mlp", "num_clients": 3, "rounds": 2, "participation": 1.0}
SPEC = RunSpec.from_dict({"dataset": "named", "partition": "iid", **SMALL})  # registered below


def list_states(specs, folder, **objects):
    return [state for *_, state in plan_sweep(specs, folder, **objects)]


def run_partially(spec, folder, rounds=3):
    session = federation(spec, dataset=make_user_dataset(), output_dir=folder)
    for status in session.rounds(every=1):
        if status.done >= rounds:
            break
    return session.result()


# --- runs that a callback or the caller ended early -----------------------------------------------


@pytest.mark.parametrize("resumes_alone", [True, False])
def test_partial_run_is_finished(resumes_alone, short_chunks, tmp_path):
    spec, data = make_spec("scaffold"), make_user_dataset()
    partial = run_partially(spec, tmp_path)
    assert partial.is_partial and 3 <= partial.rounds < 9
    assert list_states([spec], tmp_path, dataset=data) == ["partial"]
    (row,) = load_results(tmp_path).to_dict("records")
    assert row["is_partial"] and row["digest"] == f"{partial.digest()}.partial"
    assert load_curves(tmp_path)["digest"].unique().tolist() == [row["digest"]]
    assert "not the whole run" in repr(partial)
    if resumes_alone:
        finished = run_spec(spec, output_dir=tmp_path, resume=True)
    else:
        (finished,) = run_sweep([spec], tmp_path).results
    assert_results_equal(finished, run_spec(spec))
    assert finished.digest() == partial.digest() and not finished.is_partial
    assert load_results(tmp_path)["is_partial"].tolist() == [False]
    assert not list(tmp_path.glob("*.partial.*"))
    assert list_states([spec], tmp_path, dataset=data) == ["done"]


def test_stopped_run_of_a_sweep_is_continued(short_chunks, tmp_path):
    def end_one(status):
        if status.spec.seed == 1 and status.done >= 3:
            status.stop("a look")

    specs = [make_spec(seed=seed) for seed in range(2)]
    first = run_sweep(specs, tmp_path, callbacks=[end_one]).results
    assert [result.is_partial for result in first] == [False, True]
    starts = []

    def record_start(status):
        if status.phase == "start":
            starts.append((status.spec.seed, status.done))

    results = run_sweep(specs, tmp_path, callbacks=[record_start]).results
    assert starts == [(1, first[1].rounds)] and first[1].rounds >= 3
    for result, spec in zip(results, specs, strict=True):
        assert_results_equal(result, run_spec(spec))
    assert not (tmp_path / "unfinished").exists()


def test_partial_run_keeps_a_whole_result(tmp_path):
    spec, data = make_spec(), make_user_dataset()
    whole = run_spec(spec, output_dir=tmp_path)
    partial = run_partially(spec, tmp_path)
    assert_results_equal(Result.load(tmp_path / f"{whole.digest()}.json"), whole)
    assert Result.load(tmp_path / f"{partial.file_stem}.json").is_partial
    assert list_states([spec], tmp_path, dataset=data) == ["done"]
    results = load_results(tmp_path)
    assert sorted(results["is_partial"]) == [False, True]
    assert select_newest(results)["rounds"].tolist() == [9]


def test_partial_result_under_the_former_name(tmp_path):
    partial = run_partially(make_spec(), tmp_path / "new")
    folder = tmp_path / "old"
    folder.mkdir()
    for path in (tmp_path / "new").glob("*.partial.*"):
        path.rename(folder / path.name.replace(".partial", ""))
    assert list_states([make_spec()], folder, dataset=make_user_dataset()) == ["partial"]
    (result,) = run_sweep([make_spec()], folder).results
    assert result.rounds == 9 and result.digest() == partial.digest()


def test_partial_runs_are_left_out_of_means(tmp_path):
    run_spec(make_spec(seed=0), output_dir=tmp_path)
    run_partially(make_spec(seed=1), tmp_path)
    results = load_results(tmp_path)
    (row,) = analysis.summarize_runs(results).to_dict("records")
    whole = results[~results["is_partial"]]["final_accuracy"].item()
    assert (row["seeds"], row["partial"], row["diverged"]) == (1, 1, 0)
    assert row["mean"] == pytest.approx(100 * whole)
    table = analysis.make_overview_table(results)
    assert any("† Ended early, and left out of the mean" in note for note in table.notes)
    (alone,) = analysis.make_overview_table(results[results["is_partial"]]).sections[0].rows
    assert "ended early †" in alone.values()


# --- switches of JAX ------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
def test_default_generator_has_no_effect(implementation):
    expected = run_spec(make_spec())
    with jax.default_prng_impl(implementation):
        result = run_spec(make_spec())
    assert_results_equal(result, expected)
    assert result.digest() == expected.digest()


@pytest.mark.parametrize(
    ("switch", "value"), [("jax_threefry_partitionable", False), ("jax_random_seed_offset", 3)]
)
def test_switches_of_draws_are_in_the_name(switch, value):
    before, default = run_spec(make_spec()), getattr(jax.config, switch)
    jax.config.update(switch, value)
    try:
        result = run_spec(make_spec())
    finally:
        jax.config.update(switch, default)
    assert result.digest() != before.digest()
    assert result.summary["prng"] == f"threefry2x32 {switch}={value}"


def test_compiler_flags_are_recorded(monkeypatch, tmp_path):
    run_sweep([make_spec()], tmp_path)
    flags = "--xla_dump_to=x --xla_gpu_autotune_level=0 --xla_force_host_platform_device_count=8"
    with monkeypatch.context() as patch:
        patch.setattr("fedjax_het.runtime.device_report.get_text", lambda variable: flags)
        assert describe_environment()["switches"] == "--xla_gpu_autotune_level=0"
        lines = []
        (result,) = run_sweep([make_spec()], tmp_path, progress=lines.append).results
    assert result.summary["switches"] == describe_environment()["switches"]
    assert lines[1].startswith("1 of them have switches ") and "by rounding" in lines[1]
    assert {"numpy", "flax", "optax", "jax", "jaxlib"} <= result.summary.keys()


# --- registered data sets and partitions ---------------------------------------------------------


@pytest.fixture
def grow():
    """Register a data set whose size the returned function sets."""
    size = {"n": 51}
    whole = make_user_dataset()

    def load():
        count = size["n"]
        images, labels = whole.train_inputs[:count], whole.train_labels[:count]
        return dataset_from_arrays(images, labels, whole.test_inputs, whole.test_labels)

    register_dataset("named", load)
    return lambda count: size.update(n=count)


def test_changed_dataset_is_executed_again(grow, tmp_path, caplog):
    specs = [dataclasses.replace(SPEC, seed=seed) for seed in range(2)]
    before = sweep(specs, tmp_path, progress=None, keep_state=True).results
    again = sweep(specs, tmp_path, progress=None).results
    assert [r.summary["finished"] for r in again] == [r.summary["finished"] for r in before]
    grow(40)
    assert list_states(specs, tmp_path) == ["outdated"] * 2
    results = sweep(specs, tmp_path, progress=None).results
    (warning,) = [r.getMessage() for r in caplog.records if "changed since results" in r.message]
    assert warning.startswith("data set named: ") and warning.endswith("executed again: 2")
    for result, spec in zip(results, specs, strict=True):
        assert_results_equal(result, simulate(spec))
    assert list_states(specs, tmp_path) == ["done"] * 2


def test_changed_dataset_is_not_continued(grow, tmp_path, eager, caplog):
    spec = dataclasses.replace(SPEC, rounds=6)
    for run in (
        lambda: sweep([spec], tmp_path / "sweep", progress=None, callbacks=[kill]),
        lambda: simulate(spec, output_dir=tmp_path / "run", progress=make_killing_callback(2)),
    ):
        with pytest.raises(KilledError):
            run()
    grow(40)
    with pytest.raises(ConfigError, match="data set named has changed since it was written"):
        simulate(spec, output_dir=tmp_path / "run", resume=True)
    (result,) = sweep([spec], tmp_path / "sweep", progress=None).results
    assert "the run starts again" in caplog.text
    assert_results_equal(result, simulate(spec))


def kill(status):
    if status.done >= 2:
        raise KilledError


def test_changed_final_state_is_not_continued(grow, tmp_path, caplog):
    simulate(SPEC, output_dir=tmp_path)
    grow(40)
    longer = dataclasses.replace(SPEC, rounds=4)
    result = simulate(longer, output_dir=tmp_path, resume=True)
    assert_results_equal(result, simulate(longer))
    assert "data set named: changed since final states" in caplog.text


def test_final_state_of_another_version_is_not_used(grow, tmp_path, monkeypatch, caplog):
    longer = dataclasses.replace(SPEC, rounds=4)
    expected = simulate(longer)
    sweep([SPEC], tmp_path, progress=None, keep_state=True)
    monkeypatch.setattr("fedjax_het.runtime.device_report.__version__", "99.0")
    assert list_states([SPEC], tmp_path) == ["missing"]
    (result,) = sweep([longer], tmp_path, progress=None).results
    assert_results_equal(result, expected)
    assert result.summary["fedjax_het"] == "99.0" and "begun_under" not in result.summary
    assert "expected a checkpoint of this version" in caplog.text
    with pytest.raises(ConfigError, match=r"-> 99\.0"):
        simulate(dataclasses.replace(SPEC, rounds=3), output_dir=tmp_path, resume=True)


def test_changed_files_of_a_builtin_dataset_are_found(tmp_path, caplog):
    from tensorflow_datasets.core import registered

    spec = RunSpec("fedavg", "mnist", partition="iid", **SMALL)
    folders = [tmp_path / "first", tmp_path / "second"]
    with registered.skip_registration():  # of the builder, which is written twice
        for seed, folder in enumerate(folders):
            write_tfds_dataset(folder, "mnist", (28, 28, 1), 10, seed=10 * seed)
    (before,) = sweep([spec], tmp_path, progress=None, data_dir=folders[0]).results
    for data_dir in (folders[0], tmp_path / "missing"):
        (result,) = sweep([spec], tmp_path, progress=None, data_dir=data_dir).results
        assert result.summary["finished"] == before.summary["finished"]
    assert list_states([spec], tmp_path, data_dir=folders[1]) == ["outdated"]
    (result,) = sweep([spec], tmp_path, progress=None, data_dir=folders[1]).results
    assert "data set mnist: changed since results in" in caplog.text
    assert_results_equal(result, simulate(spec, data_dir=folders[1]))


def test_comparison_does_not_repeat_warnings(tmp_path, caplog):
    register_partition("halves", lambda labels: [np.arange(20), np.arange(20, 51), []])
    spec = make_spec(partition="halves", num_clients=3, rounds=2, participation=1.0)
    run_sweep([spec], tmp_path)
    assert "1 of 3 clients hold no examples" in caplog.text
    caplog.clear()
    run_sweep([spec], tmp_path)
    assert "hold no examples" not in caplog.text


def test_changed_partition_is_executed_again(tmp_path):
    def register(step):
        register_partition("strides", lambda labels: [np.arange(k, 51, step) for k in range(3)])

    register(3)
    spec = make_spec(partition="strides", num_clients=3, rounds=2)
    run_sweep([spec], tmp_path)
    register(6)
    (result,) = run_sweep([spec], tmp_path).results
    assert_results_equal(result, run_spec(spec))
    assert result.summary["split"]["num_examples"] < 51


@pytest.mark.parametrize("settings", [{"validation": 0.2}, {"held_out_clients": 1}], ids=str)
def test_unchanged_partition_is_not_executed_again(settings, tmp_path):
    register_partition("strides", lambda labels: [np.arange(k, 51, 4) for k in range(4)])
    num_clients = 4 - settings.get("held_out_clients", 0)
    spec = make_spec(partition="strides", num_clients=num_clients, rounds=2, **settings)
    run_sweep([spec], tmp_path)
    assert list_states([spec], tmp_path, dataset=make_user_dataset()) == ["done"]


def test_different_data_under_one_name_are_noted(grow, tmp_path):
    sweep([SPEC], tmp_path, progress=None)
    grow(40)
    sweep([dataclasses.replace(SPEC, seed=1)], tmp_path, progress=None)
    table = analysis.make_overview_table(load_results(tmp_path))
    assert "named: the runs have different data under this name." in table.notes


# --- registered functions ------------------------------------------------------------------------


def make_network(width):
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x, train=False):
            return linen.Dense(3)(linen.relu(linen.Dense(width)(x.reshape(len(x), -1))))

    return Net()


def make_method(factor):
    def build(training, plan):
        def adjust(context, gradient, local, batch):
            return jax.tree.map(lambda g: factor * g, gradient), local.aux

        return build_federated_algorithm(training, plan, make_local_sgd(training, adjust=adjust))

    return build


REGISTER = {
    "network": (lambda n: register_network("own", make_network(n)), {"model": "own"}),
    "method": (lambda n: register_method("own", make_method(n)), {"algorithm": "own"}),
    "optimizer": (
        lambda n: register_optimizer("own", lambda learning_rate: optax.sgd(learning_rate / n)),
        {"local_optimizer": "own"},
    ),
    "source": (
        lambda n: register_server_source("own", draw=lambda rng: np.arange(n)),
        {"server_data": "own", "algorithm": "data_sharing"},
    ),
    "metric": (
        lambda n: register_metric("own", lambda *batch: batch[2].sum(), lambda s: {"own": n * s}),
        {"metrics": "own, macro_f1"},
    ),
}


@pytest.mark.parametrize("kind", REGISTER)
def test_changed_function_is_found(kind):
    register, settings = REGISTER[kind]
    register(4)
    spec = dataclasses.replace(make_spec(), **settings)
    before = collect_function_digests(spec)
    register(4)
    assert collect_function_digests(spec) == before and len(before) == 1
    register(5)
    (name,) = list_function_changes(collect_function_digests(spec), {"functions": before})
    assert name.endswith(" own")
    assert not list_function_changes(before, {})
    other_python = {name: "3.0-0123456789abcdef"}
    assert not list_function_changes(before, {"functions": other_python})
    assert collect_function_digests(make_spec()) == {}


@dataclasses.dataclass(frozen=True)
class Scale:
    factor: float = 1.0

    def apply(self, gradient):
        return self.factor * gradient


SETTING = None  # which `read_setting` reads


def read_setting(x):
    return x, SETTING


CONSTANTS = {
    "list": ([64, 32], [64, 16]),
    "dict": ({"width": 64}, {"width": 32}),
    "array": (np.arange(3), np.arange(3) + 1),
    "jax array": (jnp.arange(3), jnp.arange(3) + 1),
    "scalar of numpy": (np.float32(1), np.float32(2)),
    "dataclass": (Scale(1.0), Scale(2.0)),
    "object of types": (SimpleNamespace(width=1), SimpleNamespace(width=2)),
    "bound method": (Scale(1.0).apply, Scale(2.0).apply),
    "partial of a list": (partial(max, [1]), partial(max, [2])),
    "compiled function": (jax.jit(lambda x: x + 1), jax.jit(lambda x: x + 2)),
    "function of jax": (jnp.tanh, jnp.sin),
    "network": (linen.Dense(1, bias_init=lambda k, s, d: 0), linen.Dense(2)),
}


@pytest.mark.parametrize("kind", CONSTANTS)
def test_changed_constant_is_found(kind, monkeypatch):
    def list_digests(constant):
        monkeypatch.setitem(globals(), "SETTING", constant)
        functions = (lambda x: (x, constant)), partial(max, key=constant), read_setting
        return {hash_functions(SimpleNamespace(make=function)) for function in functions}

    first, second = map(list_digests, CONSTANTS[kind])
    assert len(first | second) == 6


def test_changed_module_is_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    digests = []
    for factor in (1, 2):
        (tmp_path / "helper_of_user.py").write_text(f"def scale(x):\n    return {factor} * x\n")
        module = importlib.import_module("helper_of_user")
        monkeypatch.setitem(globals(), "SETTING", module)
        digests.append(hash_functions(SimpleNamespace(make=lambda x: SETTING.scale(x))))
        monkeypatch.setitem(globals(), "SETTING", module.scale)
        digests.append(hash_functions(SimpleNamespace(make=lambda x: SETTING(x))))
        monkeypatch.delitem(sys.modules, "helper_of_user")
        importlib.invalidate_caches()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    assert len({*digests}) == 4


def test_object_with_all_attributes(monkeypatch):
    class Settings:
        def __getattr__(self, name):
            return Settings()

    monkeypatch.setitem(globals(), "SETTING", Settings())
    digests = {hash_functions(SimpleNamespace(make=read_setting)) for _ in range(2)}
    assert len(digests) == 1


def test_filled_cache_is_no_change(monkeypatch):
    digests = set()
    for cache in ({}, {64: make_network(64)}):
        monkeypatch.setitem(globals(), "SETTING", cache)
        digests.add(hash_functions(SimpleNamespace(make=read_setting)))
    assert len(digests) == 1


def test_changed_network_is_executed_again(tmp_path, caplog):
    register_network("own", make_network(4))
    spec = make_spec(model="own", rounds=2)
    run_sweep([spec], tmp_path)
    register_network("own", make_network(5))
    (result,) = run_sweep([spec], tmp_path).results
    assert "network own: changed since results" in caplog.text
    assert_results_equal(result, run_spec(spec))


DIGEST_SCRIPT = """
import sys
sys.path.insert(0, {path!r})
from test_identity import REGISTER, collect_function_digests, make_spec
import dataclasses
for register, settings in REGISTER.values():
    register(4)
    print(collect_function_digests(dataclasses.replace(make_spec(), **settings)))
"""


@pytest.mark.slow
def test_function_digests_are_equal_in_all_processes():
    script = DIGEST_SCRIPT.format(path=os.path.dirname(__file__))
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


# --- names of classes ----------------------------------------------------------------------------


def name_classes(names):
    data = load_dataset("digits")
    return dataclasses.replace(data, class_names=tuple(names))


def test_class_names_that_decide_a_partition_are_in_the_name():
    spec = RunSpec("fedavg", "user", model="mlp", partition="grouped", num_clients=6, rounds=1)
    letters, words = name_classes("01234ABCDE"), name_classes(f"class{k}" for k in range(10))
    one, other = (simulate(spec, dataset=data) for data in (letters, words))
    assert one.partition.digest() != other.partition.digest()
    assert one.digest() != other.digest()
    plan = [plan_sweep([spec], "none", dataset=data)[0][0] for data in (letters, words)]
    assert plan == [one.digest(), other.digest()]


def test_class_names_without_effect_are_not_in_the_name():
    spec = RunSpec("fedavg", "user", model="mlp", num_clients=4, rounds=1).resolved()
    letters = name_classes(string.ascii_letters[:10])
    assert compute_class_names_digest(spec, letters) is None
    grouped = dataclasses.replace(spec, partition="grouped", alpha=None).resolved()
    assert compute_class_names_digest(grouped, dataclasses.replace(letters, class_names=())) is None
    names = dataclasses.replace(spec, server_data="iid", pretrain_epochs=1).resolved()
    assert compute_class_names_digest(names, letters) is None
    glyphs = dataclasses.replace(names, server_data="glyphs", server_options={}).resolved()
    assert compute_class_names_digest(glyphs, letters)


def test_class_names_of_registered_datasets_are_compared(tmp_path):
    register_dataset("named", lambda: name_classes("01234ABCDE"))
    spec = RunSpec("fedavg", "named", model="mlp", partition="grouped", num_clients=6, rounds=1)
    (before,) = sweep([spec], tmp_path, progress=None).results
    register_dataset("named", lambda: name_classes("0123456789"))
    changes = RegisteredIdentity(UserObjects()).list_changes(spec.resolved(), before.summary)
    assert changes == ["class names of named"]


# --- the command `run` ---------------------------------------------------------------------------

RUN = ["run", "--model", "mlp", "--num-clients", "4", "--rounds", "4", "--dataset", "digits"]


def test_command_prints_a_finished_run(tmp_path, capsys, monkeypatch):
    command = [*RUN, "--output-dir", str(tmp_path)]
    assert main(command) == 0
    first, files = capsys.readouterr(), {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr("fedjax_het.runtime.session.simulate", None)
        for flags in ([], ["--resume"]):
            assert main([*command, *flags]) == 0
            again = capsys.readouterr()
            assert json.loads(again.out) == json.loads(first.out.splitlines()[-1])
            assert "--restart repeats the run\n" in again.err
        (state,) = tmp_path.glob("*.state.npz")
        state.rename(tmp_path / "moved")
        assert main([*command, "--track", "tensorboard"]) == 0
        text = "repeats the run and writes the final state, the record of tensorboard\n"
        assert text in capsys.readouterr().err
        (tmp_path / "moved").rename(state)
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert main([*command, "--restart"]) == 0
    assert all(path.stat().st_mtime_ns > files[path] for path in tmp_path.glob("*.json"))
    assert main([*command, "--restart", "--resume"]) == 2
    assert "--restart = True: expected no --resume" in capsys.readouterr().err


def test_command_continues_or_restarts(tmp_path, capsys, eager, caplog):
    spec = RunSpec("fedavg", "digits", model="mlp", num_clients=4, rounds=4)
    with pytest.raises(KilledError):
        simulate(spec, output_dir=tmp_path, progress=make_killing_callback(2))
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "checkpoint.npz").write_bytes((tmp_path / "checkpoint.npz").read_bytes())
    simulate(spec, output_dir=tmp_path / "copy")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "of 4 rounds are done, but the run starts again" in line and "resume=True" in line
    capsys.readouterr()
    assert main([*RUN, "--output-dir", str(tmp_path)]) == 0
    assert "starts again" not in capsys.readouterr().err
    (path,) = tmp_path.glob("*.json")
    assert_results_equal(Result.load(path), simulate(spec))
    assert Result.load(path).summary["round_seconds"] > 0
    assert not (tmp_path / "checkpoint.npz").exists()


def test_figures_of_runs_share_a_folder(tmp_path):
    for seed in ("0", "1"):
        command = [*RUN, "--seed", seed, "--quiet", "--output-dir", str(tmp_path)]
        assert main(command) == 0
    for name in ("curve.png", "partition.png", "partition.npz"):
        assert len(list(tmp_path.glob(f"*.{name}"))) == 2


# --- own data in texts ---------------------------------------------------------------------------


def test_own_data_are_marked_in_texts(tmp_path, capsys):
    data = load_dataset("digits")
    own = dataclasses.replace(data, train_inputs=data.train_inputs[::-1].copy())
    split = make_partition("iid", data.train_labels, 10, num_clients=3, seed=7)
    spec = RunSpec("fedavg", "digits", partition="iid", **SMALL)
    texts, settings = [], []

    def look(status):
        texts.append(repr(status))
        settings.append(status.settings)

    result = simulate(spec, dataset=own, partition=split, callbacks=[look])
    marks = f"own {own.digest()[:8]}", f"own {split.digest()[:8]}"
    assert all(mark in repr(result) and mark in result._repr_html_() for mark in marks)
    assert marks[0] in texts[0]
    assert (settings[0]["dataset"], settings[0]["partition"]) == marks
    lines = []
    swept = sweep([spec], tmp_path, dataset=own, progress=lines.append)
    assert any(marks[0] in line for line in lines) and marks[0] in repr(swept)
    assert "own" not in repr(simulate(spec, dataset=data))
