"""FedGen (Zhu, Hong and Zhou, ICML 2021, arXiv:2105.10056)."""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

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
from fedjax_het.core.client_loop import (
    ClientModels,
    Cohort,
    tile_over_clients,
    train_cohort,
)
from fedjax_het.core.contract_checks import with_contract_checks
from fedjax_het.core.drift import split_drift, with_drift_sums
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import (
    ClientTrainState,
    LocalTraining,
    ServerMessage,
    apply_gradient,
    make_local_sgd,
)
from fedjax_het.core.resumable_loops import SERVER
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.core.server_parallelism import SINGLE_DEVICE, ServerParallelism
from fedjax_het.core.server_training import ServerTrainState, make_server_step
from fedjax_het.nn import Generator, Model, make_generator
from fedjax_het.nn.batch_axis import gather_rows, sum_over_shards
from fedjax_het.nn.model import Head
from fedjax_het.utils.config import (
    Bounds,
    Config,
    DecayFactor,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
)
from fedjax_het.utils.errors import require

Tree = Any

_MNIST = {"generator_hidden": 256, "generator_noise": 32}


@dataclass(frozen=True)
class FedGenOptions(Config):
    PRESET_FIELD = "fedgen_preset"
    PRESETS = {"cifar": {}, "mnist": _MNIST, "emnist": _MNIST}  # noqa: RUF012

    fedgen_preset: str = "cifar"
    generator_hidden: PositiveInt = 512
    "Of the generator's hidden layer."
    generator_noise: PositiveInt = 64
    "Numbers that it draws."
    generator_steps: NonNegativeInt = 50
    "A round, at the server."
    generator_batch_size: Annotated[int, Bounds(2)] = 32  # batch norm, and features to keep apart
    "Labels and draws in each of its steps."
    guided_steps: NonNegativeInt = 20
    "The first steps of a client's round, in which it learns from generated features."


@dataclass(frozen=True)
class FedGenHyperParameters(Config):
    generated_weight: NonNegativeFloat = 10.0
    "a: of the clients' loss on generated features, in round 0."
    distilled_weight: NonNegativeFloat = 10.0
    "b: of the clients' distance from what generated features of their labels give, in round 0."
    guidance_decay: DecayFactor = 0.98
    "What a and b are multiplied by each round."
    teacher_weight: NonNegativeFloat = 1.0
    "Of the generator's cross-entropy under the clients' last layers."
    diversity_weight: NonNegativeFloat = 1.0
    "Of the generator's term that keeps features apart."
    generator_lr: NonNegativeFloat = 3e-4
    "Adam's, of the generator, in round 0."
    generator_lr_decay: DecayFactor = 0.98
    "What that is multiplied by each round."
    generator_weight_decay: NonNegativeFloat = 0.01
    "Of the generator, added to its gradient."


MIN_GUIDANCE_WEIGHT = 1e-4  # of guidance, however late


class FedGenServerState(NamedTuple):
    """What the server keeps."""

    variables: Tree
    generator: Tree  # its weights and batch-norm statistics
    optimizer: Tree


class TeacherHeads(NamedTuple):
    """What the generator learns from, of each of a round's clients (leading axis: slots)."""

    head: Tree
    counts: jax.Array  # [C] examples of each class that the client trained on in the round
    is_present: jax.Array  # [] 1; 0 where the slot is unused


