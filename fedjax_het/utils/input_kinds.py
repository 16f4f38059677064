"""Kinds of inputs of examples: images, features, series and tokens."""

from typing import Literal

from fedjax_het.utils.errors import ConfigError, require

InputKind = Literal["image", "features", "series", "tokens"]
IMAGE_KINDS: tuple[InputKind, ...] = ("image",)
SERIES_KINDS: tuple[InputKind, ...] = ("series",)
TOKEN_KINDS: tuple[InputKind, ...] = ("tokens",)
SEQUENCE_KINDS: tuple[InputKind, ...] = ("series", "tokens")
FLOAT_KINDS: tuple[InputKind, ...] = ("image", "features", "series")
INPUT_KINDS: tuple[InputKind, ...] = (*FLOAT_KINDS, "tokens")
_DESCRIPTIONS = {
    "image": "images [H, W, C]",
    "features": "features [F]",
    "series": "series [T, F]",
    "tokens": "tokens [T]",
}
_KINDS_BY_RANK: dict[int, InputKind] = {1: "features", 2: "series", 3: "image"}


def get_input_kind(input_shape: tuple[int, ...], num_tokens: int | None) -> InputKind:
    """Return the kind of the inputs of examples.

    Args:
      input_shape: shape of the input of one example, of 1 to 3 axes.
      num_tokens: number of different tokens; None for inputs of floats.

    Returns:
      The kind.

    Example:
      >>> from fedjax_het.utils.input_kinds import get_input_kind
      >>> get_input_kind((8, 8, 1), None), get_input_kind((5,), None), get_input_kind((5,), 30)
      ('image', 'features', 'tokens')
    """
    return "tokens" if num_tokens is not None else _KINDS_BY_RANK[len(input_shape)]


def require_input_kind(
    owner: str,
    input_shape: tuple[int, ...],
    num_tokens: int | None,
    accepted: tuple[InputKind, ...],
) -> None:
    """Require that inputs have one of the kinds that a method or a network accepts.

    Args:
      owner: the method or the network, for the message.
      input_shape: shape of the input of one example.
      num_tokens: number of different tokens; None for inputs of floats.
      accepted: the accepted kinds.

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
    rank, expected = len(input_shape), "(H, W, C), (F,), (T, F) or (T,), the shape of one input"
    is_valid = rank == 1 if num_tokens is not None else rank in _KINDS_BY_RANK
    require(is_valid, "input_shape", tuple(input_shape), expected)
    kind = get_input_kind(input_shape, num_tokens)
    if kind not in accepted:
        noun = _DESCRIPTIONS[kind].partition(" ")[0]
        expected = " or ".join(_DESCRIPTIONS[name] for name in accepted)
        raise ConfigError(
            f"{owner} does not accept {noun} of shape {tuple(input_shape)}: expected {expected}"
        )
