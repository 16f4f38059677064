"""Environment variables are used, or reported in one line; the compilation cache."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import fedjax_het
from fedjax_het import ConfigError, RunSpec, load_dataset, simulate, sweep
from fedjax_het.cli import main
from fedjax_het.runtime.checkpointing import CheckpointWriter
from fedjax_het.utils import env
from fedjax_het.utils.env import VARIABLES, get_cache_dir, get_value

PACKAGE = Path(fedjax_het.__file__).parent
NUMBERS = ("", "x", "-1", "nan", "inf", "-inf", "1e400", "1" * 400, "FILE", "1 2", "None")
FOLDERS = ("", " ", "FILE", "FILE/below", "~nobody-of-that-name/x", "x" * 5000)
UNWRITABLE = "/proc/nowhere/x"
# Invalid values by variable; FILE stands for an existing file.
BAD = {
    "FEDJAX_HET_CHECKPOINT_SECONDS": NUMBERS,
    "FEDJAX_HET_CACHE": (*FOLDERS, UNWRITABLE),
    "XDG_CACHE_HOME": ("FILE", "FILE/below", UNWRITABLE, "/" + "x" * 5000),
    "TFDS_DATA_DIR": FOLDERS,
    "CINIC10_DIR": FOLDERS,
    "RAY_ADDRESS": (),  # checked by Ray: `test_ray_launcher.py`
    "JAX_NUM_CPU_DEVICES": (*NUMBERS, "0", "1.5", "1e3", "99999999"),
    "XLA_PYTHON_CLIENT_MEM_FRACTION": (*NUMBERS, "0", "1.5"),
    "JAX_COMPILATION_CACHE_DIR": (*FOLDERS, UNWRITABLE),
    "XLA_FLAGS": (
        "foo",
        "FILE/below",
        "--xla_a=1 foo",
        *(f"--xla_force_host_platform_device_count={bad}" for bad in NUMBERS if " " not in bad),
    ),
}
CASES = [(name, bad) for name, values in BAD.items() for bad in values]


def text_of(bad, tmp_path):
    (tmp_path / "file").write_text("")
    return bad.replace("FILE", str(tmp_path / "file"))


def is_one_line_of(message, name, text):
    shown = repr(text) if len(repr(text)) <= 100 else repr(text)[:90]
    begins = message.removeprefix("fedjax-het: ").startswith(f"{name} = {shown}")
    return begins and "\n" not in message and "expected" in message


def test_every_variable_has_cases():
    assert {variable.name for variable in VARIABLES} == set(BAD)
    reads = re.compile(r"os\.(environ|getenv)")
    readers = {path.name for path in PACKAGE.rglob("*.py") if reads.search(path.read_text())}
    assert readers == {"env.py"}


@pytest.mark.parametrize(("name", "bad"), CASES)
def test_variable_rejects_bad_value(name, bad, tmp_path, monkeypatch):
    text = text_of(bad, tmp_path)
    monkeypatch.setenv(name, text)
    (variable,) = (variable for variable in VARIABLES if variable.name == name)
    with pytest.raises(ConfigError) as raised:
        get_value(variable)
    assert is_one_line_of(str(raised.value), name, text)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("FEDJAX_HET_CHECKPOINT_SECONDS", ""),
        ("FEDJAX_HET_CACHE", "FILE"),
        ("XDG_CACHE_HOME", UNWRITABLE),
        ("JAX_NUM_CPU_DEVICES", "-1"),
        ("JAX_COMPILATION_CACHE_DIR", UNWRITABLE),
        ("XLA_FLAGS", "foo"),
    ],
)
def test_run_rejects_bad_variable_before_start(name, bad, tmp_path, monkeypatch, capsys):
    text = text_of(bad, tmp_path)
    if name == "XDG_CACHE_HOME":
        monkeypatch.delenv("FEDJAX_HET_CACHE", raising=False)
    monkeypatch.setenv(name, text)
    spec = RunSpec(model="mlp", partition="iid")
    for run in (lambda: simulate(spec), lambda: sweep([spec], tmp_path / "sweep")):
        with pytest.raises(ConfigError) as raised:
            run()
        assert is_one_line_of(str(raised.value), name, text)
    for words in (["run"], ["sweep", "--output-dir", str(tmp_path / "sweep")]):
        assert main([*words, "--model", "mlp", "--partition", "iid"]) == 2
        said = capsys.readouterr()
        assert said.out == "" and is_one_line_of(said.err.strip(), name, text)


@pytest.mark.parametrize(
    ("name", "dataset"), [("TFDS_DATA_DIR", "mnist"), ("CINIC10_DIR", "cinic10")]
)
def test_load_dataset_rejects_bad_data_folder(name, dataset, tmp_path, monkeypatch):
    for bad in FOLDERS:
        monkeypatch.setenv(name, text_of(bad, tmp_path))
        with pytest.raises(ConfigError) as raised:
            load_dataset(dataset, cache_dir=tmp_path / "cache")
        assert is_one_line_of(str(raised.value), name, text_of(bad, tmp_path))
    assert len(load_dataset("digits").train_labels) > 0  # needs no folder


def test_valid_variables_are_used(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDJAX_HET_CHECKPOINT_SECONDS", "2.5")
    assert CheckpointWriter()._min_interval == 2.5
    monkeypatch.delenv("FEDJAX_HET_CHECKPOINT_SECONDS")
    assert CheckpointWriter()._min_interval == 20
    monkeypatch.setenv("FEDJAX_HET_CACHE", str(tmp_path / "new" / "cache"))
    assert get_cache_dir() == tmp_path / "new" / "cache" and get_cache_dir().is_dir()
    monkeypatch.delenv("FEDJAX_HET_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert get_cache_dir() == tmp_path / "xdg" / "fedjax_het"
    for none in ("", "relative"):  # as the XDG specification requires
        monkeypatch.setenv("XDG_CACHE_HOME", none)
        assert get_cache_dir() == Path("~/.cache/fedjax_het").expanduser()


def test_missing_platform_is_reported(monkeypatch):
    def none():
        raise RuntimeError("Unable to initialize backend 'foo': \n it is not known")

    monkeypatch.setattr(jax, "devices", none)
    monkeypatch.setenv("JAX_PLATFORMS", "foo")
    with pytest.raises(ConfigError, match=r"^JAX_PLATFORMS = 'foo': expected .*not known\)$"):
        simulate(RunSpec(model="mlp"))
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(ConfigError, match=r"^jax finds no devices: Unable"):
        fedjax_het.make_model("mlp", (8, 8, 1), 10)


def test_failed_jax_import_is_reported_with_devices(monkeypatch):
    monkeypatch.setitem(env._invalid_jax_env_vars, "JAX_ENABLE_X64", ("foo", "invalid truth value"))
    with pytest.raises(ConfigError, match=r"^JAX_ENABLE_X64 = 'foo': expected .*truth value"):
        simulate(RunSpec(model="mlp"))
    assert load_dataset("digits").num_classes == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("JAX_NUM_CPU_DEVICES", "x"),
        ("JAX_NUM_CPU_DEVICES", ""),
        ("JAX_NUM_CPU_DEVICES", "-5"),
        ("JAX_ENABLE_X64", "foo"),
        ("JAX_DEFAULT_MATMUL_PRECISION", "foo"),
        ("JAX_PLATFORMS", "foo"),
        ("FEDJAX_HET_CHECKPOINT_SECONDS", ""),
        ("FEDJAX_HET_CACHE", "/dev/null"),
    ],
)
def test_command_reports_bad_variable(name, text):
    words = ["run", "--model", "mlp", "--partition", "iid", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "fedjax_het", *words],
        env={**os.environ, name: text},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert is_one_line_of(done.stderr.strip(), name, text), done.stderr


# --- the compilation cache

PROGRAM = """
import fedjax_het, jax, sys
from support.data import make_user_dataset
from support.small_runs import make_spec
if "run" in sys.argv:
    one_lane = fedjax_het.Placement(lanes=1)
    fedjax_het.simulate(make_spec(rounds=1), dataset=make_user_dataset(), placement=one_lane)