def fedgen(
    training: LocalTraining,
    plan: ExecutionPlan,
    *,
    options: FedGenOptions = FedGenOptions(),
) -> Algorithm:
    """A generator G(noise, y) of features z, what the last layer h reads, carries what all clients'
    last layers know to each of them.

    Server, after local training and before averaging: `generator_steps` steps of Adam on

        teacher_weight * mean_b sum_k rho_k(y_b) CE(h_k(z_b), y_b)
        + diversity_weight * exp(-mean_ij |eps_i - eps_j|^2 |z_i - z_j|),

    z_b = G(eps_b, y_b), over the round's clients k, with mean squares and mean absolute values.
    rho_k(y) is client k's share of the examples of class y that were trained on in the round, with
    one more in every count; y is uniform over the classes of which there were any, eps over [0, 1).
    See `compute_generator_loss`. The rate is `generator_lr` times `generator_lr_decay`^t in round t.

    Clients, from round 1 on and in their first `guided_steps` steps: for a minibatch (x, y)

        CE(f(x), y) + a CE(h(G(eps, y')), y') + b KL(softmax h(G(eps, y)) || softmax f(x)),

    y' uniform over all classes and as many as a minibatch is large, the target of the last term
    held fixed; a = `generated_weight` * `guidance_decay`^t, but not below 1e-4, b alike from
    `distilled_weight`. A weight of 0 stays 0; with both, this is FedAvg. The training loss reported
    has all terms.

    The paper's objective has the term of a alone, and its text Gaussian noise; this is what the
    authors' code runs (zhuangdizhu/FedGen), which they confirmed of the noise. Left out of it: a
    student term of the server's loss, whose weight is 0 there; the decay of the clients' rate by
    .99 a round; batches without the last, smaller one of an epoch. Of the presets "cifar" (hidden
    512, noise 64) has the code's sizes for CIFAR-10, where it was never run: there features were 32
    numbers, here they are what the network's last layer reads. "mnist" (256, 32) and "emnist",
    whose b starts at 1 and whose generator_lr is 1e-4, are settings that were.

    Traffic: down the model and the generator, up the model and the label counts. State of the
    server: the generator and its Adam. Needs a network with `embed` and `head`. Cost: a step of the
    generator is a pass through it and through the last layer of every client of the round, shared
    by the devices that share a federation.
    """
    model = training.task.model
    expected_network = "a network with `embed` and `head`, whose features are generated"
    require(
        model.embed is not None and model.head is not None, "model", model.name, expected_network
    )
    generator = make_generator(
        model.num_classes,
        _count_features(model),
        options.generator_hidden,
        options.generator_noise,
    )
    client_algorithm = with_contract_checks(
        _make_guided_client(training, generator, options.guided_steps)
    )
    returns_client_models = training.returns_client_models

    def init(hp, key, variables, num_clients):
        generator_variables = generator.init(fold_in_purpose(key, Purpose.GENERATOR))
        server = FedGenServerState(
            variables, generator_variables, _make_adam(hp).init(generator_variables["params"])
        )
        states = tile_over_clients(client_algorithm.init(hp, variables), num_clients)
        return State(server, states, jnp.int32(0))

    max_steps = options.generator_steps

    def train_on_shard(
        server_parallelism: ServerParallelism,
        hp,
        initial_state,
        teachers: TeacherHeads,
        key,
        num_steps,
        lr,
    ):
        return train_generator(
            model,
            generator,
            hp,
            initial_state,
            teachers,
            key,
            num_steps=num_steps,
            max_steps=max_steps,
            batch_size=options.generator_batch_size,
            lr=lr,
            server_parallelism=server_parallelism,
        )

    def round_(hp, state: State, key, cohort: Cohort):
        old_server = state.server
        message = ServerMessage(old_server.variables, (old_server.generator, state.round))
        result = train_cohort(
            with_drift_sums(client_algorithm) if training.measures_drift else client_algorithm,
            plan,
            hp,
            message,
            state.clients,
            key,
            cohort,
            gather_models=returns_client_models,
        )
        client_update, drift = result.update, dict[str, jax.Array]()
        if training.measures_drift:
            client_update, drift = split_drift(client_update, message.variables["params"])
        models, teachers = _split_client_outputs(
            model, result.outputs, has_full_models=returns_client_models
        )
        num_steps = jnp.where(cohort.schedule.is_verification, min(1, max_steps), max_steps)
        num_steps = jnp.where(teachers.is_present.any(), num_steps, 0)
        lr = hp["generator_lr"] * hp["generator_lr_decay"] ** state.round
        initial_state = old_server.generator, old_server.optimizer
        generator_key = fold_in_purpose(key, Purpose.GENERATOR)
        generator_variables, optimizer = plan.shard_server_work(
            train_on_shard,
            hp,
            initial_state,
            teachers,
            generator_key,
            num_steps,
            lr,
            loops=cohort.loops,
        )
        # Collectives in order: the new model, which is evaluated next, is known after them.
        server_lr = plan.order_after(
            optax.tree.norm(generator_variables["params"]), hp["server_lr"]
        )
        server = add_mean_change(hp | {"server_lr": server_lr}, old_server, client_update.mean)
        change = jax.tree.map(
            jnp.subtract, server.variables["params"], old_server.variables["params"]
        )
        info = RoundInfo(result.train_loss, optax.tree.norm(change), models=models, drift=drift)
        server = server._replace(generator=generator_variables, optimizer=optimizer)
        return State(server, result.states, state.round + 1), info

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


