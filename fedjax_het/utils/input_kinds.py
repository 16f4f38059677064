"""Kinds of inputs of examples: images, features, series, tokens, and several arrays."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

from fedjax_het.utils.errors import ConfigError, require

ValueT = TypeVar("ValueT")


class FrozenMapping(Mapping[str, ValueT]):
    """A mapping with a hash, for properties of inputs that consist of several named arrays.

    Example:
      >>> from fedjax_het.utils.input_kinds import FrozenMapping
      >>> shapes = FrozenMapping({"numbers": (5,), "category": (2,)})
      >>> shapes["category"], hash(shapes) == hash(FrozenMapping(dict(shapes)))
      ((2,), True)
    """

    def __init__(self, values: Mapping[str, ValueT]):
        """Copy the values, in the order of their names."""
        self._values = dict(sorted(values.items()))

    def __getitem__(self, name: str) -> ValueT:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and self._values == dict(other)

    def __repr__(self) -> str:
        return repr(self._values)


InputShape = Any  # users of one array check the kind of the inputs first, and then read a tuple
"""Shape of the input of one example, a tuple; or a `FrozenMapping` of the shapes of its arrays."""
NumTokens = Any
"""Number of different tokens, None for floats; or a `FrozenMapping` of them by name."""
InputKind = Literal["image", "features", "series", "tokens", "mixed"]
IMAGE_KINDS: tuple[InputKind, ...] = ("image",)
SERIES_KINDS: tuple[InputKind, ...] = ("series",)
MIXED_KINDS: tuple[InputKind, ...] = ("mixed",)
TOKEN_KINDS: tuple[InputKind, ...] = ("tokens",)
SEQUENCE_KINDS: tuple[InputKind, ...] = ("series", "tokens")
FLOAT_KINDS: tuple[InputKind, ...] = ("image", "features", "series")
INPUT_KINDS: tuple[InputKind, ...] = (*FLOAT_KINDS, "tokens", "mixed")
_DESCRIPTIONS = {
    "image": "images [H, W, C]",
    "features": "features [F]",
    "series": "series [T, F]",
    "tokens": "tokens [T]",
    "mixed": "inputs of several arrays",
}
_KINDS_BY_RANK: dict[int, InputKind] = {1: "features", 2: "series", 3: "image"}


def map_arrays(function: Any, inputs: Any, *others: Any) -> Any:
    """Call a function of the array of inputs, or of each of several arrays by name.

    Args:
      function: the function.
      inputs: an array or its property, or a mapping of them by name.
      *others: further arguments, mappings if `inputs` is one.

    Returns:
      The result, or a dictionary of results by name.
    """
    if isinstance(inputs, Mapping):
        return {n: function(inputs[n], *(other[n] for other in others)) for n in sorted(inputs)}
    return function(inputs, *others)


def take_rows(inputs: Any, rows: Any) -> Any:
    """Return examples of inputs.

    Args:
      inputs: an array `[N, ...]`, or a dictionary of arrays.
      rows: index of the examples: integers, a mask or a slice.

    Returns:
      The examples: an array, or a dictionary of arrays.
    """
    return map_arrays(lambda array: array[rows], inputs)


def count_rows(inputs: Any) -> int:
    """Return the number of examples of inputs, an array or a dictionary of arrays."""
    return len(inputs if not isinstance(inputs, Mapping) else next(iter(inputs.values())))


def get_input_kind(input_shape: InputShape, num_tokens: NumTokens) -> InputKind:
    """Return the kind of the inputs of examples.

    Args:
      input_shape: shape of the input of one example, of 1 to 3 axes, or shapes by name.
      num_tokens: number of different tokens; None for inputs of floats; or by name.

    Returns:
      The kind.

    Example:
      >>> from fedjax_het.utils.input_kinds import get_input_kind
      >>> get_input_kind((8, 8, 1), None), get_input_kind((5,), None), get_input_kind((5,), 30)
      ('image', 'features', 'tokens')
    """
    if isinstance(input_shape, FrozenMapping):
        return "mixed"
    return "tokens" if num_tokens is not None else _KINDS_BY_RANK[len(input_shape)]


def require_input_kind(
    owner: str,
    input_shape: InputShape,
    num_tokens: NumTokens,
    accepted: tuple[InputKind, ...],
    list_alternatives: Callable[[InputKind], str] | None = None,
) -> None:
    """Require that inputs have one of the kinds that a method or a network accepts.

    Args:
      owner: the method or the network, for the message.
      input_shape: shape of the input of one example.
      num_tokens: number of different tokens; None for inputs of floats.
      accepted: the accepted kinds.
      list_alternatives: function of a kind that returns the end of the message.

    Raises:
      ConfigError: if the kind is another one.

    Example:
      >>> from fedjax_het import ConfigError
      >>> from fedjax_het.utils.input_kinds import require_input_kind
      >>> try:
      ...     require_input_kind("network 'cnn'", (30,), None, ("image",))
      ... except ConfigError as error:
      ...     print(error)
      network 'cnn' does not accept features of shape (30,): expected images [H, W, C]
    """
    if not isinstance(input_shape, FrozenMapping):
        rank = len(input_shape)
        is_valid = rank == 1 if num_tokens is not None else rank in _KINDS_BY_RANK
        expected = "(H, W, C), (F,), (T, F) or (T,), the shape of one input"
        require(is_valid, "input_shape", tuple(input_shape), expected)
    kind = get_input_kind(input_shape, num_tokens)
    if kind not in accepted:
        noun = _DESCRIPTIONS[kind].partition(" ")[0]
        expected = " or ".join(_DESCRIPTIONS[name] for name in accepted)
        end = "" if list_alternatives is None else list_alternatives(kind)
        raise ConfigError(
            f"{owner} does not accept {noun} of shape {input_shape}: expected {expected}{end}"
        )
