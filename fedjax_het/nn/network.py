"""Named networks, and the conversion of a user's network to a `Model`, with its checks."""

import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.nn.adapters import make_flax_model, make_pair_model
from fedjax_het.nn.factories import make_nnx_model, make_single_example_model
from fedjax_het.nn.flops import iter_equations
from fedjax_het.nn.model import USER_NETWORK, Model
from fedjax_het.utils.arrays import make_key
from fedjax_het.utils.config import Bounds, validate_arguments
from fedjax_het.utils.env import require_devices
from fedjax_het.utils.errors import ConfigError, describe_error, format_value, require
from fedjax_het.utils.input_kinds import (
    INPUT_KINDS,
    FrozenMapping,
    InputKind,
    InputShape,
    get_input_kind,
    map_arrays,
    require_input_kind,
)
from fedjax_het.utils.registry import (
    call_with_supported,
    format_entry,
    get_keyword_parameters,
    get_qualified_name,
    validate_keyword_arguments,
)

Size = Annotated[int, Bounds(1, 2**16)]  # of an axis of inputs, or number of classes
Shapes = tuple[Size, ...] | FrozenMapping
NumTokens = Annotated[int, Bounds(1, 2**31 - 1)]
TokenNumbers = NumTokens | FrozenMapping | None
# Arguments that are no options: the package passes all except those that flax adds to modules.
_INFERRED_ARGUMENTS = (
    *("input_shape", "num_classes", "num_tokens", "per_token"),
    *("parent", "name", "rngs", "key"),
)
# Arguments of functions that draw the weights themselves, and the conversions of their modules.
_KEY_ARGUMENTS = {"rngs": make_nnx_model, "key": make_single_example_model}
_BATCH_SIZE = 2  # of the checks
_MEMORY_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
ACCEPTED_NETWORKS = (
    "a flax.linen module or its class, an (init, apply) pair, a Model, a function that returns one "
    "of them, a function of `rngs` that returns an nnx module, or a function of `key` that returns "
    "a module of one example"
)


class NetworkSpec(NamedTuple):
    """A network with a name and options.

    Attributes:
      name: name of the network in settings.
      make: a function `make(input_shape, num_classes, **options)` that returns a `Model`, a
        flax.linen module or an (init, apply) pair; `input_shape`, `num_classes`, `num_tokens` and
        `per_token` are passed only if the signature has them. With an argument `rngs` it returns a
        flax.nnx module, see `make_nnx_model`; with an argument `key` a module of one example, such
        as equinox's, see `make_single_example_model`. Or the class of a flax.linen module, whose
        fields are the options; or the class of a module of the two other kinds. Or a flax.linen
        module, a pair or a `Model` itself, without options.
      description: one line for `fedjax-het list`.
      input_kinds: kinds of inputs that the network accepts.

    Example:
      >>> from fedjax_het.nn import NETWORKS
      >>> NETWORKS["mlp"].options
      {'hidden': (128, 128)}
    """

    name: str
    make: Any
    description: str = ""
    input_kinds: tuple[InputKind, ...] = INPUT_KINDS

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of the signature with their defaults, or `REQUIRED`."""
        if not _is_factory(self.make):
            return {}
        return get_keyword_parameters(self.make, exclude=_INFERRED_ARGUMENTS)

    def validate_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Convert options to the types of their annotations.

        Args:
          options: values by option name.

        Returns:
          The converted options.

        Raises:
          ConfigError: if an option is unknown, missing or of the wrong type.
        """
        owner = f"network {self.name!r}"
        return validate_keyword_arguments(
            *(owner, options, self.make, self.options, "option"), available=_INFERRED_ARGUMENTS
        )

    def __repr__(self) -> str:
        return format_entry(self)


