"""Output in encodings that lack characters, help without colors, and paths with a tilde."""

import ast
import contextlib
import io
import sys
from pathlib import Path

import jax
import pytest
from support.small_runs import run_sweep

import fedjax_het
from fedjax_het import RunSpec, _startup, load_image_folder, load_model, simulate
from fedjax_het.analysis import print_table
from fedjax_het.analysis.figures.style import write_animation, write_figure
from fedjax_het.analysis.render import TableSection, TextTable
from fedjax_het.cli import COMMANDS, main
from fedjax_het.data import Partition
from fedjax_het.data.array_cache import dataset_cache_folder
from fedjax_het.data.glyphs import open_font
from fedjax_het.data.sources.tfds import resolve_data_root
from fedjax_het.runtime.result_store import load_result, load_results
from fedjax_het.utils import console
from fedjax_het.utils.env import (
    CACHE_DIR,
    CINIC10_DIR,
    TFDS_DATA_DIR,
    XDG_CACHE_HOME,
    get_cache_dir,
    get_value,
)

SMALL = ["--dataset", "digits", "--model", "mlp", "--num-clients", "4", "--rounds", "1"]


@contextlib.contextmanager
def ascii_stdout():
    """Replace stdout by a stream of strict ASCII, as with `PYTHONIOENCODING=ascii`."""
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, "ascii", write_through=True)
    with contextlib.redirect_stdout(stream):
        yield buffer
        assert stream.errors == "strict"
    stream.detach()  # the buffer stays open


@pytest.mark.parametrize(
    "words",
    [
        ["run", *SMALL],
        ["sweep", *SMALL, "--alpha", "0.1", "1", "--seeds", "0", "1"],
        ["list"],
        ["show", "fedprox", "dirichlet", "mlp", "digits"],
        ["devices"],
        ["table", "--list"],
        ["table", "fedaf.table1", "--preset", "short", "--show"],
        *([name, "--help"] for name in COMMANDS),
        ["--help"],
    ],
    ids=" ".join,
)
def test_commands_under_ascii(words, tmp_path):
    folder = tmp_path / "Kätzchen"
    folder.mkdir()
    if words[-1] != "--help" and {"run", "sweep", "--show"} & {*words}:
        words = [*words, "--output-dir", str(folder)]
    with ascii_stdout() as output:
        try:
            status = main(words)
        except SystemExit as error:
            status = error.code
    assert status == 0 and output.getvalue().isascii() and output.getvalue()
    assert b"\\u25" not in output.getvalue()  # escapes of boxes
    if words[0] == "sweep" and words[-1] != "--help":
        with ascii_stdout() as output:
            assert main(["report", str(folder)]) == 0
        text = output.getvalue().decode()
        assert "K\\xe4tzchen" in text and "+-" in text


def test_print_table_under_ascii():
    table = TextTable("狗", ["Method"], [TableSection([{"Method": "×", "Accuracy": "1 ± 2 †"}])])
    with ascii_stdout() as output:
        print_table(table)
        console.print_status("狗")  # of a sweep in Python
    lines = output.getvalue().decode().split("\n")
    assert lines[0] == "\\u72d7" and lines[3].split() == ["x", "1", "+-", "2", "+"]
    assert lines[-2] == "\\u72d7"


def test_streams_keep_their_error_handler():
    accept = console.accept_all_characters
    with ascii_stdout() as output, accept(), accept():
        print("\ud800 ")
    assert output.getvalue() == b"\\ud800 \n"


def test_text_files_have_an_encoding():
    for path in Path(fedjax_het.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call):
                continue
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            is_text = name == "read_text" or (name == "write_text" and len(call.args) == 1)
            if isinstance(call.func, ast.Name) and name == "open":
                mode = ast.literal_eval(call.args[1]) if len(call.args) > 1 else "r"
                is_text = "b" not in mode
            has_encoding = "encoding" in {keyword.arg for keyword in call.keywords}
            assert has_encoding or not is_text, f"{path}, line {call.lineno}"


