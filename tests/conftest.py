"""Every test runs with strict settings: true float32 matmuls and warnings as errors."""

import gc
import logging
import os
import signal
import time
from pathlib import Path

from jaxlib import version

# Tests compile thousands of programs that run for milliseconds. XLA's former loop emitters, where
# they still exist, and no optimization by LLVM take a third of the compile time; the programs are
# slower and equally correct. A single LLVM module for each program takes a sixth less again.
# Programs that tests start inherit these flags. Continuous integration also runs a representative
# set with the flags that users have (`FEDJAX_HET_TEST_OPTIMIZATION=default`).
FAST_COMPILE_FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if tuple(map(int, version.__version__.split(".")[:2])) < (0, 11):
    FAST_COMPILE_FLAGS.append("--xla_cpu_use_fusion_emitters=false")
if os.environ.get("FEDJAX_HET_TEST_OPTIMIZATION") != "default":
    flags = [*FAST_COMPILE_FLAGS, os.environ.get("XLA_FLAGS", "")]
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()

import jax  # noqa: E402
import pytest  # noqa: E402

import fedjax_het  # noqa: E402, F401  (asks for one CPU device per core)

pytest.register_assert_rewrite("support")  # so that asserts there say what they compared
jax.config.update("jax_default_matmul_precision", "highest")
# A worker holds millions of objects of traced programs. Rare collections take 7 % less time.
gc.set_threshold(100_000, 50, 100)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background


def tfds_data_dir() -> Path | None:
    """The folder of prepared tensorflow-datasets, where the user has one."""
    folder = os.environ.get("TFDS_DATA_DIR")
    return Path(folder) if folder and Path(folder).is_dir() else None


@pytest.fixture(scope="session")
def prepared_data() -> Path:
    folder = tfds_data_dir()
    if folder is None:
        pytest.skip("TFDS_DATA_DIR names no folder of prepared data sets")
    return folder


@pytest.fixture
def private_cache(monkeypatch, tmp_path):
    """Cache that the test starts empty."""
    monkeypatch.setenv("FEDJAX_HET_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def use_single_lane(monkeypatch):
    """What the timing would choose on a CPU anyway; its own tests ask for it."""
    from fedjax_het.core.autotune import LaneChoice

    placement = "fedjax_het.runtime.placement"
    monkeypatch.setattr(f"{placement}.choose_lanes", lambda *a, **k: LaneChoice(1, 1, {}))
    monkeypatch.setattr(f"{placement}.choose_server_sharding", lambda *a, **k: False)


@pytest.fixture
def no_program_eviction(monkeypatch):
    """For a test that counts compilations: what other tests have compiled goes before it, and not
    in its midst, where the process has many programs."""
    from fedjax_het.core import memory

    memory.evict_programs_if_needed()
    monkeypatch.setattr(memory, "is_near_mmap_limit", lambda: False)


@pytest.fixture
def short_chunks(monkeypatch):
    """Chunks of at most two rounds."""
    from fedjax_het.runtime import group_state

    monkeypatch.setattr(group_state, "MAX_ROUNDS_PER_CHUNK", 2)


@pytest.fixture
def eager(short_chunks, monkeypatch):
    """Chunks of at most two rounds, with a checkpoint after each."""
    from fedjax_het.runtime import checkpointing

    monkeypatch.setattr(checkpointing, "CHECKPOINT_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def reset_registries():
    """What a test registers, the next one does not know."""
    from fedjax_het.algorithms import METHODS
    from fedjax_het.core.optimizers import OPTIMIZERS
    from fedjax_het.data import DATASETS, PARTITIONS, SERVER_SOURCES
    from fedjax_het.nn import NETWORKS

    yield
    for registry in (METHODS, DATASETS, NETWORKS, OPTIMIZERS, PARTITIONS, SERVER_SOURCES):
        registry.reset()


@pytest.fixture(autouse=True)
def restore_package_logger():
    """What a test's command line does to the log, the next one does not see."""
    log = logging.getLogger("fedjax_het")
    handlers, propagate, level = log.handlers[:], log.propagate, log.level
    yield
    log.handlers[:], log.propagate = handlers, propagate
    log.setLevel(level)


_last_eviction = time.monotonic()


@pytest.fixture(autouse=True)
def evict_compiled_programs():
    """A worker compiles more programs than a process can hold. Counting their memory maps takes a
    tenth of a second, so tests of a second in all share one count. All caches are emptied at once:
    a garbage collection after each would take seconds."""
    from fedjax_het.core import memory
    from fedjax_het.runtime.build import evict_programs

    global _last_eviction
    yield
    if time.monotonic() - _last_eviction > 1:
        memory.release_freed_memory()
        if memory.is_near_mmap_limit():
            jax.clear_caches()
            evict_programs()
        _last_eviction = time.monotonic()
