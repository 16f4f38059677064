"""The report of all tables and figures, as a page: its parts, and how it looks in a browser."""

import base64
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from fedjax_het.analysis.figures.style import write_figure
from fedjax_het.papers import archived_results as kept_results
from fedjax_het.papers.archived_results import (
    ArchivedResults,
    archives_of,
    find_archives,
    prepare_show_command,
)
from fedjax_het.papers.dynafed.tables import TABLE1
from fedjax_het.papers.fedaf.tables import TABLE1 as FEDAF_TABLE1
from fedjax_het.papers.fedamp.tables import TABLE2 as FEDAMP_TABLE2
from fedjax_het.papers.programs import ProgramModule, find_programs
from fedjax_het.papers.report import (
    PaperItem,
    ProgramRecord,
    ReportEntry,
    describe_provenance,
    make_picture_view,
    markdown_to_html,
    render_html,
)
from fedjax_het.papers.table import TableArguments, TableRun, make_cells
from fedjax_het.runtime.result_store import list_run_files
from fedjax_het.utils.command_line import parse_arguments

# --- Chromium without a window, by its protocol

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Chromium reads commands from the file of number 3, and answers to that of 4.
PIPE_LAUNCHER = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for pipe, number in zip(pipes, (3, 4)):
    os.dup2(pipe, number)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def find_chromium():
    """Its command; None where there is none."""
    return next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)


@contextlib.contextmanager
def open_browser(profile):
    """A `Browser`; what it remembers is in the folder `profile`."""
    read_commands, commands = os.pipe()
    answers, write_answers = os.pipe()
    command = [find_chromium(), "--headless", "--no-sandbox", "--disable-gpu"]
    command += ["--remote-debugging-pipe", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        [sys.executable, "-c", PIPE_LAUNCHER, str(read_commands), str(write_answers), *command],
        pass_fds=(read_commands, write_answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_commands)
    os.close(write_answers)
    with open(commands, "wb", buffering=0) as sent, open(answers, "rb", buffering=0) as received:
        try:
            yield Browser(sent, received)
        finally:
            process.terminate()
            process.wait(30)


class Browser:
    """One page of it."""

    def __init__(self, commands, answers):
        self._commands, self._answers = commands, answers
        self._message_id, self._buffer, self._session = 0, b"", None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")

    def call(self, method, **params):
        """A command of the protocol: -> its result. RuntimeError where it has none."""
        self._message_id += 1
        message = {"id": self._message_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        while (answer := self._read_message()).get("id") != self._message_id:
            pass
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def open(self, path, *, width, height=900, scheme="light"):
        """A file, once its pictures are there."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        while self._read_message().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression):
        """What an expression of JavaScript is, or is in the end."""
        params = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        response = self.call("Runtime.evaluate", **params)
        if "exceptionDetails" in response:
            raise RuntimeError(response["exceptionDetails"])
        return response["result"].get("value")

    def screenshot(self, path, *, full_page=False):
        """As a PNG: of what is in view, or of the whole page."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=full_page)
        Path(path).write_bytes(base64.b64decode(picture["data"]))

    def _read_message(self):
        while b"\0" not in self._buffer:
            chunk = os.read(self._answers.fileno(), 1 << 20)
            if not chunk:
                raise RuntimeError("the browser has ended")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


# --- tests

ODD = 'a "quoted" <b>name</b> & more'
TABLE = """# FSL, a table: {odd}. Preset quick.

| Data | Method | Measured | Difference | Time |
| --- | --- | ---: | ---: | ---: |
| digits | fedavg | 65.15 ± 2.09 | −1,204.2 | 1.1 s |
| digits | **dynafed(synthetic='untrained', preset='code')** | **83.40 ± 3.94** | +3.1 | 12.0 s |
| digits | feddm | 9.50 | — | 8.0 s |

- Test accuracy in percent of `everything`, at some length so that the note goes over lines.
- p: <0.001.
"""


def drawing():
    figure = Figure(figsize=(9, 3))
    left, right = figure.subplots(1, 2)
    left.plot([1, 2, 3], [10, 20, 31.25], label="fedavg")
    left.plot([1, 2, 3], [10, 30, 61.5], label="dynafed")
    left.set(title="alpha 0.01", xlabel="round", ylabel="accuracy")
    left.legend()
    right.imshow(np.eye(3))
    right.set_title("weights")
    figure.suptitle("A figure")
    return figure


@pytest.fixture
def entries(tmp_path):
    """One with a table and a picture beside kept ones, one that failed, one that is not made."""
    (tmp_path / "table.md").write_text(TABLE.format(odd=ODD))
    write_figure(tmp_path / "curves.png", drawing())
    Image.new("RGB", (40, 20)).save(tmp_path / "plain.png")
    names = ("table.md", "curves.png", "plain.png")
    files = [str(tmp_path / name) for name in names]

    def item(stem):
        module = ProgramModule(f"fsl.{stem}", tmp_path / f"{stem}.py")
        module.path.write_text(f'"""FSL\'s {stem}: {ODD}."""\n')
        return PaperItem("fsl", module)

    good = ProgramRecord(
        "fsl-table1", "v", 0, 61.0, files, "", "fedjax-het table fsl.table1", "jax 0"
    )
    bad = ProgramRecord("fsl-fig1", "v", 1, 2.0, [], f"Traceback {'long ' * 60}\n{ODD}\x1b[2J")
    kept = ArchivedResults("fsl-table1", "fsl/results/fig1-cpu", "fsl/fig1.py", ("--preset", "cpu"))
    shown = ProgramRecord(kept.name, "v", 0, 3.0, files, "", kept.show_command)
    return [
        ReportEntry(item("table1"), good, [(kept, shown)]),
        ReportEntry(item("fig1"), bad),
        ReportEntry(item("fig2")),
    ]


def render_page(entries):
    kept, record = entries[0].archives[0]
    study = ArchivedResults("fsl", kept.folder, "fedaf/privacy.py")
    return render_html(
        "Tables & figures",
        entries,
        {"fsl": [(study, record)]},
        command="a command",
        provenance="a machine",
    )


class Elements(HTMLParser):
    """All elements, with their attributes and those that they are in."""

    VOID = ("meta", "img", "link", "br", "source")

    def __init__(self, text):
        super().__init__()
        self.found, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs), [name for name, _ in self.open]))
        if tag not in self.VOID:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open[-1][0] == tag, (tag, self.open)
        self.open.pop()

    def all(self, tag):
        return [attrs for name, attrs, _ in self.found if name == tag]


