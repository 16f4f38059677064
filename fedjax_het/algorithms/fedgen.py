"""FedGen (Zhu, Hong and Zhou, ICML 2021, arXiv:2105.10056)."""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.building import (
    add_mean_change,
    num_bytes,
    sent_model,
    with_sent_model,
)
from fedjax_het.algorithms.contract import Algorithm, RoundInfo, State, Traffic
from fedjax_het.algorithms.entry import Entry
from fedjax_het.common.errors import require
from fedjax_het.common.records import (
    Count,
    Decay,
    NonNegative,
    Record,
    Whole,
    at_least,
)
from fedjax_het.engine.contract import Batch, ClientMethod, checked_client
from fedjax_het.engine.lanes import ClientModels, Cohort, for_each_client, train_cohort
from fedjax_het.engine.local import Broadcast, Local, LocalTraining, descend, local_sgd
from fedjax_het.engine.plan import Plan
from fedjax_het.engine.randomness import Purpose, key_for
from fedjax_het.engine.server import Learner, stepping
from fedjax_het.engine.sharing import ALONE, Sharing
from fedjax_het.engine.stretches import SERVER, loop
from fedjax_het.nn import Generator, Model, make_generator
from fedjax_het.nn.models import Head
from fedjax_het.nn.spread import over_whole_batch, whole_rows

Tree = Any

_MNIST = {"generator_hidden": 256, "generator_noise": 32}


@dataclass(frozen=True)
class FedGenOptions(Record):
    PRESET_FIELD = "fedgen_preset"
    PRESETS = {"cifar": {}, "mnist": _MNIST, "emnist": _MNIST}  # noqa: RUF012

    fedgen_preset: str = "cifar"
    generator_hidden: Count = 512
    "Of the generator's hidden layer."
    generator_noise: Count = 64
    "Numbers that it draws."
    generator_steps: Whole = 50
    "A round, at the server."
    generator_batch_size: Annotated[int, at_least(2)] = 32  # batch norm, and features to keep apart
    "Labels and draws in each of its steps."
    guided_steps: Whole = 20
    "The first steps of a client's round, in which it learns from generated features."


@dataclass(frozen=True)
class FedGenNumbers(Record):
    generated_weight: NonNegative = 10.0
    "a: of the clients' loss on generated features, in round 0."
    distilled_weight: NonNegative = 10.0
    "b: of the clients' distance from what generated features of their labels give, in round 0."
    guidance_decay: Decay = 0.98
    "What a and b are multiplied by each round."
    teacher_weight: NonNegative = 1.0
    "Of the generator's cross-entropy under the clients' last layers."
    diversity_weight: NonNegative = 1.0
    "Of the generator's term that keeps features apart."
    generator_lr: NonNegative = 3e-4
    "Adam's, of the generator, in round 0."
    generator_lr_decay: Decay = 0.98
    "What that is multiplied by each round."
    generator_weight_decay: NonNegative = 0.01
    "Of the generator, added to its gradient."


LEAST_WEIGHT = 1e-4  # of guidance, however late


class FedGenServer(NamedTuple):
    """What the server keeps."""

    variables: Tree
    generator: Tree  # its weights and batch-norm statistics
    optimizer: Tree


class Teacher(NamedTuple):
    """What the generator learns from, of each of a round's clients (leading axis: slots)."""

    head: Tree
    counts: jax.Array  # [C] examples of each class that the client trained on in the round
    present: jax.Array  # [] 1; 0 where the slot is unused


