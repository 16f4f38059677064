"""Objects of the user that take the place of what settings name: data, partition, network, optimizer."""

import dataclasses
import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import optax

from fedjax_het.config.resolve import USER_PROVIDED
from fedjax_het.config.run_spec import ResolvedRunSpec, RunSpec
from fedjax_het.core.optimizers import check_transformation, make_user_transformation
from fedjax_het.data import Dataset, Partition, load_dataset
from fedjax_het.data.dataset import validate_dataset
from fedjax_het.utils.errors import require


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
