"""What FedDM and FedAF share: clients condense their classes, the server trains on the images."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.algorithms.building import num_bytes, sent_model, with_sent_model
from fedjax_het.algorithms.contract import Algorithm, RoundInfo, State, Traffic
from fedjax_het.common.errors import require
from fedjax_het.common.records import Count, Momentum, NonNegative, Positive, Record, Whole
from fedjax_het.condensation.augment import augment, parse_strategy
from fedjax_het.condensation.distribution import (
    clipped,
    distribution_distance,
    mean_embedding,
)
from fedjax_het.condensation.pool import Knowledge, Pool, train_on_pool
from fedjax_het.engine.contract import Client, ClientMethod, Upload
from fedjax_het.engine.lanes import Cohort, train_cohort
from fedjax_het.engine.local import Broadcast
from fedjax_het.engine.plan import Plan
from fedjax_het.engine.randomness import Purpose, key_for
from fedjax_het.engine.task import Task
from fedjax_het.engine.units import PairWork

Tree = Any


@dataclass(frozen=True)
class CondensingNumbers(Record):
    image_lr: NonNegative = 1.0
    image_momentum: Momentum = 0.9
    clip_norm: Positive = 2.0
    server_lr: NonNegative = 0.001
    server_momentum: Momentum = 0.9
    server_weight_decay: NonNegative = 0.0


@dataclass(frozen=True)
class CondensingOptions(Record):
    """How clients condense and the server trains."""

    ipc: Count = 50
    "Synthetic images of each class and client."
    steps: Count = 1000
    "Of condensation, each round."
    threshold: Count | None = None
    "Classes of which a client holds fewer examples are dropped; None: fewer than ipc."
    init: Literal["mean", "real", "noise"] = "mean"
    "An image starts from the mean of `init_images` real ones, a real one, or noise."
    init_images: Count = 5
    augment_strategy: str = "none"
    "DSA, one transformation for the real and the synthetic batch of a step: names joined by '_'."
    clipping: Literal["none", "per_class", "global"] = "none"
    """Of the image gradient at clip_norm; "global": over all of a client's classes; then the
    client, not the class, is what the lanes run through."""
    logit_term: bool = False
    "Whether mean logits are matched besides mean embeddings."
    top_up: bool = False
    "See `PairWork`."
    warm_start: bool = False
    "Whether a client goes on from its images of its last round instead of starting anew."
    server_epochs: Whole = 500
    server_batch_size: Count = 256

    def completed(self):
        return replace(self, threshold=self.threshold or self.ipc)

    def check(self) -> None:
        parse_strategy(self.augment_strategy)


class ImageState(NamedTuple):
    """What a unit keeps: G = 1 class, or all of a client's with global clipping."""

    images: jax.Array  # [G, ipc, H, W, C] float32, normalised
    made: jax.Array  # [G] int32: the round, counted from 1, in which they were made; 0: never
    examples: jax.Array  # [] int32: how many real ones the unit has


class Working(NamedTuple):
    """Images in the making."""

    images: jax.Array
    moments: optax.OptState
    gradient: jax.Array  # of the classes that were visited in this step; () where they are apart
    made: jax.Array


