"""APFL, Ditto, pFedMe and Per-FedAvg against float64 oracles, limits and finite differences."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from support.algorithm_builders import bind_options
from support.data import CLIENT_SIZES, make_blobs
from support.markers import slow_case
from support.networks import CURVED_HIDDEN as HIDDEN
from support.networks import make_curved_model, make_linear_model
from support.reference_loop import (
    ReferenceFedAvg,
    cross_entropy,
    finite_difference_gradient,
    flatten_params,
    run_and_compare,
    softmax_gradient,
)
from support.small_federation import make_small_federation

from fedjax_het.algorithms.apfl import apfl
from fedjax_het.algorithms.ditto import ditto
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.per_fedavg import per_fedavg
from fedjax_het.algorithms.pfedme import pfedme
from fedjax_het.algorithms.separate import separate
from fedjax_het.core.client_algorithm import Batch, ClientContext
from fedjax_het.core.client_rows import tile_over_clients
from fedjax_het.core.local_training import ServerMessage

LR = 0.2
FIXED = bind_options(apfl, mixing="weights", adaptive=False)


def personal(federation, state):
    """Every client's model that is scored, in order."""
    variables = partial(federation.algorithm.personal_variables, federation.hp, state)
    return [jax.tree.map(np.asarray, variables(k)) for k in range(federation.num_clients)]


# --- a network with a hidden layer, in JAX and in NumPy ------------------------------------


def logits_of(vector, x):
    """Softmax regression (b, w) or `make_curved_model` (first, second), by the vector's length."""
    if len(vector) == 15:
        return x @ vector[3:].reshape(4, 3) + vector[:3]
    first, second = vector[: 4 * HIDDEN].reshape(4, HIDDEN), vector[4 * HIDDEN :]
    return np.tanh(x @ first) @ second.reshape(HIDDEN, 3)


IMAGES, LABELS = make_blobs()
X = IMAGES.reshape(len(IMAGES), -1).astype(np.float64)


def mean_gradient(vector, x, y):
    if len(vector) == 15:
        dw, db = softmax_gradient(vector[3:].reshape(4, 3), vector[:3], x, y)
        return flatten_params({"w": dw, "b": db})
    return finite_difference_gradient(lambda v: cross_entropy(logits_of(v, x), y), vector)


def gradient(vector, use):
    return mean_gradient(vector, X[use], LABELS[use])


class Personal(ReferenceFedAvg):
    """With the hidden layer too; clients begin with what the global model begins with."""

    def gradient(self, model, x, y):
        return mean_gradient(model, x, y)

    def init_client_state(self, client):
        return self.global_vector

    def scored(self, client):
        """Of a client, its model that is scored."""
        return self.client_states[client]


def check(loop, *, scored=True, atol=3e-6):
    """The global model and every client's equal the loop's; -> state."""
    state = run_and_compare(loop, 3, atol=atol)
    if scored:
        for k, variables in enumerate(personal(loop.federation, state)):
            loop.assert_model(variables["params"], model=loop.scored(k), atol=atol)
    return state


SETTINGS = {"participation": 0.7, "epochs": 2}

# --- the rules of every method -------------------------------------------------------------


UPDATES = {"step": (True, "step"), "round": (True, "round"), "fixed": (False, "step")}


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("model", [make_linear_model, make_curved_model])
def test_apfl_mixed_weights_match_float64_loop(model, update):
    adaptive, when = UPDATES[update]

    class MixedWeights(Personal):
        def init_client_state(self, client):
            return self.global_vector, 0.4

        def local_step(self, w, batch):
            v, alpha = self.client_states[batch.client]
            at_mixture = self.gradient(alpha * v + (1 - alpha) * w, batch.x, batch.y)
            moved = v - LR * alpha * at_mixture
            if adaptive and (when == "step" or batch.step == 0):
                alpha = np.clip(alpha - LR * (v - w) @ at_mixture, 0, 1)
            self.client_states[batch.client] = moved, alpha
            return super().local_step(w, batch)

        def scored(self, client):
            v, alpha = self.client_states[client]
            return alpha * v + (1 - alpha) * self.global_vector

    build = bind_options(apfl, mixing="weights", adaptive=adaptive, alpha_update=when)
    hp = {"local_lr": LR, "apfl_alpha": 0.4}
    loop = MixedWeights(make_small_federation(build, hp=hp, model=model(), **SETTINGS))
    state = check(loop)
    alphas = loop.federation.algorithm.artifacts(state)["apfl_alpha"]
    np.testing.assert_allclose(alphas, [alpha for _, alpha in loop.client_states], atol=3e-6)
    assert (np.ptp(alphas) > 1e-3) == adaptive


