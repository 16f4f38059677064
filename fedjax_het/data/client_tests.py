"""Test sets for each client, with the class mixture of the client's training data."""

import logging
from typing import Annotated, Literal

import numpy as np

from fedjax_het.data.dataset import Dataset
from fedjax_het.data.natural_partition import split_by_group
from fedjax_het.data.partition import Partition, partition_from_clients, validate_class_labels
from fedjax_het.data.partition_schemes import PARTITIONS
from fedjax_het.data.sampling import (
    DataStream,
    make_data_rng,
    shuffle_by_class,
    systematic_round,
    take_quota,
)
from fedjax_het.data.validation import NumClasses, Seed, to_user_ids
from fedjax_het.utils.array_validation import to_array
from fedjax_het.utils.config import Bounds, PositiveInt, validate_arguments
from fedjax_het.utils.errors import ConfigError, make_value_error, require

_log = logging.getLogger("fedjax_het")

_DEFAULT_TESTS_PER_CLIENT = 100  # as in FedAMP
_MIN_DEFAULT_TESTS = 10  # the default size leaves out classes that allow only smaller tests
_FEW_TESTS = 30  # a smaller default size is logged
MAX_TEST_EXAMPLES = 10**8  # in a test split: more positions would take gigabytes


@validate_arguments
def make_client_tests(
    partition: Partition,
    dataset: Dataset,
    seed: Seed,
    per_client: PositiveInt | Literal["all", "proportional"] | None = None,
) -> Partition:
    """Choose the test examples of each client.

    The rule depends on the partition and on `per_client`:

    * Clients that are domains are tested on all test examples of their domain
      (`make_domain_tests`).
    * Clients that are users are tested on all test examples of their user (`make_user_tests`), if
      the data set has users of test examples and `per_client` is None.
    * With `per_client="all"`, every client is tested on the whole test split (`make_full_tests`).
    * With `per_client="proportional"`, the clients share the whole test split in proportion to
      their training data (`make_proportional_tests`).
    * All other clients get `per_client` test examples with the class mixture of their training data
      (`draw_local_tests`).

    Args:
      partition: the training examples of each of the K clients.
      dataset: the data set of the partition.
      seed: seed of the draw, >= 0.
      per_client: number of test examples of each client, "all" or "proportional". Default: see
        `draw_local_tests`.

    Returns:
      A `Partition` of K clients with positions in the *test* split.

    Raises:
      ConfigError: if the clients are domains and the data set has none or `per_client` is set, or
        if the test split cannot supply `per_client` examples.

    Example:
      >>> import numpy as np
      >>> from fedjax_het import dataset_from_arrays, make_partition
      >>> from fedjax_het.data import make_client_tests
      >>> inputs, labels = np.zeros((60, 4, 4, 1), np.uint8), np.arange(60) % 3
      >>> dataset = dataset_from_arrays(inputs, labels, inputs, labels)
      >>> partition = make_partition("iid", labels, 3, num_clients=4, seed=0)
      >>> make_client_tests(partition, dataset, seed=0, per_client=6).sizes
      array([6, 6, 6, 6])
    """
    if has_domain_clients(partition):
        if dataset.test_domains is None:
            expected = "a data set whose examples have domains"
            raise make_value_error("dataset", dataset.name, expected)
        expected = "None: a client that is a domain is tested on all test examples of the domain"
        require(per_client is None, "per_client", per_client, expected)
        return make_domain_tests(partition, dataset.test_domains)
    scheme = PARTITIONS.get(partition.scheme)
    has_user_clients = scheme is not None and scheme.clients_are_users
    if has_user_clients and dataset.test_users is not None and per_client is None:
        return make_user_tests(partition, dataset.test_users)
    if per_client == "all":
        return make_full_tests(partition, len(dataset.test_labels))
    data = (partition, dataset.train_classes, dataset.test_classes, dataset.num_classes)
    if per_client == "proportional":
        return make_proportional_tests(*data, seed=seed)
    return draw_local_tests(*data, seed=seed, per_client=per_client)


def has_domain_clients(partition: Partition) -> bool:
    """Return whether client k holds domain k of the data set, by the partition's scheme."""
    scheme = PARTITIONS.get(partition.scheme)
    return scheme is not None and scheme.clients_are_domains


