"""What FedDM and FedAF share: clients condense their classes, the server trains on the images."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.algorithms.building import num_bytes, sent_model, with_sent_model
from fedjax_het.algorithms.contract import Algorithm, RoundInfo, State, Traffic
from fedjax_het.common.errors import require
from fedjax_het.common.records import (
    Bounds,
    Count,
    Momentum,
    NonNegative,
    Positive,
    Record,
    Whole,
)
from fedjax_het.condensation.augment import augment, parse_strategy
from fedjax_het.condensation.class_logits import class_mean_logits
from fedjax_het.condensation.distribution import (
    clipped,
    clipped_rows,
    distribution_distance,
    mean_embedding,
)
from fedjax_het.condensation.pool import Knowledge, Pool, train_on_pool
from fedjax_het.condensation.privacy import gaussian_epsilon, noised_means, require_privacy
from fedjax_het.engine.contract import Batch, Client, ClientMethod, Upload
from fedjax_het.engine.lanes import Cohort, train_cohort
from fedjax_het.engine.local import Broadcast, LocalTraining
from fedjax_het.engine.plan import Plan
from fedjax_het.engine.randomness import Purpose, key_for
from fedjax_het.engine.sharing import Sharing
from fedjax_het.engine.task import Task
from fedjax_het.engine.units import PairWork

Tree = Any


@dataclass(frozen=True)
class CondensingNumbers(Record):
    image_lr: NonNegative = 1.0
    "SGD's, of the images."
    image_momentum: Momentum = 0.9
    "SGD's, of the images."
    clip_norm: Positive = 2.0
    "Of the image gradient, where it is clipped."
    server_lr: NonNegative = 0.001
    "SGD's, of the server's training."
    server_momentum: Momentum = 0.9
    "SGD's, of the server's training."
    server_weight_decay: NonNegative = 0.0
    "SGD's, of the server's training."
    dp_noise: Positive | None = None
    "Of a mean over n private examples, in units of dp_clip / n."
    dp_clip: Positive | None = None
    "The norm that a private example's embedding is clipped to."
    dp_delta: Annotated[float, Bounds(0, 1, open_low=True, open_high=True)] | None = None
    "The delta that epsilon is told for."


_Numbers = TypeVar("_Numbers", bound=CondensingNumbers)


def private_numbers(options: "CondensingOptions", numbers: _Numbers) -> _Numbers:
    """The numbers with those of the private option, where it is taken."""
    if not options.private:
        return numbers
    return replace(numbers, dp_noise=8.0, dp_clip=5.0, dp_delta=1e-5)


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
    "Real images in such a mean."
    augment_strategy: str = "none"
    "DSA, one transformation for the real and the synthetic batch of a step: names joined by '_'."
    clipping: Literal["none", "per_class", "global"] = "none"
    """Of the image gradient at clip_norm; "global": over all of a client's classes; then the
    client, not the class, is what the lanes run through."""
    logit_term: bool = False
    "Whether mean logits are matched besides mean embeddings."
    top_up: bool = False
    "Whether a batch of a class with fewer examples than its size is filled up with repeated ones."
    warm_start: bool = False
    "Whether a client goes on from its images of its last round instead of starting anew."
    server_epochs: Whole = 500
    "Over all synthetic images, each round."
    server_batch_size: Count = 256
    "Of synthetic images."
    private: bool = False
    """Differential privacy of every example of a client: see `condensing`."""

    def completed(self):
        return replace(self, threshold=self.threshold or self.ipc)

    def check(self) -> None:
        parse_strategy(self.augment_strategy, "augment_strategy")
        if self.private:
            require(self.init == "noise", "init", self.init, "noise, with private = True")
            why = "False, with private = True: else an example is read several times in a step"
            require(not self.top_up, "top_up", self.top_up, why)
            require_privacy()


class ImageState(NamedTuple):
    """What a unit keeps: G = 1 class, or all of a client's with global clipping."""

    images: jax.Array  # [G, ipc, H, W, C] float32, normalised
    made: jax.Array  # [G] int32: the round, counted from 1, in which they were made; 0: never
    examples: jax.Array  # [] int32: how many real ones the unit has


