"""Client drift: how far the updates of a round's clients are from their mean.

Clients send changes d_k of the weights. w_k are the run's averaging weights (sum 1), and m = sum_k
w_k d_k is the mean. The metrics are `drift_cosine` = sum_k w_k <d_k, m> / (|d_k| |m|) and
`drift_distance` = sqrt(sum_k w_k |d_k - m|^2) / |m|. `drift_cosine` is 1 if all updates point in
one direction. Neither needs a second pass over clients: d_k / |d_k| and |d_k|^2 are averaged along
with d_k. The distance is therefore the root of a difference, and is rounding error below 0.01.
Cost: one more tree of weights in every lane and in the exchange between devices.
"""

from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import optax

from fedjax_het.core.client_algorithm import ClientAlgorithm, ClientUpdate
from fedjax_het.core.model_change import find_model_change
from fedjax_het.utils.errors import make_value_error

Tree = Any


class _DriftSums(NamedTuple):
    """The averaged values of a round whose drift is measured."""

    update: Tree
    direction: Tree
    squared_norm: jax.Array


def with_drift_sums(algorithm: ClientAlgorithm) -> ClientAlgorithm:
    """Return the client algorithm with the sums that drift needs added to each client's update.

    Args:
      algorithm: a client algorithm whose server message is a `ServerMessage`.

    Returns:
      A client algorithm whose averaged update `split_drift` reads.

    Raises:
      ConfigError: while it is traced, if clients send no change of the model.
    """

    def end(context, local, state):
        update, state, output = algorithm.end(context, local, state)
        change = _find_model_change(update.mean, context.message.variables["params"])
        norm = optax.tree.norm(change)
        direction = jax.tree.map(lambda d: d / jnp.maximum(norm, 1e-30), change)
        return update._replace(mean=_DriftSums(update.mean, direction, norm**2)), state, output

    return algorithm._replace(end=end)


def split_drift(update: ClientUpdate, params: Tree) -> tuple[ClientUpdate, dict[str, jax.Array]]:
    """Split the averaged update of clients, which `with_drift_sums` may have wrapped.

    Args:
      update: the averaged update of all clients of a round.
      params: the model's parameters; only their tree structure is read.

    Returns:
      The averaged update of the wrapped algorithm, and the drift metrics by name, float32 scalars;
      no metrics for an algorithm that is not wrapped.
    """
    drift_sums = update.mean
    if not isinstance(drift_sums, _DriftSums):
        return update, {}
    mean = _find_model_change(drift_sums.update, params)
    norm = optax.tree.norm(mean)
    inner_product = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, drift_sums.direction, mean)))
    deviation = jnp.sqrt(jnp.maximum(drift_sums.squared_norm - norm**2, 0))
    safe_norm = jnp.where(norm > 0, norm, jnp.nan)
    drift = {
        "drift_cosine": inner_product / safe_norm,
        "drift_distance": deviation / safe_norm,
    }
    return update._replace(mean=drift_sums.update), drift


def _find_model_change(mean: Tree, params: Tree) -> Tree:
    """Return the part of an update's mean that has the structure of `params`."""
    found = find_model_change(mean, params)
    if found is None:
        raise_no_model_change()
    return found[0]


def raise_no_model_change() -> NoReturn:
    """Raise ConfigError because the method's clients send no change of the model."""
    expected = "a method whose clients send changes of the model, as this one's do not"
    raise make_value_error("metrics", "drift", expected)
