"""Methods on other methods: every pair, what is left of the base, and how it is asked for."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from support.algorithm_builders import fast_registered_builder
from support.data import make_blobs
from support.networks import make_centered_model
from support.small_federation import make_small_federation

from fedjax_het import ConfigError, RunSpec
from fedjax_het.algorithms import METHODS, get_possible_bases
from fedjax_het.algorithms.server_step import ServerStepState
from fedjax_het.cli import main
from fedjax_het.core.execution_plan import make_execution_plan
from fedjax_het.utils.config import hyperparameters_of

ON_OTHERS = tuple(name for name, entry in METHODS.items() if entry.has_base)


def make_federation(name, base=None, *, wrap=lambda build: build, hp=None, **settings):
    """A federation of a method, or of one on another, such that it is quick."""
    build, defaults = fast_registered_builder(name, base)
    return make_small_federation(wrap(build), hp=defaults["hp"] | (hp or {}), **settings)


def handing_out(build):
    return lambda training, plan: build(training._replace(returns_client_models=True), plan)


@pytest.mark.parametrize("name", ON_OTHERS)
def test_wrapper_and_base_names_do_not_collide(name):
    """One option or number of two methods would be given to both."""
    entry = METHODS[name]

    def names_of(method):
        return {
            *method.option_names,
            *hyperparameters_of(method.make_hyperparameter_record({}, 6)),
        } - {"server_lr"}

    assert get_possible_bases(entry)
    for base in get_possible_bases(entry):
        assert not names_of(entry) & names_of(METHODS[base]), base


@pytest.mark.parametrize("base", ["fedprox", "feddc"])
def test_dynafed_equals_base_before_synthesis(base):
    hp = {"prox_mu": 0.5} if base == "fedprox" else {"feddc_alpha": 0.3}
    alone, over = (
        make_federation(base, hp=hp, epochs=2),
        make_federation("dynafed", base, hp=hp, epochs=2),
    )
    state, plain = over.initial_state(), alone.initial_state()
    trajectory = [alone.global_params(plain)]
    for _ in range(3):
        state, plain = over.run(1, state)[0], alone.run(1, plain)[0]
        trajectory.append(alone.global_params(plain))
    assert_trees_all_close(state.server.inner, plain.server, atol=1e-7)
    assert_trees_all_close(state.clients, plain.clients, atol=1e-7)
    rows = [np.concatenate([p["b"], p["w"].ravel()]) for p in trajectory]
    np.testing.assert_allclose(state.server.step_state.trajectory, rows, atol=1e-6)
    usual = make_federation("dynafed", "fedavg", epochs=2)
    gap = usual.train(3)["w"] - trajectory[-1]["w"]
    assert np.abs(gap).max() > 1e-3


@pytest.mark.parametrize("name", ["fedavg", "fsl", "fsl_p", "feddf", "fedbe"])
def test_update_norm_contains_server_step(name):
    federation = make_federation(name)
    state = federation.initial_state()
    new_state, info = federation.run(1, state)
    old, new = map(federation.global_params, (state, new_state))
    change = np.concatenate([np.ravel(new[key] - old[key]) for key in old])
    np.testing.assert_allclose(info.update_norm, np.linalg.norm(change), rtol=1e-5)


# --- ABAVG -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "model"),
    [
        *((base, None) for base in ("fedavg", "scaffold", "feddyn", "feddc", "fedgen")),
        ("fedavg", make_centered_model()),
    ],
)
def test_abavg_equals_base_with_accuracy_weights(base, model):
    """In a round from a state with a past, under weights of the run that are others; of a network
    with running statistics, these too."""
    settings = {"averaging": "weighted", "participation": 0.8, "hp": {"server_lr": 0.7}}
    settings |= {"model": model, "server": (make_blobs((60,), seed=3), 1)}

    alone, over = (
        make_federation(base, wrap=handing_out, **settings),
        make_federation("abavg", base, **settings),
    )
    round_ = jax.jit(alone.algorithm.round)
    state, _ = round_(alone.hp, alone.initial_state(), jax.random.key(1), alone.cohort(0))
    cohort, key = alone.cohort(1), jax.random.key(2)
    _, info = round_(alone.hp, state, key, cohort)
    x, y = over.server
    apply = alone.task.model.apply
    logits = jax.vmap(lambda variables: apply(variables, x, train=False)[0])(info.models.variables)
    present = np.asarray(info.models.is_present)
    right = np.where(present, (np.asarray(logits).argmax(-1) == np.asarray(y)).mean(1), 0)
    assert len(set(right[present])) > 1 and right.sum() > 0
    share = dict(zip(np.asarray(cohort.schedule.participants), right / right.sum(), strict=True))
    ids = np.asarray(cohort.schedule.client_ids)
    values = np.asarray(cohort.schedule.weights)
    weights = np.array([share.get(k, 0.0) for k in ids.ravel()], np.float32).reshape(ids.shape)
    weights = np.where(values > 0, weights, 0)
    np.testing.assert_allclose(weights.sum(), 1, rtol=1e-5)
    reweighted = cohort._replace(schedule=cohort.schedule._replace(weights=jnp.asarray(weights)))
    expected, _ = round_(alone.hp, state, key, reweighted)
    if base in ("feddyn", "feddc"):  # what their servers keep is a mean by the run's own weights
        expected, _ = round_(alone.hp, state, key, cohort)
        shift = right / right.sum() - np.asarray(info.models.weights)
        moved = jax.tree.map(
            lambda w, models: w + 0.7 * np.einsum("k,k...->...", shift, models),
            alone.algorithm.global_model(expected)["params"],
            info.models.variables["params"],
        )
        expected = alone.algorithm.with_global_model(expected, {"params": moved, "state": {}})
    lifted = state._replace(server=ServerStepState(state.server, ()))
    result, _ = jax.jit(over.algorithm.round)(over.hp, lifted, key, over.cohort(1))
    actual, wanted = (
        one.algorithm.global_model(state) for one, state in ((over, result), (alone, expected))
    )
    assert_trees_all_close(actual, wanted, atol=2e-6)


# --- FedGen's models ---------------------------------------------------------------------------


@pytest.mark.slow
def test_fedgen_unchanged_when_returning_models():
    """The generator then learns from the models that are gathered, by client, from where they
    were trained."""

    settings = {"participation": 0.7, "averaging": "weighted"}
    plan = make_execution_plan(2, 2)
    usual = make_federation("fedgen", **settings)
    other = make_federation("fedgen", wrap=handing_out, plan=plan, **settings)
    start = usual.initial_state()
    (state, _), (same, _) = usual.run(2, start), other.run(2, plan.put(start))
    after, info = other.run(1, same)
    assert_trees_all_close(same, state, rtol=1e-4, atol=1e-5)
    weights, kernels = info.models.weights, info.models.variables["params"]["w"]
    assert info.models.is_present.sum() >= 2
    average = np.einsum("s,sij->ij", weights, kernels)
    np.testing.assert_allclose(average, other.global_params(after)["w"], atol=1e-5)


# --- how it is asked for -----------------------------------------------------------------------

QUICK = {
    "dynafed": [
        *("trajectory_rounds=2", "segment_length=1", "num_iterations=2", "inner_steps=1"),
        *("num_samples=10", "fine_tune_epochs=1", "preset=code"),
    ],
    "feddf": ["distill_epochs=1"],
    "fsl": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_command_line_sets_base_fedprox(name, tmp_path, capsys):
    code = main(
        [
            *("run", "--quiet", "--algorithm", name, "--model", "mlp", "--rounds", "3"),
            *("--output-dir", str(tmp_path), "--option", "base=fedprox", *QUICK[name]),
            *("--hp", "prox_mu=0.25"),
        ]
    )
    assert code == 0
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert last["algorithm"] == name and not last["diverged"]
    spec = json.loads(next(tmp_path.glob("[0-9a-f]*.json")).read_text())["spec"]
    assert spec["options"]["base"] == "fedprox" and spec["hp"]["prox_mu"] == 0.25
    assert RunSpec(**spec).digest() == RunSpec.from_dict(spec).resolved().digest()


def test_rejects_impossible_bases():
    for name in ON_OTHERS:
        for base in ("fedavgg", "dynafed", "fedbn", "fedamp", "feddm"):
            with pytest.raises(ConfigError, match=f"base = '{base}'"):
                RunSpec(name, options={"base": base}).resolved()
    with pytest.raises(ConfigError, match="prox_mu"):
        RunSpec("feddf", hp={"prox_mu": 0.1}).resolved()
