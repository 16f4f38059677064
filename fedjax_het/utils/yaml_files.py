"""YAML 1.2: reader and writer of settings.

PyYAML follows YAML 1.1, in which `010` is 8, `1:30` is 90, `1e-3` is text, and `no` is False. It
also accepts a key twice. This module uses the types of YAML 1.2, and each key may occur once.
"""

import re
from collections.abc import Mapping
from typing import Any

import yaml

_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
# The core schema of YAML 1.2, and the merge key of YAML 1.1: tag, pattern, first characters.
_PLAIN_TYPES = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        rf"{_FLOAT}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", "<<", ["<"]),
)


_MERGE = "tag:yaml.org,2002:merge"


def _get_key_name(key: Any) -> Any:
    """Return the text of a key with underscores for dashes; a key of another kind is unique."""
    return key.value.replace("-", "_") if isinstance(key, yaml.ScalarNode) else id(key)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict = {}  # noqa: RUF012  PyYAML's name of the resolvers

    def flatten_mapping(self, node: Any) -> None:
        """Merge mappings (`<<`) into a mapping; raise ValueError for two equal keys of its own.

        A dash equals an underscore. The mapping's own keys replace merged keys. Keys of an earlier
        merged mapping replace keys of a later one. PyYAML 6.0.4 has another precedence.
        """
        own: dict[Any, Any] = {}
        sources: list[Any] = []
        for key, value in node.value:
            if key.tag == _MERGE:
                sources += value.value if isinstance(value, yaml.SequenceNode) else [value]
                continue
            first, _ = own.setdefault(_get_key_name(key), (key, value))
            if first is not key:
                places = (f"{k.value} in line {k.start_mark.line + 1}" for k in (first, key))
                raise ValueError(f"each name once: {' and '.join(places)}")
        node.value = [*own.values()]  # ends the recursion of a mapping that merges itself
        merged: dict[Any, Any] = {}
        for source in sources:
            if not isinstance(source, yaml.MappingNode):
                raise ValueError(f"<< in line {source.start_mark.line + 1}: expected a mapping")
            self.flatten_mapping(source)
            merged = {_get_key_name(pair[0]): pair for pair in source.value} | merged
        node.value = [pair for name, pair in merged.items() if name not in own] + node.value

    def construct_yaml_int(self, node: Any) -> int:
        """Build an integer: `010` is 10, `0o10` is 8, `0x10` is 16."""
        text = self.construct_scalar(node)
        return int(text, 10 if text.lstrip("+-").isdecimal() else 0)


class _Dumper(yaml.SafeDumper):
    """Writes texts in quotes that YAML 1.1 or 1.2 would read as values of another type."""


for _tag, _pattern, _first in _PLAIN_TYPES:
    for _class in (_Loader, _Dumper):
        _regexp = re.compile(f"(?:{_pattern})$")
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _regexp, _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def load_yaml(text: str) -> Any:
    """Return the content of a YAML text with the types of YAML 1.2.

    Args:
      text: YAML or JSON.

    Returns:
      Mappings, lists, texts, numbers, bools and None.

    Raises:
      ValueError: for a key that occurs twice, with both lines.
      yaml.YAMLError: for a text that is no YAML.

    Example:
      >>> from fedjax_het.utils.yaml_files import load_yaml
      >>> load_yaml("{rounds: 010, local_lr: 1e-3, name: no}")
      {'rounds': 10, 'local_lr': 0.001, 'name': 'no'}
    """
    return yaml.load(text, _Loader)  # a subclass of the safe loader


def dump_yaml(values: Mapping[str, Any]) -> str:
    r"""Return YAML text of values, in their order.

    Args:
      values: texts, numbers, bools, None, and lists and mappings of them.

    Returns:
      The text, from which `load_yaml` returns equal values.

    Example:
      >>> from fedjax_het.utils.yaml_files import dump_yaml
      >>> dump_yaml({"alpha": 1e-5, "dataset": "010"})
      "{alpha: 1.0e-05, dataset: '010'}\n"
    """
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=None)
