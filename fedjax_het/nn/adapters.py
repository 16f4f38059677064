"""Adapters that turn flax.linen modules and (init, apply) pairs into a `Model`.

flax stores variables by collection; a `Model` stores parameters and state. Two-dimensional
`nn.Conv` layers of users' modules are computed by `conv2d`, whose derivatives are also fast on a
CPU.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.nn.batch_axis import make_axis_argument
from fedjax_het.nn.conv import conv2d
from fedjax_het.nn.conv_products import AUTO
from fedjax_het.nn.layers import BatchNorm, InstanceNorm, Linear
from fedjax_het.nn.model import (
    Head,
    Model,
    Variables,
    count_cached_samples,
    make_inputs,
)
from fedjax_het.nn.output_dependence import is_computed_from
from fedjax_het.utils.arrays import expand_like, make_key
from fedjax_het.utils.errors import ConfigError
from fedjax_het.utils.input_kinds import InputShape, NumTokens
from fedjax_het.utils.registry import get_keyword_parameters

TRAINING_FLAGS = ("train", "training", "deterministic")  # accepted names of the training flag
_SAMPLE_MASK = "sample_mask"  # argument of networks, see `Model.takes_sample_mask`


def make_flag_arguments(function: Callable, train: bool) -> dict[str, bool]:
    """Return the training flag of a function as keyword arguments.

    Args:
      function: a function with an argument of `TRAINING_FLAGS`, or without.
      train: whether the call is in training.

    Returns:
      The flag by its name; {} if the function has no flag.
    """
    parameters = get_keyword_parameters(function)
    flag = next((name for name in TRAINING_FLAGS if name in parameters), None)
    return {} if flag is None else {flag: not train if flag == "deterministic" else train}


def _list_state_collections(by_collection: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the sorted names of the collections other than the parameters."""
    return tuple(sorted(name for name in by_collection if name != "params"))


def _to_variables(by_collection: Mapping[str, Any], collections: Sequence[str]) -> Variables:
    """Convert flax variables to `Variables`; `collections` are the collections of the state.

    The state is the one collection itself, or a dict of several.
    """
    params = by_collection["params"]
    _check_leaves("params", params, floats=True)
    return {"params": params, "state": _to_state(by_collection, collections)}


def _to_state(by_collection: Mapping[str, Any], collections: Sequence[str]) -> Any:
    """Extract the state from flax variables."""
    state = {name: by_collection[name] for name in collections}
    _check_leaves("state", state, floats=False)
    return state[collections[0]] if len(collections) == 1 else state


def _to_collections(variables: Variables, collections: Sequence[str]) -> dict[str, Any]:
    """Convert `Variables` to flax variables by collection, the inverse of `_to_variables`."""
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


def _is_supported_conv(module: nn.Module) -> bool:
    """Return whether `conv2d` can compute a layer.

    Supported are `nn.Conv` layers of two dimensions with one group, no dilation, equal strides, and
    the default precision and convolution.
    """
    return (
        isinstance(module, nn.Conv)
        and not isinstance(module.kernel_size, int)
        and len(module.kernel_size) == 2
        and module.feature_group_count == 1
        and {*np.ravel(module.input_dilation or 1), *np.ravel(module.kernel_dilation or 1)} == {1}
        and len({*np.ravel(module.strides or 1)}) == 1
        and module.precision is None
        and module.conv_general_dilated is None
        and module.conv_general_dilated_cls is None
    )


@contextlib.contextmanager
def _override_convolution(module: nn.Conv, impl: str) -> Iterator[None]:
    """Compute `module` by `conv2d` inside the context, by flax's field `conv_general_dilated`."""

    def convolve(x, kernel, strides, padding, **kwargs: Any) -> jax.Array:
        if isinstance(padding, str):
            padding = jax.lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, padding)
        pad_widths = {width for side in padding for width in side}
        if len(pad_widths) > 1 or min(pad_widths) < 0:
            zero = jnp.zeros((), x.dtype)
            x = jax.lax.pad(x, zero, [(0, 0, 0), *((*side, 0) for side in padding), (0, 0, 0)])
            pad_widths = {0}
        return conv2d(x, kernel, pad_widths.pop(), impl, strides[0])

    # Fields of a flax module are frozen; only the call inside this context reads this one.
    object.__setattr__(module, "conv_general_dilated", convolve)
    try:
        yield
    finally:
        object.__setattr__(module, "conv_general_dilated", None)


