"""The skews of a run on the host: examples, labels and parameters of its clients."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.data import PARTITIONS, Dataset, Partition, partition_from_clients
from fedjax_het.data.validation import require_positions
from fedjax_het.skews.amounts import AmountSkew, SizeSkew
from fedjax_het.skews.base import FeatureSkew, Skew
from fedjax_het.skews.drift import NUM_PHASES, DriftSkew
from fedjax_het.skews.labels import LabelSkew
from fedjax_het.utils.arrays import make_key
from fedjax_het.utils.errors import require
from fedjax_het.utils.input_kinds import IMAGE_KINDS, require_input_kind
from fedjax_het.utils.kinds import call_kind

_STREAM = 0x5CE7  # of a partition's seed


class Drift(NamedTuple):
    """The active examples of the clients over the rounds."""

    partitions: tuple[Partition, ...]
    "Active examples of the clients in each phase."
    rounds: int
    "Rounds of the drift, see `skews.drift.DriftSkew`."

    def get_phase(self, round_index: int) -> int:
        """Return the phase of a round; the last phase lasts until the end of the run."""
        num_phases = len(self.partitions)
        return min(round_index * num_phases // self.rounds, num_phases - 1)


class ClientSkews(NamedTuple):
    """Label skews and feature skews of K clients, arrays on the host."""

    features: tuple[tuple[FeatureSkew, tuple[Any, Any]], ...] = ()
    "Each feature skew with the arrays of the clients, `[K, ...]`, and the shared arrays."
    test_label_maps: np.ndarray | None = None
    "Int32 `[K, C]`: label of each class in a client's own test; None: as in the data set."

    def select(self, ids: np.ndarray) -> "ClientSkews":
        """Return the skews of some of the clients."""
        features = [
            (skew, (jax.tree.map(lambda a: a[ids], by_client), shared))
            for skew, (by_client, shared) in self.features
        ]
        maps = self.test_label_maps
        return ClientSkews(tuple(features), None if maps is None else maps[ids])


def select_examples(
    skews: Sequence[Skew],
    partition: Partition,
    labels: np.ndarray,
    num_classes: int,
    seed: int,
) -> Partition:
    """Apply the skews of numbers of examples to a partition.

    Args:
      skews: the skews of the run.
      partition: the examples of each of the K clients.
      labels: labels of the training examples, integers `[N]`.
      num_classes: number of classes, C.
      seed: seed of the partition.

    Returns:
      The partition; the argument itself for a run without such skews.

    Raises:
      ConfigError: if a skew divides the examples again although clients share some, and for a
        skew of a user that returns no valid positions.
    """
    chosen = [skew for skew in skews if isinstance(skew, AmountSkew)]
    if not chosen:
        return partition
    clients = [partition.client_indices(k) for k in range(partition.num_clients)]
    scheme = PARTITIONS.get(partition.scheme)
    has_own_examples = scheme and (scheme.clients_are_users or scheme.clients_are_domains)
    for skew in chosen:
        rng = _make_rng(skew, seed)
        if isinstance(skew, SizeSkew) and not has_own_examples:
            _require_separate(skew, clients)
        if has_own_examples and isinstance(skew, SizeSkew):
            new_clients = _call(skew, skew.select_own_examples, rng, clients)
        else:
            new_clients = _call(skew, skew.select_examples, rng, clients, labels, num_classes)
        clients = _require_positions(skew, new_clients, len(clients), len(labels))
    selected = partition_from_clients(clients, scheme=partition.scheme)
    return dataclasses.replace(partition, indices=selected.indices, offsets=selected.offsets)


def select_active(
    skews: Sequence[Skew],
    partition: Partition,
    labels: np.ndarray,
    num_classes: int,
    seed: int,
    num_rounds: int,
) -> Drift | None:
    """Apply the drifts of a run.

    Args:
      skews: the skews of the run. Several drifts select the examples that all of them select.
      partition: the training examples of each of the K clients.
      labels: labels of the training examples, integers `[N]`.
      num_classes: number of classes, C.
      seed: seed of the partition.
      num_rounds: rounds of a drift that states none.

    Returns:
      The active examples; None for a run without drift.

    Raises:
      ConfigError: for drifts of different numbers of rounds.
    """
    chosen = [skew for skew in skews if isinstance(skew, DriftSkew)]
    if not chosen:
        return None
    all_rounds = {skew.rounds or num_rounds for skew in chosen}
    require(len(all_rounds) == 1, "skew rounds", sorted(all_rounds), "one number for all drifts")
    clients = [partition.client_indices(k) for k in range(partition.num_clients)]
    phases = [clients] * NUM_PHASES
    for skew in chosen:
        arguments = (_make_rng(skew, seed), clients, labels, num_classes)
        active = _call(skew, skew.select_active, *arguments)
        expected = f"{NUM_PHASES} lists, one for each phase"
        is_valid = isinstance(active, Sequence) and len(active) == NUM_PHASES
        require(is_valid, f"return value of {skew.source}", active, expected)
        active = [_require_positions(skew, own, len(clients), len(labels)) for own in active]
        phases = [
            [np.intersect1d(*pair) for pair in zip(*both, strict=True)]
            for both in zip(phases, active, strict=True)
        ]
    return Drift(tuple(map(partition_from_clients, phases)), all_rounds.pop())


def assign_skews(
    skews: Sequence[Skew], partition: Partition, dataset: Dataset, seed: int
) -> tuple[Dataset | None, ClientSkews]:
    """Apply the label skews of a run, and draw the parameters of its feature skews.

    Args:
      skews: the skews of the run.
      partition: the examples of each of the K clients. With label skews they share none.
      dataset: the data set of the partition.
      seed: seed of the partition.

    Returns:
      The data set with the labels of training examples as the clients see them, None without label
      skews; and the skews of the clients.

    Raises:
      ConfigError: if the images cannot be transformed, and for label skews of clients that share
        examples, since an example has one label.
    """
    if not skews:
        return None, ClientSkews((), None)
    num_classes, shape = dataset.num_classes, dataset.input_shape
    clients = [partition.client_indices(k) for k in range(partition.num_clients)]
    classes = np.arange(num_classes, dtype=np.int32)
    label_maps = np.tile(classes, (len(clients), 1))
    labels, has_maps = np.asarray(dataset.train_labels), False
    for skew in skews:
        if isinstance(skew, LabelSkew):
            _require_separate(skew, clients)
            changed = np.asarray(
                _call(skew, skew.change_labels, _make_rng(skew, seed), clients, labels, num_classes)
            )
            is_valid = changed.shape == labels.shape and bool(np.isin(changed, classes).all())
            expected = f"{len(labels)} labels from 0 to {num_classes - 1}"
            require(is_valid, f"return value of {skew.source}", changed, expected)
            labels = changed.astype(labels.dtype)
            own_maps = _call(
                skew, skew.make_label_maps, _make_rng(skew, seed), len(clients), num_classes
            )
            if own_maps is not None:
                label_maps, has_maps = np.take_along_axis(own_maps, label_maps, 1), True
    has_label_skew = any(isinstance(skew, LabelSkew) for skew in skews)
    skewed = dataclasses.replace(dataset, train_labels=labels) if has_label_skew else None
    features = [skew for skew in skews if isinstance(skew, FeatureSkew)]
    for skew in features:
        require_input_kind(skew.source, shape, dataset.num_tokens, IMAGE_KINDS)
        skew.validate_images(shape)
    parameters = [
        _call(skew, skew.make_parameters, _make_rng(skew, seed), len(clients), shape)
        for skew in features
    ]
    pairs = tuple(zip(features, parameters, strict=True))
    for pair in pairs:
        _validate_transform(*pair, shape)
    return skewed, ClientSkews(pairs, label_maps if has_maps else None)


def _call(skew: Skew, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a skew, which may be a user's, and report its errors in one line."""
    return call_kind("skew", skew, function, *arguments)


