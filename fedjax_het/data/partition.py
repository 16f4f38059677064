"""Which client holds which training example: the result of a partition scheme.

Clients that are set apart: they take no part in training.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedjax_het.data.partition_registry import PARTITIONS, PartitionScheme, find_parameter_name
from fedjax_het.data.validation import NumClasses, Seed, to_array, validate_names
from fedjax_het.utils.config import PositiveInt
from fedjax_het.utils.errors import ConfigError, require
from fedjax_het.utils.introspection import call_with_supported
from fedjax_het.utils.io import DamagedFileError
from fedjax_het.utils.npz import read_npz, write_npz
from fedjax_het.utils.validation import validate, validate_arguments

# Partitions draw from a stream of their own, so that the same seed elsewhere is independent.
_PARTITION_STREAM = 0x5EED


@dataclass(frozen=True)
class PartitionSummary:
    """A partition in numbers. The means over clients leave out those that hold nothing.

    classes_per_client: mean number of classes with at least one example.
    majority_share: mean share of a client's examples that its most frequent class makes up.
    num_unused: examples of the data set that no client holds.
    """

    num_clients: int
    num_examples: int
    num_unused: int
    size_min: int
    size_median: float
    size_mean: float
    size_max: int
    num_empty: int
    classes_per_client: float
    majority_share: float

    def __str__(self) -> str:
        text = (
            f"{self.num_clients} clients hold {self.num_examples:,} examples: {self.size_min} to "
            f"{self.size_max} each (median {self.size_median:g}, mean {self.size_mean:.1f}), "
            f"{self.classes_per_client:.1f} classes, majority share {self.majority_share:.0%}"
        )
        if self.num_empty:
            text += f"; {self.num_empty} clients empty"
        if self.num_unused:
            text += f"; {self.num_unused:,} examples unused"
        return text


@dataclass(frozen=True, eq=False)
class Partition:
    """The training examples of every client; or, of `local_tests`, its test examples.

    indices: int64, positions in the training set, client after client; ascending within a client.
        Those of local tests are positions in the test set; what is said of labels holds for its.
    offsets: int64 [K + 1]; client k holds `indices[offsets[k]:offsets[k + 1]]`, maybe nothing.
    scheme, seed, parameters: how it was made; `parameters` can be written as JSON.
    client_names: what each client is called, where clients have names (of a partition by domains,
        the domains'); else ().

    Both arrays are read-only. Raises `ConfigError` where they do not fit together.
    """

    CONSTRUCTORS: ClassVar[str] = (
        "partition_from_clients([positions of client 0, ...]) or make_partition give"
    )

    scheme: str
    seed: int
    parameters: dict
    indices: np.ndarray
    offsets: np.ndarray
    client_names: tuple[str, ...] = ()

    def __post_init__(self):
        for name, kind in (("scheme", str), ("seed", Seed), ("parameters", dict[str, Any])):
            object.__setattr__(self, name, validate(name, getattr(self, name), kind))
        for name in ("indices", "offsets"):
            array = to_array(name, getattr(self, name), "integers of rank 1")
            ok = array.ndim == 1 and np.issubdtype(array.dtype, np.integer)
            require(ok, name, f"{array.dtype} {array.shape}", "integers of rank 1")
            array = np.ascontiguousarray(array, dtype=np.int64).view()
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        offsets = self.offsets
        ok = len(offsets) >= 2 and offsets[0] == 0 and offsets[-1] == len(self.indices)
        require(
            bool(ok and (np.diff(offsets) >= 0).all()),
            "offsets",
            offsets.tolist() if len(offsets) < 10 else f"{len(offsets)} numbers",
            f"0, then ascending to len(indices) = {len(self.indices)}",
        )
        require(
            bool((self.indices >= 0).all()), "indices", int(self.indices.min(initial=0)), ">= 0"
        )
        names = validate_names("client_names", self.client_names)
        is_valid = len(set(names)) == len(names) in (0, self.num_clients)
        require(is_valid, "client_names", names, f"none, or {self.num_clients} different ones")
        object.__setattr__(self, "client_names", names)

    @property
    def num_clients(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """[K] examples of each client."""
        return np.diff(self.offsets)

    @validate_arguments
    def client_indices(self, k: int) -> np.ndarray:
        """Positions in the training set of client k's examples."""
        require(0 <= k < self.num_clients, "k", k, f"an integer in [0, {self.num_clients})")
        return self.indices[self.offsets[k] : self.offsets[k + 1]]

    def digest(self) -> str:
        """SHA-256 (hex) of who holds what; names, and how it was made, do not enter."""
        sha = hashlib.sha256(self.offsets.astype("<i8").tobytes())
        sha.update(self.indices.astype("<i8").tobytes())
        return sha.hexdigest()

    @validate_arguments
    def save(self, path: str | os.PathLike) -> Path:
        """Write a checksummed .npz, whole or not at all. Raises `OSError` where it cannot."""
        path = Path(path)
        meta = {"scheme": self.scheme, "seed": self.seed, "parameters": self.parameters}
        if self.client_names:
            meta["client_names"] = self.client_names
        write_npz(path, {"indices": self.indices, "offsets": self.offsets}, meta)
        return path

    @classmethod
    @validate_arguments
    def load(cls, path: str | os.PathLike) -> "Partition":
        """Read what `save` wrote. Raises `ConfigError` for any other file."""
        try:
            arrays, meta = read_npz(Path(path))
            return cls(
                scheme=meta["scheme"],
                seed=meta["seed"],
                parameters=meta["parameters"],
                indices=arrays["indices"],
                offsets=arrays["offsets"],
                client_names=tuple(meta.get("client_names", ())),
            )
        except (DamagedFileError, OSError) as error:
            raise ConfigError(f"partition file cannot be read: {error}") from error
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{path} holds no partition ({error} is missing)") from error

    @validate_arguments
    def label_counts(self, labels: np.ndarray, num_classes: NumClasses) -> np.ndarray:
        """[K, C] examples of each class at each client. `labels` are those of the training set."""
        labels = validate_class_labels("labels", labels, num_classes)
        largest = int(self.indices.max(initial=-1))
        if largest >= len(labels):
            raise ConfigError(
                f"len(labels) = {len(labels)}: the partition points at example {largest}, "
                "so it was made for another data set"
            )
        owners = np.repeat(np.arange(self.num_clients), self.sizes)
        cells = owners * num_classes + labels[self.indices]
        counts = np.bincount(cells, minlength=self.num_clients * num_classes)
        return counts.reshape(self.num_clients, num_classes)

    @validate_arguments
    def summarize(self, labels: np.ndarray, num_classes: NumClasses) -> PartitionSummary:
        """Sizes, classes per client and majority share; `str` of it is one line."""
        counts, sizes = self.label_counts(labels, num_classes), self.sizes
        nonempty_counts = counts[sizes > 0]
        return PartitionSummary(
            num_clients=self.num_clients,
            num_examples=len(self.indices),
            num_unused=len(labels) - len(np.unique(self.indices)),
            size_min=int(sizes.min()),
            size_median=float(np.median(sizes)),
            size_mean=float(sizes.mean()),
            size_max=int(sizes.max()),
            num_empty=int((sizes == 0).sum()),
            classes_per_client=float((nonempty_counts > 0).sum(1).mean())
            if len(nonempty_counts)
            else 0.0,
            majority_share=float((nonempty_counts.max(1) / nonempty_counts.sum(1)).mean())
            if len(nonempty_counts)
            else 0.0,
        )


@validate_arguments
def make_partition(
    scheme: str,
    labels: np.ndarray,
    num_classes: NumClasses,
    *,
    num_clients: PositiveInt,
    seed: Seed,
    domains: np.ndarray | None = None,
    domain_names: Sequence[str] = (),
    class_names: Sequence[str] = (),
    **parameters,
) -> Partition:
    """Split the training examples among `num_clients` clients by one of `PARTITIONS`.

    labels: [N] integers in [0, num_classes). `domains`, `domain_names` and `class_names` are the
    data set's, where it has any (see `Dataset`), for schemes that ask for them. `parameters` are
    those of the scheme's function, e.g. `alpha=0.1` for the Dirichlet ones (the package's are in
    `fedjax_het.data.partition_schemes`); `classes` and `classes_per_client` are the same. The
    same arguments give the same partition, independent of other uses of the seed (as long as
    NumPy's Generator keeps its streams: compare digests, or save the partition, across NumPy
    versions).

    The package's own schemes always end. Raises `ConfigError` naming the argument, its value and
    what is expected, also for a split that cannot be made, and for what a user's scheme returns.
    """
    partition_scheme = PARTITIONS.require(scheme)
    labels = validate_class_labels("labels", labels, num_classes)
    require(
        num_clients <= len(labels),
        "num_clients",
        num_clients,
        f"at most the number of training examples, {len(labels)}",
    )

    parameters = {find_parameter_name(scheme, name) or name: v for name, v in parameters.items()}
    parameters = partition_scheme.parameters | partition_scheme.validate_parameters(parameters)
    if partition_scheme.resolve_parameters is not None:
        parameters = partition_scheme.resolve_parameters(
            labels, int(num_classes), int(num_clients), class_names, **parameters
        )
    stream = np.random.SeedSequence(int(seed), spawn_key=(_PARTITION_STREAM,))
    data = {
        "rng": np.random.default_rng(stream),
        "labels": labels,
        "num_classes": int(num_classes),
        "num_clients": int(num_clients),
        "domains": domains,
        "domain_names": domain_names,
        "class_names": class_names,
    }
    clients = _validate_clients(
        partition_scheme,
        call_with_supported(partition_scheme.split, data, **parameters),
        int(num_clients),
        len(labels),
    )
    client_names = (
        _make_domain_client_names(num_clients, domain_names)
        if partition_scheme.clients_are_domains
        else ()
    )
    return partition_from_clients(
        clients, scheme=scheme, seed=int(seed), parameters=parameters, client_names=client_names
    )


def _validate_clients(
    scheme: PartitionScheme, clients: Any, num_clients: int, num_examples: int
) -> list[np.ndarray]:
    """What a scheme's function returned, as `num_clients` arrays of positions. ConfigError."""
    description = f"what partition {scheme.name!r} returns"
    try:
        arrays = [np.asarray(client) for client in clients]
    except (TypeError, ValueError) as error:
        reason = f"expected {num_clients} arrays of positions ({error})"
        raise ConfigError(f"{description} is a {type(clients).__name__}: {reason}") from error
    expected = f"{num_clients} arrays of positions, one for each client"
    require(len(arrays) == num_clients, f"length of {description}", len(arrays), expected)
    require(any(array.size for array in arrays), description, [], "at least one example")
    for client, positions in enumerate(arrays):
        name = f"{description} for client {client}"
        if positions.ndim == 1 and len(positions) == 0:
            continue
        ok = positions.ndim == 1 and np.issubdtype(positions.dtype, np.integer)
        actual = f"{positions.dtype} {positions.shape}"
        require(bool(ok), name, actual, "integers of rank 1, positions in the training set")
        is_outside = (positions < 0) | (positions >= num_examples)
        if is_outside.any():
            value = int(positions[int(is_outside.argmax())])
            raise ConfigError(f"{name} has {value}: expected positions in [0, {num_examples})")
    return arrays


def _make_domain_client_names(num_clients: int, domain_names: Sequence[str]) -> tuple[str, ...]:
    """The clients' names where each is a domain: numbers for those that have none."""
    return (*domain_names, *map(str, range(len(domain_names), num_clients)))


@validate_arguments
def partition_from_clients(
    clients: Iterable[np.ndarray],
    *,
    scheme: str = "user",
    seed: Seed = 0,
    parameters: dict[str, Any] | None = None,
    client_names: Sequence[str] = (),
) -> Partition:
    """A `Partition` from one array of training-set positions for each client.

    Raises `ConfigError`, which names the client, for what are no positions."""
    is_iterable = isinstance(clients, Iterable) and not isinstance(clients, str | bytes | Mapping)
    expected = "a list of arrays of positions in the training set, one for each client"
    require(is_iterable, "clients", clients, expected)
    arrays = [_sort_positions(f"clients[{k}]", client) for k, client in enumerate(clients)]
    require(len(arrays) >= 1, "clients", arrays, "at least one client")
    try:
        # Through JSON and back, so that a saved partition equals the one in memory.
        parameters = json.loads(json.dumps(parameters or {}, default=lambda value: value.item()))
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"parameters = {parameters!r}: expected JSON-able values") from error
    sizes = [len(positions) for positions in arrays]
    return Partition(
        scheme=scheme,
        seed=seed,
        parameters=parameters,
        indices=np.concatenate(arrays),
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        client_names=validate_names("client_names", client_names),
    )


