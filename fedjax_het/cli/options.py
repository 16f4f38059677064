"""Options of `fedjax-het run` and `fedjax-het sweep`, on the command line and in a YAML file.

A YAML file contains fields of a command by name:

    algorithm: fedprox
    alpha: 0.1
    hp: {prox_mu: 0.01}

In the file of a sweep, a list is a list of values. The JSON file of a result is valid, too.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from fedjax_het.algorithms import METHODS
from fedjax_het.analysis.inspection import collect_settings_by_protocol, format_by_protocol
from fedjax_het.analysis.overview import format_setting_value
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.config.settings import (
    FORMER_SETTING_NAMES,
    SETTING_ALIASES,
    SETTING_SYNONYMS,
    rename_former_settings,
    require_setting,
)
from fedjax_het.core.lr_schedules import (
    LR_SCHEDULES,
    ROUND_PREFIX,
    STEP_PREFIX,
    optional_schedule_hyperparameters,
    schedule_hyperparameters,
)
from fedjax_het.core.optimizers import OPTIMIZERS
from fedjax_het.runtime.placement import Placement
from fedjax_het.utils.command_line import Option, convert_setting, get_options
from fedjax_het.utils.config import PositiveInt, hyperparameters_of
from fedjax_het.utils.errors import ConfigError, make_value_error, require
from fedjax_het.utils.yaml_files import load_yaml

_GROUPS = {
    "data": ("dataset", "data_dir", "normalization"),
    "partition": (
        *("partition", "alpha", "classes", "num_clients", "partition_options", "partition_seed"),
        "skew",
    ),
    "model": (
        *("model", "width", "depth", "norm", "stem", "network_options", "precision", "init_from"),
    ),
    "local training": (
        *("local_epochs", "batch_size", "local_optimizer", "learning_rate", "momentum"),
        *("weight_decay", "lr_schedule", "local_steps", "gradient_accumulation"),
        *("optimizer_options", "optimizer_state", "lr_step_schedule"),
    ),
    "method": (
        *(
            "algorithm",
            "participation",
            "system",
            "attack",
            "aggregation",
            "compression",
            "privacy",
            "protocol",
            "hp",
            "options",
        ),
    ),
    "server": (
        *("averaging", "server_learning_rate", "server_data", "server_options"),
        "pretrain_epochs",
    ),
    "evaluation": (
        *("eval_every", "client_tests", "metrics", "test_per_client", "client_test_model"),
        *("held_out_clients", "held_out_epochs", "gradient_gaps"),
        *("validation", "target_accuracy", "patience", "min_delta"),
    ),
    "run": ("rounds", "seed", "seeds", "config", "list", "resume", "restart", "resume_anyway"),
    "search": ("trials", "rungs", "reduction", "space", "sampler"),
    "speed and memory": (
        *("lanes", "launcher", "spread", "vmapped", "memory", "server_work", "client_state"),
        "client_data",
        *("ray_address", "cpus_per_task", "gpus_per_task", "distributed"),
    ),
    "output": (
        "output_dir",
        "quiet",
        "json",
        "keep_state",
        "track",
        "pictures",
        "wide",
        "columns",
        "sort",
    ),
}
# Fields that --help lists; --help-all lists the others, too.
_COMMON = (
    *("dataset", "data_dir", "partition", "alpha", "classes", "num_clients", "skew", "model"),
    *("local_epochs", "batch_size", "local_optimizer", "learning_rate", "algorithm"),
    *(
        "participation",
        "system",
        "protocol",
        "hp",
        "options",
        "eval_every",
        "client_tests",
        "metrics",
    ),
    *("validation", "patience", "rounds", "seed", "seeds", "config", "list", "restart"),
    *("trials", "rungs", "reduction", "space", "sampler"),
    *("lanes", "launcher", "output_dir", "quiet", "json"),
)
_METAVARS = {
    **{"init_from": "PATH", "local_optimizer": "OPT", "metrics": "NAMES"},
    **dict.fromkeys(("skew", "system", "attack", "aggregation", "privacy"), "KIND:..."),
}
_EXTRA_OPTIONS = (
    Option("help_all", "--help-all", bool, False, "Print the help of every option."),
    Option("plugin", "--import", str, None, "Python file or module to run first (default: none)."),
)


@dataclass(frozen=True)
class CommonOptions:
    """Options of `run` and `sweep` that do not change results beyond rounding."""

    config: Path | None = None
    """YAML file of settings, with lists for a sweep, or JSON file of a result; flags replace its
    values (default: none)."""
    data_dir: Path | None = None
    """Folder of the data sets' files (default: the environment variable TFDS_DATA_DIR)."""
    track: tuple[str, ...] = ()
    """Trackers that record each run in the output folder: csv, tensorboard, wandb, mlflow (default:
    none)."""
    lanes: PositiveInt | Literal["auto"] = "auto"
    """Number of clients of one federation that are trained in parallel on each device. It affects
    speed only, not results."""
    server_work: str = "auto"
    """Distribution of the server's computation over the devices of a federation: shared, alone
    (every device computes all of it) or auto (the faster of the two). It affects speed only."""
    client_state: str = "auto"
    """Storage of the clients' states: device, split (a part on each device of the federation),
    host, disk or auto (another place if the states do not fit on a device). With host and disk,
    only the states of the next rounds' clients are on the devices. It affects memory only."""
    client_data: str = "auto"
    """Storage of the clients' training examples: device, host (only the examples of the next
    rounds' clients are on the devices) or auto. It affects memory and speed only."""
    resume_anyway: bool = False
    """Continue also from checkpoints of another version, device type or precision."""
    distributed: bool = False
    """Join the processes that SLURM, a TPU pod or MPI has started (jax.distributed.initialize)."""
    quiet: bool = False
    """Print only errors on stderr, and only the last line on stdout, a JSON object."""
    json: bool = False
    """Print progress, messages and errors on stderr as one JSON object per line."""

    def make_placement(self, **options: Any) -> Placement:
        """Return the placement of these options and of further options."""
        names = ("lanes", "server_work", "client_state", "client_data")
        return Placement(**{name: getattr(self, name) for name in names}, **options)


