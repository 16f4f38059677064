"""Distillation of models on images of a generator that seeks their disagreement, of FedFTG."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.core.client_algorithm import Batch
from fedjax_het.core.resumable_loops import SERVER
from fedjax_het.core.server_parallelism import ServerParallelism
from fedjax_het.core.server_training import ServerTraining, ServerTrainState
from fedjax_het.core.task import Task
from fedjax_het.nn import Generator
from fedjax_het.nn.batch_axis import get_num_shards, sum_over_shards
from fedjax_het.nn.generator import compute_diversity_loss
from fedjax_het.utils.arrays import take_row
from fedjax_het.utils.config import Bounds, Config, NonNegativeInt, PositiveInt

Tree = Any


@dataclass(frozen=True)
class DataFreeOptions(Config):
    """Choices of the generator and of the student."""

    distill_iterations: NonNegativeInt = 10
    """Number I of iterations in each round. Each trains the generator, a network that draws images
    from random numbers, and then the student, the global model, on the generated images."""
    synthesis_steps: NonNegativeInt = 1
    "Steps of the generator in an iteration."
    distill_steps: NonNegativeInt = 5
    "Steps of the student in an iteration."
    # Batch norm, and images to keep apart, need two samples.
    distill_batch_size: Annotated[int, Bounds(2)] = 50
    "Number of generated images in a minibatch."
    image_noise: PositiveInt = 100
    "Number of random inputs of the generator."
    image_width: PositiveInt = 64
    "Channels of the generator's last hidden convolution."
    synthesis_loss: Literal["paper", "code"] = "code"
    """Loss of the generator, for images on which the student differs from the teachers, the
    clients' models: "paper", of all teachers at once; "code", of one teacher after the other, with
    absolute differences of logits, as in the authors' code."""


class TeacherEnsemble(NamedTuple):
    """The models of a round's clients, with a leading axis of slots S."""

    variables: Tree
    "Variables of the models."
    class_weights: jax.Array
    "alpha `[S, C]`: each client's share of the examples of each class; 0 in unused slots."
    is_present: jax.Array
    "`[S]` bool."