@pytest.mark.parametrize("update", UPDATES)
def test_apfl_mixed_outputs_match_float64_loop(update):
    adaptive, when = UPDATES[update]

    class MixedOutputs(Personal):
        def init_client_state(self, client):
            return self.global_vector, 0.4

        def local_step(self, w, batch):
            w = super().local_step(w, batch)
            v, alpha = self.client_states[batch.client]

            def loss(both):
                own, shared = logits_of(both[:-1], batch.x), logits_of(w, batch.x)
                return cross_entropy(both[-1] * own + (1 - both[-1]) * shared, batch.y)

            slopes = finite_difference_gradient(loss, np.append(v, alpha))
            if adaptive and (when == "step" or batch.step == 0):
                alpha = np.clip(alpha - LR * slopes[-1], 0, 1)
            self.client_states[batch.client] = v - LR * slopes[:-1], alpha
            return w

    build = bind_options(apfl, mixing="outputs", adaptive=adaptive, alpha_update=when)
    hp = {"local_lr": LR, "apfl_alpha": 0.4}
    federation = make_small_federation(build, hp=hp, model=make_curved_model(), **SETTINGS)
    loop = MixedOutputs(federation)
    state = check(loop, scored=False)
    server = flatten_params(federation.algorithm.global_model(state)["params"])
    network = federation.algorithm.personal_model
    for variables, (v, alpha) in zip(personal(federation, state), loop.client_states, strict=True):
        actual, _ = network.apply(variables, jnp.asarray(IMAGES), train=False)
        expected = alpha * logits_of(v, X) + (1 - alpha) * logits_of(server, X)
        np.testing.assert_allclose(actual, expected, atol=3e-5)
    fresh = network.init(jax.random.key(0))
    assert jax.tree.structure(fresh) == jax.tree.structure(variables)


def test_ditto_matches_float64_loop():
    class OwnModels(Personal):
        def local_step(self, w, batch):
            v = self.client_states[batch.client]
            pull = 0.7 * (v - self.global_vector)
            self.client_states[batch.client] = v - LR * (self.gradient(v, batch.x, batch.y) + pull)
            return super().local_step(w, batch)

    check(
        OwnModels(
            make_small_federation(ditto, hp={"local_lr": LR, "ditto_lambda": 0.7}, **SETTINGS)
        )
    )


@pytest.mark.parametrize("beta", [1.0, 0.6])
def test_pfedme_matches_float64_loop(beta):
    strength, rate = 3.0, 0.15

    class Envelopes(Personal):
        def initial_client_model(self, client):
            self.client_states[client] = self.global_vector
            return self.global_vector

        def local_step(self, w, batch):
            personal = self.client_states[batch.client]
            for _ in range(4):
                towards = self.gradient(personal, batch.x, batch.y) + strength * (personal - w)
                personal = personal - rate * towards
            self.client_states[batch.client] = personal
            return w - LR * strength * (w - personal)

    hp = {"local_lr": LR, "pfedme_lambda": strength, "personal_lr": rate, "server_lr": beta}
    check(Envelopes(make_small_federation(bind_options(pfedme, inner_steps=4), hp=hp, **SETTINGS)))


@pytest.mark.parametrize("order", ["first", "hessian_free", "exact"])
@pytest.mark.parametrize("inner", [0.5, 0.0])
def test_per_fedavg_matches_float64_loop(order, inner):
    delta = 0.8  # a difference so long that it is not the derivative

    class Meta(Personal):
        """Steps are on pairs of minibatches; a last one alone is a pair with itself."""

        def local_step(self, w, batch):
            if batch.step % 2 == 0:
                self.ahead = w - inner * self.gradient(w, batch.x, batch.y)
                if batch.step + 1 < len(self.minibatches(batch.round, batch.client)):
                    return w
            meta = self.gradient(self.ahead, batch.x, batch.y)
            if order != "first":
                d = delta if order == "hessian_free" else 1e-5
                ends = w + d * meta, w - d * meta
                ahead, behind = (self.gradient(end, batch.x, batch.y) for end in ends)
                meta = meta - inner * (ahead - behind) / (2 * d)
            return w - LR * meta

    hp = {"local_lr": LR, "inner_lr": inner, "hf_delta": delta}
    loop = Meta(
        make_small_federation(
            bind_options(per_fedavg, order=order), hp=hp, participation=0.7, epochs=3
        )
    )
    assert any(len(loop.minibatches(0, k)) % 2 for k, n in enumerate(CLIENT_SIZES) if n)
    check(loop, scored=False)


