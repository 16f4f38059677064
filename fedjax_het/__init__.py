"""fedjax_het: federated learning on heterogeneous clients, a federation as one compiled program."""

from fedjax_het._startup import request_one_cpu_device_per_core

request_one_cpu_device_per_core()

__version__ = "0.1.0"
