"""Examples of a data set in the order of the names of classes, features and tokens of a model."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_het.data import Dataset
from fedjax_het.data.sources.texts import PADDING, UNKNOWN
from fedjax_het.utils.errors import ConfigError, require

_UNKNOWN_TEXT = "?"


def match_names(input_spec: Any, dataset: Dataset, inputs: Any, labels: np.ndarray) -> Any:
    """Return inputs and labels as the model reads them.

    Classes, features and categories are matched by name. Names that one of the two lacks are not
    compared. Words that the model does not know become its unknown token.

    Args:
      input_spec: properties of the model's data, an `InputSpec`.
      dataset: the data set of the examples.
      inputs: inputs `[N, ...]`, or arrays by name.
      labels: labels `[N, ...]`.

    Returns:
      `(inputs, labels)`.

    Raises:
      ConfigError: for names that the model does not have, or another number of classes.
    """
    if dataset.task_kind.has_classes:
        labels = _match_labels(input_spec, dataset, labels)
    if not isinstance(inputs, Mapping):
        names = input_spec.feature_names, dataset.feature_names
        tokens = input_spec.token_names, dataset.token_names
        return _match_array(inputs, names, tokens, ""), labels
    matched = {}
    for name, array in inputs.items():
        names, tokens = (
            (_get_names(own, name), _get_names(others, name))
            for own, others in (
                (input_spec.feature_names, dataset.feature_names),
                (input_spec.token_names, dataset.token_names),
            )
        )
        matched[name] = _match_array(array, names, tokens, f"[{name!r}]")
    return matched, labels


def _get_names(names: Any, name: str) -> Sequence[str]:
    return names.get(name, ()) if isinstance(names, Mapping) else ()


def _match_labels(input_spec: Any, dataset: Dataset, labels: np.ndarray) -> np.ndarray:
    own, others = input_spec.class_names, dataset.class_names
    if not own or not others or own == others:
        expected = f"{input_spec.num_classes}, as the model has"
        is_valid = dataset.num_classes == input_spec.num_classes
        require(is_valid, "num_classes of dataset", dataset.num_classes, expected)
        return labels
    return _find_positions("class_names of dataset", own, others)[labels]


def _match_array(
    array: np.ndarray,
    names: tuple[Sequence[str], Sequence[str]],
    tokens: tuple[Sequence[str], Sequence[str]],
    suffix: str,
) -> np.ndarray:
    """Return features in the order of the model's names, or tokens as the model numbers them."""
    if all(names) and tuple(names[0]) != tuple(names[1]):
        expected = f"{', '.join(names[0][:10])} in any order, as the model has"
        is_valid = sorted(names[0]) == sorted(names[1])
        require(is_valid, f"feature_names{suffix} of dataset", tuple(names[1]), expected)
        array = array[..., [*map(tuple(names[1]).index, names[0])]]
    if all(tokens) and tuple(tokens[0]) != tuple(tokens[1]):
        has_unknown = tuple(tokens[0][PADDING : UNKNOWN + 1]) == ("", _UNKNOWN_TEXT)
        unknown = UNKNOWN if has_unknown else None
        argument = f"token_names{suffix} of dataset"
        array = _find_positions(argument, tokens[0], tokens[1], unknown)[array]
    return array


def _find_positions(
    argument: str, names: Sequence[str], wanted: Sequence[str], unknown: int | None = None
) -> np.ndarray:
    """Return the position of each wanted name among others, int32."""
    positions = {name: position for position, name in enumerate(names)}
    missing = [name for name in wanted if name and name not in positions]
    if missing and unknown is None:
        found, expected = ", ".join(missing[:5]), ", ".join(names[:10])
        raise ConfigError(f"{argument}: {found}: expected the model's names, {expected}")
    return np.array([positions.get(name, unknown or 0) for name in wanted], np.int32)