# --- limits --------------------------------------------------------------------------------


PROBLEMS = {
    "sgd": {"participation": 0.7},
    "momentum": {"optimizer": "momentum", "keep": True, "participation": 0.7},
    "statistics": {"model": make_curved_model(centred=True)},
}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize(
    ("build", "limit", "is_alone"),
    [
        slow_case(FIXED, {"apfl_alpha": 0.0}, False),
        slow_case(FIXED, {"apfl_alpha": 1.0}, True),
        (ditto, {"ditto_lambda": 0.0}, True),
    ],
)
def test_limits_are_fedavg_and_separate(build, limit, is_alone, problem):
    settings = {"epochs": 2, **PROBLEMS[problem]}
    hp = {"local_lr": 0.1, "local_momentum": 0.9, **limit}
    own = bind_options(separate, initialisation="shared")
    federation, average, alone = (
        make_small_federation(each, hp=hp, **settings) for each in (build, fedavg, own)
    )
    (state, info), (together, loss_together), (apart, loss_apart) = (
        each.run(3) for each in (federation, average, alone)
    )
    models_apart = personal(alone, apart)
    models_together = [together.server.variables] * average.num_clients
    close = partial(assert_trees_all_close, rtol=1e-6, atol=1e-7)
    close(personal(federation, state), models_apart if is_alone else models_together)
    close(state.server.variables, together.server.variables)
    close(info.train_loss, (loss_apart if is_alone else loss_together).train_loss)
    gap = jax.tree.map(lambda a, b: np.abs(a - b).max(), models_apart[0], models_together[0])
    assert max(jax.tree.leaves(gap["params"])) > 0.01


@pytest.mark.parametrize("model", [make_linear_model, make_curved_model])
def test_apfl_mixings_agree_for_linear_models_only(model):
    # Without steps, so that only the mixing can differ.
    settings = {"hp": {"local_lr": 0.0, "apfl_alpha": 0.3}, "model": model()}
    logits = {}
    for mixing in ("weights", "outputs"):
        federation = make_small_federation(
            bind_options(apfl, mixing=mixing, adaptive=False), **settings
        )
        start = federation.initial_state()
        other = federation.initial_state(seed=1).clients.memory.variables
        own = start.clients.memory._replace(variables=other)
        state = start._replace(clients=start.clients._replace(memory=own))
        network = federation.algorithm.personal_model or federation.task.model
        variables = federation.algorithm.personal_variables(federation.hp, state, 2)
        logits[mixing] = network.apply(variables, jnp.asarray(IMAGES), train=False)[0]
    gap = np.abs(logits["weights"] - logits["outputs"]).max()
    assert gap < 1e-5 if model is make_linear_model else gap > 0.1


@pytest.mark.parametrize("own_is_better", [True, False])
def test_apfl_alpha_moves_to_better_model(own_is_better):
    settings = {"sizes": (8,), "batch_size": 8, "data": (IMAGES[:8], LABELS[:8])}
    trained, _ = make_small_federation(fedavg, hp={"local_lr": 0.5}, **settings).run(20)
    good = trained.server.variables
    bad = jax.tree.map(lambda a: -a, good)
    for lr, away in ((0.01, 0.001), (100.0, 0.5)):  # a small step, and one that is clipped
        build = bind_options(apfl, mixing="weights", adaptive=True, alpha_update="step")
        federation = make_small_federation(
            build, hp={"local_lr": lr, "apfl_alpha": 0.5}, **settings
        )
        start = federation.initial_state()
        v, w = (good, bad) if own_is_better else (bad, good)
        own = start.clients.memory._replace(variables=tile_over_clients(v, 1))
        state = start._replace(clients=start.clients._replace(memory=own))
        state, _ = federation.run(1, federation.algorithm.with_global_model(state, w))
        moved = float(state.clients.memory.aux[0]) - 0.5
        assert (moved if own_is_better else -moved) >= away and abs(moved) <= 0.5