_BATCH_NORM_LAYERS = (BatchNorm, nn.BatchNorm)
NORM_LAYERS = (
    *_BATCH_NORM_LAYERS,
    *(InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm, nn.RMSNorm),
)
_DENSE_LAYERS = (nn.Dense, Linear)
_PROBE_BATCH = 2


class _ModuleInfo(NamedTuple):
    """Properties of a module from one abstract forward pass.

    Attributes:
      num_classes: the last axis of the logits; 0 if they are not `[B, num_classes]` or
        `[B, T, num_classes]`.
      is_per_token: whether the logits are `[B, T, num_classes]`.
      collections: names of the collections of variables other than the parameters.
      norm_paths: paths of the normalization layers, also with the collection in front if there are
        several.
      activation_shape: height, width and channels after the first convolution; None without one.
      returns_features: whether the module returns (features, logits).
      head: the last fully connected layer; None without one.
      has_batch_norm: whether the module has layers of `_BATCH_NORM_LAYERS`.
    """

    num_classes: int
    is_per_token: bool
    collections: tuple[str, ...]
    norm_paths: frozenset[tuple[str, ...]]
    activation_shape: tuple[int, int, int] | None
    returns_features: bool
    head: Head | None
    has_batch_norm: bool


def make_flax_model(
    module: nn.Module,
    input_shape: InputShape,
    *,
    num_tokens: NumTokens = None,
    micro_batch: int | None = None,
    cached_samples: int | None = None,
    can_shard_batch: bool = False,
    input_layer: str | None = None,
) -> Model:
    """Convert a flax.linen module to a `Model`.

    The module is called `module(x, train=...)`, `(x, training=...)`, `(x, deterministic=...)` or
    `(x)`, by its signature, and returns logits, or (features, logits). The logits must then be
    computed from the features. Collections other than
    `params` are the model's state; the key goes to the stream "dropout". The head is the last fully
    connected layer (`nn.Dense`) whose output is the logits; the features are its input. Without
    such a layer the model has no head, and has `embed` only if the module returns features itself.

    Two-dimensional `nn.Conv` layers are computed by `conv2d`, as the package's own convolutions.
    Batch norm layers receive the mask of real samples. A module with an argument `sample_mask`
    receives it too.

    Cost: one abstract evaluation.

    Args:
      module: the unbound module.
      input_shape: shape of the input of one example.
      num_tokens: number of different tokens; None for inputs of floats.
      micro_batch: see `Model`.
      cached_samples: see `Model`; default: from the size of the first convolution's output.
      can_shard_batch: see `Model`.
      input_layer: see `Model`; the name of a `Linear` of the module.

    Returns:
      The model.

    Raises:
      ConfigError: if the module has dropout or batch norm but no training flag, has no parameters,
        or returns two arrays that are not (features, logits). Other exceptions inside the module
        are raised unchanged.
    """
    name, signature = type(module).__name__, type(module).__call__
    info = _inspect_module(module, make_inputs(input_shape, num_tokens, _PROBE_BATCH))
    reads_mask = _SAMPLE_MASK in get_keyword_parameters(signature)
    if cached_samples is None and info.activation_shape is not None:
        cached_samples = count_cached_samples(*info.activation_shape)

    def init(key: jax.Array):
        inputs: Any = make_inputs(input_shape, num_tokens, 1)
        kwargs: dict[str, Any] = make_flag_arguments(signature, False)
        variables: Any = module.init(key, inputs, **kwargs)
        return _to_variables(nn.meta.unbox(variables), info.collections)

    def call_module(
        variables,
        x,
        *,
        train,
        key=None,
        conv_impl=AUTO,
        batch_axis=None,
        sample_mask=None,
        input_product=None,
    ):
        """Return the module's output, its `_CallRecorder` and the new state."""
        configured = module
        if conv_impl != AUTO and getattr(module, "conv_impl", None) == AUTO:
            configured = module.clone(conv_impl=conv_impl)
        by_collection = _to_collections(variables, info.collections)
        kwargs: dict[str, Any] = make_flag_arguments(signature, train)
        if "batch_axis" in get_keyword_parameters(signature):
            kwargs |= make_axis_argument(batch_axis)
        if reads_mask:
            kwargs[_SAMPLE_MASK] = sample_mask
        kwargs["rngs"] = None if key is None else {"dropout": key}
        calls = _CallRecorder(conv_impl, sample_mask, skips_dropout=train and key is None)
        if input_product is not None:
            calls.products[(input_layer,)] = input_product
        with nn.intercept_methods(calls.intercept):
            if not (train and info.collections):
                return configured.apply(by_collection, x, **kwargs), calls, variables["state"]
            mutable = list(info.collections)
            if sample_mask is not None:
                # nn.jit reuses traces by `mutable`, and must not reuse a trace with another mask.
                mutable.append(f"{_SAMPLE_MASK}{id(sample_mask)}")
            out, updates = configured.apply(by_collection, x, **kwargs, mutable=mutable)
        state = _to_state({**by_collection, **updates}, info.collections)
        return out, calls, _narrow_floats(state, variables["state"])

    def apply(variables, x, **call: Any):
        out, _, state = call_module(variables, x, **call)
        return _get_logits(out), state

    def embed(variables, x, **call: Any):
        out, calls, state = call_module(variables, x, **call)
        if info.returns_features:
            return *out, state
        last_call = calls.find_last_call(out)
        if last_call is None:
            raise ConfigError(f"{name}: expected the same last layer in training and evaluation")
        return last_call.input, out, state

    return Model(
        name,
        input_shape,
        info.num_classes,
        init,
        apply,
        micro_batch,
        cached_samples,
        embed if (info.returns_features or info.head) and not info.is_per_token else None,
        lambda: info.norm_paths,
        info.head,
        can_shard_batch,
        takes_conv_impl=True,
        takes_sample_mask=info.has_batch_norm or reads_mask,
        num_tokens=num_tokens,
        is_per_token=info.is_per_token,
        input_layer=input_layer,
    )


