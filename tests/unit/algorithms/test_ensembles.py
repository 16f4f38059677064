"""FedDF, FedBE and ABAVG against loops in float64, their limits, and what they may read."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from chex import assert_trees_all_close, assert_trees_all_equal
from support.algorithm_builders import make_method_federation
from support.data import CLIENT_SIZES, NUM_CLASSES, SERVER_EXAMPLES, make_blobs, make_user_dataset
from support.reference_loop import (
    ReferenceAdam,
    ReferenceFedAvg,
    flatten_inputs,
    flatten_params,
    run_and_compare,
    server_batches,
    softmax,
)
from support.small_federation import make_small_federation, round_key
from support.small_runs import make_spec, run_spec, sweep_specs

from fedjax_het import ConfigError
from fedjax_het.algorithms.ensemble_distillation import TeacherModels
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.fedbe import _make_dirichlet_sampler, _make_gaussian_sampler
from fedjax_het.core.client_loop import Cohort
from fedjax_het.core.client_rows import ClientModels
from fedjax_het.core.distillation import compute_logits
from fedjax_het.core.execution_plan import make_execution_plan
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.core.task import Task
from fedjax_het.nn import make_model
from fedjax_het.runtime.build import prepare_group
from fedjax_het.runtime.data_assignment import UserObjects, build_partition

METHODS = ("feddf", "fedbe", "abavg")
STEPS = {"distill_epochs": 2, "distill_batch_size": 4}  # 4 steps over 7 examples
RATES = {
    "feddf": {"distill_lr": 0.1},
    "fedbe": {"distill_lr": 0.5, "distill_weight_decay": 0.03, "sharpening": 0.6},
    "abavg": {},
}


def make_federation(name, *, hp=None, base=None, settings=None, **options):
    """A federation of a method over a base."""
    options |= {} if base is None else {"base": base}
    hp = {"local_lr": 0.2, **RATES.get(name, {}), **(hp or {})}
    return make_method_federation(name, options, hp, **(settings or {}))


# --- the round's models ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan",
    [
        make_execution_plan(1, 1, mesh_axis=None),
        make_execution_plan(1, 2),
        make_execution_plan(3, 1),
        make_execution_plan(2, 2),
    ],
)
def test_returned_models_are_in_client_order(plan):
    def build(training, plan):
        return fedavg(training._replace(returns_client_models=True), plan)

    settings = {"participation": 0.7, "averaging": "weighted"}
    federation = make_small_federation(build, hp={"local_lr": 0.2}, plan=plan, **settings)
    start = federation.initial_state()
    loop = ReferenceFedAvg(federation)
    empty = 0
    for r in range(4):
        cohort = Cohort(federation.scheduler.make_round(r), federation.examples, federation.server)
        _, info = jax.jit(federation.algorithm.round)(
            federation.hp, plan.put(start), jax.random.key(0), cohort
        )
        sampled = np.sort(federation.scheduler.draw_cohort(r))
        trained = [k for k in sampled if CLIENT_SIZES[k]]
        empty += len(sampled) > len(trained)
        models = jax.tree.map(np.asarray, info.models)
        assert len(models.weights) == len(sampled) == 4  # not as many as slots or clients
        assert list(models.is_present) == [True] * len(trained) + [False] * (4 - len(trained))
        shares = np.array([CLIENT_SIZES[k] for k in trained]) / sum(
            CLIENT_SIZES[k] for k in trained
        )
        np.testing.assert_allclose(models.weights[: len(trained)], shares, rtol=1e-6)
        assert (models.weights[len(trained) :] == 0).all()
        for i, k in enumerate(trained):
            actual = {name: leaf[i] for name, leaf in models.variables["params"].items()}
            loop.assert_model(actual, model=loop.train_client(r, k), atol=2e-6)
    assert 0 < empty < 4


def test_logits_do_not_depend_on_batches():
    images = np.random.default_rng(0).integers(0, 256, (300, 8, 8, 1), np.uint8)
    task = Task(make_model("mlp", (8, 8, 1), 10), (0.3,), (0.2,))
    variables = task.model.init(jax.random.key(0))
    whole, _ = task.model.apply(variables, task.normalize(jnp.asarray(images)), train=False)
    for count in (1, 127, 128, 300):
        actual = compute_logits(task, variables, jnp.asarray(images[:count]))
        np.testing.assert_allclose(actual, whole[:count], rtol=1e-5, atol=1e-5)


# --- oracles in float64 ------------------------------------------------------------------------


def accuracy(model):
    w, b = model
    return float(
        np.mean((flatten_inputs(SERVER_EXAMPLES[0]) @ w + b).argmax(1) == SERVER_EXAMPLES[1])
    )


class Refined(ReferenceFedAvg):
    """Rounds of FedAvg, whose average `refine(hp, before, average, models, shares, key)` turns into
    the next model; models are lists of [w, b]."""

    def __init__(self, federation, refine):
        super().__init__(federation)
        self.refine = refine

    def update_server(self, r, clients, models):
        before, average, *models = (
            [p["w"], p["b"]]
            for p in map(
                self.params, (self.global_vector, self.average_models(clients, models), *models)
            )
        )
        key = fold_in_purpose(round_key(r), Purpose.SERVER)
        refined = self.refine(
            self.hp, before, average, models, self.aggregation_weights(clients), key
        )
        self.global_vector = flatten_params(dict(zip("wb", refined, strict=True)))


def student_gradient(w, b, x, targets):
    p = softmax(x @ w + b) - targets
    return x.T @ p / len(x), p.mean(0)


def feddf_loop(annealed, hp, before, average, models, shares, key):
    x = flatten_inputs(SERVER_EXAMPLES[0])
    targets = softmax(np.mean([x @ w + b for w, b in models], 0))
    _, key = jax.random.split(key)
    batches = list(server_batches(key, STEPS["distill_epochs"], 7, STEPS["distill_batch_size"]))
    params, adams = list(average), [ReferenceAdam(), ReferenceAdam()]
    for t, index in enumerate(batches):
        gradient = student_gradient(*params, x[index], targets[index])
        norm = np.sqrt(sum((g**2).sum() for g in gradient))
        lr = hp["distill_lr"] * ((1 + np.cos(np.pi * t / len(batches))) / 2 if annealed else 1)
        for i in range(2):
            g = gradient[i] * min(1, hp.get("distill_clip", np.inf) / norm)
            params[i] = adams[i].step(params[i], g, lr)
    return params


def drawn(posterior, key, before, models, shares, hp):
    """One model of the posterior; the random numbers are those of JAX."""
    if posterior == "dirichlet":
        # Padded by the cohort's clients without data.
        gammas = jax.random.loggamma(key, hp["posterior_alpha"], (4,))
        gammas = np.exp(np.asarray(gammas, np.float64))
        mixed = gammas[: len(models)] * shares
        return [
            sum(g * m[i] for g, m in zip(mixed / mixed.sum(), models, strict=True))
            for i in range(2)
        ]
    like = {"b": jnp.zeros(NUM_CLASSES), "w": jnp.zeros((4, NUM_CLASSES))}
    noise = optax.tree.random_like(key, like)
    out = []
    if posterior == "normalised":
        for i, name in enumerate("wb"):
            changes = [m[i] - before[i] for m in models]
            norms = [np.linalg.norm(c) for c in changes]
            units = np.array([c / norm for c, norm in zip(changes, norms, strict=True)])
            mean = np.tensordot(shares, units, 1)
            variance = np.tensordot(shares, (units - mean) ** 2, 1)
            away = hp["posterior_scale"] * np.sqrt(np.maximum(variance, 1e-5))
            direction = mean + away * np.asarray(noise[name], np.float64)
            out.append(before[i] + (shares @ norms) * direction)
        return out
    mean = [sum(p * m[i] for p, m in zip(shares, models, strict=True)) for i in range(2)]
    for i, name in enumerate("wb"):
        variance = sum(p * (m[i] - mean[i]) ** 2 for p, m in zip(shares, models, strict=True))
        out.append(mean[i] + np.sqrt(variance) * np.asarray(noise[name], np.float64))
    return out


def fedbe_loop(posterior, samples, divisor, hp, before, average, models, shares, key):
    x = flatten_inputs(SERVER_EXAMPLES[0])
    draw_key, key = jax.random.split(key)
    keys = jax.random.split(draw_key, samples)
    more = [drawn(posterior, k, before, models, shares, hp) for k in keys]
    ensemble = [average, *models, *more]
    p = np.mean([softmax(x @ w + b) for w, b in ensemble], 0) ** (1 / hp["sharpening"])
    targets = p / p.sum(1, keepdims=True)
    params, velocity, kept = list(average), [0.0, 0.0], []
    batches = list(server_batches(key, STEPS["distill_epochs"], 7, STEPS["distill_batch_size"]))
    for t, index in enumerate(batches):
        gradient = student_gradient(*params, x[index], targets[index])
        # Of steps 1 to 4 the first is before the cycles, which are two steps long: high, low.
        lr = hp.get("swa_lr", hp["distill_lr"]) if t == 2 else hp["distill_lr"]
        for i in range(2):
            g = gradient[i] / divisor + hp["distill_weight_decay"] * params[i]
            velocity[i] = hp["distill_momentum"] * velocity[i] + g
            params[i] = params[i] - lr * velocity[i]
        if t >= 1 and t % 2 == 0:  # of steps 1 to 4, after a quarter of them, every other one: 3
            kept.append(list(params))
    return [np.mean([model[i] for model in kept], 0) for i in range(2)]


def abavg_loop(hp, before, average, models, shares, key):
    right = np.array([accuracy(model) for model in models])
    weights = right / right.sum()
    return [
        old + hp["server_lr"] * sum(a * (m[i] - old) for a, m in zip(weights, models, strict=True))
        for i, old in enumerate(before)
    ]


AVERAGED = {**STEPS, "swa_start": 0.25, "swa_every": 2}
ORACLES = {
    "feddf-paper": (partial(feddf_loop, True), STEPS, {"distill_clip": 0.05}),
    "feddf-fedaux": (partial(feddf_loop, False), {**STEPS, "preset": "fedaux"}, {}),
    "fedbe-paper": (
        partial(fedbe_loop, "gaussian", 3, 1),
        {**AVERAGED, "num_samples": 3},
        {"swa_lr": 0.2},
    ),
    "fedbe-code": (
        partial(fedbe_loop, "normalised", 3, NUM_CLASSES),
        {**AVERAGED, "num_samples": 3, "preset": "code"},
        {"posterior_scale": 0.8},
    ),
    "fedbe-dirichlet": (
        partial(fedbe_loop, "dirichlet", 2, 1),
        {**AVERAGED, "posterior": "dirichlet", "cyclic": False, "num_samples": 2},
        {"posterior_alpha": 0.6},
    ),
    "abavg": (abavg_loop, {}, {}),
}


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
@pytest.mark.parametrize("case", ORACLES)
def test_three_rounds_match_float64_oracle(case, averaging):
    loop, options, hp = ORACLES[case]
    settings = {"participation": 0.7, "averaging": averaging}
    federation = make_federation(
        case.split("-")[0], hp={"server_lr": 0.8, **hp}, settings=settings, **options
    )
    refined = Refined(federation, loop)
    run_and_compare(refined, 3, atol=1e-5)
    plain = ReferenceFedAvg(federation)
    for r in range(3):
        plain.run_round(r)
    gap = refined.params(refined.global_vector - plain.global_vector)["w"]
    assert np.abs(gap).max() > 1e-2  # than the average alone


# --- limits ------------------------------------------------------------------------------------


def test_long_distillation_reaches_linear_mean():
    """Of linear models the mean logits are the mean model's: uniform, whatever the average's."""
    settings = {"averaging": "weighted", "server": (make_blobs((40,), seed=3), 1)}
    options = {"distill_epochs": 800, "distill_batch_size": 40}
    federation = make_federation("feddf", hp={"distill_clip": 5.0}, settings=settings, **options)
    uniform = make_federation("fedavg")
    uniform, weighted = uniform.train(1), make_federation("fedavg", settings=settings)
    weighted = weighted.train(1)
    actual = federation.train(1)

    def centred(params):  # softmax does not see what all classes have in common
        w = np.concatenate([params["w"], params["b"][None]])
        return w - w.mean(1, keepdims=True)

    np.testing.assert_allclose(centred(actual), centred(uniform), atol=1e-3)
    assert np.abs(centred(weighted) - centred(uniform)).max() > 0.05


def test_fedbe_of_one_client_changes_nothing():
    """The ensemble is the student twice; all that is left is what sharpening adds."""
    hp = {"sharpening": 1.0, "distill_weight_decay": 0.0}
    settings = {"sizes": (18,)}
    options = {**STEPS, "num_samples": 0}
    plain = make_federation("fedavg", settings=settings)
    expected = plain.train(2)
    alone = make_federation("fedbe", hp=hp, settings=settings, **options)
    assert_trees_all_close(alone.train(2), expected, atol=1e-6)
    sharp = make_federation("fedbe", hp={**hp, "sharpening": 0.5}, settings=settings, **options)
    assert np.abs(sharp.train(2)["w"] - expected["w"]).max() > 1e-3


@pytest.mark.parametrize("base", ["fedavg", "scaffold", "feddyn"])
def test_equal_accuracies_give_uniform_average(base):
    """Every image once with every label: each model is right about a third of them."""
    images = np.repeat(SERVER_EXAMPLES[0], NUM_CLASSES, 0)
    labels = np.tile(np.arange(NUM_CLASSES), len(SERVER_EXAMPLES[0])).astype(np.int32)
    plain = make_federation(base, settings={"participation": 0.7})
    expected = plain.train(3)
    for averaging in ("uniform", "weighted") if base == "fedavg" else ("uniform",):
        settings = {"server": ((images, labels), 1), "averaging": averaging}
        over = make_federation("abavg", base=base, settings={**settings, "participation": 0.7})
        assert_trees_all_close(over.train(3), expected, atol=2e-6)


def test_zero_accuracies_give_uniform_average():
    nothing = (
        SERVER_EXAMPLES[0],
        np.full_like(SERVER_EXAMPLES[1], NUM_CLASSES),
    )  # a class that none can name
    over = make_federation("abavg", settings={"server": (nothing, 1), "averaging": "weighted"})
    plain = make_federation("fedavg")
    actual = over.train(2)
    assert_trees_all_close(actual, plain.train(2), atol=2e-6)


@pytest.mark.parametrize("name", METHODS)
def test_only_abavg_reads_labels(name):
    options = {} if name == "abavg" else STEPS
    other = (SERVER_EXAMPLES[0], (SERVER_EXAMPLES[1] + 1) % NUM_CLASSES)
    models = []
    for server in (SERVER_EXAMPLES, other):
        federation = make_federation(name, settings={"server": (server, 1)}, **options)
        models.append(federation.train(2))
    if name == "abavg":
        assert np.abs(models[0]["w"] - models[1]["w"]).max() > 1e-3
    else:
        assert_trees_all_equal(*models)


# --- posteriors --------------------------------------------------------------------------------


def posterior_models():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(4, 2, 3)), jnp.float32)}
    state = {"mean": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)}
    weights = jnp.asarray([0.5, 0.3, 0.2, 0.0])
    present = jnp.asarray([True, True, True, False])
    return ClientModels({"params": params, "state": state}, weights, present)


def many(sample, count=20_000):
    return jax.jit(jax.vmap(sample))(jax.random.split(jax.random.key(1), count))


def test_gaussian_posterior_moments():
    models = posterior_models()
    average = {"params": {}, "state": {"mean": jnp.full(3, 9.0)}}
    draws = many(_make_gaussian_sampler({}, TeacherModels(models, {}, average)))
    w, p = np.asarray(models.variables["params"]["w"], np.float64), np.array([0.5, 0.3, 0.2, 0])
    mean = np.einsum("s,sij->ij", p, w)
    variance = np.einsum("s,sij->ij", p, (w - mean) ** 2)
    actual = np.asarray(draws["params"]["w"], np.float64)
    np.testing.assert_allclose(actual.mean(0), mean, atol=5 * np.sqrt(variance.max() / 20_000))
    np.testing.assert_allclose(actual.var(0), variance, rtol=0.06)
    correlation = np.corrcoef(actual[:, 0, 0], actual[:, 1, 2])[0, 1]
    assert abs(correlation) < 0.03  # diagonal
    assert (np.asarray(draws["state"]["mean"]) == 9).all()


@pytest.mark.slow
def test_dirichlet_posterior_moments():
    """With equal p the shares are Dir(alpha)'s: mean 1/3, variance 2 / (9 (3 alpha + 1))."""
    one_hot = ClientModels(
        {"params": jnp.eye(4)},
        jnp.asarray([1, 1, 1, 0]) / 3,
        jnp.asarray([True, True, True, False]),
    )
    for alpha in (0.5, 2.0):
        shares = np.asarray(
            many(
                _make_dirichlet_sampler({"posterior_alpha": alpha}, TeacherModels(one_hot, {}, {}))
            )["params"]
        )
        np.testing.assert_allclose(shares.sum(1), 1, rtol=1e-5)
        np.testing.assert_allclose(shares.mean(0), [1 / 3, 1 / 3, 1 / 3, 0], atol=0.01)
        np.testing.assert_allclose(shares.var(0)[:3], 2 / 9 / (3 * alpha + 1), rtol=0.05)
    # A large alpha leaves the weighted average.
    models = posterior_models()
    actual = many(
        _make_dirichlet_sampler({"posterior_alpha": 1e6}, TeacherModels(models, {}, {})), 100
    )["params"]["w"]
    mean = np.einsum("s,sij->ij", models.weights, models.variables["params"]["w"])
    np.testing.assert_allclose(actual, np.broadcast_to(mean, actual.shape), atol=0.02)


