"""Schedules of the local rate: against closed forms, over rounds and over steps."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.data import CLIENT_SIZES, make_user_dataset
from support.reference_loop import ReferenceFedAvg, run_and_compare
from support.small_federation import make_small_federation
from support.small_runs import LOCAL_RUN, KilledError, assert_results_equal, make_killing_callback

from fedjax_het import ConfigError, Placement, RunSpec, grid, simulate, sweep
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.config.resolve import is_horizon_dependent
from fedjax_het.core.evaluation import place_evaluation_set
from fedjax_het.core.execution_plan import make_execution_plan
from fedjax_het.core.lr_schedules import LR_SCHEDULES, compute_round_lr_factors, make_step_lr_factor
from fedjax_het.core.optimizers import LocalTrainingOptions
from fedjax_het.core.round_inputs import ChunkInputs, EvaluationOptions, RoundComponents
from fedjax_het.core.round_program import make_round_chunk
from fedjax_het.core.schedule import stack_rounds
from fedjax_het.runtime import checkpointing, compiled_programs, group_state, signature
from fedjax_het.runtime.result_display import format_run_label

LENGTH = 12.0
NUMBERS = {
    "constant": {},
    "step": {"decay": 0.5, "every": 3.0},
    "exponential": {"decay": 0.9},
    "cosine": {"final": 0.1, "length": LENGTH},
    "cosine_restarts": {"final": 0.2, "every": 4.0},
    "linear": {"final": 0.3, "length": LENGTH},
    "polynomial": {"final": 0.1, "power": 3.0, "length": LENGTH},
    "inverse": {"slope": 0.5},
}
CLOSED = {
    "constant": lambda t: 1.0,
    "step": lambda t: 0.5 ** (t // 3),
    "exponential": lambda t: 0.9**t,
    "cosine": lambda t: 0.1 + 0.9 * math.cos(math.pi * min(t, 12) / 24) ** 2,
    "cosine_restarts": lambda t: 0.2 + 0.8 * math.cos(math.pi * (t % 4) / 8) ** 2,
    "linear": lambda t: max(0.3, 1 - 0.7 * t / 12),
    "polynomial": lambda t: 0.1 + 0.9 * (1 - min(t, 12) / 12) ** 3,
    "inverse": lambda t: 2 / (2 + t),
}
ROUNDS = 15
SMALL = LOCAL_RUN | {"local_optimizer": "sgd", "rounds": 6, "participation": 0.5}
SMALL["algorithm"] = "fedavg"
DATA = make_user_dataset()


def run(spec, **settings):
    return simulate(spec, dataset=DATA, **settings)


def named(prefix, numbers):
    return {prefix + name: value for name, value in numbers.items()}


@pytest.mark.parametrize("name", LR_SCHEDULES)
def test_factors_equal_closed_forms(name):
    over_rounds = compute_round_lr_factors(name, named("lr_", NUMBERS[name]), ROUNDS)
    traced = jax.jit(lambda hp, t: make_step_lr_factor(name, hp)(t))
    numbers = jax.tree.map(jnp.float32, named("lr_step_", NUMBERS[name]))
    for t in range(ROUNDS):
        np.testing.assert_allclose(over_rounds[t], CLOSED[name](t), rtol=1e-6)
        np.testing.assert_allclose(traced(numbers, t), CLOSED[name](t), rtol=1e-5, atol=1e-6)
    assert traced._cache_size() == 1


@pytest.mark.parametrize("name", LR_SCHEDULES)
def test_warmup_precedes_schedule_of_same_end(name):
    warm = NUMBERS[name] | {"warmup": 3.0, "warmup_from": 0.25}
    factors = compute_round_lr_factors(name, named("lr_", warm), ROUNDS)
    np.testing.assert_allclose(factors[:4], [0.25, 0.5, 0.75, 1.0], rtol=1e-6)
    if name == "cosine":
        whole = optax.warmup_cosine_decay_schedule(0.25, 1.0, 3, 12, end_value=0.1)
        np.testing.assert_allclose(factors, [whole(t) for t in range(ROUNDS)], rtol=1e-5)
    shorter = NUMBERS[name] | ({"length": 9.0} if LR_SCHEDULES[name].has_length else {})
    behind = compute_round_lr_factors(name, named("lr_", shorter), ROUNDS - 3)
    np.testing.assert_allclose(factors[3:], behind, rtol=1e-6)


def test_schedule_length_defaults_to_rounds():
    np.testing.assert_allclose(
        compute_round_lr_factors("linear", {"lr_final": 0.0}, 4), [1, 0.75, 0.5, 0.25]
    )
    fixed = compute_round_lr_factors("linear", {"lr_final": 0.0, "lr_length": 2}, 4)
    np.testing.assert_allclose(fixed, [1, 0.5, 0, 0])
    for name in LR_SCHEDULES:
        hp = {"lr_every": 2} if "every" in NUMBERS[name] else {}
        spec = RunSpec(lr_schedule=name, hp=hp)
        ends = name in ("cosine", "linear", "polynomial")
        assert is_horizon_dependent(spec.resolved()) == is_horizon_dependent(spec) == ends
        longer = compute_round_lr_factors(
            name, spec.hyperparameters | named("lr_", NUMBERS[name]), 30
        )
        shorter = compute_round_lr_factors(name, named("lr_", NUMBERS[name]), 15)
        assert np.array_equal(longer[:15], shorter)  # with a length of its own it does not matter
        if ends:
            assert not is_horizon_dependent(RunSpec(lr_schedule=name, hp={"lr_length": 5}))
    assert not is_horizon_dependent(RunSpec())


class Scheduled(ReferenceFedAvg):
    """FedAvg at a rate of its own in every round."""

    def before_round(self, r):
        self.hp["local_lr"] = 0.4 * CLOSED[self.name](r)


@pytest.mark.parametrize("name", ["step", "cosine", "inverse"])
def test_round_schedule_equals_reference(name):
    federation = make_small_federation(fedavg, hp={"local_lr": 0.4}, epochs=2, participation=0.5)
    loop = Scheduled(federation)
    loop.name = name
    state = chunk_of(federation, compute_round_lr_factors(name, named("lr_", NUMBERS[name]), 8))
    for r in range(5):
        loop.run_round(r)
    loop.assert_model(federation.global_params(state), atol=5e-6)


def chunk_of(federation, rates, rounds=5):
    """The state after the chunk's rounds, as runs make them."""
    plan = make_execution_plan(1, 1, mesh_axis=None)
    evaluation = EvaluationOptions(len(CLIENT_SIZES))
    schedules = [federation.scheduler.make_round(r) for r in range(rounds)]
    inputs = ChunkInputs(
        hp=federation.hp,
        train_key=jax.random.key(7),
        schedule=stack_rounds(schedules, 8),
        num_rounds=jnp.int32(rounds),
        num_eval_batches=jnp.int32(1),
        examples=federation.examples,
        test_set=place_evaluation_set(plan, *federation.data),
        lr_factors=jnp.asarray(rates),
    )
    parts = RoundComponents(federation.algorithm, federation.task, plan, evaluation)
    return jax.jit(make_round_chunk(parts))(federation.initial_state(), inputs)[0]


