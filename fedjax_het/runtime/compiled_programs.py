"""The programs that all runs of one signature share, compiled once."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from fedjax_het.algorithms import get_algorithm_spec
from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.compressed_uploads import make_compression_error
from fedjax_het.algorithms.pretraining import with_pretraining
from fedjax_het.algorithms.private_updates import make_privacy_error
from fedjax_het.core.execution_plan import (
    PER_DEVICE,
    PER_RUN,
    REPLICATED,
    ExecutionPlan,
    make_execution_plan,
)
from fedjax_het.core.memory import MAX_CACHED_PROGRAMS
from fedjax_het.core.miscompile_guard import VerifiedJit
from fedjax_het.core.partial_round import make_partial_round
from fedjax_het.core.round_evaluation import make_missing_metrics
from fedjax_het.core.round_inputs import ChunkInputs, RoundComponents
from fedjax_het.core.round_program import make_round_chunk
from fedjax_het.core.run_mapping import SCHEDULE_PLACEMENTS, map_runs
from fedjax_het.core.task import Task
from fedjax_het.runtime.signature import Signature
from fedjax_het.utils.arrays import is_prng_key
from fedjax_het.utils.errors import require


class CompiledPrograms(NamedTuple):
    """The programs of all runs of one static signature on one plan; each is compiled once.

    Attributes:
      signature: the static choices of the runs.
      plan: the devices, and the lanes on them.
      algorithm: the method.
      input_kinds: how each input relates to the runs in lockstep, see `core.run_mapping.map_runs`;
        None or {} for an input that the programs do not read.
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


@functools.lru_cache(maxsize=MAX_CACHED_PROGRAMS)
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

    zero_metrics = jax.tree.map(lambda a: 0.0, make_missing_metrics(algorithm, evaluation, 1))
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


def _get_input_kinds(algorithm: Algorithm, signature: Signature) -> ChunkInputs:
    """Return how each input relates to the runs in lockstep, see `core.run_mapping.map_runs`.

    Inputs that the programs do not read are None or {}.
    """
    evaluation, schedule = signature.evaluation, SCHEDULE_PLACEMENTS
    tests_clients, has_validation = evaluation.has_client_tests, evaluation.has_validation
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
        validation_set=PER_RUN if has_validation and algorithm.global_model else None,
        client_validation=PER_RUN if has_validation and tests_clients else None,
        server_examples=PER_RUN if signature.has_server_data else None,
        diagnostics_schedule=schedule if evaluation.diagnostics_every else None,
        method_inputs=PER_RUN if algorithm.round_inputs else {},
        skew=PER_RUN if signature.has_skew else None,
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

    Raises:
      ConfigError: for a compression of uploads that the method cannot use.
    """
    plan = plan or make_execution_plan(mesh_axis=None)
    options, training = dict(signature.options), signature.training
    algorithm = get_algorithm_spec(signature.algorithm, options).build_algorithm(
        training, plan, options
    )
    server = f"the server of {signature.algorithm}"
    expected = f"no value: {server} does not average changes of one model in each round"
    if training.compressor is not None and algorithm.compressed_params is None:
        raise make_compression_error(training.compressor, expected)
    for setting, kinds in (("attack", training.attacks), ("aggregation", training.aggregations)):
        names = ", ".join(kind.name for kind in kinds)
        require(not kinds or algorithm.combines_changes, setting, names, expected)
    if training.privacy is not None and not algorithm.protects_privacy:
        loss = "; example_level requires the plain loss" * (
            training.privacy.name == "example_level"
        )
        expected = f"no value: {signature.algorithm} reads more of the clients than noisy changes"
        raise make_privacy_error(training.privacy, f"{expected} of one model{loss}")
    if not signature.pretrain_epochs:
        return algorithm
    clients = signature.evaluation.num_clients
    return with_pretraining(algorithm, training, plan, signature.pretrain_epochs, clients)


def workload_key(inputs: ChunkInputs) -> tuple:
    """Return a key of the sizes that decide the work of a round.

    The key of one run equals the key of runs in lockstep.
    """
    schedules = (inputs.schedule, inputs.tuning_schedule, inputs.diagnostics_schedule)
    sizes = [None if schedule is None else schedule.batches.shape[-4:] for schedule in schedules]
    examples = inputs.server_examples
    return (*sizes, None if examples is None else examples.labels.shape[-1])


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
