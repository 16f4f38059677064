"""Partitions: the training examples that each client holds, as a partition scheme divides them.

Held-out clients take no part in training; they are drawn here, too.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedjax_het.data.heterogeneity import (
    compute_entropies,
    compute_gini,
    compute_hellinger_distance,
    compute_jensen_shannon_distance,
    compute_total_variation,
)
from fedjax_het.data.partition_schemes import PARTITIONS, find_parameter_name
from fedjax_het.data.sampling import DataStream, make_data_rng
from fedjax_het.data.validation import NumClasses, Seed, require_positions, validate_users
from fedjax_het.utils.array_validation import require_below, to_integers
from fedjax_het.utils.config import PositiveInt, validate, validate_arguments
from fedjax_het.utils.errors import ConfigError, describe_error, require
from fedjax_het.utils.io import DamagedFileError, read_npz, write_npz
from fedjax_het.utils.registry import call_with_supported
from fedjax_het.utils.text import make_html_table


@dataclass(frozen=True)
class PartitionSummary:
    """Statistics of a partition; `str` of it is one line.

    The means over clients exclude clients without examples.

    Attributes:
      num_clients: number of clients, K.
      num_examples: number of examples that clients hold.
      num_unused: number of examples of the data set that no client holds.
      size_min: number of examples of the smallest client.
      size_median: median number of examples of a client.
      size_mean: mean number of examples of a client.
      size_max: number of examples of the largest client.
      num_empty: number of clients without examples.
      classes_per_client: mean number of classes of which a client has at least one example.
      majority_share: mean fraction of a client's examples in its most frequent class.
      label_hellinger: Hellinger distance of the clients' class distributions, in [0, 1]; 0 for
        equal distributions, see `fedjax_het.data.heterogeneity`.
      label_jensen_shannon: Jensen-Shannon distance of the clients' class distributions, in [0, 1].
      label_total_variation: mean total variation distance of the clients' class distributions from
        the distribution of all clients' examples, in [0, 1].
      effective_classes: mean exponential of the entropy of a client's classes, in [1, C]. A client
        with m classes in equal numbers has m.
      size_gini: Gini coefficient of the clients' numbers of examples, in [0, 1). Clients without
        examples count.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.data import partition_from_clients
      >>> partition = partition_from_clients([[0, 1], [2, 3]])
      >>> print(partition.summarize(np.array([0, 1, 1, 1]), num_classes=2))
      2 clients hold 4 examples: 2 to 2 each (median 2, mean 2.0), 1.5 classes, majority share 75%;
      label skew: Hellinger 0.54, Jensen-Shannon 0.56, total variation 0.25; size Gini 0.00
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
    label_hellinger: float
    label_jensen_shannon: float
    label_total_variation: float
    effective_classes: float
    size_gini: float

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
        return (
            f"{text}; label skew: Hellinger {self.label_hellinger:.2f}, Jensen-Shannon "
            f"{self.label_jensen_shannon:.2f}, total variation {self.label_total_variation:.2f}; "
            f"size Gini {self.size_gini:.2f}"
        )


