"""Federations made ready: settings checked, data placed, programs built but not compiled."""

import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedjax_het.algorithms import entry_of
from fedjax_het.data import Dataset, Partition, PartitionSummary, ServerSummary
from fedjax_het.data.server_data import Pool
from fedjax_het.engine.plan import AXIS, Plan
from fedjax_het.engine.probe import LaneChoice
from fedjax_het.engine.schedule import useful_fraction
from fedjax_het.running.federations import (
    Federation,
    Shapes,
    federation_of,
    first_rounds,
    shapes_of,
    units_of,
    with_method_inputs,
)
from fedjax_het.running.initial import initial_of
from fedjax_het.running.inputs import Source, group_inputs
from fedjax_het.running.needs import require_room_for_plan, require_room_for_settings
from fedjax_het.running.placement import (
    DEVICE_STATE,
    SPLIT_STATE,
    Placement,
    blocks_of,
    client_state_of,
    lanes_of,
    narrower_plan,
    plan_of,
    shares_server,
)
from fedjax_het.running.programs import (
    Program,
    Signature,
    algorithm_of,
    make_room_for_programs,
    network_of,
    program_of,
    signature_of,
    static_key,
)
from fedjax_het.running.splits import dataset_of, server_pool_of, split_of
from fedjax_het.running.traffic import require_traffic
from fedjax_het.settings.spec import RunSpec

log = logging.getLogger("fedjax_het")


@dataclass(frozen=True, eq=False)
class Group:
    """Federations that the same programs serve, `program.plan.capacity` of them at a time."""

    program: Program
    federations: list[Federation]
    source: Source  # of what the programs read
    shared: dict[str, Any]  # the part of it that is the same for all
    lane_choice: LaneChoice
    client_state: str = DEVICE_STATE

    @property
    def plan(self) -> Plan:
        return self.program.plan

    @property
    def dataset(self) -> Dataset:
        return self.source.dataset

    @property
    def pool(self) -> Pool | None:
        """What the server's examples are from besides those of training."""
        return self.source.pool

    @property
    def shapes(self) -> Shapes:
        return self.source.shapes

    def split(self, federation: Federation) -> PartitionSummary:
        """A federation's partition in numbers."""
        return federation.partition.summary(self.dataset.train_labels, self.dataset.num_classes)

    def server_summary(self, federation: Federation) -> ServerSummary | None:
        """The server's examples in numbers; None where it has none."""
        if federation.server is None:
            return None
        return federation.server.summary(self.dataset, federation.partition, self.pool)

    def useful_fraction(self, federations: Sequence[Federation]) -> float:
        """Share of the samples that the lanes of these, in step, run through which are clients'."""
        schedulers = [f.scheduler for f in federations]
        return useful_fraction(schedulers, together=self.plan.spreads == AXIS)


def prepare(
    specs: Sequence[RunSpec],
    *,
    dataset: Dataset | None = None,
    partitions: Sequence[Partition] | None = None,
    own_partition: Partition | None = None,
    network: Any = None,
    optimizer: Any = None,
    placement: Placement = Placement(),
    data_dir: str | os.PathLike | None = None,
    pool: Pool | None = None,
    count: int | None = None,
) -> Group:
    """Check the settings, make the partitions, place the data. Nothing is compiled yet.

    Args:
      specs: of one `static_key`.
      dataset: the user's own, or one that is loaded already.
      partitions: those that the settings name, one for each, where they are made already.
      own_partition: the user's, in the place of those.
      network: the user's own, for specs whose model is "user".
      optimizer: the user's own, for specs whose local optimiser is "user".
      placement: where they go.
      data_dir: of the prepared data (default: TFDS_DATA_DIR).
      pool: what `server_pool_of` gives for them, where it is there already.
      count: of the runs that are made by these programs, of which these may be some; how devices
        are shared out depends on it (default: these are all).
    Raises: ConfigError.
    """
    make_room_for_programs()
    resolved = [spec.resolved() for spec in specs]
    assert len({static_key(spec) for spec in resolved}) == 1
    spec = resolved[0]
    dataset = dataset_of(spec, dataset, data_dir, caller="simulate")
    devices = placement.present_devices()
    signature = signature_of(spec, dataset, network, optimizer)
    require_room_for_settings(spec, dataset, signature, placement, devices)
    algorithm = algorithm_of(signature)
    _say_what_lacks(signature)
    initial = initial_of(spec, signature)
    pool = server_pool_of(spec, dataset, data_dir) if pool is None else pool

    shares = algorithm.shares_server_data
    made: Sequence[Partition | None] = partitions or (None,) * len(resolved)
    splits = [
        split_of(each, dataset, pool, partition=given, own=own_partition, shares_server_data=shares)
        for each, given in zip(resolved, made, strict=True)
    ]
    units = [
        units_of(each, split.trained_on, dataset, algorithm)
        for each, split in zip(resolved, splits, strict=True)
    ]
    blocks = blocks_of(placement, devices, spec)
    count = count or len(resolved)
    trained_on = [split.trained_on for split in splits]
    planned = functools.partial(first_rounds, resolved, trained_on, units, blocks)
    choice = lanes_of(placement, signature, algorithm, devices, blocks, resolved, planned, count)
    if choice.conv_impl != signature.conv_impl:
        log.info("convolutions: %s", choice.conv_impl)
        signature = signature._replace(conv_impl=choice.conv_impl)
    federations = [
        federation_of(*each, algorithm, blocks=blocks, lanes=choice.lanes, initial=initial)
        for each in zip(resolved, splits, units, strict=True)
    ]
    federations = with_method_inputs(federations, algorithm, dataset, pool)
    share = functools.partial(shares_server, placement, signature, algorithm, devices[:blocks])
    schedulers = [f.scheduler for f in federations]
    plan = plan_of(placement, devices, blocks, choice, schedulers, count, share)
    program = program_of(signature, plan)
    client_state = client_state_of(placement, program, spec)
    if client_state == SPLIT_STATE:
        program = program_of(signature, plan._replace(splits_clients=True))
    require_traffic(program, federations, dataset, pool)
    require_room_for_plan(program, federations[0], client_state, placement)
    return _placed(program, dataset, pool, federations, choice, client_state)


def _say_what_lacks(signature: Signature) -> None:
    """Warn of a network without what makes the method another one than its base."""
    needs = entry_of(signature.algorithm, dict(signature.options)).needs
    if "norms" in needs and not network_of(signature).norm_layers():
        log.warning(
            "note: %s is about normalisation layers, and network %r has none that are known as "
            "such: this is FedAvg",
            signature.algorithm,
            signature.model,
        )


def narrower(group: Group, width: int) -> Group:
    """The same federations, `width` at a time on each device; 0: one at a time on all devices."""
    program = program_of(group.program.signature, narrower_plan(group.plan, width))
    same = (group.federations, group.lane_choice, group.client_state)
    return _placed(program, group.dataset, group.pool, *same)


def unspread(group: Group) -> Group:
    """The same federations on the default device, of which programs know nothing."""
    program = program_of(group.program.signature, group.plan._replace(mesh=None))
    same = (group.federations, group.lane_choice, group.client_state)
    return _placed(program, group.dataset, group.pool, *same)


def _placed(
    program: Program,
    dataset: Dataset,
    pool: Pool | None,
    federations: list[Federation],
    choice: LaneChoice,
    client_state: str,
) -> Group:
    """A group with its data on the devices."""
    shapes = shapes_of(federations, program.plan)
    source = Source(program.plan, program.reader, dataset, pool, shapes)
    return Group(program, federations, source, group_inputs(source), choice, client_state)
