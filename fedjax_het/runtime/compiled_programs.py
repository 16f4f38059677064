"""The programs that all runs of one static signature share, compiled once."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_het.algorithms import get_algorithm_spec
from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import num_bytes, with_pretraining
from fedjax_het.config.local_training import optional_hyperparameters
from fedjax_het.config.resolve import USER_PROVIDED
from fedjax_het.config.run_spec import ResolvedRunSpec, RunSpec
from fedjax_het.core.execution_plan import (
    PER_DEVICE,
    PER_RUN,
    REPLICATED,
    ExecutionPlan,
    make_execution_plan,
)
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.lr_schedules import is_round_schedule_hyperparameter
from fedjax_het.core.miscompile_guard import VerifiedJit
from fedjax_het.core.mmap_limit import evict_programs_if_needed
from fedjax_het.core.optimizers import (
    OPTIMIZERS,
    LocalTrainingOptions,
    compute_optimizer_digest,
)
from fedjax_het.core.round_program import (
    SCHEDULE_PLACEMENTS,
    ChunkInputs,
    EvaluationOptions,
    RoundComponents,
    make_partial_round,
    make_round_chunk,
)
from fedjax_het.core.task import Task
from fedjax_het.data import Dataset
from fedjax_het.metrics.registry import parse_metrics
from fedjax_het.nn import NETWORKS, Model, compute_network_digest, make_model, to_model
from fedjax_het.nn.conv.dispatch import AUTO
from fedjax_het.nn.flops import count_training_flops
from fedjax_het.nn.precision import configure_compute
from fedjax_het.utils.arrays import is_prng_key

# Settings in which runs that share their programs may differ: they decide what the host draws, or
# when it stops, or are traced.
PER_RUN_SETTINGS = (
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


def compute_static_key(spec: RunSpec) -> str:
    """Return a key that is equal for runs that the same programs can execute, in step."""
    key = repr(sorted((k, v) for k, v in spec.to_dict().items() if k not in PER_RUN_SETTINGS))
    hyperparameter_names = _traced_optional_hyperparameters(spec)
    schedule_markers = ["lr_schedule"] if spec.lr_schedule is not None else []
    return (
        f"{key} {[*schedule_markers, *hyperparameter_names]}"
        if schedule_markers or hyperparameter_names
        else key
    )


def _traced_optional_hyperparameters(spec: RunSpec) -> list[str]:
    """Return the optional hyper-parameters of local training that the run sets and programs read."""
    candidate_names = (
        name
        for name in optional_hyperparameters(spec)
        if not is_round_schedule_hyperparameter(name)
    )
    return sorted(name for name in candidate_names if name in spec.hp)


class ById(NamedTuple):
    """A function that makes a network or an optimizer; equal only to itself."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Signature(NamedTuple):
    """Every static choice of a run; equal signatures share their compiled programs."""

    algorithm: str
    method_functions: tuple  # the functions that the names of the method and its base stand for now
    options: tuple
    model: str
    network_source: ById  # what that name stands for now
    model_options: tuple
    input_shape: tuple
    num_classes: int
    evaluation: EvaluationOptions
    mean: tuple
    std: tuple
    optimizer: str | None
    keep_state: bool
    local_epochs: int | None
    batch_size: int
    evaluated_model: str
    has_server_data: bool
    pretrain_epochs: int
    precision: str | None  # see `nn.precision`
    has_lr_schedule: bool  # whether the local rate has a schedule over rounds
    training_options: LocalTrainingOptions  # of local training
    optimizer_source: ById  # what the optimiser's name stands for now
    conv_impl: str = AUTO  # what "auto" stands for in its convolutions


def build_signature(
    spec: ResolvedRunSpec, dataset: Dataset, network: Any = None, optimizer: Any = None
) -> Signature:
    """Return the static choices of a run.

    Args:
      spec: the settings.
      dataset: the data set.
      network: the user's network, for the model "user".
      optimizer: the user's optimizer, for the local optimizer "user".
    """
    if spec.model != USER_PROVIDED:
        network = NETWORKS[spec.model].make
    if spec.local_optimizer != USER_PROVIDED:
        optimizer = OPTIMIZERS[spec.local_optimizer].make if spec.local_optimizer else None
    return Signature(
        algorithm=spec.algorithm,
        method_functions=get_algorithm_spec(spec.algorithm, spec.options).identity_key,
        options=tuple(sorted((k, _to_hashable(v)) for k, v in spec.options.items())),
        model=spec.model,
        network_source=ById(network),
        model_options=tuple(sorted((k, _to_hashable(v)) for k, v in spec.model_options.items())),
        input_shape=tuple(dataset.input_shape),
        num_classes=dataset.num_classes,
        evaluation=EvaluationOptions(
            spec.num_clients,
            len(dataset.domain_names),
            spec.has_client_tests,
            spec.gradient_gaps or 0,
            *((parse_metrics(spec.measures), dataset.num_classes) if spec.measures else ()),
        ),
        mean=tuple(dataset.mean),
        std=tuple(dataset.std),
        optimizer=spec.local_optimizer,
        keep_state=spec.optimizer_state == "keep",
        local_epochs=spec.local_epochs,
        batch_size=spec.batch_size,
        evaluated_model=spec.evaluated_model if spec.has_client_tests else "global",
        has_server_data=spec.server_data is not None,
        pretrain_epochs=spec.pretrain_epochs or 0,
        precision=spec.precision,
        has_lr_schedule=spec.lr_schedule is not None,
        training_options=LocalTrainingOptions(
            tuple(sorted(spec.optimizer_options.items())),
            tuple(_traced_optional_hyperparameters(spec)),
            spec.lr_step_schedule,
            spec.accumulation or 1,
            spec.local_steps,
        ),
        optimizer_source=ById(optimizer),
    )


