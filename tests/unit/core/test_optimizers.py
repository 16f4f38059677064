"""The clients' optimisers by name, and users' own: against optax, and against float64 loops."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.data import make_user_dataset
from support.networks import make_linear_model
from support.reference_loop import ReferenceFedAvg, run_and_compare
from support.small_federation import make_small_federation
from support.small_runs import LOCAL_RUN

import fedjax_het
from fedjax_het import ConfigError, RunSpec, grid, register_optimizer, simulate, sweep
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.core.client_algorithm import ClientContext
from fedjax_het.core.local_training import (
    ClientTrainState,
    LocalTraining,
    apply_gradient,
    init_local_optimizer,
)
from fedjax_het.core.optimizers import (
    COMMON_HYPERPARAMETERS,
    OPTIMIZERS,
    LocalTrainingOptions,
    compute_optimizer_digest,
)
from fedjax_het.core.task import Task
from fedjax_het.runtime.signature import compute_static_key

SMALL = LOCAL_RUN | {"rounds": 3, "participation": 1.0}
DATA = make_user_dataset()
PARAMS = {"b": np.array([0.5, -1.0, 2.0]), "w": np.linspace(-1, 1, 12).reshape(4, 3)}
GRADIENTS = [
    jax.tree.map(lambda p, k=k: np.float32(np.cos((k + 1) * p + k) * (1 + k)), PARAMS)
    for k in range(3)
]
# Of optax under another name, or with a rate that is no schedule.
FACTORIES = {"momentum": optax.sgd, "nesterov": optax.sgd}


def run(spec, **settings):
    return simulate(spec, dataset=DATA, **settings)


def changed(name):
    """Other numbers than the defaults, so that each of them is seen."""
    numbers = {**OPTIMIZERS[name].hyperparameters, **OPTIMIZERS[name].optional_hyperparameters}
    return {n: (0.7 * of.default if of.default else 0.01) for n, of in numbers.items()}


def descended(name, details, hp):
    """The parameters after the three gradients."""
    training = LocalTraining(Task(make_linear_model(), (0.0,), (1.0,)), name, options=details)
    variables = {"params": jax.tree.map(jnp.float32, PARAMS)}
    local = ClientTrainState(variables, init_local_optimizer(training, hp, variables), ())
    context = ClientContext(hp, (), client=None, key=None)
    for gradient in GRADIENTS:
        inputs = (local.variables, gradient, local.optimizer_state, None)
        local = ClientTrainState(*apply_gradient(training, context, *inputs), ())
    return local.variables["params"]


def test_optimizer_steps_equal_optax():
    names = list(OPTIMIZERS)
    assert len(names) >= 20
    optional = {name: tuple(OPTIMIZERS[name].optional_hyperparameters) for name in names}
    arguments = {name: {k: jnp.float32(v) for k, v in changed(name).items()} for name in names}

    @jax.jit
    def of_package(arguments):
        return {
            name: descended(name, LocalTrainingOptions(optional_hyperparameters=optional[name]), hp)
            for name, hp in arguments.items()
        }

    @jax.jit
    def of_optax(arguments):
        actual = {}
        for name in arguments:
            make = FACTORIES.get(name) or getattr(optax, name)
            numbers = {n.removeprefix("local_"): float(v) for n, v in changed(name).items()}
            numbers["learning_rate"] = numbers.pop("lr")
            nesterov = {"nesterov": True} if name == "nesterov" else {}
            result, params = make(**numbers, **nesterov), jax.tree.map(jnp.float32, PARAMS)
            state = result.init(params)
            for gradient in GRADIENTS:
                updates, state = result.update(gradient, state, params)
                params = optax.apply_updates(params, updates)
            actual[name] = params
        return actual

    ours, theirs = of_package(arguments), of_optax(arguments)
    for name in names:
        moved = max(np.abs(np.asarray(ours[name][k]) - PARAMS[k]).max() for k in PARAMS)
        assert moved > 1e-6, name
        for part, value in theirs[name].items():
            np.testing.assert_allclose(ours[name][part], value, rtol=2e-5, atol=1e-6, err_msg=name)


def test_signature_defines_hyperparameters_and_options():
    lion, nadam, rmsprop = (OPTIMIZERS[name] for name in ("lion", "nadam", "rmsprop"))
    parameters = inspect.signature(optax.lion).parameters
    for argument in ("b1", "b2", "weight_decay"):
        assert lion.hyperparameters[f"local_{argument}"].default == parameters[argument].default
    assert "nesterov" in nadam.options and "local_momentum" in rmsprop.optional_hyperparameters
    assert set(OPTIMIZERS["adam"].hyperparameters) == {"local_lr"}
    assert set(OPTIMIZERS["adamw"].hyperparameters) == {"local_lr", "local_weight_decay"}


class Decayed(ReferenceFedAvg):
    """L2 in the gradient."""

    def descent_direction(self, model, batch):
        decay = self.hp["local_weight_decay"]
        return super().descent_direction(model, batch) + decay * model


class Clipped(Decayed):
    """Entry by entry, then as a whole, then the decay."""

    clipped = 0

    def descent_direction(self, model, batch):
        gradient = ReferenceFedAvg.descent_direction(self, model, batch)
        gradient = np.clip(gradient, -self.hp["local_clip_value"], self.hp["local_clip_value"])
        norm, most = np.linalg.norm(gradient), self.hp["local_clip_norm"]
        self.clipped += norm > most
        shorter = gradient * min(1, most / norm)
        return shorter + self.hp["local_weight_decay"] * model


class Nesterov(ReferenceFedAvg):
    """v <- r v + g, w <- w - lr (g + r v), v zero at a round's start."""

    decay = 0.0

    def local_step(self, model, batch):
        if batch.step == 0:
            self.velocity = np.zeros_like(model)
        r = self.hp["local_momentum"]
        gradient = self.descent_direction(model, batch) + self.decay * model
        self.velocity = r * self.velocity + gradient
        return model - self.hp["local_lr"] * (gradient + r * self.velocity)