@validate_arguments
def draw_local_tests(
    partition: Partition,
    train_labels: np.ndarray,
    test_labels: np.ndarray,
    num_classes: NumClasses,
    *,
    seed: Seed,
    per_client: PositiveInt | None = None,
) -> Partition:
    """Draw test examples for each client with the class mixture of its training data.

    All tests come from the data set's test split, so no model is tested on an example that any
    client trained on. Each client gets `per_client` examples in the proportions of
    `compute_client_mixtures`: the number of each class is its exact expectation rounded up or down
    at random.

    The examples of one client are distinct. Clients share no example where the test split has
    enough of each class for all clients. A class with too few examples is reused once all of its
    examples are drawn; a warning reports it. The numbers of clients that share an example then
    differ by at most one. A client without training examples has no mixture and therefore no test.

    The result can be saved, digested and summarized like any partition, with the labels of the test
    split.

    Args:
      partition: the training examples of each of the K clients.
      train_labels: labels of the training split, integers `[N]` in [0, num_classes).
      test_labels: labels of the test split, integers `[N_test]` in [0, num_classes).
      num_classes: number of classes, C.
      seed: seed of the draw, >= 0. Equal arguments give equal tests.
      per_client: number of test examples of each client. Default: 100, as in FedAMP. The number is
        smaller for all clients if a client would need more examples of a class than the test split
        has. If it would be below 10, the tests leave out the classes with too few examples. A
        client that holds only such classes has a smaller test of them, and no test if the test
        split has none of them. A warning reports a number below 30.

    Returns:
      A `Partition` of K clients with positions in the *test* split.

    Raises:
      ConfigError: if a class has too few test examples for `per_client`, or if the test split has
        none of the clients' classes. Also if clients are domains, which differ in more than their
        classes; use `make_domain_tests` for them.

    Example:
      >>> import numpy as np
      >>> from fedjax_het import make_partition
      >>> from fedjax_het.data import draw_local_tests
      >>> labels = np.arange(60) % 3
      >>> partition = make_partition(
      ...     "classes_per_client", labels, 3, num_clients=3, seed=0, classes=1
      ... )
      >>> tests = draw_local_tests(partition, labels, labels, 3, seed=0, per_client=5)
      >>> tests.label_counts(labels, 3).max(axis=1)
      array([5, 5, 5])
    """
    test_labels = validate_class_labels("test_labels", test_labels, num_classes)
    expected = "a scheme by class (for clients that are domains, use make_domain_tests)"
    require(not has_domain_clients(partition), "partition", partition.scheme, expected)
    mixtures = compute_client_mixtures(partition, train_labels, num_classes)
    class_counts = np.bincount(test_labels, minlength=num_classes)
    max_per_client, client, label = _find_max_per_client(mixtures, class_counts)
    reason = (
        f"{mixtures[client, label]:.0%} of client {client}'s tests have class {label}, which has "
        f"{class_counts[label]} test examples"
        if num_classes > 1
        else f"there are {len(test_labels)} test examples"
    )
    sizes = np.where(partition.sizes > 0, per_client or 0, 0)
    if per_client is None:
        mixtures, sizes = _choose_default_tests(mixtures, class_counts, partition.sizes > 0, reason)
        per_client = int(sizes.max())
    elif per_client > max_per_client:
        expected = f"at most {max_per_client}" if max_per_client else "None"
        raise make_value_error("per_client", per_client, f"{expected}: {reason}")

    rng = make_data_rng(seed, DataStream.LOCAL_TESTS)
    counts = np.zeros(mixtures.shape, np.int64)
    for k in np.flatnonzero(partition.sizes):
        counts[k] = systematic_round(rng, mixtures[k], sizes[k])
    num_requested = counts.sum(0)
    if (num_requested > class_counts).any():
        scarcest_class = int(np.argmax(num_requested / np.maximum(class_counts, 1)))
        _log.warning(
            "clients' tests share examples: %d examples are drawn from %d test examples; an "
            "example%s is in the tests of up to %d clients",
            num_requested.sum(),
            len(test_labels),
            f" of class {scarcest_class}" if num_classes > 1 else "",
            -(-num_requested[scarcest_class] // class_counts[scarcest_class]),
        )
    # If n examples are repeated end to end, any n consecutive positions are distinct.
    pools = shuffle_by_class(rng, test_labels, num_classes)
    pools = [np.resize(pool, total) for pool, total in zip(pools, num_requested, strict=True)]
    return partition_from_clients(
        take_quota(pools, counts.T),
        scheme="local_tests",
        seed=seed,
        parameters={"per_client": per_client, "of": partition.digest()},
    )


@validate_arguments
def make_domain_tests(partition: Partition, test_domains: np.ndarray) -> Partition:
    """Test each client on all test examples of its own domain, for partitions by domain.

    Args:
      partition: the training examples of each of the K clients; client k holds domain k.
      test_domains: domain of each example of the test split, integers `[N_test]`.

    Returns:
      A `Partition` of K clients with positions in the *test* split.

    Raises:
      ConfigError: if a domain has no test examples.

    Example:
      >>> import numpy as np
      >>> from fedjax_het import make_partition
      >>> from fedjax_het.data import make_domain_tests
      >>> labels, domains = np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1])
      >>> partition = make_partition(
      ...     "by_domain", labels, 2, num_clients=2, seed=0, domains=domains
      ... )
      >>> make_domain_tests(partition, np.array([1, 0, 1])).client_indices(1)
      array([0, 2])
    """
    test_domains = to_array("test_domains", test_domains, "integers [N], a domain for each example")
    clients = [np.flatnonzero(test_domains == k) for k in range(partition.num_clients)]
    for domain, examples in enumerate(clients):
        require(len(examples) > 0, "test examples of domain", domain, "at least one")
    return partition_from_clients(
        clients,
        scheme="domain_tests",
        parameters={"of": partition.digest()},
        client_names=partition.client_names,
    )


@validate_arguments
def make_user_tests(partition: Partition, test_users: np.ndarray) -> Partition:
    """Test each client on all test examples of its own user, for the partition `natural`.

    Args:
      partition: the training examples of each of the K clients, whose names are users.
      test_users: user of each example of the test split, integers or texts `[N_test]`.

    Returns:
      A `Partition` of K clients with positions in the *test* split. A client without training
      examples, or whose user has no test example, has no test.

    Raises:
      ConfigError: if the clients have no names, or if no client has a test.

    Example:
      >>> import numpy as np
      >>> from fedjax_het import make_partition
      >>> from fedjax_het.data import make_user_tests
      >>> labels, users = np.array([0, 1, 0, 1]), np.array(["ann", "bob", "bob", "ann"])
      >>> partition = make_partition("natural", labels, 2, num_clients=2, seed=0, users=users)
      >>> make_user_tests(partition, np.array(["bob", "ann", "bob"])).client_indices(1)
      array([0, 2])
    """
    names = partition.client_names
    require(bool(names), "partition", partition.scheme, "a partition whose clients have names")
    users, owners = np.unique(to_user_ids("test_users", test_users), return_inverse=True)
    require(len(users) > 0, "test_users", [], "at least one test example")
    positions = dict(zip(map(str, users), split_by_group(owners, len(users)), strict=True))
    clients = [
        positions.get(name, np.arange(0)) if size else np.arange(0)
        for name, size in zip(names, partition.sizes, strict=True)
    ]
    require(any(map(len, clients)), "test_users", list(positions)[:5], "users that are clients")
    return partition_from_clients(
        clients,
        scheme="user_tests",
        parameters={"of": partition.digest()},
        client_names=names,
    )


@validate_arguments
def make_full_tests(
    partition: Partition, num_examples: Annotated[int, Bounds(0, MAX_TEST_EXAMPLES)]
) -> Partition:
    """Test each client on the whole test split.

    Args:
      partition: the training examples of each of the K clients.
      num_examples: number of examples in the test split.

    Returns:
      A `Partition` of K clients with positions in the *test* split. A client without training
      examples has no test.

    Example:
      >>> from fedjax_het.data import make_full_tests, partition_from_clients
      >>> partition = partition_from_clients([[0, 1], [2], []])
      >>> make_full_tests(partition, 10).sizes
      array([10, 10,  0])
    """
    all_examples, no_examples = np.arange(num_examples), np.arange(0)
    return partition_from_clients(
        [all_examples if size else no_examples for size in partition.sizes],
        scheme="whole_tests",
        parameters={"of": partition.digest()},
    )


@validate_arguments
def make_proportional_tests(
    partition: Partition,
    train_labels: np.ndarray,
    test_labels: np.ndarray,
    num_classes: NumClasses,
    *,
    seed: Seed,
) -> Partition:
    """Divide the whole test split among the clients, in proportion to their training data.

    The test examples of each class are shuffled and cut in proportion to the numbers of training
    examples of the class. The number of each client is its proportion rounded down or up. Clients
    share no test example, and every example of a class that a client holds belongs to one client.
    If the split has a fraction f of all examples, a client's test therefore has the fraction f of
    the client's examples of every class, up to rounding. PFLlib divides each client's examples
    75 : 25 at random instead, which keeps the proportions of classes in expectation.

    Args:
      partition: the training examples of each of the K clients.
      train_labels: labels of the training split, integers `[N]` in [0, num_classes).
      test_labels: labels of the test split, integers `[N_test]` in [0, num_classes).
      num_classes: number of classes, C.
      seed: seed of the draw, >= 0. Equal arguments give equal tests.

    Returns:
      A `Partition` of K clients with positions in the *test* split. A client with few examples may
      have no test.

    Raises:
      ConfigError: if clients are domains, or if no client has a test.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.data import make_proportional_tests, partition_from_clients
      >>> partition = partition_from_clients([[0, 1, 2], [3, 4, 5, 6, 7, 8]])
      >>> train_labels, test_labels = np.array([0, 0, 0, 0, 0, 0, 1, 1, 1]), np.array([0, 0, 1])
      >>> tests = make_proportional_tests(partition, train_labels, test_labels, 2, seed=0)
      >>> tests.label_counts(test_labels, 2)
      array([[1, 0],
             [1, 1]])
    """
    test_labels = validate_class_labels("test_labels", test_labels, num_classes)
    expected = "a scheme by class (for clients that are domains, use make_domain_tests)"
    require(not has_domain_clients(partition), "partition", partition.scheme, expected)
    cumulative = partition.label_counts(train_labels, num_classes).cumsum(0)  # [K, C]
    class_counts = np.bincount(test_labels, minlength=num_classes)
    ends = cumulative * class_counts // np.maximum(cumulative[-1], 1)
    expected = "an example of a class that a client holds"
    require(not len(partition.indices) or ends[-1].any(), "test_labels", test_labels, expected)
    rng = make_data_rng(seed, DataStream.LOCAL_TESTS)
    pools = shuffle_by_class(rng, test_labels, num_classes)
    clients = take_quota(
        [pool[:end] for pool, end in zip(pools, ends[-1], strict=True)],
        np.diff(ends, axis=0, prepend=0).T,
    )
    return partition_from_clients(
        clients,
        scheme="proportional_tests",
        seed=seed,
        parameters={"of": partition.digest()},
    )


@validate_arguments
def compute_client_mixtures(
    partition: Partition, labels: np.ndarray, num_classes: NumClasses
) -> np.ndarray:
    """Compute the class proportions from which each client's training data are drawn.

    For `iid` they are the proportions of the whole training set. For `grouped` they are the
    proportions of the client's group, exactly 80/20 by default. For any other partition they are
    the proportions of the examples that the client holds.

    Args:
      partition: the training examples of each of the K clients.
      labels: labels of the training split, integers `[N]` in [0, num_classes).
      num_classes: number of classes, C.

    Returns:
      Proportions, float64 `[K, C]`. Each row sums to 1; the row of a client without examples is
      zero where proportions are counted.

    Raises:
      ConfigError: if the labels do not belong to the partition, or if the scheme of the partition
        does not have its parameters.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.data import compute_client_mixtures, partition_from_clients
      >>> partition = partition_from_clients([[0, 1, 2, 3], [4]])
      >>> compute_client_mixtures(partition, np.array([0, 0, 0, 1, 1]), 2)
      array([[0.75, 0.25],
             [0.  , 1.  ]])
    """
    counts = partition.label_counts(labels, num_classes)
    scheme = PARTITIONS.get(partition.scheme)
    if scheme is not None and scheme.mixtures is not None:
        data = (np.asarray(labels), num_classes, partition.num_clients)
        try:
            mixtures = np.asarray(scheme.mixtures(*data, **partition.parameters))
        except TypeError as error:
            raise ConfigError(
                f"partition.parameters = {partition.parameters!r}: expected the parameters that "
                f"make_partition stores in a {partition.scheme!r} partition"
            ) from error
        description = f"shape of the mixtures of partition {partition.scheme!r}"
        require(mixtures.shape == counts.shape, description, mixtures.shape, f"{counts.shape}")
        return mixtures
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)


