"""What makes a run's numbers besides its settings: versions, precision, device."""

import hashlib
import json
from typing import Any

from fedjax_het._version import __version__
from fedjax_het.utils.env import require_devices

# These tell results of one setting apart: a file is named by them too (`run_digest`).
IDENTITY_FIELDS = ("fedjax_het", "device", "matmul_precision", "x64")


def describe_environment() -> dict[str, Any]:
    """This process's, as it is stored with every result. Starts jax's backend; ConfigError where
    that cannot be."""
    require_devices()
    import jax
    import jaxlib

    # jax adds its settings to `jax.config` at run time: its types do not name them.
    jax_config: Any = jax.config
    precision, x64 = jax_config.jax_default_matmul_precision, jax_config.jax_enable_x64
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
    """16 hexadecimal digits that name one result.

    Args:
      settings: `RunSpec.digest()`.
      made_in: `environment()`, of which `IDENTITY_FIELDS` counts: package version, device, precision.
      data: the data set's own digest, where its name does not say what it holds ("user", or a
        user's own data in the place of those that the settings name).
      network: likewise the network's.
      partition: likewise that of a partition which is not what the settings make.
      initial: of the model that the run began with, where that was in a file.
      optimizer: likewise that of clients' optimiser which was passed to the run.
    """
    identity = {name: environment.get(name) for name in IDENTITY_FIELDS}
    parts = [spec_digest, identity, data, *([network] if network else [])]
    if partition:
        parts.append({"partition": partition})
    if initial:
        parts.append({"initial": initial})
    if optimizer:
        parts.append({"optimizer": optimizer})
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
