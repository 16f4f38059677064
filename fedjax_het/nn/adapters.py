"""Adapters that turn flax.linen modules and (init, apply) pairs into a `Model`.

flax stores variables by collection; a `Model` stores parameters and state. Two-dimensional
`nn.Conv` layers of users' modules are computed by `conv2d`, whose derivatives are also fast on a
CPU.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.nn.batch_axis import BatchAxis, make_axis_argument
from fedjax_het.nn.conv.dispatch import AUTO
from fedjax_het.nn.conv.primitive import conv2d
from fedjax_het.nn.layers import BatchNorm, InstanceNorm, Linear
from fedjax_het.nn.model import Head, Model, Variables
from fedjax_het.nn.model import count_cached_samples as count_cached_samples
from fedjax_het.utils.errors import ConfigError
from fedjax_het.utils.registry import get_keyword_parameters

TRAINING_FLAGS = ("train", "training", "deterministic")  # accepted names of the training flag


def find_training_flag(parameters: Mapping[str, Any]) -> str | None:
    """Return the name of the training flag among a function's parameters.

    Args:
      parameters: the function's parameters by name.

    Returns:
      A name in `TRAINING_FLAGS`, or None.
    """
    return next((name for name in TRAINING_FLAGS if name in parameters), None)


def make_flag_arguments(flag: str | None, train: bool) -> dict[str, bool]:
    """Return the training flag as keyword arguments.

    Args:
      flag: name of the flag; None: the function has no flag.
      train: whether the function trains.

    Returns:
      Keyword arguments; "deterministic" is the negation of `train`.
    """
    if flag is None:
        return {}
    return {flag: not train if flag == "deterministic" else train}


def list_state_collections(by_collection: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the sorted names of the collections other than the parameters.

    Args:
      by_collection: flax variables by collection.

    Returns:
      Names of the collections.
    """
    return tuple(sorted(name for name in by_collection if name != "params"))


def to_variables(by_collection: Mapping[str, Any], collections: Sequence[str]) -> Variables:
    """Convert flax variables to `Variables`.

    Args:
      by_collection: flax variables by collection.
      collections: names of the state's collections.

    Returns:
      Parameters and state. The state is the one collection itself, or a dict of several.

    Raises:
      ConfigError: if a leaf is not an array, or a parameter is not of floats; the message names it.
    """
    params = by_collection["params"]
    _check_leaves("params", params, floats=True)
    return {"params": params, "state": to_state(by_collection, collections)}


def to_state(by_collection: Mapping[str, Any], collections: Sequence[str]) -> Any:
    """Extract the state from flax variables.

    Args:
      by_collection: flax variables by collection.
      collections: names of the state's collections.

    Returns:
      The one collection itself, or a dict of several.

    Raises:
      ConfigError: if a leaf is not an array; the message names it.
    """
    state = {name: by_collection[name] for name in collections}
    _check_leaves("state", state, floats=False)
    return state[collections[0]] if len(collections) == 1 else state


def to_collections(variables: Variables, collections: Sequence[str]) -> dict[str, Any]:
    """Convert `Variables` to flax variables by collection, the inverse of `to_variables`.

    Args:
      variables: parameters and state.
      collections: names of the state's collections.

    Returns:
      flax variables by collection.
    """
    state = variables["state"]
    state = {collections[0]: state} if len(collections) == 1 else state
    return {"params": variables["params"], **state}


