"""What FedDM and FedAF share: clients condense their classes, the server trains on the images."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.algorithms.base import Algorithm, RoundInfo, State, Traffic
from fedjax_het.algorithms.builders import get_server_variables, num_bytes, with_server_variables
from fedjax_het.condensation.augment import augment, parse_strategy
from fedjax_het.condensation.distribution_matching import (
    clip_by_norm,
    clip_rows,
    distribution_distance,
    mean_embedding,
)
from fedjax_het.condensation.privacy import (
    add_noise_to_means,
    compute_gaussian_epsilon,
    require_dp_accounting,
)
from fedjax_het.condensation.soft_label_matching import compute_class_mean_logits
from fedjax_het.condensation.synthetic_pool import (
    SoftLabelTargets,
    SyntheticPool,
    train_on_synthetic_pool,
)
from fedjax_het.core.client_algorithm import (
    Batch,
    ClientAlgorithm,
    ClientContext,
    ClientUpdate,
)
from fedjax_het.core.client_loop import Cohort, train_cohort
from fedjax_het.core.condensation_work import CondensationWork
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, ServerMessage
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.core.server_parallelism import ServerParallelism
from fedjax_het.core.task import Task
from fedjax_het.utils.config import (
    Bounds,
    Config,
    MomentumCoefficient,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from fedjax_het.utils.errors import require

Tree = Any


@dataclass(frozen=True)
class CondensationHyperParameters(Config):
    image_lr: NonNegativeFloat = 1.0
    "SGD's, of the images."
    image_momentum: MomentumCoefficient = 0.9
    "SGD's, of the images."
    clip_norm: PositiveFloat = 2.0
    "Of the image gradient, where it is clipped."
    server_lr: NonNegativeFloat = 0.001
    "SGD's, of the server's training."
    server_momentum: MomentumCoefficient = 0.9
    "SGD's, of the server's training."
    server_weight_decay: NonNegativeFloat = 0.0
    "SGD's, of the server's training."
    dp_noise: PositiveFloat | None = None
    "Of a mean over n private examples, in units of dp_clip / n."
    dp_clip: PositiveFloat | None = None
    "The norm that a private example's embedding is clipped to."
    dp_delta: Annotated[float, Bounds(0, 1, open_low=True, open_high=True)] | None = None
    "The delta that epsilon is told for."


_HyperParametersT = TypeVar("_HyperParametersT", bound=CondensationHyperParameters)


def with_privacy_defaults(
    options: "CondensationOptions", hyperparameters: _HyperParametersT
) -> _HyperParametersT:
    """The numbers with those of the private option, where it is taken."""
    if not options.private:
        return hyperparameters
    return replace(hyperparameters, dp_noise=8.0, dp_clip=5.0, dp_delta=1e-5)


@dataclass(frozen=True)
class CondensationOptions(Config):
    """How clients condense and the server trains."""

    ipc: PositiveInt = 50
    "Synthetic images of each class and client."
    steps: PositiveInt = 1000
    "Of condensation, each round."
    threshold: PositiveInt | None = None
    "Classes of which a client holds fewer examples are dropped; None: fewer than ipc."
    init: Literal["mean", "real", "noise"] = "mean"
    "An image starts from the mean of `init_images` real ones, a real one, or noise."
    init_images: PositiveInt = 5
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
    server_epochs: NonNegativeInt = 500
    "Over all synthetic images, each round."
    server_batch_size: PositiveInt = 256
    "Of synthetic images."
    private: bool = False
    """Differential privacy of every example of a client: see `condensing`."""

    def with_derived_fields(self):
        return replace(self, threshold=self.threshold or self.ipc)

    def check(self) -> None:
        parse_strategy(self.augment_strategy, "augment_strategy")
        if self.private:
            require(self.init == "noise", "init", self.init, "noise, with private = True")
            expected = "False, with private = True: else an example is read several times in a step"
            require(not self.top_up, "top_up", self.top_up, expected)
            require_dp_accounting()


class SyntheticImageState(NamedTuple):
    """What a unit keeps: G = 1 class, or all of a client's with global clipping."""

    images: jax.Array  # [G, ipc, H, W, C] float32, normalised
    created_round: (
        jax.Array
    )  # [G] int32: the round, counted from 1, in which they were made; 0: never
    num_examples: jax.Array  # [] int32: how many real ones the unit has