class DataFreeDistillation(NamedTuple):
    """Training of the generator and of the student at the server; static."""

    task: Task
    "Network of the student and the teachers, for normalized images."
    generator: Generator
    "Functions of the generator."
    options: DataFreeOptions
    "Numbers of steps, and the loss of the generator."

    def run(
        self,
        parallelism: ServerParallelism,
        hp: dict[str, jax.Array],
        generator_variables: Tree,
        student: Tree,
        teachers: TeacherEnsemble,
        label_counts: jax.Array,
        key: jax.Array,
        num_iterations: jax.Array,
    ) -> tuple[Tree, Tree]:
        """Train the generator and the student.

        Args:
          parallelism: devices that share each minibatch.
          hp: values of the hyperparameters, with the learning rates of the round.
          generator_variables: variables of the generator.
          student: variables of the global model.
          teachers: the models of the round's clients.
          label_counts: `[C]`, to which the probabilities of the labels are proportional.
          key: PRNG key; the draws of an iteration depend on it and on the iteration's number.
          num_iterations: `[]` int32.

        Returns:
          The new variables of the student and of the generator.
        """
        options, generator = self.options, self.generator
        draw_key, step_key = jax.random.split(key)
        adam = optax.adam(hp["image_generator_lr"])
        student_training = ServerTraining(
            self.task.loss_and_gradient,
            optax.sgd(hp["distill_lr"]),
            step_key,
            parallelism=parallelism,
        )

        def run_iteration(i, states: tuple[ServerTrainState, ServerTrainState]):
            generator_state, student_state = states
            label_key, noise_key = jax.random.split(jax.random.fold_in(draw_key, i))
            shape = (options.distill_batch_size,)
            labels = jax.random.categorical(label_key, jnp.log(label_counts), shape=shape)
            noise = jax.random.normal(noise_key, (*shape, options.image_noise))
            mask = jnp.ones(shape)

            def step_generator(state, teachers: TeacherEnsemble, diversity_share):
                loss = partial(
                    self.generator_loss, hp, student_state.variables, teachers, diversity_share
                )
                step = ServerTraining(loss, adam, parallelism=parallelism).step
                return step(state, Batch(noise, labels, mask, i))

            generator_state = self.train_generator(step_generator, generator_state, teachers)
            variables = generator_state.variables
            images = parallelism.map_samples(
                lambda samples: generator.apply(variables, *samples, train=False)[0],
                (noise, labels),
            )
            targets = parallelism.map_samples(
                lambda samples: self._predict_ensemble(teachers, *samples), (images, labels)
            )

            def step_student(j, state):
                step_index = i * options.distill_steps + j
                return student_training.step(state, Batch(images, targets, mask, step_index))

            student_state = jax.lax.fori_loop(0, options.distill_steps, step_student, student_state)
            return generator_state, student_state

        optimizer_state = adam.init(generator_variables["params"])
        generator_state = ServerTrainState(generator_variables, optimizer_state)
        num_passes = len(teachers.is_present) * (options.synthesis_steps + 1 / 3)
        generator_state, student_state = parallelism.loops.run(
            SERVER,
            num_iterations,
            run_iteration,
            (generator_state, student_training.init(student)),
            max_iterations=options.distill_iterations,
            samples_per_iteration=options.distill_batch_size * (num_passes + options.distill_steps),
        )
        return student_state.variables, generator_state.variables

    def train_generator(
        self, step: Callable, state: ServerTrainState, teachers: TeacherEnsemble
    ) -> ServerTrainState:
        """Make the generator's steps of an iteration.

        Args:
          step: `step(state, teachers, diversity_share) -> state`.
          state: the generator and its Adam.
          teachers: the models of the round's clients.

        Returns:
          The new state.
        """
        num_steps, num_slots = self.options.synthesis_steps, len(teachers.is_present)
        if self.options.synthesis_loss == "paper":
            return jax.lax.fori_loop(0, num_steps, lambda j, state: step(state, teachers, 1), state)
        share = 1 / jnp.maximum(teachers.is_present.sum(), 1)

        def step_on_teacher(j, state):
            teacher = jax.tree.map(lambda a: take_row(a, j % num_slots)[None], teachers)
            is_present = teacher.is_present[0]
            new_state = step(state, teacher, share)
            return jax.tree.map(lambda new, old: jnp.where(is_present, new, old), new_state, state)

        return jax.lax.fori_loop(0, num_steps * num_slots, step_on_teacher, state)

    def generator_loss(
        self,
        hp: dict[str, jax.Array],
        student: Tree,
        teachers: TeacherEnsemble,
        diversity_share: jax.Array | int,
        variables: Tree,
        batch: Batch,
        key: jax.Array | None,
    ) -> tuple[jax.Array, Tree, Tree]:
        """Compute the generator's loss and gradient, see `ServerTraining`.

        Memory: activations of one teacher at a time.

        Args:
          hp: values of the hyperparameters.
          student: variables of the global model.
          teachers: the teachers of the loss.
          diversity_share: factor of the weight of the diversity.
          variables: variables of the generator.
          batch: noise `[B, Z]` as images, and labels.
          key: not read.

        Returns:
          Loss, gradient, and variables with new batch-norm statistics.
        """
        noise, labels, axis = batch.inputs, batch.labels, batch.axis

        def generate(params):
            inputs = ({**variables, "params": params}, noise, labels)
            images, state = self.generator.apply(*inputs, train=True, batch_axis=axis)
            return (images, self._predict(student, images)), state

        def diversity_loss(outputs):
            weight = hp["image_diversity"] * diversity_share
            return weight * compute_diversity_loss(noise, outputs[0], axis)

        def add_teacher(totals, teacher: TeacherEnsemble):
            loss = partial(self._teacher_loss, hp, teacher, batch)
            new = jax.value_and_grad(loss)(outputs)
            add = lambda total, value: total + jnp.where(teacher.is_present, value, 0)  # noqa: E731
            return jax.tree.map(add, totals, new), None

        outputs, backpropagate, state = jax.vjp(generate, variables["params"], has_aux=True)
        totals = jax.value_and_grad(diversity_loss)(outputs)
        (loss, output_gradient), _ = jax.lax.scan(add_teacher, totals, teachers)
        (gradient,) = backpropagate(output_gradient)
        return loss, gradient, {**variables, "state": state}

    def _teacher_loss(self, hp, teacher: TeacherEnsemble, batch: Batch, outputs) -> jax.Array:
        """Compute one teacher's part of the generator's loss on images and student's logits."""
        images, student_logits = outputs
        logits, weights = self._predict(teacher.variables, images), teacher.class_weights
        weights = weights[batch.labels]
        errors = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        if self.options.synthesis_loss == "paper":
            targets, log_p = jax.nn.log_softmax(logits), jax.nn.log_softmax(student_logits)
            divergences = (jnp.exp(targets) * (targets - log_p)).sum(-1)
            return (weights * (hp["fidelity_weight"] * errors - divergences)).mean()
        gaps = jnp.abs(student_logits - jax.lax.stop_gradient(logits)).mean(-1)
        count = len(weights) * get_num_shards(batch.axis)
        mean_weight = sum_over_shards(weights.sum(), batch.axis) / count
        return hp["fidelity_weight"] * mean_weight * errors.mean() - (weights * gaps).mean()

    def _predict_ensemble(
        self, teachers: TeacherEnsemble, images: jax.Array, labels: jax.Array
    ) -> jax.Array:
        """Return the teachers' mean probabilities `[B, C]`, weighted by class."""

        def add_teacher(total, teacher: TeacherEnsemble):
            probabilities = jax.nn.softmax(self._predict(teacher.variables, images))
            weighted = teacher.class_weights[labels][:, None] * probabilities
            return total + jnp.where(teacher.is_present, weighted, 0), None

        zeros = jnp.zeros((len(labels), self.task.model.num_classes))
        return jax.lax.scan(add_teacher, zeros, teachers)[0]

    def _predict(self, variables: Tree, images: jax.Array) -> jax.Array:
        """Return the logits of a network in evaluation mode."""
        return self.task.model.apply(variables, images, train=False)[0]
