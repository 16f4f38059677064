"""Names in figures: all are there, none is cut, none overlaps another, none is a box."""

import io
import itertools
import logging
import warnings

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib import font_manager
from matplotlib.ft2font import FT2Font
from matplotlib.text import Annotation

from fedjax_het import analysis
from fedjax_het.analysis.figures.client_accuracies import plot_critical_difference
from fedjax_het.analysis.figures.curves import Curve, plot_curve_panels
from fedjax_het.analysis.figures.style import compute_whole_box, make_panels, write_figure
from fedjax_het.analysis.figures.synthetic_images import plot_synthesis
from fedjax_het.condensation import SyntheticData
from fedjax_het.data import dataset_from_arrays, make_partition
from fedjax_het.utils import fonts
from fedjax_het.utils.text import escape_mathtext

LONG = "a rather long name of a class, as folders have them in practice"
LABELS = np.arange(60) % 4
OPTIONS = ["local_clip_norm 10", "local_weight_decay 0.0001"]


def draw(figure):
    """Draw a figure; a warning, such as of a layout that does not fit, is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(io.BytesIO(), format="png")


def boxes(texts):
    return [text.get_window_extent() for text in texts if text.get_text()]


def overlap(texts):
    return any(
        one.padded(-1).overlaps(other.padded(-1))
        for one, other in itertools.combinations(boxes(texts), 2)
    )


def make_curves(count, method="fedprox"):
    random = np.random.default_rng(count)
    return [
        Curve(
            "digits",
            method,
            ", ".join([method, *OPTIONS, f"prox_mu {index}"]),
            pd.DataFrame({"a": random.uniform(20, 90, 12)}, index=range(1, 13)),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("count", [1, 4, 8])
def test_labels_of_many_settings_do_not_overlap(count):
    figure = plot_curve_panels(make_curves(count), columns=1)
    draw(figure)
    texts = [text for text in figure.axes[0].texts if isinstance(text, Annotation)]
    assert len(texts) == count and not overlap(texts)
    figure_box = figure.bbox.padded(1)
    assert all(figure_box.contains(*corner) for box in boxes(texts) for corner in box.corners())


def test_sixteen_lines_have_titles():
    curves = make_curves(16)
    figure = plot_curve_panels(curves, columns=1)
    draw(figure)
    titles = [panel.title if panel.get_title() else panel._left_title for panel in figure.axes]
    names = {" ".join(title.get_text().split()) for title in titles if title.get_text()}
    assert names == {curve.label for curve in curves} and not overlap(titles)


def test_sixteen_lines_against_a_setting_have_labels():
    settings = itertools.product((0.1, 0.001), (0.01, 0.1), (5.0, 10.0), (1.0, 2.0), (0.1, 1.0))
    columns = ["hp.prox_mu", "hp.local_lr", "hp.local_clip_norm", "hp.local_b1", "alpha"]
    results = pd.DataFrame(list(settings), columns=columns)
    results = results.assign(
        dataset="digits", algorithm="fedprox", seed=0, finished="2026", diverged=False
    )
    results["final_accuracy"] = np.random.default_rng(0).random(len(results))
    results["settings"] = results.index.astype(str)
    figure = analysis.plot_metric_vs_alpha(results)
    draw(figure)
    texts = figure.axes[0].texts
    assert len(texts) == 16 and not overlap(texts)


def test_titles_of_panels_do_not_overlap():
    titles = [f"fedprox, local_weight_decay {index}, prox_mu 0.001, alpha" for index in range(4)]
    figure, panels = make_panels(titles, columns=4, size=(2.6, 2.0), sharey="none")
    draw(figure)
    assert not overlap([panel.title for panel in panels.values()])


NAMES = (f"1 {LONG}", "Kätzchen", "$x_1$ & <b>%s</b>", "x" * 60)


def draw_partition(names):
    partition = make_partition("iid", LABELS, 4, num_clients=3, seed=0)
    return analysis.plot_partition(partition, LABELS, 4, class_names=names, title=LONG * 2)


def draw_server(names):
    images = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 1), np.uint8)
    data = dataset_from_arrays(images, LABELS, images[:8], LABELS[:8], class_names=names)
    return analysis.plot_server_examples(data, images[:8], LABELS[:8])


FIGURES = {
    "partition": draw_partition,
    "server": draw_server,
    "condensed": lambda names: analysis.plot_condensed(
        np.random.default_rng(0).random((4, 1, 8, 8, 1)), [0] * 4, range(4), class_names=names
    ),
    "synthesis": lambda names: plot_synthesis(
        {0: SyntheticData(np.random.default_rng(0).random((4, 8, 8, 1)), 5 * np.eye(4), 0.0)},
        class_names=names,
    ),
    "clients": lambda names: analysis.plot_client_accuracies(
        {LONG: {name: np.random.default_rng(0).random(9) for name in names}}
    ),
    "ranks": lambda names: plot_critical_difference(
        names, np.random.default_rng(0).random((9, 4)), LONG
    ),
    "collaboration": lambda names: analysis.plot_collaboration(np.eye(3), titles=names[:1]),
}


@pytest.mark.parametrize("kind", FIGURES)
def test_long_names_are_whole(kind, tmp_path):
    figure = FIGURES[kind](NAMES)
    path = write_figure(tmp_path / "figure.png", figure, dpi=100)
    assert_border_is_white(path)
    text = " ".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))
    shown = "".join(text.replace("\\$", "$").split())
    expected = NAMES[:1] if kind == "collaboration" else NAMES
    assert all("".join(name.split()) in shown for name in expected)
    draw(figure)


def assert_border_is_white(path):
    pixels = matplotlib.image.imread(path)[..., :3]
    for border in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        assert (border > 0.99).all()


def test_figures_that_fit_keep_their_size():
    assert compute_whole_box(plot_curve_panels(make_curves(2), columns=1)) is None


# --- characters


@pytest.fixture
def rare_character():
    """A character of an installed font that the default font lacks, and this font's family."""
    default = {*FT2Font(font_manager.findfont("DejaVu Sans")).get_charmap()}
    (path,) = {
        f.fname for f in font_manager.fontManager.ttflist if f.fname.endswith("STIXGeneral.ttf")
    }
    codes = sorted({*FT2Font(path).get_charmap()} - default)
    return next(chr(code) for code in codes if chr(code).isprintable() and code > 0x2000)


