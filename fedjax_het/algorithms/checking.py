"""What a method brings, checked: which of its functions breaks the contract, and where, a line.

All checks are of shapes and types, made while the program is traced, or of what the host is told:
none is in the program.
"""

import math
import numbers
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from fedjax_het.algorithms.contract import (
    AdvanceWork,
    Algorithm,
    CountDone,
    CountOnce,
    CountTraffic,
    GetModel,
    HostWork,
    InitState,
    ListRecords,
    MakeInputs,
    OnceTraffic,
    PersonalModel,
    PutModel,
    RoundInfo,
    RoundInput,
    RunRound,
    State,
    Traffic,
)
from fedjax_het.algorithms.telling import as_array, as_json, told
from fedjax_het.common.doors import of_own_kinds
from fedjax_het.common.errors import ConfigError, is_whole, shown
from fedjax_het.common.records import plain
from fedjax_het.engine.contract import (
    ContractError,
    call,
    kind_of,
    parts,
    require_like,
    require_scalar,
)


def checked_algorithm(name: str, algorithm: Algorithm) -> Algorithm:
    """The same, whose functions say which of them breaks the contract, and of which method.

    All checks are of shapes and types, made while the program is traced: none is in the program.
    """
    if not isinstance(algorithm, Algorithm):
        raise ContractError(f"method {name!r} built {kind_of(algorithm)}: expected an Algorithm")
    algorithm = _with_parts(name, algorithm)

    guarded = partial(_guarded, name)

    def init(hp, key, variables, num_clients):
        given = (hp, key, variables, num_clients)
        state = call("Algorithm.init", algorithm.init, InitState, *given)
        _require_state("Algorithm.init", state)
        return state

    def round_(hp, state, key, cohort):
        found = call("Algorithm.round", algorithm.round, RunRound, hp, state, key, cohort)
        new, info = parts("Algorithm.round", found, ("state", "info"))
        _require_state("Algorithm.round", new)
        require_like("Algorithm.round: state", new, state, "what `init` made")
        if not isinstance(info, RoundInfo):
            raise ContractError(f"Algorithm.round: info is {kind_of(info)}: expected a RoundInfo")
        require_scalar("Algorithm.round: info.train_loss", info.train_loss)
        require_scalar("Algorithm.round: info.update_norm", info.update_norm)
        _require_records(info.records, algorithm.records)
        return new, info

    def global_model(state):
        assert algorithm.global_model is not None
        name = "Algorithm.global_model"
        return _require_variables(name, call(name, algorithm.global_model, GetModel, state))

    def with_global_model(state, variables):
        assert algorithm.with_global_model is not None
        given = (algorithm.with_global_model, PutModel, state, variables)
        new = call("Algorithm.with_global_model", *given)
        require_like("Algorithm.with_global_model: state", new, state, "the state given")
        return new

    def traffic(hp, state):
        found = call("Algorithm.traffic", algorithm.traffic, CountTraffic, hp, state)
        return _require_bytes("Algorithm.traffic", found, Traffic)

    def first_traffic(holdings):
        name = "Algorithm.first_traffic"
        found = call(name, algorithm.first_traffic, CountOnce, holdings)
        return _require_bytes(name, found, OnceTraffic)

    def personal(hp, state, k):
        name = "Algorithm.personal"
        assert algorithm.personal is not None
        return _require_variables(name, call(name, algorithm.personal, PersonalModel, hp, state, k))

    def records(num_clients):
        found = call("Algorithm.records", algorithm.records, ListRecords, num_clients)
        if not isinstance(found, dict):
            raise ContractError(f"Algorithm.records returned {kind_of(found)}: expected a dict")
        return found

    has_model = algorithm.global_model is not None
    return algorithm._replace(
        init=guarded(init),
        round=guarded(round_),
        global_model=guarded(global_model) if has_model else None,
        with_global_model=guarded(with_global_model) if algorithm.with_global_model else None,
        traffic=guarded(traffic),
        first_traffic=guarded(first_traffic),
        records=guarded(records),
        artifacts=told(name, "artifacts", algorithm.artifacts, as_array),
        summary=told(name, "summary", algorithm.summary, as_json),
        personal=guarded(personal) if algorithm.personal else None,
        inputs=tuple(each._replace(make=guarded(_checked_make(each))) for each in algorithm.inputs),
        host_work=tuple(
            work._replace(
                advance=guarded(_checked_advance(work)), done=guarded(_checked_done(work))
            )
            for work in algorithm.host_work
        ),
    )