class Working(NamedTuple):
    """Images in the making."""

    images: jax.Array
    moments: optax.OptState
    gradient: (
        jax.Array | tuple[()]
    )  # of the classes that were visited in this step; () where they are apart
    made: jax.Array


class Condensing(NamedTuple):
    """What the parts of the method read; static. See `condensing`, whose arguments these are."""

    task: Task
    batch_size: int
    plan: Plan
    config: CondensingOptions
    perturb: Callable[[dict, jax.Array, Tree], Tree]
    collaboration: Callable | None
    knowledge: Callable[[dict, jax.Array, jax.Array], tuple[Tree, Knowledge]] | None
    least: int  # examples of an owner of a class
    exact: bool

    @property
    def threshold(self) -> int:
        return self.config.ipc if self.config.threshold is None else self.config.threshold

    @property
    def by_client(self) -> bool:
        """Whether a unit is a client, with all of its classes, instead of one class of it."""
        return self.config.clipping == "global"

    @property
    def group(self) -> int:
        """Classes of a unit."""
        return self.task.model.num_classes if self.by_client else 1

    @property
    def seeds_per_image(self) -> int:
        """Real images that an image starts from."""
        return {"mean": self.config.init_images, "real": 1, "noise": 0}[self.config.init]

    @property
    def pairs(self) -> PairWork:
        """What the schedule must know."""
        return PairWork(
            ipc=self.config.ipc,
            steps=self.config.steps,
            threshold=self.threshold,
            seeds_per_image=self.seeds_per_image,
            top_up=self.config.top_up,
            by_client=self.by_client,
            census=self.knowledge is not None,
        )


class RoundExtra(NamedTuple):
    """What clients are told besides the variables."""

    key: jax.Array  # of the round
    number: jax.Array  # of the round, counted from 1
    consensus: Tree  # what all clients' class-mean logits came to; () where nobody asks


def condensing(
    training: LocalTraining,
    plan: Plan,
    config: CondensingOptions,
    *,
    perturb: Callable[[dict, jax.Array, Tree], Tree],
    collaboration: Callable | None = None,
    knowledge: Callable[[dict, jax.Array, jax.Array], tuple[Tree, Knowledge]] | None = None,
    condensing_owners: bool = True,
    exact: bool = False,
) -> Algorithm:
    """A method whose clients send condensed data, and whose server learns from them.

    A round: clients may first tell their class-mean logits; every pair of a client and a class
    condenses for `config.steps`, all of them in one program; the server trains from the received
    model on, on the union of what was made in the round.

    Networks run in evaluation mode while condensing: batch norm uses the statistics received, since
    a batch of a single class would be centred by its own.

    `private`: of a client's examples nothing is read but means of embeddings (and, for V, of
    logits), each example's clipped to dp_clip, with Gaussian noise of dp_noise * dp_clip / n on
    every number of a mean over n: as in DP-SGD, whose gradients these are up to a linear map, that
    of the synthetic images' Jacobian, so that the noise is added before it. The synthetic images'
    embeddings are clipped alike, or the means could not meet. Images start from noise. The summary
    has the epsilon of dp_delta, of example-level privacy over all rounds, see `gaussian_epsilon`;
    how many examples of which class a client holds is no secret. It covers images, V and R, and so
    the model; not the loss in the run's metrics, which no client sends. The paper's values of it
    are not known.

    Args:
      perturb(hp, key, params) -> the parameters that one step of one client uses for all its
        classes.
      collaboration(hp, mean_logits, class_, consensus, key) -> a term of a class's loss, where
        `consensus` is what all clients' class-mean logits came to.
      knowledge(hp, mean_logits [K, C, C], owned [K, C]) -> (consensus, what the server matches);
        asks for the class-mean logits, over all of a client's data.
      condensing_owners: whether they leave out the classes that a client does not condense.
      exact: see `train_on_pool`.
    Errors: ConfigError: a network without `embed`.
    Memory: one set of images, its velocity and the activations of a batch for every lane; the
      images of all K * C pairs.
    """
    task = training.task
    embeds = task.model.embed is not None
    require(embeds, "model", task.model.name, "a network with `embed`, to match features")
    batch_size = training.batch_size
    setup = Condensing(task, batch_size, plan, config, perturb, collaboration, knowledge, 1, exact)
    if condensing_owners:
        setup = setup._replace(least=max(1, setup.threshold))
    return Algorithm(
        init=partial(_first_state, setup),
        round=partial(_round, setup),
        global_model=sent_model,
        with_global_model=with_sent_model,
        traffic=partial(_traffic, setup),
        pairs=setup.pairs,
        server_batch=config.server_batch_size,
        artifacts=partial(_artifacts, setup),
        summary=partial(_summary, setup),
    )


