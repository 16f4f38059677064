"""What long work says while it goes on: on terminals of several widths, in pipes, as JSON."""

import contextlib
import io
import itertools
import json
import logging
import re
import sys
import time
import warnings
from dataclasses import dataclass

import pytest
from rich.cells import cell_len
from rich.console import Console
from support.data import make_user_dataset
from support.small_runs import make_spec, run_spec

from fedjax_het import federation, sweep
from fedjax_het.cli import main
from fedjax_het.papers.programs import load_program, make_config_program
from fedjax_het.runtime import progress as told
from fedjax_het.runtime import work_queue
from fedjax_het.runtime.progress import Progress, show_panel, show_progress
from fedjax_het.utils import console
from fedjax_het.utils.env import has_color
from fedjax_het.utils.errors import ConfigError, run_with_exit_status

LONG = "[15/15] dynafed, fashion_mnist, mlp, alpha 0.04, fine_tune_lr 0.001, seed 1000"
AT = Progress("rounds", 33, 300, 3.214, 12345.0, 4000.0, 0.8123)
INNER = Progress("client synthesis", 660, 1000, 13.21, 0.0, 30.0)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(width):
    file = Terminal()
    settings = {"force_terminal": True, "color_system": None, "legacy_windows": False}
    return Console(file=file, width=width, height=24, **settings), file


def read_lines(file):
    """Return the lines that were written, without control sequences."""
    text = file.getvalue().replace("\x1b[2K", "\n")
    lines = re.sub(r"\x1b\[[?\d]*[a-zA-Z]|\r", "", text).splitlines()
    return [line for line in lines if line]