def fedgen(
    training: LocalTraining,
    plan: Plan,
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
    See `generator_loss`. The rate is `generator_lr` times `generator_lr_decay`^t in round t.

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
    needs = "a network with `embed` and `head`, whose features are generated"
    require(model.embed is not None and model.head is not None, "model", model.name, needs)
    generator = make_generator(
        model.num_classes,
        _num_features(model),
        options.generator_hidden,
        options.generator_noise,
    )
    client = checked_client(_guided_client(training, generator, options.guided_steps))
    hands_out = training.hands_out_models

    def init(hp, key, variables, num_clients):
        made = generator.init(key_for(key, Purpose.GENERATOR))
        server = FedGenServer(variables, made, _adam(hp).init(made["params"]))
        states = for_each_client(client.init(hp, variables), num_clients)
        return State(server, states, jnp.int32(0))

    most = options.generator_steps

    def learn(sharing: Sharing, hp, start, teachers: Teacher, key, steps, lr):
        return train_generator(
            model,
            generator,
            hp,
            start,
            teachers,
            key,
            steps=steps,
            most_steps=most,
            batch_size=options.generator_batch_size,
            lr=lr,
            sharing=sharing,
        )

    def round_(hp, state: State, key, cohort: Cohort):
        before = state.server
        sent = Broadcast(before.variables, (before.generator, state.round))
        result = train_cohort(client, plan, hp, sent, state.clients, key, cohort, gather=hands_out)
        models, teachers = _told(model, result.outputs, whole=hands_out)
        steps = jnp.where(cohort.schedule.trial, min(1, most), most)
        steps = jnp.where(teachers.present.any(), steps, 0)
        lr = hp["generator_lr"] * hp["generator_lr_decay"] ** state.round
        start = before.generator, before.optimizer
        generator_key = key_for(key, Purpose.GENERATOR)
        made, optimizer = plan.shared(learn, hp, start, teachers, generator_key, steps, lr)
        # Collectives in order: the new model, which is evaluated next, is known after them.
        rate = plan.once_known(optax.tree.norm(made["params"]), hp["server_lr"])
        server = add_mean_change(hp | {"server_lr": rate}, before, result.upload.mean)
        change = jax.tree.map(jnp.subtract, server.variables["params"], before.variables["params"])
        info = RoundInfo(result.train_loss, optax.tree.norm(change), models=models)
        server = server._replace(generator=made, optimizer=optimizer)
        return State(server, result.states, state.round + 1), info

    def traffic(hp, state):
        size = num_bytes(state.server.variables)
        return Traffic(size + num_bytes(state.server.generator), size + 4 * model.num_classes)

    return Algorithm(
        init=init,
        round=round_,
        global_model=sent_model,
        with_global_model=with_sent_model,
        traffic=traffic,
        pageable=True,
        server_batch=options.generator_batch_size,
    )


def _told(model: Model, outputs: Any, *, whole: bool) -> tuple[ClientModels | None, Teacher]:
    """(the clients' models, what the generator learns from) of what the round's clients told: their
    `whole` models and label counts, or a `Teacher` in each slot."""
    if not whole:
        return None, jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:]), outputs)
    variables, counts = outputs.variables
    present = outputs.present.astype(jnp.float32)
    heads = _head(model).parameters(variables)
    return outputs._replace(variables=variables), Teacher(heads, counts * present[:, None], present)


def _guided_client(
    training: LocalTraining, generator: Generator, guided_steps: int
) -> ClientMethod:
    """Local training with generated features beside the client's data; its memory counts labels."""
    task, base = training.task, local_sgd(training)
    head, num_classes = _head(task.model), task.model.num_classes

    def begin(hp, broadcast, state, client):
        local = base.begin(hp, broadcast, state, client)
        return local._replace(memory=jnp.zeros(num_classes))

    def step(hp, broadcast, local, batch, client, key):
        made, number = broadcast.extra
        guided = (number > 0) & (batch.number < guided_steps)

        def weight_of(start):
            decayed = start * hp["guidance_decay"] ** number
            return jnp.where(guided, jnp.maximum(decayed, jnp.minimum(start, LEAST_WEIGHT)), 0)

        label_key, *noise_keys = jax.random.split(key_for(key, Purpose.GENERATED), 3)
        labels = jax.random.randint(label_key, batch.labels.shape, 0, num_classes)

        def generated(key, labels):
            noise = jax.random.uniform(key, (len(labels), generator.noise_size))
            return generator.apply(made, noise, labels, train=False)[0]

        features = generated(noise_keys[0], labels)
        alike = head.apply(head.parameters(local.variables), generated(noise_keys[1], batch.labels))
        distilled_weight = weight_of(hp["distilled_weight"])

        def losses(network, images, labels, target):
            logits, state = network(images)
            own = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            gap = target - jax.nn.log_softmax(logits)
            return own + distilled_weight * (jnp.exp(target) * gap).sum(-1), state

        loss, gradient, variables = task.loss_and_gradient(
            local.variables, batch, key, losses=losses, more=(jax.nn.log_softmax(alike),)
        )

        def generated_loss(params):
            logits = head.apply(head.parameters({**local.variables, "params": params}), features)
            own = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return weight_of(hp["generated_weight"]) * own.mean()

        value, pull = jax.value_and_grad(generated_loss)(local.variables["params"])
        gradient = jax.tree.map(jnp.add, gradient, pull)
        variables, optimizer = descend(
            training, hp, variables, gradient, local.optimizer, (batch, client)
        )
        counts = local.memory.at[batch.labels].add(batch.mask)
        return Local(variables, optimizer, counts), loss + value

    def end(hp, broadcast, local, state, client):
        upload, kept, _ = base.end(hp, broadcast, local, state, client)
        if training.hands_out_models:
            return upload, kept, (local.variables, local.memory)
        return upload, kept, Teacher(head.parameters(local.variables), local.memory, jnp.float32(1))

    return ClientMethod(base.init, begin, step, end)


