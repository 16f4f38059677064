"""A test set for each client, with the class mixture of its training data."""

import logging
from typing import Annotated, Literal

import numpy as np

from fedjax_het.data.dataset import Dataset
from fedjax_het.data.partition import Partition, partition_from_clients, validate_class_labels
from fedjax_het.data.partition_registry import PARTITIONS
from fedjax_het.data.quota_sampling import shuffle_by_class, systematic_round, take_quota
from fedjax_het.data.validation import NumClasses, Seed, to_array
from fedjax_het.utils.config import Bounds, PositiveInt
from fedjax_het.utils.errors import ConfigError, is_integer_at_least, require
from fedjax_het.utils.validation import validate_arguments

_log = logging.getLogger(__name__)

# A stream of their own, so that tests do not depend on how many draws a partition took.
_LOCAL_TEST_STREAM = 0x7E57

_DEFAULT_TESTS_PER_CLIENT = 100  # FedAMP's
MAX_TEST_EXAMPLES = 10**8  # of a test split: more would take gigabytes to number


@validate_arguments
def make_client_tests(
    partition: Partition,
    dataset: Dataset,
    seed: Seed,
    per_client: PositiveInt | Literal["all"] | None = None,
) -> Partition:
    """Which test examples each client is tested on: a `Partition` of positions in the *test* split.

    All of its domain's where clients are domains (`make_domain_tests`); the whole test split for
    everyone with `per_client` "all" (`make_full_tests`); else `per_client` of them, with the class
    mixture of its training data, drawn with the seed (`local_tests`). Raises `ConfigError`.
    """
    if has_domain_clients(partition):
        if dataset.test_domains is None:
            raise ConfigError(f"dataset = {dataset.name!r}: expected one whose images have domains")
        return make_domain_tests(partition, dataset.test_domains, per_client=per_client)
    if per_client == "all":
        return make_full_tests(partition, len(dataset.test_labels))
    return draw_local_tests(
        partition,
        dataset.train_labels,
        dataset.test_labels,
        dataset.num_classes,
        seed=seed,
        per_client=per_client,
    )


