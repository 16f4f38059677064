"""What is compiled once: the programs that all runs of one static signature share."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from fedjax_het.algorithms import entry_of
from fedjax_het.algorithms.building import num_bytes
from fedjax_het.algorithms.contract import Algorithm
from fedjax_het.algorithms.pretraining import pretrained
from fedjax_het.common.arrays import is_key
from fedjax_het.common.errors import require
from fedjax_het.data import Dataset
from fedjax_het.engine.crowding import make_room
from fedjax_het.engine.guard import CheckedProgram
from fedjax_het.engine.local import LocalTraining
from fedjax_het.engine.measured import chosen
from fedjax_het.engine.optimizers import (
    OPTIMIZERS,
    Details,
    check_transformation,
    optimizer_digest,
    own_transformation,
)
from fedjax_het.engine.plan import RUN, SHARED, Plan, make_plan
from fedjax_het.engine.rate_schedules import is_of_host
from fedjax_het.engine.rounds import ChunkInputs, Measuring, Rounds, make_chunk, make_stretch
from fedjax_het.engine.task import Task
from fedjax_het.nn import NETWORKS, Model, as_model, make_model, network_digest
from fedjax_het.nn.computing import computed
from fedjax_het.nn.conv_products import AUTO
from fedjax_het.nn.flops import training_flops
from fedjax_het.running.inputs import Reader, kinds_of
from fedjax_het.settings.layers import USER
from fedjax_het.settings.local_training import optional_numbers_of
from fedjax_het.settings.spec import ResolvedSpec, RunSpec

# Settings in which runs that share their programs may differ: they decide what the host draws, or
# when it stops, or are traced.
MAPPED = (
    "seed",
    "partition_seed",
    "partition",
    "partition_options",
    "alpha",
    "classes",
    "averaging",
    "lr_schedule",
    "stop_at",
    "patience",
    "min_gain",
    "hp",
)


def static_key(spec: RunSpec) -> str:
    """Equal for resolved specs that can be made by the same programs, in step."""
    key = repr(sorted((k, v) for k, v in spec.to_dict().items() if k not in MAPPED))
    given = _given_numbers(spec)
    scheduled = ["lr_schedule"] if spec.lr_schedule is not None else []
    return f"{key} {[*scheduled, *given]}" if scheduled or given else key


def _given_numbers(spec: RunSpec) -> list[str]:
    """The numbers of local training that are there since they are given, and programs read."""
    known = (name for name in optional_numbers_of(spec) if not is_of_host(name))
    return sorted(name for name in known if name in spec.hp)


class Made(NamedTuple):
    """What a network, or an optimiser, is made of; another object is another one."""

    made: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Made) and other.made is self.made

    def __hash__(self) -> int:
        return id(self.made)


class Signature(NamedTuple):
    """Every static choice of a run; equal signatures share their compiled programs."""

    algorithm: str
    methods: tuple  # the functions that the names of the method and its base stand for now
    options: tuple
    model: str
    network: Made  # what that name stands for now
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
    precision: str | None  # see `nn.computing`
    scheduled: bool  # whether the local rate has a schedule over rounds
    details: Details  # of local training
    own_optimizer: Made  # what the optimiser's name stands for now
    conv_impl: str = AUTO  # what "auto" stands for in its convolutions


def with_network(spec: RunSpec, network: Any) -> RunSpec:
    """The settings of a run whose network is given, or is to be the one that they name.

    Raises ConfigError where they name one besides, or the user's where none is given.
    """
    if network is None:
        require(spec.model != USER, "model", USER, "a network passed to the run: network=...")
        return spec
    ok = spec.model in (None, USER)
    require(ok, "model", spec.model, "none beside a network that is passed to the run")
    return dataclasses.replace(spec, model=USER)


def with_optimizer(spec: RunSpec, optimizer: Any) -> RunSpec:
    """The same with an optimiser that is given, or the one that they name; see `with_network`."""
    name = spec.local_optimizer
    if optimizer is None:
        needs = "an optimizer passed to the run: optimizer=..."
        require(name != USER, "local_optimizer", USER, needs)
        return spec
    expected = "none beside an optimizer that is passed to the run"
    require(name in (None, USER), "local_optimizer", name, expected)
    kind = "an optax.GradientTransformation, or a function of hp that returns one"
    ok = isinstance(optimizer, optax.GradientTransformation) or callable(optimizer)
    require(ok, "optimizer", optimizer, kind)
    spec = dataclasses.replace(spec, local_optimizer=USER)
    numbers = spec.resolved().hp
    check_transformation(USER, functools.partial(own_transformation, optimizer), numbers)
    return spec


def signature_of(
    spec: ResolvedSpec, dataset: Dataset, network: Any = None, optimizer: Any = None
) -> Signature:
    """That of resolved settings on these data; `network` and `optimizer` are the user's, for the
    model "user" and the local optimiser "user"."""
    if spec.model != USER:
        network = NETWORKS[spec.model].make
    if spec.local_optimizer != USER:
        optimizer = OPTIMIZERS[spec.local_optimizer].make if spec.local_optimizer else None
    return Signature(
        algorithm=spec.algorithm,
        methods=entry_of(spec.algorithm, spec.options).functions,
        options=tuple(sorted((k, _hashable(v)) for k, v in spec.options.items())),
        model=spec.model,
        network=Made(network),
        model_options=tuple(sorted((k, _hashable(v)) for k, v in spec.model_options.items())),
        input_shape=tuple(dataset.input_shape),
        num_classes=dataset.num_classes,
        measuring=Measuring(
            spec.num_clients,
            len(dataset.domain_names),
            spec.tests_clients,
            spec.gradient_gaps or 0,
            *((chosen(spec.measures), dataset.num_classes) if spec.measures else ()),
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
        precision=spec.precision,
        scheduled=spec.lr_schedule is not None,
        details=Details(
            tuple(sorted(spec.optimizer_options.items())),
            tuple(_given_numbers(spec)),
            spec.lr_step_schedule,
            spec.accumulation or 1,
            spec.local_steps,
        ),
        own_optimizer=Made(optimizer),
    )


class Program(NamedTuple):
    """What runs of one static signature share: one compilation serves all of them."""

    signature: Signature
    task: Task
    plan: Plan
    reader: Reader
    init: Callable  # (number of client states) -> (hp, key, first model: drawn) -> State
    rounds: Rounds
    chunk: CheckedProgram
    stretch: CheckedProgram  # a part of a round; compiled where rounds are long
    work: dict[tuple, float]  # samples that a round trains on, of what was traced: see `work_key`
    host_work: dict[str, CheckedProgram]

    @property
    def algorithm(self) -> Algorithm:
        return self.reader.algorithm

    @property
    def network_digest(self) -> dict[str, str]:
        """For the record of a run, where its network has no name that says what it is."""
        if self.signature.model != USER:
            return {}
        return {"network_digest": network_digest(network_of(self.signature))}

    def own_digests(self, hp: Mapping[str, Any]) -> dict[str, str]:
        """The same of its network and its optimiser, which reads these numbers."""
        found = dict(self.network_digest)
        if self.signature.optimizer == USER:
            own = self.signature.own_optimizer.made
            found["optimizer_digest"] = optimizer_digest(own, hp)
        return found

    @property
    def measuring(self) -> Measuring:
        return self.reader.measuring


@functools.lru_cache(maxsize=32)
def training_of(signature: Signature) -> LocalTraining:
    """How clients train, and which network."""
    model = network_of(signature)
    options = dict(signature.options)
    model = entry_of(signature.algorithm, options).network_of(model, options)
    model = computed(model, conv_impl=signature.conv_impl, precision=signature.precision)
    own = signature.own_optimizer.made if signature.optimizer == USER else None
    return LocalTraining(
        Task(model, signature.mean, signature.std),
        signature.optimizer,
        signature.local_epochs,
        signature.keep_state,
        signature.batch_size,
        signature.scored,
        details=signature.details._replace(own=own),
    )


def network_of(signature: Signature) -> Model:
    """The network that the settings name, or that the user gave."""
    shape, num_classes = signature.input_shape, signature.num_classes
    network_options = dict(signature.model_options)
    if signature.model != USER:
        return make_model(signature.model, shape, num_classes, **network_options)
    return as_model(signature.network.made, shape, num_classes, **network_options)


def algorithm_of(signature: Signature, plan: Plan | None = None) -> Algorithm:
    """The method; without a plan for what it asks of the host alone."""
    plan = plan or make_plan(spread=None)
    options = dict(signature.options)
    training = training_of(signature)
    algorithm = entry_of(signature.algorithm, options).make(training, plan, options)
    if signature.pretrain_epochs:
        clients = signature.measuring.num_clients
        algorithm = pretrained(algorithm, training, plan, signature.pretrain_epochs, clients)
    return algorithm


@functools.lru_cache(maxsize=32)
def program_of(signature: Signature, plan: Plan) -> Program:
    """The programs, built but not compiled."""
    task, measuring = training_of(signature).task, signature.measuring
    algorithm = algorithm_of(signature, plan)
    reader = Reader(algorithm, measuring, signature.server, signature.scheduled)
    kinds = kinds_of(reader)
    rounds, work = Rounds(algorithm, task, plan, measuring), {}

    def note(inputs: ChunkInputs, samples: float) -> None:
        work[work_key(inputs)] = samples

    zeros = jax.tree.map(lambda a: 0.0, measuring.nothing(algorithm, 1))
    chunk = CheckedProgram(
        plan.over_runs(make_chunk(rounds, note), (RUN, kinds)),
        baseline=lambda args: (args[0], zeros),
        name=f"{signature.algorithm} rounds",
        donate_argnums=0,
    )
    stretch = CheckedProgram(
        plan.over_runs(make_stretch(rounds), (RUN, kinds, SHARED, RUN)),
        baseline=lambda args: (args[0], zeros, args[3], 0),
        name=f"{signature.algorithm} rounds in stretches",
        donate_argnums=3,
    )
    host_work = {
        work.name: CheckedProgram(
            plan.over_runs(work.advance, (RUN, RUN, RUN, SHARED, kinds.server)),
            baseline=lambda args: args[1],
            name=work.name,
            donate_argnums=1,
        )
        for work in algorithm.host_work
    }
    init = _make_init(algorithm, task, plan)
    return Program(signature, task, plan, reader, init, rounds, chunk, stretch, work, host_work)


def work_key(inputs: ChunkInputs) -> tuple:
    """What decides how much a round of a program works; the same of all federations in step, and of
    one of them."""
    schedules = (inputs.schedule, inputs.tuning, inputs.survey)
    sizes = [None if one is None else one.batches.shape[-4:] for one in schedules]
    return (*sizes, None if inputs.server is None else inputs.server.labels.shape[-1])


@functools.lru_cache(maxsize=32)
def sample_flops(signature: Signature) -> int:
    """Floating-point operations of training on a sample."""
    return training_flops(training_of(signature).task.model)


def make_room_for_programs() -> None:
    """Forget programs where a process holds about as many as it may, see `crowding`."""
    make_room(program_of.cache_clear, training_of.cache_clear)


def _make_init(algorithm: Algorithm, task: Task, plan: Plan) -> Callable:
    """-> init(number of client states) -> (hp, key, first model) -> State, of jitted functions; the
    first model is drawn where none is given."""

    def strong(leaf: jax.Array) -> jax.Array:
        # A weakly typed leaf would come back strong, and the next call would compile again.
        return leaf if is_key(leaf) else jax.lax.convert_element_type(leaf, leaf.dtype)

    def init(num_clients: int, hp: Any, key: jax.Array, variables: Any):
        state = jax.tree.map(strong, algorithm.init(hp, key, variables, num_clients))
        return plan.with_clients(state, plan.hold) if plan.splits_clients else state

    # A program of its own, so that one compilation serves every method with this network.
    draw = jax.jit(plan.over_runs(task.model.init, (RUN,)))

    @functools.lru_cache
    def init_of(num_clients: int) -> Callable:
        begin = jax.jit(plan.over_runs(functools.partial(init, num_clients), (RUN, RUN, RUN)))

        def made(hp: Any, key: jax.Array, variables: Any = None) -> Any:
            return begin(hp, key, draw(key) if variables is None else variables)

        return made

    return init_of


def client_state_bytes(program: Program, spec: ResolvedSpec) -> int:
    """What a client of one federation keeps between rounds."""
    hp = {name: jax.ShapeDtypeStruct((), np.float32) for name in spec.hp}
    key = jax.eval_shape(lambda: jax.random.key(0))
    model = program.task.model
    init = lambda hp, key: program.algorithm.init(hp, key, model.init(key), 1)  # noqa: E731
    return num_bytes(jax.eval_shape(init, hp, key).clients)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