@pytest.mark.parametrize("order", ["first", "hessian_free", "exact"])
def test_per_fedavg_with_one_minibatch(order):
    """As far as one that has the same minibatch twice, which makes a pair."""
    hp = {"local_lr": LR, "inner_lr": 0.5, "hf_delta": 0.5}
    once, twice = (meta_gradient(order, hp, epochs=epochs)[1] for epochs in (1, 2))
    assert np.abs(once).max() > 1e-3
    np.testing.assert_allclose(once, twice, rtol=1e-5, atol=1e-7)


def meta_gradient(order, hp, model=None, epochs=2):
    """-> (weights, the step that one client with one minibatch, seen twice, takes from them)."""
    settings = {"sizes": (8,), "batch_size": 8, "data": (IMAGES[:8], LABELS[:8])}
    settings["epochs"], hp = epochs, {"local_lr": 1.0, **hp}
    federation = make_small_federation(
        bind_options(per_fedavg, order=order), hp=hp, model=model, **settings
    )
    start = federation.initial_state()
    state, _ = federation.run(1, start)
    before, after = (
        flatten_params(federation.algorithm.global_model(s)["params"]) for s in (start, state)
    )
    return before, before - after


@pytest.mark.slow
@pytest.mark.parametrize("model", [make_linear_model, make_curved_model])
def test_exact_per_fedavg_descends_meta_objective(model):
    inner, use = 0.7, np.arange(8)

    def objective(w):
        ahead = w - inner * gradient(w, use)
        return cross_entropy(logits_of(ahead, X[use]), LABELS[use])

    w, exact = meta_gradient("exact", {"inner_lr": inner}, model())
    # Long steps, as the curved model's gradient is a difference.
    expected = finite_difference_gradient(objective, w, 1e-3)
    np.testing.assert_allclose(exact, expected, atol=2e-5)
    _, first = meta_gradient("first", {"inner_lr": inner}, model())
    scale = np.linalg.norm(expected)
    assert np.linalg.norm(first - expected) > 0.05 * scale
    gaps = [
        np.linalg.norm(
            meta_gradient("hessian_free", {"inner_lr": inner, "hf_delta": d}, model())[1] - expected
        )
        for d in (1.0, 0.03)
    ]
    assert gaps[1] < 1e-3 * scale and gaps[1] < 0.2 * gaps[0], (gaps, scale)


@pytest.mark.slow
def test_per_fedavg_evaluates_after_one_step():
    inner = 0.5
    hp = {"local_lr": LR, "inner_lr": inner}
    federation = make_small_federation(bind_options(per_fedavg, order="first"), hp=hp, epochs=2)
    state, _ = federation.run(2)
    tuning = federation.algorithm.fine_tuning
    assert (tuning.epochs, tuning.steps) == (1, 1)
    variables, use = federation.algorithm.global_model(state), np.arange(3)
    batch = Batch(jnp.asarray(IMAGES[:4]), jnp.asarray(LABELS[:4]), jnp.arange(4) < 3, 0)
    received, client = ServerMessage(variables), tuning.client_algorithm
    context = ClientContext(federation.hp, received, client=None, key=jax.random.key(0))
    local = client.begin(context, client.init(federation.hp, variables))
    local, _ = client.step(context, local, batch)
    _, copy, _ = client.end(context, local, None)
    w = flatten_params(variables["params"])
    np.testing.assert_allclose(
        flatten_params(copy["params"]), w - inner * gradient(w, use), atol=1e-6
    )


# --- every one of them ---------------------------------------------------------------------


def test_batch_norm_statistics_of_counted_minibatches():
    # With steps of no length every minibatch that counts moves the statistics alike.
    settings = {"sizes": (8,), "batch_size": 8, "data": (IMAGES[:8], LABELS[:8])}
    hp = {"local_lr": 0.0, "inner_lr": 0.0, "pfedme_lambda": 1.0, "personal_lr": 0.0}

    def mean(build, epochs):
        model = make_curved_model(centred=True)
        state, _ = make_small_federation(build, hp=hp, epochs=epochs, model=model, **settings).run(
            1
        )
        return state.server.variables["state"]["mean"]

    first = bind_options(per_fedavg, order="first")
    np.testing.assert_allclose(mean(first, 3), mean(fedavg, 4), rtol=1e-5)  # the last one twice
    np.testing.assert_allclose(
        mean(bind_options(pfedme, inner_steps=3), 1), mean(fedavg, 3), rtol=1e-5
    )
