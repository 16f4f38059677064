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

from fedjax_het.common.errors import ConfigError, require, require_name, shown, written
from fedjax_het.common.text import one_line
from fedjax_het.settings.spec import RunSpec

# Settings with names and values of their own.
PAIRS = (
    *("hp", "options", "network_options", "partition_options", "server_options"),
    "optimizer_options",
)


def settings_text(spec: RunSpec) -> str:
    """The YAML that makes this run again: what its settings say, in their order."""
    said = {name: value for name, value in spec.to_dict().items() if value not in (None, {})}
    return yaml.safe_dump(said, sort_keys=False, default_flow_style=None)


def read_settings(path: str | Path) -> dict[str, Any]:
    """What a file says, by name, dashes read as underscores; of a result's JSON its settings.

    Raises ConfigError, in one line that names the file, where it cannot be read or is no mapping.
    """
    path = Path(path)
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or str(error)
        said = f"{written('config')} = {shown(path)}: expected a file of YAML ({why})"
        raise ConfigError(one_line(said)) from error
    if isinstance(found, dict) and {"spec", "summary"} <= found.keys():
        found = found["spec"]
    ok = isinstance(found, dict) and all(isinstance(name, str) for name in found)
    require(ok, "config", str(path), "a file of names and values, e.g. alpha: 0.1")
    return {name.replace("-", "_"): value for name, value in found.items()}


def words_of(
    settings: Mapping[str, Any],
    flags: Mapping[str, str],
    given: Sequence[str],
    *,
    switches: Collection[str] = (),
    lists: bool = False,
) -> list[str]:
    """The settings as words of a command line, but for those that it names itself.

    Args:
      flags: of a command, by the names of its fields; of a sweep `seed` is its `seeds`.
      given: its words. switches: the flags that take no value.
      lists: whether values of numbers and options may be lists, one run for each.
    Raises: ConfigError for a name that the command does not have.
    """
    asked = {word.partition("=")[0].replace("_", "-") for word in given if word.startswith("--")}
    words: list[str] = []
    for name, value in settings.items():
        name = "seeds" if name == "seed" and "seeds" in flags else name
        require_name("setting", name, flags)
        flag = flags[name]
        if name in PAIRS and value is not None:
            require(isinstance(value, dict), f"setting {name}", value, "names and values")
            own = _named(given, flag)
            named = {each: of for each, of in value.items() if each not in own}
            if named:
                several = lists and name in ("hp", "options")
                words += [flag, *(f"{each}={_pair(of, several)}" for each, of in named.items())]
        elif flag in switches:
            require(isinstance(value, bool), f"setting {name}", value, "true or false")
            words += [flag] if value and flag not in asked else []
        elif value is not None and flag not in asked:
            words += _flag(flag, value)
    return words


def _named(given: Sequence[str], flag: str) -> set[str]:
    """The names that follow a flag."""
    names, inside = set(), False
    for word in given:
        if word.startswith("--"):
            inside = word.partition("=")[0].replace("_", "-") == flag
            word = word.partition("=")[2] if inside else ""
        if inside and word:
            names.add(word.partition("=")[0])
    return names


def _pair(value: Any, several: bool) -> str:
    if several and isinstance(value, list):
        return ",".join(_word(item) for item in value)
    return _word(value)


def _flag(flag: str, value: Any) -> list[str]:
    if value is True or value is False:
        return [flag, str(value)]
    return [flag, *map(_word, value if isinstance(value, list) else [value])]


def _word(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str)


def without_config(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The file that `--config` names, if any, and the other words."""
    left, path, is_next = [], None, False
    for word in words:
        flag, equals, value = word.partition("=")
        if is_next:
            path, is_next = word, False
        elif flag == "--config":
            path, is_next = (value, False) if equals else (None, True)
        else:
            left.append(word)
    return path, left
