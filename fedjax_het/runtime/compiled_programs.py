"""The programs that all runs of one static signature share, compiled once."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from fedjax_het.algorithms import get_algorithm_spec
from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import num_bytes
from fedjax_het.algorithms.server_step import with_pretraining
from fedjax_het.config.resolve import USER_PROVIDED, optional_hyperparameters
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
from fedjax_het.core.memory import evict_programs_if_needed
from fedjax_het.core.miscompile_guard import VerifiedJit
from fedjax_het.core.optimizers import (
    OPTIMIZERS,
    LocalTrainingOptions,
    compute_optimizer_digest,
    make_user_transformation,
)
from fedjax_het.core.partial_round import make_partial_round
from fedjax_het.core.round_inputs import SCHEDULE_PLACEMENTS, ChunkInputs, RoundComponents
from fedjax_het.core.round_metrics import EvaluationOptions
from fedjax_het.core.round_program import make_round_chunk
from fedjax_het.core.run_mapping import map_runs
from fedjax_het.core.task import Task
from fedjax_het.data import Dataset
from fedjax_het.metrics.registry import parse_metrics
from fedjax_het.nn import NETWORKS, Model, compute_network_digest, make_model, to_model
from fedjax_het.nn.conv_products import AUTO
from fedjax_het.nn.flops import count_training_flops
from fedjax_het.nn.precision import configure_compute
from fedjax_het.utils.arrays import is_prng_key

# Settings in which runs that share their programs may differ: they decide the host's draws or its
# stopping rule, or are traced.
PER_RUN_SETTINGS = (
    "seed",
    "partition_seed",
    "partition",
    "partition_options",
    "alpha",
    "classes",
    "averaging",
    "lr_schedule",
    "target_accuracy",
    "patience",
    "min_delta",
    "hp",
)


def compute_static_key(spec: RunSpec) -> str:
    """Return a key that is equal for runs that the same programs can execute, in step."""
    key = repr(sorted((k, v) for k, v in spec.to_dict().items() if k not in PER_RUN_SETTINGS))
    names = [] if spec.lr_schedule is None else ["lr_schedule"]
    names += _traced_optional_hyperparameters(spec)
    return f"{key} {names}" if names else key


def _traced_optional_hyperparameters(spec: RunSpec) -> list[str]:
    """Return the optional hyper-parameters of local training that the run sets and programs read."""
    names = set(optional_hyperparameters(spec)) & set(spec.hp)
    return sorted(name for name in names if not is_round_schedule_hyperparameter(name))


class ById(NamedTuple):
    """A function that makes a network or an optimizer; equal only to itself."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Signature(NamedTuple):
    """Every static choice of a run; equal signatures share their compiled programs.

    Attributes:
      algorithm: name of the method.
      options: the method's options by name, in alphabetical order.
      implementations: the functions for which the names of the method, of its base and of the
        optimizer stand at present.
      network: the network of the settings.
      training: how clients train, and the network as the method adapts it.
      evaluation: measurements in addition to the test set.
      has_server_data: whether the server has examples.
      pretrain_epochs: epochs of the server's training before the first round.
      has_lr_schedule: whether the local learning rate has a schedule over rounds.
    """

    algorithm: str
    options: tuple
    implementations: tuple
    network: Model
    training: LocalTraining
    evaluation: EvaluationOptions
    has_server_data: bool
    pretrain_epochs: int
    has_lr_schedule: bool

    def compute_user_digests(self, spec: ResolvedRunSpec) -> dict[str, str]:
        """Return the digests of a user's network and optimizer, for the record of a run."""
        digests = {}
        if spec.model == USER_PROVIDED:
            digests["network_digest"] = compute_network_digest(self.network)
        if spec.local_optimizer == USER_PROVIDED:
            optimizer = self.training.options.user_optimizer
            digests["optimizer_digest"] = compute_optimizer_digest(optimizer, spec.hp)
        return digests