class ByStep(ReferenceFedAvg):
    """A rate that falls with a client's steps, in a round or over all of its rounds."""

    keeps = False

    def init_client_state(self, client):
        return 0

    def local_step(self, model, batch):
        taken = self.client_states[batch.client] if self.keeps else 0
        rate = 0.4 * CLOSED[self.name](taken + batch.step)
        return model - rate * self.descent_direction(model, batch)

    def finish_client(self, client, model, steps):
        self.client_states[client] += steps


@pytest.mark.parametrize("name, keeps", [("exponential", False), ("linear", True)])
def test_step_schedule_equals_reference(name, keeps):
    hp = {"local_lr": 0.4, **named("lr_step_", NUMBERS[name])}
    details = LocalTrainingOptions(lr_schedule=name)
    settings = {"epochs": 2, "participation": 0.5, "details": details, "keep": keeps}
    loop = ByStep(make_small_federation(fedavg, hp=hp, **settings))
    loop.name, loop.keeps = name, keeps
    run_and_compare(loop, 4, atol=5e-6)
    assert loop.count_repeat_clients()


def test_constant_factors_change_no_bit():
    plain = run(RunSpec(**SMALL, hp={"local_lr": 0.1}))
    for more in (
        {"lr_schedule": "step", "hp": {"lr_decay": 1.0, "lr_every": 2}},
        {"lr_schedule": "constant", "hp": {"lr_warmup": 0}},
    ):
        spec = RunSpec(**{**SMALL, **more, "hp": {"local_lr": 0.1, **more["hp"]}})
        np.testing.assert_array_equal(run(spec).metrics["test_loss"], plain.metrics["test_loss"])
    half = {"local_lr": 0.2, "lr_warmup": 1e9, "lr_warmup_from": 0.5}
    slow = run(RunSpec(**SMALL, lr_schedule="constant", hp=half))
    np.testing.assert_array_equal(slow.metrics["test_loss"], plain.metrics["test_loss"])


def test_constant_schedule_keeps_digest():
    plain = RunSpec(**SMALL)
    assert RunSpec(**SMALL, lr_schedule="constant").digest() == plain.digest()
    assert RunSpec(**SMALL, lr_step_schedule="constant").digest() == plain.digest()
    assert RunSpec(**SMALL, gradient_accumulation=1).digest() == plain.digest()
    assert RunSpec(**SMALL, lr_schedule="cosine").digest() != plain.digest()


