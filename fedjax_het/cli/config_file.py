"""Settings in a YAML file: the fields of a command's record, by name.

    algorithm: fedprox
    alpha: 0.1
    hp: {prox_mu: 0.01}

In the file of a sweep, a list is a list of values. The JSON file of a result is such a file too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fedjax_het.utils.command_line import Option, convert_setting
from fedjax_het.utils.errors import ConfigError, display_name, format_value, require, require_name
from fedjax_het.utils.text import to_one_line


def load_config_file(path: str | Path) -> dict[str, Any]:
    """Return the settings of a file by name, dashes as underscores; of a result, its settings.

    Raises:
      ConfigError: if the file cannot be read or is not a mapping.
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


def read_settings(path: Path, options: Mapping[str, Option]) -> dict[str, Any]:
    """Return the values of a file by field of a command; `null` stands for a missing setting.

    Args:
      path: the file.
      options: options of the command. The `seed` of a file is also the `seeds` of a sweep.

    Raises:
      ConfigError: if the file cannot be read, or has a name or value that the command does not take.
    """
    values = {}
    content = load_config_file(path)
    try:
        for name, value in content.items():
            field = "seeds" if name == "seed" and "seeds" in options else name
            require_name("setting", field, options)
            if value is not None:
                values[field] = convert_setting(name, value, options[field].annotation)
    except ConfigError as error:
        raise ConfigError(f"{display_name('config')} {path}: {error}") from error
    return values


def merge_settings(settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file with the values of the command line in their place.

    A mapping, such as `hp`, keeps the names of the file that the command line does not give.
    """
    merged = {**settings, **given}
    for name, value in settings.items():
        if isinstance(value, dict):
            merged[name] = {**value, **given.get(name, {})}
    return merged