def _split_client_outputs(
    model: Model, outputs: Any, *, has_full_models: bool
) -> tuple[ClientModels | None, TeacherHeads]:
    """(the clients' models, what the generator learns from) of what the round's clients told: their
    `whole` models and label counts, or a `TeacherHeads` in each slot."""
    if not has_full_models:
        return None, jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:]), outputs)
    variables, counts = outputs.variables
    present = outputs.is_present.astype(jnp.float32)
    heads = _require_head(model).get_parameters(variables)
    return outputs._replace(variables=variables), TeacherHeads(
        heads, counts * present[:, None], present
    )


def _make_guided_client(
    training: LocalTraining, generator: Generator, guided_steps: int
) -> ClientAlgorithm:
    """Local training with generated features beside the client's data; its memory counts labels."""
    task, base = training.task, make_local_sgd(training)
    head, num_classes = _require_head(task.model), task.model.num_classes

    def begin(context, state):
        local = base.begin(context, state)
        return local._replace(aux=jnp.zeros(num_classes))

    def step(context, local, batch):
        generator_variables, round_index = context.message.extra
        is_guided = (round_index > 0) & (batch.step_index < guided_steps)

        def decay_weight(initial_weight):
            decayed = initial_weight * context.hp["guidance_decay"] ** round_index
            return jnp.where(
                is_guided, jnp.maximum(decayed, jnp.minimum(initial_weight, MIN_GUIDANCE_WEIGHT)), 0
            )

        label_key, *noise_keys = jax.random.split(
            fold_in_purpose(context.key, Purpose.GENERATED_SAMPLES), 3
        )
        labels = jax.random.randint(label_key, batch.labels.shape, 0, num_classes)

        def generate_features(key, labels):
            noise = jax.random.uniform(key, (len(labels), generator.noise_size))
            return generator.apply(generator_variables, noise, labels, train=False)[0]

        features = generate_features(noise_keys[0], labels)
        label_logits = head.apply(
            head.get_parameters(local.variables), generate_features(noise_keys[1], batch.labels)
        )
        distilled_weight = decay_weight(context.hp["distilled_weight"])

        def losses(network, images, labels, target_log_probs):
            logits, state = network(images)
            cross_entropies = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            log_ratio = target_log_probs - jax.nn.log_softmax(logits)
            return cross_entropies + distilled_weight * (jnp.exp(target_log_probs) * log_ratio).sum(
                -1
            ), state

        loss, gradient, variables = task.loss_and_gradient(
            local.variables,
            batch,
            context.key,
            sample_losses=losses,
            extra_sample_arrays=(jax.nn.log_softmax(label_logits),),
        )

        def generated_loss(params):
            logits = head.apply(
                head.get_parameters({**local.variables, "params": params}), features
            )
            cross_entropies = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return decay_weight(context.hp["generated_weight"]) * cross_entropies.mean()

        value, generated_gradient = jax.value_and_grad(generated_loss)(local.variables["params"])
        gradient = jax.tree.map(jnp.add, gradient, generated_gradient)
        variables, optimizer = apply_gradient(
            training, context, variables, gradient, local.optimizer_state, batch
        )
        counts = local.aux.at[batch.labels].add(batch.mask)
        return ClientTrainState(variables, optimizer, counts), loss + value

    def end(context, local, state):
        client_update, client_state, _ = base.end(context, local, state)
        if training.returns_client_models:
            return client_update, client_state, (local.variables, local.aux)
        return (
            client_update,
            client_state,
            TeacherHeads(head.get_parameters(local.variables), local.aux, jnp.float32(1)),
        )

    return ClientAlgorithm(base.init, begin, step, end)


