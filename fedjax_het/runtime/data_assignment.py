"""Data of a run: objects of the user, and the examples of clients and server."""

import dataclasses
import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import optax

from fedjax_het.config.resolve import USER_PROVIDED, display_partition_names
from fedjax_het.config.run_spec import ResolvedRunSpec, RunSpec
from fedjax_het.core.optimizers import check_transformation, make_user_transformation
from fedjax_het.data import (
    DATASETS,
    Dataset,
    Partition,
    ServerData,
    draw_withheld_examples,
    load_dataset,
    make_client_tests,
    make_partition,
    make_server_data,
    make_server_pool,
    partition_from_clients,
)
from fedjax_het.data.dataset import validate_dataset
from fedjax_het.data.normalization import get_normalization_constants
from fedjax_het.data.partition import draw_held_out_clients, select_clients
from fedjax_het.data.server_data import LabeledImages
from fedjax_het.utils.errors import ConfigError, display_names_within, require


@dataclass(frozen=True)
class UserObjects:
    """What a user passes to runs beside their settings; None where the settings name it.

    Attributes:
      dataset: the data set.
      partition: the partition of its training examples among clients.
      network: the network, as `nn.to_model` takes it.
      optimizer: the clients' optimizer: an `optax.GradientTransformation`, or a function of `hp`.
      data_dir: folder of the prepared data that settings name (default: TFDS_DATA_DIR).
      dataset_is_for_all: whether all runs have `dataset`, or only those whose dataset is "user".
    """

    dataset: Dataset | None = None
    partition: Partition | None = None
    network: Any = None
    optimizer: Any = None
    data_dir: str | os.PathLike | None = None
    dataset_is_for_all: bool = True

    def resolve(self, spec: RunSpec) -> ResolvedRunSpec:
        """Return the resolved settings of a run with these objects.

        Raises:
          ConfigError: if a setting cannot be used, or names what is also passed, or the user's
            where nothing is passed.
        """
        spec = self._set_optimizer(self._set_network(spec)).resolved()
        if self.optimizer is not None:
            transformation = functools.partial(make_user_transformation, self.optimizer)
            check_transformation(USER_PROVIDED, transformation, spec.hp)
        return spec

    def resolve_all(self, specs: Iterable[RunSpec]) -> tuple[list[ResolvedRunSpec], "UserObjects"]:
        """Return the resolved runs of a sweep, and these objects with the data set checked.

        The data set is for the runs whose dataset is "user"; where there are none, for all runs, as
        it is for a single run.

        Raises:
          ConfigError: as `resolve`, and for a `dataset` that is no data set.
        """
        resolved_specs = [self.resolve(spec) for spec in specs]
        return resolved_specs, dataclasses.replace(
            self,
            dataset=None if self.dataset is None else validate_dataset(self.dataset),
            dataset_is_for_all=all(spec.dataset != USER_PROVIDED for spec in resolved_specs),
        )

    def get_dataset(self, spec: RunSpec) -> Dataset | None:
        """Return the user's data set if this run has it, else None."""
        is_for_run = self.dataset_is_for_all or spec.dataset == USER_PROVIDED
        return self.dataset if is_for_run else None

    def load_dataset(self, spec: RunSpec, *, caller: str) -> Dataset:
        """Return the data set of a run: the user's, or else the one that its settings name.

        Args:
          spec: the resolved settings.
          caller: name of the public function that takes the data set, for messages.

        Raises:
          ConfigError: if there is none, or it is no data set.
          OSError, ImportError: if its files, or a package that reads them, are missing.
        """
        if (dataset := self.get_dataset(spec)) is not None:
            return validate_dataset(dataset)
        expected = f"a Dataset passed to {caller}()"
        require(spec.dataset != USER_PROVIDED, "dataset", USER_PROVIDED, expected)
        return load_dataset(spec.dataset, normalisation=spec.normalisation, data_dir=self.data_dir)

    def _set_network(self, spec: RunSpec) -> RunSpec:
        if self.network is None:
            expected = "a network passed to the run: network=..."
            require(spec.model != USER_PROVIDED, "model", USER_PROVIDED, expected)
            return spec
        is_allowed = spec.model in (None, USER_PROVIDED)
        require(is_allowed, "model", spec.model, "none beside a network that is passed to the run")
        return dataclasses.replace(spec, model=USER_PROVIDED)

    def _set_optimizer(self, spec: RunSpec) -> RunSpec:
        name, optimizer = spec.local_optimizer, self.optimizer
        if optimizer is None:
            expected = "an optimizer passed to the run: optimizer=..."
            require(name != USER_PROVIDED, "local_optimizer", USER_PROVIDED, expected)
            return spec
        expected = "none beside an optimizer that is passed to the run"
        require(name in (None, USER_PROVIDED), "local_optimizer", name, expected)
        is_valid = isinstance(optimizer, optax.GradientTransformation) or callable(optimizer)
        expected = "an optax.GradientTransformation, or a function of hp that returns one"
        require(is_valid, "optimizer", optimizer, expected)
        return dataclasses.replace(spec, local_optimizer=USER_PROVIDED)