@pytest.mark.parametrize("command", ["run", "export", ""])
def test_no_color_in_help(command, monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for value, has_color in (("1", False), ("", True)):
        monkeypatch.setenv("NO_COLOR", value)
        with pytest.raises(SystemExit):
            main([*filter(None, [command]), "--help"])
        assert ("\x1b[" in capsys.readouterr().out) == has_color


def test_export_help_has_own_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "protocol" not in text and text.count("not written") == 2


# --- paths


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder, and another current folder."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    yield tmp_path / "home"
    assert not list((tmp_path / "work").iterdir())


def test_tilde_in_paths_of_functions(home):
    from matplotlib.figure import Figure

    spec = RunSpec("fedavg", "digits", model="mlp", num_clients=4, rounds=1)
    result = simulate(spec, output_dir="~/run")
    assert len(load_results("~/run")) == 1
    assert load_result("~/run", result.digest()).digest() == result.digest()
    result.save("~/copy/deep")
    model = load_model(result.save_model("~/models/new/a.msgpack"))
    model.save("~/models/b.msgpack")
    result.partition.save("~/partitions/new/p.npz")
    assert Partition.load("~/partitions/new/p.npz").digest() == result.partition.digest()
    start = {"init_from": "~/models/b.msgpack"}
    assert simulate(RunSpec(**{**spec.to_dict(), **start})).spec.init_from == start["init_from"]
    write_figure("~/figures/new/f.png", Figure(figsize=(1, 1)), formats=["svg"])
    write_animation("~/figures/a.gif", [0], lambda _: Figure(figsize=(1, 1)))
    assert (home / "figures/new/f.svg").exists() and (home / "figures/a.gif").exists()
    assert run_sweep([spec], "~/sweep").results[0] is not None
    with pytest.raises(fedjax_het.ConfigError, match="home/images"):
        load_image_folder("~/images")
    with pytest.raises(fedjax_het.ConfigError, match=r"output_dir = '~nobody-here/x'"):
        simulate(spec, output_dir="~nobody-here/x")


def test_tilde_in_paths_of_commands(home, capsys):
    (home / "plugin.py").write_text("from fedjax_het import register_dataset\n")
    (home / "run.yaml").write_text("{dataset: digits, model: mlp, num_clients: 4, rounds: 1}")
    words = ["--import=~/plugin.py", "run", "--config=~/run.yaml", "--output-dir=~/run"]
    assert main(words) == 0
    (result,) = (home / "run").glob("*[0-9a-f].json")
    assert main(["report", "~/run", "--output-dir=~/report"]) == 0
    assert (home / "report/overview.md").exists()
    assert main(["export", f"~/run/{result.name}", "--model=~/new/m.msgpack"]) == 0
    assert (home / "new/m.msgpack").exists()
    (home / "sweep.yaml").write_text(
        "{dataset: digits, model: mlp, num_clients: 4, rounds: 1, output_dir: ~/sweep}"
    )
    assert main(["sweep", "--config=~/sweep.yaml"]) == 0 and (home / "sweep").is_dir()
    assert main(["table", "fedaf.table1", "--preset=short", "--show", "--output-dir=~/run"]) == 0
    capsys.readouterr()


def test_tilde_in_default_folders(home, monkeypatch):
    for variable in (CACHE_DIR, TFDS_DATA_DIR, XDG_CACHE_HOME):
        monkeypatch.delenv(variable.name, raising=False)
    assert resolve_data_root() == home / "tensorflow_datasets"
    assert resolve_data_root("~/data") == home / "data"
    assert dataset_cache_folder("~/cache") == home / "cache"
    assert get_cache_dir() == home / ".cache/fedjax_het"
    with pytest.raises(fedjax_het.ConfigError, match=r"home/font\.ttf"):
        open_font("~/font.ttf")
    previous_folder = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", "~/programs")
        _startup.enable_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == str(home / "programs")
    finally:
        jax.config.update("jax_compilation_cache_dir", previous_folder)


@pytest.mark.parametrize("variable", [CACHE_DIR, TFDS_DATA_DIR, CINIC10_DIR, XDG_CACHE_HOME])
def test_tilde_in_variables(variable, home, monkeypatch):
    monkeypatch.setenv(variable.name, "~/folder")
    assert get_value(variable) == home / "folder"


def test_long_lines_are_wrapped_on_a_terminal(capsys, monkeypatch):
    text = "methods\n  fedavg      average of the clients' models, weighted by examples"
    console.print_wrapped(text)
    assert capsys.readouterr().out == f"{text}\n"  # in a pipe
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    console.print_wrapped(text)
    indent = " " * 14
    lines = [f"{indent}models, weighted by", f"{indent}examples"]
    expected = ["methods", "  fedavg      average of the clients'", *lines]
    assert capsys.readouterr().out.splitlines() == expected