def _check_leaves(kind: str, tree: Any, *, floats: bool) -> None:
    """Raise ConfigError unless each leaf is an array, of floats if `floats`."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
        if is_array and not (floats and not np.issubdtype(leaf.dtype, np.inexact)):
            continue
        actual = f"of type {leaf.dtype}" if is_array else f"a {type(leaf).__name__}"
        expected = "an array of floats" if floats else "an array"
        location = jax.tree_util.keystr(path)
        raise ConfigError(f"{kind}{location} of the variables is {actual}: expected {expected}")


def is_supported_conv(module: nn.Module) -> bool:
    """Return whether `conv2d` can compute a layer.

    Supported are `nn.Conv` layers of two dimensions with one group, no dilation, equal strides, and
    the default precision and convolution.

    Args:
      module: a flax layer.

    Returns:
      True if the layer is supported.
    """
    return (
        isinstance(module, nn.Conv)
        and not isinstance(module.kernel_size, int)
        and len(module.kernel_size) == 2
        and module.feature_group_count == 1
        and {*_to_pair(module.input_dilation), *_to_pair(module.kernel_dilation)} == {1}
        and len(set(_to_pair(module.strides))) == 1
        and module.precision is None
        and module.conv_general_dilated is None
        and module.conv_general_dilated_cls is None
    )


@contextlib.contextmanager
def override_convolution(module: nn.Conv, impl: str = AUTO) -> Iterator[None]:
    """Compute `module` by `conv2d` inside the context, through flax's field `conv_general_dilated`.

    Args:
      module: a layer for which `is_supported_conv` is true.
      impl: implementation of the convolution, see `conv2d`.

    Returns:
      A context manager without a value.
    """

    def convolve(x, kernel, strides, padding, **kwargs: Any) -> jax.Array:
        if isinstance(padding, str):
            padding = jax.lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, padding)
        pad_widths = {width for side in padding for width in side}
        if len(pad_widths) > 1 or min(pad_widths) < 0:
            zero = jax.numpy.zeros((), x.dtype)
            x = jax.lax.pad(x, zero, [(0, 0, 0), *((*side, 0) for side in padding), (0, 0, 0)])
            pad_widths = {0}
        return conv2d(x, kernel, pad_widths.pop(), impl, strides[0])

    # Fields of a flax module are frozen; only the call inside this context reads this one.
    object.__setattr__(module, "conv_general_dilated", convolve)
    try:
        yield
    finally:
        object.__setattr__(module, "conv_general_dilated", None)


def _to_pair(value: Any) -> tuple[int, ...]:
    """Return a setting of both axes as flax reads it: None is 1."""
    if value is None:
        return (1, 1)
    return (value, value) if isinstance(value, int) else tuple(value)


NORM_LAYERS = (
    *(InstanceNorm, BatchNorm),
    *(nn.BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm, nn.RMSNorm),
)
_DENSE_LAYERS = (nn.Dense, Linear)
_PROBE_BATCH = 2


class _ModuleInfo(NamedTuple):
    """Facts about a module from one abstract forward pass.

    Attributes:
      num_classes: the last axis of the logits; None if they are not `[B, num_classes]`.
      collections: names of the collections of variables other than the parameters.
      norm_paths: paths of the normalization layers.
      has_conv: whether `conv2d` can compute some of the convolutions.
      has_dropout: whether the module has flax's dropout.
      activation_shape: height, width and channels after the first convolution; None without one.
      returns_features: whether the module returns (features, logits).
      head: the last fully connected layer, unbound, and its path; None without one.
    """

    num_classes: int | None
    collections: tuple[str, ...]
    norm_paths: frozenset[tuple[str, ...]]
    has_conv: bool
    has_dropout: bool
    activation_shape: tuple[int, int, int] | None
    returns_features: bool
    head: tuple[nn.Module, tuple[str, ...]] | None


def make_flax_model(
    module: nn.Module,
    input_shape: tuple[int, int, int],
    *,
    micro_batch: int | None = None,
    cached_samples: int | None = None,
    can_shard_batch: bool = False,
) -> Model:
    """Convert a flax.linen module to a `Model`.

    The module is called `module(x, train=...)`, `(x, training=...)`, `(x, deterministic=...)` or
    `(x)`, by its signature, and returns logits, or (features, logits). Collections other than
    `params` are the model's state; the key goes to the stream "dropout". The head is the last fully
    connected layer (`nn.Dense`) whose output is the logits; the features are its input. Without
    such a layer the model has no head, and has `embed` only if the module returns features itself.

    Two-dimensional `nn.Conv` layers are computed by `conv2d`, as the package's own convolutions.

    Cost: one abstract evaluation.

    Args:
      module: the unbound module.
      input_shape: height, width and channels.
      micro_batch: see `Model`.
      cached_samples: see `Model`; default: from the size of the first convolution's output.
      can_shard_batch: see `Model`.

    Returns:
      The model.

    Raises:
      ConfigError: if the module has dropout or batch norm but no training flag, or has no
        parameters. Other exceptions inside the module are raised unchanged.
    """
    flag = find_training_flag(get_keyword_parameters(type(module).__call__))
    info = _inspect_module(module, input_shape, flag)
    if cached_samples is None and info.activation_shape is not None:
        cached_samples = count_cached_samples(*info.activation_shape)

    def init(key: jax.Array):
        image, kwargs = jnp.zeros((1, *input_shape)), make_flag_arguments(flag, False)
        variables: Any = module.init(key, image, **kwargs)  # type: ignore[arg-type]
        return to_variables(nn.meta.unbox(variables), info.collections)

    call_module = functools.partial(_apply_module, module, flag, info)

    def apply(variables, x, *, train, key=None, conv_impl=AUTO, batch_axis=None):
        out, _, state = call_module(variables, x, _Call(train, key, conv_impl, batch_axis))
        return _get_logits(out), state

    def embed(variables, x, *, train, key=None, conv_impl=AUTO, batch_axis=None):
        out, features, state = call_module(variables, x, _Call(train, key, conv_impl, batch_axis))
        if info.returns_features:
            return *out, state
        if features is None:
            raise ConfigError(
                f"{type(module).__name__}: expected the same last layer in training and evaluation"
            )
        return features, out, state

    return Model(
        type(module).__name__,
        input_shape,
        info.num_classes or 0,
        init,
        apply,
        micro_batch,
        cached_samples,
        embed if info.returns_features or info.head else None,
        lambda: _list_norm_paths(info),
        _make_head(info),
        can_shard_batch,
        takes_conv_impl=True,
    )


class _Call(NamedTuple):
    """The arguments of one call of a network, besides its variables and images."""

    train: bool
    key: jax.Array | None
    conv_impl: str = AUTO
    batch_axis: BatchAxis | None = None


def _apply_module(
    module: nn.Module,
    flag: str | None,
    info: _ModuleInfo,
    variables: Variables,
    x: jax.Array,
    call: _Call,
) -> tuple[Any, Any, Any]:
    """Return the module's output, the input of its last fully connected layer and the new state.

    The input of the last fully connected layer is None if the logits are not a layer's output.
    """
    module = _bind_call(module, call)
    by_collection = to_collections(variables, info.collections)
    kwargs: dict[str, Any] = {
        **make_flag_arguments(flag, call.train),
        "rngs": None if call.key is None else {"dropout": call.key},
    }
    if "batch_axis" in get_keyword_parameters(type(module).__call__):
        kwargs |= make_axis_argument(call.batch_axis)
    mutable_collections = list(info.collections) if call.train else []
    calls = _CallRecorder(call)
    with _intercept_calls(calls, info):
        if not mutable_collections:
            out, state = module.apply(by_collection, x, **kwargs), variables["state"]
        else:
            out, updates = module.apply(by_collection, x, **kwargs, mutable=mutable_collections)
            state = to_state({**by_collection, **updates}, info.collections)
    return out, calls.find_last_input(_get_logits(out)), state


def _bind_call(module: nn.Module, call: _Call) -> nn.Module:
    """Return the module with the choices of the call in the fields that leave them open."""
    if call.conv_impl != AUTO and getattr(module, "conv_impl", None) == AUTO:
        return module.clone(conv_impl=call.conv_impl)
    return module


def _get_logits(out: Any) -> Any:
    """Return the logits of a module's output, logits or (features, logits)."""
    return out[1] if isinstance(out, tuple) and len(out) == 2 else out


