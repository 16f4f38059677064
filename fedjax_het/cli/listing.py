"""`fedjax-het list`: what there is to choose from."""

from dataclasses import dataclass
from typing import Any

from fedjax_het.common.registry import Registry


@dataclass
class ListCommand:
    """Name the methods, data sets, partitions, networks and sources of the server's examples."""


def list_command(command: ListCommand) -> int:
    """Print every name with its description."""
    from fedjax_het.algorithms import METHODS
    from fedjax_het.data import DATASETS, PARTITIONS, SERVER_SOURCES
    from fedjax_het.nn import NETWORKS

    def described(entries: Registry[Any]) -> dict[str, str]:
        return {name: entry.description for name, entry in entries.items()}

    groups = {
        "methods": described(METHODS),
        "data sets": described(DATASETS),
        "partitions": described(PARTITIONS),
        "networks": described(NETWORKS),
        "server's examples": described(SERVER_SOURCES),
    }
    width = max(len(name) for group in groups.values() for name in group)
    for title, entries in groups.items():
        print(title, *(f"  {name:{width}}  {text}" for name, text in entries.items()), sep="\n")
        print()
    return 0