def _narrow_floats(state: Any, template: Any) -> Any:
    """Return a state whose floats are 32 bits wide where the template's are.

    The statistics of flax have 32 bits, also with `jax_enable_x64`, where inputs may have 64 bits.
    """
    structure: Any = jax.tree.structure(state)
    if structure != jax.tree.structure(template):
        return state  # the check of the network reports it

    def narrow(leaf: Any, old_leaf: Any) -> Any:
        is_wider = (leaf.dtype, old_leaf.dtype) == (jnp.float64, jnp.float32)
        return leaf.astype(jnp.float32) if is_wider else leaf

    return jax.tree.map(narrow, state, template)


def _get_logits(out: Any) -> Any:
    """Return the logits of a module's output, logits or (features, logits)."""
    return out[1] if isinstance(out, tuple) and len(out) == 2 else out


class _LayerCall(NamedTuple):
    layer: nn.Module
    input: Any
    output: Any


class _CallRecorder:
    """A recorder of the calls of fully connected layers in one forward pass.

    It also computes convolutions by `conv2d`, passes the mask of real samples to batch norm, and
    skips dropout in training without a key, where flax would raise.

    Attributes:
      products: products of input and kernel by the path of a `Linear`, which then only adds the
        bias.
    """

    def __init__(self, conv_impl: str, sample_mask: Any = None, *, skips_dropout: bool):
        self.conv_impl, self.skips_dropout = conv_impl, skips_dropout
        self.sample_mask = sample_mask
        self.dense_calls: list[_LayerCall] = []
        self.products: dict[tuple[str | None, ...], jax.Array] = {}

    def find_last_call(self, logits: Any) -> _LayerCall | None:
        """Find the last call whose output is the array `logits` itself."""
        return next((call for call in reversed(self.dense_calls) if call.output is logits), None)

    def intercept(self, call: Callable, args: Sequence, kwargs: dict, context: Any) -> Any:
        """Run one flax call."""
        module = context.module
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        if isinstance(module, nn.Dropout) and self.skips_dropout:
            return args[0] if args else kwargs["inputs"]
        if _is_supported_conv(module):
            with _override_convolution(module, self.conv_impl):
                return call(*args, **kwargs)
        if isinstance(module, _BATCH_NORM_LAYERS) and self.sample_mask is not None:
            x = args[0] if args else kwargs["x"]
            kwargs = {"mask": _expand_mask(self.sample_mask, x), **kwargs}
        if module.path in self.products:
            out = self.products[module.path] + module.get_variable("params", "bias")
        else:
            out = call(*args, **kwargs)
        if isinstance(module, _DENSE_LAYERS):
            self.dense_calls.append(_LayerCall(module, args[0] if args else kwargs["inputs"], out))
        return out