@dataclass(frozen=True, eq=False)
class DataAssignment:
    """The data of a run's clients and server; `build.PreparedRun` adds the schedules.

    Attributes:
      spec: the settings of the run.
      dataset: the data set.
      pool: the images from which the server's examples are, beside those of training.
      partition: the examples of each client.
      training_partition: the examples that each client trains on: its own, and those of the server
        where the method trains clients on them.
      client_tests: the test examples of each client, where clients are tested on their own.
      server_data: the examples of the server, if it has any.
      held_out: clients that take no part in training.
      user_digests: digests of data that are not as the settings name them, see
        `collect_user_digests`.
    """

    spec: ResolvedRunSpec
    dataset: Dataset
    pool: LabeledImages | None
    partition: Partition
    training_partition: Partition
    client_tests: Partition | None = None
    server_data: ServerData | None = None
    held_out: "HeldOutClients | None" = None
    user_digests: dict[str, str] = field(default_factory=dict)


class HeldOutClients(NamedTuple):
    """Clients that take no part in training."""

    partition: Partition  # their examples
    tests: Partition  # the test examples of each
    clients: np.ndarray  # their ids among all clients that the data were split among


def user_dataset_digest(spec: ResolvedRunSpec, dataset: Dataset) -> str | None:
    """Return the digest of a data set that is not the one that the settings name.

    Args:
      spec: the settings; the dataset "user" names none.
      dataset: the data set of the run.

    Returns:
      The digest; None for the result of `load_dataset` with the name and normalization of `spec`.
    """
    if spec.dataset == USER_PROVIDED or dataset.origin is None or dataset.origin[0] != spec.dataset:
        return dataset.digest()
    if dataset.origin[1] == spec.normalisation:
        return None
    if spec.dataset in DATASETS.built_in:  # the same constants may go by several names
        named_constants = get_normalization_constants(
            spec.dataset, spec.normalisation, dataset.train_images
        )
        if named_constants == (dataset.mean, dataset.std):
            return None
    return dataset.digest()


def collect_user_digests(
    spec: ResolvedRunSpec, dataset: Dataset, partition: Partition | None = None
) -> dict[str, str]:
    """Return the digests of data that take the place of those that the settings name.

    They are part of a run's record and of the name of its files.

    Args:
      spec: the settings.
      dataset: the data set of the run.
      partition: the user's partition; one that equals the partition of the settings does not count.

    Returns:
      `own_dataset` and `own_partition`, where there are such data.
    """
    digests = {}
    dataset_digest = user_dataset_digest(spec, dataset)
    if dataset_digest is not None and spec.dataset != USER_PROVIDED:
        digests["own_dataset"] = dataset_digest
    if partition is not None and not _equals_named_partition(partition, spec, dataset):
        digests["own_partition"] = partition.digest()
    return digests


def _equals_named_partition(partition: Partition, spec: ResolvedRunSpec, dataset: Dataset) -> bool:
    """Return whether the partition equals the one of the settings, which this makes."""
    try:
        named_partition = build_partition(spec, dataset)
    except ConfigError:
        return False
    # How it was made decides clients' tests.
    identities = [
        (p.digest(), p.scheme, p.parameters, p.client_names) for p in (partition, named_partition)
    ]
    return identities[0] == identities[1]


def validate_partition(partition: Any, spec: ResolvedRunSpec, dataset: Dataset) -> Partition:
    """Return a user's partition if it fits the settings and the data.

    Raises:
      ConfigError: if it does not.
    """
    if not isinstance(partition, Partition):
        raise ConfigError(
            f"partition = a {type(partition).__name__}: expected a Partition, as "
            + Partition.CONSTRUCTORS
        )
    held_out = spec.held_out_clients or 0
    held_out_text = f" with the {held_out} that are held out" if held_out else ""
    expected = f"num_clients={partition.num_clients - held_out}, as the partition has so many{held_out_text}"
    all_clients = spec.num_clients + held_out
    require(partition.num_clients == all_clients, "num_clients", spec.num_clients, expected)
    indices, num_examples = partition.indices, len(dataset.train_labels)
    require(len(indices) > 0, "partition", "nothing for anyone", "an example for some client")
    if indices.max() >= num_examples:
        raise ConfigError(
            f"partition: position {int(indices.max())} is none of the {num_examples} training examples of "
            f"{dataset.name}: expected positions in [0, {num_examples})"
        )
    owners = np.repeat(np.arange(partition.num_clients), partition.sizes)
    examples_held, counts = np.unique(owners * num_examples + indices, return_counts=True)
    if counts.max() > 1:
        client, position = divmod(int(examples_held[counts.argmax()]), num_examples)
        raise ConfigError(
            f"partition: client {client} holds example {position} {int(counts.max())} times: "
            "expected different ones"
        )
    return partition