class SynthesisState(NamedTuple):
    """Images in the making."""

    images: jax.Array
    moments: optax.OptState
    gradient: (
        jax.Array | tuple[()]
    )  # of the classes that were visited in this step; () where they are apart
    created_round: jax.Array


class CondensationSetup(NamedTuple):
    """What the parts of the method read; static. See `condensing`, whose arguments these are."""

    task: Task
    batch_size: int
    plan: ExecutionPlan
    options: CondensationOptions
    perturb_params: Callable[[dict, jax.Array, Tree], Tree]
    collaboration_loss: Callable | None
    aggregate_logits: Callable[[dict, jax.Array, jax.Array], tuple[Tree, SoftLabelTargets]] | None
    min_examples: int  # examples of an owner of a class
    exact_matching: bool

    @property
    def threshold(self) -> int:
        return self.options.ipc if self.options.threshold is None else self.options.threshold

    @property
    def is_per_client(self) -> bool:
        """Whether a unit is a client, with all of its classes, instead of one class of it."""
        return self.options.clipping == "global"

    @property
    def classes_per_item(self) -> int:
        """Classes of a unit."""
        return self.task.model.num_classes if self.is_per_client else 1

    @property
    def num_init_images(self) -> int:
        """Real images that an image starts from."""
        return {"mean": self.options.init_images, "real": 1, "noise": 0}[self.options.init]

    @property
    def condensation_work(self) -> CondensationWork:
        """What the schedule must know."""
        return CondensationWork(
            ipc=self.options.ipc,
            steps=self.options.steps,
            threshold=self.threshold,
            init_examples_per_image=self.num_init_images,
            repeats_examples=self.options.top_up,
            is_per_client=self.is_per_client,
            needs_full_pass=self.aggregate_logits is not None,
        )


class CondensationMessage(NamedTuple):
    """What clients are told besides the variables."""

    key: jax.Array  # of the round
    round_number: jax.Array  # of the round, counted from 1
    consensus: Tree  # what all clients' class-mean logits came to; () where nobody asks


