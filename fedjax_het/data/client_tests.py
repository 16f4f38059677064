"""A test set for each client, with the class mixture of its training data."""

import logging

import numpy as np

from fedjax_het.common.errors import ConfigError, is_whole, require
from fedjax_het.data.dealing import deal, shuffled_classes, whole_counts
from fedjax_het.data.partition import Partition, checked_labels, partition_from_clients
from fedjax_het.data.schemes import SCHEMES

_log = logging.getLogger(__name__)

# A stream of their own, so that tests do not depend on how many draws a partition took.
_LOCAL_TEST_STREAM = 0x7E57

_PER_CLIENT = 100  # FedAMP's


def local_tests(
    partition: Partition,
    train_labels: np.ndarray,
    test_labels: np.ndarray,
    num_classes: int,
    *,
    seed: int,
    per_client: int | None = None,
) -> Partition:
    """Which test examples each client is tested on: a `Partition` of positions in the *test* split.

    All are from the data set's test split, so no model is tested on an example that any client
    trained on. Each client gets `per_client` of them in the proportions of `client_mixtures`: the
    number of each class is its exact expectation rounded up or down at random.

    per_client: by default 100 (FedAMP's), or fewer for all where some client would need more of
        a class than the test split has.

    A client's examples are distinct. Clients share none where the test split has enough of each
    class for all; of a class that has too few, examples are given out again once all have been, so
    that the numbers of clients that share one differ by at most one (a warning says so). A client
    without training examples has no mixture and no test.

    Save, digest and describe it like any partition, with the labels of the test split. The same
    arguments give the same tests. Raises `ConfigError` for a `per_client` that a class cannot
    give, and for `by_domain`, whose clients differ in more than their classes: see `domain_tests`.
    """
    test_labels = checked_labels("test_labels", test_labels, num_classes)
    require(is_whole(seed, 0), "seed", seed, "an integer >= 0")
    require(
        partition.scheme != "by_domain",
        "partition",
        partition.scheme,
        "a scheme by class; for clients of domains there is domain_tests",
    )
    mixtures = client_mixtures(partition, train_labels, num_classes)
    held = np.bincount(test_labels, minlength=num_classes)
    most, client, label = _most_per_client(mixtures, held)
    if per_client is None:
        per_client = max(1, min(_PER_CLIENT, most))
    require(is_whole(per_client, 1), "per_client", per_client, "an integer >= 1")
    require(
        per_client <= most,
        "per_client",
        per_client,
        f"at most {most}: {mixtures[client, label]:.0%} of client {client}'s tests are of class "
        f"{label}, of which there are {held[label]} test examples",
    )

    stream = np.random.SeedSequence(int(seed), spawn_key=(_LOCAL_TEST_STREAM,))
    rng = np.random.default_rng(stream)
    counts = np.zeros(mixtures.shape, np.int64)
    for k in np.flatnonzero(partition.sizes):
        counts[k] = whole_counts(rng, mixtures[k], per_client)
    asked = counts.sum(0)
    if (asked > held).any():
        scarcest = int(np.argmax(asked / np.maximum(held, 1)))
        _log.warning(
            "local tests share examples: %d are asked of %d test examples; those of class %d are "
            "in up to %d clients' tests",
            asked.sum(),
            len(test_labels),
            scarcest,
            -(-asked[scarcest] // held[scarcest]),
        )
    # Repeated end to end, a class of n examples has no example twice in any run of n.
    pools = shuffled_classes(rng, test_labels, num_classes)
    pools = [np.resize(pool, total) for pool, total in zip(pools, asked, strict=True)]
    return partition_from_clients(
        deal(pools, counts.T),
        scheme="local_tests",
        seed=int(seed),
        parameters={"per_client": int(per_client), "of": partition.digest()},
    )


def domain_tests(
    partition: Partition, test_domains: np.ndarray, *, per_client: int | None = None
) -> Partition:
    """The same for a `by_domain` partition: each client is tested on all test images of its domain.

    test_domains: [N_test], of the test split. Raises `ConfigError` for a domain without test
    images, and for a `per_client`: these tests are as large as they are.
    """
    all_of_them = "nothing: clients of domains are tested on all test images of theirs"
    require(per_client is None, "per_client", per_client, all_of_them)
    clients = [np.flatnonzero(test_domains == k) for k in range(partition.num_clients)]
    for domain, images in enumerate(clients):
        require(len(images) > 0, "test images of domain", domain, "some, to test its client on")
    return partition_from_clients(
        clients, scheme="domain_tests", parameters={"of": partition.digest()}
    )


def whole_tests(partition: Partition, num_examples: int) -> Partition:
    """The same where each client is tested on the whole test split, of `num_examples`; one without
    training examples has no test."""
    everything, nothing = np.arange(num_examples), np.arange(0)
    return partition_from_clients(
        [everything if size else nothing for size in partition.sizes],
        scheme="whole_tests",
        parameters={"of": partition.digest()},
    )


def client_mixtures(partition: Partition, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """[K, C] the class proportions that each client's data come from; rows sum to 1.

    Of `iid`, those of the whole training set; of `grouped`, those of the client's group, exactly
    80/20 by default; of any other partition, those of the examples that the client holds (zeros
    where it holds none). `labels` are those of the training set.
    """
    counts = partition.label_counts(labels, num_classes)
    scheme = SCHEMES.get(partition.scheme)
    if scheme is not None and scheme.mixtures is not None:
        try:
            return scheme.mixtures(
                np.asarray(labels), num_classes, partition.num_clients, **partition.parameters
            )
        except TypeError as error:
            raise _not_ours(partition) from error
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)


def client_groups(partition: Partition) -> np.ndarray:
    """[K] the group of each client of a `grouped` partition, from 0; else `ConfigError`."""
    require(partition.scheme == "grouped", "partition", partition.scheme, "'grouped'")
    if "clients_per_group" not in partition.parameters:
        raise _not_ours(partition)
    sizes = partition.parameters["clients_per_group"]
    return np.repeat(np.arange(len(sizes)), sizes)


def _not_ours(partition: Partition) -> ConfigError:
    return ConfigError(
        f"partition.parameters = {partition.parameters!r}: expected those that make_partition "
        f"gives a {partition.scheme!r} partition"
    )


def _most_per_client(mixtures, held) -> tuple[int, int, int]:
    """The largest test that no class is too small for, and the client and class that bound it."""
    with np.errstate(divide="ignore", invalid="ignore"):
        bounds = np.where(mixtures > 0, held / mixtures, np.inf)
    client, label = np.unravel_index(np.argmin(bounds), bounds.shape)
    most = bounds[client, label]
    # Nobody holds anything: no test is too large. The tiny number is for 36 / 0.4 = 89.99...
    most = int(np.floor(most + 1e-9)) if np.isfinite(most) else _PER_CLIENT
    return most, int(client), int(label)
