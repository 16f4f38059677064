"""Groups, defaults and completions of the options of `fedjax-het run` and `fedjax-het sweep`."""

from dataclasses import MISSING, fields
from typing import Any

from fedjax_het.config.run_spec import RunSpec
from fedjax_het.utils.command_help import HelpLayout

_GROUPS = {
    "data": ("dataset", "normalisation", "server_data", "server_options", "data_dir"),
    "partition": (
        *("partition", "alpha", "classes", "num_clients", "partition_options", "partition_seed"),
    ),
    "network": (
        *("model", "width", "depth", "norm", "stem", "network_options", "precision", "init_from"),
    ),
    "local training": (
        *("local_epochs", "local_steps", "batch_size", "accumulation", "local_optimizer"),
        *("optimizer_options", "optimizer_state", "lr_schedule", "lr_step_schedule"),
    ),
    "method": (
        *("algorithm", "protocol", "hp", "options", "participation", "averaging"),
        "pretrain_epochs",
    ),
    "evaluation": (
        *("eval_every", "measures", "local_tests", "test_per_client", "scored"),
        *("held_out_clients", "held_out_epochs", "gradient_gaps"),
        *("stop_at", "patience", "min_gain"),
    ),
    "run": (
        *("rounds", "seed", "seeds", "config", "list", "resume", "resume_anyway", "lanes"),
        *("spread", "vmapped", "memory", "server_work", "client_state", "launcher"),
        *("ray_address", "cpus_per_task", "gpus_per_task", "distributed"),
    ),
    "output": ("output_dir", "keep_state", "track", "pictures", "quiet", "json"),
}
_RARE = (
    *("normalisation", "server_data", "server_options", "partition_options", "partition_seed"),
    *("width", "depth", "norm", "stem", "network_options", "precision", "init_from"),
    *("local_steps", "accumulation", "optimizer_options", "optimizer_state", "lr_step_schedule"),
    *("averaging", "pretrain_epochs", "test_per_client", "scored", "held_out_clients"),
    *("held_out_epochs", "gradient_gaps", "stop_at", "patience", "min_gain", "resume_anyway"),
    *("server_work", "client_state", "spread", "vmapped", "memory", "ray_address", "cpus_per_task"),
    *("gpus_per_task", "distributed", "track", "pictures", "keep_state"),
)
_METAVARS = {
    "init_from": "PATH",
    "local_optimizer": "OPT",
    "measures": "NAMES",
    "ray_address": "ADDRESS",
}


def get_run_layout() -> HelpLayout:
    """Return the layout of the help of `fedjax-het run` and `fedjax-het sweep`."""
    help_all = (bool, "Print the help of every option, also of those that few runs need.")
    plugin = (str, "Python file or module of the user, which runs first and registers entries.")
    return HelpLayout(
        groups=_GROUPS,
        rare=_RARE,
        defaults=_describe_defaults(),
        metavars=_METAVARS,
        choices=_list_choices(),
        extra_flags={"help-all": help_all, "import": plugin},
    )


def _list_choices() -> dict[str, tuple[str, ...]]:
    """Return the registered names that settings may have, by setting."""
    from fedjax_het.algorithms import METHODS
    from fedjax_het.config.protocols import PROTOCOLS
    from fedjax_het.core.lr_schedules import LR_SCHEDULES
    from fedjax_het.core.optimizers import OPTIMIZERS
    from fedjax_het.data import DATASETS, PARTITIONS, SERVER_SOURCES
    from fedjax_het.nn import NETWORKS

    registries: dict[str, Any] = {
        "algorithm": METHODS,
        "dataset": DATASETS,
        "partition": PARTITIONS,
        "model": NETWORKS,
        "local_optimizer": OPTIMIZERS,
        "lr_schedule": LR_SCHEDULES,
        "lr_step_schedule": LR_SCHEDULES,
        "server_data": SERVER_SOURCES,
        "protocol": PROTOCOLS,
    }
    return {name: tuple(registry) for name, registry in registries.items()}


def _describe_defaults() -> dict[str, str]:
    """Return the default of each setting, those of protocols for FedAvg on Fashion-MNIST."""
    from fedjax_het.algorithms import METHODS
    from fedjax_het.config.protocols import PROTOCOLS, get_protocol_defaults

    values: dict[str, dict[str, str]] = {}
    for protocol in PROTOCOLS:
        settings, _, _ = get_protocol_defaults(protocol, METHODS["fedavg"], "fashion_mnist", None)
        for name, value in settings.items():
            if not isinstance(value, dict):
                text = f"{value:g}" if isinstance(value, float) else str(value)
                values.setdefault(name, {})[protocol] = text
    texts = {
        field.name: f"(default: {field.default})"
        for field in fields(RunSpec)
        if field.default not in (None, MISSING)
    }
    for name, by_protocol in values.items():
        if len(by_protocol) == len(PROTOCOLS) and len(set(by_protocol.values())) == 1:
            texts[name] = f"(default: {next(iter(by_protocol.values()))})"
        else:
            words = ", ".join(f"{protocol} {text}" for protocol, text in by_protocol.items())
            texts[name] = f"(by protocol: {words})"
    return texts