def test_weight_decay_adds_to_gradient():
    hp = {"local_lr": 0.2, "local_weight_decay": 0.3}
    details = LocalTrainingOptions(optional_hyperparameters=("local_weight_decay",))
    federation = make_small_federation(fedavg, hp=hp, details=details, epochs=2)
    run_and_compare(Decayed(federation), 3, atol=5e-6)


def test_clipping_precedes_weight_decay():
    hp = {"local_clip_value": 0.1, "local_clip_norm": 0.2, "local_weight_decay": 0.3}
    details = LocalTrainingOptions(optional_hyperparameters=tuple(hp))
    settings = {"hp": {"local_lr": 0.5, **hp}, "details": details, "epochs": 2}
    loop = Clipped(make_small_federation(fedavg, **settings))
    run_and_compare(loop, 3, atol=5e-6)
    assert loop.clipped > 3


def test_nesterov_with_weight_decay():
    hp = {"local_lr": 0.1, "local_momentum": 0.8, "local_weight_decay": 0.2}
    details = LocalTrainingOptions(optional_hyperparameters=("local_weight_decay",))
    settings = {"optimizer": "nesterov", "details": details, "epochs": 3}
    loop = Nesterov(make_small_federation(fedavg, hp=hp, **settings))
    loop.decay = 0.2
    run_and_compare(loop, 3, atol=2e-5)


def test_resolved_hp_has_only_given_optional_values():
    plain = RunSpec("fedavg", local_optimizer="sgd").resolved()
    assert set(plain.hyperparameters) == {
        "server_lr",
        "local_lr",
        "local_weight_decay",
    }  # of the protocol
    spec = RunSpec("fedavg", local_optimizer="sgd", hp={"local_clip_norm": 5}).resolved()
    assert set(spec.hyperparameters) == {*plain.hyperparameters, "local_clip_norm"}
    usual = RunSpec("fedavg", local_optimizer="nadam", optimizer_options={"nesterov": True})
    assert usual.digest() == RunSpec("fedavg", local_optimizer="nadam").digest()
    other = RunSpec("fedavg", local_optimizer="nadam", optimizer_options={"nesterov": False})
    assert other.digest() != usual.digest()
    for name, entry in OPTIMIZERS.items():
        assert (
            set(entry.hyperparameters)
            <= RunSpec(local_optimizer=name).resolved().hyperparameters.keys()
        )


