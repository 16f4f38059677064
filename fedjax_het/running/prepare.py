"""Federations made ready: settings checked, data placed, programs built but not compiled."""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.algorithms import ALGORITHMS, entry_of
from fedjax_het.algorithms.base import Algorithm, Tuning, num_bytes
from fedjax_het.algorithms.pretraining import pretrained
from fedjax_het.common.errors import require, require_name
from fedjax_het.data import (
    Dataset,
    Partition,
    PartitionSummary,
    ServerData,
    ServerSummary,
    average_examples,
    load_dataset,
    make_partition,
    partition_from_clients,
    server_examples,
    server_pool,
    tests_of,
    withheld_examples,
)
from fedjax_het.data.server_data import Pool
from fedjax_het.engine.evaluation import TestsShape, evaluation_set, tests_shape
from fedjax_het.engine.guard import CheckedProgram
from fedjax_het.engine.lanes import Averages, Examples
from fedjax_het.engine.local import LocalTraining
from fedjax_het.engine.memory import free_bytes
from fedjax_het.engine.plan import AXIS, RUN, RUNS, SHARED, Plan, make_plan
from fedjax_het.engine.probe import LaneChoice, choose_lanes
from fedjax_het.engine.randomness import Stream
from fedjax_het.engine.rounds import ChunkInputs, Measuring, chunk_kinds, make_chunk
from fedjax_het.engine.schedule import Scheduler, Shape, cohort_size, common_shape, useful_fraction
from fedjax_het.engine.task import Task
from fedjax_het.engine.units import ClientUnits, PairUnits
from fedjax_het.nn import make_model
from fedjax_het.settings.spec import RunSpec

# Settings in which runs that share their programs may differ: they decide what the host draws, or
# are traced.
MAPPED = (
    "seed",
    "partition_seed",
    "partition",
    "partition_options",
    "alpha",
    "classes",
    "averaging",
    "hp",
)
DEVICE_STATE, HOST_STATE = "device", "host"  # where the states of all clients are
# Of a device's memory: if all clients' states take more, they are on the host. Checking a program's
# numbers holds four copies on every device, and CPU devices share the memory with the host.
STATE_SHARE = 1 / 8
PAIR_LANES = 16  # of condensation on an accelerator's device, unless told otherwise
BARRIERS = 0.95  # what is left of the speed when devices wait for each other every round


class Program(NamedTuple):
    """What runs of one static signature share: one compilation serves all of them."""

    task: Task
    plan: Plan
    algorithm: Algorithm
    measuring: Measuring
    kinds: ChunkInputs  # what each of a chunk's inputs is to the federations
    init: Callable  # (number of client states) -> jitted (hp, key) -> State
    chunk: CheckedProgram
    host_work: dict[str, CheckedProgram]


@functools.lru_cache(maxsize=32)
def _training(signature: "_Signature") -> LocalTraining:
    s = signature
    model = make_model(s.model, s.input_shape, s.num_classes, **dict(s.model_options))
    options = dict(s.options)
    model = entry_of(s.algorithm, options).network(model, **options)
    return LocalTraining(
        Task(model, s.mean, s.std),
        s.optimizer,
        s.local_epochs,
        s.keep_state,
        s.batch_size,
        s.scored,
    )


def _algorithm(signature: "_Signature", plan: Plan) -> Algorithm:
    options = dict(signature.options)
    training = _training(signature)
    algorithm = entry_of(signature.algorithm, options).build(training, plan, **options)
    if signature.pretrain_epochs:
        clients = signature.measuring.num_clients
        algorithm = pretrained(algorithm, training, signature.pretrain_epochs, clients)
    return algorithm


@functools.lru_cache(maxsize=32)
def _program(signature: "_Signature", plan: Plan) -> Program:
    task = _training(signature).task
    algorithm = _algorithm(signature, plan)
    kinds = chunk_kinds(
        tunes=algorithm.tuning is not None,
        tests_clients=signature.measuring.tests_clients,
        global_model=algorithm.global_model is not None,
        server=signature.server,
        surveys=signature.measuring.gaps_every > 0,
        averages=algorithm.averaging is not None,
    )
    measuring = signature.measuring
    chunk = CheckedProgram(
        plan.over_runs(make_chunk(algorithm, task, plan, measuring), (RUN, kinds)),
        baseline=lambda args: (
            args[0],
            jax.tree.map(lambda a: 0.0, measuring.nothing(algorithm, 1)),
        ),
        name=f"{signature.algorithm} rounds",
        donate_argnums=0,
    )
    works = {
        work.name: CheckedProgram(
            plan.over_runs(work.advance, (RUN, RUN, RUN, SHARED, kinds.server)),
            baseline=lambda args: args[1],
            name=work.name,
            donate_argnums=1,
        )
        for work in algorithm.host_work
    }

    def init(num_clients, hp, key):
        state = algorithm.init(hp, key, task.model.init(key), num_clients)
        # A weakly typed leaf would come back strong, and the next call would compile again.
        return jax.tree.map(lambda a: jax.lax.convert_element_type(a, a.dtype), state)

    @functools.lru_cache
    def init_of(num_clients):
        return jax.jit(plan.over_runs(functools.partial(init, num_clients), (RUN, RUN)))

    return Program(task, plan, algorithm, measuring, kinds, init_of, chunk, works)