@validate_arguments
def to_model(
    network: Any,
    input_shape: Shapes,
    num_classes: Size,
    name: str = USER_NETWORK,
    num_tokens: TokenNumbers = None,
    per_token: bool = False,
    **options: Any,
) -> Model:
    """Convert a user's network to a `Model`.

    Cost: three abstract evaluations. Nothing compiles.

    Args:
      network: a network as in `NetworkSpec.make`.
      input_shape: shape of the input of one example, such as (H, W, C) of an image.
      num_classes: number of logits.
      name: name of the network in messages.
      num_tokens: number of different tokens, for inputs of tokens; None for inputs of floats.
      per_token: whether the network has logits for each token, see `Model.is_per_token`.
      **options: options of the network's signature.

    Returns:
      The checked model.

    Raises:
      ConfigError: in one line that names the network, the function and the shape or leaf. The
        causes are an unknown option, a call that fails, logits that are not `[B, num_classes]`, and
        parameters that are not arrays of floats. Further causes are a state that changes its shape,
        and dropout or batch norm without a training flag.

    Example:
      >>> import flax.linen as nn
      >>> from fedjax_het.nn import to_model
      >>> class Classifier(nn.Module):
      ...     num_classes: int
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))
      >>> model = to_model(Classifier, (4, 4, 1), 3)
      >>> model.num_classes, model.head.path
      (3, ('Dense_0',))
    """
    owner = f"network {name!r}"
    arguments = (NetworkSpec(name, network), input_shape, num_classes, options, num_tokens)
    model = build_model(*arguments, per_token=per_token)
    function = get_qualified_name(network[1] if _is_pair(network) else network)
    if issubclass(network if isinstance(network, type) else type(network), nn.Module):
        function += ".__call__"
    has_input_shape = model.input_shape == input_shape
    require(has_input_shape, owner, model.input_shape, f"one of {input_shape} inputs")
    positions = input_shape[:1] if per_token and isinstance(input_shape, tuple) else ()
    output_shape = (*positions, num_classes)
    _check_model(model, owner, function, output_shape)
    return model


def build_model(
    network: NetworkSpec,
    input_shape: InputShape,
    num_classes: int,
    options: dict[str, Any],
    num_tokens: Any = None,
    *,
    per_token: bool = False,
    list_alternatives: Callable[[InputKind], str] | None = None,
) -> Model:
    """Build a network's `Model` and check its options only, see `to_model`.

    Args:
      network: the named network.
      input_shape: shape of the input of one example.
      num_classes: number of logits.
      options: options of the network's signature.
      num_tokens: number of different tokens; None for inputs of floats.
      per_token: whether the network has logits for each token, see `Model.is_per_token`.
      list_alternatives: end of the message about inputs, see `require_input_kind`.

    Returns:
      The model, whose outputs are not checked.

    Raises:
      ConfigError: if an option is invalid, or building the network fails.
    """
    require_devices()  # jax initializes devices even for abstract evaluation
    owner = f"network {network.name!r}"
    _require_no_weights(owner, network.make)
    kinds = network.input_kinds
    require_input_kind(owner, input_shape, num_tokens, kinds, list_alternatives)
    options = network.validate_options(options)
    with _reraise_as_config_error(owner, get_qualified_name(network.make)):
        definition = network.make
        if _is_factory(definition):
            arguments: dict[str, Any] = {"input_shape": input_shape, "num_classes": num_classes}
            arguments |= {"num_tokens": num_tokens, "per_token": per_token}

            def make(name: str, keys: Any) -> Any:
                return call_with_supported(network.make, {**arguments, name: keys}, **options)

            for name, convert in _KEY_ARGUMENTS.items():
                if name in get_keyword_parameters(definition):
                    inputs = (input_shape, num_classes, num_tokens)
                    model = convert(partial(make, name), *inputs, per_token=per_token)
                    return model._replace(name=network.name)
            definition = call_with_supported(definition, arguments, **options)
        model = _wrap_model(
            definition, owner, input_shape, num_classes, num_tokens, per_token=per_token
        )
        return model._replace(name=network.name)


def check_network_definition(name: str, make: Any) -> None:
    """Raise ConfigError if `make` is neither a network nor a function.

    Args:
      name: name of the network in the message.
      make: a network as in `NetworkSpec.make`.

    Raises:
      ConfigError: if `make` is neither a network nor a function.
    """
    _require_no_weights(f"network {name!r}", make)
    require(_is_factory(make) or _is_network(make), f"network {name!r}", make, ACCEPTED_NETWORKS)