def test_page_is_self_contained(entries):
    text = render_page(entries)
    elements = Elements(text)
    assert elements.open == []
    ids = [attrs["id"] for _, attrs, _ in elements.found if "id" in attrs]
    assert len(ids) == len(set(ids)) and {"fsl-table1", "fsl-fig1", "fsl-fig2", "contents"} <= {
        *ids
    }
    links = [attrs["href"] for attrs in elements.all("a")]
    assert links and all(link[0] == "#" and link[1:] in ids for link in links)
    assert {f"#{name}" for name in ids} <= {*links}  # every part is in the contents
    assert not re.search(r"https?:|@import|url\(|<link|src=\"(?!data:)", text)
    (viewport,) = (each for each in elements.all("meta") if each.get("name") == "viewport")
    assert "width=device-width" in viewport["content"]
    assert "prefers-color-scheme:dark" in text and "img{max-width:100%" in text
    assert "\x1b" not in text and "<b>name" not in text


def test_page_embeds_pictures(entries):
    elements = Elements(render_page(entries))
    pictures = elements.all("img")
    assert len(pictures) == 3 * 2
    for picture in pictures:
        kind, _, data = picture["src"].partition(";base64,")
        assert kind == "data:image/png"
        Image.open(io.BytesIO(base64.b64decode(data))).verify()
    drawn, plain = pictures[:2]
    assert "Picture curves." in drawn["alt"] and "Picture plain." in plain["alt"]
    assert "accuracy against round." in render_page(entries)  # its caption
    assert drawn["class"] == "wide"  # of which a phone shows a part, so that it can be read


def on_the_page(path):
    return base64.b64decode(make_picture_view(path, "seen").source.partition(";base64,")[2])


def test_page_picture_is_small(tmp_path):
    path = write_figure(tmp_path / "a.png", drawing())
    shown = on_the_page(path)
    assert len(shown) < 0.6 * path.stat().st_size
    before, after = (
        np.asarray(Image.open(each).convert("RGB"), float) for each in (path, io.BytesIO(shown))
    )
    assert before.shape == after.shape and np.abs(before - after).mean() < 0.5
    assert np.quantile(np.abs(before - after), 0.999) < 20
    write_figure(path, Figure())  # drawn again: the page has the new one
    assert on_the_page(path) != shown


def test_page_keeps_transparent_and_invalid_files(tmp_path):
    clear = np.zeros((8, 8, 4), np.uint8)
    Image.fromarray(clear).save(tmp_path / "clear.png")
    (tmp_path / "none.png").write_bytes(b"no picture")
    for name in ("clear.png", "none.png"):
        assert on_the_page(tmp_path / name) == (tmp_path / name).read_bytes()


def test_page_tables(entries):
    elements = Elements(render_page(entries))
    tables = [within for name, _, within in elements.found if name == "table"]
    assert len(tables) == 3 and all(within[-1] == "div" for within in tables)
    assert all(head["aria-sort"] == "none" for head in elements.all("th"))
    assert len(elements.all("th")) == len(elements.all("button")) == 3 * 4
    html = markdown_to_html(TABLE.format(odd="x"))
    assert html.count("<li>") == 2 and "<p>-" not in html and "--:" not in html
    assert '<td class="n"><strong>83.40 ± 3.94</strong></td>' in html and "<td>fedavg</td>" in html
    assert "<span>Data: digits</span>" in html and "<td>digits</td>" not in html
    assert "<h4>FSL, a table: x. Preset quick.</h4>" in html