def has_domain_clients(partition: Partition) -> bool:
    """Whether client k holds the data set's domain k, by the record of the partition's scheme."""
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
    per_client: PositiveInt | Literal["all"] | None = None,
) -> Partition:
    """Which test examples each client is tested on: a `Partition` of positions in the *test* split.

    All are from the data set's test split, so no model is tested on an example that any client
    trained on. Each client gets `per_client` of them in the proportions of `compute_client_mixtures`: the
    number of each class is its exact expectation rounded up or down at random.

    per_client: by default 100 (FedAMP's), or fewer for all where some client would need more of
        a class than the test split has.

    A client's examples are distinct. Clients share none where the test split has enough of each
    class for all; of a class that has too few, examples are given out again once all have been, so
    that the numbers of clients that share one differ by at most one (a warning says so). A client
    without training examples has no mixture and no test.

    Save, digest and describe it like any partition, with the labels of the test split. The same
    arguments give the same tests. Raises `ConfigError` for a `per_client` that a class cannot
    give, and where clients are domains, which differ in more than classes: see `make_domain_tests`.
    """
    test_labels = validate_class_labels("test_labels", test_labels, num_classes)
    require(is_integer_at_least(seed, 0), "seed", seed, "an integer >= 0")
    require(
        not has_domain_clients(partition),
        "partition",
        partition.scheme,
        "a scheme by class; for clients of domains there is make_domain_tests",
    )
    mixtures = compute_client_mixtures(partition, train_labels, num_classes)
    class_counts = np.bincount(test_labels, minlength=num_classes)
    max_per_client, client, label = _find_max_per_client(mixtures, class_counts)
    if per_client is None:
        per_client = max(1, min(_DEFAULT_TESTS_PER_CLIENT, max_per_client))
    if isinstance(per_client, str) or not is_integer_at_least(per_client, 1):
        raise ConfigError(f"per_client = {per_client!r}: expected an integer >= 1")
    require(
        per_client <= max_per_client,
        "per_client",
        per_client,
        f"at most {max_per_client}: {mixtures[client, label]:.0%} of client {client}'s tests are of class "
        f"{label}, of which there are {class_counts[label]} test examples",
    )

    stream = np.random.SeedSequence(int(seed), spawn_key=(_LOCAL_TEST_STREAM,))
    rng = np.random.default_rng(stream)
    counts = np.zeros(mixtures.shape, np.int64)
    for k in np.flatnonzero(partition.sizes):
        counts[k] = systematic_round(rng, mixtures[k], per_client)
    num_requested = counts.sum(0)
    if (num_requested > class_counts).any():
        scarcest_class = int(np.argmax(num_requested / np.maximum(class_counts, 1)))
        _log.warning(
            "local tests share examples: %d are asked of %d test examples; those of class %d are "
            "in up to %d clients' tests",
            num_requested.sum(),
            len(test_labels),
            scarcest_class,
            -(-num_requested[scarcest_class] // class_counts[scarcest_class]),
        )
    # Repeated end to end, a class of n examples has no example twice in any run of n.
    pools = shuffle_by_class(rng, test_labels, num_classes)
    pools = [np.resize(pool, total) for pool, total in zip(pools, num_requested, strict=True)]
    return partition_from_clients(
        take_quota(pools, counts.T),
        scheme="local_tests",
        seed=int(seed),
        parameters={"per_client": int(per_client), "of": partition.digest()},
    )


@validate_arguments
def make_domain_tests(
    partition: Partition,
    test_domains: np.ndarray,
    *,
    per_client: PositiveInt | Literal["all"] | None = None,
) -> Partition:
    """The same where clients are domains: each is tested on all test images of its own.

    test_domains: [N_test], of the test split. Raises `ConfigError` for a domain without test
    images, and for a `per_client`: these tests are as large as they are.
    """
    expected = "nothing: clients of domains are tested on all test images of theirs"
    require(per_client is None, "per_client", per_client, expected)
    test_domains = to_array("test_domains", test_domains, "integers [N], a domain for each image")
    clients = [np.flatnonzero(test_domains == k) for k in range(partition.num_clients)]
    for domain, images in enumerate(clients):
        require(len(images) > 0, "test images of domain", domain, "some, to test its client on")
    return partition_from_clients(
        clients,
        scheme="make_domain_tests",
        parameters={"of": partition.digest()},
        client_names=partition.client_names,
    )


@validate_arguments
def make_full_tests(
    partition: Partition, num_examples: Annotated[int, Bounds(0, MAX_TEST_EXAMPLES)]
) -> Partition:
    """The same where each client is tested on the whole test split, of `num_examples`; one without
    training examples has no test."""
    all_examples, no_examples = np.arange(num_examples), np.arange(0)
    return partition_from_clients(
        [all_examples if size else no_examples for size in partition.sizes],
        scheme="make_full_tests",
        parameters={"of": partition.digest()},
    )


@validate_arguments
def compute_client_mixtures(
    partition: Partition, labels: np.ndarray, num_classes: NumClasses
) -> np.ndarray:
    """[K, C] the class proportions that each client's data come from; rows sum to 1.

    Of `iid`, those of the whole training set; of `grouped`, those of the client's group, exactly
    80/20 by default; of any other partition, those of the examples that the client holds (zeros
    where it holds none). `labels` are those of the training set.
    """
    counts = partition.label_counts(labels, num_classes)
    scheme = PARTITIONS.get(partition.scheme)
    if scheme is not None and scheme.mixtures is not None:
        try:
            mixtures = np.asarray(
                scheme.mixtures(
                    np.asarray(labels), num_classes, partition.num_clients, **partition.parameters
                )
            )
        except TypeError as error:
            raise _make_parameters_error(partition) from error
        description = f"shape of the mixtures of partition {partition.scheme!r}"
        require(mixtures.shape == counts.shape, description, mixtures.shape, f"{counts.shape}")
        return mixtures
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)


@validate_arguments
def get_client_groups(partition: Partition) -> np.ndarray:
    """[K] the group of each client, from 0, of a partition with `clients_per_group` among its
    parameters, as `grouped` has it; else `ConfigError`."""
    scheme = PARTITIONS.get(partition.scheme)
    if "clients_per_group" not in partition.parameters:
        if scheme is not None and "clients_per_group" in scheme.parameters:
            raise _make_parameters_error(partition)
        require(False, "partition", partition.scheme, "'grouped', or another of groups of clients")
    sizes = partition.parameters["clients_per_group"]
    return np.repeat(np.arange(len(sizes)), sizes)


def _make_parameters_error(partition: Partition) -> ConfigError:
    return ConfigError(
        f"partition.parameters = {partition.parameters!r}: expected those that make_partition "
        f"gives a {partition.scheme!r} partition"
    )


def _find_max_per_client(mixtures, class_counts) -> tuple[int, int, int]:
    """The largest test that no class is too small for, and the client and class that bound it."""
    with np.errstate(divide="ignore", invalid="ignore"):
        bounds = np.where(mixtures > 0, class_counts / mixtures, np.inf)
    client, label = np.unravel_index(np.argmin(bounds), bounds.shape)
    max_per_client = bounds[client, label]
    # Nobody holds anything: no test is too large. The tiny number is for 36 / 0.4 = 89.99...
    max_per_client = (
        int(np.floor(max_per_client + 1e-9))
        if np.isfinite(max_per_client)
        else _DEFAULT_TESTS_PER_CLIENT
    )
    return max_per_client, int(client), int(label)
