"""Foreign results and data sets are shown unchanged; reports survive read-only folders."""

import json
import logging
import re

import matplotlib as mpl
import numpy as np
import pytest
from support.fault_injection import simulate_full_disk, simulate_read_only_folder
from support.markers import slow_case
from support.stored_results import write_result

from fedjax_het import Result, RunSpec, load_results
from fedjax_het.analysis import render, report
from fedjax_het.analysis.render import TableSection, TextTable, print_table, to_latex, to_markdown
from fedjax_het.analysis.report import write_report
from fedjax_het.cli import main
from fedjax_het.papers.report import escape_control_characters, markdown_to_html
from fedjax_het.runtime.result_display import format_run_label
from fedjax_het.utils.console import log_to_stderr
from fedjax_het.utils.text import to_one_line

EVIL = (
    "x|y\n# <b>[l](http://e.vil)</b> [red]r[/blue] "
    "\x1b]0;t\x07\x1b[31m $\\frac{1}{$ 漢字 \\input{x}"
)
MARKS = re.compile(r"(?<!\\)<b|(?<!\\)\]\(|http:|\x1b|\x07")


def save(folder, *, seed=0, spec=None, **summary):
    """Write a result with a manually changed record."""
    own = RunSpec("fedavg", model="mlp", alpha=0.1, rounds=3, seed=seed)
    summary = {"device": "cpu", **summary}
    curve, renamed = np.linspace(0.2, 0.5, 3), spec or {"seed": seed}
    return write_result(folder, own, curve, renamed=renamed, **summary)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    save(folder)
    save(folder, seed=1, spec={"algorithm": EVIL, "hp": {EVIL: 0.5}, "options": {EVIL: EVIL}})
    save(folder, seed=2, spec={"dataset": EVIL}, dataset_note=EVIL, device=EVIL)
    save(folder, seed=3, spec={"partition": EVIL, "partition_options": {EVIL: [EVIL]}})
    return folder


