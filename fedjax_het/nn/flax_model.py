"""Any flax.linen module of a batch of images as a `Model`: the package's networks and users'."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_het.common.errors import ConfigError
from fedjax_het.common.signatures import parameters_of
from fedjax_het.nn.collections import (
    as_flag,
    flag_of,
    other_collections,
    to_collections,
    to_state,
    to_variables,
)
from fedjax_het.nn.flax_conv import is_plain_conv, own_convolution
from fedjax_het.nn.layers import BatchNorm, InstanceNorm, Linear
from fedjax_het.nn.models import Head, Model, Variables
from fedjax_het.nn.models import cached_samples as samples_in_cache

NORM_LAYERS = (
    *(InstanceNorm, BatchNorm),
    *(nn.BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm, nn.RMSNorm),
)
_FULLY_CONNECTED = (nn.Dense, Linear)
_PROBE_BATCH = 2


class _Survey(NamedTuple):
    """What one abstract pass through a module shows.

    num_classes: the last axis of its logits, None where they are not [B, num_classes].
    collections: of its variables, besides the parameters.
    norms: paths of its normalisation layers.
    conv: whether it has convolutions that can be matrix products.
    dropout: whether it has flax's dropout.
    activations: of a sample, after the first convolution; None without one.
    features: whether it returns features with the logits.
    head: its last fully connected layer, unbound, and that layer's path; None without one.
    """

    num_classes: int | None
    collections: tuple[str, ...]
    norms: frozenset[tuple[str, ...]]
    conv: bool
    dropout: bool
    activations: tuple[int, int, int] | None
    features: bool
    head: tuple[nn.Module, tuple[str, ...]] | None


def flax_model(
    module: nn.Module,
    input_shape: tuple[int, int, int],
    *,
    micro_batch: int | None = None,
    cached_samples: int | None = None,
    spreads: bool = False,
) -> Model:
    """A `Model` of a module that takes a batch of images, and a training flag if it has one.

    It is called `module(x, train=...)`, `(x, training=...)`, `(x, deterministic=...)` or `(x)`, by
    its signature, and returns logits, or (features, logits). Collections besides `params` are the
    model's state; the key goes to the stream "dropout". The head is the last fully connected layer
    (`nn.Dense`) whose output is the logits; the features are what it reads. Where there is no such
    layer, the model has no head, and `embed` only if the module returns features itself.

    On a CPU, plain two-dimensional `nn.Conv` are matrix products, as the package's own.

    micro_batch, spreads: see `Model`.
    cached_samples: see `Model`; by default by the size of what the first convolution gives.
    Cost: one abstract evaluation.
    Raises: ConfigError where the module has dropout or batch norm but no training flag. What fails
      inside the module is raised as it is.
    """
    flag = flag_of(parameters_of(type(module).__call__))
    found = _surveyed(module, input_shape, flag)
    if cached_samples is None and found.activations is not None:
        cached_samples = samples_in_cache(*found.activations)

    def init(key: jax.Array):
        image, how = jnp.zeros((1, *input_shape)), as_flag(flag, False)
        variables: Any = module.init(key, image, **how)  # type: ignore[arg-type]
        return to_variables(nn.meta.unbox(variables), found.collections)

    called = functools.partial(_passed, module, flag, found)

    def apply(variables, x, *, train, key=None):
        out, _, state = called(variables, x, train, key)
        return _logits(out), state

    def embed(variables, x, *, train, key=None):
        out, features, state = called(variables, x, train, key)
        if found.features:
            return *out, state
        if features is None:
            raise ConfigError(f"{type(module).__name__}: its last layer is another one in training")
        return features, out, state

    return Model(
        type(module).__name__,
        input_shape,
        found.num_classes or 0,
        init,
        apply,
        micro_batch,
        cached_samples,
        embed if found.features or found.head else None,
        lambda: _norm_paths(found),
        _head(found),
        spreads,
    )


def _passed(
    module: nn.Module, flag: str | None, found: _Survey, variables: Variables, x, train: bool, key
) -> tuple[Any, Any, Any]:
    """(what the module returns, what its last fully connected layer reads or None, new state)."""
    by_collection = to_collections(variables, found.collections)
    how: dict[str, Any] = {
        **as_flag(flag, train),
        "rngs": None if key is None else {"dropout": key},
    }
    changing = list(found.collections) if train else []
    calls = _Calls(train=train, key=key)
    with _intercepted(calls, found):
        if not changing:
            out, state = module.apply(by_collection, x, **how), variables["state"]
        else:
            out, new = module.apply(by_collection, x, **how, mutable=changing)
            state = to_state({**by_collection, **new}, found.collections)
    return out, calls.last_input(_logits(out)), state


def _logits(out: Any) -> Any:
    return out[1] if isinstance(out, tuple) and len(out) == 2 else out


def _head(found: _Survey) -> Head | None:
    if found.head is None:
        return None
    layer, path = found.head

    def apply(parameters: Any, features: jax.Array) -> Any:
        return layer.apply({"params": parameters}, features)

    return Head(path, apply)


def _norm_paths(found: _Survey) -> frozenset[tuple[str, ...]]:
    """With the collection in front where the state is by collections."""
    if len(found.collections) < 2:
        return found.norms
    inside = {(name, *path) for name in found.collections for path in found.norms}
    return found.norms | inside


class _Calls:
    """The calls of fully connected layers in one pass, and how that pass is made."""

    def __init__(self, *, train: bool, key: jax.Array | None):
        self.train, self.key = train, key
        self.layers: list[tuple[nn.Module, Any, Any]] = []  # module, input, output

    def last(self, logits: Any) -> tuple[nn.Module, Any, Any] | None:
        """The last call whose output is the very array `logits`."""
        return next((call for call in reversed(self.layers) if call[2] is logits), None)

    def last_input(self, logits: Any) -> Any:
        call = self.last(logits)
        return None if call is None else call[1]

    def intercept(self, call: Callable, args: Sequence, kwargs: dict, context: Any) -> Any:
        module = context.module
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        if isinstance(module, nn.Dropout) and self.train and self.key is None:
            return args[0] if args else kwargs["inputs"]  # without a key nothing is dropped
        if is_plain_conv(module):
            with own_convolution(module):
                return call(*args, **kwargs)
        out = call(*args, **kwargs)
        if isinstance(module, _FULLY_CONNECTED):
            self.layers.append((module, args[0] if args else kwargs["inputs"], out))
        return out


def _intercepted(calls: _Calls, found: _Survey) -> contextlib.AbstractContextManager:
    """Nothing is in the way of a module that asks for nothing."""
    wanted = found.conv or found.dropout or not found.features
    return nn.intercept_methods(calls.intercept) if wanted else contextlib.nullcontext()


def _surveyed(module: nn.Module, input_shape: Sequence[int], flag: str | None) -> _Survey:
    calls = _Calls(train=False, key=None)
    norms: set[tuple[str, ...]] = set()
    seen: dict[str, Any] = {"conv": False, "dropout": False, "activations": None}
    head: list[tuple[nn.Module, tuple[str, ...]] | None] = []
    asked: dict[str, Any] = as_flag(flag, False)

    def note(call: Callable, args: Sequence, kwargs: dict, context: Any) -> Any:
        layer, is_call = context.module, context.method_name == "__call__"
        if flag is None and is_call:
            _check_needs_no_flag(module, layer, kwargs)
        if isinstance(layer, NORM_LAYERS):
            norms.add(layer.path)
        out = calls.intercept(call, args, kwargs, context)
        seen["dropout"] |= isinstance(layer, nn.Dropout)
        if is_call and is_plain_conv(layer):
            seen["conv"] = True
            if seen["activations"] is None and out.ndim == 4:
                seen["activations"] = out.shape[1:]
        return out

    def pass_through(key, x):
        with nn.intercept_methods(note):
            out, variables = module.init_with_output(key, x, **asked)
        last = calls.last(_logits(out))
        if last is not None and last[1].ndim == 2:
            head.append((last[0].clone(parent=None), last[0].path))
        else:
            head.append(None)
        return out, nn.meta.unbox(variables)

    image = jax.ShapeDtypeStruct((_PROBE_BATCH, *input_shape), jnp.result_type(float))
    out, variables = jax.eval_shape(pass_through, jax.random.key(0), image)
    if "params" not in variables:
        raise ConfigError(f"{type(module).__name__} has no parameters")
    shape: tuple[int, ...] = getattr(_logits(out), "shape", ())
    return _Survey(
        num_classes=shape[1] if len(shape) == 2 else None,
        collections=other_collections(variables),
        norms=frozenset(norms),
        **seen,
        features=isinstance(out, tuple) and len(out) == 2,
        head=head[-1],
    )


def _check_needs_no_flag(module: nn.Module, layer: nn.Module, kwargs: dict) -> None:
    """Of a module without a training flag, raise ConfigError for a layer that needs one."""
    for kind, name, what in (
        (nn.Dropout, "deterministic", "dropout"),
        (nn.BatchNorm, "use_running_average", "batch norm"),
    ):
        if not isinstance(layer, kind) or getattr(layer, "rate", 1) == 0:
            continue
        if not (kwargs.get(name) or getattr(layer, name)):
            raise ConfigError(
                f"{type(module).__name__}.__call__ takes no train, training or deterministic, but "
                f"has {what} ({'/'.join(layer.path)}), which needs to know"
            )