def train_generator(
    model: Model,
    generator: Generator,
    hp: dict,
    initial_state: tuple[Tree, Tree],
    teachers: TeacherHeads,
    key: jax.Array,
    *,
    num_steps: jax.Array,
    max_steps: int | None = None,
    batch_size: int,
    lr: jax.Array,
    server_parallelism: ServerParallelism = SINGLE_DEVICE,
) -> tuple[Tree, Tree]:
    """(generator, its optimiser) after so many steps from `start`, `max_steps` at most; a step's
    draws depend on `key` and its number alone."""
    is_seen = teachers.counts.sum(0) > 0
    label_share_table = compute_label_shares(teachers)

    def draw_batch(step_index):
        label_key, noise_key = jax.random.split(jax.random.fold_in(key, step_index))
        labels = jax.random.categorical(
            label_key, jnp.where(is_seen, 0, -jnp.inf), shape=(batch_size,)
        )
        noise = jax.random.uniform(noise_key, (batch_size, generator.noise_size))
        return Batch(noise, labels, jnp.ones(batch_size), step_index)

    def loss_and_gradient(generator_variables, batch, key):
        noise, labels = batch.images, batch.labels

        def loss(params):
            features, state = generator.apply(
                {**generator_variables, "params": params},
                noise,
                labels,
                train=True,
                batch_axis=batch.axis,
            )
            return compute_generator_loss(
                model, hp, teachers.head, label_share_table, features, batch
            ), state

        (value, state), gradient = jax.value_and_grad(loss, has_aux=True)(
            generator_variables["params"]
        )
        return value, gradient, {**generator_variables, "state": state}

    step = make_server_step(
        draw_batch,
        loss_and_gradient,
        optimizer=_make_adam(hp, lr),
        server_parallelism=server_parallelism,
    )
    trained = server_parallelism.loops.run(
        SERVER,
        num_steps,
        step,
        ServerTrainState(*initial_state),
        max_iterations=max_steps,
        samples_per_iteration=batch_size,
    )
    return trained.variables, trained.optimizer_state


def compute_label_shares(teachers: TeacherHeads) -> jax.Array:
    """rho [S, C]: each client's share of every class, with one more in every count."""
    counts = (teachers.counts + 1) * teachers.is_present[:, None]
    return counts / jnp.maximum(counts.sum(0), 1)


def compute_generator_loss(
    model: Model,
    hp,
    heads,
    label_share_table,
    features,
    batch: Batch,
) -> jax.Array:
    """Return the loss of the generator on a batch.

    Args:
      model: the network whose last layer reads features.
      hp: values of the hyper-parameters.
      heads: the teachers' last layers, with a leading axis of clients.
      label_share_table: rho `[S, C]`, see `compute_label_shares`.
      features: `[B, F]` of the generator.
      batch: noise `[B, N]` as `images`, and labels `[B]`.

    Returns:
      The weighted sum of the teachers' loss of the features and of the diversity term, which keeps
      features apart as their noise is.
    """
    noise, labels, batch_axis = batch.images, batch.labels, batch.axis
    # In turn: products that are one with the reductions below have to be verified (`core.miscompile_guard`).
    logits = jax.lax.map(
        lambda head: _require_head(model).apply(head, features), heads
    )  # [S, B, C]
    teacher_losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels[None])
    teacher_loss = (label_share_table[:, labels] * teacher_losses).sum(0).mean()
    noise_gaps = jnp.square(noise[:, None] - gather_rows(noise, batch_axis)).mean(-1)
    feature_gaps = jnp.abs(features[:, None] - gather_rows(features, batch_axis)).mean(-1)
    diversity_sum = sum_over_shards((noise_gaps * feature_gaps).sum(), batch_axis)
    diversity = diversity_sum / noise_gaps.shape[1] ** 2
    diversity_loss = jnp.exp(-diversity)
    return hp["teacher_weight"] * teacher_loss + hp["diversity_weight"] * diversity_loss


def _make_adam(hp, lr: float | jax.Array = 0.0) -> optax.GradientTransformation:
    """Adam with weight decay in the gradient, as PyTorch's has it; its state knows no rate."""
    decay = optax.add_decayed_weights(hp["generator_weight_decay"])
    return optax.chain(decay, optax.scale_by_adam(), optax.scale(-lr))


def _require_head(model: Model) -> Head:
    """The last layer, which `fedgen` requires."""
    assert model.head is not None
    return model.head


def _count_features(model: Model) -> int:
    embed = model.embed
    assert embed is not None  # `fedgen` requires it

    def features(key):
        images = jnp.zeros((1, *model.input_shape))
        return embed(model.init(key), images, train=False)[0]

    return jax.eval_shape(features, jax.random.key(0)).shape[-1]


def make_fedgen_hyperparameters(options: FedGenOptions, num_clients: int) -> FedGenHyperParameters:
    """Those of the preset."""
    if options.fedgen_preset == "emnist":
        return FedGenHyperParameters(distilled_weight=1.0, generator_lr=1e-4)
    return FedGenHyperParameters()


SPEC = AlgorithmSpec(
    "fedgen",
    fedgen,
    "clients also learn from features that a generator at the server makes (Zhu et al., 2021)",
    paper="Zhu, Hong and Zhou, ICML 2021, arXiv:2105.10056",
    options=FedGenOptions,
    hyperparameters=make_fedgen_hyperparameters,
    color="#999933",
    wrappable_as="average",
)
