"""Data of a run: objects of the user, and the examples of clients and server."""

import contextlib
import dataclasses
import functools
import logging
import operator
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import optax

from fedjax_het.config.comparison import warn_unequal_settings
from fedjax_het.config.kind_settings import list_skews
from fedjax_het.config.resolve import USER_PROVIDED, display_partition_names
from fedjax_het.config.run_spec import ResolvedRunSpec, RunSpec
from fedjax_het.core.example_transform import SkewInputs, make_skew_inputs
from fedjax_het.core.lr_schedules import is_round_schedule_hyperparameter
from fedjax_het.core.optimizers import check_transformation, make_user_transformation
from fedjax_het.core.rng import Stream, make_stream_key
from fedjax_het.data import (
    PARTITIONS,
    SERVER_SOURCES,
    Dataset,
    Partition,
    PartitionSummary,
    ServerData,
    draw_withheld_examples,
    load_dataset,
    make_client_tests,
    make_partition,
    make_server_data,
    make_server_pool,
)
from fedjax_het.data.dataset import validate_dataset
from fedjax_het.data.dataset_registry import is_read_by_package
from fedjax_het.data.normalization import get_normalization_constants
from fedjax_het.data.partition import (
    draw_held_out_clients,
    require_distinct_examples,
    select_clients,
    withhold_validation_examples,
)
from fedjax_het.data.server_data import LabeledImages
from fedjax_het.skews import PARTITION_SKEWS
from fedjax_het.skews.assignment import (
    ClientSkews,
    Drift,
    assign_skews,
    select_active,
    select_examples,
)
from fedjax_het.utils.config import validate
from fedjax_het.utils.errors import ConfigError, display_names, display_names_within, require

_log = logging.getLogger("fedjax_het")
_MAX_LISTED_CLIENTS = 5  # in a note


