"""Who holds what: the examples of clients and server, and clients' tests, that settings name."""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_het.common.errors import ConfigError, named_within, require
from fedjax_het.data import (
    DATASETS,
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
from fedjax_het.data.dataset import checked_dataset
from fedjax_het.data.held_out import held_out_clients, of_clients
from fedjax_het.data.normalisation import normalisation_constants
from fedjax_het.data.server_data import Pool
from fedjax_het.settings.layers import USER, names_of_partition
from fedjax_het.settings.spec import ResolvedSpec


class Split(NamedTuple):
    """What the clients and the server of a federation have."""

    partition: Partition  # what clients hold of their own
    trained_on: Partition  # and, where the method says so, the server's examples besides
    tests: Partition | None  # of every client, where they are tested on their own
    server: ServerData | None  # its examples, if it has any
    held_out: "HeldOut | None" = None  # clients that take no part
    own: dict[str, str] = {}  # noqa: RUF012  what is not as the settings name it: see `own_parts`


class HeldOut(NamedTuple):
    """Clients that take no part."""

    partition: Partition  # what they hold
    tests: Partition  # of each
    clients: np.ndarray  # who they are, of all that the data were split among


def dataset_of(
    spec: ResolvedSpec, dataset: Dataset | None, data_dir: str | os.PathLike | None, *, caller: str
) -> Dataset:
    """The user's own, or else the one that settings name. Raises ConfigError, or OSError and
    ImportError where it is not there."""
    if dataset is not None:
        return checked_dataset(dataset)
    require(spec.dataset != USER, "dataset", USER, f"a Dataset passed to {caller}()")
    return load_dataset(spec.dataset, normalisation=spec.normalisation, data_dir=data_dir)


def data_given(
    specs: Sequence[ResolvedSpec], dataset: Dataset | None
) -> Callable[[ResolvedSpec], Dataset | None]:
    """Which of a sweep's runs have the user's data: those whose dataset is "user"; where none's is,
    all, as a single run has. None of the others. ConfigError for what is no data set."""
    checked = None if dataset is None else checked_dataset(dataset)
    for_all = all(spec.dataset != USER for spec in specs)
    return functools.partial(_given, checked, for_all)  # which may be pickled


def _given(dataset: Dataset | None, for_all: bool, spec: ResolvedSpec) -> Dataset | None:
    return dataset if for_all or spec.dataset == USER else None


def own_dataset_digest(spec: ResolvedSpec, dataset: Dataset) -> str | None:
    """The digest of a data set that is not what `spec` names, or of "user", which names none; None
    of what `load_dataset` gave for that name and normalisation."""
    if spec.dataset == USER or dataset.origin is None or dataset.origin[0] != spec.dataset:
        return dataset.digest()
    if dataset.origin[1] == spec.normalisation:
        return None
    if spec.dataset in DATASETS.built_in:  # the same constants may go by several names
        named = normalisation_constants(spec.dataset, spec.normalisation, dataset.train_images)
        if named == (dataset.mean, dataset.std):
            return None
    return dataset.digest()


def own_parts(
    spec: ResolvedSpec, dataset: Dataset, partition: Partition | None = None
) -> dict[str, str]:
    """What a run has in the place of what its settings name, for its record and its name:
    `own_dataset` and `own_partition`, each a digest, where there is such a one.

    partition: the user's; one that is the same as the settings' is not another.
    """
    own = {}
    data = own_dataset_digest(spec, dataset)
    if data is not None and spec.dataset != USER:
        own["own_dataset"] = data
    if partition is not None and not _is_named(partition, spec, dataset):
        own["own_partition"] = partition.digest()
    return own


def _is_named(partition: Partition, spec: ResolvedSpec, dataset: Dataset) -> bool:
    """Whether this is what the settings make of these data. Cost: making it."""
    try:
        named = split_clients(spec, dataset)
    except ConfigError:
        return False
    # How it was made decides clients' tests.
    facts = [(p.digest(), p.scheme, p.parameters, p.client_names) for p in (partition, named)]
    return facts[0] == facts[1]


def checked_partition(partition: Any, spec: ResolvedSpec, dataset: Dataset) -> Partition:
    """A user's partition that fits its settings and data; else ConfigError."""
    if not isinstance(partition, Partition):
        raise ConfigError(
            f"partition = a {type(partition).__name__}: expected a Partition, as "
            + Partition.MADE_BY
        )
    held_out = spec.held_out_clients or 0
    besides = f" with the {held_out} that are held out" if held_out else ""
    fits = f"num_clients={partition.num_clients - held_out}, as the partition has so many{besides}"
    all_clients = spec.num_clients + held_out
    require(partition.num_clients == all_clients, "num_clients", spec.num_clients, fits)
    indices, count = partition.indices, len(dataset.train_labels)
    require(len(indices) > 0, "partition", "nothing for anyone", "an example for some client")
    if indices.max() >= count:
        raise ConfigError(
            f"partition: position {int(indices.max())} is none of the {count} training examples of "
            f"{dataset.name}: expected positions in [0, {count})"
        )
    owners = np.repeat(np.arange(partition.num_clients), partition.sizes)
    held, times = np.unique(owners * count + indices, return_counts=True)
    if times.max() > 1:
        client, position = divmod(int(held[times.argmax()]), count)
        raise ConfigError(
            f"partition: client {client} holds example {position} {int(times.max())} times: "
            "expected different ones"
        )
    return partition


def split_of(
    spec: ResolvedSpec,
    dataset: Dataset,
    pool: Pool | None,
    *,
    partition: Partition | None = None,
    own: Partition | None = None,
    shares_server_data: bool = False,
) -> Split:
    """What resolved settings name. ConfigError.

    partition: theirs, where it is made already; own: the user's in its place.
    """
    if own is not None:
        partition = checked_partition(own, spec, dataset)
    everyone = split_clients(spec, dataset) if partition is None else partition
    taking_part, apart = set_apart(spec, everyone)
    partition = of_clients(everyone, taking_part) if len(apart) else everyone
    server = server_data_of(spec, dataset, partition, pool)
    trained_on = partition
    if shares_server_data and server is not None:
        trained_on = _shared_with_all(partition, server)
    tests = held_out = None
    if spec.tests_clients or len(apart):
        of_all = tests_of(everyone, dataset, spec.partition_seed, spec.test_per_client)
        if spec.tests_clients:
            tests = of_clients(of_all, taking_part) if len(apart) else of_all
        if len(apart):
            held_out = HeldOut(of_clients(everyone, apart), of_clients(of_all, apart), apart)
    parts = own_parts(spec, dataset, own)
    return Split(partition, trained_on, tests, server, held_out, parts)


def set_apart(spec: ResolvedSpec, everyone: Partition) -> tuple[np.ndarray, np.ndarray]:
    """Of the clients that data are split among, those that take part and those that are held out.
    Raises ConfigError where too few have data."""
    ids = np.arange(everyone.num_clients)
    if spec.held_out_clients is None:
        return ids, ids[:0]
    apart = held_out_clients(everyone, spec.held_out_clients, spec.partition_seed)
    return np.setdiff1d(ids, apart), apart


def split_clients(spec: ResolvedSpec, dataset: Dataset) -> Partition:
    """The partition that resolved settings name, of all training examples but those that are
    withheld for the server, among all clients, with those that are held out. Raises ConfigError if
    the data do not allow it."""
    with named_within("server_options", spec.server_options):
        withheld = withheld_examples(
            spec.server_data, dataset, spec.partition_seed, spec.server_options
        )
    rest = np.setdiff1d(np.arange(len(dataset.train_labels)), withheld)
    num_clients = spec.num_clients + (spec.held_out_clients or 0)
    require(
        num_clients <= len(rest),
        "num_clients",
        spec.num_clients,
        f"at most {len(rest)}, the number of training samples of {dataset.name}"
        + (" that are not the server's" if len(withheld) else ""),
    )
    domains = dataset.train_domains
    with names_of_partition(spec):
        partition = make_partition(
            spec.partition,
            dataset.train_labels[rest],
            dataset.num_classes,
            num_clients=num_clients,
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
    with named_within("server_options", spec.server_options):
        return server_pool(spec.server_data, dataset, spec.server_options, data_dir=data_dir)


def server_data_of(
    spec: ResolvedSpec, dataset: Dataset, partition: Partition, pool: Pool | None
) -> ServerData | None:
    """The server's examples that resolved settings name. Raises ConfigError if clients hold too
    few."""
    if spec.server_data is None:
        return None
    with named_within("server_options", spec.server_options):
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
