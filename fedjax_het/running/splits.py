"""Who holds what: the examples of clients and server, and clients' tests, that settings name."""

import dataclasses
import os
from typing import NamedTuple

import numpy as np

from fedjax_het.common.errors import require
from fedjax_het.data import (
    Dataset,
    Partition,
    ServerData,
    load_dataset,
    make_partition,
    partition_from_clients,
    server_examples,
    server_pool,
    tests_of,
    withheld_examples,
)
from fedjax_het.data.server_data import Pool
from fedjax_het.settings.spec import ResolvedSpec


class Split(NamedTuple):
    """What the clients and the server of a federation have."""

    partition: Partition  # what clients hold of their own
    trained_on: Partition  # and, where the method says so, the server's examples besides
    tests: Partition | None  # of every client, where they are tested on their own
    server: ServerData | None  # its examples, if it has any


def dataset_of(
    spec: ResolvedSpec, dataset: Dataset | None, data_dir: str | os.PathLike | None, *, caller: str
) -> Dataset:
    """The user's own, or else the one that settings name. Raises ConfigError, or OSError and
    ImportError where it is not there."""
    if dataset is not None:
        return dataset
    require(spec.dataset != "user", "dataset", "user", f"a Dataset passed to {caller}()")
    return load_dataset(spec.dataset, normalisation=spec.normalisation, data_dir=data_dir)


def split_of(
    spec: ResolvedSpec,
    dataset: Dataset,
    pool: Pool | None,
    *,
    partition: Partition | None = None,
    shares_server_data: bool = False,
) -> Split:
    """What resolved settings name, of the user's own `partition` if there is one. ConfigError."""
    partition = partition or split_clients(spec, dataset)
    server = server_data_of(spec, dataset, partition, pool)
    trained_on = partition
    if shares_server_data and server is not None:
        trained_on = _shared_with_all(partition, server)
    tests = None
    if spec.tests_clients:
        tests = tests_of(partition, dataset, spec.partition_seed, spec.test_per_client)
    return Split(partition, trained_on, tests, server)


def split_clients(spec: ResolvedSpec, dataset: Dataset) -> Partition:
    """The partition that resolved settings name, of all training examples but those that are
    withheld for the server. Raises ConfigError if the data do not allow it."""
    withheld = withheld_examples(
        spec.server_data, dataset, spec.partition_seed, spec.server_options
    )
    rest = np.setdiff1d(np.arange(len(dataset.train_labels)), withheld)
    require(
        spec.num_clients <= len(rest),
        "num_clients",
        spec.num_clients,
        f"at most {len(rest)}, the number of training samples of {dataset.name}"
        + (" that are not the server's" if len(withheld) else ""),
    )
    domains = dataset.train_domains
    partition = make_partition(
        spec.partition,
        dataset.train_labels[rest],
        dataset.num_classes,
        num_clients=spec.num_clients,
        seed=spec.partition_seed,
        domains=None if domains is None else domains[rest],
        domain_names=dataset.domain_names,
        class_names=dataset.class_names,
        **spec.partition_arguments,
    )
    if not len(withheld):
        return partition
    return dataclasses.replace(partition, indices=rest[partition.indices])


def server_pool_of(
    spec: ResolvedSpec, dataset: Dataset, data_dir: str | os.PathLike | None = None
) -> Pool | None:
    """The images that the source of the server's examples brings, see `server_pool`: the same for
    all runs of a `static_key`. Raises ConfigError where it does not suit the data, or is missing.
    """
    if spec.server_data is None:
        return None
    return server_pool(spec.server_data, dataset, spec.server_options, data_dir=data_dir)


def server_data_of(
    spec: ResolvedSpec, dataset: Dataset, partition: Partition, pool: Pool | None
) -> ServerData | None:
    """The server's examples that resolved settings name. Raises ConfigError if clients hold too
    few."""
    if spec.server_data is None:
        return None
    return server_examples(
        spec.server_data, dataset, partition, spec.partition_seed, spec.server_options, pool
    )


def _shared_with_all(partition: Partition, server: ServerData) -> Partition:
    """Every client's examples, and the server's besides."""
    return partition_from_clients(
        [
            np.concatenate([partition.client(k), server.indices])
            for k in range(partition.num_clients)
        ]
    )