def assign_data(
    spec: ResolvedRunSpec,
    dataset: Dataset,
    pool: LabeledImages | None,
    *,
    partition: Partition | None = None,
    user_partition: Partition | None = None,
    trains_on_server_data: bool = False,
) -> DataAssignment:
    """Assign examples to the clients and the server of a run.

    Args:
      spec: the settings.
      dataset: the data set.
      pool: the images of the server's source, see `load_server_pool`.
      partition: the partition that the settings name, if it exists already.
      user_partition: the user's partition, which takes its place.
      trains_on_server_data: whether clients train on the server's examples, too.

    Raises:
      ConfigError: if the data do not allow it.
    """
    if user_partition is not None:
        partition = validate_partition(user_partition, spec, dataset)
    full_partition = build_partition(spec, dataset) if partition is None else partition
    participating_ids, held_out_ids = choose_held_out_clients(spec, full_partition)
    partition = (
        select_clients(full_partition, participating_ids) if len(held_out_ids) else full_partition
    )
    server_data = build_server_data(spec, dataset, partition, pool)
    training_partition = partition
    if trains_on_server_data and server_data is not None:
        training_partition = _add_server_examples(partition, server_data)
    client_tests = held_out = None
    if spec.has_client_tests or len(held_out_ids):
        all_client_tests = make_client_tests(
            full_partition, dataset, spec.partition_seed, spec.test_per_client
        )
        if spec.has_client_tests:
            client_tests = (
                select_clients(all_client_tests, participating_ids)
                if len(held_out_ids)
                else all_client_tests
            )
        if len(held_out_ids):
            held_out = HeldOutClients(
                select_clients(full_partition, held_out_ids),
                select_clients(all_client_tests, held_out_ids),
                held_out_ids,
            )
    user_digests = collect_user_digests(spec, dataset, user_partition)
    return DataAssignment(
        spec,
        dataset,
        pool,
        partition,
        training_partition,
        client_tests,
        server_data,
        held_out,
        user_digests,
    )


def choose_held_out_clients(
    spec: ResolvedRunSpec, full_partition: Partition
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of the clients that take part, and of those that are held out.

    Raises:
      ConfigError: if too few clients have data.
    """
    ids = np.arange(full_partition.num_clients)
    if spec.held_out_clients is None:
        return ids, ids[:0]
    held_out_ids = draw_held_out_clients(full_partition, spec.held_out_clients, spec.partition_seed)
    return np.setdiff1d(ids, held_out_ids), held_out_ids


def build_partition(spec: ResolvedRunSpec, dataset: Dataset) -> Partition:
    """Make the partition that the settings name, among all clients, including those held out.

    It has all training examples except those that are withheld for the server.

    Raises:
      ConfigError: if the data do not allow it.
    """
    with display_names_within("server_options", spec.server_options):
        server_indices = draw_withheld_examples(
            spec.server_data, dataset, spec.partition_seed, spec.server_options
        )
    client_indices = np.setdiff1d(np.arange(len(dataset.train_labels)), server_indices)
    num_clients = spec.num_clients + (spec.held_out_clients or 0)
    require(
        num_clients <= len(client_indices),
        "num_clients",
        spec.num_clients,
        f"at most {len(client_indices)}, the number of training samples of {dataset.name}"
        + (" that are not the server's" if len(server_indices) else ""),
    )
    domains = dataset.train_domains
    with display_partition_names(spec):
        partition = make_partition(
            spec.partition,
            dataset.train_labels[client_indices],
            dataset.num_classes,
            num_clients=num_clients,
            seed=spec.partition_seed,
            domains=None if domains is None else domains[client_indices],
            domain_names=dataset.domain_names,
            class_names=dataset.class_names,
            **spec.partition_arguments,
        )
    if not len(server_indices):
        return partition
    return dataclasses.replace(partition, indices=client_indices[partition.indices])


def load_server_pool(
    spec: ResolvedRunSpec, dataset: Dataset, data_dir: str | os.PathLike | None = None
) -> LabeledImages | None:
    """Load the images of the source of the server's examples, see `make_server_pool`.

    They are the same for all runs of one `compute_static_key`.

    Raises:
      ConfigError: if the source does not suit the data, or its files are missing.
    """
    if spec.server_data is None:
        return None
    with display_names_within("server_options", spec.server_options):
        return make_server_pool(spec.server_data, dataset, spec.server_options, data_dir=data_dir)


def build_server_data(
    spec: ResolvedRunSpec, dataset: Dataset, partition: Partition, pool: LabeledImages | None
) -> ServerData | None:
    """Make the server's examples that the settings name; None where there are none.

    Raises:
      ConfigError: if clients hold too few examples.
    """
    if spec.server_data is None:
        return None
    with display_names_within("server_options", spec.server_options):
        return make_server_data(
            spec.server_data, dataset, partition, spec.partition_seed, spec.server_options, pool
        )


def _add_server_examples(partition: Partition, server: ServerData) -> Partition:
    """Return a partition in which every client has the server's examples in addition to its own."""
    return partition_from_clients(
        [
            np.concatenate([partition.client_indices(k), server.indices])
            for k in range(partition.num_clients)
        ]
    )
