"""Checks of a user's inputs, labels and names; each error is one line that names the argument."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from fedjax_het.data.class_labels import number_labels, to_label_array
from fedjax_het.utils.array_validation import (
    MAX_CLASSES,
    require_below,
    to_array,
    to_integers,
    validate_labels,
)
from fedjax_het.utils.config import Bounds
from fedjax_het.utils.errors import ConfigError, display_name, make_value_error, require
from fedjax_het.utils.input_kinds import FrozenMapping, count_rows
from fedjax_het.utils.memory_maps import iter_blocks

# Standardized images have far smaller values; images in 0..255 as floats have larger ones.
MAX_FLOAT_PIXEL = 20.0
NumClasses = Annotated[int, Bounds(1, MAX_CLASSES)]
NumTokens = Annotated[int, Bounds(2, 2**31 - 1)]
Seed = Annotated[int, Bounds(0, 2**128 - 1)]  # range of NumPy's generators
MAX_UINT16 = 2**16 - 1
_MAX_FLOAT = float(np.finfo(np.float32).max)
UINT16_TYPES = ("<u2", ">u2")
"""Types of 16-bit images in both byte orders; files of images often have the larger byte first."""
_GRAY_TYPES = (np.uint8, *UINT16_TYPES)  # of images without an axis of channels
_IMAGE_ARRAY = "one array [N, H, W, C], of images of one shape"

_log = logging.getLogger("fedjax_het")


def require_positions(argument: str, values: Any, num_examples: int) -> np.ndarray:
    """Convert the return value of a user's function to positions in the training set.

    Args:
      argument: description of the value, for messages.
      values: integers `[N]` in [0, num_examples).
      num_examples: number of training examples.

    Returns:
      The positions `[N]`.

    Raises:
      ConfigError: if rank, dtype or range is invalid.
    """
    positions = to_integers(argument, values, "integers of rank 1, positions in the training set")
    require_below(argument, positions, num_examples, "position")
    return positions


def move_channels_last(argument: str, images: Any, channels: str | None) -> Any:
    """Return images with the channels on the last axis.

    Args:
      argument: name of the argument, for messages.
      images: `[N, H, W, C]`, or `[N, C, H, W]` with `channels="first"`; None stays.
      channels: "first" or "last"; None if the user did not set it.

    Returns:
      Images `[N, H, W, C]`. `validate_images` reports another rank.

    Raises:
      ConfigError: if the shape looks like `[N, C, H, W]` (1 to 4 rows and more than 4 channels)
        and `channels` is None, or if it looks like `[N, H, W, C]` and `channels` is "first".
    """
    if images is None:
        return None
    images = to_array(argument, images, _IMAGE_ARRAY)
    if images.ndim != 4:
        return images
    if channels == "first":
        looks_channels_last = 1 <= images.shape[3] <= 4 < images.shape[1]
        expected = "[N, C, H, W] with channels='first'; images look like [N, H, W, C]"
        require(not looks_channels_last, f"shape of {argument}", images.shape, expected)
        return np.moveaxis(images, 1, -1)
    looks_channels_first = 1 <= images.shape[1] <= 4 < images.shape[3]
    expected = (
        '[N, H, W, C]; pass channels="first" for [N, C, H, W], or channels="last" for images of '
        f"{images.shape[1]} rows"
    )
    is_valid = channels is not None or not looks_channels_first
    require(is_valid, f"shape of {argument}", images.shape, expected)
    return images


def warn_about_empty_classes(
    train_labels: np.ndarray, num_classes: int, class_names: Sequence[str]
) -> None:
    """Log the classes without training examples.

    Args:
      train_labels: labels, integers `[N]` in [0, num_classes).
      num_classes: number of classes.
      class_names: name of each class, or none.
    """
    empty = np.flatnonzero(np.bincount(train_labels, minlength=num_classes) == 0)
    if len(empty):
        names = [class_names[i] if class_names else str(i) for i in empty[:10].tolist()]
        _log.warning(
            "%s: %d of %d classes have no training example: %s",
            display_name("train_labels"),
            len(empty),
            num_classes,
            ", ".join(names) + (", ..." if len(empty) > 10 else ""),
        )


def validate_images(argument: str, images: Any, *, is_16_bit: bool = False) -> np.ndarray:
    """Check images and convert them to uint8 or float32.

    Args:
      argument: name of the argument, for messages.
      images: `[N, H, W, C]`: integers in 0..255, or finite floats in [-20, 20].
      is_16_bit: whether uint16 pixels range over 0..65535, see `has_16_bit_pixels`.

    Returns:
      Images `[N, H, W, C]`: uint8 for integers, float32 for floats, and float32 in [0, 1] for
      16-bit images. The array is a view if the dtype is already right, so that making it read-only
      leaves the user's array writable.

    Raises:
      ConfigError: if shape, dtype or range is invalid.
    """
    images = to_array(argument, images, _IMAGE_ARRAY)
    expected = (
        "images [N, H, W, C] (gray images need a last axis of 1), floats [N, F] or [N, T, F], or "
        "tokens [N, T] with num_tokens"
    )
    require(images.ndim == 4, f"shape of {argument}", images.shape, expected)
    require(images.size > 0, f"shape of {argument}", images.shape, "at least one image and pixel")
    if images.dtype == np.uint8:
        # A view, so that making it read-only leaves the user's array writable.
        return np.ascontiguousarray(images).view()
    if is_16_bit and images.dtype in UINT16_TYPES:
        return images.astype(np.float32) / np.float32(MAX_UINT16)
    if np.issubdtype(images.dtype, np.integer):
        low, high = map(int, _find_range(images))
        expected = "0..255 for integers (of 16 bits: uint16)"
        require(low >= 0 and high <= 255, f"range of {argument}", (low, high), expected)
        return images.astype(np.uint8)
    is_floating = np.issubdtype(images.dtype, np.floating)
    require(is_floating, f"dtype of {argument}", str(images.dtype), "uint8, or floats")
    lowest, highest = _require_finite(argument, images)
    is_valid = lowest >= -MAX_FLOAT_PIXEL and highest <= MAX_FLOAT_PIXEL
    expected = "floats in [0, 1] or standardized floats (pass images in 0..255 as uint8)"
    require(is_valid, f"range of {argument}", (lowest, highest), expected)
    return np.ascontiguousarray(images, dtype=np.float32).view()


class InputValidator(NamedTuple):
    """The checks of the inputs of all splits of a data set.

    Attributes:
      num_tokens: number of different tokens; None for other inputs; for inputs of several arrays,
        numbers or None by name.
      is_16_bit: whether uint16 pixels range over 0..65535, see `has_16_bit_pixels`.
      channels: "first", "last" or None, see `move_channels_last`.
      are_features: whether integers without `num_tokens` are numbers, see `validate_inputs`.
    """

    num_tokens: Any
    is_16_bit: bool = False
    channels: str | None = None
    are_features: bool = False

    @classmethod
    def from_user(
        cls, inputs: Mapping[str, Any], num_tokens: Any, channels: str | None
    ) -> "InputValidator":
        """Return the checks of a user's inputs.

        Args:
          inputs: inputs of all splits by argument name.
          num_tokens: the user's number, or numbers by name.
          channels: "first", "last" or None, see `move_channels_last`.

        Returns:
          The checks.

        Raises:
          ConfigError: if `num_tokens` does not fit the training inputs.
        """
        train = inputs["train_inputs"]
        if isinstance(train, Mapping):
            given = {} if num_tokens is None else num_tokens
            is_valid = isinstance(given, Mapping) and given.keys() <= train.keys()
            expected = f"numbers by name, of the names {', '.join(map(str, train))}"
            require(is_valid, "num_tokens", num_tokens, expected)
            is_valid = all(isinstance(name, str) and name.isidentifier() for name in train)
            expected = "names of letters, digits and underscores, at least one"
            require(is_valid and len(train) > 0, "train_inputs", [*train], expected)
            return cls(FrozenMapping({name: given.get(name) for name in train}), False, channels)
        require(not isinstance(num_tokens, Mapping), "num_tokens", num_tokens, "one number")
        moved = [move_channels_last(n, array, channels) for n, array in inputs.items()]
        return cls(num_tokens, has_16_bit_pixels(moved), channels)

    def validate(self, argument: str, inputs: Any, train_inputs: Any = None) -> Any:
        """Check the inputs of a split, see `validate_inputs`.

        Args:
          argument: name of the argument, for messages.
          inputs: the inputs of the user.
          train_inputs: checked training inputs, whose format the inputs must have; None for any.

        Returns:
          The array, or arrays by name.
        """
        if not isinstance(self.num_tokens, Mapping):
            return self._validate_array(argument, inputs, self.num_tokens, train_inputs)
        names = [*self.num_tokens]
        is_valid = isinstance(inputs, Mapping) and sorted(inputs) == names
        require(is_valid, argument, type(inputs).__name__, f"arrays by name: {', '.join(names)}")
        arrays = {}
        for name in names:
            train_array = None if train_inputs is None else train_inputs[name]
            arguments = (f"{argument}[{name!r}]", inputs[name], self.num_tokens[name])
            arrays[name] = self._validate_array(*arguments, train_array)
        lengths = {len(array) for array in arrays.values()}
        require(len(lengths) == 1, f"lengths of {argument}", sorted(lengths), "one length")
        return arrays

    def _validate_array(
        self, argument: str, inputs: Any, num_tokens: int | None, train_array: Any
    ) -> np.ndarray:
        inputs = move_channels_last(argument, inputs, self.channels)
        are_features = self.are_features
        if train_array is not None:
            are_features |= train_array.ndim in (2, 3) and train_array.dtype == np.float32
        array = validate_inputs(
            *(argument, inputs),
            num_tokens=num_tokens,
            is_16_bit=self.is_16_bit,
            are_features=are_features,
        )
        if train_array is not None:
            require_same_format(argument, array, train_array)
        return array


def validate_inputs(
    argument: str,
    inputs: Any,
    *,
    num_tokens: int | None,
    is_16_bit: bool = False,
    are_features: bool = False,
) -> np.ndarray:
    """Check the inputs of examples and convert them to the type that is stored.

    Args:
      argument: name of the argument, for messages.
      inputs: images `[N, H, W, C]`, see `validate_images`; gray images `[N, H, W]` of uint8 or
        uint16; finite floats or truth values `[N, F]` or `[N, T, F]`; with `num_tokens`, integers
        `[N, T]` in [0, num_tokens).
      num_tokens: number of different tokens; None for other inputs.
      is_16_bit: whether uint16 pixels range over 0..65535, see `has_16_bit_pixels`.
      are_features: whether integers `[N, F]` or `[N, T, F]` are numbers, as other inputs of the
        same data are.

    Returns:
      Images as `validate_images` returns them, float32 features and series, or int32 tokens.

    Raises:
      ConfigError: if shape, dtype or range is invalid.
    """
    array = to_array(argument, inputs, "one array, of examples of one shape")
    if num_tokens is not None:
        return _validate_tokens(argument, array, num_tokens)
    if array.ndim == 3 and array.dtype in _GRAY_TYPES and not are_features:
        array = array[..., None]
    if array.ndim not in (2, 3):
        return validate_images(argument, array, is_16_bit=is_16_bit)
    require(array.size > 0, f"shape of {argument}", array.shape, "at least one example and feature")
    kind = array.dtype.kind
    if kind in "iu" and not are_features:
        # Integers have three meanings, which no check can tell apart.
        expected = "num_tokens for tokens [N, T], or floats for features"
        if array.ndim == 3:
            expected = "uint8 or [N, H, W, 1] for gray images (of a column: image=COLUMN), or floats for series"
        raise make_value_error(argument, f"{array.dtype} {array.shape}", expected)
    require(kind in "iufb", f"dtype of {argument}", str(array.dtype), "floats, or truth values")
    _require_finite(argument, array)
    return np.ascontiguousarray(array, dtype=np.float32).view()


def _validate_tokens(argument: str, tokens: np.ndarray, num_tokens: int) -> np.ndarray:
    is_valid = tokens.ndim == 2 and tokens.size > 0 and np.issubdtype(tokens.dtype, np.integer)
    actual = f"{tokens.dtype} {tokens.shape}"
    require(is_valid, argument, actual, "integers [N, T], the tokens of each example")
    low, high = map(int, _find_range(tokens))
    is_valid = low >= 0 and high < num_tokens
    require(is_valid, f"range of {argument}", (low, high), f"tokens in [0, {num_tokens})")
    return np.ascontiguousarray(tokens, dtype=np.int32).view()


def _find_range(values: np.ndarray) -> tuple[Any, Any]:
    """Return the smallest and the largest value; both are NaN if any value is."""
    ranges = [(block.min(), block.max()) for block in iter_blocks(values)]
    lows, highs = zip(*ranges, strict=True)
    return np.min(lows), np.max(highs)


def _require_finite(argument: str, values: np.ndarray) -> tuple[float, float]:
    """Return the smallest and the largest value, which must be finite in float32."""
    low, high = map(float, _find_range(values))
    if not max(abs(low), abs(high)) <= _MAX_FLOAT:
        position = tuple(np.argwhere(~(np.abs(values) <= _MAX_FLOAT))[0].tolist())
        value, expected = float(values[position]), "finite numbers"
        if np.isfinite(value):
            expected = f"numbers of at most {_MAX_FLOAT:.3g}, the range of float32"
        indices = ", ".join(map(str, position))
        raise make_value_error(f"{argument}[{indices}]", value, expected)
    return low, high


def has_16_bit_pixels(splits: Iterable[Any]) -> bool:
    """Return whether uint16 images have 16 bits: whether a pixel of any split exceeds 255.

    A dark split next to a bright one is therefore treated as 16-bit, too. Splits that are no arrays
    are ignored here, since another check reports them.
    """
    arrays = [images for images in splits if getattr(images, "dtype", None) in UINT16_TYPES]
    return any(np.asarray(images).max(initial=0) > 255 for images in arrays)


def require_same_format(argument: str, inputs: np.ndarray, train_inputs: np.ndarray) -> None:
    """Require inputs to have the shape and dtype of the training inputs.

    Args:
      argument: name of the argument, for messages.
      inputs: `[N, ...]`.
      train_inputs: training inputs `[N_train, ...]`.

    Raises:
      ConfigError: if the shape of an example or the dtype differ.
    """
    actual, expected = (f"{array.dtype} {array.shape[1:]}" for array in (inputs, train_inputs))
    noun = "images" if inputs.ndim == 4 else "examples"
    is_valid = actual == expected
    require(is_valid, f"format of {argument}", actual, f"{expected}, as the training {noun} have")


def validate_domains(
    domains: dict[str, Any], domain_names: Sequence[str], inputs: Sequence[Any]
) -> tuple[np.ndarray | None, np.ndarray | None, tuple[str, ...]]:
    """Check the domains of the examples of both splits.

    Args:
      domains: domains by argument name, of training and test, in this order; integers or texts
        `[N]`, or None.
      domain_names: name of each domain; empty: the domains have the names of `number_labels`, or
        their numbers.
      inputs: inputs of training and test, `[N, ...]`, or arrays by name.

    Returns:
      `(train_domains, test_domains, domain_names)`, the arrays int32 `[N]`; `(None, None, ())` for
      a data set without domains.

    Raises:
      ConfigError: if only one split has domains, if names are missing or not unique, or if a domain
        has no test example.
    """
    missing = [argument for argument, values in domains.items() if values is None]
    if len(missing) == 2:
        require(not domain_names, "domain_names", domain_names, "none without train_domains")
        return None, None, ()
    require(not missing, (missing or [""])[0], None, "an array, since the other split has domains")
    arrays = {name: to_label_array(name, values, "domain") for name, values in domains.items()}
    domains, domain_names = number_labels(arrays, domain_names, "domain")
    train_domains, test_domains = (
        validate_labels(name, values, name.replace("domains", "inputs"), split_inputs, "domain")
        for (name, values), split_inputs in zip(domains.items(), inputs, strict=True)
    )
    largest = int(max(train_domains.max(), test_domains.max()))
    domain_names = tuple(domain_names or map(str, range(largest + 1)))
    # Each domain names a metric, and `domains` names the mean over domains.
    is_valid = len(set(domain_names)) == len(domain_names) and not {"", "domains"} & {*domain_names}
    expected = f"a different name, not 'domains', for each of at least {largest + 1} domains"
    require(is_valid and len(domain_names) > largest, "domain_names", domain_names[:10], expected)
    sizes = np.bincount(test_domains, minlength=len(domain_names))
    if sizes.min() == 0:
        name = domain_names[int(sizes.argmin())]
        raise ConfigError(
            f"{display_name('test_domains')}: no test example of domain {name!r}: expected at least "
            "one"
        )
    return train_domains, test_domains, domain_names


def validate_input_names(
    inputs: Any, num_tokens: Any, feature_names: Any, token_names: Any
) -> tuple[Any, Any]:
    """Check the names of features and tokens.

    Args:
      inputs: checked training inputs, `[N, ...]`, or arrays by name.
      num_tokens: number of different tokens, None, or numbers by name.
      feature_names: name of each feature; names by the name of the array; or ().
      token_names: text of each token, in the form of `feature_names`.

    Returns:
      `(feature_names, token_names)`: tuples of texts, or tuples by name.

    Raises:
      ConfigError: if the number of names is wrong, or if a name is no text.
    """
    is_mixed = isinstance(inputs, Mapping)
    arrays, tokens = (inputs, num_tokens) if is_mixed else ({"": inputs}, {"": num_tokens})
    checked: list[Any] = []
    for argument, names in (("feature_names", feature_names), ("token_names", token_names)):
        if not names:
            checked.append(())
            continue
        is_valid = isinstance(names, Mapping) == is_mixed
        is_valid = is_valid and (not is_mixed or names.keys() <= arrays.keys())
        expected = f"names by name: {', '.join(arrays)}" if is_mixed else "a list of names"
        require(is_valid, argument, names, expected)
        by_array = {}
        for name, texts in (names if is_mixed else {"": names}).items():
            size = arrays[name].shape[-1] if argument == "feature_names" else tokens[name]
            full_name = f"{argument}[{name!r}]" if is_mixed else argument
            require(len(texts) == (size or 0), f"len({full_name})", len(texts), f"{size or 0}")
            by_array[name] = tuple(map(str, texts))
        checked.append(FrozenMapping(by_array) if is_mixed else by_array[""])
    return checked[0], checked[1]


def validate_users(
    users: dict[str, Any], inputs: Sequence[Any]
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Check the users of the examples of both splits.

    Args:
      users: users by argument name, of training and test, in this order; integers or texts `[N]`,
        or None.
      inputs: inputs of training and test, `[N, ...]`, or arrays by name.

    Returns:
      `(train_users, test_users)`, int64 or text `[N]`, or None.

    Raises:
      ConfigError: if shape, length or type is invalid, if the splits have other types, or if only
        the test examples have users.
    """
    arrays: list[np.ndarray | None] = []
    for (argument, values), split_inputs in zip(users.items(), inputs, strict=True):
        array = None if values is None else to_user_ids(argument, values)
        if array is not None:
            expected = f"{count_rows(split_inputs)}, one user for each example"
            require(
                len(array) == count_rows(split_inputs), f"len({argument})", len(array), expected
            )
        arrays.append(array)
    train_users, test_users = arrays
    if test_users is not None:
        train_argument, test_argument = users
        if train_users is None:
            raise make_value_error(train_argument, None, f"users, as {test_argument} is set")
        is_valid = train_users.dtype.kind == test_users.dtype.kind
        expected = f"{'texts' if train_users.dtype.kind == 'U' else 'integers'} as {train_argument}"
        require(is_valid, f"dtype of {test_argument}", str(test_users.dtype), expected)
    return train_users, test_users


def to_user_ids(argument: str, values: Any) -> np.ndarray:
    """Convert the users of examples to int64 or text `[N]`.

    Args:
      argument: name of the argument, for messages.
      values: integers or texts.

    Returns:
      The users.

    Raises:
      ConfigError: if rank or type is invalid, or if a text is empty.
    """
    expected = "integers or texts [N], a user for each example"
    try:
        array = np.asarray(values)
        texts = array.tolist() if array.dtype.kind in "OUT" and array.ndim == 1 else [None]
    except Exception:  # `to_array` reports the reason
        texts = [None]
    if texts and all(isinstance(text, str) for text in texts):
        require("" not in texts, argument, "", "a text of at least one letter for each example")
        return np.array(texts)  # of the smallest width, which the digest contains
    return to_integers(argument, to_array(argument, values, expected), expected).astype(np.int64)
