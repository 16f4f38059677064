"""FedMix and NaiveMix (Yoon, Shin, Hwang and Yang, ICLR 2021, arXiv:2107.00233)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from fedjax_het.core.local_training import LocalTraining, ServerMessage, make_local_sgd
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.data.mean_blocks import MeanBlocks, average_examples
from fedjax_het.utils.arrays import AnyArray
from fedjax_het.utils.config import Bounds, Config, PositiveInt, SearchRange
from fedjax_het.utils.input_kinds import FLOAT_KINDS

Tree = Any
AVERAGES_INPUT = "averages"  # name of the rounds' input


@dataclass(frozen=True)
class NaiveMixOptions(Config):
    """Choices of NaiveMix."""

    mean_size: PositiveInt | None = None
    "Number of examples in an average, M_k; None: all examples of a client."


@dataclass(frozen=True)
class FedMixOptions(NaiveMixOptions):
    """Choices of FedMix."""

    coefficient: Literal["expansion", "printed"] = "expansion"
    """Coefficient of the derivative's term: "expansion", (1 - lambda) lambda; "printed", lambda as
    in the paper."""


# 1 would leave nothing of the client's own examples.
MixupLambda = Annotated[float, Bounds(0, 1, open_high=True)]


@dataclass(frozen=True)
class NaiveMixHyperParameters(Config):
    """Hyperparameters of NaiveMix."""

    mixup_lambda: Annotated[MixupLambda, SearchRange(0.01, 0.5)] = 0.1
    "Weight of the other clients' averages; 0 is FedAvg."


@dataclass(frozen=True)
class FedMixHyperParameters(NaiveMixHyperParameters):
    """Hyperparameters of FedMix."""

    mixup_lambda: Annotated[MixupLambda, SearchRange(0.01, 0.5)] = 0.05
    "Weight of the other clients' averages; 0 is FedAvg."


class AveragedExamples(NamedTuple):
    """Averages of clients' examples, which every client receives."""

    inputs: AnyArray
    "`[M, ...]` float32, as stored; uint8 images are divided by 255."
    labels: AnyArray
    "`[M, C]` float32, shares of the classes."
    num_rows: AnyArray
    "`[]` int32: number of averages; later rows are padding."


def naivemix(
    training: LocalTraining, plan: ExecutionPlan, *, options: NaiveMixOptions
) -> Algorithm:
    """NaiveMix: local training with mixup of averages of other clients' data (section 3.2).

    Before the first round every client cuts its data into blocks of `mean_size` examples (M_k;
    default: all its examples, as in the paper's main table). It sends the mean input and the mean
    one-hot label of each block, and receives all of them. In a step one pair (x_g, y_g) is drawn
    uniformly for the whole minibatch. With lambda = `mixup_lambda`,

        x' = (1 - lambda) x + lambda x_g,   loss = (1 - lambda) l(x', y) + lambda l(x', y_g).

    lambda = 0 is FedAvg. Inputs are mixed after normalization. Averages of a client's own data are
    not left out. l(x', y_g) is the mean cross-entropy over the label's classes.

    Traffic: one model each way. In the first round each client also sends its own averages and
    receives everyone's. State: FedAvg's; a resumed run computes the averages again. Memory on each
    device: all averages, 4 bytes per number. Cost: FedAvg's.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      options: choices of the method.

    Returns:
      The method.
    """
    return _build_mixup_algorithm(training, plan, _naivemix_losses, options.mean_size)


def fedmix(training: LocalTraining, plan: ExecutionPlan, *, options: FedMixOptions) -> Algorithm:
    """FedMix: mixup's loss with NaiveMix's averages, to first order in lambda (Eq. 4, Algorithm 1).

    With x' = (1 - lambda) x, and the derivative at x',

        loss = (1 - lambda) l(x', y) + lambda l(x', y_g) + (1 - lambda) lambda <dl(x', y)/dx', x_g>

    for every sample: the expansion of NaiveMix's loss in x_g without the term lambda^2 <dl(x',
    y_g)/dx', x_g>. The two losses differ by O(lambda^2). lambda = 0 is FedAvg. The paper's lambda
    is 0.05 on CIFAR-10, 0.1 on CIFAR-100 and 0.2 on FEMNIST; for NaiveMix 0.1, 0.1 and 0.2. With
    batch norm a sample's loss also depends on the other samples' inputs, whose derivatives are
    included.

    Traffic and state: NaiveMix's. Cost of a step: the gradient of a gradient, about 3 times
    FedAvg's.

    Departures from the paper: the paper's last term has the coefficient lambda (`coefficient`
    "printed"), which differs by O(lambda^2). The default "expansion" is the coefficient of the
    Taylor expansion. The derivative is of each sample's own loss. A derivative of the batch's mean
    loss, averaged over the batch once more, would make the term smaller by the batch size.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      options: choices of the method.

    Returns:
      The method.
    """
    compute_losses = partial(_fedmix_losses, options.coefficient == "printed")
    return _build_mixup_algorithm(training, plan, compute_losses, options.mean_size)


class _Mixup(NamedTuple):
    """Averaged examples of a minibatch, and their weight."""

    weight: jax.Array  # lambda
    input: jax.Array
    label: jax.Array