def _guarded(name: str, function: Callable) -> Callable:
    """`function`, whose errors name the method."""

    def in_method(*args):
        try:
            return function(*args)
        except ContractError as error:
            if str(error).startswith("method "):  # of one that this one is put over
                raise
            raise ContractError(f"method {name!r}: {error}") from error
        except Exception as error:
            if not hasattr(error, "__notes__") or "in method" not in error.__notes__[-1]:
                error.add_note(f"in method {name!r}")
            raise

    return in_method


def _checked_advance(work: HostWork) -> Callable:
    def advance(hp, state, key, count, server=None):
        name = f"HostWork({work.name!r}).advance"
        new = call(name, work.advance, AdvanceWork, hp, state, key, count, server)
        require_like(f"{name}: state", new, state, "the state given")
        return new

    return advance


def _checked_done(work: HostWork) -> Callable:
    def done(state):
        name = f"HostWork({work.name!r}).done"
        found = plain(call(name, work.done, CountDone, state))
        if not is_whole(found, 0):
            raise ContractError(f"{name} returned {kind_of(found)}: expected a whole number")
        return int(found)

    return done


def _checked_make(wanted: RoundInput) -> Callable:
    def make(holdings):
        name = f"RoundInput({wanted.name!r}).make"
        found, count = call(name, wanted.make, MakeInputs, holdings), len(holdings)
        if not isinstance(found, list | tuple) or len(found) != count:
            kind = f"{len(found)} of them" if isinstance(found, list) else kind_of(found)
            expected = f"a list of {count}, one for each federation"
            raise ContractError(f"{name} returned {kind}: expected {expected}")
        for path, leaf in jax.tree_util.tree_leaves_with_path(list(found)):
            if not (hasattr(leaf, "dtype") or isinstance(leaf, int | float)):
                place = jax.tree_util.keystr(path)
                raise ContractError(f"{name}: {place} is {kind_of(leaf)}: expected an array")
        return list(found)

    return make


def _with_parts(name: str, algorithm: Algorithm) -> Algorithm:
    """The algorithm, whose fields, and those of its parts, are of their annotations' kinds."""
    try:
        algorithm = of_own_kinds("Algorithm", algorithm)
        for part in (*algorithm.host_work, *algorithm.inputs, algorithm.tuning, algorithm.pairs):
            if part is not None:
                of_own_kinds(type(part).__name__, part)
    except ConfigError as error:
        raise ContractError(f"method {name!r}: {error}") from None
    return algorithm


def _require_bytes(name: str, found: Any, kind: type[Traffic] | type[OnceTraffic]) -> Any:
    """`found`, with whole numbers for NumPy's."""
    if not isinstance(found, Traffic | OnceTraffic) or type(found) is not kind:
        raise ContractError(f"{name} returned {kind_of(found)}: expected a {kind.__name__}")
    values = [plain(value) for value in found]
    for field, value in zip(found._fields, values, strict=True):
        real = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not (real and 0 <= value < math.inf):
            raise ContractError(f"{name}: {field} = {shown(value)}: expected a number of bytes")
    return kind(*values)


def _require_variables(name: str, found: Any) -> Any:
    if not isinstance(found, Mapping) or {"params", "state"} - set(found):
        kind = kind_of(found)
        raise ContractError(
            f"{name} returned {kind}: expected variables, a dict of params and state"
        )
    return found


def _require_state(name: str, found: Any) -> None:
    if not isinstance(found, State):
        raise ContractError(f"{name}: state is {kind_of(found)}: expected a State")
    count = getattr(found.round, "dtype", None)
    if count is None or np.shape(found.round) != () or count != np.int32:
        raise ContractError(
            f"{name}: state.round is {kind_of(found.round)}: expected an int32 scalar"
        )


def _require_records(
    found: dict[str, Any], shapes_of: Callable[[int], dict[str, tuple[int, ...]]]
) -> None:
    """How many clients there are is not known here: a shape must be right for some number."""
    shapes = shapes_of(1)
    if found.keys() != shapes.keys():
        raise ContractError(
            f"Algorithm.round: info.records has {sorted(found)}: expected {sorted(shapes)}, as "
            "`Algorithm.records` says"
        )
    for name, leaf in found.items():
        here = np.shape(leaf)
        if not any(tuple(shapes_of(count)[name]) == here for count in {1, *here}):
            raise ContractError(
                f"Algorithm.round: info.records[{name!r}] is {kind_of(leaf)}: expected the shape "
                f"{shapes[name]}, as `Algorithm.records` says of one client"
            )
