"""`fedjax-het devices`: what runs go on here."""

from dataclasses import dataclass

from fedjax_het.common.text import to_one_line


@dataclass(frozen=True)
class DevicesCommand:
    """Print the devices, their memory and precision, versions, the flags that are set, those that
    would help, and what short timings of lanes have found."""


def devices_command(command: DevicesCommand) -> int:
    """Print it; returns the exit status."""
    from fedjax_het.running.devices import describe_devices

    for line in describe_devices():
        print(to_one_line(line))
    return 0