def _expand_mask(sample_mask: jax.Array, x: jax.Array) -> jax.Array | None:
    """Return a mask of samples `[B]` as bool `[B, 1, ...]` for `x` `[B, ...]`.

    Return None if the first axis of `x` is not the samples.
    """
    if x.shape[0] != len(sample_mask):
        return None
    return expand_like(sample_mask > 0, x)


def _inspect_module(module: nn.Module, inputs: Any) -> _ModuleInfo:
    """Return the properties of a module, from the shapes of `init` on a batch of inputs."""
    calls = _CallRecorder(AUTO, skips_dropout=False)
    norm_paths: set[tuple[str, ...]] = set()
    activation_shapes: list[tuple[int, int, int]] = []
    heads: list[Head | None] = []
    head_inputs: list[tuple[int, ...] | None] = []
    norm_kinds: set[type] = set()
    flag_arguments: dict[str, Any] = make_flag_arguments(type(module).__call__, False)

    def record_layer(call: Callable, args: Sequence, kwargs: dict, context: Any) -> Any:
        layer, is_call = context.module, context.method_name == "__call__"
        if is_call and not flag_arguments:
            _check_layer_without_flag(module, layer, kwargs)
        if isinstance(layer, NORM_LAYERS):
            norm_paths.add(layer.path)
            norm_kinds.add(type(layer))
        out = calls.intercept(call, args, kwargs, context)
        if is_call and _is_supported_conv(layer) and out.ndim == 4:
            activation_shapes.append(out.shape[1:])
        return out

    def run_init(key, x):
        with nn.intercept_methods(record_layer):
            out, variables = module.init_with_output(key, x, **flag_arguments)
        if isinstance(out, tuple) and len(out) == 2 and out[0] is out[1]:
            name, expected = type(module).__name__, "logits, or (features, logits)"
            raise ConfigError(f"{name} returns one array twice: expected {expected}")
        last_call = calls.find_last_call(_get_logits(out))
        head_inputs.append(last_call.input.shape if last_call else None)
        heads.append(
            _make_head(last_call.layer) if last_call and last_call.input.ndim in (2, 3) else None
        )
        return out, nn.meta.unbox(variables)

    out, variables = jax.eval_shape(run_init, make_key(0), inputs)
    if isinstance(out, tuple) and len(out) == 2:
        _check_features(module, out, inputs, flag_arguments, head_inputs[-1])
    if "params" not in variables:
        raise ConfigError(f"{type(module).__name__}: expected a module with parameters")
    shape: tuple[int, ...] = getattr(_get_logits(out), "shape", ())
    collections = _list_state_collections(variables)
    if len(collections) > 1:
        norm_paths |= {(name, *path) for name in collections for path in norm_paths}
    return _ModuleInfo(
        num_classes=shape[-1] if len(shape) in (2, 3) else 0,
        is_per_token=len(shape) == 3,
        collections=collections,
        norm_paths=frozenset(norm_paths),
        activation_shape=activation_shapes[0] if activation_shapes else None,
        returns_features=isinstance(out, tuple) and len(out) == 2,
        head=heads[-1],
        has_batch_norm=any(issubclass(kind, _BATCH_NORM_LAYERS) for kind in norm_kinds),
    )


def _check_features(
    module: nn.Module,
    out: tuple,
    inputs: Any,
    flag_arguments: dict,
    head_input: tuple[int, ...] | None,
) -> None:
    """Raise ConfigError unless two outputs are (features, logits computed from the features).

    Args:
      module: the unbound module.
      out: the shapes of its outputs.
      inputs: a batch of inputs.
      flag_arguments: the training flag.
      head_input: the shape that the last fully connected layer reads; None without such a layer.

    Raises:
      ConfigError: if the outputs are something else.
    """
    shapes = [getattr(output, "shape", None) for output in out]
    if None in shapes:
        return  # the check of the logits reports it

    def run_init(x: Any) -> Any:
        return module.init_with_output(make_key(0), x, **flag_arguments)[0]

    if not is_computed_from(run_init, inputs):
        raise ConfigError(
            f"{type(module).__name__} returns two arrays, {shapes[0]} and {shapes[1]}, and the "
            "second one is not computed from the first one: expected logits [B, C], or (features "
            "[B, F], logits [B, C]) with logits that the last layers compute from the features"
        )
    if head_input not in (None, shapes[0]):
        raise ConfigError(
            f"{type(module).__name__} returns features {shapes[0]}, but its last nn.Dense reads "
            f"{head_input}: expected (features, logits), with the input of the last nn.Dense as "
            "features"
        )