def build_condensation_algorithm(
    training: LocalTraining,
    plan: ExecutionPlan,
    options: CondensationOptions,
    *,
    perturb_params: Callable[[dict, jax.Array, Tree], Tree],
    collaboration_loss: Callable | None = None,
    aggregate_logits: Callable[[dict, jax.Array, jax.Array], tuple[Tree, SoftLabelTargets]]
    | None = None,
    only_condensing_owners: bool = True,
    exact_matching: bool = False,
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
    has the epsilon of dp_delta, of example-level privacy over all rounds, see `compute_gaussian_epsilon`;
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
      only_condensing_owners: whether they leave out the classes that a client does not condense.
      exact: see `train_on_synthetic_pool`.
    Errors: ConfigError: a network without `embed`.
    Memory: one set of images, its velocity and the activations of a batch for every lane; the
      images of all K * C pairs.
    """
    task = training.task
    has_embed = task.model.embed is not None
    require(has_embed, "model", task.model.name, "a network with `embed`, to match features")
    batch_size = training.batch_size
    setup = CondensationSetup(
        task,
        batch_size,
        plan,
        options,
        perturb_params,
        collaboration_loss,
        aggregate_logits,
        1,
        exact_matching,
    )
    if only_condensing_owners:
        setup = setup._replace(min_examples=max(1, setup.threshold))
    return Algorithm(
        init=partial(_init_state, setup),
        round=partial(_run_round, setup),
        global_model=get_server_variables,
        with_global_model=with_server_variables,
        traffic=partial(_count_traffic, setup),
        condensation_work=setup.condensation_work,
        server_batch_size=options.server_batch_size,
        artifacts=partial(_make_artifacts, setup),
        summary=partial(_make_summary, setup),
    )


# --- a client ------------------------------------------------------------------------------


def _make_client_algorithm(setup: CondensationSetup) -> ClientAlgorithm:
    def end(context, local, state):
        return (
            ClientUpdate(),
            SyntheticImageState(local.images, local.created_round, context.client.num_samples),
            (),
        )

    return ClientAlgorithm(
        init=lambda hp, variables: (),
        begin=partial(_begin_client, setup),
        step=partial(_step_client, setup),
        end=end,
    )


def _begin_client(setup: CondensationSetup, context: ClientContext, state: SyntheticImageState):
    """The images that a unit starts from."""
    shape, num_init_images = setup.task.model.input_shape, setup.num_init_images
    classes_per_item, ipc = setup.classes_per_item, setup.options.ipc
    if num_init_images:
        init_images = setup.task.normalize(context.client.init_images).reshape(
            classes_per_item, ipc, num_init_images, *shape
        )
        images = init_images.mean(2)
    else:
        key = fold_in_purpose(context.key, Purpose.SERVER)
        images = jax.random.normal(key, (classes_per_item, ipc, *shape))
    if setup.options.warm_start:
        has_images = (state.created_round > 0)[:, None, None, None, None]
        images = jnp.where(has_images, state.images, images)
    initial_gradient = jnp.zeros_like(images) if setup.is_per_client else ()
    return SynthesisState(
        images,
        _make_image_optimizer(context.hp).init(images),
        initial_gradient,
        jnp.zeros(classes_per_item, jnp.int32),
    )


def _step_client(
    setup: CondensationSetup, context: ClientContext, local: SynthesisState, batch: Batch
):
    """A step of one class's images; with global clipping, the classes of a client take turns, and
    move together after the last."""
    hp, message = context.hp, context.message
    class_ = batch.labels[0]
    class_index = class_ if setup.is_per_client else 0
    classes_per_step = jnp.maximum(context.client.num_steps // setup.options.steps, 1)
    variables = _perturbed_variables(setup, context, batch.step_index // classes_per_step)
    value, gradient = _loss_and_gradient(
        setup, hp, variables, local.images[class_index], batch, message.extra.consensus, context.key
    )
    created_round = local.created_round.at[class_index].set(message.extra.round_number)
    if not setup.is_per_client:
        return _apply_image_step(hp, local, gradient[None], created_round), value
    assert isinstance(local.gradient, jax.Array)  # what `_begin` made for several classes
    gradients = local.gradient.at[class_index].set(gradient)

    def apply_step(gradients):
        new_state = _apply_image_step(
            hp, local, clip_by_norm(gradients, hp["clip_norm"]), created_round
        )
        return new_state._replace(gradient=jnp.zeros_like(gradients))

    is_last_class = (batch.step_index + 1) % classes_per_step == 0
    accumulated_state = local._replace(gradient=gradients, created_round=created_round)
    return jax.lax.cond(is_last_class, apply_step, lambda _: accumulated_state, gradients), value


def _perturbed_variables(
    setup: CondensationSetup, context: ClientContext, iteration: jax.Array
) -> Tree:
    """The variables of an iteration: all classes of a client see one network in it, whatever lane
    they are on."""
    client, message = context.client, context.message
    client_id = client.id if setup.is_per_client else client.id // setup.task.model.num_classes
    networks_key = fold_in_purpose(message.extra.key, Purpose.CONDENSATION_NETWORKS)
    iteration_key = jax.random.fold_in(jax.random.fold_in(networks_key, client_id), iteration)
    params = setup.perturb_params(context.hp, iteration_key, message.variables["params"])
    return {**message.variables, "params": params}


def _loss_and_gradient(
    setup: CondensationSetup,
    hp,
    variables: Tree,
    images: jax.Array,
    batch: Batch,
    consensus: Tree,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Of a class's images `[ipc, H, W, C]` against the batch of real ones, under one augmentation;
    the gradient clipped, where it is by class."""
    model, options = setup.task.model, setup.options
    augment_key, noise_key, distance_key = jax.random.split(key, 3)
    embed_fn = model.embed
    assert embed_fn is not None  # these methods require it

    def embed(images):
        features_and_logits = embed_fn(variables, images, train=False)[:2]
        if not options.private:
            return features_and_logits
        if options.logit_term:
            return clip_rows(features_and_logits, hp["dp_clip"])
        (features,), (logits,) = (
            clip_rows((array,), hp["dp_clip"]) for array in features_and_logits
        )
        return features, logits

    def augment_images(images):
        return augment(augment_key, images, strategy=options.augment_strategy, siamese=True)

    real = augment_images(setup.task.normalize(batch.images))
    real_features, real_logits = mean_embedding(embed, real, batch.mask, model.cached_samples)
    if options.private:
        noise_scales = {"dp_noise": hp["dp_noise"], "dp_clip": hp["dp_clip"]}
        means = (real_features, real_logits)
        real_features, real_logits = add_noise_to_means(
            means, batch.mask.sum(), noise_key, **noise_scales
        )

    def loss(images):
        features, logits = (value.mean(0) for value in embed(augment_images(images)))
        total = distribution_distance(real_features, features)
        if options.logit_term:
            total += distribution_distance(real_logits, logits)
        if setup.collaboration_loss is not None:
            total += setup.collaboration_loss(hp, logits, batch.labels[0], consensus, distance_key)
        return total

    value, gradient = jax.value_and_grad(loss)(images)
    if options.clipping == "per_class":
        gradient = clip_by_norm(gradient, hp["clip_norm"])
    return value, gradient


def _make_image_optimizer(hp: dict[str, jax.Array]) -> optax.GradientTransformation:
    """Of the images: SGD with momentum, as in PyTorch."""
    return optax.sgd(hp["image_lr"], momentum=hp["image_momentum"])


def _apply_image_step(
    hp: dict[str, jax.Array], local: SynthesisState, gradient: jax.Array, created_round: jax.Array
) -> SynthesisState:
    """A step against the gradient of the images."""
    updates, moments = _make_image_optimizer(hp).update(gradient, local.moments)
    images = optax.apply_updates(local.images, updates)
    return local._replace(images=images, moments=moments, created_round=created_round)


# --- the server ----------------------------------------------------------------------------


def _init_state(setup: CondensationSetup, hp, key, variables: Tree, num_clients: int) -> State:
    num_classes, shape = setup.task.model.num_classes, setup.task.model.input_shape
    num_items = num_clients * num_classes // setup.classes_per_item
    images = jnp.zeros((num_items, setup.classes_per_item, setup.options.ipc, *shape))
    created_round = jnp.zeros((num_items, setup.classes_per_item), jnp.int32)
    clients = SyntheticImageState(images, created_round, jnp.zeros(num_items, jnp.int32))
    consensus = ()
    if setup.aggregate_logits is not None:
        no_owners = jnp.zeros((num_clients, num_classes), bool)
        consensus, _ = setup.aggregate_logits(
            hp, jnp.zeros((*no_owners.shape, num_classes)), no_owners
        )
    return State(ServerMessage(variables, consensus), clients, jnp.int32(0))


def _run_round(
    setup: CondensationSetup, hp, state: State, key, cohort: Cohort
) -> tuple[State, RoundInfo]:
    variables, consensus, soft_label_targets = state.server.variables, (), None
    if setup.aggregate_logits is not None:
        num_clients = state.clients.created_round.size // setup.task.model.num_classes
        is_private = setup.options.private
        clip_norm = hp["dp_clip"] if is_private else None
        logits, is_owner, counts = compute_class_mean_logits(
            setup.task, setup.plan, variables, cohort, num_clients, setup.min_examples, clip_norm
        )
        if is_private:
            noise_scales = {"dp_noise": hp["dp_noise"], "dp_clip": clip_norm}
            noise_key = fold_in_purpose(key, Purpose.LOGIT_NOISE)
            (noisy_logits,) = add_noise_to_means(
                (logits,), counts[..., None], noise_key, **noise_scales
            )
            logits = jnp.where(is_owner[..., None], noisy_logits, 0)
        consensus, soft_label_targets = setup.aggregate_logits(hp, logits, is_owner)
    round_number = state.round + 1
    message = ServerMessage(variables, CondensationMessage(key, round_number, consensus))
    result = train_cohort(
        _make_client_algorithm(setup), setup.plan, hp, message, state.clients, key, cohort
    )
    pool, server_key = (
        _make_pool(setup, result.states, round_number),
        fold_in_purpose(key, Purpose.SERVER),
    )
    max_epochs = setup.options.server_epochs
    epochs = jnp.where(cohort.schedule.is_verification, min(1, max_epochs), max_epochs)
    new_variables = setup.plan.shard_server_work(
        partial(_train_server, setup),
        hp,
        variables,
        pool,
        server_key,
        epochs,
        soft_label_targets,
        loops=cohort.loops,
    )
    change = jax.tree.map(jnp.subtract, new_variables["params"], variables["params"])
    info = RoundInfo(result.train_loss, optax.tree.norm(change))
    return State(ServerMessage(new_variables, consensus), result.states, round_number), info


def _train_server(
    setup: CondensationSetup,
    server_parallelism: ServerParallelism,
    hp,
    variables: Tree,
    pool: SyntheticPool,
    key: jax.Array,
    epochs: jax.Array,
    soft_label_targets: SoftLabelTargets | None,
) -> Tree:
    """The server's variables after its epochs over the pool."""
    return train_on_synthetic_pool(
        setup.task.model,
        variables,
        pool,
        key,
        epochs=epochs,
        max_epochs=setup.options.server_epochs,
        batch_size=setup.options.server_batch_size,
        lr=hp["server_lr"],
        momentum=hp["server_momentum"],
        weight_decay=hp["server_weight_decay"],
        soft_label_targets=soft_label_targets,
        exact_matching=setup.exact_matching,
        server_parallelism=server_parallelism,
    )


def _make_pool(
    setup: CondensationSetup, clients: SyntheticImageState, round_number: jax.Array
) -> SyntheticPool:
    """All clients' images, of which those made in round `number` are valid."""
    model, ipc = setup.task.model, setup.options.ipc
    num_clients = clients.created_round.size // model.num_classes
    return SyntheticPool(
        clients.images.reshape(-1, *model.input_shape),
        jnp.tile(jnp.repeat(jnp.arange(model.num_classes), ipc), num_clients),
        jnp.repeat(clients.created_round.reshape(-1) == round_number, ipc),
    )


# --- what is reported ----------------------------------------------------------------------


def _count_traffic(setup: CondensationSetup, hp, state: State) -> Traffic:
    """Down: the model and V. Up: V_k and R_k, whole tables as the paper counts them; the images."""
    model = setup.task.model
    logit_table_bytes = 0 if setup.aggregate_logits is None else 4 * model.num_classes**2
    image_set_bytes = 4 * setup.options.ipc * int(np.prod(model.input_shape))
    return Traffic(
        num_bytes(state.server.variables) + logit_table_bytes,
        2 * logit_table_bytes,
        image_set_bytes,
    )


def _make_artifacts(setup: CondensationSetup, state: State) -> dict[str, np.ndarray]:
    """The images of the last round, with their clients and classes."""
    num_classes, shape = setup.task.model.num_classes, setup.task.model.input_shape
    (pair_indices,) = np.nonzero(_is_from_last_round(state))
    images = np.asarray(state.clients.images).reshape(-1, setup.options.ipc, *shape)[pair_indices]
    return {
        "condensed_images": images.astype(np.float16),  # half the file; pixels keep 3 digits
        "condensed_clients": pair_indices // num_classes,
        "condensed_classes": pair_indices % num_classes,
    }


def _make_summary(setup: CondensationSetup, hp, state: State) -> dict[str, Any]:
    num_pairs = int(_is_from_last_round(state).sum())
    counts = {"condensed_pairs": num_pairs, "condensed_images": num_pairs * setup.options.ipc}
    return (
        {**counts, **_compute_privacy_spent(setup, hp, state)} if setup.options.private else counts
    )


def _compute_privacy_spent(setup: CondensationSetup, hp, state: State) -> dict[str, float]:
    """The epsilon of all rounds so far."""
    examples, rounds = np.asarray(state.clients.num_examples), int(state.round)
    # The fewest: sampling hides an example of a small class least. Of a client as a unit, all of
    # its classes' together are known: its classes may be as small as the threshold.
    min_class_examples = int(examples[examples > 0].min(initial=2**31 - 1))
    delta = float(hp["dp_delta"])
    epsilon = compute_gaussian_epsilon(
        dp_noise=float(hp["dp_noise"]),
        delta=delta,
        num_queries=rounds * setup.options.steps,
        num_examples=setup.threshold if setup.is_per_client else min_class_examples,
        batch_size=setup.batch_size,
        num_full_queries=0 if setup.aggregate_logits is None else rounds,
    )
    return {"epsilon": epsilon, "delta": delta}


def _is_from_last_round(state: State) -> np.ndarray:
    """`[K * C]` bool: the pairs whose images are of the last round; none before the first."""
    created_round = np.asarray(state.clients.created_round).reshape(-1)
    return (created_round == int(state.round)) & (created_round > 0)
