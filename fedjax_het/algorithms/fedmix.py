"""FedMix and NaiveMix (Yoon, Shin, Hwang and Yang, ICLR 2021, arXiv:2107.00233)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.algorithms.building import federated
from fedjax_het.algorithms.contract import Algorithm, Holdings, OnceTraffic, RoundInput
from fedjax_het.algorithms.entry import Entry, Rule
from fedjax_het.common.arrays import AnyArray
from fedjax_het.common.records import Bounds, Count, Record
from fedjax_het.data.averages import MeanBlocks, average_examples
from fedjax_het.engine.local import Broadcast, Local, LocalTraining, descend, local_sgd
from fedjax_het.engine.plan import Plan
from fedjax_het.engine.randomness import Purpose, key_for

Tree = Any
AVERAGES = "averages"  # the name of the rounds' input


@dataclass(frozen=True)
class NaiveMixOptions(Record):
    mean_size: Count | None = None
    "M_k: examples in an average; None: all that a client has."


@dataclass(frozen=True)
class FedMixOptions(NaiveMixOptions):
    coefficient: Literal["expansion", "printed"] = "expansion"
    "Of the term with the derivative; see `fedmix`."


Lambda = Annotated[float, Bounds(0, 1, open_high=True)]  # leaves something of the client's own


@dataclass(frozen=True)
class NaiveMixNumbers(Record):
    mixup_lambda: Lambda = 0.1
    "Weight of the other clients' averages; 0 is FedAvg."


@dataclass(frozen=True)
class FedMixNumbers(Record):
    mixup_lambda: Lambda = 0.05
    "Weight of the other clients' averages; 0 is FedAvg."


class Averages(NamedTuple):
    """Averages of clients' examples, which every client was sent; rows from `num_rows` on are
    padding.

    images [M, H, W, C] float32, as stored or, where that is uint8, divided by 255. labels [M, C]
    float32, shares of the classes. num_rows [] int32.
    """

    images: AnyArray
    labels: AnyArray
    num_rows: AnyArray


def naivemix(
    training: LocalTraining, plan: Plan, *, options: NaiveMixOptions = NaiveMixOptions()
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
    return _mixed(training, plan, _naive, options.mean_size)


def fedmix(
    training: LocalTraining, plan: Plan, *, options: FedMixOptions = FedMixOptions()
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
    losses = partial(_first_order, options.coefficient == "printed")
    return _mixed(training, plan, losses, options.mean_size)


def _naive(strength, mean_image, mean_label, network: Callable, images, labels):
    mixed = (1 - strength) * images + strength * mean_image
    logits, state = network(mixed)
    own = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return (1 - strength) * own + strength * optax.softmax_cross_entropy(logits, mean_label), state


def _first_order(printed, strength, mean_image, mean_label, network: Callable, images, labels):
    def own_losses(images):
        logits, state = network(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.sum(), (losses, logits, state)  # whose gradients are each sample's own

    shrunk = (1 - strength) * images
    slopes, (own, logits, state) = jax.grad(own_losses, has_aux=True)(shrunk)
    along = jnp.einsum("bhwc,hwc->b", slopes, mean_image, precision="highest")
    others = optax.softmax_cross_entropy(logits, mean_label)
    coefficient = strength * (1 if printed else 1 - strength)
    return (1 - strength) * own + strength * others + coefficient * along, state


def _mixed(
    training: LocalTraining, plan: Plan, losses: Callable, mean_size: int | None
) -> Algorithm:
    """Local training on `losses(lambda, mean_image, mean_label, network, images, labels)`."""
    task, base = training.task, local_sgd(training)

    def step(hp, broadcast, local, batch, client, key):
        images, labels, num_rows = broadcast.extra
        pair = jax.random.randint(key_for(key, Purpose.MIXING), (), 0, num_rows)
        mean_image = task.normalise(images[pair])
        mixed = partial(losses, hp["mixup_lambda"], mean_image, labels[pair])
        loss, gradient, variables = task.loss_and_gradient(
            local.variables, batch, key, losses=mixed
        )
        variables, optimizer = descend(
            training, hp, variables, gradient, local.optimizer, (batch, client)
        )
        return Local(variables, optimizer, local.memory), loss

    mixed = federated(
        training,
        plan,
        base._replace(step=step),
        send=lambda server, cohort: Broadcast(server.variables, cohort.inputs[AVERAGES]),
    )
    averaging = MeanBlocks(mean_size)
    return mixed._replace(
        inputs=(RoundInput(AVERAGES, partial(_averages, averaging)),),
        first_traffic=partial(_first_traffic, averaging),
    )


def _averages(averaging: MeanBlocks, holdings: Sequence[Holdings]) -> list[Tree]:
    """The averages of each federation, with room for those of any."""
    made = [
        average_examples(
            held.dataset.train_images,
            held.dataset.train_labels,
            held.dataset.num_classes,
            held.partition,
            averaging,
            held.seed,
        )
        for held in holdings
    ]
    most = max(len(labels) for _, labels in made)

    def padded(array: np.ndarray) -> np.ndarray:
        return np.pad(array, [(0, most - len(array))] + [(0, 0)] * (array.ndim - 1))

    return [
        Averages(padded(images), padded(labels), np.array(len(labels), np.int32))
        for images, labels in made
    ]


def _first_traffic(averaging: MeanBlocks, held: Holdings) -> OnceTraffic:
    """Up, everyone's averages; down, all of them to each client: 4 bytes a number."""
    numbers = int(np.prod(held.dataset.input_shape)) + held.dataset.num_classes
    sent = 4 * numbers * int(averaging.counts(held.partition.sizes).sum())
    return OnceTraffic(down=held.partition.num_clients * sent, up=sent)


FEDMIX = Entry(
    "fedmix",
    fedmix,
    "mixup with other clients' averaged data, to first order (Yoon et al., 2021)",
    paper="Yoon et al., ICLR 2021, arXiv:2107.00233",
    options=FedMixOptions,
    numbers=FedMixNumbers,
    # DynaFed's text gives no settings of FedMix; these are of this method's own tables.
    rules=(Rule(("dynafed",), ("cifar100",), hp={"mixup_lambda": 0.1}),),
    colour="#C51B7D",
    refinable="average",
    needs=("averages",),
    scored=("global", "client"),
)
NAIVEMIX = Entry(
    "naivemix",
    naivemix,
    "mixup with other clients' averaged data (Yoon et al., 2021)",
    paper="Yoon et al., ICLR 2021, arXiv:2107.00233",
    options=NaiveMixOptions,
    numbers=NaiveMixNumbers,
    colour="#CB6F97",
    dashes=(0, (4, 1.5)),
    refinable="average",
    needs=("averages",),
    scored=("global", "client"),
)