@dataclass(frozen=True)
class UserObjects:
    """Objects that a user passes to runs in addition to settings; None if the settings name them.

    Attributes:
      dataset: the data set.
      partition: the partition of its training examples among clients.
      network: the network, as `nn.to_model` takes it.
      optimizer: the clients' optimizer: an `optax.GradientTransformation`, or a function of `hp`.
      data_dir: folder of the prepared data that settings name (default: TFDS_DATA_DIR).
      dataset_is_for_all: whether all runs have `dataset`, or only runs whose dataset is "user".
    """

    dataset: Dataset | None = None
    partition: Partition | None = None
    network: Any = None
    optimizer: Any = None
    data_dir: str | os.PathLike | None = None
    dataset_is_for_all: bool = True

    def resolve(self, spec: RunSpec) -> ResolvedRunSpec:
        """Return the resolved settings of a run with these objects.

        The default of `num_clients` is the number of users for the partition `natural`.

        Raises:
          ConfigError: if a setting cannot be used. Also if it names a network, an optimizer or a
            skew that is a partition although an object is passed, or if it is "user" although no
            object is passed.
        """
        resolved_spec = self._resolve_objects(spec)
        if spec.num_clients is None and PARTITIONS[resolved_spec.partition].clients_are_users:
            num_clients = self._count_users(resolved_spec)
            return self._resolve_objects(dataclasses.replace(spec, num_clients=num_clients))
        return resolved_spec

    def _resolve_objects(self, spec: RunSpec) -> ResolvedRunSpec:
        """Return the resolved settings of a run with the network and the optimizer."""
        optimizer = self.optimizer
        for setting, name, value in (
            ("model", "network", self.network),
            ("local_optimizer", "optimizer", optimizer),
        ):
            choice, article = getattr(spec, setting), "an" if name == "optimizer" else "a"
            expected = f"{article} {name} passed to the run: {name}=..."
            require(value is not None or choice != USER_PROVIDED, setting, choice, expected)
            expected = f"no name, as {article} {name} is passed to the run"
            is_allowed = value is None or choice in (None, USER_PROVIDED)
            require(is_allowed, setting, choice, expected)
        is_valid = isinstance(optimizer, optax.GradientTransformation) or callable(optimizer)
        expected = "an optax.GradientTransformation, or a function of hp that returns one"
        require(optimizer is None or is_valid, "optimizer", optimizer, expected)
        if self.partition is not None:
            for kind in sorted({name.partition(".")[0] for name in spec.skew} & {*PARTITION_SKEWS}):
                expected = "a skew that is no partition, as a partition is passed to the run"
                require(False, "skew", kind, expected)
        if self.network is not None:
            spec = dataclasses.replace(spec, model=USER_PROVIDED)
        if optimizer is None:
            return spec.resolved()
        resolved_spec = dataclasses.replace(spec, local_optimizer=USER_PROVIDED).resolved()
        transformation = functools.partial(make_user_transformation, optimizer)
        check_transformation(USER_PROVIDED, transformation, resolved_spec.hyperparameters)
        return resolved_spec

    def _count_users(self, spec: ResolvedRunSpec) -> int:
        """Return the number of users that can be clients, apart from those held out; at least 1.

        Users whose examples are all the server's do not count.
        """
        dataset = self.load_dataset(spec, caller="simulate")
        if dataset.train_users is None:
            return 1  # `natural` reports it
        withheld = draw_withheld_examples(
            spec.server_data, dataset, spec.partition_seed, spec.server_options
        )
        num_users = len(np.unique(np.delete(dataset.train_users, withheld)))
        return max(num_users - (spec.held_out_clients or 0), 1)

    def resolve_all(self, specs: Iterable[RunSpec]) -> tuple[list[ResolvedRunSpec], "UserObjects"]:
        """Return the resolved runs of a sweep, and these objects with the data set checked.

        The data set is for the runs whose dataset is "user". If no run has this dataset, the data
        set is for all runs. A warning lists the settings in which methods differ although their
        specs do not give them.

        Raises:
          ConfigError: if a setting cannot be used, or if `dataset` is no data set.
        """
        specs = list(specs)
        user_objects = dataclasses.replace(
            self,
            dataset=None if self.dataset is None else validate_dataset(self.dataset),
            dataset_is_for_all=all(spec.dataset != USER_PROVIDED for spec in specs),
        )
        resolved_specs = [user_objects.resolve(spec) for spec in specs]
        warn_unequal_settings(specs, resolved_specs)
        return resolved_specs, user_objects

    def get_dataset(self, spec: RunSpec) -> Dataset | None:
        """Return the user's data set if this run has it, else None."""
        is_for_run = self.dataset_is_for_all or spec.dataset == USER_PROVIDED
        return self.dataset if is_for_run else None

    def get_user_digests(self, spec: ResolvedRunSpec) -> dict[str, str]:
        """Return the digest of the user's data set if it replaces the data set of the settings."""
        dataset = self.get_dataset(spec)
        return {} if dataset is None else collect_user_digests(spec, dataset)

    def load_dataset(self, spec: RunSpec, *, caller: str) -> Dataset:
        """Return the data set of a run: the user's, or else the data set of its settings.

        Args:
          spec: the resolved settings.
          caller: name of the public function that takes the data set, for messages.

        Returns:
          The data set.

        Raises:
          ConfigError: if there is none, or if the user's object is no data set.
          OSError: if its files are missing.
          ImportError: if a package that reads its files is missing.
        """
        if (dataset := self.get_dataset(spec)) is not None:
            return validate_dataset(dataset)
        expected = f"a Dataset passed to {caller}()"
        require(spec.dataset != USER_PROVIDED, "dataset", USER_PROVIDED, expected)
        return load_dataset(spec.dataset, normalization=spec.normalization, data_dir=self.data_dir)