class CompiledPrograms(NamedTuple):
    """The programs of all runs of one static signature on one plan; each is compiled once."""

    signature: Signature
    task: Task
    plan: ExecutionPlan
    algorithm: Algorithm
    input_kinds: ChunkInputs  # of what it reads, see `get_input_kinds`
    init: Callable  # (number of client states) -> (hp, key, first model: drawn) -> State
    chunk: VerifiedJit
    partial_round: VerifiedJit  # a part of a round; compiled where rounds are long
    samples_per_round: dict[
        tuple, float
    ]  # samples that a round trains on, of what was traced: see `workload_key`
    server_stages: dict[str, VerifiedJit]

    @property
    def components(self) -> RoundComponents:
        """The parts of a round, as `core.round_program` takes them."""
        return RoundComponents(self.algorithm, self.task, self.plan, self.signature.evaluation)

    @property
    def network_digest(self) -> dict[str, str]:
        """The digest of a user's network, for the record of a run; empty for a named network."""
        if self.signature.model != USER_PROVIDED:
            return {}
        return {"network_digest": compute_network_digest(build_network(self.signature))}

    def user_object_digests(self, hp: Mapping[str, Any]) -> dict[str, str]:
        """Return the digests of a user's network and of a user's optimizer, which reads `hp`."""
        digests = dict(self.network_digest)
        if self.signature.optimizer == USER_PROVIDED:
            optimizer = self.signature.optimizer_source.value
            digests["optimizer_digest"] = compute_optimizer_digest(optimizer, hp)
        return digests


def get_input_kinds(algorithm: Algorithm, signature: Signature) -> ChunkInputs:
    """Return what a program reads.

    Args:
      algorithm: the method.
      signature: the other static choices of its runs.

    Returns:
      What each input is to the runs that go in step, see `ExecutionPlan.map_runs`; None, or {}, for
      an input that the program does not read.
    """
    has_global_model = algorithm.global_model is not None
    has_client_tests = signature.evaluation.has_client_tests
    has_diagnostics = signature.evaluation.diagnostics_every > 0
    kinds: dict[str, Any] = dict(
        hp=PER_RUN,
        train_key=PER_RUN,
        schedule=SCHEDULE_PLACEMENTS,
        num_rounds=PER_DEVICE,
        num_eval_batches=REPLICATED,
        examples=REPLICATED,
        tuning_schedule=SCHEDULE_PLACEMENTS if algorithm.fine_tuning is not None else None,
        test_set=REPLICATED if has_global_model else None,
        client_tests=PER_RUN if has_client_tests else None,
        test_examples=REPLICATED if has_client_tests else None,
        server_examples=PER_RUN if signature.has_server_data else None,
        diagnostics_schedule=SCHEDULE_PLACEMENTS if has_diagnostics else None,
        method_inputs=PER_RUN if algorithm.round_inputs else {},
        lr_factors=PER_RUN if signature.has_lr_schedule else None,
    )
    return ChunkInputs(**kinds)


@functools.lru_cache(maxsize=32)
def build_local_training(signature: Signature) -> LocalTraining:
    """Return how clients train, and the network that they train."""
    model = build_network(signature)
    options = dict(signature.options)
    model = get_algorithm_spec(signature.algorithm, options).get_trained_network(model, options)
    model = configure_compute(model, conv_impl=signature.conv_impl, precision=signature.precision)
    user_optimizer = (
        signature.optimizer_source.value if signature.optimizer == USER_PROVIDED else None
    )
    return LocalTraining(
        Task(model, signature.mean, signature.std),
        signature.optimizer,
        signature.local_epochs,
        signature.keep_state,
        signature.batch_size,
        signature.evaluated_model,
        measures_drift=bool(signature.evaluation.update_metric_names),
        options=signature.training_options._replace(user_optimizer=user_optimizer),
    )


def build_network(signature: Signature) -> Model:
    """Return the network that the settings name, or the user's network."""
    input_shape, num_classes = signature.input_shape, signature.num_classes
    network_options = dict(signature.model_options)
    if signature.model != USER_PROVIDED:
        return make_model(signature.model, input_shape, num_classes, **network_options)
    return to_model(signature.network_source.value, input_shape, num_classes, **network_options)