def _make_head(layer: nn.Module) -> Head:
    """Return a fully connected layer as a head."""
    unbound = layer.clone(parent=None)

    def apply(parameters: Any, features: jax.Array) -> Any:
        return unbound.apply({"params": parameters}, features)

    return Head(layer.path, apply)


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
    init: Callable,
    apply: Callable,
    input_shape: InputShape,
    num_classes: int,
    num_tokens: NumTokens = None,
    *,
    is_per_token: bool = False,
) -> Model:
    """Convert an (init, apply) pair to a `Model`.

    Signatures: `init(key)`, `init(key, inputs)` or `init(key, inputs, train)`, and
    `apply(variables, inputs)` or `apply(variables, inputs, train)`. The flag may be called train,
    training or deterministic; a parameter `key` or `rng` of `apply` receives the key, and a
    parameter `sample_mask` the mask of real samples, see `Model.takes_sample_mask`.

    Variables with the key "params" are by collection, as flax's; any others are all parameters.
    `apply` returns logits, or (logits, new_state), where new_state holds the collections other than
    the parameters. The model has no head, no `embed` and no normalization layers.

    Cost: one abstract evaluation of `init`, whose exceptions are raised unchanged.

    Args:
      init: function that draws the variables.
      apply: function that computes the logits.
      input_shape: shape of the input of one example.
      num_classes: number of logits.
      num_tokens: number of different tokens; None for inputs of floats.
      is_per_token: whether `apply` returns logits `[B, T, num_classes]`.

    Returns:
      The model.

    Raises:
      ConfigError: if a variable is not an array, or a parameter is not of floats.
    """
    inputs = make_inputs(input_shape, num_tokens, 1)

    def draw_variables(key: jax.Array) -> Any:
        arguments = _list_init_arguments(init, key, inputs)
        return init(*arguments, **make_flag_arguments(init, False))

    records: list[tuple[str, ...] | None] = []  # collections of the state; None: parameters alone

    def record_collections(key: jax.Array) -> None:
        variables = draw_variables(key)
        is_by_collection = isinstance(variables, Mapping) and "params" in variables
        records.append(_list_state_collections(variables) if is_by_collection else None)

    jax.eval_shape(record_collections, make_key(0))
    has_collections, collections = records[0] is not None, records[0] or ()
    reads_mask = _SAMPLE_MASK in get_keyword_parameters(apply)

    def model_init(key: jax.Array):
        variables = draw_variables(key)
        return _to_variables(variables if has_collections else {"params": variables}, collections)

    def model_apply(variables, x, *, train, key=None, sample_mask=None):
        by_collection = _to_collections(variables, collections)
        key_arguments = {name: key for name in _KEY_NAMES if name in get_keyword_parameters(apply)}
        if reads_mask:
            key_arguments[_SAMPLE_MASK] = sample_mask
        apply_variables = by_collection if has_collections else by_collection["params"]
        out = apply(apply_variables, x, **make_flag_arguments(apply, train), **key_arguments)
        if not (isinstance(out, tuple) and len(out) == 2):
            if train and collections:
                updates = ", ".join(f"{name!r}: ..." for name in collections)
                raise ConfigError(
                    f"apply returns no new {' and '.join(collections)} in training: expected "
                    f"(logits, {{{updates}}}), or (logits, {{}}) for values that do not change"
                )
            return out, variables["state"]
        logits, updates = out
        if not isinstance(updates, Mapping) and jax.tree.leaves(updates):
            names = ", ".join(f"{name!r}: ..." for name in collections)
            raise ConfigError(
                "apply returns two values, and the second one is no dict of collections: expected "
                f"logits [B, C], or (logits, new_state) with the new_state {{{names}}}"
            )
        if not (train and collections):
            return logits, variables["state"]
        return logits, _to_state({**by_collection, **updates}, collections)

    return Model(
        *("pair", input_shape, num_classes, model_init, model_apply),
        takes_sample_mask=reads_mask,
        num_tokens=num_tokens,
        is_per_token=is_per_token,
    )


def _list_init_arguments(init: Callable, key: jax.Array, inputs: Any) -> tuple[Any, ...]:
    """Return the positional arguments that `init` accepts: the key, or key and inputs."""
    positional = [
        parameter
        for parameter in inspect.signature(init).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.name not in TRAINING_FLAGS
    ]
    return (key, inputs)[: max(1, len(positional))]