def test_page_omits_empty_columns():
    rows = "".join(f"| x | — | {number} |\n" for number in range(3))
    html = markdown_to_html(f"| a | b | c |\n| - | - | - |\n{rows}")
    assert "<span>a: x</span>" in html and "b:" not in html and ">b<" not in html


def test_archives_belong_to_programs(tmp_path):
    kept = find_archives()
    names = [each.name for each in kept]
    assert len(names) == len(set(names)) > 5
    programs = find_programs()
    for each in kept:
        paper, _, stem = each.owner.partition("-")
        assert not stem or stem in programs or f"{paper}.{stem}" in programs
        assert each in archives_of(each.owner)
    titles = {each.folder.rpartition("/")[2]: each.title for each in kept}
    assert titles["table5-mlp"] == "Kept results: table5-mlp"  # below the table's title
    assert titles["across-cpu"].startswith("Comparison across papers: ")
    (table5,) = archives_of("dynafed-table5")
    assert table5.show_command == (
        "python experiments/dynafed/table5.py --models mlp --show "
        "--output-dir experiments/dynafed/results/table5-mlp"
    )
    (figure5,) = archives_of("dynafed-fig5")  # two tables of one program
    assert figure5.program == "dynafed/fig5.py" and figure5.source == table5.source
    words = prepare_show_command(table5, tmp_path / "copy")
    assert str(tmp_path / "copy") in words and len(list_run_files(tmp_path / "copy")) > 100
    assert not list((tmp_path / "copy").glob("*.md"))
    (table7,) = archives_of("fedaf-table7")  # which has no runs: it is there as it was drawn
    assert prepare_show_command(table7, tmp_path / "drawn") is None
    assert [path.name for path in (tmp_path / "drawn").iterdir()] == ["table.md"]
    there = {path.parent for path in kept_results.EXPERIMENTS_FOLDER.glob("**/results/*/*.md")}
    assert there == {each.source for each in kept}


@pytest.mark.parametrize(
    ("folder", "stem", "declaration", "num_runs", "num_cells"),
    [
        ("dynafed/results/table1-width16", "table1", TABLE1, 4, 4),
        ("fedaf/results/table1-cpu", "table1", FEDAF_TABLE1, 5, 13),
        ("fedamp/results/tables-cpu", "table2", FEDAMP_TABLE2, 30, 12),  # without diverged runs
    ],
)
def test_command_of_archive_finds_runs(folder, stem, declaration, num_runs, num_cells):
    """The runs of these folders have more settings than a preset's."""
    archives = [each for each in find_archives() if each.folder == folder]
    (archive,) = (each for each in archives if Path(each.program).stem == stem)
    assert shlex.split(archive.show_command)[2:-3] == [*archive.arguments]
    cells = make_cells(declaration, parse_arguments(TableArguments, archive.arguments))
    table = TableRun.from_directory(declaration, "cpu", cells, archive.source)
    assert (len([*table.iterate_results()]), len(cells)) == (num_runs, num_cells)


def test_provenance_of_runs(tmp_path):
    assert describe_provenance([str(tmp_path / "a.png")], "this one") == "this one"
    for place, version in enumerate(("0.5", "0.6")):
        text = f'{{"summary": {{"fedjax_het": "{version}", "jax": "0.10", "device": "cpu"}}}}'
        (tmp_path / f"{place:016}.json").write_text(text)
    said = describe_provenance([str(tmp_path / "a.png")], "9")
    assert said == "fedjax_het 0.5 and 0.6, jax 0.10, on cpu"


@pytest.mark.slow
@pytest.mark.skipif(
    find_chromium() is None, reason="no Chromium here: what needs none is tested above"
)
def test_page_in_browser(entries, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(render_page(entries))
    with open_browser(tmp_path / "profile") as shown:
        backgrounds = {}
        for scheme in ("light", "dark"):
            for width in (1280, 390):
                shown.open(path, width=width, scheme=scheme)
                assert shown.evaluate("innerWidth") == width
                assert shown.evaluate("document.documentElement.scrollWidth") <= width
                assert shown.evaluate(
                    "[...document.images].every(i => i.complete && i.naturalWidth > 0)"
                )
                assert shown.evaluate("document.images.length") == 6
                backgrounds[scheme] = shown.evaluate(
                    "getComputedStyle(document.body).backgroundColor"
                )
        assert backgrounds["light"] != backgrounds["dark"]
        # The last width: a table is wider than the phone, and scrolls within itself.
        assert shown.evaluate("document.querySelector('.view').scrollWidth") > 600
        wide = "(b => b.scrollWidth > b.clientWidth)(document.querySelector('.scroll'))"
        assert shown.evaluate(wide)
        column = "[...document.querySelectorAll('tbody')[0].rows].map(r => r.cells[1].textContent)"
        heads = "document.querySelectorAll('th')"
        for state, first in (("ascending", "9.50"), ("descending", "83"), ("none", "65.15")):
            shown.evaluate(f"{heads}[1].firstChild.click()")
            assert shown.evaluate(f"{heads}[1].getAttribute('aria-sort')") == state
            assert shown.evaluate(column)[0].startswith(first)
