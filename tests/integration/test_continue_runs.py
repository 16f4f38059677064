"""Runs that begin with a final state, which also contains the models of results, or a model."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import optax
import pytest
from support.data import make_user_dataset
from support.markers import method_cases, slow_case
from support.small_runs import (
    KilledError,
    assert_all_equal,
    assert_results_equal,
    make_killing_callback,
    make_spec,
    run_sweep,
)

from fedjax_het import ConfigError, Placement, Result, RunSpec, evaluate, load_model, simulate
from fedjax_het.cli import main
from fedjax_het.runtime import checkpointing
from fedjax_het.runtime.compiled_programs import build_programs

# Short chunks give runs of all lengths one program.
pytestmark = pytest.mark.usefixtures("short_chunks")
DATA = make_user_dataset()


def run(spec, folder=None, **settings):
    return simulate(spec, output_dir=folder, **{"dataset": DATA, **settings})


def run_and_list_rounds(spec, folder, **settings):
    """Resume a run; return its result and the rounds that were reported."""
    rounds = []
    progress = lambda status: rounds.append(status.done)  # noqa: E731
    return run(spec, folder, resume=True, progress=progress, **settings), rounds


def rounds(spec_, count):
    return dataclasses.replace(spec_, rounds=count)


@pytest.mark.parametrize("name", method_cases(quick=["scaffold"]))
def test_continued_run_equals_a_long_run(name, tmp_path):
    short = make_spec(name, rounds=7, eval_every=3)
    whole = run(rounds(short, 12))
    run(short, tmp_path)
    continued, reported = run_and_list_rounds(rounds(short, 12), tmp_path)
    assert min(reported) > 7 or name == "dynafed"  # whose synthesis may be the last thing done
    assert_results_equal(continued, whole)
    jax.tree.map(np.testing.assert_array_equal, continued.state, whole.state)
    assert len(list(tmp_path.glob("*.state.npz"))) == 2


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_resume_reads_file_once(has_checkpoint, tmp_path, monkeypatch):
    if has_checkpoint:
        monkeypatch.setenv("FEDJAX_HET_CHECKPOINT_SECONDS", "0")
        monkeypatch.setattr("fedjax_het.runtime.group_state.MAX_ROUNDS_PER_CHUNK", 1)
        with pytest.raises(KilledError):
            run(make_spec(rounds=4), tmp_path, progress=make_killing_callback(2))
    else:
        run(make_spec(rounds=2), tmp_path)
    paths, read = [], checkpointing.read_npz

    def record(path, **options):
        paths.append(path)
        return read(path, **options)

    monkeypatch.setattr(checkpointing, "read_npz", record)
    assert run(make_spec(rounds=4), tmp_path, resume=True).rounds == 4
    assert len(paths) == 1 and ("checkpoint" in paths[0].name) == has_checkpoint


def test_checkpoint_resumes_to_more_rounds(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDJAX_HET_CHECKPOINT_SECONDS", "0")
    monkeypatch.setattr("fedjax_het.runtime.group_state.MAX_ROUNDS_PER_CHUNK", 1)
    short = make_spec(rounds=7)
    with pytest.raises(KilledError):
        run(short, tmp_path, progress=make_killing_callback(2))
    assert (tmp_path / checkpointing.CHECKPOINT_FILE).exists()
    with pytest.raises(ConfigError, match=r"rounds 7 -> 12; 2 rounds are done"):
        run(rounds(short, 12), tmp_path)
    with pytest.raises(ConfigError, match=r"rounds 7 -> 1; 2 rounds are done"):
        run(rounds(short, 1), tmp_path, resume=True)
    assert_results_equal(run(rounds(short, 12), tmp_path, resume=True), run(rounds(short, 12)))


@pytest.mark.slow
def test_run_resumes_from_most_rounds(tmp_path):
    short = make_spec(rounds=2)
    for count in (2, 5, 9):
        run(rounds(short, count), tmp_path)
    run(make_spec(rounds=6, seed=1), tmp_path)
    result, reported = run_and_list_rounds(rounds(short, 8), tmp_path)
    assert min(reported) == 6
    assert_results_equal(result, run(rounds(short, 8)))


def test_finished_run_is_not_repeated(tmp_path):
    result = run(make_spec(rounds=5), tmp_path)
    again, reported = run_and_list_rounds(make_spec(rounds=5), tmp_path)
    assert not reported
    assert_results_equal(again, result)


def test_state_requires_the_data(tmp_path):
    run(make_spec(rounds=3), tmp_path)
    other = dataclasses.replace(DATA, train_inputs=DATA.train_inputs[::-1].copy())
    result, reported = run_and_list_rounds(make_spec(rounds=5), tmp_path, dataset=other)
    assert min(reported) == 1
    assert_results_equal(result, run(make_spec(rounds=5), dataset=other))


def test_keep_state_false_writes_no_state(tmp_path):
    run(make_spec(rounds=3), tmp_path, keep_state=False)
    assert not list(tmp_path.glob("*.state.npz"))
    (path,) = tmp_path.glob("[0-9a-f]*.json")
    with pytest.raises(ConfigError, match="expected a run with keep_state=True"):
        Result.load(path).model()


def test_sweep_resumes_to_more_rounds(tmp_path):
    specs = [make_spec(seed=seed, rounds=4) for seed in range(3)]
    run_sweep(specs, tmp_path, keep_state=True)
    longer = [rounds(each, 6) for each in specs]
    continued = run_sweep(longer, tmp_path).results
    assert_all_equal(continued, run_sweep(longer).results)
    assert all(result.summary["round_seconds"] > 0 for result in continued)
    lengths = [json.loads(path.read_text())["spec"]["rounds"] for path in tmp_path.glob("*.json")]
    assert sorted(lengths) == [4, 4, 4, 6, 6, 6]


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("ditto", "device"),
        slow_case("scaffold", "host"),
        slow_case("fedavg", "device"),
        slow_case("fedamp", "device"),
    ],
)
def test_loaded_result_has_models(name, where, tmp_path):
    settings = {"rounds": 2, "participation": 0.4, "client_tests": True, "test_per_client": 6}
    result = run(make_spec(name, **settings), tmp_path, placement=Placement(client_state=where))
    (path,) = tmp_path.glob("[0-9a-f]*.json")
    loaded = Result.load(path)
    inside = run(make_spec(name, **settings))  # with all clients' states at hand
    assert result.digest() == loaded.digest()
    for client in (None,) if name in ("fedavg", "scaffold") else range(6):
        mine, theirs = loaded.model(client), inside.model(client)
        jax.tree.map(np.testing.assert_array_equal, mine.variables, theirs.variables)
        assert mine.input_spec == theirs.input_spec and mine.client == client


def test_command_resumes_to_more_rounds(tmp_path, capsys):
    words = ["run", "--dataset", "digits", "--model", "mlp", "--num-clients", "4", "--quiet"]
    words += ["--output-dir", str(tmp_path)]
    assert main([*words, "--rounds", "2"]) == 0
    assert main([*words, "--rounds", "4", "--resume"]) == 0
    continued = json.loads(capsys.readouterr().out.splitlines()[-1])
    whole = simulate(RunSpec("fedavg", "digits", model="mlp", num_clients=4, rounds=4))
    assert continued["final_accuracy"] == whole.summary["final_accuracy"]
    assert len(list(tmp_path.glob("*.state.npz"))) == 2


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedavg", {"optimizer_state": "keep"}),
        slow_case("ditto", {"client_tests": True, "test_per_client": 6}),
    ],
)
def test_loaded_result_requires_the_user_optimizer(name, settings, tmp_path):
    own = optax.chain(optax.clip(1.0), optax.adam(1e-2))
    result = run(make_spec(name, rounds=3, **settings), tmp_path, optimizer=own)
    (path,) = tmp_path.glob("[0-9a-f]*.json")
    loaded, client = Result.load(path), 2 if name == "ditto" else None
    with pytest.raises(ConfigError, match="optimizer = None: expected the optimizer of the run"):
        loaded.model(client)
    model = loaded.model(client, optimizer=own)
    jax.tree.map(np.testing.assert_array_equal, model.variables, result.model(client).variables)
    again = load_model(model.save(tmp_path / "model"))
    jax.tree.map(np.testing.assert_array_equal, model.variables, again.variables)
    longer = run(make_spec(name, rounds=5, **settings), tmp_path, optimizer=own, resume=True)
    assert_results_equal(longer, run(make_spec(name, rounds=5, **settings), optimizer=own))


# --- a model from a file


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The model that seed 3 draws: rates of 0 leave it as it is."""
    still = run(make_spec("fedavg", rounds=1, seed=3, hp={"local_lr": 0.0}))
    return str(still.save_model(tmp_path_factory.mktemp("models") / "drawn.msgpack"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fedavg", "scaffold", "fedamp", slow_case("dynafed"), slow_case("apfl")]
)
def test_the_model_that_would_be_drawn_changes_nothing(name, drawn):
    settings = {"rounds": 5, "seed": 3}
    assert_results_equal(
        run(make_spec(name, **settings, init_from=drawn)), run(make_spec(name, **settings))
    )


def test_what_is_begun_with_is_the_model_of_the_file(tmp_path):
    trained = run(make_spec(rounds=9, hp={"local_lr": 0.1}))
    path = trained.save_model(tmp_path / "model.msgpack")
    still = run(make_spec(rounds=1, seed=7, init_from=str(path), hp={"local_lr": 0.0}))
    assert still.metrics["test_accuracy"][0] == evaluate(load_model(path), DATA).accuracy
    jax.tree.map(np.testing.assert_array_equal, still.model().variables, trained.model().variables)


def test_a_sweep_begins_all_its_runs_so(drawn):
    specs = [make_spec(rounds=4, seed=seed, init_from=drawn) for seed in range(3)]
    results = run_sweep(specs).results
    assert_all_equal(results, [run(spec) for spec in specs])
    assert not np.array_equal(results[0].metrics["test_loss"], results[1].metrics["test_loss"])


def test_another_model_under_the_same_name_is_another_run(drawn, tmp_path):
    path = str(tmp_path / "model.msgpack")
    shutil.copy(drawn, path)
    once = make_spec(rounds=4, init_from=path)
    first = run(once, tmp_path / "out")
    (sweep_result,) = run_sweep([once], tmp_path / "out").results
    assert_results_equal(sweep_result, first)  # found, under the name that both give it
    assert len(list((tmp_path / "out").glob("[0-9a-f]*.json"))) == 1
    run(make_spec(rounds=2, seed=9)).save_model(path)
    assert run(once).digest() != first.digest()
    longer = dataclasses.replace(once, rounds=5)
    with pytest.raises(ConfigError, match=r"this model \(init_from\)"):
        run(longer, tmp_path / "out", resume=True)
    loaded = Result.load(tmp_path / "out" / f"{first.digest()}.json")
    jax.tree.map(np.testing.assert_array_equal, loaded.model().variables, first.model().variables)


def test_what_is_no_model_of_this_network_is_one_line(drawn, tmp_path):
    cases = {
        str(tmp_path / "none.msgpack"): "as save_model writes it",
        str(tmp_path): "as save_model writes it",
        drawn: "in which params/.* is float32",
    }
    for path, expected in cases.items():
        other = {"model": "convnet", "width": 4, "depth": 1} if path == drawn else {}
        with pytest.raises(ConfigError, match=expected) as caught:
            run(make_spec(init_from=path, **other))
        assert "\n" not in str(caught.value) and str(caught.value).startswith("init_from = ")
    (tmp_path / "bad.msgpack").write_bytes(b"no model")
    with pytest.raises(ConfigError, match="is damaged"):
        run(make_spec(init_from=str(tmp_path / "bad.msgpack")))


def test_programs_are_those_of_runs_that_draw(drawn):
    plain = run(make_spec(rounds=3))
    before = build_programs.cache_info().misses
    begun = run(make_spec(rounds=3, init_from=drawn))
    assert build_programs.cache_info().misses == before
    assert begun.summary["lanes"] == plain.summary["lanes"]