def build_algorithm(signature: Signature, plan: ExecutionPlan | None = None) -> Algorithm:
    """Return the method; without a plan, for its functions on the host only."""
    plan = plan or make_execution_plan(mesh_axis=None)
    options = dict(signature.options)
    training = build_local_training(signature)
    algorithm = get_algorithm_spec(signature.algorithm, options).build_algorithm(
        training, plan, options
    )
    if signature.pretrain_epochs:
        clients = signature.evaluation.num_clients
        algorithm = with_pretraining(algorithm, training, plan, signature.pretrain_epochs, clients)
    return algorithm


@functools.lru_cache(maxsize=32)
def build_programs(signature: Signature, plan: ExecutionPlan) -> CompiledPrograms:
    """The programs, built but not compiled."""
    task, evaluation = build_local_training(signature).task, signature.evaluation
    algorithm = build_algorithm(signature, plan)
    kinds = get_input_kinds(algorithm, signature)
    rounds, samples_per_round = RoundComponents(algorithm, task, plan, evaluation), {}

    def record_samples(inputs: ChunkInputs, samples: float) -> None:
        samples_per_round[workload_key(inputs)] = samples

    zero_metrics = jax.tree.map(lambda a: 0.0, evaluation.missing_metrics(algorithm, 1))
    chunk = VerifiedJit(
        plan.map_runs(make_round_chunk(rounds, record_samples), (PER_RUN, kinds)),
        baseline=lambda args: (args[0], zero_metrics),
        name=f"{signature.algorithm} rounds",
        is_debug=plan.is_debug,
        donate_argnums=0,
    )
    partial_round = VerifiedJit(
        plan.map_runs(make_partial_round(rounds), (PER_RUN, kinds, REPLICATED, PER_RUN)),
        baseline=lambda args: (args[0], zero_metrics, args[3], 0),
        name=f"{signature.algorithm} rounds in stretches",
        donate_argnums=3,
    )
    server_stages = {
        stage.name: VerifiedJit(
            plan.map_runs(
                stage.advance, (PER_RUN, PER_RUN, PER_RUN, REPLICATED, kinds.server_examples)
            ),
            baseline=lambda args: args[1],
            name=stage.name,
            is_debug=plan.is_debug,
            donate_argnums=1,
        )
        for stage in algorithm.server_stages
    }
    init = _make_init(algorithm, task, plan)
    return CompiledPrograms(
        signature,
        task,
        plan,
        algorithm,
        kinds,
        init,
        chunk,
        partial_round,
        samples_per_round,
        server_stages,
    )


def workload_key(inputs: ChunkInputs) -> tuple:
    """Return a key of the sizes that decide the work of a round.

    It is the same for all runs in step and for one of them.
    """
    schedules = (inputs.schedule, inputs.tuning_schedule, inputs.diagnostics_schedule)
    sizes = [None if schedule is None else schedule.batches.shape[-4:] for schedule in schedules]
    return (
        *sizes,
        None if inputs.server_examples is None else inputs.server_examples.labels.shape[-1],
    )


@functools.lru_cache(maxsize=32)
def flops_per_sample(signature: Signature) -> int:
    """Return the floating-point operations of training on one sample."""
    return count_training_flops(build_local_training(signature).task.model)


def evict_programs() -> None:
    """Drop compiled programs if the process holds about as many as it may, see `core.mmap_limit`."""
    evict_programs_if_needed(build_programs.cache_clear, build_local_training.cache_clear)


def _make_init(algorithm: Algorithm, task: Task, plan: ExecutionPlan) -> Callable:
    """-> init(number of client states) -> (hp, key, first model) -> State, of jitted functions; the
    first model is drawn where none is given."""

    def to_strong_type(leaf: jax.Array) -> jax.Array:
        # A weakly typed leaf would come back strong, and the next call would compile again.
        return leaf if is_prng_key(leaf) else jax.lax.convert_element_type(leaf, leaf.dtype)

    def init(num_clients: int, hp: Any, key: jax.Array, variables: Any):
        state = jax.tree.map(to_strong_type, algorithm.init(hp, key, variables, num_clients))
        return (
            plan.map_state(state, plan.constrain_sharding)
            if plan.has_sharded_client_states
            else state
        )

    # A program of its own, so that one compilation serves every method with this network.
    draw = jax.jit(plan.map_runs(task.model.init, (PER_RUN,)))

    @functools.lru_cache
    def build_init(num_clients: int) -> Callable:
        init_program = jax.jit(
            plan.map_runs(functools.partial(init, num_clients), (PER_RUN, PER_RUN, PER_RUN))
        )

        def init_state(hp: Any, key: jax.Array, variables: Any = None) -> Any:
            return init_program(hp, key, draw(key) if variables is None else variables)

        return init_state

    return build_init


def compute_client_state_bytes(program: CompiledPrograms, spec: ResolvedRunSpec) -> int:
    """Return the bytes that one client of a run keeps between rounds."""
    hp = {name: jax.ShapeDtypeStruct((), np.float32) for name in spec.hp}
    key = jax.eval_shape(lambda: jax.random.key(0))
    model = program.task.model
    init = lambda hp, key: program.algorithm.init(hp, key, model.init(key), 1)  # noqa: E731
    return num_bytes(jax.eval_shape(init, hp, key).clients)


def _to_hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
