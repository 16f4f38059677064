"""FedAMP and HeurFedAMP: weights, messages, rounds against a float64 loop, limits, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close, assert_trees_all_equal
from support.algorithm_builders import bind_options, make_method_federation
from support.data import (
    CLIENT_SIZES,
    NUM_CLASSES,
    consecutive_partition,
    make_blobs,
)
from support.markers import slow_case
from support.reference_loop import (
    ReferenceFedAvg,
    cross_entropy,
    finite_difference_gradient,
    flatten_inputs,
    flatten_params,
)
from support.small_federation import make_full_pass_scheduler, make_small_federation
from support.small_runs import make_spec, run_spec
from support.x64 import enable_x64

from fedjax_het import ConfigError
from fedjax_het.algorithms.client_attention import (
    ATTENTION_FUNCTIONS,
    compute_attention,
    compute_cosine_distances,
    compute_softmax_attention,
    compute_squared_distances,
    median_over_pairs,
    mix_models,
)
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.fedprox import fedprox
from fedjax_het.algorithms.fine_tuning import build_fine_tuned
from fedjax_het.core.client_loop import Cohort
from fedjax_het.core.execution_plan import make_execution_plan

RNG = np.random.default_rng(0)
VECTORS = RNG.normal(size=(5, 40)).astype(np.float32)
ALL = jnp.ones(5, bool)


# --- weights ---------------------------------------------------------------------------------


def float64_distances(vectors):
    return ((vectors[:, None].astype(np.float64) - vectors[None]) ** 2).sum(-1)


@pytest.mark.slow
def test_distances_of_nearby_models_are_precise():
    near = (100 + 1e-3 * RNG.normal(size=(4, 1000))).astype(np.float32)
    expected = float64_distances(near)
    np.testing.assert_allclose(compute_squared_distances(near), expected, rtol=2e-3, atol=1e-12)
    far = compute_squared_distances(VECTORS)
    np.testing.assert_allclose(far, float64_distances(VECTORS), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(far, far.T)
    np.testing.assert_array_equal(compute_squared_distances(np.ones((3, 7), np.float32)), 0)


def test_cosine_distances_of_parallel_models_are_precise():
    base = RNG.normal(size=1000)
    near = (base + 1e-3 * RNG.normal(size=(4, 1000))).astype(np.float32) * [[1], [2], [3], [0.5]]
    near = near.astype(np.float32)
    unit = near.astype(np.float64) / np.linalg.norm(near.astype(np.float64), axis=1, keepdims=True)
    expected = float64_distances(unit) / 2  # about 1e-6: lost if 1 - cos were taken in float32
    np.testing.assert_allclose(compute_cosine_distances(near), expected, rtol=5e-3, atol=1e-12)
    cosines = VECTORS @ VECTORS.T / np.outer(*2 * [np.linalg.norm(VECTORS, axis=1)])
    np.testing.assert_allclose(1 - compute_cosine_distances(VECTORS), cosines, atol=1e-5)


@pytest.mark.parametrize("guard", ["step", "rows"])
@pytest.mark.parametrize("alpha", [0.1, 1e3])
def test_attention_matches_equation_5(alpha, guard):
    distances, sigma = float64_distances(VECTORS), 60.0
    actual = compute_attention(jnp.asarray(distances), alpha, sigma, ALL, guard=guard)
    weights, expected = np.asarray(actual.weights), alpha / sigma * np.exp(-distances / sigma)
    slopes = expected / alpha
    np.fill_diagonal(expected, 0)
    total = expected.sum(1, keepdims=True)
    if alpha > 1:  # more than all: the guard holds
        assert (total > 1).all()
        expected /= total.max() if guard == "step" else total
    np.fill_diagonal(expected, 1 - expected.sum(1))
    np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    assert (weights >= 0).all()
    # The alpha that is told is the one of Eq. 5, to which the proximal term has to be coupled.
    implied = (weights / slopes)[[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]]
    np.testing.assert_allclose(actual.alpha, implied, rtol=1e-4)
    symmetric = np.allclose(weights, weights.T, atol=1e-7)
    assert symmetric == (guard == "step" or alpha < 1)


def test_guard_step_is_largest_convex_alpha():
    distances = compute_squared_distances(VECTORS)
    row_sums = np.asarray(jnp.exp(-distances / 50) * (1 - jnp.eye(5)) / 50).sum(1)
    largest, _ = compute_attention(distances, 1 / row_sums.max(), 50.0, ALL, guard="step")
    guarded, _ = compute_attention(distances, 100 / row_sums.max(), 50.0, ALL, guard="step")
    np.testing.assert_allclose(guarded, largest, atol=1e-6)
    assert np.diag(guarded).min() < 1e-6


def test_attention_at_sigma_limits():
    distances = compute_squared_distances(VECTORS)
    nobody, _ = compute_attention(distances, 1.0, 1e-3, ALL, guard="rows")
    np.testing.assert_array_equal(nobody, np.eye(5))
    # alpha = sigma / (K - 1), the relative scale at 1: all the same once sigma is large
    wide, _ = compute_attention(distances, 1e9 / 4, 1e9, ALL, guard="rows")
    np.testing.assert_allclose(wide, (1 - np.eye(5)) / 4, atol=1e-5)
    # alpha itself as it was: nobody is heard
    alone, _ = compute_attention(distances, 1.0, 1e9, ALL, guard="rows")
    np.testing.assert_allclose(alone, np.eye(5), atol=1e-8)


def test_softmax_attention_matches_equation_8():
    distances = float64_distances(VECTORS) / 80
    for self_weight in (0.0, 0.3, 1.0):
        weights = np.asarray(
            compute_softmax_attention(jnp.asarray(distances), 7.0, self_weight, ALL)
        )
        powers = np.exp(7 * (1 - distances)) * (1 - np.eye(5))
        expected = powers / powers.sum(1, keepdims=True) * (1 - self_weight)
        expected += self_weight * np.eye(5)
        np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-6)
    uniform = compute_softmax_attention(jnp.asarray(distances), 0.0, 0.2, ALL)
    np.testing.assert_allclose(uniform, np.full((5, 5), 0.2), atol=1e-6)
    nearest = np.asarray(compute_softmax_attention(jnp.asarray(distances), 1e6, 0.0, ALL))
    away = distances + 1e9 * np.eye(5)
    np.testing.assert_array_equal(nearest.argmax(1), away.argmin(1))
    np.testing.assert_allclose(nearest.max(1), 1)


def test_excluded_clients_have_no_weight():
    heard, distances = (
        jnp.array([True, False, True, True, False]),
        compute_squared_distances(VECTORS),
    )
    for weights in (
        compute_attention(distances, 1e3, 50.0, heard, guard="rows").weights,
        compute_softmax_attention(distances, 0.1, 0.2, heard),
    ):
        others = np.asarray(weights) * (1 - np.eye(5))
        assert (others[:, [1, 4]] == 0).all() and (others[1, [0, 2, 3]] > 0).all()
        np.testing.assert_allclose(np.sum(weights, axis=1), 1, rtol=1e-6)
    lonely = compute_softmax_attention(distances, 0.1, 0.2, jnp.arange(5) == 0)
    np.testing.assert_allclose(lonely[0], np.eye(5)[0], atol=1e-7)
    pairs = np.asarray(distances)[[0, 0, 2], [2, 3, 3]]
    np.testing.assert_allclose(median_over_pairs(distances, heard), np.median(pairs), rtol=1e-6)
    assert float(median_over_pairs(distances, jnp.zeros(5, bool))) == 0


def test_mix_models_mixes_every_array():
    models = {"a": RNG.normal(size=(5, 2, 3)), "b": {"c": RNG.normal(size=(5,))}}
    models = jax.tree.map(lambda a: a.astype(np.float32), models)
    weights = RNG.random((5, 5)).astype(np.float32)
    expected = jax.tree.map(lambda a: np.einsum("ij,j...->i...", weights, a), models)
    assert_trees_all_close(mix_models(weights, models), expected, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 511, 512, 1100])
def test_distances_cover_all_arrays_in_any_blocks(size):
    models = {"a": RNG.normal(size=(5, size)), "b": {"c": RNG.normal(size=(5, 3, 7))}}
    models = jax.tree.map(lambda a: 3 + a.astype(np.float32), models)
    flat = np.concatenate([leaf.reshape(5, -1) for leaf in jax.tree.leaves(models)], 1)
    expected = float64_distances(flat)
    np.testing.assert_allclose(compute_squared_distances(models), expected, rtol=1e-4, atol=1e-3)
    unit = flat / np.linalg.norm(flat.astype(np.float64), axis=1, keepdims=True)
    expected = float64_distances(unit) / 2
    np.testing.assert_allclose(compute_cosine_distances(models), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ATTENTION_FUNCTIONS)
def test_attention_functions_satisfy_definition_1(name):
    with enable_x64(True):
        function, sigma, t = ATTENTION_FUNCTIONS[name], 1.7, jnp.linspace(0.0, 12.0, 200)
        values, slopes = map(np.asarray, function(t, sigma))
        assert values[0] == 0 and (np.diff(values) >= 0).all()  # increasing from 0
        assert (np.diff(slopes) <= 1e-12).all()  # concave
        np.testing.assert_allclose(slopes[0], 1 / sigma)  # finite
        h = 1e-6
        differences = (function(t + h, sigma)[0] - function(t - h, sigma)[0]) / (2 * h)
        np.testing.assert_allclose(slopes[1:], differences[1:], atol=1e-5)


@pytest.mark.parametrize(("name", "reach"), [("scad", 3.7), ("mcp", 3.0)])
def test_flat_penalties_end_beyond_reach(name, reach):
    def slope(t, sigma):
        return ATTENTION_FUNCTIONS[name](t, sigma)[1]

    assert slope(2 * reach * 0.99, 2.0) > 0 and slope(2 * reach * 1.001, 2.0) == 0
    if name == "scad":
        np.testing.assert_allclose(slope(jnp.array([0.0, 1.0, 2.0]), 2.0), 0.5)  # an L1 near 0


# --- rounds ----------------------------------------------------------------------------------

RELATIVE = {"alpha": 25.0, "sigma": 0.2, "prox_lambda": 0.3, "alpha_decay": 0.5, "alpha_every": 2.0}
ABSOLUTE = {**RELATIVE, "alpha": 2.0, "sigma": 3.0}


OPTIONS = {
    "scale": "relative",
    "initialisation": "shared",
    "start": "received",
    "prox": "decoupled",
    "history": False,
}


def make_federation(name, options, hp=None, **settings):
    """A federation of FedAMP or HeurFedAMP whose client models are scored."""
    hp = {**RELATIVE, "local_lr": 0.3, **(hp or {})}
    settings = {"client_test_model": "client", **settings}
    return make_method_federation(name, {**OPTIONS, **options}, hp, **settings)


class Messages(ReferenceFedAvg):
    """FedAMP's rounds: clients keep their models, u_k is the message to each of them."""

    def __init__(self, federation, start, options, *, heuristic):
        models = federation.global_params(start)
        own = [{name: leaf[k] for name, leaf in models.items()} for k in range(len(CLIENT_SIZES))]
        super().__init__(federation, params=own[0])
        self.client_states, self.trained = (
            [flatten_params(params) for params in own],
            np.zeros(len(own), bool),
        )
        self.o, self.heuristic = options, heuristic

    def client_weights(self, alpha):
        flat = np.stack(self.client_states)
        heard = self.trained if self.trained.any() else np.ones(len(flat), bool)
        clients = np.flatnonzero(heard)
        sigma = self.hp["sigma"]
        weights = np.zeros((len(flat), len(flat)))
        if self.heuristic:
            unit = flat / np.linalg.norm(flat, axis=1, keepdims=True)
            cosines = unit @ unit.T
            if self.o["scale"] == "relative":
                pairs = [1 - cosines[i, j] for i in clients for j in clients if i != j]
                sigma = sigma / max(np.median(pairs), 1e-12)
            for i in range(len(flat)):
                others = [j for j in clients if j != i]
                scores = np.exp(sigma * (cosines[i, others] - cosines[i, others].max()))
                weights[i, others] = scores / scores.sum() * (1 - self.hp["self_weight"])
        else:
            distances = float64_distances(flat)
            if self.o["scale"] == "relative":
                pairs = [distances[i, j] for i in clients for j in clients if i != j]
                sigma = max(sigma * np.median(pairs), 1e-12)
                alpha = alpha * sigma / (len(flat) - 1)
            for i in range(len(flat)):
                others = [j for j in clients if j != i]
                weights[i, others] = alpha / sigma * np.exp(-distances[i, others] / sigma)
            total = weights.sum(1, keepdims=True)
            weights /= np.maximum(total if self.o["guard"] == "rows" else total.max(), 1)
            # The alpha_k of Eq. 5 is what these weights say, whatever was asked for.
            slopes = np.exp(-distances / sigma) / sigma
            unit = sigma / (len(flat) - 1) if self.o["scale"] == "relative" else 1
            nearest = np.where(weights > 0, slopes, 0).argmax(1), np.arange(len(flat))
            alpha = weights[nearest[::-1]] / slopes[nearest[::-1]] / unit
        return weights + np.diag(1 - weights.sum(1)), np.broadcast_to(alpha, len(flat))

    def before_round(self, r):
        hp = self.hp
        alpha = hp["alpha"] * hp["alpha_decay"] ** (r // hp["alpha_every"])
        self.xi, alpha = self.client_weights(alpha)
        self.pull = hp["prox_lambda"] / (
            alpha if self.o["prox"] == "coupled" else np.ones(len(alpha))
        )
        self.u = list(self.xi @ np.stack(self.client_states))

    def initial_client_model(self, client):
        return (self.u if self.o["start"] == "received" else self.client_states)[client]

    def descent_direction(self, model, batch):
        k = batch.client
        return super().descent_direction(model, batch) + self.pull[k] * (model - self.u[k])

    def finish_client(self, client, model, steps):
        self.client_states[client], self.trained[client] = model, True

    def update_server(self, r, clients, models):
        """Nothing: there is no model for all."""


@pytest.mark.parametrize("participation", [slow_case(1.0), 0.7])
@pytest.mark.parametrize(
    ("hp", "options", "heuristic"),
    [
        (RELATIVE, {"guard": "rows"}, False),
        (RELATIVE, {"guard": "step", "start": "own", "initialisation": "independent"}, False),
        (ABSOLUTE, {"guard": "step", "scale": "absolute", "prox": "coupled"}, False),
        (ABSOLUTE | {"alpha": 80.0}, {"scale": "absolute", "prox": "coupled"}, False),
        ({**RELATIVE, "alpha": 1.0, "sigma": 1.0}, {"prox": "coupled"}, False),
        (RELATIVE, {"guard": "rows", "prox": "coupled"}, False),
        ({**RELATIVE, "sigma": 5.0, "self_weight": 1 / 6}, {"initialisation": "independent"}, True),
        (
            {**ABSOLUTE, "sigma": 25.0, "self_weight": 0.4},
            {"scale": "absolute", "start": "own"},
            True,
        ),
    ],
    ids=[
        "rows",
        "own",
        "absolute",
        "absolute, guarded",
        "eq5",
        "rows, coupled",
        "heurfedamp",
        "heurfedamp-absolute",
    ],
)
def test_four_rounds_match_float64_oracle(hp, options, heuristic, participation):
    options = {**OPTIONS, **({} if heuristic else {"guard": "step"}), **options}
    name = "heurfedamp" if heuristic else "fedamp"
    federation = make_federation(name, options, hp, epochs=2, participation=participation)
    start = federation.initial_state()
    state, _ = federation.run(4, start)

    oracle = Messages(federation, start, options, heuristic=heuristic)
    for r in range(4):
        oracle.run_round(r)
    actual = federation.global_params(state)
    for k in range(len(CLIENT_SIZES)):
        for name, expected in oracle.params(oracle.client_states[k]).items():
            np.testing.assert_allclose(actual[name][k], expected, rtol=2e-4, atol=2e-5)
        received = jax.tree.map(lambda a, k=k: a[k], state.server.received["params"])
        np.testing.assert_allclose(
            received["w"], oracle.params(oracle.u[k])["w"], rtol=2e-4, atol=2e-5
        )
        assert_trees_all_equal(
            federation.personal_model(state, k), {n: actual[n][k] for n in ("b", "w")}
        )
    np.testing.assert_allclose(state.server.weights, oracle.xi, rtol=1e-3, atol=2e-5)
    assert int((state.clients.num_rounds > 0).sum()) == oracle.trained.sum()


@pytest.mark.parametrize("client_test_model", ["client", "received"])
def test_client_or_received_model_is_evaluated(client_test_model):
    federation = make_federation("fedamp", {"guard": "rows"}, client_test_model=client_test_model)
    state, _ = federation.run(2)
    kept = {"client": state.clients.variables, "received": state.server.received}
    models = jax.tree.map(lambda a: np.asarray(a[3]), kept)
    assert_trees_all_equal(federation.personal_model(state, 3), models[client_test_model]["params"])
    assert not np.allclose(models["client"]["params"]["w"], models["received"]["params"]["w"])


@pytest.mark.parametrize(("method", "guard"), [("fedamp", {"guard": "rows"}), ("heurfedamp", {})])
@pytest.mark.parametrize("initialisation", ["shared", "independent"])
def test_fedamp_without_pull_is_separate(method, guard, initialisation):
    hp = {"prox_lambda": 0.0, "self_weight": 0.1, "local_lr": 0.3, "local_momentum": 0.9}
    common = {"optimizer": "momentum", "keep": True, "participation": 0.7}
    own = {"initialisation": initialisation}
    actual, _ = make_federation(method, {"start": "own", **own, **guard}, hp, **common).run(3)
    alone = make_method_federation("separate", own, hp, client_test_model="client", **common)
    expected, _ = alone.run(3)
    assert_trees_all_equal(actual.clients, expected.clients)
    assert not np.allclose(actual.server.weights, np.eye(len(CLIENT_SIZES)), atol=1e-3)


@pytest.mark.parametrize(("method", "guard"), [("fedamp", {"guard": "rows"}), ("heurfedamp", {})])
def test_identical_clients_stay_identical(method, guard):
    images, labels = make_blobs((4,))
    data = np.tile(images, (5, 1, 1, 1)), np.tile(labels, 5)
    settings = {"sizes": (4,) * 5, "data": data, "client_test_model": "client"}
    federation = make_federation(method, guard, {"self_weight": 0.2}, **settings)
    state, _ = federation.run(4)
    models = federation.global_params(state)
    assert np.isfinite(models["w"]).all()
    for k in range(1, 5):
        np.testing.assert_allclose(models["w"][k], models["w"][0], atol=1e-5)
    shared = {"initialisation": "shared"}
    one, _ = make_method_federation("separate", shared, {"local_lr": 0.3}, **settings).run(1)
    first, _ = federation.run(1)  # and their first round is local training: u_i = w_i
    assert_trees_all_close(first.clients.variables, one.clients.variables, atol=1e-5)


def test_untrained_clients_are_excluded():
    state, _ = make_federation("fedamp", {"guard": "rows", "initialisation": "independent"}).run(2)
    empty = CLIENT_SIZES.index(0)
    weights = np.asarray(state.server.weights)
    assert (np.delete(weights[:, empty], empty) == 0).all()
    assert (np.delete(weights, empty, 0) > 0).any()


@pytest.mark.parametrize("scale", ["absolute", "relative"])
@pytest.mark.parametrize("attention_", ["exponential", "mcp"])
def test_objective_matches_equation_1(scale, attention_):
    """G(W) in NumPy, over all clients' data; the gradient by differences over every weight."""
    options = {"guard": "step", "scale": scale, "attention": attention_}
    options["initialisation"] = "independent"
    federation = make_federation("fedamp", options, {"sigma": 1.3, "prox_lambda": 2.0})
    state, _ = federation.run(2)
    images, labels = federation.data
    x, clients = flatten_inputs(images), range(len(CLIENT_SIZES))
    held = [consecutive_partition().client_indices(k) for k in clients]
    start = np.stack([flatten_params(federation.personal_model(state, k)) for k in clients])
    heard = [k for k, size in enumerate(CLIENT_SIZES) if size]
    pairs = float64_distances(start)[np.ix_(heard, heard)][np.triu_indices(len(heard), 1)]
    sigma, strength = 1.3, 2.0
    if scale == "relative":
        sigma *= np.median(pairs)
        strength *= sigma / (len(CLIENT_SIZES) - 1)

    def attention_value(t):
        if attention_ == "exponential":
            return 1 - np.exp(-t / sigma)
        bent = np.minimum(t / sigma, 3)
        return bent - bent**2 / 6

    def objective(flat_weights):
        weights = flat_weights.reshape(start.shape)
        total = 0.0
        for own, w in zip(held, weights, strict=True):
            if len(own):
                bias, kernel = w[:NUM_CLASSES], w[NUM_CLASSES:].reshape(-1, NUM_CLASSES)
                total += cross_entropy(x[own] @ kernel + bias, labels[own])
        distances = float64_distances(weights)
        return total + strength * attention_value(distances[np.triu_indices(len(weights), 1)]).sum()

    scheduler = make_full_pass_scheduler(make_execution_plan(1, 1, mesh_axis=None))
    cohort = Cohort(scheduler.make_round(0), federation.examples)
    actual = federation.algorithm.diagnostics.measure(federation.hp, state, cohort)
    np.testing.assert_allclose(actual["objective"], objective(start.ravel()), rtol=1e-5)
    slope = np.linalg.norm(finite_difference_gradient(objective, start.ravel()))
    np.testing.assert_allclose(actual["objective_gradient"], slope, rtol=1e-4)


# --- whole runs ------------------------------------------------------------------------------


def spec(algorithm, **more):
    common = {"protocol": "fedamp", "partition": "dirichlet", "alpha": 1.0, "test_per_client": 12}
    common |= {"num_clients": 4, "participation": 1.0, "local_epochs": 2, "rounds": 3}
    return make_spec(algorithm, **{**common, **more})


@pytest.mark.slow
def test_history_records_weights_of_every_round():
    result = run_spec(spec("fedamp", options={"history": True}))
    weights = result.metrics["collaboration"]
    assert weights.shape == (3, 4, 4)
    np.testing.assert_allclose(weights.sum(2), 1, rtol=1e-5)
    np.testing.assert_array_equal(weights[-1], result.artifacts["collaboration"])
    assert not np.allclose(weights[0], weights[1])
    without = run_spec(spec("fedamp"))
    assert "collaboration" not in without.metrics
    for name, values in without.metrics.items():
        np.testing.assert_array_equal(values, result.metrics[name])


@pytest.mark.parametrize("base", [fedavg, fedprox])
def test_zero_tuning_epochs_is_base(base):
    build = bind_options(build_fine_tuned, build_base=base, tuning_epochs=0)
    federation = make_small_federation(
        build, hp={"local_lr": 0.1, "prox_mu": 0.1}, client_test_model="tuned"
    )
    assert (
        federation.algorithm.fine_tuning is None and federation.algorithm.personal_variables is None
    )
    plain = make_small_federation(base, hp={"local_lr": 0.1, "prox_mu": 0.1})
    assert_trees_all_equal(federation.run(2)[0], plain.run(2)[0])


@pytest.mark.slow
@pytest.mark.parametrize("base", ["fedavg", "fedprox"])
def test_tuned_copies_are_evaluated_and_discarded(base):
    hp = {"local_lr": 0.3}
    arguments = {
        "plain": (base, {}),
        "untuned": (f"{base}_ft", {"tuning_epochs": 0}),
        "tuned": (f"{base}_ft", {"tuning_epochs": 3}),
    }
    curves = {
        name: run_spec(spec(method, hp=hp, options=options)).metrics
        for name, (method, options) in arguments.items()
    }
    for name in ("test_accuracy", "test_loss", "train_loss", "update_norm"):
        for other in ("untuned", "tuned"):
            np.testing.assert_allclose(curves[other][name], curves["plain"][name], rtol=1e-6)
    accuracies = {name: metrics["client_accuracy"] for name, metrics in curves.items()}
    np.testing.assert_array_equal(accuracies["untuned"], accuracies["plain"])
    assert not np.array_equal(accuracies["tuned"], accuracies["plain"])


@pytest.mark.parametrize(
    ("algorithm", "arguments", "message"),
    [
        ("fedamp", {"client_tests": False, "test_per_client": None}, "client_tests = False"),
        ("fedavg", {"client_tests": False}, "test_per_client = 12"),
        ("fedavg", {"test_per_client": 0}, "test_per_client = 0"),
        ("fedavg", {"test_per_client": "none"}, "test_per_client = 'none'"),
        ("fedamp", {"test_per_client": 1000}, "per_client"),
        *(
            ("fedamp", {"partition": "grouped", "alpha": None, "partition_options": options}, text)
            for options, text in (
                ({"groups": [[0, 1], []]}, "groups"),
                ({"groups": [[0], [5]]}, "groups"),
                ({"group_sizes": [10, 10, 1000]}, "group_sizes"),
                ({"dominating_share": 1.2}, "dominating_share = 1.2"),
                ({"shares": 1}, "shares"),
            )
        ),
    ],
)
def test_rejects_bad_settings(algorithm, arguments, message):
    with pytest.raises(ConfigError, match=message):
        run_spec(spec(algorithm, **arguments))
