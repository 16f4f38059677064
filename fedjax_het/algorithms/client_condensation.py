"""Methods whose clients condense their classes and whose server trains on the synthetic images."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.algorithms.base import Algorithm, RoundInfo, State, Traffic
from fedjax_het.algorithms.builders import get_server_variables, num_bytes, with_server_variables
from fedjax_het.condensation.augment import augment, parse_strategy, resolve_strategy
from fedjax_het.condensation.distribution_matching import (
    compute_class_mean_logits,
    distribution_distance,
    mean_embedding,
)
from fedjax_het.condensation.privacy import (
    add_noise_to_means,
    clip_by_norm,
    clip_rows,
    compute_gaussian_epsilon,
    require_dp_accounting,
)
from fedjax_het.condensation.synthetic_pool import (
    PoolTask,
    SyntheticPool,
    make_decayed_sgd,
    train_on_synthetic_pool,
)
from fedjax_het.core.client_algorithm import (
    Batch,
    ClientAlgorithm,
    ClientContext,
    ClientUpdate,
)
from fedjax_het.core.client_loop import Cohort, train_cohort
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, ServerMessage
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.core.server_parallelism import ServerParallelism
from fedjax_het.core.server_training import EpochRange
from fedjax_het.core.work_items import CondensationWork
from fedjax_het.nn import Model
from fedjax_het.nn.model import require_parts
from fedjax_het.utils.arrays import expand_like
from fedjax_het.utils.config import (
    Bounds,
    Config,
    MomentumCoefficient,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SearchRange,
)
from fedjax_het.utils.errors import require

Tree = Any


@dataclass(frozen=True)
class CondensationHyperParameters(Config):
    """Hyperparameters of condensation and of the server's training."""

    image_lr: Annotated[NonNegativeFloat, SearchRange(0.1, 10)] = 1.0
    "Learning rate of the images' SGD."
    image_momentum: MomentumCoefficient = 0.9
    "Momentum of the images' SGD."
    clip_norm: PositiveFloat = 2.0
    "Norm at which the image gradient is clipped."
    server_lr: NonNegativeFloat = 0.001
    "Learning rate of the server's SGD."
    server_momentum: MomentumCoefficient = 0.9
    "Momentum of the server's SGD."
    server_weight_decay: NonNegativeFloat = 0.0
    "Weight decay of the server's SGD."
    dp_noise: PositiveFloat | None = None
    "Noise of a mean over n private examples, in units of dp_clip / n."
    dp_clip: PositiveFloat | None = None
    "Norm at which a private example's embedding is clipped."
    dp_delta: Annotated[float, Bounds(0, 1, open_low=True, open_high=True)] | None = None
    "Delta of the reported epsilon."


@dataclass(frozen=True)
class CondensationOptions(Config):
    """Choices of condensation and of the server's training."""

    ipc: PositiveInt = 50
    "Number of synthetic images of each class and client."
    steps: PositiveInt = 1000
    "Steps of condensation in each round."
    threshold: PositiveInt | None = None
    "Smallest number of examples of a class that a client condenses; None: `ipc`."
    init: Literal["mean", "real", "noise"] = "mean"
    "Start of an image: the mean of `init_images` real ones, a real one, or noise."
    init_images: PositiveInt = 5
    "Number of real images in such a mean."
    augment_strategy: str = "none"
    """Differentiable siamese augmentation of the real and synthetic batch of a step: names joined
    by '_'."""
    clipping: Literal["none", "per_class", "global"] = "none"
    """Clipping of the image gradient at clip_norm. "global": over all classes of a client; a lane
    then processes clients instead of classes."""
    logit_term: bool = False
    "Whether mean logits are matched in addition to mean embeddings."
    top_up: bool = False
    "Whether repeated examples fill the batch of a class with fewer examples than its size."
    warm_start: bool = False
    "Whether a client continues from its images of its last round."
    server_epochs: NonNegativeInt = 500
    "Epochs of the server over all synthetic images in each round."
    server_batch_size: PositiveInt = 256
    "Number of synthetic images in a minibatch of the server."
    private: bool = False
    "Whether clients protect every example by differential privacy."
    upload_bits: Literal[2, 4, 8, 16, 32] = 32
    """Bits of an uploaded pixel value. 32: float32; fewer: clients round their images to equally
    spaced levels of the pixel range and clip them to it, as image files do."""

    def with_derived_fields(self):
        """Return the options with a threshold."""
        return replace(self, threshold=self.threshold or self.ipc)

    def check(self) -> None:
        """Raise ConfigError for options that cannot be combined."""
        parse_strategy(self.augment_strategy, "augment_strategy")
        if self.private:
            require(self.init == "noise", "init", self.init, "noise, with private = True")
            expected = "False, with private = True: else an example is read several times in a step"
            require(not self.top_up, "top_up", self.top_up, expected)
            require_dp_accounting()