# --- whole runs --------------------------------------------------------------------------------


spec = partial(make_spec, rounds=3, pretrain_epochs=None, hp={"local_lr": 0.02})


def test_server_examples_are_held_out():
    options = {"server_options": {"size": 9}}
    for name in METHODS:
        group = prepare_group([spec(name, **options)], UserObjects(make_user_dataset()))
        (federation,) = group.prepared_runs
        assert federation.spec.server_data == "held_out"
        held = set(federation.server_data.indices)
        assert len(held) == 9 and not held & set(federation.partition.indices)
        assert held | set(federation.partition.indices) == set(range(sum(CLIENT_SIZES)))
        assert "which no client holds" in str(federation.summarize_server_data())


@pytest.mark.slow
def test_sweep_with_batch_norm():
    """Federations on different devices, each with examples and models of its own."""
    # Not Adam: before batch norm the gradient of a bias is rounding, which Adam makes a step of.
    settings = {"model": "convnet", "norm": "batch", "depth": 1, "width": 4}
    settings |= {"local_optimizer": "sgd"}
    hp = {"local_lr": 0.02}
    specs = [
        spec("fedbe", seed=seed, hp=hp | {"distill_lr": 0.05}, **settings) for seed in range(2)
    ]
    for settings_of_run, run in zip(specs, sweep_specs(specs, spread="runs"), strict=True):
        alone = run_spec(settings_of_run)
        assert np.isfinite(run.metrics["test_loss"]).all()
        np.testing.assert_allclose(alone.metrics["test_loss"], run.metrics["test_loss"], rtol=2e-3)


@pytest.mark.parametrize(
    ("size", "message"), [(0, "size = 0"), (51, "size = 51"), (46, "num_clients = 6: .* 5")]
)
def test_rejects_bad_number_of_server_examples(size, message):
    with pytest.raises(ConfigError, match=message):
        run_spec(spec("abavg", server_options={"size": size}))


def test_user_partition_must_leave_examples():
    group = prepare_group([spec("abavg")], UserObjects(make_user_dataset()))
    own = group.prepared_runs[0].partition
    with pytest.raises(ConfigError, match="at most 3"):
        prepare_group(
            [spec("abavg", server_options={"size": 4})], UserObjects(make_user_dataset(), own)
        )
    assert build_partition(spec("abavg").resolved(), make_user_dataset()).digest() == own.digest()