class _Signature(NamedTuple):
    """Every static choice of a run; equal signatures share their compiled programs."""

    algorithm: str
    methods: tuple  # the functions that the names of the method and its base stand for now
    options: tuple
    model: str
    model_options: tuple
    input_shape: tuple
    num_classes: int
    measuring: Measuring
    mean: tuple
    std: tuple
    optimizer: str | None
    keep_state: bool
    local_epochs: int | None
    batch_size: int
    scored: str
    server: bool
    pretrain_epochs: int


def _signature(spec: RunSpec, dataset: Dataset) -> _Signature:
    return _Signature(
        algorithm=spec.algorithm,
        methods=_methods(spec),
        options=tuple(sorted((k, _hashable(v)) for k, v in spec.options.items())),
        model=spec.model,
        model_options=tuple(sorted(spec.model_options.items())),
        input_shape=tuple(dataset.input_shape),
        num_classes=dataset.num_classes,
        measuring=Measuring(
            spec.num_clients,
            len(dataset.domain_names),
            spec.tests_clients,
            spec.gradient_gaps or 0,
        ),
        mean=tuple(dataset.mean),
        std=tuple(dataset.std),
        optimizer=spec.local_optimizer,
        keep_state=spec.optimizer_state == "keep",
        local_epochs=spec.local_epochs,
        batch_size=spec.batch_size,
        scored=spec.scored_model if spec.tests_clients else "global",
        server=spec.server_data is not None,
        pretrain_epochs=spec.pretrain_epochs or 0,
    )


def _methods(spec: RunSpec) -> tuple:
    """What tells a method from another of the same name, see `algorithms.register`."""
    entry = ALGORITHMS[spec.algorithm]
    base = (spec.options.get("base", entry.bases[0]),) if entry.bases else ()
    return tuple((ALGORITHMS[n].build, ALGORITHMS[n].network) for n in (spec.algorithm, *base))


def _hashable(value):
    return tuple(value) if isinstance(value, list) else value


def static_key(spec: RunSpec) -> str:
    """Equal for resolved specs that can be made by the same programs, in step."""
    return repr(sorted((k, v) for k, v in spec.to_dict().items() if k not in MAPPED))


@dataclass
class Federation:
    """One run made ready on the host: who holds what, and when it is worked on."""

    spec: RunSpec
    partition: Partition
    scheduler: Scheduler
    tuning: Scheduler | None = None  # of all clients, where copies are tuned to be scored
    tests: Partition | None = None  # of every client, where they are tested on their own
    server: ServerData | None = None  # its examples, if it has any
    survey: Scheduler | None = None  # of all clients, where their gradients are measured


