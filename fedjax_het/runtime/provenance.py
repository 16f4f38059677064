"""Version, device and precision of a run, and the digest that names its result."""

import hashlib
import json
from typing import Any

from fedjax_het._version import __version__
from fedjax_het.utils.env import require_devices

IDENTITY_FIELDS = ("fedjax_het", "device", "matmul_precision", "x64")
"""Names of the values of `describe_environment` that are part of a result's digest."""


def describe_environment() -> dict[str, Any]:
    """Return version, device and precision of this process, which every result stores.

    Starts the backend of jax.

    Raises:
      ConfigError: if the backend cannot start.
    """
    require_devices()
    import jax
    import jaxlib

    config: Any = jax.config  # jax adds its settings at run time, so its types do not name them
    precision, x64 = config.jax_default_matmul_precision, config.jax_enable_x64
    return {
        "fedjax_het": __version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "device": jax.devices()[0].device_kind,
        "matmul_precision": str(precision or "default"),
        "x64": bool(x64),
    }


def compute_run_digest(
    spec_digest: str,
    environment: dict[str, Any],
    data: str | None = None,
    network: str | None = None,
    partition: str | None = None,
    initial: str | None = None,
    optimizer: str | None = None,
) -> str:
    """Compute the digest that names the files of a result.

    Digests of objects are passed only if the settings do not determine the objects.

    Args:
      spec_digest: `RunSpec.digest()`.
      environment: values of `describe_environment`, of which `IDENTITY_FIELDS` count.
      data: digest of the data set.
      network: digest of the network.
      partition: digest of the partition.
      initial: digest of the model in a file with which the run begins.
      optimizer: digest of the clients' optimizer.

    Returns:
      16 hexadecimal digits.

    Example:
      >>> from fedjax_het import RunSpec
      >>> from fedjax_het.runtime.provenance import compute_run_digest, describe_environment
      >>> len(compute_run_digest(RunSpec("fedavg", "digits").digest(), describe_environment()))
      16
    """
    identity = {name: environment.get(name) for name in IDENTITY_FIELDS}
    parts: list[Any] = [spec_digest, identity, data, *([network] if network else [])]
    optional = {"partition": partition, "initial": initial, "optimizer": optimizer}
    parts += [{name: digest} for name, digest in optional.items() if digest]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