def build_signature(
    spec: ResolvedRunSpec,
    dataset: Dataset,
    network: Any = None,
    optimizer: Any = None,
    *,
    conv_impl: str = AUTO,
) -> Signature:
    """Return the static choices of a run.

    Args:
      spec: the settings.
      dataset: the data set, or a record with its name, shape, classes and normalization.
      network: the user's network, for the model "user".
      optimizer: the user's optimizer, for the local optimizer "user".
      conv_impl: implementation of the convolutions that the network leaves open.

    Returns:
      The signature. Equal arguments return equal signatures until `evict_programs`.
    """
    is_user_network, name = spec.model == USER_PROVIDED, spec.local_optimizer
    base_model = _make_network(
        spec.model,
        ById(network if is_user_network else NETWORKS[spec.model].make),
        tuple(dataset.input_shape),
        dataset.num_classes,
        to_items(spec.model_options),
    )
    options, algorithm_spec = (
        to_items(spec.options),
        get_algorithm_spec(spec.algorithm, spec.options),
    )
    implementations = algorithm_spec.identity_key
    model = _adapt_network(
        base_model, spec.algorithm, options, implementations, conv_impl, spec.precision
    )
    if name is not None and name != USER_PROVIDED:
        implementations += (OPTIMIZERS[name].make,)
    requested_metrics = (parse_metrics(spec.metrics), dataset.num_classes) if spec.metrics else ()
    evaluation = EvaluationOptions(
        spec.num_clients,
        len(dataset.domain_names),
        spec.has_client_tests,
        spec.gradient_gaps or 0,
        *requested_metrics,
    )
    training = LocalTraining(
        Task(model, tuple(dataset.mean), tuple(dataset.std)),
        name,
        spec.local_epochs,
        spec.optimizer_state == "keep",
        spec.batch_size,
        spec.evaluated_model if spec.has_client_tests else "global",
        measures_drift=bool(evaluation.update_metric_names),
        options=LocalTrainingOptions(
            to_items(spec.optimizer_options),
            tuple(_traced_optional_hyperparameters(spec)),
            spec.lr_step_schedule,
            spec.gradient_accumulation or 1,
            spec.local_steps,
            _wrap_optimizer(ById(optimizer)) if name == USER_PROVIDED else None,
        ),
    )
    return Signature(
        spec.algorithm,
        options,
        implementations,
        base_model,
        training,
        evaluation,
        spec.server_data is not None,
        spec.pretrain_epochs or 0,
        spec.lr_schedule is not None,
    )


@functools.lru_cache(maxsize=32)
def _make_network(
    name: str, source: ById, input_shape: tuple, num_classes: int, options: tuple
) -> Model:
    """Return the network of this name, or the user's network; equal arguments return one object."""
    if name == USER_PROVIDED:
        return to_model(source.value, input_shape, num_classes, **dict(options))
    return make_model(name, input_shape, num_classes, **dict(options))


@functools.lru_cache(maxsize=32)
def _adapt_network(
    network: Model,
    algorithm: str,
    options: tuple,
    implementations: tuple,
    conv_impl: str,
    precision: str | None,
) -> Model:
    """Return the network that clients train; equal arguments return one object."""
    values = dict(options)
    network = get_algorithm_spec(algorithm, values).get_trained_network(network, values)
    return configure_compute(network, conv_impl=conv_impl, precision=precision)


@functools.lru_cache(maxsize=32)
def _wrap_optimizer(source: ById) -> Callable[[Any], optax.GradientTransformation]:
    """Return a user's optimizer as a function of `hp`; one object for each optimizer."""
    return lambda hp: make_user_transformation(source.value, hp)