def _make_head(info: _ModuleInfo) -> Head | None:
    """Return the head of a module, or None if it has no last fully connected layer."""
    if info.head is None:
        return None
    layer, path = info.head

    def apply(parameters: Any, features: jax.Array) -> Any:
        return layer.apply({"params": parameters}, features)

    return Head(path, apply)


def _list_norm_paths(info: _ModuleInfo) -> frozenset[tuple[str, ...]]:
    """Return the norm paths, also with the collection in front if there are several."""
    if len(info.collections) < 2:
        return info.norm_paths
    nested_paths = {(name, *path) for name in info.collections for path in info.norm_paths}
    return info.norm_paths | nested_paths


class _CallRecorder:
    """A recorder of the calls of fully connected layers in one forward pass.

    Attributes:
      train: whether the pass is a training pass.
      key: key of dropout; None: nothing is dropped.
      layers: layer, input and output of each call, in order.
    """

    def __init__(self, call: _Call):
        self.call = call
        self.layers: list[tuple[nn.Module, Any, Any]] = []  # module, input, output

    def find_last_call(self, logits: Any) -> tuple[nn.Module, Any, Any] | None:
        """Find the last call whose output is the array `logits` itself.

        Args:
          logits: output of the module.

        Returns:
          Layer, input and output of the call, or None.
        """
        return next((call for call in reversed(self.layers) if call[2] is logits), None)

    def find_last_input(self, logits: Any) -> Any:
        """Find the input of the last call whose output is the array `logits` itself.

        Args:
          logits: output of the module.

        Returns:
          The input, or None.
        """
        call = self.find_last_call(logits)
        return None if call is None else call[1]

    def intercept(self, call: Callable, args: Sequence, kwargs: dict, context: Any) -> Any:
        """Run one flax call.

        Dropout without a key is skipped, supported convolutions are computed by `conv2d`, and calls
        of fully connected layers are recorded.

        Args:
          call: the intercepted method.
          args: its positional arguments.
          kwargs: its keyword arguments.
          context: flax's `InterceptorContext`.

        Returns:
          The output of the call.
        """
        module = context.module
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        if isinstance(module, nn.Dropout) and self.call.train and self.call.key is None:
            return args[0] if args else kwargs["inputs"]  # flax would raise without a key
        if is_supported_conv(module):
            with override_convolution(module, self.call.conv_impl):
                return call(*args, **kwargs)
        out = call(*args, **kwargs)
        if isinstance(module, _DENSE_LAYERS):
            self.layers.append((module, args[0] if args else kwargs["inputs"], out))
        return out