# --- users' own ----------------------------------------------------------------------------------


def heavy(learning_rate, momentum=0.5, nesterov=False):
    """SGD with momentum."""
    return optax.sgd(learning_rate, momentum, nesterov)


def test_registered_optimizer_equals_built_in_one():
    register_optimizer("heavy", heavy)
    assert OPTIMIZERS["heavy"].description == "SGD with momentum"
    numbers = {"hp": {"local_lr": 0.02, "local_momentum": 0.8}}
    options = {"optimizer_options": {"nesterov": True}}
    mine = run(RunSpec("fedavg", local_optimizer="heavy", **numbers, **options, **SMALL))
    theirs = run(RunSpec("fedavg", local_optimizer="nesterov", **numbers, **SMALL))
    # One keeps a row of all weights, the other a tree: the same to rounding.
    np.testing.assert_allclose(mine.metrics["test_loss"], theirs.metrics["test_loss"], rtol=1e-5)
    assert RunSpec(local_optimizer="heavy").resolved().hyperparameters["local_momentum"] == 0.5


@pytest.mark.parametrize(
    "name, make, message",
    [
        (
            "adam",
            heavy,
            "name = 'adam': expected a name that no local optimizer of the package has",
        ),
        ("user", heavy, "name = 'user': expected another name"),
        ("mine", optax.sgd(0.1), "expected a function of learning_rate that returns"),
        ("mine", lambda rate: optax.sgd(rate), "expected a function of learning_rate"),
        ("mine", lambda learning_rate, b1: None, "make's argument b1 = 'without a default'"),
        ("mine", lambda learning_rate: 3, "optimizer 'mine' = 3: expected an optax.Gradient"),
        ("mine", lambda learning_rate: undefined, "optimizer 'mine' fails: NameError"),  # noqa: F821
        ("mine", lambda learning_rate: growing(), "a state that changes its shapes"),
    ],
)
def test_register_optimizer_rejects_invalid_functions(name, make, message):
    with pytest.raises(ConfigError) as error:
        register_optimizer(name, make)
    assert message in str(error.value) and "\n" not in str(error.value)


def growing():
    def update(updates, state, params=None):
        return updates, jnp.zeros(len(state) + 1)

    return optax.GradientTransformation(lambda params: jnp.zeros(1), update)


def clipped_sgd(hp):
    return optax.chain(optax.clip(hp["local_bound"]), optax.sgd(hp["local_lr"]))


def test_user_optimizer_equals_named_one():
    numbers = {"local_lr": 0.1, "local_clip_value": 0.05}
    named = run(RunSpec("fedprox", local_optimizer="sgd", hp=numbers, **SMALL))
    own = RunSpec("fedprox", hp={"local_lr": 0.1, "local_bound": 0.05}, **SMALL)
    result = run(own, optimizer=clipped_sgd)
    np.testing.assert_allclose(result.metrics["test_loss"], named.metrics["test_loss"], rtol=1e-5)
    assert (
        result.spec.local_optimizer == "user" and result.spec.hyperparameters["local_bound"] == 0.05
    )
    fixed = optax.chain(optax.clip(0.05), optax.sgd(0.1))
    closed = run(RunSpec("fedprox", **SMALL), optimizer=fixed)
    np.testing.assert_allclose(closed.metrics["test_loss"], named.metrics["test_loss"], rtol=1e-5)
    assert set(closed.spec.hyperparameters) == {"server_lr", "prox_mu"}
    assert len({each.digest() for each in (named, result, closed)}) == 3


