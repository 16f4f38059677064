"""Work that the server does on each round's model, over any method with one global model."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fedjax_het.algorithms.contract import Algorithm, HostWork, State, global_model_of
from fedjax_het.engine.lanes import ClientModels, Cohort, Examples

Tree = Any


class RefinedServer(NamedTuple):
    """The server's state of the method that is refined, and what refining keeps besides."""

    base: Tree
    own: Tree


class Round(NamedTuple):
    """What a refinement reads of a round."""

    before: Tree  # the variables that the round started from
    after: Tree  # those that the method made of its clients' work
    number: Any  # [] int32, from 0
    key: Any  # the round's
    cohort: Cohort
    models: ClientModels | None  # where `LocalTraining.hands_out_models` asks for them


def server_examples(this_round: Round) -> Examples:
    """Those of a method whose entry says that it needs some."""
    assert this_round.cohort.server is not None
    return this_round.cohort.server


def refined(
    algorithm: Algorithm,
    refine: Callable[[Any, Tree, Round], tuple[Tree, Tree]],
    *,
    init: Callable[[Any, Any, Tree], Tree] = lambda hp, key, variables: (),
    server_batch: int = 0,
) -> Algorithm:
    """`algorithm`, whose global model the server works on after each round.

    What comes out is what is evaluated and broadcast; clients, their state and the traffic are
    those of `algorithm`.

    Args:
      refine(hp, own, round) -> (variables, own).
      init(hp, key, variables) -> own, whatever is kept from round to round.
      server_batch: of the refinement, see `Algorithm`.
    """
    model_of, with_model_of = global_model_of(algorithm)

    def init_state(hp, key, variables, num_clients):
        inner = algorithm.init(hp, key, variables, num_clients)
        return inner._replace(server=RefinedServer(inner.server, init(hp, key, variables)))

    def round_(hp, state: State, key, cohort: Cohort):
        inner, info = algorithm.round(hp, unrefined(state), key, cohort)
        before, after = (model_of(whose) for whose in (unrefined(state), inner))
        this_round = Round(before, after, state.round, key, cohort, info.models)
        variables, own = refine(hp, state.server.own, this_round)
        inner = with_model_of(inner, variables)
        info = info._replace(models=None)
        return inner._replace(server=RefinedServer(inner.server, own)), info

    def with_global_model(state, variables):
        base = with_model_of(unrefined(state), variables).server
        return state._replace(server=state.server._replace(base=base))

    of_client = algorithm.personal
    personal = (
        None if of_client is None else lambda hp, state, k: of_client(hp, unrefined(state), k)
    )
    return algorithm._replace(
        init=init_state,
        round=round_,
        global_model=lambda state: model_of(unrefined(state)),
        with_global_model=with_global_model,
        traffic=lambda hp, state: algorithm.traffic(hp, unrefined(state)),
        personal=personal,
        host_work=tuple(_lifted(work) for work in algorithm.host_work),
        server_batch=max(algorithm.server_batch, server_batch),
        artifacts=lambda state: algorithm.artifacts(unrefined(state)),
        summary=lambda hp, state: algorithm.summary(hp, unrefined(state)),
    )


def _lifted(work: HostWork) -> HostWork:
    """The refined method's work between rounds, on the state as it is kept."""

    def advance(hp, state, key, count, server=None):
        base = work.advance(hp, unrefined(state), key, count, server).server
        return state._replace(server=state.server._replace(base=base))

    return work._replace(done=lambda state: work.done(unrefined(state)), advance=advance)


def unrefined(state: State) -> State:
    """The state as the method that is refined has it."""
    return state._replace(server=state.server.base)