@dataclass(frozen=True, eq=False)
class DataAssignment:
    """The data of a run's clients and server; `build.PreparedRun` adds the schedules.

    Attributes:
      spec: the settings of the run.
      dataset: the data set.
      pool: examples of the server's source that are not in the training set.
      partition: the examples of each client.
      client_tests: the test examples of each client, if clients have tests.
      server_data: the examples of the server, if it has any.
      held_out: clients that take no part in training.
      user_digests: digests of data that are not as the settings name them, see
        `collect_user_digests`.
      validation: the training examples that each client withholds for validation, if any.
        `partition` lacks them.
      skew: label skews and feature skews of the clients.
      skewed_dataset: the data set with the training labels as the clients see them; None without
        label skews.
      drift: active examples of the clients over the rounds; None: all examples in every round.
    """

    spec: ResolvedRunSpec
    dataset: Dataset
    pool: LabeledImages | None
    partition: Partition
    client_tests: Partition | None = None
    server_data: ServerData | None = None
    held_out: "HeldOutClients | None" = None
    user_digests: dict[str, str] = field(default_factory=dict)
    validation: Partition | None = None
    skew: ClientSkews = ClientSkews()
    skewed_dataset: Dataset | None = None
    drift: Drift | None = None

    @property
    def hp(self) -> dict[str, Any]:
        """The numeric hyperparameters as programs read them."""
        items = self.spec.hyperparameters.items()
        return {k: np.float32(v) for k, v in items if not is_round_schedule_hyperparameter(k)}

    @property
    def client_dataset(self) -> Dataset:
        """The data set with the training labels as the clients see them."""
        return self.skewed_dataset or self.dataset

    def make_skew_inputs(self, ids_per_client: int) -> SkewInputs:
        """Return the run's label skews and feature skews, as programs read them.

        Args:
          ids_per_client: number of ids of one client in the programs, see `ExampleTransform`.

        Returns:
          The inputs, arrays on the host.
        """
        labels = np.asarray(self.client_dataset.train_labels)
        num_clients = self.partition.num_clients
        owners = np.full(len(labels), num_clients, np.int32)
        for part in filter(None, (self.partition, self.validation)):
            owners[part.indices] = np.repeat(np.arange(num_clients), part.sizes)
        key = make_stream_key(self.spec.partition_seed, Stream.SKEW)
        return make_skew_inputs(self.skew, key, labels, owners, ids_per_client)

    def summarize_partition(self) -> PartitionSummary:
        """Return the partition in numbers; validation examples do not count as unused."""
        labels, num_classes = self.client_dataset.train_classes, self.dataset.num_classes
        summary = self.partition.summarize(labels, num_classes)
        num_validation = 0 if self.validation is None else len(self.validation.indices)
        return dataclasses.replace(summary, num_unused=summary.num_unused - num_validation)


class HeldOutClients(NamedTuple):
    """Clients that take no part in training.

    Attributes:
      partition: the training examples of each.
      tests: the test examples of each.
      clients: their ids among all clients of the partition.
      skew: their label skews and feature skews.
    """

    partition: Partition
    tests: Partition
    clients: np.ndarray
    skew: ClientSkews = ClientSkews()


def user_dataset_digest(spec: ResolvedRunSpec, dataset: Dataset) -> str | None:
    """Return the digest of a data set that differs from the data set of the settings.

    Args:
      spec: the settings; the dataset "user" names none.
      dataset: the data set of the run.

    Returns:
      The digest; None for the result of `load_dataset` with the name and normalization of `spec`.
    """
    if spec.dataset == USER_PROVIDED or dataset.origin is None or dataset.origin[0] != spec.dataset:
        return dataset.digest()
    if dataset.origin[1] == spec.normalization:
        return None
    if is_read_by_package(spec.dataset):  # the same constants may go by several names
        named_constants = get_normalization_constants(
            spec.dataset, spec.normalization, dataset.train_inputs
        )
        if named_constants == (dataset.mean, dataset.std):
            return None
    return dataset.digest()


