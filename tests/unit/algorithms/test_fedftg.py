"""FedFTG against a float64 loop with a linear generator, its limits, and its labels."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close, assert_trees_all_equal
from support.algorithm_builders import FAST_OPTIONS, make_method_federation
from support.data import IMAGE_SHAPE, NUM_CLASSES, consecutive_partition
from support.markers import slow_case
from support.networks import make_centered_model
from support.reference_loop import (
    ReferenceAdam,
    ReferenceFedAvg,
    finite_difference_gradient,
    flatten_params,
    run_four_rounds_and_compare,
    softmax,
)
from support.small_federation import round_key

from fedjax_het import RunSpec, simulate
from fedjax_het.algorithms import METHODS, fedftg
from fedjax_het.algorithms.data_free_distillation import (
    DataFreeDistillation,
    DataFreeOptions,
    TeacherEnsemble,
)
from fedjax_het.core.client_algorithm import Batch
from fedjax_het.core.execution_plan import make_execution_plan
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.core.server_training import shard_loss_and_gradient
from fedjax_het.core.task import Task
from fedjax_het.nn import Generator, make_image_generator, make_model

NOISE, NUM_PIXELS, BATCH = 2, int(np.prod(IMAGE_SHAPE)), 6
OPTIONS = {
    "distill_iterations": 3,
    "synthesis_steps": 2,
    "distill_steps": 2,
    "distill_batch_size": BATCH,
    "image_noise": NOISE,
}
HP = {"local_lr": 0.2, "server_lr": 0.8, "image_generator_lr": 0.05, "distill_lr": 0.3}
HP |= {"distill_lr_decay": 0.9, "fidelity_weight": 0.7, "image_diversity": 1.5}


def make_linear_generator(num_classes, image_shape, width, noise_size):
    """Images linear in noise and label, without batch norm."""
    size = (noise_size + num_classes, NUM_PIXELS)

    def apply(variables, noise, labels, *, train, batch_axis=None):
        x = jnp.concatenate([noise, jax.nn.one_hot(labels, num_classes)], axis=1)
        images = x @ variables["params"]["kernel"]
        return images.reshape(len(x), *image_shape), variables["state"]

    def init(key):
        return {"params": {"kernel": jax.random.normal(key, size)}, "state": {}}

    return Generator(noise_size, init, apply)


@pytest.fixture
def _linear_generator(monkeypatch):
    monkeypatch.setattr(fedftg, "make_image_generator", make_linear_generator)


class ReferenceFedFTG(ReferenceFedAvg):
    """FedAvg, and the game of generator and student, whose gradient is by differences."""

    loss = "paper"

    def __init__(self, federation):
        super().__init__(federation)
        kernel = federation.initial_state().server.step_state["params"]["kernel"]
        self.generator = np.asarray(kernel, np.float64).ravel()
        partition, labels = consecutive_partition(self.client_sizes), federation.data[1]
        self.counts = partition.label_counts(labels, NUM_CLASSES)

    def logits(self, model, images):
        params = self.params(model)
        return images @ params["w"] + params["b"]

    def generate(self, generator, inputs):
        return inputs @ generator.reshape(-1, NUM_PIXELS)

    def generator_loss(self, generator, inputs, labels, teachers, num_teachers):
        images, noise = self.generate(generator, inputs), inputs[:, :NOISE]
        student = self.logits(self.global_vector, images)
        total = 0.0
        for (model, weights), constant in teachers:
            logits = self.logits(model, images)
            errors = -np.log(softmax(logits)[np.arange(BATCH), labels])
            if self.loss == "paper":
                p, q = softmax(logits), softmax(student)
                divergences = (p * np.log(p / q)).sum(1)
                total += np.mean(weights * (self.hp["fidelity_weight"] * errors - divergences))
            else:
                fixed = self.logits(model, constant)
                total -= np.mean(weights * np.abs(student - fixed).mean(1))
                total += self.hp["fidelity_weight"] * errors.mean() * weights.mean()
        squares = np.square(noise[:, None] - noise).mean(-1)
        gaps = np.abs(images[:, None] - images).mean(-1)
        return total + self.hp["image_diversity"] / num_teachers * np.exp(-np.mean(squares * gaps))

    def step_generator(self, adam, inputs, labels, teachers, lr, num_teachers=1):
        images = self.generate(self.generator, inputs)
        args = (inputs, labels, [(teacher, images) for teacher in teachers], num_teachers)
        gradient = finite_difference_gradient(
            lambda g: self.generator_loss(g, *args), self.generator
        )
        self.generator = adam.step(self.generator, gradient, lr)

    def update_server(self, r, clients, models):
        super().update_server(r, clients, models)
        key = fold_in_purpose(round_key(r), Purpose.SERVER)
        draw_key, _ = jax.random.split(key)
        counts, adam, decay = self.counts[clients], ReferenceAdam(), 0.9**r
        shares = counts / np.maximum(counts.sum(0), 1)
        for i in range(OPTIONS["distill_iterations"]):
            label_key, noise_key = jax.random.split(jax.random.fold_in(draw_key, i))
            p = jnp.log(jnp.float32(counts.sum(0)))
            labels = np.asarray(jax.random.categorical(label_key, p, shape=(BATCH,)))
            noise = np.asarray(jax.random.normal(noise_key, (BATCH, NOISE)), np.float64)
            inputs = np.concatenate([noise, np.eye(NUM_CLASSES)[labels]], 1)
            teachers = [(m, share[labels]) for m, share in zip(models, shares, strict=True)]
            args, lr = (adam, inputs, labels), self.hp["image_generator_lr"] * decay
            for _ in range(OPTIONS["synthesis_steps"]):
                if self.loss == "paper":
                    self.step_generator(*args, teachers, lr)
                else:
                    for teacher in teachers:
                        self.step_generator(*args, [teacher], lr, len(teachers))
            images = self.generate(self.generator, inputs)
            targets = sum(w[:, None] * softmax(self.logits(m, images)) for m, w in teachers)
            for _ in range(OPTIONS["distill_steps"]):
                rows = softmax(self.logits(self.global_vector, images)) - targets
                gradient = {"w": images.T @ rows / BATCH, "b": rows.mean(0)}
                step = self.hp["distill_lr"] * decay * flatten_params(gradient)
                self.global_vector = self.global_vector - step


class ReferenceFedFTGCode(ReferenceFedFTG):
    loss = "code"


@pytest.mark.parametrize("loop", [ReferenceFedFTG, ReferenceFedFTGCode])
@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
@pytest.mark.usefixtures("_linear_generator")
def test_rounds_match_float64_loop(loop, averaging):
    def build(training, plan):
        spec = fedftg.SPEC.with_base(METHODS["fedavg"])
        options = {**OPTIONS, "synthesis_loss": loop.loss}
        return spec.build_algorithm(training, plan, spec.complete_options(options))

    state, reference = run_four_rounds_and_compare(loop, build, averaging=averaging, hp=HP)
    kernel = state.server.step_state["params"]["kernel"]
    np.testing.assert_allclose(np.ravel(kernel), reference.generator, atol=2e-5)
    start = reference.federation.initial_state().server.step_state["params"]["kernel"]
    assert np.abs(kernel - start).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("base", ["fedavg", slow_case("scaffold"), slow_case("feddyn")])
def test_no_iterations_are_base(base):
    settings = {"participation": 0.7, "epochs": 2, "model": make_centered_model()}
    hp = {"local_lr": 0.1, "server_lr": 0.7}
    options = {**FAST_OPTIONS["fedftg"], "base": base}
    over = make_method_federation("fedftg", {**options, "distill_iterations": 0}, hp, **settings)
    plain = make_method_federation(base, hp=hp, **settings)
    (state, info), (expected, plain_info) = over.run(3), plain.run(3)
    assert_trees_all_equal(state.server.inner, expected.server)
    assert_trees_all_equal(state.clients, expected.clients)
    assert_trees_all_close(info, plain_info, rtol=1e-6)
    moved = make_method_federation("fedftg", options, hp, **settings).train(3)
    expected = plain.global_params(expected)
    gaps = jax.tree.map(lambda a, b: np.abs(a - b).max(), moved, expected)
    assert max(jax.tree.leaves(gaps)) > 1e-3


@pytest.mark.usefixtures("_linear_generator")
def test_equal_models_give_student_nothing_to_learn():
    """One client, whose model is the average: the divergence is 0, whatever the images are."""
    settings = {"sizes": (20,)}
    federation = make_method_federation("fedftg", OPTIONS, {**HP, "server_lr": 1.0}, **settings)
    plain = make_method_federation("fedavg", hp={"local_lr": 0.2}, **settings)
    assert_trees_all_close(federation.train(2), plain.train(2), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["paper", "code"])
def test_devices_share_generator_gradient(loss):
    model, slots, batch_size = make_model("mlp", (8, 8, 1), NUM_CLASSES, hidden=[6]), 3, 8
    options = DataFreeOptions(synthesis_loss=loss)
    generator = make_image_generator(NUM_CLASSES, (8, 8, 1), width=3, noise_size=NOISE)
    task = Task(model, (0.0,), (1.0,))
    distillation = DataFreeDistillation(task, generator, options)
    keys = jax.random.split(jax.random.key(0), slots)
    weights = jax.random.uniform(keys[0], (slots, NUM_CLASSES))
    models, is_present = jax.vmap(model.init)(keys), jnp.array([True, True, False])
    teachers = TeacherEnsemble(models, weights, is_present)
    noise = jax.random.normal(keys[1], (batch_size, NOISE))
    batch = Batch(noise, jnp.arange(batch_size) % NUM_CLASSES, jnp.ones(batch_size), jnp.int32(0))
    hp = {name: jnp.float32(HP[name]) for name in ("fidelity_weight", "image_diversity")}
    args = (hp, model.init(jax.random.key(5)), teachers, generator.init(keys[2]), batch)

    def compute(parallelism, hp, student, teachers, variables, batch):
        loss = partial(distillation.generator_loss, hp, student, teachers, 0.5)
        return shard_loss_and_gradient(parallelism, loss)(variables, batch, None)

    results = []
    for devices in (1, 2):
        plan = make_execution_plan(1, devices, has_sharded_server=True)
        work = partial(plan.shard_server_work, compute)
        results.append(jax.jit(work)(*plan.put(args)))
    assert_trees_all_close(*results, rtol=1e-4, atol=1e-6)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(results[0][1])) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(28, 28, 1), (6, 7, 3)])
def test_images_are_normalized(shape):
    generator = make_image_generator(NUM_CLASSES, shape, width=4, noise_size=5)
    variables = generator.init(jax.random.key(0))
    noise = jax.random.normal(jax.random.key(1), (16, 5))
    labels = jnp.arange(16) % NUM_CLASSES
    images, state = generator.apply(variables, noise, labels, train=True)
    assert images.shape == (16, *shape)
    np.testing.assert_allclose(images.mean((0, 1, 2)), 0, atol=1e-4)
    np.testing.assert_allclose(images.std((0, 1, 2)), 1, atol=1e-2)
    assert "norm4" not in variables["params"] and np.abs(state["norm4"]["mean"]).max() > 0
    changed, _ = generator.apply(variables, noise, (labels + 1) % NUM_CLASSES, train=True)
    assert np.abs(changed - images).max() > 0.1


@pytest.mark.slow
def test_run_has_traffic_of_base():
    settings = {"model": "mlp", "num_clients": 4, "participation": 0.5, "rounds": 2}
    result = simulate(RunSpec("fedftg", options=FAST_OPTIONS["fedftg"], **settings))
    plain = simulate(RunSpec("fedavg", **settings))
    for name in ("bytes_up", "bytes_down"):
        assert result.summary[name] == plain.summary[name]
    assert np.isfinite(result.metrics["test_loss"]).all()