def _intercept_calls(calls: _CallRecorder, info: _ModuleInfo) -> contextlib.AbstractContextManager:
    """Return the context that intercepts calls, or an empty one if the module does not need it."""
    needs_interception = info.has_conv or info.has_dropout or not info.returns_features
    return nn.intercept_methods(calls.intercept) if needs_interception else contextlib.nullcontext()


def _inspect_module(module: nn.Module, input_shape: Sequence[int], flag: str | None) -> _ModuleInfo:
    """Return the facts about a module, from `init` on a batch of shapes."""
    calls = _CallRecorder(_Call(train=False, key=None))
    norms: set[tuple[str, ...]] = set()
    layer_info: dict[str, Any] = {"has_conv": False, "has_dropout": False, "activation_shape": None}
    head: list[tuple[nn.Module, tuple[str, ...]] | None] = []
    flag_arguments: dict[str, Any] = make_flag_arguments(flag, False)

    def record_layer(call: Callable, args: Sequence, kwargs: dict, context: Any) -> Any:
        layer, is_call = context.module, context.method_name == "__call__"
        if flag is None and is_call:
            _check_layer_without_flag(module, layer, kwargs)
        if isinstance(layer, NORM_LAYERS):
            norms.add(layer.path)
        out = calls.intercept(call, args, kwargs, context)
        layer_info["has_dropout"] |= isinstance(layer, nn.Dropout)
        if is_call and is_supported_conv(layer):
            layer_info["has_conv"] = True
            if layer_info["activation_shape"] is None and out.ndim == 4:
                layer_info["activation_shape"] = out.shape[1:]
        return out

    def run_init(key, x):
        with nn.intercept_methods(record_layer):
            out, variables = module.init_with_output(key, x, **flag_arguments)
        last_call = calls.find_last_call(_get_logits(out))
        if last_call is not None and last_call[1].ndim == 2:
            head.append((last_call[0].clone(parent=None), last_call[0].path))
        else:
            head.append(None)
        return out, nn.meta.unbox(variables)

    image = jax.ShapeDtypeStruct((_PROBE_BATCH, *input_shape), jnp.result_type(float))
    out, variables = jax.eval_shape(run_init, jax.random.key(0), image)
    if "params" not in variables:
        raise ConfigError(f"{type(module).__name__}: expected a module with parameters")
    shape: tuple[int, ...] = getattr(_get_logits(out), "shape", ())
    return _ModuleInfo(
        num_classes=shape[1] if len(shape) == 2 else None,
        collections=list_state_collections(variables),
        norm_paths=frozenset(norms),
        **layer_info,
        returns_features=isinstance(out, tuple) and len(out) == 2,
        head=head[-1],
    )


