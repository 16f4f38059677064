"""Atomic writing, checksummed archives, and escape functions for foreign text."""

import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from fedjax_het import ConfigError
from fedjax_het.utils import io
from fedjax_het.utils.io import (
    DamagedFileError,
    make_output_directory,
    read_npz,
    remove_stale_files,
    write_atomically,
    write_npz,
)
from fedjax_het.utils.memory_maps import is_memory_mapped
from fedjax_het.utils.text import escape_html, escape_latex, escape_markdown, to_one_line

# --- writing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_write_atomically_respects_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "file", lambda file: file.write(b"x"))
        write_atomically(tmp_path / "own", lambda file: file.write(b"x"), private=True)
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o600


def test_failed_write_keeps_old_file(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, lambda file: file.write(b"old"))

    def fail(file):
        file.write(b"new")
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise ValueError("a writer's own error on its way out") from error

    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_write_atomically_raises_system_errors(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / ("n" * 300), tmp_path / "file" / "file"):
        with pytest.raises(OSError):
            write_atomically(path, lambda file: file.write(b"x"))
    longest = tmp_path / "new" / "folder" / ("n" * 255)
    write_atomically(longest, lambda file: file.write(b"x"))
    assert longest.read_bytes() == b"x"


@pytest.fixture
def dead_pid():
    """Return the id of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_remove_stale_files(tmp_path, dead_pid):
    def temporary(host, pid, age=0.0):
        path = tmp_path / f".file-{host}-{pid}-0123abcd.tmp"
        path.write_text("")
        os.utime(path, (time.time() - age,) * 2)
        return path

    here, day = io._get_host_id(), io.STALE_SECONDS
    dead, alive = temporary(here, dead_pid), temporary(here, os.getpid(), 2 * day)
    elsewhere, old = temporary("other", dead_pid, day / 2), temporary("other", 1, 1.1 * day)
    former = tmp_path / ".checkpoint.npz-ab12cd_4.tmp"  # name of former versions
    strange = tmp_path / ".editor.tmp"
    for path in (former, strange):
        path.write_text("")
        os.utime(path, (0, 0))
    remove_stale_files(tmp_path)
    assert {path for path in tmp_path.iterdir()} == {alive, elsewhere, strange}
    assert not dead.exists() and not old.exists()


def test_writes_remove_stale_files(tmp_path, dead_pid):
    left = tmp_path / f".file-{io._get_host_id()}-{dead_pid}-0123abcd.tmp"
    left.write_text("")
    write_atomically(tmp_path / "file", lambda file: file.write(b"x"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    left.write_text("")
    make_output_directory(tmp_path)
    assert not left.exists()


@pytest.mark.parametrize("bad", ["n" * 300, "a\0b", "file/below"])
def test_output_directory_that_cannot_be_created(tmp_path, bad):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output_dir") as caught:
        make_output_directory(tmp_path / bad)
    assert "\n" not in str(caught.value)


def test_npz_checksum_finds_every_damage(tmp_path):
    path, arrays = tmp_path / "file.npz", {"a": np.arange(5), "b": np.float32(0.5)}
    write_npz(path, arrays, {})
    whole = path.read_bytes()
    actual, _ = read_npz(path)
    np.testing.assert_array_equal(actual["a"], arrays["a"])
    np.testing.assert_array_equal(np.load(path)["a"], arrays["a"])  # NumPy reads it, too
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(DamagedFileError):
            read_npz(path)
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place])
        with pytest.raises(DamagedFileError):
            read_npz(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(DamagedFileError):
        read_npz(path)


def unescape_markdown(text):
    return re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", text)


# --- foreign text ----------------------------------------------------------------------------

FOREIGN = (
    "a|b\n# <script>alert(1)</script> [x](http://e.vil) **b** `c` "
    "\x1b[31mred\x07 \u202egnp $\\input{x}$"
)


def test_to_one_line_is_printable():
    text = to_one_line(FOREIGN + "\ud800\u2028end\r\n")
    assert text.isprintable() and "\x1b" not in text and "\n" not in text
    assert text.startswith("a|b # <script>") and text.endswith("end ")
    assert to_one_line("fashion_mnist, α 0.1 ± 2 †") == "fashion_mnist, α 0.1 ± 2 †"
    assert to_one_line("wide\xa0space") == "wide space"


def test_escape_markdown():
    text = escape_markdown(FOREIGN)
    assert "\n" not in text and not re.search(r"(?<!\\)[|`*$]|(?<!\\)<|(?<!\\)\]\(|http:", text)
    assert unescape_markdown(text) == to_one_line(FOREIGN)
    for start in ("# x", "- x", "1. x", "> x", "+ x", "---", "==="):
        assert re.match(r"\\|\d\\", escape_markdown(start))
        assert unescape_markdown(escape_markdown(start)) == start
    for plain in (
        "fashion_mnist",
        "64.00 ± 2.83",
        "<0.001",
        "a & b",
        "+1.50",
        "fed[bold]avg",
        "#2",
    ):
        assert escape_markdown(plain) == plain
    assert escape_markdown("_emphasis_ &lt; www.e.vil") == r"\_emphasis\_ \&lt; www\.e.vil"


def test_escape_latex_and_html():
    assert "\n" not in escape_latex("a\n\nb") and escape_latex("\x1b[0m") == "?{[}0m"
    assert escape_latex(r"[*]a_b%c&d#e$f{g}h~i^j\k<l>m±n−o†p—") == (
        r"{[}{*}]a\_b\%c\&d\#e\$f\{g\}h\textasciitilde{}i\textasciicircum{}j\textbackslash{}k$<$l$>$m"
        r"$\pm$n$-$o$^\dagger$p---"
    )
    assert "<" not in escape_html(FOREIGN) and "\x1b" not in escape_html(FOREIGN)
    assert escape_html('"a" & b') == "&quot;a&quot; &amp; b"


def test_files_are_written_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_atomically("~/new/notes.txt", lambda file: file.write(b"done"))
    assert (tmp_path / "new" / "notes.txt").read_bytes() == b"done"


def test_large_arrays_are_mapped_into_memory(tmp_path):
    path, large = tmp_path / "a.npz", np.arange(60.0).reshape(20, 3)
    np.save(tmp_path / "file.npy", large)
    in_file = np.load(tmp_path / "file.npy", mmap_mode="r")[:, 1:]
    arrays = {"small": np.arange(3), "large": large, "columns": large.T, "in_file": in_file}
    write_npz(path, arrays, {"round": 7})
    loaded, meta = read_npz(path, is_mapped=lambda name, num_bytes: num_bytes > 250)
    assert meta == {"round": 7} and loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)
        assert is_memory_mapped(loaded[name]) == (name != "small")
    with np.load(path) as plain:
        np.testing.assert_array_equal(plain["in_file"], in_file)
    content = bytearray(path.read_bytes())
    content[content.index(large[7].tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match="checksum"):
        read_npz(path, is_mapped=lambda name, num_bytes: True)
