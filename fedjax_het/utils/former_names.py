"""Former names of arguments and attributes, which stay valid with a DeprecationWarning."""

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from fedjax_het.utils.errors import require

P = ParamSpec("P")
R = TypeVar("R")
ClassT = TypeVar("ClassT", bound=type)
FORMER_ARRAY_NAMES = {
    "train_images": "train_inputs",
    "test_images": "test_inputs",
    "server_images": "server_inputs",
}
"""Names of a data set's arrays by their names in version 0.6, in arguments and in cached files."""
FORMER_INPUT_NAMES = {"images": "inputs"}
"""Name of the inputs of examples by its name in version 0.6."""


def rename_former_arguments(
    arguments: Mapping[str, Any],
    former_names: Mapping[str, str],
    caller: str | None = None,
    *,
    stacklevel: int = 4,
) -> dict[str, Any]:
    """Replace former names of arguments by their present names.

    Args:
      arguments: values by name.
      former_names: present names by former name.
      caller: name of the function in a DeprecationWarning for each former name (default: no
        warning, for files and command lines, which stay valid).
      stacklevel: number of calls from here to the user's line, which the warning names, plus one.

    Returns:
      The values by present name.

    Raises:
      ConfigError: if an argument is given under both names.

    Example:
      >>> from fedjax_het.utils.former_names import rename_former_arguments
      >>> rename_former_arguments({"colour": "red", "size": 3}, {"colour": "color"})
      {'color': 'red', 'size': 3}
    """
    renamed: dict[str, Any] = {}
    for name, value in arguments.items():
        present_name = former_names.get(name, name)
        if present_name != name and caller is not None:
            message = f"{caller}: {name} is deprecated, use {present_name}"
            warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)
        require(present_name not in renamed, name, value, f"only {present_name}")
        renamed[present_name] = value
    return renamed


def make_former_path(path: str) -> str:
    """Return the path of an array in the states of version 0.6, whose inputs were named images.

    Example:
      >>> from fedjax_het.utils.former_names import make_former_path
      >>> make_former_path(".clients.inputs")
      '.clients.images'
    """
    return re.sub(r"\.inputs\b", ".images", path)


def accept_former_arguments(
    caller: str, former_names: Mapping[str, str]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator of functions that accept keyword arguments under former names.

    Args:
      caller: name of the function in the DeprecationWarning.
      former_names: present names by former name.

    Returns:
      The decorator.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            renamed: Any = kwargs
            if not former_names.keys().isdisjoint(kwargs):
                renamed = rename_former_arguments(kwargs, former_names, caller, stacklevel=3)
            return function(*args, **renamed)

        return wrapper

    return decorate


def accept_former_fields(former_names: Mapping[str, str]) -> Callable[[ClassT], ClassT]:
    """Return a decorator of a dataclass or NamedTuple whose fields have former names.

    Former names are read as attributes, and accepted as keywords by the constructor,
    `dataclasses.replace` and `_replace`. Each use has a DeprecationWarning.

    Args:
      former_names: present names by former name.

    Returns:
      The decorator, which changes the class and returns it.

    Example:
      >>> import warnings
      >>> from typing import NamedTuple
      >>> from fedjax_het.utils.former_names import accept_former_fields
      >>> @accept_former_fields({"images": "inputs"})
      ... class Pair(NamedTuple):
      ...     inputs: int
      >>> with warnings.catch_warnings():
      ...     warnings.simplefilter("ignore", DeprecationWarning)
      ...     Pair(images=3), Pair(3).images
      (Pair(inputs=3), 3)
    """

    def decorate(owner: Any) -> Any:
        def rename(keywords: dict[str, Any]) -> dict[str, Any]:
            former = former_names.keys() & keywords.keys()
            if not former:
                return keywords
            # `dataclasses.replace` also passes the present names, with the values of the object.
            unchanged = {former_names[name] for name in former} & keywords.keys()
            kept = {name: value for name, value in keywords.items() if name not in unchanged}
            stacklevel = 5 if unchanged else 4
            caller = owner.__name__
            return rename_former_arguments(kept, former_names, caller, stacklevel=stacklevel)

        def accept(method: Callable) -> Callable:
            @functools.wraps(method)
            def wrapper(*args: Any, **keywords: Any) -> Any:
                return method(*args, **rename(keywords))

            return wrapper

        def make_attribute(former_name: str, name: str) -> property:
            def get(instance: Any) -> Any:
                message = f"{owner.__name__}.{former_name} is deprecated, use {name}"
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                return getattr(instance, name)

            return property(get, doc=f"Former name of `{name}`.")

        for former_name, name in former_names.items():
            setattr(owner, former_name, make_attribute(former_name, name))
        is_dataclass = dataclasses.is_dataclass(owner)
        for method_name in ("__init__",) if is_dataclass else ("__new__", "_replace"):
            setattr(owner, method_name, accept(getattr(owner, method_name)))
        return owner

    return decorate
