"""FedGen (Zhu, Hong and Zhou, ICML 2021, arXiv:2105.10056)."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm, RoundInfo, State, Traffic
from fedjax_het.algorithms.builders import (
    add_mean_change,
    get_server_variables,
    num_bytes,
    with_server_variables,
)
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_algorithm import Batch, ClientAlgorithm
from fedjax_het.core.client_loop import Cohort, train_cohort
from fedjax_het.core.client_rows import ClientModels, tile_over_clients
from fedjax_het.core.drift import split_drift, with_drift_sums
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, ServerMessage, make_local_sgd
from fedjax_het.core.resumable_loops import SERVER
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.core.server_parallelism import ServerParallelism
from fedjax_het.core.server_training import ServerTraining, ServerTrainState
from fedjax_het.nn import Generator, make_generator
from fedjax_het.nn.batch_axis import get_num_shards, sum_over_shards
from fedjax_het.nn.generator import compute_diversity_loss
from fedjax_het.nn.model import Head, count_features, require_parts
from fedjax_het.utils.config import (
    Bounds,
    Config,
    DecayFactor,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SearchRange,
)

Tree = Any

_MNIST = {"generator_hidden": 256, "generator_noise": 32}
MIN_GUIDANCE_WEIGHT = 1e-4  # of generated features in every round


@dataclass(frozen=True)
class FedGenOptions(Config):
    """Choices of FedGen."""

    PRESET_FIELD = "fedgen_preset"
    PRESETS = {"cifar": {}, "mnist": _MNIST, "emnist": _MNIST}  # noqa: RUF012

    fedgen_preset: str = "cifar"
    generator_hidden: PositiveInt = 512
    "Size of the generator's hidden layer."
    generator_noise: PositiveInt = 64
    "Number of random inputs of the generator."
    generator_steps: NonNegativeInt = 50
    "Steps of the generator's training per round."
    # Batch norm, and features to keep apart, need two samples.
    generator_batch_size: Annotated[int, Bounds(2)] = 32
    "Number of samples in each step of the generator's training."
    guided_steps: NonNegativeInt = 20
    "Number of steps at the start of a client's round that use generated features."
    teacher_weights: Literal["label", "code"] = "label"
    """Weight of a client's last layer in the loss of a generated sample: "label", the client's
    share of the sample's label; "code", the mean of these shares over the minibatch, as in the
    authors' code."""


@dataclass(frozen=True)
class FedGenHyperParameters(Config):
    """Hyperparameters of FedGen."""

    generated_weight: Annotated[NonNegativeFloat, SearchRange(1, 100)] = 10.0
    "Weight a of the clients' loss on generated features in round 0."
    distilled_weight: Annotated[NonNegativeFloat, SearchRange(1, 100)] = 10.0
    "Weight b of the clients' divergence from generated features of their labels in round 0."
    guidance_decay: DecayFactor = 0.98
    "Factor of a and b per round."
    teacher_weight: NonNegativeFloat = 1.0
    "Weight of the generator's cross-entropy under the clients' last layers."
    diversity_weight: NonNegativeFloat = 1.0
    "Weight of the generator's term that keeps features apart."
    generator_lr: NonNegativeFloat = 3e-4
    "Learning rate of the generator's Adam in round 0."
    generator_lr_decay: DecayFactor = 0.98
    "Factor of the generator's learning rate per round."
    generator_weight_decay: NonNegativeFloat = 0.01
    "Weight decay of the generator, added to its gradient."


class FedGenServerState(NamedTuple):
    """State of the server."""

    variables: Tree
    "Variables of the global model."
    generator: Tree
    "Weights and batch-norm statistics of the generator."
    optimizer: Tree
    "State of the generator's Adam."


class TeacherHeads(NamedTuple):
    """Last layers of a round's clients, with a leading axis of slots S."""

    head: Tree
    "Weights of the last layer."
    counts: jax.Array
    "`[C]`: examples of each class that the client trained on in the round."
    is_present: jax.Array
    "`[]` float32: 1; 0 in an unused slot."


