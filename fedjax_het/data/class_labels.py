"""Labels of any form as positions of classes: whole numbers, texts and truth values."""

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from fedjax_het.utils.array_validation import (
    MAX_CLASSES,
    describe_expected_labels,
    require_below,
    to_array,
)
from fedjax_het.utils.config import Bounds, validate
from fedjax_het.utils.errors import ConfigError, display_name, make_value_error, require

# Labels that are no positions: more classes than this number need 10 examples each on average.
_MAX_UNSTATED_CLASSES, _MIN_EXAMPLES_PER_CLASS = 100, 10
_MAX_WHOLE_FLOAT = 2**53  # above, floats do not represent each whole number
_log = logging.getLogger("fedjax_het")


def to_label_array(argument: str, values: Any, kind: str = "label") -> np.ndarray:
    """Convert labels to integers or texts.

    Args:
      argument: name of the argument, for messages.
      values: integers, whole floats, truth values or texts, `[N]` or `[N, 1]`.
      kind: the noun for one entry, for messages: "label" or "domain".

    Returns:
      int64 or texts `[N]`. Truth values become the texts "False" and "True".

    Raises:
      ConfigError: for other values.
    """
    expected = f"integers or texts [N], a {kind} for each example"
    try:
        array = np.asarray(values)
        is_text = array.dtype == object and all(isinstance(v, str) for v in array.ravel().tolist())
        array = array.astype(str) if is_text else to_array(argument, values, expected)
    except ValueError:  # ragged lists
        array = to_array(argument, values, expected)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    else:
        expected = describe_expected_labels(argument, array, kind, expected)
        is_float = array.ndim == 1 and array.dtype.kind == "f"
        if is_float and ((array == np.floor(array)) & (np.abs(array) < _MAX_WHOLE_FLOAT)).all():
            array = array.astype(np.int64)
    is_too_large = array.dtype.kind == "u" and array.max(initial=0) > np.iinfo(np.int64).max
    is_valid = (
        array.ndim == 1
        and not is_too_large
        and (array.dtype.kind in "iubSU" or array.shape == (0,))
    )
    require(is_valid, argument, f"{array.dtype} {array.shape}", expected)
    dtype = np.int64 if array.dtype.kind in "iu" or not len(array) else str
    return array.astype(dtype, copy=False)