@validate_arguments
def get_client_groups(partition: Partition) -> np.ndarray:
    """Return the group of each client, for a partition that divides clients into groups.

    Args:
      partition: a partition with the parameter `clients_per_group`, such as `grouped`.

    Returns:
      Group numbers from 0, int64 `[K]`.

    Raises:
      ConfigError: if the partition has no parameter `clients_per_group`.

    Example:
      >>> import numpy as np
      >>> from fedjax_het import make_partition
      >>> from fedjax_het.data import get_client_groups
      >>> labels = np.arange(3000) % 3
      >>> partition = make_partition(
      ...     "grouped", labels, 3, num_clients=4, seed=0, groups=[[0], [1, 2]]
      ... )
      >>> get_client_groups(partition)
      array([0, 1, 1, 1])
    """
    parameters = partition.parameters
    expected = "clients_per_group, as make_partition stores it in a 'grouped' partition"
    require("clients_per_group" in parameters, "partition.parameters", parameters, expected)
    sizes = parameters["clients_per_group"]
    return np.repeat(np.arange(len(sizes)), sizes)


def _choose_default_tests(
    mixtures: np.ndarray, class_counts: np.ndarray, has_examples: np.ndarray, reason: str
) -> tuple[np.ndarray, np.ndarray]:
    """Choose mixtures and sizes of tests of the default size.

    Args:
      mixtures: class proportions of the clients, floats `[K, C]`.
      class_counts: number of test examples of each class, integers `[C]`.
      has_examples: whether each client has training examples, bools `[K]`.
      reason: the client and the class that bound the size, for the warning.

    Returns:
      `(mixtures, sizes)`: proportions `[K, C]` and numbers of test examples `[K]`.
    """
    reduced = mixtures.copy()
    # Other classes have larger proportions without a rare class, and may then be too rare.
    while (is_rare := _find_max_tests(reduced, class_counts) < _MIN_DEFAULT_TESTS).any():
        reduced[is_rare] = 0
        reduced = _normalize_rows(reduced)
    size = min(_DEFAULT_TESTS_PER_CLIENT, _find_max_per_client(reduced, class_counts)[0])
    sizes = np.where(has_examples, size, 0)
    has_rare_classes_only = has_examples & ~reduced.any(1)
    if has_rare_classes_only.any():
        present = _normalize_rows(mixtures * (class_counts > 0))
        reduced[has_rare_classes_only] = present[has_rare_classes_only]
        max_tests = np.minimum(_find_max_tests(reduced, class_counts).min(1) + 1e-9, size)
        max_tests = np.where(reduced.any(1), max_tests, 0).astype(np.int64)
        sizes = np.where(has_rare_classes_only, max_tests, sizes)
    if has_examples.any() and not sizes.any():
        raise ConfigError(f"test_labels: expected a class that a client holds: {reason}")
    is_changed = has_examples & (np.abs(reduced - mixtures) > 1e-9).any(1)
    num_small = int((has_examples & (sizes < size)).sum())
    if is_changed.any() or num_small:
        omitted = np.flatnonzero(((mixtures > 0) & (reduced == 0))[has_examples].any(0))
        _log.warning(
            "clients' tests have %d examples; the tests of %d clients leave out classes with too few "
            "test examples (number of examples by class: %s); %d clients have smaller tests (%s)",
            size,
            is_changed.sum(),
            {int(label): int(class_counts[label]) for label in omitted},
            num_small,
            reason,
        )
    elif size < _FEW_TESTS:
        _log.warning("clients' tests have %d examples each: %s", size, reason)
    return reduced, sizes


def _normalize_rows(mixtures: np.ndarray) -> np.ndarray:
    """Divide each row by its sum; rows of zeros stay."""
    sums = mixtures.sum(1, keepdims=True)
    return np.divide(mixtures, sums, out=np.zeros_like(mixtures), where=sums > 0)


def _find_max_tests(mixtures: np.ndarray, class_counts: np.ndarray) -> np.ndarray:
    """Return the largest size of each client's test that each class allows, floats `[K, C]`."""
    bounds = np.full(mixtures.shape, np.inf)
    return np.divide(class_counts, mixtures, out=bounds, where=mixtures > 0)


def _find_max_per_client(mixtures, class_counts) -> tuple[int, int, int]:
    """Return the largest feasible `per_client`, and the client and class that bound it."""
    bounds = _find_max_tests(mixtures, class_counts)
    client, label = np.unravel_index(np.argmin(bounds), bounds.shape)
    # If no client holds examples, no test is too large. 1e-9 corrects 36 / 0.4 = 89.99...
    max_per_client = min(bounds[client, label] + 1e-9, MAX_TEST_EXAMPLES)
    return int(max_per_client), int(client), int(label)