print(jax.config.jax_compilation_cache_dir)
"""


def start(folder, *words, **variables):
    environment = {**os.environ, "FEDJAX_HET_CACHE": str(folder), **variables}
    environment["PYTHONPATH"] = os.pathsep.join(["tests", os.environ.get("PYTHONPATH", ".")])
    command = [sys.executable, "-c", PROGRAM, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert not done.stderr, done.stderr
    return done.stdout.strip()


def entries(folder):
    return {path.name for path in folder.rglob("*-cache")}


@pytest.mark.slow
def test_second_process_reuses_compiled_programs(tmp_path):
    folder = tmp_path / "cache"
    used = start(folder, "run")
    assert used.startswith(str(folder / "xla"))
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder, *folder.glob("**/")))
    first = entries(folder)
    assert any("jit_chunk" in name for name in first)
    start(folder, "run")
    new = entries(folder) - first
    # A program near the smallest cached compilation time may be added later.
    assert not any("jit_chunk" in name or "jit_one" in name for name in new)


def test_user_compilation_cache_takes_precedence(tmp_path):
    chosen = str(tmp_path / "chosen")
    assert start(tmp_path / "cache", JAX_COMPILATION_CACHE_DIR=chosen) == chosen
    assert not (tmp_path / "cache").exists()


def test_unusable_cache_folder_is_ignored(tmp_path):
    (tmp_path / "cache").write_text("")
    assert start(tmp_path / "cache") == "None"