def train_generator(
    model: Model,
    generator: Generator,
    hp: dict,
    start: tuple[Tree, Tree],
    teachers: Teacher,
    key: jax.Array,
    *,
    steps: jax.Array,
    most_steps: int | None = None,
    batch_size: int,
    lr: jax.Array,
    sharing: Sharing = ALONE,
) -> tuple[Tree, Tree]:
    """(generator, its optimiser) after so many steps from `start`, `most_steps` at most; a step's
    draws depend on `key` and its number alone."""
    seen = teachers.counts.sum(0) > 0
    shares = label_shares(teachers)

    def drawn(number):
        label_key, noise_key = jax.random.split(jax.random.fold_in(key, number))
        labels = jax.random.categorical(
            label_key, jnp.where(seen, 0, -jnp.inf), shape=(batch_size,)
        )
        noise = jax.random.uniform(noise_key, (batch_size, generator.noise_size))
        return Batch(noise, labels, jnp.ones(batch_size), number)

    def loss_and_gradient(made, batch, key):
        noise, labels = batch.images, batch.labels

        def loss(params):
            features, state = generator.apply({**made, "params": params}, noise, labels, train=True)
            return generator_loss(model, hp, teachers.head, shares, features, noise, labels), state

        (value, state), gradient = jax.value_and_grad(loss, has_aux=True)(made["params"])
        return value, gradient, {**made, "state": state}

    step = stepping(drawn, loss_and_gradient, optimizer=_adam(hp, lr), sharing=sharing)
    learnt = loop(SERVER, steps, step, Learner(*start), most=most_steps, samples=batch_size)
    return learnt.variables, learnt.moments


def label_shares(teachers: Teacher) -> jax.Array:
    """rho [S, C]: each client's share of every class, with one more in every count."""
    counts = (teachers.counts + 1) * teachers.present[:, None]
    return counts / jnp.maximum(counts.sum(0), 1)


def generator_loss(model: Model, hp, heads, shares, features, noise, labels) -> jax.Array:
    """The teachers' loss of features [B, F], heads and shares having a leading axis of clients, and
    what keeps features apart as their noise [B, N] is."""
    # In turn: products that are one with the reductions below have to be verified (`engine.guard`).
    logits = jax.lax.map(lambda head: _head(model).apply(head, features), heads)  # [S, B, C]
    of_teachers = optax.softmax_cross_entropy_with_integer_labels(logits, labels[None])
    taught = (shares[:, labels] * of_teachers).sum(0).mean()
    noise_gaps = jnp.square(noise[:, None] - whole_rows(noise)).mean(-1)
    feature_gaps = jnp.abs(features[:, None] - whole_rows(features)).mean(-1)
    apart = over_whole_batch((noise_gaps * feature_gaps).sum()) / noise_gaps.shape[1] ** 2
    alike = jnp.exp(-apart)
    return hp["teacher_weight"] * taught + hp["diversity_weight"] * alike


def _adam(hp, lr: float | jax.Array = 0.0) -> optax.GradientTransformation:
    """Adam with weight decay in the gradient, as PyTorch's has it; its state knows no rate."""
    decay = optax.add_decayed_weights(hp["generator_weight_decay"])
    return optax.chain(decay, optax.scale_by_adam(), optax.scale(-lr))


def _head(model: Model) -> Head:
    """The last layer, which `fedgen` requires."""
    assert model.head is not None
    return model.head


def _num_features(model: Model) -> int:
    embed = model.embed
    assert embed is not None  # `fedgen` requires it

    def features(key):
        images = jnp.zeros((1, *model.input_shape))
        return embed(model.init(key), images, train=False)[0]

    return jax.eval_shape(features, jax.random.key(0)).shape[-1]


def fedgen_numbers(options: FedGenOptions, num_clients: int) -> FedGenNumbers:
    """Those of the preset."""
    if options.fedgen_preset == "emnist":
        return FedGenNumbers(distilled_weight=1.0, generator_lr=1e-4)
    return FedGenNumbers()


ENTRY = Entry(
    "fedgen",
    fedgen,
    "clients also learn from features that a generator at the server makes (Zhu et al., 2021)",
    paper="Zhu, Hong and Zhou, ICML 2021, arXiv:2105.10056",
    options=FedGenOptions,
    numbers=fedgen_numbers,
    colour="#999933",
    refinable="average",
)