def _require_no_weights(owner: str, network: Any) -> None:
    """Raise ConfigError for a module that already has weights, which no seed could draw anew."""
    is_plain = isinstance(network, type | Model | nn.Module | tuple) or inspect.isroutine(network)
    if not is_plain and any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(network)):
        kind = type(network).__name__
        raise ConfigError(
            f"{owner} is a {kind} with weights: expected a function that draws them, for example "
            f"lambda rngs: {kind}(rngs=rngs) for flax.nnx, or lambda key: {kind}(key=key) for a "
            "module of one example, such as equinox's"
        )


def _wrap_model(
    definition: Any,
    owner: str,
    shape: InputShape,
    num_classes: int,
    num_tokens: Any,
    *,
    per_token: bool,
) -> Model:
    """Return the `Model` of a network definition, or raise ConfigError."""
    if isinstance(definition, Model):
        return definition
    if isinstance(definition, nn.Module):
        return make_flax_model(definition, shape, num_tokens=num_tokens)
    if _is_pair(definition):
        module = getattr(definition[0], "__self__", None)
        if isinstance(module, nn.Module):  # (module.init, module.apply)
            return make_flax_model(module, shape, num_tokens=num_tokens)
        init, apply = definition
        return make_pair_model(init, apply, shape, num_classes, num_tokens, is_per_token=per_token)
    _require_no_weights(owner, definition)
    raise ConfigError(f"{owner} = {format_value(definition)}: expected {ACCEPTED_NETWORKS}")


def _is_pair(value: Any) -> bool:
    """Return whether `value` is a pair of functions."""
    return isinstance(value, tuple) and len(value) == 2 and all(map(callable, value))


def _is_network(value: Any) -> bool:
    """Return whether `value` is a `Model`, a flax module or an (init, apply) pair."""
    return isinstance(value, Model | nn.Module) or _is_pair(value)


def _is_factory(value: Any) -> bool:
    """Return whether `value` must be called to get a network.

    A flax module can be called too, but is itself a network.
    """
    return callable(value) and not _is_network(value)


@contextmanager
def _reraise_as_config_error(owner: str, step: str):
    """Raise each exception from inside as a one-line ConfigError that names network and step.

    Args:
      owner: the network, for the message.
      step: the operation that the code inside does, for the message.

    Returns:
      A context manager without a value.

    Raises:
      ConfigError: if the code inside raises an exception.
    """
    try:
        yield
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(owner) else f"{owner}: {text}") from error
    except Exception as error:
        reason = describe_error(error)[:300]
        raise ConfigError(f"{owner}: {step} fails ({reason})") from error


def _check_model(model: Model, owner: str, function: str, output_shape: tuple[int, ...]) -> None:
    """Check by shapes alone that a model maps inputs of its `input_shape` to logits.

    Cost: two abstract evaluations.

    Args:
      model: the network.
      owner: the network, for messages.
      function: the user's function, for messages.
      output_shape: expected shape of the logits of one example.

    Raises:
      ConfigError: if a call fails; if logits are not floats `[B, num_classes]`; if features are not
        `[B, F]`; or if the state changes its structure, a shape or a dtype.
    """
    inputs = model.make_inputs(_BATCH_SIZE)
    is_image = get_input_kind(model.input_shape, model.num_tokens) == "image"
    kind = "images" if is_image else "inputs"
    shape: Any = map_arrays(lambda array: array.shape, inputs)
    key = make_key(0)
    with _reraise_as_config_error(owner, f"init of {function}"):
        variables = jax.eval_shape(model.init, key)
    for train in (False, True):
        step = f"{function} of {kind} {shape} with train={train}"
        call_arguments: dict[str, Any] = {"train": train}
        if train:  # only training draws dropout masks and fills up batches
            sample_mask = np.ones(_BATCH_SIZE, np.float32)
            call_arguments |= {"key": key, **model.make_batch_arguments(sample_mask)}
        with _reraise_as_config_error(owner, step):
            apply = partial(model.apply, **call_arguments)
            logits, state = jax.eval_shape(apply, variables, inputs)
        _check_logits(logits, f"{owner}: {step}", (_BATCH_SIZE, *output_shape))
        _check_state(variables["state"], state, f"{owner}: {step}")
        if model.embed is not None:
            with _reraise_as_config_error(owner, step):
                embed = partial(model.embed, **call_arguments)
                features = jax.eval_shape(embed, variables, inputs)[0]
            expected = f"[{_BATCH_SIZE}, F]"
            require(len(features.shape) == 2, f"{owner}: features", features.shape, expected)


