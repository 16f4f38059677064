"""What a method says of its traffic, asked before its program compiles: after the last round would
be too late."""

from collections.abc import Sequence

import jax

from fedjax_het.data import Dataset
from fedjax_het.data.server_data import LabeledImages
from fedjax_het.running.federations import PreparedRun, build_federation_data
from fedjax_het.running.programs import CompiledPrograms


def check_traffic_contract(
    program: CompiledPrograms,
    prepared_runs: Sequence[PreparedRun],
    dataset: Dataset,
    pool: LabeledImages | None,
) -> None:
    """Raise ContractError where the functions that count bytes break the contract.

    By the state's shapes, of one client: what needs its values is asked when the run is done.
    Cost: an abstract evaluation of the method's init.
    """
    algorithm, model, first_run = program.algorithm, program.task.model, prepared_runs[0]
    algorithm.initial_traffic(build_federation_data(first_run, dataset, pool))

    def count_traffic(key: jax.Array) -> tuple[()]:
        algorithm.traffic(first_run.hp, algorithm.init(first_run.hp, key, model.init(key), 1))
        return ()

    try:
        jax.eval_shape(count_traffic, jax.random.key(0))
    except jax.errors.ConcretizationTypeError:
        return
