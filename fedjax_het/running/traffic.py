"""What a method says of its traffic, asked before its program compiles: after the last round would
be too late."""

from collections.abc import Sequence

import jax

from fedjax_het.data import Dataset
from fedjax_het.data.server_data import Pool
from fedjax_het.running.federations import Federation, holdings_of
from fedjax_het.running.programs import Program


def require_traffic(
    program: Program, federations: Sequence[Federation], dataset: Dataset, pool: Pool | None
) -> None:
    """Raise ContractError where the functions that count bytes break the contract.

    By the state's shapes, of one client: what needs its values is asked when the run is done.
    Cost: an abstract evaluation of the method's init.
    """
    algorithm, model, first = program.algorithm, program.task.model, federations[0]
    algorithm.first_traffic(holdings_of(first, dataset, pool))

    def count(key: jax.Array) -> tuple[()]:
        algorithm.traffic(first.hp, algorithm.init(first.hp, key, model.init(key), 1))
        return ()

    try:
        jax.eval_shape(count, jax.random.key(0))
    except jax.errors.ConcretizationTypeError:
        return