# --- a client ------------------------------------------------------------------------------


def _client_method(setup: Condensing) -> ClientMethod:
    def end(hp, broadcast, local: Working, state, client: Client):
        return Upload(), ImageState(local.images, local.made, client.num_samples), ()

    return ClientMethod(
        init=lambda hp, variables: (),
        begin=partial(_begin, setup),
        step=partial(_step, setup),
        end=end,
    )


def _begin(setup: Condensing, hp, broadcast: Broadcast, state: ImageState, client: Client):
    """The images that a unit starts from."""
    shape, seeds = setup.task.model.input_shape, setup.seeds_per_image
    group, ipc = setup.group, setup.config.ipc
    if seeds:
        start = setup.task.normalise(client.start).reshape(group, ipc, seeds, *shape)
        images = start.mean(2)
    else:
        key = key_for(client.key, Purpose.SERVER)
        images = jax.random.normal(key, (group, ipc, *shape))
    if setup.config.warm_start:
        known = (state.made > 0)[:, None, None, None, None]
        images = jnp.where(known, state.images, images)
    waiting = jnp.zeros_like(images) if setup.by_client else ()
    return Working(images, _descent(hp).init(images), waiting, jnp.zeros(group, jnp.int32))


def _step(
    setup: Condensing, hp, broadcast: Broadcast, local: Working, batch: Batch, client: Client, key
):
    """A step of one class's images; with global clipping, the classes of a client take turns, and
    move together after the last."""
    class_ = batch.labels[0]
    slot = class_ if setup.by_client else 0
    turns = jnp.maximum(client.num_steps // setup.config.steps, 1)
    variables = _network(setup, hp, broadcast, client, batch.number // turns)
    value, gradient = _loss_and_gradient(
        setup, hp, variables, local.images[slot], batch, broadcast.extra.consensus, key
    )
    made = local.made.at[slot].set(broadcast.extra.number)
    if not setup.by_client:
        return _descend(hp, local, gradient[None], made), value
    assert isinstance(local.gradient, jax.Array)  # what `_begin` made for several classes
    gradients = local.gradient.at[slot].set(gradient)

    def take(gradients):
        moved = _descend(hp, local, clipped(gradients, hp["clip_norm"]), made)
        return moved._replace(gradient=jnp.zeros_like(gradients))

    last = (batch.number + 1) % turns == 0
    wait = local._replace(gradient=gradients, made=made)
    return jax.lax.cond(last, take, lambda _: wait, gradients), value


def _network(
    setup: Condensing, hp, broadcast: Broadcast, client: Client, iteration: jax.Array
) -> Tree:
    """The variables of an iteration: all classes of a client see one network in it, whatever lane
    they are on."""
    owner = client.id if setup.by_client else client.id // setup.task.model.num_classes
    networks_key = key_for(broadcast.extra.key, Purpose.NETWORKS)
    owner_key = jax.random.fold_in(jax.random.fold_in(networks_key, owner), iteration)
    params = setup.perturb(hp, owner_key, broadcast.variables["params"])
    return {**broadcast.variables, "params": params}


def _loss_and_gradient(
    setup: Condensing,
    hp,
    variables: Tree,
    images: jax.Array,
    batch: Batch,
    consensus: Tree,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Of a class's images `[ipc, H, W, C]` against the batch of real ones, under one augmentation;
    the gradient clipped, where it is by class."""
    model, config = setup.task.model, setup.config
    augment_key, noise_key, distance_key = jax.random.split(key, 3)
    features_of = model.embed
    assert features_of is not None  # these methods require it

    def embed(images):
        found = features_of(variables, images, train=False)[:2]
        if not config.private:
            return found
        if config.logit_term:
            return clipped_rows(found, hp["dp_clip"])
        (features,), (logits,) = (clipped_rows((part,), hp["dp_clip"]) for part in found)
        return features, logits

    def augmented(images):
        return augment(augment_key, images, strategy=config.augment_strategy, siamese=True)

    real = augmented(setup.task.normalise(batch.images))
    real_features, real_logits = mean_embedding(embed, real, batch.mask, model.cached_samples)
    if config.private:
        noise = {"dp_noise": hp["dp_noise"], "dp_clip": hp["dp_clip"]}
        means = (real_features, real_logits)
        real_features, real_logits = noised_means(means, batch.mask.sum(), noise_key, **noise)

    def loss(images):
        features, logits = (value.mean(0) for value in embed(augmented(images)))
        total = distribution_distance(real_features, features)
        if config.logit_term:
            total += distribution_distance(real_logits, logits)
        if setup.collaboration is not None:
            total += setup.collaboration(hp, logits, batch.labels[0], consensus, distance_key)
        return total

    value, gradient = jax.value_and_grad(loss)(images)
    if config.clipping == "per_class":
        gradient = clipped(gradient, hp["clip_norm"])
    return value, gradient


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


# --- the server ----------------------------------------------------------------------------


def _first_state(setup: Condensing, hp, key, variables: Tree, num_clients: int) -> State:
    num_classes, shape = setup.task.model.num_classes, setup.task.model.input_shape
    units = num_clients * num_classes // setup.group
    images = jnp.zeros((units, setup.group, setup.config.ipc, *shape))
    made = jnp.zeros((units, setup.group), jnp.int32)
    clients = ImageState(images, made, jnp.zeros(units, jnp.int32))
    consensus = ()
    if setup.knowledge is not None:
        nobody = jnp.zeros((num_clients, num_classes), bool)
        consensus, _ = setup.knowledge(hp, jnp.zeros((*nobody.shape, num_classes)), nobody)
    return State(Broadcast(variables, consensus), clients, jnp.int32(0))


def _round(setup: Condensing, hp, state: State, key, cohort: Cohort) -> tuple[State, RoundInfo]:
    variables, consensus, matched = state.server.variables, (), None
    if setup.knowledge is not None:
        num_clients = state.clients.made.size // setup.task.model.num_classes
        private = setup.config.private
        clip = hp["dp_clip"] if private else None
        logits, owned, counts = class_mean_logits(
            setup.task, setup.plan, variables, cohort, num_clients, setup.least, clip
        )
        if private:
            noise = {"dp_noise": hp["dp_noise"], "dp_clip": clip}
            noise_key = key_for(key, Purpose.LOGITS)
            (noised,) = noised_means((logits,), counts[..., None], noise_key, **noise)
            logits = jnp.where(owned[..., None], noised, 0)
        consensus, matched = setup.knowledge(hp, logits, owned)
    number = state.round + 1
    broadcast = Broadcast(variables, RoundExtra(key, number, consensus))
    result = train_cohort(
        _client_method(setup), setup.plan, hp, broadcast, state.clients, key, cohort
    )
    pool, server_key = _pool(setup, result.states, number), key_for(key, Purpose.SERVER)
    most = setup.config.server_epochs
    epochs = jnp.where(cohort.schedule.trial, min(1, most), most)
    trained = setup.plan.shared(
        partial(_learn, setup), hp, variables, pool, server_key, epochs, matched
    )
    change = jax.tree.map(jnp.subtract, trained["params"], variables["params"])
    info = RoundInfo(result.train_loss, optax.tree.norm(change))
    return State(Broadcast(trained, consensus), result.states, number), info


def _learn(
    setup: Condensing,
    sharing: Sharing,
    hp,
    variables: Tree,
    pool: Pool,
    key: jax.Array,
    epochs: jax.Array,
    matched: Knowledge | None,
) -> Tree:
    """The server's variables after its epochs over the pool."""
    return train_on_pool(
        setup.task.model,
        variables,
        pool,
        key,
        epochs=epochs,
        most_epochs=setup.config.server_epochs,
        batch_size=setup.config.server_batch_size,
        lr=hp["server_lr"],
        momentum=hp["server_momentum"],
        weight_decay=hp["server_weight_decay"],
        knowledge=matched,
        exact=setup.exact,
        sharing=sharing,
    )


def _pool(setup: Condensing, clients: ImageState, number: jax.Array) -> Pool:
    """All clients' images, of which those made in round `number` are valid."""
    model, ipc = setup.task.model, setup.config.ipc
    num_clients = clients.made.size // model.num_classes
    return Pool(
        clients.images.reshape(-1, *model.input_shape),
        jnp.tile(jnp.repeat(jnp.arange(model.num_classes), ipc), num_clients),
        jnp.repeat(clients.made.reshape(-1) == number, ipc),
    )


# --- what is reported ----------------------------------------------------------------------


def _traffic(setup: Condensing, hp, state: State) -> Traffic:
    """Down: the model and V. Up: V_k and R_k, whole tables as the paper counts them; the images."""
    model = setup.task.model
    tables = 0 if setup.knowledge is None else 4 * model.num_classes**2
    image_set = 4 * setup.config.ipc * int(np.prod(model.input_shape))
    return Traffic(num_bytes(state.server.variables) + tables, 2 * tables, image_set)


def _artifacts(setup: Condensing, state: State) -> dict[str, np.ndarray]:
    """The images of the last round, with their clients and classes."""
    num_classes, shape = setup.task.model.num_classes, setup.task.model.input_shape
    (pairs,) = np.nonzero(_made_now(state))
    images = np.asarray(state.clients.images).reshape(-1, setup.config.ipc, *shape)[pairs]
    return {
        "condensed_images": images.astype(np.float16),  # half the file; pixels keep 3 digits
        "condensed_clients": pairs // num_classes,
        "condensed_classes": pairs % num_classes,
    }


def _summary(setup: Condensing, hp, state: State) -> dict[str, Any]:
    count = int(_made_now(state).sum())
    made = {"condensed_pairs": count, "condensed_images": count * setup.config.ipc}
    return {**made, **_spent(setup, hp, state)} if setup.config.private else made


def _spent(setup: Condensing, hp, state: State) -> dict[str, float]:
    """The epsilon of all rounds so far."""
    examples, rounds = np.asarray(state.clients.examples), int(state.round)
    # The fewest: sampling hides an example of a small class least. Of a client as a unit, all of
    # its classes' together are known: its classes may be as small as the threshold.
    fewest = int(examples[examples > 0].min(initial=2**31 - 1))
    delta = float(hp["dp_delta"])
    epsilon = gaussian_epsilon(
        dp_noise=float(hp["dp_noise"]),
        delta=delta,
        queries=rounds * setup.config.steps,
        examples=setup.threshold if setup.by_client else fewest,
        batch_size=setup.batch_size,
        whole_queries=0 if setup.knowledge is None else rounds,
    )
    return {"epsilon": epsilon, "delta": delta}


def _made_now(state: State) -> np.ndarray:
    """`[K * C]` bool: the pairs whose images are of the last round; none before the first."""
    made = np.asarray(state.clients.made).reshape(-1)
    return (made == int(state.round)) & (made > 0)