@dataclass
class Group:
    """Federations that the same programs serve, `program.plan.capacity` of them at a time."""

    dataset: Dataset
    program: Program
    federations: list[Federation]
    shape: Shape  # holds for every round of all of them
    tuning_shape: Shape | None
    tests_shape: TestsShape | None
    survey_shape: Shape | None
    shared: ChunkInputs  # what is the same for all
    lane_choice: LaneChoice
    client_state: str = DEVICE_STATE
    pool: Pool | None = None  # what the server's examples are from besides those of training

    @property
    def plan(self) -> Plan:
        return self.program.plan

    def split(self, federation: Federation) -> PartitionSummary:
        """A federation's partition in numbers."""
        return federation.partition.summary(self.dataset.train_labels, self.dataset.num_classes)

    def server_examples(self, federation: Federation) -> Examples:
        """What a federation's server learns from."""
        return Examples(*federation.server.examples(self.dataset, self.pool))

    def num_averages(self, federation: Federation) -> int:
        """How many averages of their examples a federation's clients share."""
        averaging = self.program.algorithm.averaging
        return 0 if averaging is None else int(averaging.counts(federation.partition.sizes).sum())

    def averages(self, federation: Federation) -> Averages:
        """These averages, with room for those of any federation of the group."""
        data = self.dataset
        images, labels = average_examples(
            data.train_images,
            data.train_labels,
            data.num_classes,
            federation.partition,
            self.program.algorithm.averaging,
            federation.spec.partition_seed,
        )
        more = max(map(self.num_averages, self.federations)) - len(labels)
        padded = [np.pad(a, [(0, more)] + [(0, 0)] * (a.ndim - 1)) for a in (images, labels)]
        return Averages(*padded, np.int32(len(labels)))

    def server_summary(self, federation: Federation) -> ServerSummary | None:
        """The same in numbers; None where the server has nothing."""
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
    lanes: int | str = "auto",
    devices: Sequence[jax.Device] | int | None = None,
    blocks: int | None = None,
    spread: str = "auto",
    width: int | str = "auto",
    client_state: str = "auto",
    memory: int | None = None,
    data_dir: str | os.PathLike | None = None,
    pool: Pool | None = None,
) -> Group:
    """Check the settings, make the partitions, place the data. Nothing is compiled yet.

    Args:
      specs: of one `static_key`.
      partitions: one for each, instead of those that the settings name.
      lanes: per block, or "auto"; devices: which, or how many of the first (default: all).
      blocks: of lanes (default: as many as devices); for what was begun on another number.
      spread, width: see `Plan`; "auto" for what should be fastest for so many runs.
      client_state: where the states of all clients are: "device"; "host", from where those of the
        next rounds' clients alone are put on the devices; or "auto", the host if all would take
        more than an eighth of a device's memory.
      memory: bytes on each device that may be taken (default: what is free).
      data_dir: of the prepared data (default: TFDS_DATA_DIR).
      pool: what `server_pool_of` gives for them, where it is there already.
    Raises: ConfigError.
    """
    specs = [spec.resolved() for spec in specs]
    assert len({static_key(spec) for spec in specs}) == 1
    spec = specs[0]
    if dataset is None:
        require(spec.dataset != "user", "dataset", "user", "a Dataset passed to simulate()")
        dataset = load_dataset(spec.dataset, normalisation=spec.normalisation, data_dir=data_dir)
    require_name("client_state", client_state, ("auto", DEVICE_STATE, HOST_STATE))
    for name, value in (("lanes", lanes), ("width", width)):
        ok = value == "auto" or (isinstance(value, int) and value >= 1)
        require(ok, name, value, "'auto' or a whole number >= 1")
    if not isinstance(devices, Sequence):
        there = len(jax.devices())
        fits = devices is None or 1 <= devices <= there
        require(fits, "devices", devices, f"1 to {there}, the devices that there are")
        devices = jax.devices()[: devices or there]
    signature = _signature(spec, dataset)
    sampled = cohort_size(spec.num_clients, spec.participation)
    blocks = blocks or min(len(devices), sampled)
    algorithm = _algorithm(signature, make_plan(spread=None))
    splits = [
        split or split_clients(one, dataset)
        for one, split in zip(specs, partitions or [None] * len(specs), strict=True)
    ]
    pool = server_pool_of(spec, dataset, data_dir) if pool is None else pool
    servers = [
        server_data_of(one, dataset, split, pool) for one, split in zip(specs, splits, strict=True)
    ]
    trained_on = splits
    if algorithm.shares_server_data:
        trained_on = [
            _shared_with_all(split, server) for split, server in zip(splits, servers, strict=True)
        ]
    units = [
        _units(one, split, dataset, algorithm) for one, split in zip(specs, trained_on, strict=True)
    ]
    choice = LaneChoice(lanes, 1, {})
    if lanes == "auto" and algorithm.pairs is not None:
        choice = LaneChoice(_lanes_of_pairs(units, blocks), 1, {})
    elif lanes == "auto":
        choice = choose_lanes(
            _training(signature),
            batch_size=spec.batch_size,
            devices=devices[:blocks],
            cohort_size=sampled,
            federations=len(specs),
            label=f"{spec.model} {signature.model_options} {dataset.input_shape} "
            f"{dataset.num_classes}",
        )
    federations = []
    for one, split, held, of, server in zip(specs, splits, trained_on, units, servers, strict=True):
        scheduler = Scheduler(
            held,
            of,
            seed=one.seed,
            rounds=one.rounds,
            participation=one.participation,
            averaging=one.averaging,
            eval_every=one.eval_every,
            blocks=blocks,
            lanes=choice.lanes,
        )
        tuning = None
        if algorithm.tuning is not None:
            tuning = _tuning_scheduler(one, split, algorithm.tuning, blocks, choice.lanes)
        tests = test_clients(one, split, dataset) if one.tests_clients else None
        survey = _survey_scheduler(one, split, blocks, choice.lanes) if one.gradient_gaps else None
        federations.append(Federation(one, split, scheduler, tuning, tests, server, survey))
    width = choice.width if width == "auto" else width
    width = min(width, -(-len(specs) // len(devices)))
    if len(devices) < blocks:
        spread = RUNS
    if spread == "auto":
        spread = _fastest_spread(federations, len(devices), width)
    if spread == AXIS:
        plan = make_plan(choice.lanes, devices[:blocks], blocks=blocks)
    else:
        plan = make_plan(choice.lanes, devices, spread=RUNS, blocks=blocks, width=width)
    program = _program(signature, plan)
    where = _client_state(client_state, program, spec, sampled, memory)
    return place(program, dataset, federations, choice, where, pool)


def _shared_with_all(split: Partition, server: ServerData) -> Partition:
    """Every client's examples, and the server's besides."""
    return partition_from_clients(
        [np.concatenate([split.client(k), server.indices]) for k in range(split.num_clients)]
    )


def _client_state(
    choice: str, program: Program, spec: RunSpec, sampled: int, memory: int | None
) -> str:
    """Where clients' states are to be: on the devices or on the host."""
    size = client_state_bytes(program, spec)
    if not size or choice == DEVICE_STATE:
        return DEVICE_STATE
    pageable, plan = program.algorithm.pageable, program.plan
    if choice == HOST_STATE:
        require(
            pageable,
            "client_state",
            choice,
            f"'device' or 'auto': {spec.algorithm} needs the states of all clients at once"
            + (", to score their own models" if spec.tests_clients else ""),
        )
        return HOST_STATE
    if not pageable or sampled == spec.num_clients:
        return DEVICE_STATE
    allowed = memory or free_bytes(plan.mesh.local_devices)
    needed = size * spec.num_clients * plan.width
    too_much = plan.agreed(int(allowed is not None and needed > STATE_SHARE * allowed))
    return HOST_STATE if too_much else DEVICE_STATE


def client_state_bytes(program: Program, spec: RunSpec) -> int:
    """What a client of one federation keeps between rounds."""
    hp = {name: jax.ShapeDtypeStruct((), np.float32) for name in spec.hp}
    key = jax.eval_shape(lambda: jax.random.key(0))
    model = program.task.model
    init = lambda hp, key: program.algorithm.init(hp, key, model.init(key), 1)  # noqa: E731
    return num_bytes(jax.eval_shape(init, hp, key).clients)


def _units(spec: RunSpec, split: Partition, dataset: Dataset, algorithm: Algorithm):
    """What the lanes of a run go through."""
    if algorithm.pairs is None:
        return ClientUnits(split, spec.local_epochs + algorithm.extra_passes, spec.batch_size)
    labels, num_classes = dataset.train_labels, dataset.num_classes
    return PairUnits(split, labels, num_classes, algorithm.pairs, spec.batch_size)


def _tuning_scheduler(
    spec: RunSpec, split: Partition, tuning: Tuning, blocks: int, lanes: int
) -> Scheduler:
    """When each client tunes its copy: all of them, in every round that is evaluated."""
    units = ClientUnits(
        split, tuning.epochs, spec.batch_size, steps=tuning.steps, stream=Stream.TUNING
    )
    return Scheduler(
        split,
        units,
        seed=spec.seed,
        rounds=spec.rounds,
        participation=1.0,
        averaging=None,
        eval_every=spec.eval_every,
        blocks=blocks,
        lanes=lanes,
    )


def _survey_scheduler(spec: RunSpec, split: Partition, blocks: int, lanes: int) -> Scheduler:
    """Every client once through its data: one round, which serves whenever gradients are due."""
    return Scheduler(
        split,
        ClientUnits(split, 1, spec.batch_size),
        seed=spec.seed,
        rounds=1,
        participation=1.0,
        averaging="weighted",
        eval_every=1,
        blocks=blocks,
        lanes=lanes,
    )


def _lanes_of_pairs(units: Sequence[PairUnits], blocks: int) -> int:
    """Pairs side by side on a device: in turn on a CPU, else as many as there are, up to a bound.

    Each holds the activations of a batch of real images and of its own; `lanes` sets it by hand.
    """
    if jax.default_backend() == "cpu":
        return 1
    most = max(int((of.steps > 0).sum()) for of in units)
    return min(PAIR_LANES, -(-most // blocks))


def place(
    program: Program,
    dataset: Dataset,
    federations: list[Federation],
    choice: LaneChoice,
    client_state: str = DEVICE_STATE,
    pool: Pool | None = None,
) -> Group:
    """A group with its data on the devices."""
    plan, kinds = program.plan, program.kinds
    test = test_examples = None
    num_batches = 1
    if kinds.test is not None:
        test = evaluation_set(plan, dataset.test_images, dataset.test_labels, dataset.test_domains)
        num_batches = test.labels.shape[1]
    if kinds.client_tests is not None:
        test_labels = np.asarray(dataset.test_labels, np.int32)
        test_examples = plan.put(Examples(dataset.test_images, test_labels))
    images, labels = dataset.train_images, dataset.train_labels
    if program.algorithm.shares_server_data and pool is not None:
        images, labels = np.concatenate([images, pool[0]]), np.concatenate([labels, pool[1]])
    examples = Examples(images, np.asarray(labels, np.int32))
    shared = ChunkInputs(
        hp=None,
        train_key=None,
        schedule=None,
        tuning=None,
        num_rounds=None,
        num_eval_batches=plan.put(jnp.int32(num_batches)),
        examples=plan.put(examples),
        test=test,
        client_tests=None,
        test_examples=test_examples,
        server=None,
        survey=None,
        averages=None,
    )
    shape = common_shape([f.scheduler for f in federations], plan.width)
    tuning_shape = None
    if kinds.tuning is not None:
        tuning_shape = common_shape([f.tuning for f in federations], plan.width)
    survey_shape = None
    if kinds.survey is not None:
        survey_shape = common_shape([f.survey for f in federations], plan.width)
    largest = None
    if kinds.client_tests is not None:
        shapes = (tests_shape(plan, f.tests) for f in federations)
        largest = TestsShape(*map(max, zip(*shapes, strict=True)))
    shapes = (shape, tuning_shape, largest, survey_shape)
    return Group(dataset, program, federations, *shapes, shared, choice, client_state, pool)


def narrower(group: Group, width: int) -> Group:
    """The same federations, `width` at a time on each device; 0: one at a time on all devices."""
    plan, signature = group.plan, _signature(group.federations[0].spec, group.dataset)
    devices = list(plan.mesh.devices.flat)
    if width:
        plan = plan._replace(width=width)
    else:
        plan = make_plan(plan.lanes, devices[: plan.blocks], blocks=plan.blocks)
    more = (group.federations, group.lane_choice, group.client_state, group.pool)
    return place(_program(signature, plan), group.dataset, *more)


def _fastest_spread(federations: Sequence[Federation], devices: int, width: int) -> str:
    """Whether devices should share every federation, or have federations of their own."""
    count, at_once = len(federations), devices * width
    if count == 1:
        return AXIS
    apart = count / (-(-count // at_once) * at_once)
    work = federations[0].scheduler.work
    together = work.block_steps.sum() / max(1, (work.block_steps.max(1) * devices).sum())
    return RUNS if apart >= BARRIERS * together else AXIS


def split_clients(spec: RunSpec, dataset: Dataset) -> Partition:
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
    given = {"alpha": spec.alpha, "classes": spec.classes}
    domains = dataset.train_domains
    split = make_partition(
        spec.partition,
        dataset.train_labels[rest],
        dataset.num_classes,
        num_clients=spec.num_clients,
        seed=spec.partition_seed,
        domains=None if domains is None else domains[rest],
        domain_names=dataset.domain_names,
        class_names=dataset.class_names,
        **{name: value for name, value in given.items() if value is not None},
        **spec.partition_options,
    )
    return dataclasses.replace(split, indices=rest[split.indices]) if len(withheld) else split


def server_pool_of(
    spec: RunSpec, dataset: Dataset, data_dir: str | os.PathLike | None = None
) -> Pool | None:
    """The images that the source of the server's examples brings, see `server_pool`: the same for
    all runs of a `static_key`. Raises ConfigError where it does not suit the data, or is missing.
    """
    if spec.server_data is None:
        return None
    return server_pool(spec.server_data, dataset, spec.server_options, data_dir=data_dir)


def server_data_of(
    spec: RunSpec, dataset: Dataset, split: Partition, pool: Pool | None
) -> ServerData | None:
    """The server's examples that resolved settings name. Raises ConfigError if clients hold too
    few."""
    if spec.server_data is None:
        return None
    return server_examples(
        spec.server_data, dataset, split, spec.partition_seed, spec.server_options, pool
    )


def test_clients(spec: RunSpec, split: Partition, dataset: Dataset) -> Partition:
    """The tests of every client that resolved settings name, see `tests_of`."""
    return tests_of(split, dataset, spec.partition_seed, spec.test_per_client)