def list_help_options(config_class: type, *, include_rare: bool) -> list[Option]:
    """List the options of `run` or `sweep` with their groups and defaults.

    Args:
      config_class: dataclass of the command.
      include_rare: include the options that only `--help-all` lists.

    Returns:
      The options, sorted by group.
    """
    options, hints = get_options(config_class), _describe_defaults(all_protocols=include_rare)
    return [
        *_EXTRA_OPTIONS,
        *(
            options[name]._replace(
                group=group,
                hint=hints.get(name),
                metavar=_METAVARS.get(name, ""),
                help=_remove_default(options[name].help, hints.get(name, "")),
            )
            for group, names in _GROUPS.items()
            for name in names
            if name in options and (include_rare or name in _COMMON)
        ),
    ]


def _remove_default(text: str, hint: str) -> str:
    """Return a help text without its default if a hint states the default."""
    return re.sub(r" \(default: [^()]*\)", "", text) if hint.startswith("(default:") else text


def _describe_defaults(*, all_protocols: bool) -> dict[str, str]:
    """Return the default of each setting, of a run without settings or of FedAvg by protocol.

    Args:
      all_protocols: list the defaults of every protocol on Fashion-MNIST.
    """
    run = RunSpec().resolved()
    defaults = {field.name: getattr(run, field.name) for field in fields(RunSpec)}
    texts = {
        name: f"(default: {format_setting_value(value)})"
        for name, value in defaults.items()
        if name != "partition_seed" and value is not None and not isinstance(value, dict)
    }
    if all_protocols:
        for flag, values in collect_settings_by_protocol(METHODS["fedavg"]).items():
            words = format_by_protocol(values)
            term = "by protocol" if " " in words else "default"
            texts[flag[2:].replace("-", "_")] = f"({term}: {words})"
    return texts


def rename_flags(words: Sequence[str], valid: Collection[str] = ()) -> list[str]:
    """Replace short flags, and flags that had another name in version 0.6.

    Args:
      words: words of the command line.
      valid: flags of the command.

    Returns:
      The words.

    Raises:
      ConfigError: for a hyperparameter as a flag: it has a flag of another name, or `--hp`.
    """
    names = {**FORMER_SETTING_NAMES, **SETTING_ALIASES, "measure": "metric"}
    renamed = []
    for word in words:
        flag, *value = word.split("=", 1)
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in names:
            flag = f"--{names[name]}".replace("_", "-")
        elif flag.startswith("--") and name in SETTING_SYNONYMS:
            require_setting("flag", flag, valid)
        elif flag.startswith("--") and "--hp" in valid and flag.replace("_", "-") not in valid:
            hyperparameters = _list_hyperparameters()
            for hyperparameter in (name, f"lr_{name}"):
                if hyperparameter in hyperparameters:
                    text = f"did you mean '--hp {hyperparameter}=VALUE'?"
                    raise ConfigError(f"flag = {flag!r} is unknown: {text}")
        renamed.append("=".join([flag, *value]))
    return renamed


def _list_hyperparameters() -> set[str]:
    """Return the hyperparameters of all methods, optimizers and schedules."""
    names = {
        name
        for method in METHODS.values()
        for name in hyperparameters_of(method.make_hyperparameter_record({}, num_clients=10))
    }
    for optimizer in OPTIMIZERS.values():
        names |= {*optimizer.hyperparameters, *optimizer.optional_hyperparameters}
    for schedule in LR_SCHEDULES:
        for prefix in (ROUND_PREFIX, STEP_PREFIX):
            names |= {*schedule_hyperparameters(schedule, prefix)}
            names |= {*optional_schedule_hyperparameters(schedule, prefix)}
    return names


def load_config_file(path: str | Path) -> dict[str, Any]:
    """Read the settings of a YAML file, or of the JSON file of a result.

    Args:
      path: path of the file.

    Returns:
      Values by name, with underscores in place of dashes.

    Raises:
      ConfigError: if the file cannot be read or is not a mapping.
    """
    path = Path(path).expanduser()
    try:
        content = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise make_value_error("config", path, f"a file of YAML ({reason})") from error
    if isinstance(content, dict) and {"spec", "summary"} <= content.keys():
        content = content["spec"]
    is_mapping = isinstance(content, dict) and all(isinstance(name, str) for name in content)
    require(is_mapping, "config", str(path), "a file of names and values, e.g. alpha: 0.1")
    return rename_former_settings({name.replace("-", "_"): v for name, v in content.items()})


def read_settings(path: Path, options: Mapping[str, Option]) -> dict[str, Any]:
    """Read the values of a file by field of a command; `null` stands for an omitted setting.

    Args:
      path: path of the file.
      options: options of the command. The `seed` of a file sets also the `seeds` of a sweep.

    Returns:
      Validated values by field.

    Raises:
      ConfigError: if the file cannot be read, or has a name or value that the command does not
        accept.
    """
    values = {}
    content = load_config_file(path)
    try:
        for name, value in content.items():
            field = "seeds" if name == "seed" and "seeds" in options else name
            require_setting("setting", field, options)
            require(field not in values, field, value, "seed or seeds, not both")
            if value is not None:
                convert = options[field].convert
                kind = options[field].annotation
                values[field] = convert(value) if convert else convert_setting(name, value, kind)
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from error
    return values