def make_condensation_hyperparameters(
    config_class: type[CondensationHyperParameters], options: CondensationOptions, num_clients: int
) -> CondensationHyperParameters:
    """Return the default numbers, including privacy parameters if the options ask for privacy.

    Args:
      config_class: class of the numbers.
      options: choices of condensation.
      num_clients: number of clients; not read.

    Returns:
      The numbers.
    """
    privacy = {"dp_noise": 8.0, "dp_clip": 5.0, "dp_delta": 1e-5} if options.private else {}
    return config_class(**privacy)


class SyntheticInputState(NamedTuple):
    """State of a work item: G = 1 class, or all classes of a client with global clipping."""

    inputs: jax.Array
    "`[G, ipc, H, W, C]` float32, normalized."
    created_round: jax.Array
    "`[G]` int32: the round of the images, counted from 1; 0: none."
    num_examples: jax.Array
    "`[]` int32: number of real examples of the work item."


class SynthesisState(NamedTuple):
    """Images in a round of condensation."""

    inputs: jax.Array
    moments: optax.OptState
    gradient: jax.Array | tuple[()]
    "Gradient of the classes that were visited in this step; `()` for one class."
    created_round: jax.Array


class CondensationMessage(NamedTuple):
    """Message to the clients in addition to the variables."""

    key: jax.Array
    "PRNG key of the round."
    round_number: jax.Array
    "`[]` int32: the round, counted from 1."
    consensus: Tree
    "Result of all clients' class-mean logits; `()` if the method has none."