def _sort_positions(argument: str, positions: Any) -> np.ndarray:
    """One client's, ascending, as int64. ConfigError."""
    array = to_array(argument, positions, "integers, positions in the training set")
    if array.ndim == 1 and len(array) == 0:  # an empty list is an array of floats
        return np.zeros(0, np.int64)
    ok = array.ndim == 1 and np.issubdtype(array.dtype, np.integer)
    actual = f"{array.dtype} {array.shape}"
    require(bool(ok), argument, actual, "integers of rank 1, positions in the training set")
    require(bool((array >= 0).all()), argument, f"{int(array.min())}, ...", "positions >= 0")
    return np.sort(array).astype(np.int64)


def validate_class_labels(argument: str, labels, num_classes: int) -> np.ndarray:
    labels = to_array(argument, labels, "integers of rank 1, at least one")
    ok = labels.ndim == 1 and len(labels) > 0 and np.issubdtype(labels.dtype, np.integer)
    require(ok, argument, f"{labels.dtype} {labels.shape}", "integers of rank 1, at least one")
    is_invalid = (labels < 0) | (labels >= num_classes)
    if is_invalid.any():
        position = int(is_invalid.argmax())
        raise ConfigError(
            f"{argument}[{position}] = {int(labels[position])}: expected a label in [0, {num_classes})"
        )
    return labels


# A stream of their own, so that who is held out does not depend on how a partition was drawn.
_HELD_OUT_STREAM = 0x4E1D


def draw_held_out_clients(partition: Partition, count: int, seed: int) -> np.ndarray:
    """Which of all clients are held out, ascending: drawn with the seed from those that hold
    examples. Raises ConfigError where there are no more of these than are to be held out."""
    eligible = np.flatnonzero(partition.sizes)
    max_count = len(eligible) - 1
    require(
        count <= max_count,
        "held_out_clients",
        count,
        f"at most {max_count} of {len(eligible)} that have data",
    )
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_HELD_OUT_STREAM,)))
    return np.sort(rng.choice(eligible, count, replace=False))


def select_clients(partition: Partition, clients: np.ndarray) -> Partition:
    """The same of these clients alone, which are numbered anew in this order."""
    client_indices = [partition.client_indices(int(k)) for k in clients]
    names = tuple(partition.client_names[int(k)] for k in clients if partition.client_names)
    return dataclasses.replace(
        partition,
        indices=np.concatenate(client_indices),
        offsets=np.concatenate([[0], np.cumsum([len(indices) for indices in client_indices])]),
        client_names=names,
    )
