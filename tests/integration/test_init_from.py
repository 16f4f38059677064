"""Runs that begin with a model from a file."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from support.data import make_user_dataset
from support.markers import slow_case
from support.small_runs import assert_all_equal, assert_results_equal, make_spec, sweep_specs

from fedjax_het import ConfigError, Result, evaluate, load_model, simulate
from fedjax_het.runtime.compiled_programs import build_programs

DATA = make_user_dataset()


def run(spec_, **settings):
    return simulate(spec_, dataset=DATA, **settings)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The model that seed 3 draws: rates of 0 leave it as it is."""
    still = run(make_spec("fedavg", rounds=1, seed=3, hp={"local_lr": 0.0}))
    return str(still.save_model(tmp_path_factory.mktemp("models") / "drawn.msgpack"))


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
    made = sweep_specs(specs).results
    assert_all_equal(made, [run(spec) for spec in specs])
    assert not np.array_equal(made[0].metrics["test_loss"], made[1].metrics["test_loss"])


def test_another_model_under_the_same_name_is_another_run(drawn, tmp_path):
    path = str(tmp_path / "model.msgpack")
    shutil.copy(drawn, path)
    once = make_spec(rounds=4, init_from=path)
    first = run(once, output_dir=tmp_path / "out")
    (made,) = sweep_specs([once], tmp_path / "out").results
    assert_results_equal(made, first)  # found, under the name that both give it
    assert len(list((tmp_path / "out").glob("[0-9a-f]*.json"))) == 1
    run(make_spec(rounds=2, seed=9)).save_model(path)
    assert run(once).digest() != first.digest()
    longer = dataclasses.replace(once, rounds=5)
    with pytest.raises(ConfigError, match=r"this model \(init_from\)"):
        run(longer, output_dir=tmp_path / "out", resume=True)
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