def to_indices(
    texts: Sequence[np.ndarray], names: Sequence[str] = ()
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Replace texts, such as class names, by their positions in a list of names.

    Args:
      texts: texts of each split, `[N]`.
      names: valid names in their order. Default: all texts in ascending order.

    Returns:
      Positions of each split, int32 `[N]`, and the names.

    Raises:
      ConfigError: if a text is not among the names.
    """
    names = tuple(names) or tuple(map(str, np.unique(np.concatenate(texts))))
    positions = {name: position for position, name in enumerate(names)}
    try:
        return [np.array([positions[t] for t in ts.tolist()], np.int32) for ts in texts], names
    except KeyError as error:
        raise ConfigError(f"the name {error} is not among {', '.join(names[:10])}") from error


def number_labels(
    labels: Mapping[str, np.ndarray], names: Sequence[str] = (), kind: str = "label"
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Replace labels by positions in a list of names.

    Without names, the different labels of all splits in ascending order are the classes: labels 1,
    5 and 9 become 0, 1 and 2, and their texts become the names. Labels 0, 1, ... stay without
    names. With names, integers below the number of names are positions already; otherwise the
    names belong to the different labels in ascending order, and texts must be among the names.

    Args:
      labels: labels by argument name, as `to_label_array` returns them.
      names: the user's names, or none.
      kind: the noun for one entry, for messages: "label" or "domain".

    Returns:
      `(positions, names)`, positions `[N]` by argument name.

    Raises:
      ConfigError: if some labels are integers and others texts, or if they do not fit the names.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.data.class_labels import number_labels
      >>> positions, names = number_labels({"labels": np.array(["dog", "cat", "dog"])})
      >>> positions["labels"].tolist(), names
      ([1, 0, 1], ('cat', 'dog'))
    """
    names = tuple(names)
    arrays = dict(labels)
    kinds = {name: "texts" if a.dtype.kind == "U" else "integers" for name, a in arrays.items()}
    first_name, first_kind = next(iter(kinds.items()))
    for name, own_kind in kinds.items():
        require(
            own_kind == first_kind, f"type of {name}", own_kind, f"{first_kind} as {first_name}"
        )
    different = np.unique(np.concatenate(list(arrays.values())))
    if different.dtype.kind == "U":
        for name, array in arrays.items() if names else ():
            if not (is_name := np.isin(array, names)).all():
                first = int(np.argmin(is_name))
                expected = f"one of {', '.join(names[:10])}"
                raise make_value_error(f"{name}[{first}]", str(array[first]), expected)
        indices, names = to_indices([*arrays.values()], names or different.tolist())
        return dict(zip(arrays, indices, strict=True)), names
    limit = len(names) if names else len(different)
    are_positions = not len(different) or (different[0] >= 0 and different[-1] < limit)
    if are_positions:
        return arrays, names
    if names and len(names) != len(different):
        argument = "class_names" if kind == "label" else f"{kind}_names"
        expected = f"{len(different)} names, one for each different {kind}"
        raise make_value_error(argument, names[:10], expected)
    if different[0] == -1 and 0 in different:
        name = next(name for name, array in arrays.items() if -1 in array)
        first = int(np.argmax(arrays[name] == -1))
        raise make_value_error(
            f"{name}[{first}]", -1, f"a {kind}, not the mark of a missing {kind}"
        )
    texts = tuple(map(str, different.tolist()))
    if not names:
        _log.warning(
            "note: the %d different %ss are the classes: %s"
            if kind == "label"
            else "note: the %d different %ss: %s",
            len(texts),
            kind,
            ", ".join(texts[:5]) + (", ..." if len(texts) > 5 else ""),
        )
    numbered = {name: np.searchsorted(different, array) for name, array in arrays.items()}
    return numbered, names or texts


def resolve_classes(
    labels: Mapping[str, Any], num_classes: Any, class_names: Sequence[str]
) -> tuple[dict[str, np.ndarray], int, tuple[str, ...]]:
    """Return labels as positions of classes, and the number and the names of the classes.

    Args:
      labels: labels by argument name, see `to_label_array`. With `num_classes` integers are
        positions, otherwise see `number_labels`.
      num_classes: the user's number, or None.
      class_names: the user's names, or none.

    Returns:
      `(labels, num_classes, class_names)`, labels int32.

    Raises:
      ConfigError: if there are fewer than 2 classes or more than 65536, if a label is not below
        `num_classes`, or if the number of names differs. Also if labels that are no positions have
        few examples each, as the numbers of a regression have.
    """
    arrays = {name: to_label_array(name, values) for name, values in labels.items()}
    has_numbers = all(array.dtype.kind == "i" for array in arrays.values())
    if num_classes is None or not has_numbers:
        arrays, names = number_labels(arrays, class_names)
        num_examples = sum(map(len, arrays.values()))
        limit = max(_MAX_UNSTATED_CLASSES, num_examples / _MIN_EXAMPLES_PER_CLASS)
        if not class_names and has_numbers and len(names) > limit:
            argument = display_name(", ".join(labels))
            raise ConfigError(
                f"{argument}: {len(names):,} different labels of {num_examples:,} examples: "
                'expected num_classes, or task="regression" if labels are numbers'
            )
        class_names = names
    largest = max((int(array.max()) for array in arrays.values() if len(array)), default=0)
    if num_classes is None:
        num_classes = max(len(class_names), largest + 1)
        if num_classes < 2:
            argument = display_name(", ".join(labels))
            raise ConfigError(f"{argument}: all labels are equal: expected at least two classes")
    num_classes = validate("num_classes", num_classes, Annotated[int, Bounds(2, MAX_CLASSES)])
    for argument, array in arrays.items():
        require_below(argument, array, num_classes)
    expected = f"{num_classes} names, one for each class, or none"
    require(len(class_names) in (0, num_classes), "class_names", class_names[:10], expected)
    require(
        len({*class_names}) == len(class_names), "class_names", class_names[:10], "different names"
    )
    arrays = {name: array.astype(np.int32, copy=False) for name, array in arrays.items()}
    return arrays, num_classes, tuple(class_names)