class CompiledPrograms(NamedTuple):
    """The programs of all runs of one static signature on one plan; each is compiled once.

    Attributes:
      signature: the static choices of the runs.
      plan: the devices, and the lanes on them.
      algorithm: the method.
      input_kinds: how each input relates to the runs in step, see `core.run_mapping.map_runs`; None
        or {} for an input that the programs do not read.
      init: `init(number of client states, hp, key, first model) -> State`; the first model is
        drawn where none is passed.
      chunk: the program of a chunk of rounds.
      partial_round: the program of a part of a round; it is compiled where rounds are long.
      samples_per_round: samples that a round trains on by `workload_key`, of the traced programs.
      server_stages: the programs of the server's work between rounds by name.
    """

    signature: Signature
    plan: ExecutionPlan
    algorithm: Algorithm
    input_kinds: ChunkInputs
    init: Callable
    chunk: VerifiedJit
    partial_round: VerifiedJit
    samples_per_round: dict[tuple, float]
    server_stages: dict[str, VerifiedJit]

    def build_inputs(self, builders: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Return the inputs that the programs read, by name; `builders` makes each input."""
        kinds = self.input_kinds._asdict()
        return {name: build() for name, build in builders.items() if kinds[name] not in (None, {})}


def _get_input_kinds(algorithm: Algorithm, signature: Signature) -> ChunkInputs:
    """Return how each input relates to the runs that go in step, see `core.run_mapping.map_runs`.

    Inputs that the programs do not read are None or {}.
    """
    evaluation, schedule = signature.evaluation, SCHEDULE_PLACEMENTS
    tests_clients = evaluation.has_client_tests
    kinds: dict[str, Any] = dict(
        hp=PER_RUN,
        train_key=PER_RUN,
        schedule=schedule,
        num_rounds=PER_DEVICE,
        num_eval_batches=REPLICATED,
        examples=REPLICATED,
        tuning_schedule=schedule if algorithm.fine_tuning else None,
        test_set=REPLICATED if algorithm.global_model else None,
        client_tests=PER_RUN if tests_clients else None,
        test_examples=REPLICATED if tests_clients else None,
        server_examples=PER_RUN if signature.has_server_data else None,
        diagnostics_schedule=schedule if evaluation.diagnostics_every else None,
        method_inputs=PER_RUN if algorithm.round_inputs else {},
        lr_factors=PER_RUN if signature.has_lr_schedule else None,
    )
    return ChunkInputs(**kinds)


def build_algorithm(signature: Signature, plan: ExecutionPlan | None = None) -> Algorithm:
    """Return the method.

    Args:
      signature: the static choices of the runs.
      plan: the devices and lanes; None for the functions on the host only.

    Returns:
      The functions of the method.
    """
    plan = plan or make_execution_plan(mesh_axis=None)
    options, training = dict(signature.options), signature.training
    algorithm = get_algorithm_spec(signature.algorithm, options).build_algorithm(
        training, plan, options
    )
    if not signature.pretrain_epochs:
        return algorithm
    clients = signature.evaluation.num_clients
    return with_pretraining(algorithm, training, plan, signature.pretrain_epochs, clients)


@functools.lru_cache(maxsize=32)
def build_programs(signature: Signature, plan: ExecutionPlan) -> CompiledPrograms:
    """Return the programs, which are not compiled yet.

    Args:
      signature: the static choices of the runs.
      plan: the devices, and the lanes on them.

    Returns:
      The programs; equal arguments return one object.
    """
    algorithm, evaluation = build_algorithm(signature, plan), signature.evaluation
    kinds = _get_input_kinds(algorithm, signature)
    components = RoundComponents(algorithm, signature.training.task, plan, evaluation)
    samples_per_round = {}

    def record_samples(inputs: ChunkInputs, samples: float) -> None:
        samples_per_round[workload_key(inputs)] = samples

    zero_metrics = jax.tree.map(lambda a: 0.0, evaluation.missing_metrics(algorithm, 1))
    chunk = VerifiedJit(
        map_runs(plan, make_round_chunk(components, record_samples), (PER_RUN, kinds)),
        baseline=lambda args: (args[0], zero_metrics),
        name=f"{signature.algorithm} rounds",
        is_debug=plan.is_debug,
        donate_argnums=0,
    )
    partial_round = VerifiedJit(
        map_runs(plan, make_partial_round(components), (PER_RUN, kinds, REPLICATED, PER_RUN)),
        baseline=lambda args: (args[0], zero_metrics, args[3], 0),
        name=f"{signature.algorithm} rounds in parts",
        donate_argnums=3,
    )
    stage_kinds = (PER_RUN, PER_RUN, PER_RUN, REPLICATED, kinds.server_examples)
    server_stages = {
        stage.name: VerifiedJit(
            map_runs(plan, stage.advance, stage_kinds),
            baseline=lambda args: args[1],
            name=stage.name,
            is_debug=plan.is_debug,
            donate_argnums=1,
        )
        for stage in algorithm.server_stages
    }
    init = _make_init(algorithm, components.task, plan)
    programs = (init, chunk, partial_round, samples_per_round, server_stages)
    return CompiledPrograms(signature, plan, algorithm, kinds, *programs)


def workload_key(inputs: ChunkInputs) -> tuple:
    """Return a key of the sizes that decide the work of a round.

    The key of one run equals the key of runs in step.
    """
    schedules = (inputs.schedule, inputs.tuning_schedule, inputs.diagnostics_schedule)
    sizes = [None if schedule is None else schedule.batches.shape[-4:] for schedule in schedules]
    examples = inputs.server_examples
    return (*sizes, None if examples is None else examples.labels.shape[-1])


@functools.lru_cache(maxsize=32)
def flops_per_sample(signature: Signature) -> int:
    """Return the floating-point operations of training on one sample."""
    return count_training_flops(signature.training.task.model)


def evict_programs() -> None:
    """Drop compiled programs if the process nears its limit of mapped memory, see `core.memory`."""
    evict_programs_if_needed(
        build_programs.cache_clear, _make_network.cache_clear, _adapt_network.cache_clear
    )


def _make_init(algorithm: Algorithm, task: Task, plan: ExecutionPlan) -> Callable:
    """Return `init(number of client states, hp, key, first model) -> State` of jitted functions."""

    def to_strong_type(leaf: jax.Array) -> jax.Array:
        # A weakly typed leaf would come back strong, and the next call would compile again.
        return leaf if is_prng_key(leaf) else jax.lax.convert_element_type(leaf, leaf.dtype)

    @functools.partial(jax.jit, static_argnums=0)
    def init(num_clients: int, hp: Any, key: jax.Array, variables: Any) -> Any:
        def init_run(hp: Any, key: jax.Array, variables: Any) -> Any:
            state = jax.tree.map(to_strong_type, algorithm.init(hp, key, variables, num_clients))
            is_sharded = plan.has_sharded_client_states
            return plan.map_state(state, plan.constrain_sharding) if is_sharded else state

        return map_runs(plan, init_run, (PER_RUN, PER_RUN, PER_RUN))(hp, key, variables)

    # A separate program, so that one compilation serves every method with this network.
    draw = jax.jit(map_runs(plan, task.model.init, (PER_RUN,)))
    return lambda num_clients, hp, key, variables=None: init(
        num_clients, hp, key, draw(key) if variables is None else variables
    )


def compute_client_state_bytes(program: CompiledPrograms, spec: ResolvedRunSpec) -> int:
    """Return the bytes of the state that one client of a run has between rounds.

    Args:
      program: the programs.
      spec: the settings of the run.

    Returns:
      The bytes; 0 if clients have no state.
    """
    hp = {name: jax.ShapeDtypeStruct((), np.float32) for name in spec.hp}
    key = jax.eval_shape(lambda: jax.random.key(0))
    model, init = program.signature.training.task.model, program.algorithm.init
    state = jax.eval_shape(lambda hp, key: init(hp, key, model.init(key), 1), hp, key)
    return num_bytes(state.clients)


def to_items(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return options as a hashable tuple in alphabetical order."""
    return tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in options.items()))