def _require_positions(
    skew: Skew, clients: Any, num_clients: int, num_examples: int
) -> list[np.ndarray]:
    """Return the positions of each client's examples if a skew returned valid positions."""
    description = f"return value of {skew.source}"
    expected = f"{num_clients} arrays of positions, one for each client"
    require(isinstance(clients, Sequence), description, clients, expected)
    require(len(clients) == num_clients, f"length of {description}", len(clients), expected)
    arrays = [
        require_positions(f"{description} for client {client}", positions, num_examples)
        for client, positions in enumerate(clients)
    ]
    for client, positions in enumerate(arrays):
        unique, counts = np.unique(positions, return_counts=True)
        if (counts > 1).any():
            text = f"example {int(unique[counts.argmax()])} {int(counts.max())} times"
            require(False, f"{description} for client {client}", text, "different examples")
    return arrays


def _require_separate(skew: Skew, clients: Sequence[np.ndarray]) -> None:
    """Raise ConfigError if clients share examples, which a skew would change for all of them."""
    counts = np.unique(np.concatenate(clients), return_counts=True)[1]
    if num_shared := int((counts > 1).sum()):
        expected = (
            f"clients that share no examples ({num_shared} examples belong to several clients)"
        )
        require(False, "skew", skew.name, expected)


def _validate_transform(
    skew: FeatureSkew, parameters: tuple[Any, Any], shape: tuple[int, ...]
) -> None:
    """Raise ConfigError unless the images of a skew have their shape, before anything compiles."""
    images = jax.ShapeDtypeStruct((2, *shape), jnp.float32)

    def transform(images: jax.Array, by_client: Any, shared: Any) -> jax.Array:
        own = jax.tree.map(lambda a: a[0], by_client)
        keys = jax.random.split(make_key(0), len(images))
        if skew.reads_positions:
            keys = jnp.arange(len(images))
        return skew.transform(images, own, shared, keys, *skew.get_static())

    transformed = _call(skew, partial(jax.eval_shape, transform), images, *parameters)
    is_valid = getattr(transformed, "shape", None) == images.shape
    expected = f"images {images.shape}, like the argument"
    require(is_valid, f"return value of {skew.source}", transformed, expected)


def _make_rng(skew: Skew, seed: int) -> np.random.Generator:
    """Return the generator of a skew, which does not depend on the other skews."""
    name = [ord(letter) for letter in skew.name]
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_STREAM, *name)))