def _check_layer_without_flag(module: nn.Module, layer: nn.Module, kwargs: dict) -> None:
    """Raise ConfigError if a module without a training flag has a layer that needs one."""
    for kind, name, layer_kind in (
        (nn.Dropout, "deterministic", "dropout"),
        (nn.BatchNorm, "use_running_average", "batch norm"),
    ):
        if not isinstance(layer, kind) or getattr(layer, "rate", 1) == 0:
            continue
        if not (kwargs.get(name) or getattr(layer, name)):
            raise ConfigError(
                f"{type(module).__name__}.__call__ has no argument train, training or "
                f"deterministic, but its {layer_kind} ({'/'.join(layer.path)}) requires one"
            )


_KEY_NAMES = ("key", "rng")  # accepted names of the key of `apply`


def make_pair_model(
    init: Callable, apply: Callable, input_shape: tuple[int, int, int], num_classes: int
) -> Model:
    """Convert an (init, apply) pair to a `Model`.

    Signatures: `init(key)`, `init(key, images)` or `init(key, images, train)`, and
    `apply(variables, images)` or `apply(variables, images, train)`. The flag may be called train,
    training or deterministic; a parameter `key` or `rng` of `apply` receives the key.

    Variables with the key "params" are by collection, as flax's; any others are all parameters.
    `apply` returns logits, or (logits, new_state), where new_state holds the collections other than
    the parameters. The model has no head, no `embed` and no normalization layers.

    Cost: one abstract evaluation of `init`, whose exceptions are raised unchanged.

    Args:
      init: function that draws the variables.
      apply: function that computes the logits.
      input_shape: height, width and channels.
      num_classes: number of logits.

    Returns:
      The model.

    Raises:
      ConfigError: if a variable is not an array, or a parameter is not of floats.
    """
    image = jnp.zeros((1, *input_shape))

    def draw_variables(key: jax.Array) -> tuple[Any, bool]:
        variables = init(
            *_list_init_arguments(init, key, image), **_make_function_flag(init, False)
        )
        has_collections = isinstance(variables, Mapping) and "params" in variables
        return (dict(variables) if has_collections else {"params": variables}), has_collections

    structure: dict[str, Any] = {}

    def record_structure(key: jax.Array) -> None:
        by_collection, structure["has_collections"] = draw_variables(key)
        structure["collections"] = list_state_collections(by_collection)

    jax.eval_shape(record_structure, jax.random.key(0))
    has_collections, collections = structure["has_collections"], structure["collections"]

    def model_init(key: jax.Array):
        return to_variables(draw_variables(key)[0], collections)

    def model_apply(variables, x, *, train, key=None):
        by_collection = to_collections(variables, collections)
        key_arguments = {name: key for name in _KEY_NAMES if name in get_keyword_parameters(apply)}
        apply_variables = by_collection if has_collections else by_collection["params"]
        out = apply(apply_variables, x, **_make_function_flag(apply, train), **key_arguments)
        if not (isinstance(out, tuple) and len(out) == 2):
            return out, variables["state"]
        logits, updates = out
        if not (train and collections):
            return logits, variables["state"]
        return logits, to_state({**by_collection, **updates}, collections)

    return Model("pair", input_shape, num_classes, model_init, model_apply)


def _list_init_arguments(init: Callable, key: jax.Array, image: jax.Array) -> tuple[Any, ...]:
    """Return the positional arguments that `init` accepts: the key, or key and image."""
    positional = [
        parameter
        for parameter in inspect.signature(init).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.name not in TRAINING_FLAGS
    ]
    return (key, image)[: max(1, len(positional))]


def _make_function_flag(function: Callable, train: bool) -> dict[str, bool]:
    """Return the training flag of a function as keyword arguments."""
    return make_flag_arguments(find_training_flag(get_keyword_parameters(function)), train)