def fedgen(training: LocalTraining, plan: ExecutionPlan, *, options: FedGenOptions) -> Algorithm:
    """FedGen: a generator of features carries the clients' knowledge to each client (Algorithm 1).

    G(noise, y) generates features z, the inputs of the last layer h. After local training and
    before averaging, the server makes `generator_steps` steps of Adam on

        teacher_weight * mean_b sum_k rho_k(y_b) CE(h_k(z_b), y_b)
        + diversity_weight * exp(-mean_ij |eps_i - eps_j|^2 |z_i - z_j|),

    z_b = G(eps_b, y_b), over the round's clients k, with mean squares and mean absolute values.
    rho_k(y) is client k's share of the examples of class y that were trained on in the round, with
    one more in every count. With `teacher_weights` "code" the weight of client k is mean_b
    rho_k(y_b) for all samples. y is uniform over the classes of these examples, eps over [0, 1).
    See `compute_generator_loss`. The rate is `generator_lr` times `generator_lr_decay`^t in round
    t.

    Clients, from round 1 on and in their first `guided_steps` steps, minimize for a minibatch (x,
    y)

        CE(f(x), y) + a CE(h(G(eps, y')), y') + b KL(softmax h(G(eps, y)) || softmax f(x)),

    with one y' per sample of a minibatch, uniform over all classes, and a constant target in the
    last term. a = `generated_weight` * `guidance_decay`^t, but not below 1e-4; b is computed from
    `distilled_weight` by the same rule. A weight of 0 stays 0; with both 0 this is FedAvg. The
    reported training loss includes all terms. The network needs `embed` and `head`.

    Presets: "cifar" (hidden 512, noise 64) has the public code's sizes for CIFAR-10. The code was
    never run there: its features were 32 numbers, here they are the inputs of the network's last
    layer. "mnist" (256, 32) and "emnist", whose b starts at 1 and whose generator_lr is 1e-4, are
    settings of the code's experiments.

    Traffic: the model and the generator down, the model and the label counts up. State: the
    generator and its Adam on the server. Cost: a step of the generator is a pass through it and
    through the last layer of every client of the round. The devices of a federation share the work.

    Departures: the paper's objective has only the term with a, and its text has Gaussian noise.
    This objective is from the authors' code (zhuangdizhu/FedGen), and the authors confirmed its
    noise. The code multiplies losses [B] by weights [B, 1]. The product [B, B] gives each client
    its mean weight for every sample, also for labels that it never had. `teacher_weights` "code"
    does so; the default "label" weights each sample by its label as intended. Three parts of the
    code are left out: a student term of the server's loss with weight 0, the decay of the clients'
    rate by .99 a round, and dropping an epoch's last, smaller batch.

    Args:
      training: the choices of local training.
      plan: where the clients run, and the devices that share the generator's training.
      options: choices of the method.

    Returns:
      The method.

    Raises:
      ConfigError: if the network has no `embed` or no `head`.
    """
    model, max_steps = training.task.model, options.generator_steps
    embed, head = model.embed, model.head
    require_parts(model, "embed", "head")
    assert embed is not None and head is not None
    num_features = count_features(model)
    sizes = (num_features, options.generator_hidden, options.generator_noise)
    generator = make_generator(model.num_classes, *sizes)
    generator_training = GeneratorTraining(head, generator, options)
    client = _make_guided_client(training, head, generator, options.guided_steps)
    measured_client = with_drift_sums(client) if training.measures_drift else client

    def init(hp, key, variables, num_clients):
        weights = generator.init(fold_in_purpose(key, Purpose.GENERATOR))
        server = FedGenServerState(variables, weights, _make_adam(hp).init(weights["params"]))
        states = tile_over_clients(client.init(hp, variables), num_clients)
        return State(server, states, jnp.int32(0))

    def round_(hp, state: State, key, cohort: Cohort):
        server, round_index = state.server, state.round
        message = ServerMessage(server.variables, (server.generator, round_index))
        result = train_cohort(measured_client, plan, hp, message, state.clients, key, cohort)
        client_update, drift = split_drift(result.update, server.variables["params"])
        models, teachers = _split_outputs(training, head, result.outputs)
        num_steps = jnp.where(cohort.schedule.is_verification, min(1, max_steps), max_steps)
        num_steps = jnp.where(teachers.is_present.any(), num_steps, 0)
        lr = hp["generator_lr"] * hp["generator_lr_decay"] ** round_index
        start = ServerTrainState(server.generator, server.optimizer)
        key = fold_in_purpose(key, Purpose.GENERATOR)
        args = (hp | {"generator_lr": lr}, start, teachers, key, num_steps)
        train = generator_training.train
        weights, adam, _ = plan.shard_server_work(train, *args, loops=cohort.loops)
        # Collectives in order: the new model, which is evaluated next, is known after them.
        signal = optax.tree.norm(weights["params"])
        server_lr = plan.order_after(signal, hp["server_lr"])
        new = add_mean_change(hp | {"server_lr": server_lr}, server, client_update.mean)
        old_params, params = server.variables["params"], new.variables["params"]
        update_norm = optax.tree.norm(jax.tree.map(jnp.subtract, params, old_params))
        info = RoundInfo(
            result.train_loss,
            update_norm,
            models=models,
            drift=drift,
            client_losses=result.client_losses,
        )
        new = new._replace(generator=weights, optimizer=adam)
        return State(new, result.states, round_index + 1), info

    def traffic(hp, state):
        size = num_bytes(state.server.variables)
        return Traffic(size + num_bytes(state.server.generator), size + 4 * model.num_classes)

    return Algorithm(
        init=init,
        round=round_,
        global_model=get_server_variables,
        with_global_model=with_server_variables,
        traffic=traffic,
        can_page_state=True,
        server_batch_size=options.generator_batch_size,
    )


