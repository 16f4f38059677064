"""Settings in a file: the words of a command line, by name, in YAML; of a sweep, lists are grids.

    algorithm: fedprox
    alpha: 0.1
    hp: {prox_mu: 0.01}

A result's own JSON is such a file too.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedjax_het.utils.errors import ConfigError, display_name, format_value, require, require_name
from fedjax_het.utils.text import to_one_line

# Settings with names and values of their own.
MAPPING_SETTINGS = (
    *("hp", "options", "network_options", "partition_options", "server_options"),
    "optimizer_options",
)


def load_config_file(path: str | Path) -> dict[str, Any]:
    """What a file says, by name, dashes read as underscores; of a result's JSON its settings.

    Raises ConfigError, in one line that names the file, where it cannot be read or is no mapping.
    """
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = (
            f"{display_name('config')} = {format_value(path)}: expected a file of YAML ({reason})"
        )
        raise ConfigError(to_one_line(message)) from error
    if isinstance(content, dict) and {"spec", "summary"} <= content.keys():
        content = content["spec"]
    is_mapping_by_name = isinstance(content, dict) and all(
        isinstance(name, str) for name in content
    )
    require(is_mapping_by_name, "config", str(path), "a file of names and values, e.g. alpha: 0.1")
    return {name.replace("-", "_"): value for name, value in content.items()}


def settings_to_argv(
    settings: Mapping[str, Any],
    flags: Mapping[str, str],
    argv: Sequence[str],
    *,
    boolean_flags: Collection[str] = (),
    allow_lists: bool = False,
) -> list[str]:
    """The settings as words of a command line, but for those that it names itself.

    Args:
      flags: of a command, by the names of its fields; of a sweep `seed` is its `seeds`.
      given: its words. switches: the flags that take no value.
      lists: whether values of numbers and options may be lists, one run for each.
    Raises: ConfigError for a name that the command does not have.
    """
    argv_flags = {
        word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")
    }
    tokens: list[str] = []
    for name, value in settings.items():
        name = "seeds" if name == "seed" and "seeds" in flags else name
        require_name("setting", name, flags)
        flag = flags[name]
        if name in MAPPING_SETTINGS and value is not None:
            require(isinstance(value, dict), f"setting {name}", value, "names and values")
            argv_names = _find_names_after_flag(argv, flag)
            remaining = {key: item for key, item in value.items() if key not in argv_names}
            if remaining:
                allow_multiple = allow_lists and name in ("hp", "options")
                tokens += [
                    flag,
                    *(
                        f"{key}={_format_pair_value(item, allow_multiple)}"
                        for key, item in remaining.items()
                    ),
                ]
        elif flag in boolean_flags:
            require(isinstance(value, bool), f"setting {name}", value, "true or false")
            tokens += [flag] if value and flag not in argv_flags else []
        elif value is not None and flag not in argv_flags:
            tokens += _format_flag(flag, value)
    return tokens


def _find_names_after_flag(argv: Sequence[str], flag: str) -> set[str]:
    """The names that follow a flag."""
    names, is_inside = set(), False
    for word in argv:
        if word.startswith("--"):
            is_inside = word.partition("=")[0].replace("_", "-") == flag
            word = word.partition("=")[2] if is_inside else ""
        if is_inside and word:
            names.add(word.partition("=")[0])
    return names


def _format_pair_value(value: Any, allow_multiple: bool) -> str:
    if allow_multiple and isinstance(value, list):
        return ",".join(_format_word(item) for item in value)
    return _format_word(value)


def _format_flag(flag: str, value: Any) -> list[str]:
    if value is True or value is False:
        return [flag, str(value)]
    return [flag, *map(_format_word, value if isinstance(value, list) else [value])]


def _format_word(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str)


def split_config_flag(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The file that `--config` names, if any, and the other words."""
    remaining, path, is_next = [], None, False
    for word in argv:
        flag, equals, value = word.partition("=")
        if is_next:
            path, is_next = word, False
        elif flag == "--config":
            path, is_next = (value, False) if equals else (None, True)
        else:
            remaining.append(word)
    return path, remaining
