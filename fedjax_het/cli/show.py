"""Commands `fedjax-het list`, `show` and `devices`, which describe entries and this machine."""

from dataclasses import dataclass

import tyro

from fedjax_het.analysis.inspection import REGISTRIES, describe
from fedjax_het.utils.console import print_wrapped
from fedjax_het.utils.errors import require
from fedjax_het.utils.text import to_one_line


@dataclass(frozen=True)
class ListCommand:
    """Print the names of all methods, data sets, partitions, networks and other entries.

    The other entries are sources of the server's examples, metrics, local optimizers and learning
    rate schedules.
    """


@dataclass(frozen=True)
class ShowCommand:
    """Print the options of methods, data sets, partitions, networks and other entries.

    The other entries are sources of the server's examples, local optimizers and learning rate
    schedules. The description of a method contains its paper, options, presets, hyperparameters
    with range and default, base methods, and settings by protocol. Example: fedjax-het show fedamp
    convnet
    """

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Names of the entries; `fedjax-het list` prints all names."""


def list_command(command: ListCommand) -> int:
    """Print every name with its description; return the exit status."""
    width = max(len(name) for registry, _ in REGISTRIES.values() for name in registry)
    for title, (registry, _) in REGISTRIES.items():
        lines = (f"  {name:{width}}  {entry.description}" for name, entry in registry.items())
        print_wrapped("\n".join([title, *lines, ""]))
    print("fedjax-het show NAME prints the options of an entry.")
    return 0


def show_command(command: ShowCommand) -> int:
    """Print the options of the named entries; return the exit status."""
    require(len(command.names) > 0, "name", "", "one that `fedjax-het list` names")
    for text in [describe(name) for name in command.names]:
        print_wrapped(f"{text}\n")
    return 0


@dataclass(frozen=True)
class DevicesCommand:
    """Print the devices of this machine and the software that uses them.

    The output contains memory and precision of the devices, versions of libraries, environment
    variables and recommended flags. It also has the numbers of lanes that short timings found
    fastest.
    """


def devices_command(command: DevicesCommand) -> int:
    """Print the description of the devices; return the exit status."""
    from fedjax_het.runtime.device_report import describe_devices

    for line in describe_devices():
        print(to_one_line(line))
    return 0