def _split_outputs(
    training: LocalTraining, head: Head, outputs: Any
) -> tuple[ClientModels | None, TeacherHeads]:
    """Return the clients' models, if the clients output them, and their last layers."""
    if not training.returns_client_models:
        return None, jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:]), outputs)
    variables, counts = outputs.variables
    present = outputs.is_present.astype(jnp.float32)
    heads = head.get_parameters(variables)
    teachers = TeacherHeads(heads, counts * present[:, None], present)
    return outputs._replace(variables=variables), teachers


def _make_guided_client(
    training: LocalTraining, head: Head, generator: Generator, guided_steps: int
) -> ClientAlgorithm:
    """Return local training with generated features; its `aux` counts labels."""
    num_classes = training.task.model.num_classes

    def loss_and_gradient(context, local, batch):
        hp, variables = context.hp, local.variables
        weights, round_index = context.message.extra
        is_guided = (round_index > 0) & (batch.step_index < guided_steps)

        def decay_weight(initial):
            weight = initial * hp["guidance_decay"] ** round_index
            weight = jnp.maximum(weight, jnp.minimum(initial, MIN_GUIDANCE_WEIGHT))
            return jnp.where(is_guided, weight, 0)

        key = fold_in_purpose(context.key, Purpose.GENERATED_SAMPLES)
        label_key, *noise_keys = jax.random.split(key, 3)
        labels = jax.random.randint(label_key, batch.labels.shape, 0, num_classes)

        def generate_features(key, labels):
            noise = jax.random.uniform(key, (len(labels), generator.noise_size))
            return generator.apply(weights, noise, labels, train=False)[0]

        features = generate_features(noise_keys[0], labels)
        label_features = generate_features(noise_keys[1], batch.labels)
        label_logits = head.apply(head.get_parameters(variables), label_features)
        distilled_weight = decay_weight(hp["distilled_weight"])

        def losses(network, inputs, labels, targets):
            logits, state = network(inputs)
            cross_entropies = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            log_ratio = targets - jax.nn.log_softmax(logits)
            divergences = (jnp.exp(targets) * log_ratio).sum(-1)
            return cross_entropies + distilled_weight * divergences, state

        loss, gradient, new_variables = training.loss_and_gradient(
            context,
            variables,
            batch,
            sample_losses=losses,
            extra_sample_arrays=(jax.nn.log_softmax(label_logits),),
        )

        def generated_loss(params):
            logits = head.apply(head.get_parameters({**variables, "params": params}), features)
            cross_entropies = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return decay_weight(hp["generated_weight"]) * cross_entropies.mean()

        value, generated_gradient = jax.value_and_grad(generated_loss)(variables["params"])
        gradient = jax.tree.map(jnp.add, gradient, generated_gradient)
        return loss + value, gradient, new_variables

    def count_labels(context, gradient, local, batch):
        return gradient, local.aux.at[batch.labels].add(batch.mask)

    base = make_local_sgd(training, adjust=count_labels, loss_and_gradient=loss_and_gradient)

    def begin(context, state):
        return base.begin(context, state)._replace(aux=jnp.zeros(num_classes))

    def end(context, local, state):
        update, state, _ = base.end(context, local, state)
        if training.returns_client_models:
            return update, state, (local.variables, local.aux)
        parameters = head.get_parameters(local.variables)
        return update, state, TeacherHeads(parameters, local.aux, jnp.float32(1))

    return base._replace(begin=begin, end=end, outputs_models=training.returns_client_models)