def test_optimizer_digest_depends_on_computation():
    digest = lambda own, **hp: compute_optimizer_digest(own, hp)  # noqa: E731
    first = digest(optax.adam(0.1))
    assert digest(optax.chain(optax.adam(0.1))) == first == digest(optax.adam(0.1))
    others = {digest(optax.adam(0.2)), digest(optax.adam(0.1, b1=0.8)), digest(optax.sgd(0.1))}
    assert first not in others and len(others) == 3
    far, near = (
        digest(optax.masked(optax.scale_by_schedule(lambda n, t=t: jnp.asarray(t)[n % 2]), True))
        for t in ([1.0, 2.0], [1.0, 3.0])
    )
    assert far != near  # what is closed over counts
    assert digest(clipped_sgd, local_lr=1, local_bound=2) == digest(
        lambda hp: clipped_sgd(hp), local_lr=3, local_bound=4
    )


def test_sweep_with_user_optimizer_resumes(tmp_path):
    specs = grid(algorithm="fedavg", local_optimizer="user", hp={"local_lr": [0.1, 0.2]}, **SMALL)
    own = lambda hp: optax.sgd(hp["local_lr"], momentum=0.5)  # noqa: E731
    sweep_result = sweep(specs, tmp_path, dataset=DATA, optimizer=own, progress=lambda line: None)
    alone = [run(spec, optimizer=own) for spec in specs]
    for one, other in zip(sweep_result.results, alone, strict=True):
        assert one.digest() == other.digest()
        np.testing.assert_allclose(one.metrics["test_loss"], other.metrics["test_loss"], rtol=1e-5)
    said = []
    again = lambda hp: optax.chain(optax.sgd(hp["local_lr"], momentum=0.5))  # noqa: E731
    sweep(specs, tmp_path, dataset=DATA, optimizer=again, progress=said.append)
    assert not any("%" in line for line in said)  # nothing was made anew
    states = fedjax_het.runtime.sweep.plan_sweep(
        specs, tmp_path, dataset=DATA, optimizer=optax.sgd(0.1)
    )
    assert [state for _, _, state in states] == ["missing", "missing"]


def test_sweep_runs_keep_own_optional_hyperparameters():
    each = [{}, {"local_clip_norm": 1e-3}, {"local_clip_norm": 1e-9}]
    settings = {**SMALL, "rounds": 1, "local_optimizer": "sgd"}
    specs = [RunSpec("fedavg", hp={"local_lr": 0.5, **hp}, **settings) for hp in each]
    plain, loose, tight = (compute_static_key(spec.resolved()) for spec in specs)
    assert loose == tight != plain
    results = sweep(specs, dataset=DATA, progress=lambda line: None).results
    far, near, still = (result.metrics["update_norm"][0] for result in results)
    assert far > 10 * near > 0 and near > 1e4 * still


@pytest.mark.parametrize(
    "settings, optimizer, message",
    [
        ({"local_optimizer": "sgd"}, optax.sgd(0.1), "no name, as an optimizer is passed"),
        ({"local_optimizer": "user"}, None, "an optimizer passed to the run: optimizer=..."),
        ({}, 3, "optimizer = 3: expected an optax.GradientTransformation, or a function of hp"),
        ({}, clipped_sgd, "optimizer 'user' reads hp['local_bound']"),
        ({"algorithm": "apfl"}, optax.sgd(0.1), "hp local_lr = None: expected a number in"),
        ({"algorithm": "fsl"}, optax.sgd(0.1), "hp local_lr = None: expected a number in"),
        ({"lr_schedule": "cosine"}, optax.sgd(0.1), "lr_schedule = 'cosine': expected hp local_lr"),
        ({"lr_step_schedule": "exponential"}, optax.sgd(0.1), "expected no schedule over steps"),
        ({"algorithm": "feddm"}, optax.sgd(0.1), "local_optimizer = 'user': expected no value"),
    ],
)
def test_user_optimizer_conflicts_are_refused(settings, optimizer, message, monkeypatch):
    monkeypatch.setattr(jax, "jit", None)  # nothing may compile
    with pytest.raises(ConfigError) as error:
        run(RunSpec(**{"algorithm": "fedavg", **SMALL, **settings}), optimizer=optimizer)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_common_hyperparameters_apply_to_all():
    for name in OPTIMIZERS:
        numbers = {each: 0.5 for each in COMMON_HYPERPARAMETERS}
        assert (
            numbers.items()
            <= RunSpec(local_optimizer=name, hp=numbers).resolved().hyperparameters.items()
        )