@dataclass(frozen=True)
class ClientCondensation:
    """Method whose clients send condensed data, from which the server learns.

    In a round clients may first send their class-mean logits. Every pair of a client and a class
    condenses for `options.steps`, all in one program. The server trains the received model on the
    union of the round's images. Networks run in evaluation mode while condensing. Batch norm uses
    the received statistics, because the statistics of a batch of one class would center that class.

    With `private` the clients read only means of embeddings (and logits, for V) of their examples.
    Each example's embedding is clipped to dp_clip, and every number of a mean over n has Gaussian
    noise of dp_noise * dp_clip / n. This is DP-SGD up to a linear map, the Jacobian of the
    synthetic images, so the noise is added before it. The synthetic images' embeddings are clipped
    too; otherwise the means could not match. Images start from noise. The summary contains epsilon
    at dp_delta for example-level privacy over all rounds, see `compute_gaussian_epsilon`. The
    number of examples of each class and client is not protected. Epsilon covers images, V, R and
    the model, not the loss in the run's metrics, which no client sends. The papers do not state
    their values.

    With `upload_bits` below 32 clients store and send images as image files have them, which FedAF
    assumes (appendix C): pixels are clipped to [0, 1] and rounded to 2**bits levels. The range is
    fixed, so no client sends it, and real images of 8 bits do not change.

    Memory: one set of images, its velocity and the activations of a batch for every lane; the
    images of all K * C pairs.
    """

    training: LocalTraining
    "Task and batch size."
    plan: ExecutionPlan
    "Devices that run the clients, and devices that share the server's work."
    options: CondensationOptions
    "Choices of condensation."
    perturb_params: Callable[[dict, jax.Array, Tree], Tree]
    "`perturb_params(hp, key, params) -> params` of one step of one client, for all its classes."
    collaboration_loss: Callable | None = None
    """`collaboration_loss(hp, mean_logits, class_, consensus, key)`, a term of a class's loss,
    where `consensus` is the result of all clients' class-mean logits."""
    aggregate_logits: Callable | None = None
    """`aggregate_logits(hp, mean_logits [K, C, C], is_owner [K, C]) -> (consensus, targets)`, with
    the server's `SoftLabelTargets`. Requires the class-mean logits over all of a client's data."""
    only_condensing_owners: bool = True
    "Whether the logits leave out classes that a client does not condense."
    exact_matching: bool = False
    "See `train_on_synthetic_pool`."

    def build(self) -> Algorithm:
        """Return the method. Raises ConfigError for a network without `embed`."""
        require_parts(self.model, "embed")
        shape, bits = self.model.input_shape, self.options.upload_bits
        _ = self.augment_strategy  # raises ConfigError for a strategy that needs images
        expected = f"32, as inputs of shape {tuple(shape)} have no range of pixels"
        require(bits == 32 or len(shape) == 3, "upload_bits", bits, expected)
        return Algorithm(
            init=self._init_state,
            round=self._run_round,
            global_model=get_server_variables,
            with_global_model=with_server_variables,
            traffic=self._count_traffic,
            condensation_work=self.condensation_work,
            server_batch_size=self.options.server_batch_size,
            artifacts=self._make_artifacts,
            summary=self._make_summary,
        )

    @property
    def model(self) -> Model:
        """Network of the task."""
        return self.training.task.model

    @property
    def augment_strategy(self) -> str:
        """Strategy of the augmentation of these inputs."""
        strategy = self.options.augment_strategy
        return resolve_strategy(strategy, self.model.input_shape, "augment_strategy")

    @property
    def is_per_client(self) -> bool:
        """Whether a work item is a client with all its classes instead of one class."""
        return self.options.clipping == "global"

    @property
    def classes_per_item(self) -> int:
        """Number of classes of a work item."""
        return self.model.num_classes if self.is_per_client else 1

    @property
    def condensation_work(self) -> CondensationWork:
        """How clients condense, for the schedule."""
        options = self.options
        num_init_examples = {"mean": options.init_images, "real": 1, "noise": 0}
        return CondensationWork(
            ipc=options.ipc,
            steps=options.steps,
            threshold=options.threshold or options.ipc,
            init_examples_per_input=num_init_examples[options.init],
            repeats_examples=options.top_up,
            is_per_client=self.is_per_client,
            needs_full_pass=self.aggregate_logits is not None,
        )

    # --- a client

    def _begin(self, context: ClientContext, state: SyntheticInputState) -> SynthesisState:
        """Return the inputs that a work item starts from."""
        num_init_examples = self.condensation_work.init_examples_per_input
        shape: tuple[int, ...] = (self.classes_per_item, self.options.ipc)
        if num_init_examples:
            init_inputs = self.training.task.normalize(context.client.init_inputs)
            shape = (*shape, num_init_examples, *self.model.input_shape)
            inputs = init_inputs.reshape(shape).mean(2)
        else:
            key = fold_in_purpose(context.key, Purpose.SERVER)
            inputs = jax.random.normal(key, (*shape, *self.model.input_shape))
        if self.options.warm_start:
            has_inputs = expand_like(state.created_round > 0, inputs)
            inputs = jnp.where(has_inputs, state.inputs, inputs)
        gradient = jnp.zeros_like(inputs) if self.is_per_client else ()
        moments = _make_image_optimizer(context.hp).init(inputs)
        created_round = jnp.zeros(self.classes_per_item, jnp.int32)
        return SynthesisState(inputs, moments, gradient, created_round)

    def _step(self, context: ClientContext, local: SynthesisState, batch: Batch):
        """Make a step of one class's inputs.

        With global clipping, the classes of a client take turns, and move together after the last.
        """
        hp, message = context.hp, context.message.extra
        class_index = batch.labels[0] if self.is_per_client else 0
        classes_per_step = jnp.maximum(context.client.num_steps // self.options.steps, 1)
        variables = self._perturb_variables(context, batch.step_index // classes_per_step)
        inputs = local.inputs[class_index]
        value, gradient = self._loss_and_gradient(context, variables, inputs, batch)
        created_round = local.created_round.at[class_index].set(message.round_number)
        local = local._replace(created_round=created_round)
        if not self.is_per_client:
            return _apply_image_step(hp, local, gradient[None]), value
        assert isinstance(local.gradient, jax.Array)  # `begin` makes it for several classes
        gradients = local.gradient.at[class_index].set(gradient)

        def apply_step(gradients):
            new = _apply_image_step(hp, local, clip_by_norm(gradients, hp["clip_norm"]))
            return new._replace(gradient=jnp.zeros_like(gradients))

        is_last_class = (batch.step_index + 1) % classes_per_step == 0
        collect = lambda gradients: local._replace(gradient=gradients)  # noqa: E731
        return jax.lax.cond(is_last_class, apply_step, collect, gradients), value

    def _end(self, context: ClientContext, local: SynthesisState, state: SyntheticInputState):
        """Return the inputs as the client stores and sends them."""
        num_samples, inputs = context.client.num_samples, local.inputs
        if self.options.upload_bits < 32:
            inputs = self.training.task.quantize(inputs, self.options.upload_bits)
        new_state = SyntheticInputState(inputs, local.created_round, num_samples)
        return ClientUpdate(), new_state, ()

    def _perturb_variables(self, context: ClientContext, iteration: jax.Array) -> Tree:
        """Return the variables of an iteration, one network for all classes of a client."""
        client, message = context.client, context.message
        client_id = client.id if self.is_per_client else client.id // self.model.num_classes
        key = fold_in_purpose(message.extra.key, Purpose.CONDENSATION_NETWORKS)
        key = jax.random.fold_in(jax.random.fold_in(key, client_id), iteration)
        params = self.perturb_params(context.hp, key, message.variables["params"])
        return {**message.variables, "params": params}

    def _loss_and_gradient(
        self, context: ClientContext, variables: Tree, inputs: jax.Array, batch: Batch
    ) -> tuple[jax.Array, jax.Array]:
        """Return loss and gradient of a class's inputs `[ipc, ...]` against real ones.

        Both batches have one augmentation. The gradient is clipped if clipping is by class.
        """
        model, options, hp = self.model, self.options, context.hp
        consensus = context.message.extra.consensus
        augment_key, noise_key, distance_key = jax.random.split(context.key, 3)
        embed_fn = model.embed
        assert embed_fn is not None  # `build` requires it

        def embed(inputs):
            features, logits = embed_fn(variables, inputs, train=False)[:2]
            if not options.private:
                return features, logits
            if options.logit_term:
                return clip_rows((features, logits), hp["dp_clip"])
            return tuple(clip_rows((array,), hp["dp_clip"])[0] for array in (features, logits))

        def augment_inputs(inputs):
            return augment(augment_key, inputs, strategy=self.augment_strategy, siamese=True)

        real = augment_inputs(self.training.task.normalize(batch.inputs))
        means: Any = mean_embedding(embed, real, batch.mask, model.cached_samples)
        if options.private:
            means = add_noise_to_means(hp, means, batch.mask.sum(), noise_key)
        real_features, real_logits = means

        def loss(inputs):
            features, logits = (value.mean(0) for value in embed(augment_inputs(inputs)))
            total = distribution_distance(real_features, features)
            if options.logit_term:
                total += distribution_distance(real_logits, logits)
            if self.collaboration_loss is not None:
                args = (logits, batch.labels[0], consensus, distance_key)
                total += self.collaboration_loss(hp, *args)
            return total

        value, gradient = jax.value_and_grad(loss)(inputs)
        if options.clipping == "per_class":
            gradient = clip_by_norm(gradient, hp["clip_norm"])
        return value, gradient

    # --- the server

    def _init_state(self, hp, key, variables: Tree, num_clients: int) -> State:
        """Return the state before the first round."""
        num_classes, shape = self.model.num_classes, self.model.input_shape
        num_items = num_clients * num_classes // self.classes_per_item
        clients = SyntheticInputState(
            jnp.zeros((num_items, self.classes_per_item, self.options.ipc, *shape)),
            jnp.zeros((num_items, self.classes_per_item), jnp.int32),
            jnp.zeros(num_items, jnp.int32),
        )
        consensus = ()
        if self.aggregate_logits is not None:
            no_owners = jnp.zeros((num_clients, num_classes), bool)
            no_logits = jnp.zeros((*no_owners.shape, num_classes))
            consensus, _ = self.aggregate_logits(hp, no_logits, no_owners)
        return State(ServerMessage(variables, consensus), clients, jnp.int32(0))

    def _run_round(self, hp, state: State, key, cohort: Cohort) -> tuple[State, RoundInfo]:
        """Run one round: logits, condensation, training of the server."""
        variables, round_number = state.server.variables, state.round + 1
        consensus, targets = (), None
        if self.aggregate_logits is not None:
            consensus, targets = self._collect_logits(hp, state, key, cohort)
        message = CondensationMessage(key, round_number, consensus)
        client = ClientAlgorithm(lambda hp, variables: (), self._begin, self._step, self._end)
        server_message = ServerMessage(variables, message)
        args = (self.plan, hp, server_message, state.clients, key, cohort)
        result = train_cohort(client, *args)
        pool = self._make_pool(result.states, round_number)
        max_epochs = self.options.server_epochs
        epochs = jnp.where(cohort.schedule.is_verification, min(1, max_epochs), max_epochs)
        key = fold_in_purpose(key, Purpose.SERVER)

        def train_server(parallelism: ServerParallelism, hp, variables, pool, key, epochs, targets):
            pool_task = PoolTask(self.model, targets, self.exact_matching, parallelism)
            settings = ("server_lr", "server_momentum", "server_weight_decay")
            return train_on_synthetic_pool(
                *(pool_task, variables, pool, key),
                optimizer=make_decayed_sgd(*(hp[name] for name in settings)),
                epochs=EpochRange(epochs, max_total=max_epochs),
                batch_size=self.options.server_batch_size,
            )

        work = (train_server, hp, variables, pool, key, epochs, targets)
        new = self.plan.shard_server_work(*work, loops=cohort.loops)
        change = jax.tree.map(jnp.subtract, new["params"], variables["params"])
        info = RoundInfo(result.train_loss, optax.tree.norm(change))
        return State(ServerMessage(new, consensus), result.states, round_number), info

    def _collect_logits(self, hp, state: State, key, cohort: Cohort):
        """Return the consensus of all clients' class-mean logits, and the server's targets."""
        assert self.aggregate_logits is not None
        num_clients = state.clients.created_round.size // self.model.num_classes
        clip_norm = hp["dp_clip"] if self.options.private else None
        task, variables = self.training.task, state.server.variables
        min_examples = self.condensation_work.threshold if self.only_condensing_owners else 1
        logits, is_owner, counts = compute_class_mean_logits(
            task, self.plan, variables, cohort, num_clients, min_examples, clip_norm
        )
        if self.options.private:
            key = fold_in_purpose(key, Purpose.LOGIT_NOISE)
            (noisy,) = add_noise_to_means(hp, (logits,), counts[..., None], key)
            logits = jnp.where(is_owner[..., None], noisy, 0)
        return self.aggregate_logits(hp, logits, is_owner)

    def _make_pool(self, clients: SyntheticInputState, round_number: jax.Array) -> SyntheticPool:
        """Return all clients' inputs; only the inputs of the current round are valid."""
        num_classes, ipc = self.model.num_classes, self.options.ipc
        num_clients = clients.created_round.size // num_classes
        return SyntheticPool(
            clients.inputs.reshape(-1, *self.model.input_shape),
            jnp.tile(jnp.repeat(jnp.arange(num_classes), ipc), num_clients),
            jnp.repeat(clients.created_round.reshape(-1) == round_number, ipc),
        )

    # --- reports

    def _count_traffic(self, hp, state: State) -> Traffic:
        """Count the model and V down; V_k and R_k, whole tables as in the paper, and images up."""
        logit_bytes = 0 if self.aggregate_logits is None else 4 * self.model.num_classes**2
        num_values = self.options.ipc * int(np.prod(self.model.input_shape))
        image_bytes = -(-self.options.upload_bits * num_values // 8)
        down = num_bytes(state.server.variables) + logit_bytes
        return Traffic(down, 2 * logit_bytes, image_bytes)

    def _make_artifacts(self, state: State) -> dict[str, np.ndarray]:
        """Return the inputs of the last round, with their clients and classes."""
        (pairs,) = np.nonzero(_is_from_last_round(state))
        shape = (-1, self.options.ipc, *self.model.input_shape)
        inputs = np.asarray(state.clients.inputs).reshape(shape)[pairs]
        return {
            "condensed_images": inputs.astype(np.float16),  # half the file; pixels keep 3 digits
            "condensed_clients": pairs // self.model.num_classes,
            "condensed_classes": pairs % self.model.num_classes,
        }

    def _make_summary(self, hp, state: State) -> dict[str, Any]:
        """Return counts of pairs and images, and the epsilon of private clients."""
        num_pairs = int(_is_from_last_round(state).sum())
        counts = {"condensed_pairs": num_pairs, "condensed_images": num_pairs * self.options.ipc}
        if not self.options.private:
            return counts
        examples, rounds = np.asarray(state.clients.num_examples), int(state.round)
        # The fewest: sampling hides an example of a small class least. A client as a work item
        # knows only the sum over its classes, which may be as small as the threshold.
        min_examples = int(examples[examples > 0].min(initial=2**31 - 1))
        if self.is_per_client:
            min_examples = self.condensation_work.threshold
        delta = float(hp["dp_delta"])
        epsilon = compute_gaussian_epsilon(
            dp_noise=float(hp["dp_noise"]),
            delta=delta,
            num_queries=rounds * self.options.steps,
            num_examples=min_examples,
            batch_size=self.training.batch_size,
            num_full_queries=0 if self.aggregate_logits is None else rounds,
        )
        return {**counts, "epsilon": epsilon, "delta": delta}


def _make_image_optimizer(hp: dict[str, jax.Array]) -> optax.GradientTransformation:
    """Return SGD with momentum of the images, as PyTorch's."""
    return optax.sgd(hp["image_lr"], momentum=hp["image_momentum"])


def _apply_image_step(hp, local: SynthesisState, gradient: jax.Array) -> SynthesisState:
    updates, moments = _make_image_optimizer(hp).update(gradient, local.moments)
    return local._replace(inputs=optax.apply_updates(local.inputs, updates), moments=moments)


def _is_from_last_round(state: State) -> np.ndarray:
    """Return `[K * C]` bool: pairs whose images are of the last round; none before the first."""
    created_round = np.asarray(state.clients.created_round).reshape(-1)
    return (created_round == int(state.round)) & (created_round > 0)
