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

from fedjax_het.common.errors import ConfigError
from fedjax_het.engine.contract import ClientMethod, Upload

Tree = Any


class _Sent(NamedTuple):
    """What is averaged where drift is measured."""

    own: Tree
    direction: Tree
    square: jax.Array


class Watch:
    """Drift of what is traced inside `watching`."""

    def __init__(self, structure: Any):
        self.structure = structure  # of the weights
        self.found: dict[str, jax.Array] | None = None


_WATCH: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextlib.contextmanager
def watching(params: Tree) -> Iterator[Watch]:
    """The first training of clients that is traced inside is measured; `params`: of a model like
    those that clients send changes of."""
    watch = Watch(jax.tree.structure(params))
    token = _WATCH.set(watch)
    try:
        yield watch
    finally:
        _WATCH.reset(token)


def watched(method: ClientMethod) -> tuple[ClientMethod, Callable[[Upload], Upload]]:
    """(the method, whose uploads have what drift needs; what makes of their average the method's
    own, and notes the drift); the same method where nothing is watched, or was already."""
    watch = _WATCH.get()
    if watch is None or watch.found is not None:
        return method, lambda upload: upload

    def end(hp, broadcast, local, state, client):
        upload, state, output = method.end(hp, broadcast, local, state, client)
        change = _change(upload.mean, watch.structure)
        norm = optax.tree.norm(change)
        direction = jax.tree.map(lambda d: d / jnp.maximum(norm, 1e-30), change)
        return upload._replace(mean=_Sent(upload.mean, direction, norm**2)), state, output

    def read(upload: Upload) -> Upload:
        sent = upload.mean
        mean = _change(sent.own, watch.structure)
        norm = optax.tree.norm(mean)
        along = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, sent.direction, mean)))
        spread = jnp.sqrt(jnp.maximum(sent.square - norm**2, 0))
        safe = jnp.where(norm > 0, norm, jnp.nan)
        watch.found = {"drift_cosine": along / safe, "drift_distance": spread / safe}
        return upload._replace(mean=sent.own)

    return method._replace(end=end), read


def _change(mean: Tree, structure: Any) -> Tree:
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
    nothing_sent()


def nothing_sent() -> NoReturn:
    """Say that clients of this method send no change of the model."""
    raise ConfigError(
        "measures = 'drift': expected a method whose clients send changes of the model, as this "
        "one's do not"
    )