def collect_user_digests(
    spec: ResolvedRunSpec, dataset: Dataset, partition: Partition | None = None
) -> dict[str, str]:
    """Return the digests of a user's data that replace the named data.

    They are part of a run's record and of the name of its files.

    Args:
      spec: the settings.
      dataset: the data set of the run.
      partition: the user's partition; a copy of the settings' partition does not count.

    Returns:
      `own_dataset` and `own_partition`, where there are such data.
    """
    digests, named = {}, None
    dataset_digest = user_dataset_digest(spec, dataset)
    if dataset_digest is not None and spec.dataset != USER_PROVIDED:
        digests["own_dataset"] = dataset_digest
    if partition is not None:
        with contextlib.suppress(ConfigError):
            named = build_partition(spec, dataset)
        # Scheme and parameters count because they decide clients' tests.
        attributes = operator.attrgetter("scheme", "parameters", "client_names")
        is_same = (
            named is not None
            and partition.digest() == named.digest()
            and attributes(partition) == attributes(named)
        )
        if not is_same:
            digests["own_partition"] = partition.digest()
    return digests


def validate_partition(partition: Any, spec: ResolvedRunSpec, dataset: Dataset) -> Partition:
    """Return a user's partition if it fits the settings and the data.

    Args:
      partition: the user's object.
      spec: the settings.
      dataset: the data set.

    Returns:
      The partition.

    Raises:
      ConfigError: if it does not fit.
    """
    partition = validate("partition", partition, Partition)
    held_out, indices = spec.held_out_clients or 0, partition.indices
    expected = (
        f"num_clients={partition.num_clients - held_out}, the number of clients of the partition"
    )
    expected += f" without the {held_out} that are held out" if held_out else ""
    is_complete = partition.num_clients == spec.num_clients + held_out
    require(is_complete, "num_clients", spec.num_clients, expected)
    num_examples = len(dataset.train_labels)
    require(len(indices) > 0, "partition", "no examples", "at least one example")
    if indices.max() >= num_examples:
        raise ConfigError(
            f"partition: position {int(indices.max())} is outside the {num_examples} training "
            f"examples of {dataset.name}: expected positions in [0, {num_examples})"
        )
    return require_distinct_examples(partition)


def _warn_about_partition(partition: Partition, spec: ResolvedRunSpec | None) -> None:
    """Log the numbers of clients without examples and of examples of several clients.

    Args:
      partition: the partition.
      spec: the settings that name it, None for a user's partition.
    """
    if num_empty := int((partition.sizes == 0).sum()):
        settings = {**spec.partition_arguments, "seed": spec.partition_seed} if spec else {}
        setting_text = ", ".join(f"{name} {value}" for name, value in settings.items())
        _log.warning(
            "partition %r: %d of %d clients hold no examples%s",
            partition.scheme,
            num_empty,
            partition.num_clients,
            f" ({setting_text})" if setting_text else "",
        )
    if num_shared := _count_shared_examples(partition):
        _log.warning(
            "partition %r: %d examples belong to several clients", partition.scheme, num_shared
        )


def _warn_about_missing_tests(partition: Partition, tests: Partition) -> None:
    """Log the clients that have training examples and no test examples."""
    missing = np.flatnonzero((partition.sizes > 0) & (tests.sizes == 0))
    if len(missing):
        names = [partition.client_names[k] if partition.client_names else str(k) for k in missing]
        _log.warning(
            "note: %d of %d clients have no test examples, and means over clients leave them out: "
            "%s%s",
            len(missing),
            partition.num_clients,
            ", ".join(names[:_MAX_LISTED_CLIENTS]),
            ", ..." if len(names) > _MAX_LISTED_CLIENTS else "",
        )


def _count_shared_examples(partition: Partition) -> int:
    """Return the number of examples that belong to several clients."""
    return int((np.unique(partition.indices, return_counts=True)[1] > 1).sum())


