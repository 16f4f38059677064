"""How good condensed images are: training on them against training on as many real ones."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_het.common.errors import ConfigError, is_whole, require
from fedjax_het.condensation.pool import Pool, train_on_pool
from fedjax_het.condensation.synthetic import decayed_once
from fedjax_het.data import Dataset
from fedjax_het.engine.evaluation import right_of
from fedjax_het.engine.task import Task
from fedjax_het.nn import Model, Variables

_TEST_BATCH = 500


class MeanStd(NamedTuple):
    """Over networks; the deviation with n - 1, NaN for a single network."""

    mean: float
    std: float


class Quality(NamedTuple):
    """Test accuracies as shares."""

    condensed: MeanStd
    random: MeanStd
    gain: MeanStd
    """Condensed minus random, network by network."""


def gain_over_random(
    model: Model,
    images: np.ndarray,
    labels: np.ndarray,
    dataset: Dataset,
    *,
    seed: int = 0,
    num_networks: int = 5,
    epochs: int = 1000,
    lr: float = 0.01,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    batch_size: int = 256,
    at_once: int = 1,
) -> Quality:
    """Train networks from scratch on condensed images, and on random real ones of equal number.

    The recipe is that of distribution matching's public code without augmentation: SGD, cross-
    entropy, a tenth of `lr` and a new momentum buffer after the middle of the epochs. Network n
    starts from the same parameters on both, and has real images of its own: without replacement
    from the training set, as many of each class as there are condensed ones.

    Args:
      images: `[M, H, W, C]` condensed, normalised as `dataset`'s are for a network.
      labels: `[M]` classes.
      dataset: gives the real images, and the test images of all accuracies.
      at_once: networks that are vmapped; more than one pays on an accelerator.
    Errors: ConfigError: arguments that do not fit together; a class with fewer real images.
    Cost: 2 * num_networks * epochs * ceil(M / batch_size) steps, and as many networks tested; one
      compilation.
    """
    images, labels = np.asarray(images, np.float32), np.asarray(labels)
    _check_images(model, images, labels, dataset.num_classes)
    counts = {"num_networks": num_networks, "epochs": epochs}
    for name, value in {**counts, "batch_size": batch_size, "at_once": at_once}.items():
        require(is_whole(value, 1), name, value, "a whole number >= 1")

    normalise = Task(model, dataset.mean, dataset.std).normalise
    subsets = [
        random_subset(dataset.train_labels, labels, seed=seed, number=n)
        for n in range(num_networks)
    ]
    real = [normalise(jnp.asarray(dataset.train_images[subset])) for subset in subsets]
    keys = jax.random.split(jax.random.key(seed), num_networks)
    accuracies = _accuracies(
        model,
        jnp.stack([jnp.asarray(images), *real]),
        jnp.asarray(labels, jnp.int32),
        jnp.concatenate([jnp.zeros(num_networks, jnp.int32), 1 + jnp.arange(num_networks)]),
        jnp.concatenate([keys, keys]),
        normalise(jnp.asarray(dataset.test_images)),
        jnp.asarray(dataset.test_labels),
        {"lr": lr, "momentum": momentum, "weight_decay": weight_decay},
        epochs=epochs,
        batch_size=batch_size,
        at_once=at_once,
    )
    condensed, random = np.asarray(accuracies, np.float64).reshape(2, num_networks)
    return Quality(*map(_mean_std, (condensed, random, condensed - random)))


def _check_images(model: Model, images: np.ndarray, labels: np.ndarray, num_classes: int) -> None:
    right = images.ndim == 4 and images.shape[1:] == model.input_shape and len(images) > 0
    require(right, "shape of images", images.shape, f"[M, *{model.input_shape}]")
    right = labels.shape == images.shape[:1] and np.issubdtype(labels.dtype, np.integer)
    require(right, "labels", f"{labels.dtype} {labels.shape}", f"{len(images)} integers")
    in_range = bool(labels.min() >= 0 and labels.max() < num_classes)
    require(in_range, "labels", labels, f"classes in [0, {num_classes})")


def random_subset(
    train_labels: np.ndarray, labels: np.ndarray, *, seed: int, number: int = 0
) -> np.ndarray:
    """[M] positions in the training set such that `train_labels[positions]` is `labels`.

    Drawn without replacement; `number` counts the subsets of a seed. ConfigError where there are
    too few of a class.
    """
    rng = np.random.default_rng([seed, number])
    positions = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(train_labels == label)
        wanted = labels == label
        if wanted.sum() > len(members):
            raise ConfigError(
                f"labels: {wanted.sum()} images of class {label}: expected at most the "
                f"{len(members)} that the training set has"
            )
        positions[wanted] = rng.permutation(members)[: wanted.sum()]
    return positions


def train_from_init(
    model: Model,
    images: Array,
    labels: Array,
    key: Array,
    *,
    epochs: int,
    lr: Array | float,
    momentum: Array | float,
    weight_decay: Array | float,
    batch_size: int,
) -> Variables:
    """Variables of a network that learned `images` by the recipe of `gain_over_random`.

    Args:
      images: `[M, H, W, C]` normalised. labels: `[M]` classes.
      key: decides the initial parameters and the order of the images.
      lr: decays as in `decayed_once`.
    Cost: epochs * ceil(M / batch_size) steps.
    """
    init_key, order_key = jax.random.split(key)
    variables = model.init(init_key)
    pool = Pool(images, labels, jnp.ones(len(labels), bool))
    for number, part in enumerate(decayed_once(lr, epochs)):
        variables = train_on_pool(
            model,
            variables,
            pool,
            jax.random.fold_in(order_key, number),
            epochs=part.epochs,
            batch_size=batch_size,
            lr=part.lr,
            momentum=momentum,
            weight_decay=weight_decay,
        )
    return variables


@partial(jax.jit, static_argnames=("model", "epochs", "batch_size", "at_once"))
def _accuracies(
    model: Model,
    sets: Array,
    labels: Array,
    which: Array,
    keys: Array,
    test_images: Array,
    test_labels: Array,
    recipe: dict[str, Array | float],
    *,
    epochs: int,
    batch_size: int,
    at_once: int,
) -> Array:
    """[N] test accuracy of network n, trained on `sets[which[n]]`, which all have `labels`."""

    def accuracy_of(network):
        number, key = network
        variables = train_from_init(
            model, sets[number], labels, key, epochs=epochs, batch_size=batch_size, **recipe
        )
        return _accuracy(model, variables, test_images, test_labels)

    return jax.lax.map(accuracy_of, (which, keys), batch_size=at_once)


def _accuracy(model: Model, variables: Variables, images: Array, labels: Array) -> Array:
    """Share of right answers, with the activations of `_TEST_BATCH` images in memory."""

    def right(piece):
        image, label = piece
        return right_of(model.apply(variables, image[None], train=False)[0][0], label)

    return jax.lax.map(right, (images, labels), batch_size=_TEST_BATCH).mean()


def _mean_std(values: np.ndarray) -> MeanStd:
    std = float(values.std(ddof=1)) if len(values) > 1 else float("nan")
    return MeanStd(float(values.mean()), std)
