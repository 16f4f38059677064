"""The import is fast and starts no backend; by default, each core is a device."""

import os
import statistics
import subprocess
import sys

import pytest


def python(code, *flags, **environment):
    done = subprocess.run(
        [sys.executable, *flags, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_import_starts_no_backend():
    code = """
import sys, fedjax_het, fedjax_het.data
from jax._src import xla_bridge
assert not xla_bridge._backends, xla_bridge._backends
heavy = ["tensorflow", "tensorflow_datasets", "matplotlib", "pandas", "flax", "torch", "sklearn", "PIL"]
print([name for name in heavy if name in sys.modules])
"""
    assert python(code) == "[]"


def test_import_time():
    # The documented limit is 1.5 s; a fraction of JAX's own import holds on any machine.
    code = """
import time
start = time.perf_counter(); import jax; middle = time.perf_counter()
import fedjax_het
print((time.perf_counter() - middle) / (middle - start))
"""
    assert statistics.median(float(python(code)) for _ in range(3)) < 0.5


def test_one_cpu_device_per_core():
    from fedjax_het._startup import count_available_cores

    count = "import fedjax_het, jax; print(len(jax.devices('cpu')))"
    assert python(count, JAX_PLATFORMS="cpu") == str(count_available_cores())


@pytest.mark.parametrize(
    "environment",
    [{"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}, {"JAX_NUM_CPU_DEVICES": "3"}],
)
def test_user_number_of_devices_takes_precedence(environment):
    count = "import fedjax_het, jax; print(len(jax.devices('cpu')))"
    assert python(count, JAX_PLATFORMS="cpu", **environment) == "3"


def test_running_backend_keeps_devices():
    code = "import jax; jax.devices(); import fedjax_het; print(len(jax.devices('cpu')))"
    assert python(code, JAX_PLATFORMS="cpu") == "1"


def test_public_names_resolve():
    import fedjax_het

    for name in fedjax_het.__all__:
        assert getattr(fedjax_het, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fedjax_het.nothing


def test_bytes_are_not_compared_with_text():
    """Python's flag -bb makes such a comparison an error."""
    code = (
        "import fedjax_het; print(fedjax_het.load_dataset('digits', data_dir='here').num_classes)"
    )
    assert python(code, "-bb") == "10"
