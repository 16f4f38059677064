"""Kinds of tasks: classification, multi-label, regression, next-token prediction, survival."""

from typing import Any

from fedjax_het.tasks.base import TaskKind
from fedjax_het.tasks.classification import Classification
from fedjax_het.tasks.multi_label import MultiLabel
from fedjax_het.tasks.next_token import NextToken
from fedjax_het.tasks.regression import Regression
from fedjax_het.tasks.survival import Survival
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import ConfigError, describe_error, require
from fedjax_het.utils.kinds import KindEntry
from fedjax_het.utils.registry import Registry

TASKS: Registry[KindEntry] = Registry(
    "task",
    [
        KindEntry(kind.name, kind.description, kind)
        for kind in (Classification, MultiLabel, Regression, NextToken, Survival)
    ],
)
"""Kinds of tasks by name, including kinds that users registered.

Example:
  >>> from fedjax_het.tasks import TASKS
  >>> list(TASKS)[:4]
  ['classification', 'multi_label', 'regression', 'next_token']
"""


@validate_arguments
def register_task(kind: type) -> type:
    """Register a kind of task of the user for data sets, until the process ends.

    Args:
      kind: a subclass of `TaskKind` with a `name` and a `description`, a frozen dataclass. Its
        functions are checked once a run's network is known, before anything compiles.

    Returns:
      The class, so that the function also serves as its decorator.

    Raises:
      ConfigError: if it is no such class, or if the name belongs to a kind of the package.

    Example:
      >>> from dataclasses import dataclass
      >>> from typing import ClassVar
      >>> import jax.numpy as jnp
      >>> from fedjax_het.tasks import TASKS, Regression, register_task
      >>> @register_task
      ... @dataclass(frozen=True)
      ... class MedianRegression(Regression):
      ...     name: ClassVar[str] = "median_regression"
      ...     description: ClassVar[str] = "absolute error"
      ...     def compute_losses(self, outputs, labels):
      ...         return jnp.abs(outputs - labels).mean(-1)
      >>> "median_regression" in TASKS
      True
      >>> TASKS.reset()  # unregisters all users' kinds
    """
    is_valid = issubclass(kind, TaskKind)
    is_valid = is_valid and not getattr(kind, "__abstractmethods__", ())
    require(is_valid, "kind", kind, "a subclass of TaskKind with all of its functions")
    for attribute in ("name", "description"):
        value = getattr(kind, attribute, None)
        require(isinstance(value, str), f"{kind.__name__}.{attribute}", value, "a text")
    is_static = kind.__hash__ is not None
    require(is_static, "kind", kind, "a class whose objects have a hash: @dataclass(frozen=True)")
    try:
        kind()
    except Exception as error:
        raise ConfigError(
            f"kind = {kind.__name__}: {kind.__name__}() fails ({describe_error(error)}): expected "
            "fields with defaults"
        ) from error
    entry: Any = kind
    TASKS.add(KindEntry(entry.name, entry.description, entry))
    return kind
