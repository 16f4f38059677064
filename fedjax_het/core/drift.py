"""Client drift: how far what a round's clients send is from its mean.

Of the changes of weights d_k that clients send, with the run's weights w_k (sum 1) and the mean
m = sum_k w_k d_k: `drift_cosine` = sum_k w_k <d_k, m> / (|d_k| |m|), which is 1 where all go the
same way, and `drift_distance` = sqrt(sum_k w_k |d_k - m|^2) / |m|. Neither needs a second pass over
clients: d_k / |d_k| and |d_k|^2 are averaged along with d_k. So the distance is the root of a
difference, and rounding below 0.01. Cost: one more tree of weights in every lane and in what
devices exchange.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import optax

from fedjax_het.core.client_algorithm import ClientAlgorithm, ClientUpdate
from fedjax_het.utils.errors import ConfigError

Tree = Any


class _DriftSums(NamedTuple):
    """What is averaged where drift is measured."""

    update: Tree
    direction: Tree
    squared_norm: jax.Array


class DriftMonitor:
    """Drift of what is traced inside `watching`."""

    def __init__(self, structure: Any):
        self.params_structure = structure  # of the weights
        self.values: dict[str, jax.Array] | None = None


_MONITOR: ContextVar[DriftMonitor | None] = ContextVar("watch", default=None)


@contextlib.contextmanager
def monitor_drift(params: Tree) -> Iterator[DriftMonitor]:
    """The first training of clients that is traced inside is measured; `params`: of a model like
    those that clients send changes of."""
    monitor = DriftMonitor(jax.tree.structure(params))
    token = _MONITOR.set(monitor)
    try:
        yield monitor
    finally:
        _MONITOR.reset(token)


def with_drift_monitoring(
    algorithm: ClientAlgorithm,
) -> tuple[ClientAlgorithm, Callable[[ClientUpdate], ClientUpdate]]:
    """(the method, whose uploads have what drift needs; what makes of their average the method's
    own, and notes the drift); the same method where nothing is watched, or was already."""
    monitor = _MONITOR.get()
    if monitor is None or monitor.values is not None:
        return algorithm, lambda update: update

    def end(context, local, state):
        update, state, output = algorithm.end(context, local, state)
        change = _find_model_change(update.mean, monitor.params_structure)
        norm = optax.tree.norm(change)
        direction = jax.tree.map(lambda d: d / jnp.maximum(norm, 1e-30), change)
        return update._replace(mean=_DriftSums(update.mean, direction, norm**2)), state, output

    def read_update(update: ClientUpdate) -> ClientUpdate:
        drift_sums = update.mean
        mean = _find_model_change(drift_sums.update, monitor.params_structure)
        norm = optax.tree.norm(mean)
        inner_product = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, drift_sums.direction, mean)))
        deviation = jnp.sqrt(jnp.maximum(drift_sums.squared_norm - norm**2, 0))
        safe_norm = jnp.where(norm > 0, norm, jnp.nan)
        monitor.values = {
            "drift_cosine": inner_product / safe_norm,
            "drift_distance": deviation / safe_norm,
        }
        return update._replace(mean=drift_sums.update)

    return algorithm._replace(end=end), read_update


def _find_model_change(mean: Tree, structure: Any) -> Tree:
    """The change of the weights in what a client sends: of the whole, or of one of its parts."""
    parts = [mean]
    while parts:
        part = parts.pop(0)
        if jax.tree.structure(part) == structure and jax.tree.leaves(part):
            return part
        if isinstance(part, dict):
            parts[:0] = [part["params"]] if "params" in part else list(part.values())
        elif isinstance(part, tuple):
            parts[:0] = part
    raise_no_model_change()


def raise_no_model_change() -> NoReturn:
    """Say that clients of this method send no change of the model."""
    raise ConfigError(
        "measures = 'drift': expected a method whose clients send changes of the model, as this "
        "one's do not"
    )