def _naivemix_losses(mixup: _Mixup, network: Callable, inputs, labels, mask):
    mixup_lambda, mean_input, mean_label = mixup
    logits, state = network((1 - mixup_lambda) * inputs + mixup_lambda * mean_input)
    client_losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    mean_losses = optax.softmax_cross_entropy(logits, mean_label)
    return (1 - mixup_lambda) * client_losses + mixup_lambda * mean_losses, state


def _fedmix_losses(is_printed: bool, mixup: _Mixup, network: Callable, inputs, labels, mask):
    mixup_lambda, mean_input, mean_label = mixup

    def sum_losses(inputs):
        logits, state = network(inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        # Its gradients are each sample's own. Batch norm connects samples: those that only fill up
        # the batch are masked.
        return (losses * mask).sum(), (losses, logits, state)

    shrunk_inputs = (1 - mixup_lambda) * inputs
    gradients, outputs = jax.grad(sum_losses, has_aux=True)(shrunk_inputs)
    client_losses, logits, state = outputs
    gradients, mean_input = gradients.reshape(len(gradients), -1), mean_input.reshape(-1)
    derivatives = jnp.einsum("bi,i->b", gradients, mean_input, precision="highest")
    mean_losses = optax.softmax_cross_entropy(logits, mean_label)
    coefficient = mixup_lambda * (1 if is_printed else 1 - mixup_lambda)
    mixed_losses = (1 - mixup_lambda) * client_losses + mixup_lambda * mean_losses
    return mixed_losses + coefficient * derivatives, state


def _build_mixup_algorithm(
    training: LocalTraining, plan: ExecutionPlan, compute_losses: Callable, mean_size: int | None
) -> Algorithm:
    """Return local training with mixup.

    The loss is `compute_losses(mixup, network, inputs, labels, mask)`.
    """
    task, mean_blocks = training.task, MeanBlocks(mean_size)

    def loss_and_gradient(context, local, batch):
        inputs, labels, num_rows = context.message.extra
        key = fold_in_purpose(context.key, Purpose.MIXING)
        row = jax.random.randint(key, (), 0, num_rows)
        mixup = _Mixup(context.hp["mixup_lambda"], task.normalize(inputs[row]), labels[row])
        losses = partial(compute_losses, mixup)
        return training.loss_and_gradient(
            context,
            local.variables,
            batch,
            sample_losses=losses,
            extra_sample_arrays=(batch.mask,),
        )

    def make_message(server, cohort):
        return ServerMessage(server.variables, cohort.inputs[AVERAGES_INPUT])

    client = make_local_sgd(training, loss_and_gradient=loss_and_gradient)
    return build_federated_algorithm(training, plan, client, make_message=make_message)._replace(
        round_inputs=(RoundInput(AVERAGES_INPUT, partial(_make_averages, mean_blocks)),),
        initial_traffic=partial(_count_initial_traffic, mean_blocks),
        protects_privacy=False,  # clients send averages of their examples
    )


def _make_averages(mean_blocks: MeanBlocks, federations: Sequence[FederationData]) -> list[Tree]:
    """Return the averages of each federation, padded to the largest number of averages."""
    averages = []
    for federation in federations:
        dataset = federation.dataset
        examples = (dataset.train_inputs, dataset.train_labels, dataset.num_classes)
        partition, seed = federation.partition, federation.seed
        averages.append(average_examples(*examples, partition, mean_blocks, seed))
    max_rows = max(len(labels) for _, labels in averages)

    def pad_rows(array: np.ndarray) -> np.ndarray:
        return np.pad(array, [(0, max_rows - len(array))] + [(0, 0)] * (array.ndim - 1))

    return [
        AveragedExamples(pad_rows(inputs), pad_rows(labels), np.array(len(labels), np.int32))
        for inputs, labels in averages
    ]


def _count_initial_traffic(mean_blocks: MeanBlocks, federation: FederationData) -> InitialTraffic:
    """Count everyone's averages up and all averages down to each client: 4 bytes a number."""
    dataset, partition = federation.dataset, federation.partition
    numbers_per_average = int(np.prod(dataset.input_shape)) + dataset.num_classes
    num_averages = int(mean_blocks.num_averages(partition.sizes).sum())
    size = 4 * numbers_per_average * num_averages
    return InitialTraffic(down=partition.num_clients * size, up=size)


FEDMIX = AlgorithmSpec(
    "fedmix",
    fedmix,
    "mixup with other clients' averaged data, to first order (Yoon et al., 2021)",
    title="FedMix",
    paper="Yoon et al., ICLR 2021, arXiv:2107.00233",
    options=FedMixOptions,
    hyperparameters=FedMixHyperParameters,
    # DynaFed's text has no settings of FedMix; these are of this method's own tables.
    rules=(DefaultsRule(("standard", "dynafed"), ("cifar100",), hp={"mixup_lambda": 0.1}),),
    color="#C51B7D",
    wrappable_as="average",
    required_data=("averages",),
    evaluated_models=("global", "client"),
    input_kinds=FLOAT_KINDS,
    needs_classes=True,
)
NAIVEMIX = replace(
    FEDMIX,
    name="naivemix",
    title="NaiveMix",
    build=naivemix,
    description="mixup with other clients' averaged data (Yoon et al., 2021)",
    options=NaiveMixOptions,
    hyperparameters=NaiveMixHyperParameters,
    rules=(),
    color="#CB6F97",
    dashes=(0, (4, 1.5)),
)
