"""Parameters of partition schemes."""

from fedjax_het.data import PARTITIONS
from fedjax_het.utils.registry import REQUIRED


def required_parameters(scheme, **values):
    """Return those of the values that a scheme has no default for."""
    defaults = PARTITIONS[scheme].parameters
    return {name: values[name] for name, default in defaults.items() if default is REQUIRED}