def test_report_escapes_foreign_text(folder, capsys):
    assert main(["report", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and "[red]r[/blue]" in out
    markdown = (folder / "overview.md").read_text()
    assert not MARKS.search(markdown)
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert sum(line.startswith("#") for line in markdown.splitlines()) == 1
    latex = (folder / "overview.tex").read_text()
    assert "\\input" not in latex and "\\frac" not in latex and "\x1b" not in latex
    assert latex.count("\\begin{table}") == 1
    page = markdown_to_html(markdown)
    assert "<b>" not in page and "<td>x|y #" in page
    for picture in folder.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert (folder / "learning_curves.png").exists()


def test_titles_escape_foreign_text(capsys):
    section = TableSection(rows=({EVIL: EVIL, "n": "1"},), title=EVIL, labels={EVIL: EVIL})
    table = TextTable(EVIL, (EVIL,), (section,), (EVIL,))
    print_table(table)
    out = capsys.readouterr().out
    assert out.count("[red]r[/blue]") == 5 and "\x1b" not in out
    assert not MARKS.search(to_markdown(table)) and "\\input" not in to_latex(table)
    assert render.escape_latex(EVIL).count("\n") == 0


@pytest.mark.slow
def test_report_survives_missing_font(folder, caplog):
    with mpl.rc_context({"font.family": "A Font That Is Elsewhere"}):
        assert (folder / "learning_curves.png") in write_report(folder).paths
    save(folder, seed=4, spec={"server_options": {"font": "/nowhere/face.ttf"}})
    save(folder, seed=5, spec={"server_data": "glyphs", "server_options": {"font": 3}})
    assert len(load_results(folder)) == 6
    write_report(folder)


def test_unreadable_result_is_one_warning(folder):
    spoilt = save(folder, seed=4)
    spoilt.write_text('{"spec": ' + "[" * 100_000)
    with pytest.warns(UserWarning, match=spoilt.name) as warned:
        assert len(write_report(folder).paths) >= 4
    assert len(warned) == 1 and "\n" not in str(warned[0].message)


@pytest.mark.filterwarnings("default")
def test_report_names_damaged_and_renamed_results(tmp_path, capsys):
    path = write_result(tmp_path, RunSpec("fedavg", model="mlp", alpha=0.1), np.array([0.5]))
    for suffix in (".json", ".npz"):
        (tmp_path / f"mine{suffix}").write_bytes(path.with_suffix(suffix).read_bytes())
    renamed = "left out: mine.json is not named by its digest"
    assert main(["report", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(renamed)
    path.write_text("{}")
    assert main(["report", str(tmp_path)]) == 2
    first, second, last = capsys.readouterr().err.splitlines()
    assert first.startswith(f"left out: result '{path}' is damaged") and second.startswith(renamed)
    assert last.endswith("expected a folder with results of runs (1 result, damaged)")


def test_report_survives_failed_figure(folder, monkeypatch):
    def fail(*args, **settings):
        raise KeyError("what a stranger's runs lack")

    monkeypatch.setattr(report, "plot_learning_curves", fail)
    with pytest.warns(UserWarning, match=r"learning_curves.png is left out: KeyError"):
        names = [path.name for path in write_report(folder).paths]
    assert names[:3] == ["overview.md", "overview.tex", "overview.csv"]
    assert "learning_curves.png" not in names


def test_load_results_ignores_foreign_summary_keys(folder):
    path = save(folder, seed=4, digest="../../x", settings="y")
    assert path.stem in set(load_results(folder)["digest"])


def full(monkeypatch, folder):
    return simulate_full_disk(monkeypatch, folder, 99)


@pytest.mark.parametrize("fault", [slow_case(simulate_read_only_folder), full])
def test_report_on_read_only_folder(fault, folder, tmp_path, monkeypatch, capsys):
    with fault(monkeypatch, folder):
        assert main(["report", str(folder)]) == 0
        printed = capsys.readouterr()
        assert "FedAvg" in printed.out and "Written to" not in printed.out
        (line,) = printed.err.splitlines()
        assert "overview.md" in line and "--output-dir" in line and "\n" not in line
        elsewhere = tmp_path / "elsewhere"
        assert main(["report", str(folder), "--output-dir", str(elsewhere)]) == 0
    assert (elsewhere / "overview.md").exists() and not (folder / "overview.md").exists()


def test_status_and_log_are_one_line(capfd):
    spec = RunSpec.from_dict({"dataset": EVIL, "model": "mlp", "alpha": 0.1})
    label = format_run_label(spec)
    assert label == to_one_line(label) and "\x1b" not in label
    assert escape_control_characters(f"a\x1b[2J\n{EVIL}").count("\n") == 2
    log = logging.getLogger("fedjax_het")
    before, log.handlers = log.handlers, []
    try:
        log_to_stderr(logging.WARNING)
        log.warning("note: %s", EVIL)
    finally:
        log.handlers = before
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "\x1b" not in said


# --- the command line on a full disk -----------------------------------------------------------

WORDS = ["--model", "mlp", "--rounds", "2", "--num-clients", "4", "--participation", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "sweep"])
def test_run_on_full_disk_reports_rescue(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "home").mkdir()
    monkeypatch.setattr(
        "fedjax_het.runtime.result_store._list_fallback_parents", lambda: [tmp_path / "home"]
    )
    folder = tmp_path / "full"
    with simulate_full_disk(monkeypatch, folder, 1000):
        assert main([command, *WORDS, "--output-dir", str(folder)]) == 2
    said = capsys.readouterr()
    assert "output_dir" in json.loads(said.out.splitlines()[-1]) or "final_accuracy" in said.out
    error = said.err.strip().splitlines()[-1]
    assert error.startswith("fedjax-het: output_dir") and str(tmp_path / "home") in error
    (kept,) = (tmp_path / "home").glob("*/????????????????.json")
    assert Result.load(kept).summary["rounds"] == 2


@pytest.mark.slow
def test_run_survives_failed_figures(tmp_path, monkeypatch, capsys):
    def fail(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedjax_het.analysis.figures.run_figures.write_run_figures", fail)
    assert main(["run", "--quiet", *WORDS, "--output-dir", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "figures are not (No space left" in said.err and "Traceback" not in said.err
    assert json.loads(said.out.splitlines()[-1])["rounds"] == 2
    assert len(load_results(tmp_path)) == 1
