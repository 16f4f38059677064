"""FedGen against a float64 loop, its limits, and its generator."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close, assert_trees_all_equal
from support.algorithm_builders import bind_options
from support.data import BATCH_SIZE, NUM_CLASSES
from support.networks import make_linear_model
from support.reference_loop import (
    ReferenceAdam,
    ReferenceFedAvg,
    finite_difference_gradient,
    flatten_params,
    logit_gradient,
    run_and_compare,
    softmax,
)
from support.small_federation import make_small_federation, round_key, step_key

from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.fedgen import (
    FedGenHyperParameters,
    FedGenOptions,
    GeneratorTraining,
    TeacherHeads,
    _make_adam,
    compute_generator_loss,
    compute_label_shares,
    fedgen,
)
from fedjax_het.core.client_algorithm import Batch
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.core.server_parallelism import SINGLE_DEVICE
from fedjax_het.core.server_training import ServerTrainState
from fedjax_het.nn import count_parameters, make_generator, make_model

TINY = {"generator_hidden": 5, "generator_noise": 2, "generator_steps": 3}
HP = {
    **vars(FedGenHyperParameters()),
    "local_lr": 0.1,
    "generated_weight": 2.0,
    "distilled_weight": 3.0,
}
method = partial(bind_options, fedgen, **TINY)


# --- a float64 loop --------------------------------------------------------------------------


def generated(params, state, noise, labels, train):
    """-> (features, new statistics)."""
    x = np.concatenate([noise, np.eye(NUM_CLASSES)[labels]], 1)
    x = x @ params["hidden"]["kernel"] + params["hidden"]["bias"]
    mean, variance = state["mean"], state["variance"]
    if train:
        mean, variance, count = x.mean(0), x.var(0), len(x)
        state = {
            "mean": 0.9 * state["mean"] + 0.1 * mean,
            "variance": 0.9 * state["variance"] + 0.1 * variance * count / (count - 1),
        }
    x = (x - mean) / np.sqrt(variance + 1e-5)
    x = np.maximum(x * params["norm"]["scale"] + params["norm"]["bias"], 0)
    return x @ params["features"]["kernel"] + params["features"]["bias"], state


class Guided(ReferenceFedAvg):
    """The clients' guided steps; the generator's training, its gradient by differences.

    Random numbers are drawn where the method draws them.
    """

    def __init__(self, federation, *, generator_batch, guided_steps, teacher_weights="label"):
        super().__init__(federation)
        self.teacher_weights = teacher_weights
        self.batch, self.guided = generator_batch, guided_steps
        generator = federation.initial_state().server.generator
        generator = jax.tree.map(lambda a: np.asarray(a, np.float64), generator)
        self.made_by, self.state = generator["params"], generator["state"]["norm"]
        self.adam = ReferenceAdam()

    def weight(self, name, r):
        start = self.hp[name]
        return max(start * self.hp["guidance_decay"] ** r, min(1e-4, start))

    def initial_client_model(self, client):
        # Counts of the labels that it sees in the round.
        self.client_states[client] = np.zeros(NUM_CLASSES)
        return super().initial_client_model(client)

    def descent_direction(self, model, batch):
        self.client_states[batch.client] += np.bincount(batch.y, minlength=NUM_CLASSES)
        plain = super().descent_direction(model, batch)
        if batch.round == 0 or batch.step >= self.guided:
            return plain
        return plain + self.guidance(self.params(model), batch)

    def guidance(self, p, batch):
        """Gradient of both terms on generated features; those of this network are its pixels."""
        step = step_key(batch.round, batch.client, batch.step)
        key = fold_in_purpose(step, Purpose.GENERATED_SAMPLES)
        labels_key, *noise_keys = jax.random.split(key, 3)
        size = len(batch.padded_indices)
        labels = np.asarray(jax.random.randint(labels_key, (size,), 0, NUM_CLASSES))
        noises = [np.asarray(jax.random.uniform(n, (size, 2))) for n in noise_keys]
        own = self.labels[batch.padded_indices]
        (z, _), (alike, _) = (
            generated(self.made_by, self.state, *arguments, False)
            for arguments in zip(noises, (labels, own), strict=True)
        )
        slopes = logit_gradient(z @ p["w"] + p["b"], labels)
        away = self.weight("generated_weight", batch.round) * slopes
        dw, db = z.T @ away / size, away.mean(0)
        actual, taught = (softmax(x @ p["w"] + p["b"])[: len(batch.y)] for x in (batch.x, alike))
        away = self.weight("distilled_weight", batch.round) * (actual - taught)
        return flatten_params({"w": dw + batch.x.T @ away / len(batch.y), "b": db + away.mean(0)})

    def loss(self, params, teachers, noise, labels):
        z, _ = generated(params, self.state, noise, labels, True)
        total = sum(counts + 1 for *_, counts in teachers)
        taught = np.zeros(len(z))
        for w, b, counts in teachers:
            own = -np.log(softmax(z @ w + b)[np.arange(len(z)), labels])
            weights = ((counts + 1) / total)[labels]
            if self.teacher_weights == "code":  # the mean of a product of [B] and [B, 1]
                taught += np.mean(own * weights[:, None])
            else:
                taught += weights * own
        gaps = [
            np.mean((e - f) ** 2) * np.mean(abs(u - v))
            for e, u in zip(noise, z, strict=True)
            for f, v in zip(noise, z, strict=True)
        ]
        diversity = self.hp["diversity_weight"] * np.exp(-np.mean(gaps))
        return self.hp["teacher_weight"] * taught.mean() + diversity

    def teach(self, teachers, key, r):
        seen = sum(counts for *_, counts in teachers) > 0
        for number in range(3):
            labels_key, noise_key = jax.random.split(jax.random.fold_in(key, number))
            allowed = jnp.where(jnp.asarray(seen), 0, -jnp.inf)
            labels = np.asarray(jax.random.categorical(labels_key, allowed, shape=(self.batch,)))
            noise = np.asarray(jax.random.uniform(noise_key, (self.batch, 2)), np.float64)
            flat, unravel = self.raveled()

            def loss(point, unravel=unravel, arguments=(teachers, noise, labels)):
                return self.loss(unravel(point), *arguments)

            gradient = finite_difference_gradient(loss, flat, 1e-6)
            _, self.state = generated(self.made_by, self.state, noise, labels, True)
            gradient += self.hp["generator_weight_decay"] * flat
            rate = self.hp["generator_lr"] * self.hp["generator_lr_decay"] ** r
            self.made_by = unravel(self.adam.step(flat, gradient, rate))

    def raveled(self):
        leaves, structure = jax.tree.flatten(self.made_by)
        ends = np.cumsum([leaf.size for leaf in leaves])[:-1]

        def unravel(flat):
            parts = zip(np.split(flat, ends), leaves, strict=True)
            return jax.tree.unflatten(structure, [p.reshape(leaf.shape) for p, leaf in parts])

        return np.concatenate([leaf.ravel() for leaf in leaves]), unravel

    def update_server(self, r, clients, models):
        pairs = [(p["w"], p["b"]) for p in map(self.params, models)]
        teachers = [(*pair, self.client_states[k]) for pair, k in zip(pairs, clients, strict=True)]
        self.teach(teachers, fold_in_purpose(round_key(r), Purpose.GENERATOR), r)
        super().update_server(r, clients, models)


@pytest.mark.parametrize(
    ("averaging", "teacher_weights"),
    [("uniform", "label"), ("weighted", "label"), ("uniform", "code")],
)
def test_three_rounds_match_float64_loop(averaging, teacher_weights):
    hp = {**HP, "generator_lr": 0.02, "generator_lr_decay": 0.7, "guidance_decay": 0.8}
    build = method(generator_batch_size=6, guided_steps=4, teacher_weights=teacher_weights)
    settings = {"participation": 0.7, "averaging": averaging, "epochs": 2}
    federation = make_small_federation(build, hp=hp, **settings)
    sizes = {"generator_batch": 6, "guided_steps": 4}
    loop = Guided(federation, **sizes, teacher_weights=teacher_weights)
    first = loop.made_by
    state = run_and_compare(loop, 3, atol=2e-5)
    assert_trees_all_close(state.server.generator["params"], loop.made_by, atol=2e-5)
    assert_trees_all_close(state.server.generator["state"]["norm"], loop.state, atol=2e-5)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), loop.made_by, first)
    assert min(jax.tree.leaves(moved)) > 1e-3


# --- limits ----------------------------------------------------------------------------------


def test_guidance_decays_to_minimum(monkeypatch):
    monkeypatch.setattr(sys.modules[fedgen.__module__], "MIN_GUIDANCE_WEIGHT", 0.5)
    still = {"generated_weight": 0.5, "distilled_weight": 0.5, "guidance_decay": 1.0}
    models = []
    for hp in (still, {"guidance_decay": 1e-6}):
        federation = make_small_federation(method(), hp={**HP, **hp})
        models.append(federation.train(2))
    assert_trees_all_close(*models, atol=1e-6)


# --- the generator ---------------------------------------------------------------------------


def teachers(num_clients=3):
    """Random last layers, and clients that hold unlike classes."""
    keys = jax.random.split(jax.random.key(3), num_clients)
    heads = jax.vmap(lambda key: make_linear_model().init(key)["params"])(keys)
    heads = jax.tree.map(lambda a: 20 * a, heads)
    counts = jnp.asarray([[5.0, 0, 2], [0, 9, 0], [1, 1, 0]])[:num_clients]
    return TeacherHeads(heads, counts, jnp.ones(num_clients))


def trained(of, steps, **hp):
    """-> (generator, as it was, as it is)."""
    generator = make_generator(NUM_CLASSES, 4, 16, 3)
    hp = {**vars(FedGenHyperParameters()), **hp, "generator_lr": 0.01}
    start = jax.jit(generator.init)(jax.random.key(0))
    options = FedGenOptions(generator_batch_size=16, generator_steps=400)
    training = GeneratorTraining(make_linear_model().head, generator, options)
    state = ServerTrainState(start, _make_adam(hp).init(start["params"]))
    result = jax.jit(partial(training.train, SINGLE_DEVICE, hp))(
        state, of, jax.random.key(1), steps
    )
    return generator, start, result.variables


@pytest.mark.slow
def test_generated_features_match_teachers():
    of = teachers()
    generator, *both = trained(of, 400)
    labels = jnp.arange(60) % NUM_CLASSES
    noise = jax.random.uniform(jax.random.key(5), (60, 3))
    batch = Batch(noise, labels, jnp.ones(60), jnp.int32(0))
    shares, losses = compute_label_shares(of), []
    for result in both:
        features, _ = generator.apply(result, noise, labels, train=False)
        hp = {**vars(FedGenHyperParameters()), "diversity_weight": 0.0}
        args = (make_linear_model().head, hp, of.head, shares, features, batch)
        losses.append(float(compute_generator_loss(*args)))
    assert losses[1] < 0.5 * losses[0], losses
    logits = jax.vmap(make_linear_model().head.apply, (0, None))(of.head, features)
    mixed = (shares.T[labels].T[..., None] * jax.nn.log_softmax(logits)).sum(0)
    assert (mixed.argmax(-1) == labels).mean() > 0.9


def test_label_shares_are_smoothed():
    of = teachers()._replace(is_present=jnp.asarray([1.0, 1.0, 0.0]))
    expected = [[6 / 7, 1 / 11, 3 / 4], [1 / 7, 10 / 11, 1 / 4], [0, 0, 0]]
    np.testing.assert_allclose(compute_label_shares(of), expected, rtol=1e-6)


def test_unused_slots_and_classes_have_no_effect():
    of = teachers()
    of = of._replace(counts=of.counts.at[:, 2].set(0))
    _, start, result = trained(of, 20, generator_weight_decay=0.0)
    kernels = [one["params"]["hidden"]["kernel"] for one in (start, result)]
    changed = np.abs(kernels[0] - kernels[1]).max(1) > 0  # rows: noise, then a class each
    assert changed.tolist() == [True] * 5 + [False]
    nobody = jax.tree.map(lambda a: jnp.concatenate([a, jnp.zeros_like(a[:2])]), of)
    both = (trained(one, 20)[2] for one in (of, nobody))
    assert_trees_all_close(*both, atol=1e-5)


def test_mnist_generator_size():
    generator = make_generator(10, 32, 256, 32)
    variables = generator.init(jax.random.key(0))
    assert count_parameters(variables) == (32 + 10 + 1) * 256 + 2 * 256 + (256 + 1) * 32 == 19744


def test_generator_evaluation_uses_running_statistics():
    generator, _, result = trained(teachers(), 30)
    noise, labels = jax.random.uniform(jax.random.key(2), (8, 3)), jnp.arange(8) % NUM_CLASSES
    whole, state = generator.apply(result, noise, labels, train=False)
    alone, _ = generator.apply(result, noise[:1], labels[:1], train=False)
    np.testing.assert_allclose(whole[:1], alone, rtol=1e-5, atol=1e-6)
    assert_trees_all_equal(state, result["state"])
    mixed, new = generator.apply(result, noise, labels, train=True)
    assert np.abs(mixed - whole).max() > 1e-3
    assert np.abs(new["norm"]["mean"] - state["norm"]["mean"]).max() > 1e-4


# --- other networks, bad input ----------------------------------------------------


@pytest.mark.slow
def test_convolutional_network_is_guided():
    model = make_model("convnet", (4, 4, 1), NUM_CLASSES, width=3, depth=1)
    rng = np.random.default_rng(0)
    data = rng.normal(size=(11, 4, 4, 1)).astype(np.float32), np.arange(11, dtype=np.int32) % 3
    settings = {"model": model, "sizes": (8, 3), "data": data, "batch_size": BATCH_SIZE}
    guided, plain = (
        make_small_federation(build, hp=HP, **settings) for build in (method(), fedavg)
    )
    state, info = guided.run(2)
    generator = state.server.generator["params"]
    assert generator["features"]["kernel"].shape == (5, 2 * 2 * 3)
    assert np.isfinite(float(info.train_loss))
    gap = guided.global_params(state)["head"]["kernel"] - plain.train(2)["head"]["kernel"]
    assert np.abs(gap).max() > 1e-4
