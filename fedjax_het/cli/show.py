"""Commands `fedjax-het list`, `show` and `devices`, which describe entries and this machine."""

from dataclasses import dataclass

import tyro

from fedjax_het.analysis.inspection import REGISTRIES, describe
from fedjax_het.utils.console import print_json, print_wrapped
from fedjax_het.utils.errors import require, require_name
from fedjax_het.utils.text import to_one_line

KINDS = {title.replace("data ", "data").split()[-1]: title for title in REGISTRIES}
"""Titles of the kinds of entries, by the words that `fedjax-het list` accepts."""


@dataclass(frozen=True)
class ListCommand:
    """Print the names of all methods, data sets, partitions, skews, systems and other entries.

    Example: fedjax-het list methods partitions
    """

    kinds: tyro.conf.Positional[tuple[str, ...]] = ()
    """Kinds of entries: methods, datasets, datasources, tasks, partitions, skews, systems,
    networks, examples (of the server), compressors, attacks, aggregations, privacy, metrics,
    optimizers, schedules (default: all kinds)."""
    json: bool = False
    """Print one JSON object: for each kind, the descriptions by name."""


@dataclass(frozen=True)
class ShowCommand:
    """Print the options of methods, data sets, partitions, skews, systems and other entries.

    The description of a method contains its paper, options, presets, hyperparameters
    with range and default, base methods, and settings by protocol. Example: fedjax-het show fedamp
    convnet
    """

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Names of the entries; `fedjax-het list` prints all names."""
    json: bool = False
    """Print one JSON object: the text of each entry by its name."""


def list_command(command: ListCommand) -> int:
    """Print every name with its description; return the exit status."""
    text = " ".join(command.kinds).lower().replace("-", " ").replace("_", " ")
    for kind, title in KINDS.items():
        text = text.replace(title, kind)
    kinds = text.split()
    for kind in kinds:
        require_name("kind", kind, KINDS)
    titles = [title for kind, title in KINDS.items() if kind in (kinds or KINDS)]
    registries = {title: REGISTRIES[title][0] for title in titles}
    if command.json:
        descriptions = {
            title: {name: entry.description for name, entry in registry.items()}
            for title, registry in registries.items()
        }
        print_json(descriptions)
        return 0
    width = max(len(name) for registry in registries.values() for name in registry)
    for title, registry in registries.items():
        lines = (f"  {name:{width}}  {entry.description}" for name, entry in registry.items())
        print_wrapped("\n".join([title, *lines, ""]))
    print("fedjax-het show NAME prints the options of an entry.")
    return 0


def show_command(command: ShowCommand) -> int:
    """Print the options of the named entries; return the exit status."""
    require(len(command.names) > 0, "name", "", "a name that `fedjax-het list` prints")
    texts = [str(describe(name)) for name in command.names]
    if command.json:
        print_json(dict(zip(command.names, texts, strict=True)))
        return 0
    for text in texts:
        print_wrapped(f"{text}\n")
    return 0


@dataclass(frozen=True)
class DevicesCommand:
    """Print the devices of this machine and the software that uses them.

    The output contains memory and precision of the devices, versions of libraries, environment
    variables and recommended flags. It also has the numbers of lanes that short timings found
    fastest.
    """

    json: bool = False
    """Print one JSON object with the lines of the description."""


def devices_command(command: DevicesCommand) -> int:
    """Print the description of the devices; return the exit status."""
    from fedjax_het.runtime.device_report import describe_devices

    lines = [to_one_line(line) for line in describe_devices()]
    if command.json:
        print_json({"devices": lines})
    else:
        print(*lines, sep="\n")
    return 0