class GeneratorTraining(NamedTuple):
    """Training of the generator at the server; static."""

    head: Head
    "Last layer of the network, which reads features."
    generator: Generator
    "Functions of the generator."
    options: FedGenOptions
    "Batch size and largest number of steps."

    def train(
        self,
        parallelism: ServerParallelism,
        hp: dict[str, jax.Array],
        train_state: ServerTrainState,
        teachers: TeacherHeads,
        key: jax.Array,
        num_steps: jax.Array,
    ) -> ServerTrainState:
        """Train the generator.

        Args:
          parallelism: devices that share each step.
          hp: values of the hyperparameters, with the round's `generator_lr`.
          train_state: variables of the generator and state of its optimizer.
          teachers: last layers and label counts of the round's clients.
          key: PRNG key; the draws of a step depend on it and on the step's number.
          num_steps: `[]` int32, number of steps.

        Returns:
          The new variables and state.
        """
        is_seen, batch_size = teachers.counts.sum(0) > 0, self.options.generator_batch_size
        label_shares = compute_label_shares(teachers)

        def draw_batch(step_index):
            label_key, noise_key = jax.random.split(jax.random.fold_in(key, step_index))
            logits = jnp.where(is_seen, 0, -jnp.inf)
            labels = jax.random.categorical(label_key, logits, shape=(batch_size,))
            noise = jax.random.uniform(noise_key, (batch_size, self.generator.noise_size))
            return Batch(noise, labels, jnp.ones(batch_size), step_index)

        def loss_and_gradient(variables, batch, key):
            def loss(params):
                inputs = ({**variables, "params": params}, batch.inputs, batch.labels)
                features, state = self.generator.apply(*inputs, train=True, batch_axis=batch.axis)
                args = (self.head, hp, teachers.head, label_shares, features, batch)
                return compute_generator_loss(*args, self.options.teacher_weights), state

            (value, state), gradient = jax.value_and_grad(loss, has_aux=True)(variables["params"])
            return value, gradient, {**variables, "state": state}

        server_training = ServerTraining(loss_and_gradient, _make_adam(hp), parallelism=parallelism)
        return parallelism.loops.run(
            SERVER,
            num_steps,
            lambda step_index, state: server_training.step(state, draw_batch(step_index)),
            train_state,
            max_iterations=self.options.generator_steps,
            samples_per_iteration=batch_size,
        )


def compute_label_shares(teachers: TeacherHeads) -> jax.Array:
    """Compute rho `[S, C]`: each client's share of every class, with one more in every count.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.algorithms.fedgen import TeacherHeads, compute_label_shares
      >>> counts = jnp.array([[3.0, 0.0], [0.0, 0.0]])
      >>> compute_label_shares(TeacherHeads((), counts, jnp.ones(2)))[:, 1].tolist()
      [0.5, 0.5]
    """
    counts = (teachers.counts + 1) * teachers.is_present[:, None]
    return counts / jnp.maximum(counts.sum(0), 1)


def compute_generator_loss(
    head: Head,
    hp: dict[str, jax.Array],
    head_parameters: Tree,
    label_shares: jax.Array,
    features: jax.Array,
    batch: Batch,
    teacher_weights: str = "label",
) -> jax.Array:
    """Compute the loss of the generator on a batch, see `fedgen`.

    Args:
      head: the last layer, which reads features.
      hp: values of the hyperparameters.
      head_parameters: the teachers' last layers, with a leading axis of clients.
      label_shares: rho `[S, C]`, see `compute_label_shares`.
      features: `[B, F]` of the generator.
      batch: noise `[B, N]` as `inputs`, and labels `[B]`.
      teacher_weights: see `FedGenOptions`.

    Returns:
      The weighted sum of the teachers' loss of the features and of the diversity term, which keeps
      features apart as their noise is.
    """
    noise, labels, axis = batch.inputs, batch.labels, batch.axis
    # In turn: the miscompile guard would have to verify products fused with the reductions below.
    logits = jax.lax.map(lambda params: head.apply(params, features), head_parameters)  # [S, B, C]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels[None])
    weights = label_shares[:, labels]  # [S, B]
    if teacher_weights == "code":
        sums = sum_over_shards(weights.sum(1, keepdims=True), axis)
        weights = sums / (len(labels) * get_num_shards(axis))
    teacher_loss = (weights * losses).sum(0).mean()
    diversity_loss = compute_diversity_loss(noise, features, axis)
    return hp["teacher_weight"] * teacher_loss + hp["diversity_weight"] * diversity_loss


def _make_adam(hp) -> optax.GradientTransformation:
    """Return Adam with weight decay in the gradient, as PyTorch's; its state has no rate."""
    decay = optax.add_decayed_weights(hp["generator_weight_decay"])
    return optax.chain(decay, optax.scale_by_adam(), optax.scale(-hp["generator_lr"]))


def _make_hyperparameters(options: FedGenOptions, num_clients: int) -> FedGenHyperParameters:
    """Return the numbers of the preset."""
    if options.fedgen_preset == "emnist":
        return FedGenHyperParameters(distilled_weight=1.0, generator_lr=1e-4)
    return FedGenHyperParameters()


SPEC = AlgorithmSpec(
    "fedgen",
    fedgen,
    "clients also learn from features that a generator at the server makes (Zhu et al., 2021)",
    title="FedGen",
    paper="Zhu, Hong and Zhou, ICML 2021, arXiv:2105.10056",
    options=FedGenOptions,
    hyperparameters=_make_hyperparameters,
    color="#999933",
    wrappable_as="average",
    needs_classes=True,
)