def _check_logits(logits: Any, step: str, expected: tuple[int, ...]) -> None:
    """Raise ConfigError unless the logits are floats of the expected shape."""
    if not hasattr(logits, "dtype"):
        raise ConfigError(
            f"{step} gives a {type(logits).__name__}: expected one array, the logits {expected}; "
            "only a flax.linen module may also return a pair (features, logits)"
        )
    if logits.shape != expected or not jnp.issubdtype(logits.dtype, jnp.floating):
        actual = f"{logits.dtype} {logits.shape}"
        raise ConfigError(f"{step} gives {actual}: expected logits, floats {expected}")


def _check_state(before: Any, after: Any, step: str) -> None:
    """Raise ConfigError unless each leaf of the state keeps its shape and dtype after a batch."""
    old, new = (
        {
            jax.tree_util.keystr(path): f"{leaf.dtype} {leaf.shape}"
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        }
        for tree in (before, after)
    )
    for location in {**old, **new}:
        leaf, other = old.get(location, "nothing"), new.get(location, "nothing")
        if leaf != other:
            raise ConfigError(
                f"{step} turns state{location}, {leaf}, into {other}: expected no change"
            )


def compute_network_digest(model: Model) -> str:
    """Hash the function that a network computes, from its traces.

    The hash covers the shapes of the variables and the programs of `init` and `apply`, in
    evaluation and in training. It includes the arrays that the programs close over. It differs
    between networks with different weight shapes, layers, activations or initializations. It does
    not depend on names or on the backend. Another version of jax may give another digest. Cost:
    three traces.

    Args:
      model: the network.

    Returns:
      16 hexadecimal digits.

    Example:
      >>> from fedjax_het.nn import make_model
      >>> from fedjax_het.nn import compute_network_digest
      >>> digest = compute_network_digest(make_model("mlp", (2, 2, 1), 3))
      >>> len(digest), digest == compute_network_digest(make_model("mlp", (2, 2, 1), 3))
      (16, True)
    """
    key, inputs = make_key(0), model.make_inputs(2)
    variables = jax.eval_shape(model.init, key)
    programs = [jax.make_jaxpr(model.init)(key)]
    for train in (False, True):
        call = partial(model.apply, train=train, **({"key": key} if train else {}))
        programs.append(jax.make_jaxpr(call)(variables, inputs))
    if "custom_vjp_call" in str(programs[-1]):  # its backward function is not in the trace

        def sum_logits(params, inputs):
            return call({**variables, "params": params}, inputs)[0].sum()

        arguments = (0, 1) if isinstance(inputs, jax.Array) and model.num_tokens is None else 0
        programs.append(
            jax.make_jaxpr(jax.grad(sum_logits, arguments))(variables["params"], inputs)
        )
    digest = hash_jaxprs(programs)
    leaves, structure = jax.tree.flatten(variables)
    digest.update(f"{structure}{[(leaf.shape, str(leaf.dtype)) for leaf in leaves]}".encode())
    return digest.hexdigest()[:16]


def _iter_constants(program: Any) -> Iterator[Any]:
    """Yield the arrays that a program and the compiled functions inside it close over."""
    yield from program.consts
    for equation in iter_equations(program.jaxpr):
        parts = jax.tree.leaves([*equation.params.values()], is_leaf=_is_closed_jaxpr)
        for part in filter(_is_closed_jaxpr, parts):
            yield from part.consts


def _is_closed_jaxpr(value: Any) -> bool:
    return hasattr(value, "jaxpr") and hasattr(value, "consts")


def hash_jaxprs(programs: Iterable[Any]) -> Any:
    """Hash programs and the arrays that they close over with SHA-256.

    Args:
      programs: results of `jax.make_jaxpr`.

    Returns:
      The `hashlib` object, which accepts more data by `update`.
    """
    digest = hashlib.sha256()
    for program in programs:
        digest.update(_MEMORY_ADDRESS.sub("", str(program)).encode())
        for constant in _iter_constants(program):
            constant = jnp.asarray(constant)
            if not jax.dtypes.issubdtype(constant.dtype, jax.dtypes.prng_key):
                digest.update(np.asarray(constant).tobytes())
    return digest
