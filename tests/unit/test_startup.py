"""The import is fast and starts no backend; by default, each core is a device."""

import os
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


# Libraries whose import takes longer than that of NumPy.
SLOW_LIBRARIES = (
    *("datasets", "flax", "jax", "matplotlib", "optax", "pandas", "PIL", "pyarrow", "scipy"),
    *("sklearn", "tensorflow", "tensorflow_datasets", "torch"),
)
PRINT_SLOW_LIBRARIES = f"print([name for name in {SLOW_LIBRARIES} if name in sys.modules])"


def test_import_starts_no_backend():
    code = """
import fedjax_het, fedjax_het.data
from jax._src import xla_bridge
assert not xla_bridge._backends, xla_bridge._backends
"""
    python(code)


def test_import_imports_no_slow_library():
    assert python(f"import fedjax_het, sys; {PRINT_SLOW_LIBRARIES}") == "[]"


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["rn"]])
def test_command_line_imports_no_slow_library_before_a_command(words):
    code = f"""
import contextlib, sys
from fedjax_het.cli import main
with contextlib.suppress(SystemExit):
    main({words})
{PRINT_SLOW_LIBRARIES}
"""
    assert python(code).splitlines()[-1] == "[]"


def test_simulate_imports_no_library_of_tables_and_figures():
    libraries = ("matplotlib", "pandas", "pyarrow", "scipy", "sklearn", "tensorflow")
    code = "import sys; from fedjax_het import RunSpec, load_dataset, simulate, sweep; "
    code += "load_dataset('digits');"
    assert python(f"{code} print([name for name in {libraries} if name in sys.modules])") == "[]"


def test_jax_finds_its_own_files_after_its_import():
    """The settings extend the import of JAX, but do not replace JAX's loader."""
    code = """
import fedjax_het, jax, pkgutil, sys
assert jax.__spec__.loader is jax.__loader__ and b"jax" in pkgutil.get_data("jax", "version.py")
print([finder for finder in sys.meta_path if "fedjax_het" in type(finder).__module__])
"""
    assert python(code) == "[]"


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