@pytest.fixture(autouse=True)
def forget_fonts():
    fonts.find_font.cache_clear()
    yield
    fonts.find_font.cache_clear()


def test_installed_fonts_are_used(rare_character, tmp_path):
    family = fonts.find_font(rare_character)
    assert family and escape_mathtext(rare_character) == rare_character
    figure = FIGURES["clients"]([f"{rare_character} é", "b", "c", "d"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of missing glyphs
        figure.savefig(io.BytesIO(), format="png")
        write_figure(tmp_path / "f.png", figure, formats=["svg", "pdf"])
    label = figure.axes[0].get_xticklabels()[0]
    assert label.get_fontfamily()[-1] == family
    assert figure.axes[0].get_xticklabels()[1].get_fontfamily() == ["sans-serif"]


@pytest.mark.parametrize("kind", FIGURES)
def test_characters_without_a_font_are_code_points(kind, monkeypatch, caplog):
    monkeypatch.setattr(fonts, "_list_regular_fonts", lambda: [])
    with caplog.at_level(logging.INFO, "fedjax_het"):
        figure = FIGURES[kind](["狗", "\U0001f9a5 b", "é", "狗狗"])
        draw(figure)
    text = " ".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))
    assert "[U+72D7]" in text and "狗" not in text
    assert sum("72D7" in record.getMessage() for record in caplog.records) == 1


def test_unusable_fonts_are_skipped(monkeypatch, tmp_path):
    (tmp_path / "bad.ttf").write_bytes(b"no font")
    monkeypatch.setattr(fonts, "_list_regular_fonts", lambda: [(str(tmp_path / "bad.ttf"), "bad")])
    assert fonts.find_font("狗") is None