@pytest.mark.parametrize("width", [30, 60, 80, 120])
def test_panel_fits_the_terminal_and_shows_all(width):
    console, file = terminal(width)
    with show_panel(LONG, False, console) as show:
        assert "compiling" in read_lines(file)[-1]
        show(AT)
        show(INNER)
    lines = read_lines(file)
    assert max(map(cell_len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "[15/15] dynafed" in text and "seed 1000" in text
    for part in ("33/300", "81.2 %", "1:06:40", "3.21 rounds/s", "660/1000", "iterations/s"):
        assert part in text
    assert ("━" in text) == (width >= 80) and ("samples/s" in text) == (width >= 120)
    if width >= 80:  # each phase has one line
        assert [line.count("/s") for line in lines[-2:]] == [2 if width >= 120 else 1, 1]


def test_other_output_appears_above_the_panel(monkeypatch):
    screen, file = terminal(80)
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr(sys, "stdout", file)
    log = logging.getLogger("fedjax_het")
    before, log.handlers = log.handlers, []
    try:
        console.log_to_stderr(logging.WARNING)
        with show_panel(LONG, True, screen) as show:
            show(AT)
            log.warning("a note")
            print("a warning", file=sys.stderr)
            print("a line")
            show(AT)
    finally:
        log.handlers = before
    assert {"a note", "a warning", "a line"} <= set(read_lines(file))


def test_pipe_keeps_its_own_output(monkeypatch):
    console, file = terminal(80)
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr(sys, "stdout", pipe)
    with show_panel("a run", True, console):
        print("a line")
    assert pipe.getvalue() == "a line\n" and "a line" not in file.getvalue()


def test_interval_of_lines_grows(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    at = []
    with show_progress("a sweep's run", transient=True) as show:
        for now[0] in range(0, 40_000, 5):
            show(AT)
            if said := capsys.readouterr().err:
                assert said.count("\n") == 1 and "accuracy 81.2 %" in said and "33/300" in said
                at.append(now[0])
    gaps = [later - sooner for sooner, later in itertools.pairwise(at)]
    assert at[0] == told.MIN_LINE_SECONDS and gaps[0] == told.MIN_LINE_SECONDS
    assert gaps == sorted(gaps) and gaps[-1] == told.MAX_LINE_SECONDS
    with show_progress("a run alone") as show:
        show(AT)
        show(AT._replace(done=300))
    assert capsys.readouterr().err.count("\n") == 2


def test_json_progress(capsys):
    with console.preserve_output_mode():
        console.set_output_mode(as_json=True)
        with show_progress(LONG, transient=True) as show:
            show(AT._replace(accuracy=float("nan"), seconds_to_go=float("inf")))
            show(AT)  # within the second
            show(AT._replace(done=300))
        warnings.showwarning("odd", UserWarning, "file", 1)
        console.print_status("[1/2] done")
        with pytest.raises(ZeroDivisionError), show_progress(LONG):
            raise ZeroDivisionError
    first, last, warned, line = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["event"] == last["event"] == "progress" and first["title"] == LONG
    assert first["accuracy"] is first["seconds_to_go"] is None and last["accuracy"] == AT.accuracy
    assert (first["done"], last["done"], last["total"]) == (33, 300, 300)
    assert warned == {"event": "log", "level": "warning", "message": "UserWarning: odd"}
    assert line == {"event": "status", "message": "[1/2] done"}
    assert console.output_mode() == console.TEXT


def test_warning_is_a_plain_line(capsys):
    with console.preserve_output_mode():
        warnings.showwarning("odd", UserWarning, "file", 1)
        console.set_output_mode(quiet=True)
        warnings.showwarning("odd", UserWarning, "file", 1)
    assert capsys.readouterr().err == "odd\n"


def test_errors_appear_in_every_output_mode(capsys):
    message = "x: alpha = 0: expected more"
    error = json.dumps({"event": "error", "message": message})
    for mode, expected in (({}, message), ({"quiet": True}, message), ({"as_json": True}, error)):

        def fail(mode=mode):
            console.set_output_mode(**mode)
            raise ConfigError("alpha = 0: expected more")

        assert run_with_exit_status(fail, name="x", interrupt_message="") == 2
        assert capsys.readouterr().err == f"{expected}\n"


def test_simulate_shows_progress_on_a_terminal(monkeypatch, capsys):
    _, file = terminal(80)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", file)
    for progress in (None, False):
        run_spec(make_spec(rounds=3), progress=progress)
    assert file.getvalue() == ""
    run_spec(make_spec(rounds=3), progress="auto")
    text = " ".join(read_lines(file))
    assert "FedAvg on own data, protocol" in text and "rounds 3/3" in text and "compiling" in text
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stderr", dumb := Terminal())
    run_spec(make_spec(rounds=3), progress="auto")
    assert dumb.getvalue() == "" and capsys.readouterr().out == ""


def test_title_names_the_own_protocol_of_the_method(monkeypatch):
    _, file = terminal(80)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", file)
    run_spec(make_spec(rounds=1, protocol="own"), progress="auto")
    assert "FedAvg on own data, protocol standard" in " ".join(read_lines(file))


def test_loop_over_rounds_shows_no_panel_while_the_caller_works(monkeypatch):
    _, file = terminal(80)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", file)
    run = federation(make_spec(rounds=4), dataset=make_user_dataset())
    for status in run.rounds(every=2):
        assert sys.stderr is file and not told._panel_lock.locked()
        text = " ".join(read_lines(file))
        assert f"rounds {status.done}/4" in text and "FedAvg on own data, protocol" in text


@pytest.fixture
def outputs(monkeypatch):
    """The contents of all outputs of a notebook's cell, one after the other."""
    outputs, num_displays = [], []

    class Handle:
        def update(self, output, raw):
            outputs.append(output)

    def display(output, raw, display_id):
        num_displays.append(1)
        assert len(num_displays) == 1, "a second output"
        return Handle()

    for module in (told, work_queue):
        monkeypatch.setattr(module, "find_notebook_display", lambda: display)
    yield outputs
    assert num_displays == [1]


def test_notebook_shows_one_bar(outputs):
    with show_progress("<b>") as show:
        show(AT)
        show(AT)  # too soon for an update
    begin, update, end = [output["text/html"] for output in outputs]
    assert "<b>" not in begin and "compiling" in begin
    assert "value='33' max='300'" in update and "accuracy 81.2 %" in update
    assert "<progress" not in end and "rounds 33/300" in end


def test_transient_bar_leaves_nothing_in_a_notebook(outputs):
    with show_progress("<b>", transient=True):
        pass
    assert outputs[-1] == {"text/html": "", "text/plain": ""}


def test_sweep_shows_one_bar_in_a_notebook(outputs, capsys):
    sweep([make_spec(rounds=2, algorithm=name) for name in ("fedavg", "fedprox")], **SETTINGS)
    texts = [output["text/plain"] for output in outputs]
    assert texts[0].startswith("[1/2] fedavg") and "rounds 1/2" in " ".join(texts)
    assert "1 of 2 runs in " in " ".join(texts) and texts[-1].startswith("2 of 2 runs in ")
    assert "<progress" in outputs[0]["text/html"] and "<progress" not in outputs[-1]["text/html"]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("folder", [None, "results"])
def test_interrupt_says_how_to_continue(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as error:
        run_spec(make_spec(rounds=3), progress=interrupt, output_dir=folder)
    note = error.value.__notes__[-1]
    assert ("'results'" in note and "resume=True" in note) if folder else "no file" in note
    run = federation(make_spec(rounds=3), progress=interrupt, output_dir=folder, **SETTINGS)
    with pytest.raises(KeyboardInterrupt) as error:
        next(run.rounds())
    note = error.value.__notes__[-1]
    assert ("'results'" in note and "resume=True" in note) if folder else "no file" in note


@pytest.mark.parametrize(
    ("environment", "on_terminal", "in_pipe"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"CLICOLOR_FORCE": "1"}, True, True),
        ({"CLICOLOR": "0"}, False, False),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_environment_switches_colors(environment, on_terminal, in_pipe, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (has_color(Terminal()), has_color(io.StringIO())) == (on_terminal, in_pipe)


SETTINGS = {"dataset": make_user_dataset()}


def test_sweep_prints_only_its_status_lines(capsys, monkeypatch):
    monkeypatch.setattr(told, "MIN_LINE_SECONDS", 0.0)  # whatever were shown besides would be
    lines = []
    sweep([make_spec(rounds=2)], progress=lines.append, **SETTINGS)
    assert len(lines) == 1 and capsys.readouterr() == ("", "")
    for progress in (None, False):
        sweep([make_spec(rounds=2)], progress=progress, **SETTINGS)
        assert capsys.readouterr() == ("", "")
    for options in ({}, {"progress": "auto"}, {"progress": True}, {"progress": print}):
        sweep([make_spec(rounds=2)], **options, **SETTINGS)
        out, err = capsys.readouterr()
        assert out.startswith("[1/1] fedavg") and "rounds" in err
    with console.preserve_output_mode():
        console.set_output_mode(quiet=True)
        sweep([make_spec(rounds=2)], **SETTINGS)
    assert capsys.readouterr() == ("", "")


def test_simulate_calls_progress(capsys):
    seen = []
    run_spec(make_spec(rounds=3), progress=seen.append)
    assert [each.done for each in seen][-1] == 3 and capsys.readouterr() == ("", "")


WORDS = ["--dataset", "digits", "--model", "mlp", "--num-clients", "4", "--rounds", "2"]
TABLE = ["--methods", "fedavg", "--alphas", "0.1", "--seeds", "0", "--rounds", "2", "--output-dir"]


@pytest.mark.parametrize("command", ["run", "sweep", "table"])
def test_commands_with_quiet_and_json(command, tmp_path, capsys):
    if command == "run":
        words = ["run", *WORDS]
    elif command == "sweep":
        words = ["sweep", *WORDS, "--output-dir", str(tmp_path)]
    else:
        words = ["table", "table1", *TABLE, str(tmp_path)]
    assert main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    events = [json.loads(line)["event"] for line in err.splitlines()]
    assert "progress" in events and ("status" in events) == (command != "run")
    last = json.loads(out.splitlines()[-1])
    assert "final_accuracy" in last or last["runs"] == 1
    assert main([*words, "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and json.loads(out).keys() == last.keys()
    if command == "table":  # why a method does not do there what it does in its paper
        note, table = "at alpha 0.16 neither is above FedAvg.", tmp_path / "table.md"
        assert note not in table.read_text()  # of FedDM, which is no row of it yet
        with_feddm = ["table", "table1", "--show", "--methods", "feddm", *TABLE[1:]]
        assert main([*with_feddm, str(tmp_path)]) == 0
        assert note in table.read_text()


def test_other_programs_with_quiet_and_json(capsys):
    @dataclass
    class Arguments:
        count: int = 1

    def work(arguments):
        console.print_status(f"made {arguments.count}")
        return 0

    program = make_config_program(Arguments, work, "A figure.")
    assert program(["--count", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().err)["message"] == "made 3"
    assert program(["--quiet"]) == 0 and capsys.readouterr() == ("", "")
    assert program([]) == 0 and capsys.readouterr() == ("made 1\n", "")
    with contextlib.suppress(SystemExit):
        program(["--help"])
    said = capsys.readouterr().out
    assert "--json" in said and "--quiet" in said
    assert load_program("table1")(["--preset", "none", "--json"]) == 2
    assert json.loads(capsys.readouterr().err)["event"] == "error"