def condensing(
    task: Task,
    plan: Plan,
    config: CondensingOptions,
    *,
    perturb: Callable[[dict, jax.Array, Tree], Tree],
    collaboration: Callable | None = None,
    knowledge: Callable[[dict, jax.Array, jax.Array], tuple[Tree, Knowledge]] | None = None,
    condensing_owners: bool = True,
    exact: bool = False,
    noise: Callable[[dict, jax.Array, jax.Array], jax.Array] | None = None,
) -> Algorithm:
    """A method whose clients send condensed data, and whose server learns from them.

    A round: clients may first tell their class-mean logits; every pair of a client and a class
    condenses for `config.steps`, all of them in one program; the server trains from the received
    model on, on the union of what was made in the round.

    Networks run in evaluation mode while condensing: batch norm uses the statistics received, since
    a batch of a single class would be centred by its own.

    Args:
      perturb(hp, key, params) -> the parameters that one step of one client uses for all its
        classes.
      collaboration(hp, mean_logits, class_, told, key) -> a term of a class's loss, where `told`
        is what all clients' class-mean logits came to.
      knowledge(hp, mean_logits [K, C, C], owned [K, C]) -> (told, what the server matches); asks
        for the class-mean logits, over all of a client's data.
      condensing_owners: whether they leave out the classes that a client does not condense.
      exact: see `train_on_pool`.
      noise(hp, key, gradient): what is added to a class's clipped gradient.
    Memory: one set of images, its velocity and the activations of a batch for every lane; the
      images of all K * C pairs.
    """
    model = task.model
    require(
        model.embed is not None, "model", model.name, "a network with `embed`, to match features"
    )
    num_classes, shape = model.num_classes, model.input_shape
    by_client = config.clipping == "global"
    group = num_classes if by_client else 1
    threshold = config.ipc if config.threshold is None else config.threshold
    least = max(1, threshold) if condensing_owners else 1
    per_image = {"mean": config.init_images, "real": 1, "noise": 0}[config.init]
    pairs = PairWork(
        ipc=config.ipc,
        steps=config.steps,
        threshold=threshold,
        seeds_per_image=per_image,
        top_up=config.top_up,
        by_client=by_client,
        census=knowledge is not None,
    )

    def begin(hp, broadcast, state: ImageState, client: Client):
        if per_image:
            start = task.normalise(client.start).reshape(group, config.ipc, per_image, *shape)
            images = start.mean(2)
        else:
            key = key_for(client.key, Purpose.SERVER)
            images = jax.random.normal(key, (group, config.ipc, *shape))
        if config.warm_start:
            known = (state.made > 0)[:, None, None, None, None]
            images = jnp.where(known, state.images, images)
        waiting = jnp.zeros_like(images) if by_client else ()
        return Working(images, _descent(hp).init(images), waiting, jnp.zeros(group, jnp.int32))

    def step(hp, broadcast, local: Working, batch, client: Client, key):
        round_key, round_number, told = broadcast.extra
        class_ = batch.labels[0]
        slot = class_ if by_client else 0
        owner = client.id if by_client else client.id // num_classes
        turns = jnp.maximum(client.num_steps // config.steps, 1)  # classes that take turns
        iteration = batch.number // turns
        # All classes of a client see one network in a step, whatever lane they are on.
        networks_key = key_for(round_key, Purpose.NETWORKS)
        owner_key = jax.random.fold_in(jax.random.fold_in(networks_key, owner), iteration)
        augment_key, noise_key, distance_key = jax.random.split(key, 3)
        variables = {
            **broadcast.variables,
            "params": perturb(hp, owner_key, broadcast.variables["params"]),
        }

        def embed(images):
            return model.embed(variables, images, train=False)[:2]

        def augmented(images):
            return augment(augment_key, images, strategy=config.augment_strategy, siamese=True)

        real = augmented(task.normalise(batch.images))
        real_features, real_logits = mean_embedding(embed, real, batch.mask, model.cached_samples)

        def loss(images):
            features, logits = (value.mean(0) for value in embed(augmented(images)))
            total = distribution_distance(real_features, features)
            if config.logit_term:
                total += distribution_distance(real_logits, logits)
            if collaboration is not None:
                total += collaboration(hp, logits, class_, told, distance_key)
            return total

        value, gradient = jax.value_and_grad(loss)(local.images[slot])
        if config.clipping == "per_class":
            gradient = clipped(gradient, hp["clip_norm"])
        if noise is not None:
            gradient += noise(hp, noise_key, gradient)
        made = local.made.at[slot].set(round_number)
        if not by_client:
            return _descend(hp, local, gradient[None], made), value
        gradients = local.gradient.at[slot].set(gradient)

        def take(gradients):
            moved = _descend(hp, local, clipped(gradients, hp["clip_norm"]), made)
            return moved._replace(gradient=jnp.zeros_like(gradients))

        last = (batch.number + 1) % turns == 0
        wait = local._replace(gradient=gradients, made=made)
        return jax.lax.cond(last, take, lambda _: wait, gradients), value

    def end(hp, broadcast, local: Working, state, client):
        return Upload(), ImageState(local.images, local.made, client.num_samples), ()

    client_method = ClientMethod(init=lambda hp, variables: (), begin=begin, step=step, end=end)

    def init(hp, key, variables, num_clients):
        units = num_clients * (1 if by_client else num_classes)
        images = jnp.zeros((units, group, config.ipc, *shape))
        made = jnp.zeros((units, group), jnp.int32)
        clients = ImageState(images, made, jnp.zeros(units, jnp.int32))
        told = ()
        if knowledge is not None:
            nobody = jnp.zeros((num_clients, num_classes), bool)
            told, _ = knowledge(hp, jnp.zeros((*nobody.shape, num_classes)), nobody)
        return State(Broadcast(variables, told), clients, jnp.int32(0))

    def round_(hp, state: State, key, cohort: Cohort):
        variables, told, matched = state.server.variables, (), None
        trial = cohort.schedule.trial
        num_clients = state.clients.made.size // num_classes
        if knowledge is not None:
            told, matched = knowledge(
                hp, *class_mean_logits(task, plan, variables, cohort, num_clients, least)
            )
        number = state.round + 1
        broadcast = Broadcast(variables, (key, number, told))
        result = train_cohort(client_method, plan, hp, broadcast, state.clients, key, cohort)
        made = result.states
        pool = Pool(
            made.images.reshape(-1, *shape),
            jnp.tile(jnp.repeat(jnp.arange(num_classes), config.ipc), num_clients),
            jnp.repeat(made.made.reshape(-1) == number, config.ipc),
        )
        trained = train_on_pool(
            model,
            variables,
            pool,
            key_for(key, Purpose.SERVER),
            epochs=jnp.where(trial, min(1, config.server_epochs), config.server_epochs),
            batch_size=config.server_batch_size,
            lr=hp["server_lr"],
            momentum=hp["server_momentum"],
            weight_decay=hp["server_weight_decay"],
            knowledge=matched,
            exact=exact,
        )
        change = jax.tree.map(jnp.subtract, trained["params"], variables["params"])
        info = RoundInfo(result.train_loss, optax.tree.norm(change))
        return State(Broadcast(trained, told), made, number), info

    def traffic(hp, state):
        tables = 0 if knowledge is None else 4 * num_classes**2
        image_set = 4 * config.ipc * int(np.prod(shape))
        # Down: the model and V. Up: V_k and R_k, whole tables as the paper counts them; the images.
        return Traffic(num_bytes(state.server.variables) + tables, 2 * tables, image_set)

    def artifacts(state):
        made = np.asarray(state.clients.made).reshape(-1)
        (now,) = np.nonzero((made == int(state.round)) & (made > 0))
        images = np.asarray(state.clients.images).reshape(len(made), config.ipc, *shape)[now]
        return {
            "condensed_images": images.astype(np.float16),  # half the file; pixels keep 3 digits
            "condensed_clients": now // num_classes,
            "condensed_classes": now % num_classes,
        }

    def summary(hp, state):
        made = np.asarray(state.clients.made)
        count = int(((made == int(state.round)) & (made > 0)).sum())
        return {"condensed_pairs": count, "condensed_images": count * config.ipc}

    return Algorithm(
        init=init,
        round=round_,
        global_model=sent_model,
        with_global_model=with_sent_model,
        traffic=traffic,
        pairs=pairs,
        artifacts=artifacts,
        summary=summary,
    )


def _descent(hp: dict[str, jax.Array]) -> optax.GradientTransformation:
    """Of the images: SGD with momentum, as in PyTorch."""
    return optax.sgd(hp["image_lr"], momentum=hp["image_momentum"])


def _descend(
    hp: dict[str, jax.Array], local: Working, gradient: jax.Array, made: jax.Array
) -> Working:
    """A step against the gradient of the images."""
    updates, moments = _descent(hp).update(gradient, local.moments)
    images = optax.apply_updates(local.images, updates)
    return local._replace(images=images, moments=moments, made=made)


def class_mean_logits(
    task: Task, plan: Plan, variables: Tree, cohort: Cohort, num_clients: int, least: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Every client's mean logit of each of its classes, over all of its data (FedAF, Eq. 5).

    Returns: `[K, C, C]`, zero where a client has none of a class, and which it owns, `[K, C]`:
    those of which it has `least` examples (one, in a trial, which sees a single batch).
    Cost: one pass in evaluation mode over the data of the round's clients, shared by the devices.
    """
    num_classes = task.model.num_classes
    num_pairs = num_clients * num_classes
    schedule, examples = cohort.schedule, cohort.examples

    def block(variables, images, trial, part):
        census, pairs = part

        def add(i, sums):
            logits, _ = task.model.apply(variables, task.normalise(images[census[i]]), train=False)
            counted = jnp.concatenate([logits, jnp.ones((len(logits), 1))], axis=1)
            return sums.at[pairs[i]].add(counted, mode="drop")  # padding is beyond the end

        batches = (pairs[:, 0] < num_pairs).sum()
        batches = jnp.where(trial, jnp.minimum(1, batches), batches)
        return jax.lax.fori_loop(0, batches, add, jnp.zeros((num_pairs, num_classes + 1)))

    shared = (variables, examples.images, schedule.trial)
    sums = plan.sum_over_blocks(block, shared, (schedule.census, schedule.census_pairs))
    count = sums[:, -1:]
    means = sums[:, :-1] / jnp.maximum(count, 1)
    square = (num_clients, num_classes)
    owns = count >= jnp.where(schedule.trial, 1, least)
    return means.reshape(*square, num_classes), owns.reshape(square)
