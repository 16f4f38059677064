"""Compressed uploads: clients send the change of the model by the run's compressor.

The change of the parameters is compressed. All other parts of an upload are sent as they are, such
as batch-norm statistics, control variates and numbers. The average of the engine, and every rule of
a server, read the decoded values.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm, State, take_outer_states
from fedjax_het.algorithms.local_parameters import ParameterSplit
from fedjax_het.algorithms.sent_changes import find_sent_change, select_sent_params
from fedjax_het.compression import Compressor, format_compression
from fedjax_het.core.client_algorithm import ClientAlgorithm
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.utils.arrays import num_bytes
from fedjax_het.utils.errors import ConfigError, make_value_error

Tree = Any


class CompressedClientState(NamedTuple):
    """State of a client whose uploads have error feedback."""

    inner: Tree
    "State of the method's own client algorithm."
    memory: Tree
    "The part of the changes that the uploads so far have lost, like the compressed parameters."


def with_compressed_change(
    client: ClientAlgorithm,
    compressor: Compressor,
    *,
    drop_local: Callable[[Tree], Tree],
    unsent: ParameterSplit | None,
) -> ClientAlgorithm:
    """Return a client whose model change is compressed.

    Args:
      client: a client algorithm whose messages have `variables`.
      compressor: the compressor.
      drop_local: `drop_local(variables)`: whole variables without the client's local parameters,
        as messages contain them.
      unsent: places of variables that clients do not send; their changes stay exact.

    Returns:
      The client. Its state is a `CompressedClientState` if the compressor has error feedback.
    """
    has_memory = compressor.error_feedback

    def get_inner(state):
        return state.inner if has_memory else state

    def init(hp, variables):
        inner = client.init(hp, variables)
        if not has_memory:
            return inner
        params = select_sent_params(drop_local(variables), unsent)
        return CompressedClientState(inner, jax.tree.map(jnp.zeros_like, params))

    def end(context, local, state):
        update, inner, output = client.end(context, local, get_inner(state))
        found = find_sent_change(update, context.message.variables, unsent)
        if found is None:
            raise make_compression_error(compressor, "clients that send changes of the model")
        sent, replace = found
        key = fold_in_purpose(context.key, Purpose.COMPRESSION)
        if has_memory:
            sent, memory = compressor.compress_with_memory(sent, state.memory, key)
            inner = CompressedClientState(inner, memory)
        else:
            sent = compressor.compress(sent, key)
        return replace(sent), inner, output

    return client._replace(
        init=init, begin=lambda context, state: client.begin(context, get_inner(state)), end=end
    )


def with_compressed_uploads(algorithm: Algorithm, compressor: Compressor) -> Algorithm:
    """Return a method of compressed clients with its traffic, and with functions of its own states.

    Args:
      algorithm: a method; without `compressed_params` it is returned as it is.
      compressor: the compressor.

    Returns:
      The method. Its functions see the clients' states without the memory of error feedback.
    """
    count_traffic, get_params = algorithm.traffic, algorithm.compressed_params
    if get_params is None:
        return algorithm

    def traffic(hp, state):
        counted, params = count_traffic(hp, state), get_params(state)
        return counted._replace(up=counted.up - num_bytes(params) + compressor.count_bytes(params))

    algorithm = algorithm._replace(traffic=traffic)
    if not compressor.error_feedback:
        return algorithm

    def get_inner(state: State) -> State:
        return state._replace(clients=state.clients.inner)

    return algorithm._replace(
        personal_variables=take_outer_states(algorithm.personal_variables, get_inner),
        artifacts=take_outer_states(algorithm.artifacts, get_inner),
        summary=take_outer_states(algorithm.summary, get_inner),
    )


def make_compression_error(compressor: Compressor, expected: str) -> ConfigError:
    """Return the error of a compressor that a method cannot use.

    Args:
      compressor: the run's compressor.
      expected: the values that the method accepts.

    Returns:
      An error of one line.
    """
    return make_value_error("compression", format_compression(compressor), expected)