@dataclass(frozen=True, eq=False)
class Partition:
    """Positions of the examples of every client in the training set.

    A partition of local tests has positions in the test set instead, and its labels are test
    labels. Both arrays are read-only.

    Attributes:
      scheme: name of the partition scheme, e.g. "dirichlet", or "user".
      seed: seed of the draw.
      parameters: parameters of the scheme, values that JSON can store.
      indices: positions, int64 `[M]`, ordered by client and ascending within a client.
      offsets: int64 `[K + 1]`; client k holds `indices[offsets[k]:offsets[k + 1]]`, which may be
        empty.
      client_names: name of each client, or (). Clients that are domains or users have their names.

    Raises:
      ConfigError: if the arrays do not fit together.

    Example:
      >>> from fedjax_het.data import partition_from_clients
      >>> partition = partition_from_clients([[4, 0], [], [2]])
      >>> partition.num_clients, partition.client_indices(0)
      (3, array([0, 4]))
      >>> partition.sizes
      array([2, 0, 1])
    """

    CONSTRUCTORS: ClassVar[str] = (
        "partition_from_clients([positions of client 0, ...]) or make_partition return"
    )

    scheme: str
    seed: int
    parameters: dict
    indices: np.ndarray
    offsets: np.ndarray
    client_names: tuple[str, ...] = ()

    def __post_init__(self):
        kinds = {"scheme": str, "seed": Seed, "parameters": dict[str, Any]}
        for name, kind in {**kinds, "client_names": tuple[str, ...]}.items():
            object.__setattr__(self, name, validate(name, getattr(self, name), kind))
        for name in ("indices", "offsets"):
            array = to_integers(name, getattr(self, name))
            array = np.ascontiguousarray(array, dtype=np.int64).view()
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        offsets = self.offsets
        is_valid = len(offsets) >= 2 and offsets[0] == 0 and offsets[-1] == len(self.indices)
        is_valid = is_valid and bool((np.diff(offsets) >= 0).all())
        expected = f"0, then ascending to len(indices) = {len(self.indices)}"
        require(is_valid, "offsets", offsets.tolist(), expected)
        smallest = int(self.indices.min(initial=0))
        require(smallest >= 0, "indices", smallest, ">= 0")
        names = self.client_names
        is_valid = len(set(names)) == len(names) in (0, self.num_clients)
        require(is_valid, "client_names", names, f"none, or {self.num_clients} different names")

    @property
    def num_clients(self) -> int:
        """Number of clients, K."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """Number of examples of each client, int64 `[K]`."""
        return np.diff(self.offsets)

    def __repr__(self) -> str:
        return f"Partition({', '.join(f'{name} {value}' for name, value in self._describe())})"

    def _repr_html_(self) -> str:
        return make_html_table(self._describe())

    def _describe(self) -> list[tuple[str, object]]:
        """Return the scheme, its parameters and the sizes in words."""
        smallest, median, largest = np.quantile(self.sizes, (0, 0.5, 1))
        return [
            ("scheme", self.scheme),
            *self.parameters.items(),
            ("seed", self.seed),
            ("clients", self.num_clients),
            ("examples per client", f"{smallest:g} to {largest:g}, median {median:g}"),
        ]

    @validate_arguments
    def client_indices(self, k: int) -> np.ndarray:
        """Return the examples of one client.

        Args:
          k: client, from 0.

        Returns:
          Positions in the training set, int64, ascending.

        Raises:
          ConfigError: if there is no client k.
        """
        require(0 <= k < self.num_clients, "k", k, f"an integer in [0, {self.num_clients})")
        return self.indices[self.offsets[k] : self.offsets[k + 1]]

    def digest(self) -> str:
        """Return the SHA-256 of the examples of each client, in hexadecimal.

        Client names, scheme, seed and parameters do not enter.
        """
        sha = hashlib.sha256(self.offsets.astype("<i8").tobytes())
        sha.update(self.indices.astype("<i8").tobytes())
        return sha.hexdigest()

    @validate_arguments
    def save(self, path: str | os.PathLike) -> Path:
        """Write the partition to a checksummed .npz file, completely or not at all.

        Args:
          path: path of the file.

        Returns:
          The path.

        Raises:
          OSError: if the file cannot be written.
        """
        path = Path(path)
        meta = {"scheme": self.scheme, "seed": self.seed, "parameters": self.parameters}
        if self.client_names:
            meta["client_names"] = self.client_names
        write_npz(path, {"indices": self.indices, "offsets": self.offsets}, meta)
        return path

    @classmethod
    @validate_arguments
    def load(cls, path: str | os.PathLike) -> "Partition":
        """Read a file that `save` wrote.

        Args:
          path: path of the file.

        Returns:
          The partition.

        Raises:
          ConfigError: if the file cannot be read, is damaged, or holds no partition.
        """
        try:
            arrays, meta = read_npz(Path(path))
            return cls(**{**meta, **arrays})
        except (DamagedFileError, OSError) as error:
            raise ConfigError(f"partition file cannot be read: {error}") from error
        except TypeError as error:
            raise ConfigError(f"{path} holds no partition ({error})") from error

    @validate_arguments
    def label_counts(self, labels: np.ndarray, num_classes: NumClasses) -> np.ndarray:
        """Count the examples of each class of each client.

        Args:
          labels: labels of the training set, integers `[N]` in [0, num_classes).
          num_classes: number of classes, C.

        Returns:
          Counts, int64 `[K, C]`.

        Raises:
          ConfigError: if the labels are invalid, or fewer than the partition needs.
        """
        labels = validate_class_labels("labels", labels, num_classes)
        largest = int(self.indices.max(initial=-1))
        expected = f"more than {largest}, or the partition of another data set"
        require(largest < len(labels), "len(labels)", len(labels), expected)
        owners = np.repeat(np.arange(self.num_clients), self.sizes)
        cells = owners * num_classes + labels[self.indices]
        counts = np.bincount(cells, minlength=self.num_clients * num_classes)
        return counts.reshape(self.num_clients, num_classes)

    @validate_arguments
    def summarize(self, labels: np.ndarray, num_classes: NumClasses) -> PartitionSummary:
        """Compute sizes, classes per client and majority share.

        Args:
          labels: labels of the training set, integers `[N]` in [0, num_classes).
          num_classes: number of classes.

        Returns:
          The statistics; `str` of them is one line.

        Raises:
          ConfigError: if the labels are invalid, or fewer than the partition needs.
        """
        counts, sizes = self.label_counts(labels, num_classes), self.sizes
        counts = counts[sizes > 0] if sizes.any() else counts
        distributions = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        pooled = counts.sum(0) / max(counts.sum(), 1)
        return PartitionSummary(
            num_clients=self.num_clients,
            num_examples=len(self.indices),
            num_unused=int((np.bincount(self.indices, minlength=len(labels)) == 0).sum()),
            size_min=int(sizes.min()),
            size_median=float(np.median(sizes)),
            size_mean=float(sizes.mean()),
            size_max=int(sizes.max()),
            num_empty=int((sizes == 0).sum()),
            classes_per_client=float((counts > 0).sum(1).mean()),
            majority_share=float(distributions.max(1).mean()),
            label_hellinger=compute_hellinger_distance(distributions),
            label_jensen_shannon=compute_jensen_shannon_distance(distributions),
            label_total_variation=compute_total_variation(distributions, pooled),
            effective_classes=float(np.exp(compute_entropies(distributions)).mean()),
            size_gini=compute_gini(sizes),
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
    users: np.ndarray | None = None,
    **parameters,
) -> Partition:
    """Divide the training examples among clients by a partition scheme.

    Equal arguments give equal partitions, independent of other uses of the seed, as long as NumPy's
    Generator keeps its streams. Across NumPy versions, compare digests or save the partition. The
    package's own schemes always terminate.

    Args:
      scheme: name of the scheme, one of `PARTITIONS`.
      labels: training labels, integers `[N]` in [0, num_classes).
      num_classes: number of classes.
      num_clients: number of clients, K <= N.
      seed: seed of the draw, >= 0.
      domains: domain of each training example, integers `[N]`, for schemes that use domains.
      domain_names: name of each domain, see `Dataset`.
      class_names: name of each class, see `Dataset`.
      users: user of each training example, integers or texts `[N]`, for the scheme `natural`.
      **parameters: parameters of the scheme's function, e.g. `alpha=0.1` for the Dirichlet schemes
        (see `fedjax_het.data.partition_schemes`). `classes` and `classes_per_client` are synonyms.

    Returns:
      The partition of K clients.

    Raises:
      ConfigError: if an argument is invalid, if no split exists for it, or if a user's scheme
        fails or returns an invalid split.

    Example:
      >>> import numpy as np
      >>> from fedjax_het import make_partition
      >>> labels = np.arange(60) % 3
      >>> partition = make_partition("dirichlet", labels, 3, num_clients=4, seed=0, alpha=0.5)
      >>> partition.num_clients, int(partition.sizes.sum())
      (4, 60)
    """
    partition_scheme = PARTITIONS.require(scheme)
    labels = validate_class_labels("labels", labels, num_classes)
    expected = f"at most the number of training examples, {len(labels)}"
    require(num_clients <= len(labels), "num_clients", num_clients, expected)

    parameters = {find_parameter_name(scheme, name) or name: v for name, v in parameters.items()}
    parameters = partition_scheme.parameters | partition_scheme.validate_parameters(parameters)
    if partition_scheme.resolve_parameters is not None:
        parameters = partition_scheme.resolve_parameters(
            labels, num_classes, num_clients, class_names, **parameters
        )
    rng = make_data_rng(seed, DataStream.PARTITION)
    data = dict(rng=rng, labels=labels, num_classes=num_classes, num_clients=num_clients)
    data |= dict(domains=domains, domain_names=domain_names, class_names=class_names)
    if users is not None:
        users, _ = validate_users({"users": users, "test_users": None}, (labels, labels))
    data |= dict(users=users)
    try:
        with np.errstate(under="ignore"):  # proportions may underflow to 0
            clients = call_with_supported(partition_scheme.split, data, **parameters)
            clients = list(clients) if isinstance(clients, Iterator) else clients
    except ConfigError:
        raise
    except Exception as error:
        reason = describe_error(error)[:300]
        raise ConfigError(f"partition {scheme!r} fails ({reason})") from error
    description = f"return value of partition {scheme!r}"
    expected = f"{num_clients} arrays of positions, one for each client"
    require(isinstance(clients, Iterable), description, clients, expected)
    clients = list(clients)
    require(len(clients) == num_clients, f"length of {description}", len(clients), expected)
    clients = [
        require_positions(f"{description} for client {client}", positions, len(labels))
        for client, positions in enumerate(clients)
    ]
    require(any(map(len, clients)), description, [], "at least one example")
    client_names: tuple[str, ...] = ()
    if partition_scheme.clients_are_domains:  # a domain without a name is named by its number
        client_names = (*domain_names, *map(str, range(len(domain_names), num_clients)))
    if partition_scheme.clients_are_users and users is not None:
        client_names = tuple(str(users[own[0]]) for own in clients)
    partition = partition_from_clients(
        clients, scheme=scheme, seed=seed, parameters=parameters, client_names=client_names
    )
    return require_distinct_examples(partition)


@validate_arguments
def partition_from_clients(
    clients: Iterable[np.ndarray],
    *,
    scheme: str = "user",
    seed: Seed = 0,
    parameters: dict[str, Any] | None = None,
    client_names: Sequence[str] = (),
) -> Partition:
    """Build a `Partition` from the positions of each client's examples.

    Args:
      clients: for each client, its positions in the training set, integers >= 0.
      scheme: name of the scheme, shown in results.
      seed: seed with which the positions were drawn.
      parameters: parameters of the scheme, values that JSON can store.
      client_names: name of each client, or ().

    Returns:
      The partition, with ascending positions within each client.

    Raises:
      ConfigError: if the positions of a client are invalid; the message names the client.

    Example:
      >>> from fedjax_het.data import partition_from_clients
      >>> partition_from_clients([[3, 1], [2]]).indices
      array([1, 3, 2])
    """
    is_iterable = isinstance(clients, Iterable) and not isinstance(clients, str | bytes | Mapping)
    expected = "a list of arrays of positions in the training set, one for each client"
    require(is_iterable, "clients", clients, expected)
    expected = "integers of rank 1, positions in the training set"
    arrays = [to_integers(f"clients[{k}]", client, expected) for k, client in enumerate(clients)]
    for k, positions in enumerate(arrays):
        smallest = int(positions.min(initial=0))
        require(smallest >= 0, f"clients[{k}]", f"{smallest}, ...", "positions >= 0")
    require(len(arrays) >= 1, "clients", arrays, "at least one client")
    try:
        # Convert to JSON and back, so that a saved partition equals the one in memory.
        parameters = json.loads(json.dumps(parameters or {}, default=lambda value: value.item()))
    except (TypeError, ValueError, AttributeError) as error:
        expected = "expected values that JSON can store"
        raise ConfigError(f"parameters = {parameters!r}: {expected}") from error
    sizes = [len(positions) for positions in arrays]
    return Partition(
        scheme=scheme,
        seed=seed,
        parameters=parameters,
        indices=np.concatenate([np.sort(positions).astype(np.int64) for positions in arrays]),
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        client_names=tuple(client_names),
    )


def require_distinct_examples(partition: Partition) -> Partition:
    """Require each client to hold an example at most once; clients may share examples.

    Args:
      partition: the examples of each client.

    Returns:
      The partition.

    Raises:
      ConfigError: if a client holds an example twice; the message names both.
    """
    owners = np.repeat(np.arange(partition.num_clients), partition.sizes)
    ordered = partition.indices[np.lexsort((partition.indices, owners))]
    is_repeated = (np.diff(ordered) == 0) & (np.diff(owners) == 0)
    if is_repeated.any():
        first = int(is_repeated.argmax())
        client, position = int(owners[first]), int(ordered[first])
        count = int((partition.client_indices(client) == position).sum())
        raise ConfigError(
            f"partition {partition.scheme!r}: client {client} holds example {position} {count} "
            "times: expected different examples"
        )
    return partition


def validate_class_labels(argument: str, labels, num_classes: int) -> np.ndarray:
    """Check labels against the number of classes.

    Args:
      argument: name of the argument, for messages.
      labels: integers `[N]`, N >= 1.
      num_classes: number of classes.

    Returns:
      The labels as an array.

    Raises:
      ConfigError: if the labels are not integers `[N]` in [0, num_classes).
    """
    labels = to_integers(argument, labels, "integers of rank 1, at least one")
    require(len(labels) > 0, argument, [], "integers of rank 1, at least one")
    require_below(argument, labels, num_classes)
    return labels


def draw_held_out_clients(partition: Partition, count: int, seed: int) -> np.ndarray:
    """Draw the clients that take no part in training, from the clients that have examples.

    Args:
      partition: the training examples of each client.
      count: number of clients to hold out.
      seed: seed of the draw, >= 0.

    Returns:
      Client numbers, int64 `[count]`, ascending.

    Raises:
      ConfigError: if no client with examples would be left for training.
    """
    eligible = np.flatnonzero(partition.sizes)
    max_count = len(eligible) - 1
    expected = f"at most {max_count} of the {len(eligible)} clients that have examples"
    require(count <= max_count, "held_out_clients", count, expected)
    rng = make_data_rng(seed, DataStream.HELD_OUT_CLIENTS)
    return np.sort(rng.choice(eligible, count, replace=False))


def withhold_validation_examples(
    partition: Partition, fraction: float, seed: int
) -> tuple[Partition, Partition]:
    """Withhold a fraction of each client's training examples for validation.

    Client k with n_k examples withholds `floor(fraction * n_k + 1/2)` examples, drawn uniformly
    without replacement, and keeps at least one. Examples of several clients are never withheld, so
    that no client trains on another client's validation examples.

    Args:
      partition: the training examples of each client.
      fraction: fraction of each client's examples, in (0, 1).
      seed: seed of the draw, >= 0.

    Returns:
      `(training, validation)`: the remaining and the withheld examples of each client. Both have
      positions in the training set.

    Raises:
      ConfigError: if no client can withhold an example.

    Example:
      >>> from fedjax_het.data import partition_from_clients
      >>> from fedjax_het.data.partition import withhold_validation_examples
      >>> partition = partition_from_clients([range(10), range(10, 30), [30]])
      >>> training, validation = withhold_validation_examples(partition, 0.2, seed=0)
      >>> training.sizes, validation.sizes
      (array([ 8, 16,  1]), array([2, 4, 0]))
    """
    rng = make_data_rng(seed, DataStream.VALIDATION_EXAMPLES)
    num_holders = np.bincount(partition.indices)
    is_withheld = np.zeros(len(partition.indices), bool)
    for start, size in zip(partition.offsets[:-1], partition.sizes, strict=True):
        count = min(int(fraction * size + 0.5), max(size - 1, 0))
        own = start + np.flatnonzero(num_holders[partition.indices[start : start + size]] == 1)
        is_withheld[rng.permutation(own)[:count]] = True
    expected = "a larger fraction: no client has enough examples of its own to withhold one"
    require(bool(is_withheld.any()), "validation", fraction, expected)
    num_withheld = np.concatenate([[0], np.cumsum(is_withheld)])[partition.offsets]
    training = dataclasses.replace(
        partition,
        indices=partition.indices[~is_withheld],
        offsets=partition.offsets - num_withheld,
    )
    validation = dataclasses.replace(
        partition, indices=partition.indices[is_withheld], offsets=num_withheld
    )
    return training, validation


def select_clients(partition: Partition, clients: np.ndarray) -> Partition:
    """Return the partition of some of the clients, renumbered in the order of `clients`.

    Args:
      partition: the partition of K clients.
      clients: client numbers, integers `[S]` in [0, K).

    Returns:
      The partition of S clients.
    """
    return dataclasses.replace(
        partition,
        indices=np.concatenate([partition.client_indices(int(k)) for k in clients]),
        offsets=np.concatenate([[0], np.cumsum(partition.sizes[clients])]),
        client_names=tuple(partition.client_names[k] for k in clients if partition.client_names),
    )