def assign_data(
    spec: ResolvedRunSpec,
    dataset: Dataset,
    pool: LabeledImages | None,
    user_partition: Partition | None = None,
) -> DataAssignment:
    """Assign examples to the clients and the server of a run.

    Args:
      spec: the settings.
      dataset: the data set.
      pool: the examples of the server's source, see `load_server_pool`.
      user_partition: the user's partition; without one, the partition that the settings name.

    Returns:
      The examples of clients and server, and clients' tests.

    Raises:
      ConfigError: if the data do not allow it.
    """
    if user_partition is not None:
        all_clients = validate_partition(user_partition, spec, dataset)
        all_clients = _apply_amount_skews(spec, dataset, all_clients)
    else:
        all_clients = build_partition(spec, dataset)
    skews = list_skews(spec)
    for skew in skews:
        if skew.needs_classes:
            dataset.task_kind.require_classes(skew.source)
    num_classes, seed = dataset.num_classes, spec.partition_seed
    _warn_about_partition(all_clients, spec if user_partition is None else None)
    tests = None
    if spec.has_client_tests or spec.held_out_clients is not None:
        seed, test_per_client = spec.partition_seed, spec.test_per_client
        with display_names({"per_client": "test_per_client"}):
            tests = make_client_tests(all_clients, dataset, seed, test_per_client)
        _warn_about_missing_tests(all_clients, tests)
    skewed_dataset, client_skews = assign_skews(skews, all_clients, dataset, seed)
    if client_skews.features and _count_shared_examples(all_clients):
        _log.warning(
            "skew %s: clients train with their own skew; validation, losses of candidates and work "
            "of the server read an example of several clients with the skew of the last client",
            ", ".join(skew.name for skew, _ in client_skews.features),
        )
    participants = select_participants(spec, all_clients)
    partition, validation = participants.partition, participants.validation
    client_tests, held_out = tests, None
    if spec.held_out_clients is not None:
        assert tests is not None
        ids = participants.held_out_ids
        parts = (select_clients(all_clients, ids), select_clients(tests, ids))
        held_out = HeldOutClients(*parts, ids, client_skews.select(ids))
        client_tests = select_clients(tests, participants.ids)
    server_data = None
    if spec.server_data is not None:
        # Withheld examples belong to no client, and held-out clients are clients, too.
        withholds = SERVER_SOURCES.require(spec.server_data).withheld is not None
        holders = all_clients if withholds else partition
        with display_names_within("server_options", spec.server_options):
            server_data = make_server_data(
                spec.server_data, dataset, holders, spec.partition_seed, spec.server_options, pool
            )
        if validation is not None:
            shared = np.intersect1d(server_data.indices, validation.indices)
            description = f"return value of draw of server_data {spec.server_data!r}"
            expected = "examples of the argument `partition`, which lacks them"
            require(not len(shared), description, f"{len(shared)} validation examples", expected)
    return DataAssignment(
        spec,
        dataset,
        pool,
        partition,
        client_tests if spec.has_client_tests else None,
        server_data,
        held_out,
        collect_user_digests(spec, dataset, user_partition),
        validation,
        client_skews.select(participants.ids),
        skewed_dataset,
        select_active(skews, partition, dataset.train_classes, num_classes, seed, spec.rounds),
    )


class Participants(NamedTuple):
    """Clients that take part in training.

    Attributes:
      partition: the training examples of each, without validation examples.
      validation: the training examples that each withholds for validation, if any.
      ids: their ids among all clients of the partition.
      held_out_ids: ids of the clients that take no part.
    """

    partition: Partition
    validation: Partition | None
    ids: np.ndarray
    held_out_ids: np.ndarray


