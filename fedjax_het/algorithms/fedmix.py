"""FedMix and NaiveMix (Yoon, Shin, Hwang and Yang, ICLR 2021, arXiv:2107.00233)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.algorithms.base import Algorithm, FederationData, InitialTraffic, RoundInput
from fedjax_het.algorithms.builders import build_federated_algorithm
from fedjax_het.algorithms.spec import AlgorithmSpec, DefaultsRule
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import (
    ClientTrainState,
    LocalTraining,
    ServerMessage,
    apply_gradient,
    make_local_sgd,
)
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.data.mean_blocks import MeanBlocks, average_examples
from fedjax_het.utils.arrays import AnyArray
from fedjax_het.utils.config import Bounds, Config, PositiveInt

Tree = Any
AVERAGES_INPUT = "averages"  # the name of the rounds' input


@dataclass(frozen=True)
class NaiveMixOptions(Config):
    mean_size: PositiveInt | None = None
    "M_k: examples in an average; None: all that a client has."


@dataclass(frozen=True)
class FedMixOptions(NaiveMixOptions):
    coefficient: Literal["expansion", "printed"] = "expansion"
    "Of the term with the derivative; see `fedmix`."


MixupLambda = Annotated[float, Bounds(0, 1, open_high=True)]  # leaves something of the client's own


@dataclass(frozen=True)
class NaiveMixHyperParameters(Config):
    mixup_lambda: MixupLambda = 0.1
    "Weight of the other clients' averages; 0 is FedAvg."


@dataclass(frozen=True)
class FedMixHyperParameters(Config):
    mixup_lambda: MixupLambda = 0.05
    "Weight of the other clients' averages; 0 is FedAvg."


class AveragedExamples(NamedTuple):
    """Averages of clients' examples, which every client was sent; rows from `num_rows` on are
    padding.

    images [M, H, W, C] float32, as stored or, where that is uint8, divided by 255. labels [M, C]
    float32, shares of the classes. num_rows [] int32.
    """

    images: AnyArray
    labels: AnyArray
    num_rows: AnyArray


def naivemix(
    training: LocalTraining, plan: ExecutionPlan, *, options: NaiveMixOptions = NaiveMixOptions()
) -> Algorithm:
    """Mixup with averages of other clients' data, in local training.

    Mean-augmented federated learning: before the first round every client cuts its data into blocks
    of `mean_size` examples (M_k; default: all it has, as in the paper's main table), and sends the
    mean image and the mean one-hot label of each; every client is sent all of them. In a step one
    pair (x_g, y_g) is drawn uniformly for the whole minibatch, and with lambda = `mixup_lambda`

        x' = (1 - lambda) x + lambda x_g,   loss = (1 - lambda) l(x', y) + lambda l(x', y_g).

    lambda = 0 is FedAvg. Images are mixed after normalisation. Averages of a client's own data are
    not left out. The mean label is taken as it is, so l(x', y_g) is the mean cross-entropy.

    Traffic: FedAvg's, and in the first round the averages: from each client its own, to each client
    everyone's. State: none besides FedAvg's; the averages are made anew from the data when a run is
    resumed. Memory on each device: all averages, 4 bytes a number.
    """
    return _build_mixup_algorithm(training, plan, _naivemix_losses, options.mean_size)


def fedmix(
    training: LocalTraining, plan: ExecutionPlan, *, options: FedMixOptions = FedMixOptions()
) -> Algorithm:
    """NaiveMix's averages, of which mixup's loss is taken to first order in lambda.

    With x' = (1 - lambda) x, and the derivative taken at x',

        loss = (1 - lambda) l(x', y) + lambda l(x', y_g) + (1 - lambda) lambda <dl(x', y)/dx', x_g>

    for every sample: the expansion in x_g of the loss above, without the term
    lambda^2 <dl(x', y_g)/dx', x_g>; the two differ by O(lambda^2). In the paper the last term has
    the coefficient lambda (`coefficient` "printed"), which differs by O(lambda^2) too; the default
    is that of the "expansion". The derivative is of each sample's own loss: that of the batch's
    mean loss, averaged over the batch once more, would make the term smaller by the batch size.

    The paper's lambda is 0.05 on CIFAR-10, 0.1 on CIFAR-100 and 0.2 on FEMNIST, for NaiveMix 0.1,
    0.1 and 0.2.
    lambda = 0 is FedAvg. With batch norm a sample's loss depends on the other samples' images too,
    which move along. Traffic and state: NaiveMix's. Cost of a step: the gradient of a gradient,
    about 3 times FedAvg's.
    """
    compute_losses = partial(_fedmix_losses, options.coefficient == "printed")
    return _build_mixup_algorithm(training, plan, compute_losses, options.mean_size)


def _naivemix_losses(mixup_lambda, mean_image, mean_label, network: Callable, images, labels):
    mixed_images = (1 - mixup_lambda) * images + mixup_lambda * mean_image
    logits, state = network(mixed_images)
    client_losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return (1 - mixup_lambda) * client_losses + mixup_lambda * optax.softmax_cross_entropy(
        logits, mean_label
    ), state


def _fedmix_losses(
    uses_printed_coefficient,
    mixup_lambda,
    mean_image,
    mean_label,
    network: Callable,
    images,
    labels,
):
    def sum_losses(images):
        logits, state = network(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.sum(), (losses, logits, state)  # whose gradients are each sample's own

    scaled_images = (1 - mixup_lambda) * images
    image_gradients, (client_losses, logits, state) = jax.grad(sum_losses, has_aux=True)(
        scaled_images
    )
    directional_derivatives = jnp.einsum(
        "bhwc,hwc->b", image_gradients, mean_image, precision="highest"
    )
    mean_label_losses = optax.softmax_cross_entropy(logits, mean_label)
    coefficient = mixup_lambda * (1 if uses_printed_coefficient else 1 - mixup_lambda)
    return (
        (1 - mixup_lambda) * client_losses
        + mixup_lambda * mean_label_losses
        + coefficient * directional_derivatives,
        state,
    )


def _build_mixup_algorithm(
    training: LocalTraining, plan: ExecutionPlan, compute_losses: Callable, mean_size: int | None
) -> Algorithm:
    """Local training on `losses(lambda, mean_image, mean_label, network, images, labels)`."""
    task, base = training.task, make_local_sgd(training)

    def step(context, local, batch):
        images, labels, num_rows = context.message.extra
        average_index = jax.random.randint(
            fold_in_purpose(context.key, Purpose.MIXING), (), 0, num_rows
        )
        mean_image = task.normalize(images[average_index])
        mixup_losses = partial(
            compute_losses, context.hp["mixup_lambda"], mean_image, labels[average_index]
        )
        loss, gradient, variables = task.loss_and_gradient(
            local.variables, batch, context.key, sample_losses=mixup_losses
        )
        variables, optimizer = apply_gradient(
            training, context, variables, gradient, local.optimizer_state, batch
        )
        return ClientTrainState(variables, optimizer, local.aux), loss

    algorithm = build_federated_algorithm(
        training,
        plan,
        base._replace(step=step),
        make_message=lambda server, cohort: ServerMessage(
            server.variables, cohort.inputs[AVERAGES_INPUT]
        ),
    )
    mean_blocks = MeanBlocks(mean_size)
    return algorithm._replace(
        round_inputs=(RoundInput(AVERAGES_INPUT, partial(_make_averages, mean_blocks)),),
        initial_traffic=partial(_count_initial_traffic, mean_blocks),
    )


def _make_averages(mean_blocks: MeanBlocks, federations: Sequence[FederationData]) -> list[Tree]:
    """The averages of each federation, with room for those of any."""
    averages = [
        average_examples(
            federation.dataset.train_images,
            federation.dataset.train_labels,
            federation.dataset.num_classes,
            federation.partition,
            mean_blocks,
            federation.seed,
        )
        for federation in federations
    ]
    max_rows = max(len(labels) for _, labels in averages)

    def pad_rows(array: np.ndarray) -> np.ndarray:
        return np.pad(array, [(0, max_rows - len(array))] + [(0, 0)] * (array.ndim - 1))

    return [
        AveragedExamples(pad_rows(images), pad_rows(labels), np.array(len(labels), np.int32))
        for images, labels in averages
    ]


def _count_initial_traffic(mean_blocks: MeanBlocks, federation: FederationData) -> InitialTraffic:
    """Up, everyone's averages; down, all of them to each client: 4 bytes a number."""
    numbers_per_average = (
        int(np.prod(federation.dataset.input_shape)) + federation.dataset.num_classes
    )
    averages_bytes = (
        4 * numbers_per_average * int(mean_blocks.num_averages(federation.partition.sizes).sum())
    )
    return InitialTraffic(down=federation.partition.num_clients * averages_bytes, up=averages_bytes)


FEDMIX = AlgorithmSpec(
    "fedmix",
    fedmix,
    "mixup with other clients' averaged data, to first order (Yoon et al., 2021)",
    paper="Yoon et al., ICLR 2021, arXiv:2107.00233",
    options=FedMixOptions,
    hyperparameters=FedMixHyperParameters,
    # DynaFed's text gives no settings of FedMix; these are of this method's own tables.
    rules=(DefaultsRule(("dynafed",), ("cifar100",), hp={"mixup_lambda": 0.1}),),
    color="#C51B7D",
    wrappable_as="average",
    required_data=("averages",),
    evaluated_models=("global", "client"),
)
NAIVEMIX = AlgorithmSpec(
    "naivemix",
    naivemix,
    "mixup with other clients' averaged data (Yoon et al., 2021)",
    paper="Yoon et al., ICLR 2021, arXiv:2107.00233",
    options=NaiveMixOptions,
    hyperparameters=NaiveMixHyperParameters,
    color="#CB6F97",
    dashes=(0, (4, 1.5)),
    wrappable_as="average",
    required_data=("averages",),
    evaluated_models=("global", "client"),
)