@pytest.mark.parametrize(
    "setting, name", [("lr_schedule", "lr_"), ("lr_step_schedule", "lr_step_")]
)
def test_warmup_implies_constant_schedule(setting, name):
    hp = {f"{name}warmup": 3}
    spec = RunSpec(**SMALL, hp=hp).resolved()
    assert getattr(spec, setting) == "constant" and spec.hp[f"{name}warmup"] == 3
    explicit = RunSpec(**SMALL, hp=hp, **{setting: "constant"})
    assert spec.digest() == explicit.digest() and spec.resolved() == spec


def test_horizon_dependent_run_is_not_extended(tmp_path, monkeypatch):
    monkeypatch.setattr(group_state, "MAX_ROUNDS_PER_CHUNK", 1)
    monkeypatch.setattr(checkpointing, "CHECKPOINT_SECONDS", 0.0)

    def cosine(rounds, **more):
        hp = {"local_lr": 0.2, **more}
        return RunSpec(**{**SMALL, "rounds": rounds}, lr_schedule="cosine", hp=hp)

    for more, first in (({}, 1), ({"lr_length": 8}, 4)):  # the round that is first made anew
        folder, begun = tmp_path / str(first), []
        run(cosine(3, **more), output_dir=folder)
        longer = run(
            cosine(6, **more),
            output_dir=folder,
            resume=True,
            progress=lambda at, begun=begun: begun.append(at.done),
        )
        assert min(begun) == first
        assert_results_equal(longer, run(cosine(6, **more)))
    with pytest.raises(KilledError):
        run(cosine(3), output_dir=tmp_path, progress=make_killing_callback(2))
    with pytest.raises(
        ConfigError, match=r"rounds 3 -> 6; \d rounds are done, and the rates of cosine"
    ):
        run(cosine(6), output_dir=tmp_path, resume=True)


def test_sweep_over_schedules_compiles_one_program(no_program_eviction):
    compiled_programs.build_programs.cache_clear()
    specs = grid(
        **SMALL,
        lr_schedule=["constant", "cosine", "step", "exponential"],
        hp={"local_lr": 0.2, "lr_every": 2}
        | {"lr_final": [0, 0.1], "lr_decay": [0.5, 0.9], "lr_warmup": [1, 2]},
    )
    assert len(specs) == 2 + 4 + 4 + 4
    assert len({signature.compute_static_key(spec.resolved()) for spec in specs}) == 1
    side_by_side = Placement(width=2)
    results = sweep(specs, dataset=DATA, progress=lambda line: None, placement=side_by_side).results
    losses = {result.metrics["test_loss"][-1] for result in results}
    assert len(losses) == len(specs)
    for spec, result in list(zip(specs, results, strict=True))[::5]:
        alone = run(spec).metrics["test_loss"]
        np.testing.assert_allclose(alone, result.metrics["test_loss"], rtol=1e-5)


NAMED = [("constant", {"warmup": 1}), ("cosine", {"final": 0.5}), ("step", {"every": 2})]
LENGTHS = [("cosine", {"length": length}) for length in (2, 5, 9)]


@pytest.mark.parametrize(
    "setting, prefix, schedules",
    [("lr_schedule", "lr_", NAMED), ("lr_step_schedule", "lr_step_", LENGTHS)],
)
def test_schedule_values_share_one_program(
    setting, prefix, schedules, no_program_eviction, monkeypatch
):
    """All schedules over rounds, and all numbers of one over steps."""
    traces, counts = [], []
    make = compiled_programs.make_round_chunk

    def counted(*arguments):
        chunk = make(*arguments)
        return lambda *args: traces.append(None) or chunk(*args)

    monkeypatch.setattr(compiled_programs, "make_round_chunk", counted)
    compiled_programs.build_programs.cache_clear()
    for number, (name, numbers) in enumerate(schedules):
        hp = {"local_lr": 0.2, "local_clip_norm": 1 + number, **named(prefix, numbers)}
        run(RunSpec(**SMALL, **{setting: name}, hp=hp))
        counts.append(len(traces))
    assert counts[0] == counts[-1] > 0


@pytest.mark.parametrize("name", ["fednova", "apfl", "fsl"])
def test_constant_rate_methods_refuse_step_schedule(name):
    spec = RunSpec(**{**SMALL, "algorithm": name}, lr_step_schedule="exponential")
    with pytest.raises(ConfigError, match=f"lr_step_schedule = 'exponential'.*none: {name}"):
        run(spec)


def test_run_label_names_schedule():
    spec = RunSpec(**SMALL, lr_schedule="cosine", hp={"local_lr": 0.2, "lr_warmup": 2})
    assert "cosine rate" in format_run_label(spec) and "lr_warmup 2" in format_run_label(spec)