def select_participants(spec: ResolvedRunSpec, all_clients: Partition) -> Participants:
    """Select the clients that take part in a run, and their training and validation examples.

    Args:
      spec: the settings.
      all_clients: the examples of all clients, including those held out.

    Returns:
      The participants.

    Raises:
      ConfigError: if the partition has too few clients or examples.
    """
    held_out_ids = np.arange(0)
    if spec.held_out_clients is not None:
        held_out_ids = draw_held_out_clients(
            all_clients, spec.held_out_clients, spec.partition_seed
        )
    ids = np.setdiff1d(np.arange(all_clients.num_clients), held_out_ids)
    partition = select_clients(all_clients, ids) if len(held_out_ids) else all_clients
    validation = None
    if spec.validation is not None:  # held-out clients have none; tests do not depend on it
        all_sizes = partition.sizes
        partition, validation = withhold_validation_examples(
            partition, spec.validation, spec.partition_seed
        )
        num_single = int(((partition.sizes == 1) & (all_sizes > 1)).sum())
        if 2 * num_single >= len(all_sizes):
            _log.warning(
                "validation = %g leaves one training example to %d of %d clients",
                spec.validation,
                num_single,
                len(all_sizes),
            )
    return Participants(partition, validation, ids, held_out_ids)


def build_partition(spec: ResolvedRunSpec, dataset: Dataset) -> Partition:
    """Make the partition that the settings name, among all clients, including those held out.

    It has all training examples except the examples that are withheld for the server.

    Args:
      spec: the settings.
      dataset: the data set.

    Returns:
      The training examples of each client.

    Raises:
      ConfigError: if the data do not allow it.

    Example:
      >>> from fedjax_het import RunSpec, load_dataset
      >>> from fedjax_het.runtime.data_assignment import build_partition
      >>> spec = RunSpec(dataset="digits", num_clients=4).resolved()
      >>> build_partition(spec, load_dataset("digits")).num_clients
      4
    """
    if PARTITIONS[spec.partition].needs_classes:
        dataset.task_kind.require_classes(
            f"partition {spec.partition!r}", "; partition=iid accepts every task"
        )
    with display_names_within("server_options", spec.server_options):
        server_indices = draw_withheld_examples(
            spec.server_data, dataset, spec.partition_seed, spec.server_options
        )
    is_clients = np.ones(len(dataset.train_labels), bool)
    is_clients[server_indices] = False
    client_indices = np.flatnonzero(is_clients)
    num_clients = spec.num_clients + (spec.held_out_clients or 0)
    expected = f"at most {len(client_indices)}, the number of training samples of {dataset.name}"
    expected += " that are not the server's" if len(server_indices) else ""
    require(num_clients <= len(client_indices), "num_clients", spec.num_clients, expected)
    domains = dataset.train_domains
    with display_partition_names(spec):
        partition = make_partition(
            spec.partition,
            dataset.train_classes[client_indices],
            dataset.num_classes,
            num_clients=num_clients,
            seed=spec.partition_seed,
            domains=None if domains is None else domains[client_indices],
            domain_names=dataset.domain_names,
            class_names=dataset.class_names,
            users=None if dataset.train_users is None else dataset.train_users[client_indices],
            **spec.partition_arguments,
        )
    if len(server_indices):
        partition = dataclasses.replace(partition, indices=client_indices[partition.indices])
    return _apply_amount_skews(spec, dataset, partition)


def _apply_amount_skews(spec: ResolvedRunSpec, dataset: Dataset, partition: Partition) -> Partition:
    """Return the partition after the run's skews of numbers of examples."""
    skews, labels = list_skews(spec), dataset.train_classes
    return select_examples(skews, partition, labels, dataset.num_classes, spec.partition_seed)


def load_server_pool(
    spec: ResolvedRunSpec, dataset: Dataset, data_dir: str | os.PathLike | None = None
) -> LabeledImages | None:
    """Load the examples of the source of the server's examples, see `make_server_pool`.

    They are the same for all runs of one `compute_static_key`.

    Args:
      spec: the settings.
      dataset: the data set.
      data_dir: folder of prepared data (default: TFDS_DATA_DIR).

    Returns:
      Images and labels; None if the server has no examples, or examples of the training set.

    Raises:
      ConfigError: if the source does not suit the data, or its files are missing.
    """
    if spec.server_data is None:
        return None
    with display_names_within("server_options", spec.server_options):
        return make_server_pool(spec.server_data, dataset, spec.server_options, data_dir=data_dir)
