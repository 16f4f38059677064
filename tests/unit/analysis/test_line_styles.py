"""How lines are told apart: colors, weights, names at their ends, small panels."""

import io
import itertools

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from fedjax_het.algorithms import METHODS
from fedjax_het.analysis import assign_method_colors, plot_learning_curves
from fedjax_het.analysis.figures.curves import Curve, CurveMetric, plot_curve_panels
from fedjax_het.analysis.figures.direct_labels import (
    LineLabel,
    label_line_ends,
    spread_positions,
    wrap_label,
)
from fedjax_het.analysis.figures.style import PALETTE, assign_distinct_colors, darken_for_text
from fedjax_het.utils.errors import ConfigError

# Of full color blindness, on linear RGB (Machado, Oliveira and Fernandes 2009).
SEEN = {
    "all": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def linear(color):
    rgb = np.array(to_rgb(color))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """CIE L*a*b* of linear sRGB, under D65."""
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = to_xyz @ np.clip(rgb, 0, 1)
    f = xyz / (0.9505, 1.0, 1.089)
    f = np.where(f > 0.008856, np.cbrt(f), 7.787 * f + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eyes", SEEN)
def test_palette_is_distinct_for_color_blindness(eyes):
    seen = [lab(SEEN[eyes] @ linear(color)) for color in PALETTE]
    gaps = [np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i]]
    assert min(gaps) > 11, min(gaps)


def test_palette_contrast_on_white():
    for color in PALETTE:
        assert np.linalg.norm(lab(linear(color)) - lab(np.ones(3))) > 30
        share = linear(darken_for_text(color)) @ (0.2126, 0.7152, 0.0722)
        assert 1.05 / (share + 0.05) >= 2.99  # the contrast that WCAG asks of large letters


@given(st.lists(st.sampled_from([*METHODS, "mine", "yours"]), min_size=1, max_size=8, unique=True))
def test_method_colors(methods):
    colors = assign_method_colors(methods)
    assert len(set(colors.values())) == len(methods)
    assert set(colors.values()) <= set(PALETTE)
    for name in methods:
        if name in METHODS and METHODS[name].color.upper() in PALETTE:
            assert colors[name] == METHODS[name].color.upper()


def test_variant_colors_are_distinct():
    lines = [("dynafed", "dynafed"), ("dynafed", "dynafed, real"), ("fedavg", "fedavg")]
    colors = assign_distinct_colors(lines)
    assert colors["dynafed"] == METHODS["dynafed"].color
    assert colors["fedavg"] == METHODS["fedavg"].color
    assert len(set(colors.values())) == 3


sizes = st.floats(0.01, 0.15)


@given(st.lists(st.tuples(st.floats(0, 1), sizes), min_size=1, max_size=6))
def test_spread_positions_keeps_order(things):
    wanted, size = map(list, zip(*things, strict=True))
    places = spread_positions(wanted, size)
    order = sorted(range(len(wanted)), key=lambda k: (wanted[k], k))
    for low, high in itertools.pairwise(order):
        assert places[high] - places[low] >= (size[low] + size[high]) / 2 - 1e-9
    assert min(p - s / 2 for p, s in zip(places, size, strict=True)) > -1e-9
    assert max(p + s / 2 for p, s in zip(places, size, strict=True)) < 1 + 1e-9


def test_spread_positions_by_hand():
    assert spread_positions([0.2, 0.8], [0.1, 0.1]) == [0.2, 0.8]
    np.testing.assert_allclose(spread_positions([0.5, 0.5], [0.1, 0.1]), [0.45, 0.55])
    np.testing.assert_allclose(spread_positions([1.0, 0.99], [0.1, 0.1]), [0.95, 0.85])
    np.testing.assert_allclose(spread_positions([0.5] * 3, [0.5] * 3), [0, 0.5, 1])  # too many


def test_wrap_label():
    assert wrap_label("local_lr 0.02, n_0 50") == "local_lr 0.02,\nn_0 50"
    assert wrap_label("fsl, gamma 0.35") == "fsl, gamma 0.35"
    assert wrap_label("one_very_long_name_of_a_method") == "one_very_long_name_of_a_method"


def curve(method, values, *, panel="data", label="", **others):
    """A row of `values` per seed."""
    runs = pd.DataFrame(np.array(values, float).T, index=1 + np.arange(len(values[0])))
    return Curve(panel, method, label or method, runs, **others)


def drawn(figure):
    figure.savefig(io.BytesIO(), format="png")


def own_lines(panel):
    return {line.get_label(): line for line in panel.lines if line.get_label()[0] != "_"}


def named(panel):
    return {text.get_text().replace("\n", " "): text for text in panel.texts}


def test_highlighted_methods_have_color():
    baselines = [name for name in METHODS if name != "dynafed"][:8]
    curves = [curve(m, [[10, 20 + k], [10, 22 + k]]) for k, m in enumerate(baselines)]
    own = curve("dynafed", [[10, 25], [12, 27]], reported=60.0)
    figure = plot_curve_panels([*curves, own], columns=1, highlight=["dynafed"])
    (panel,) = figure.axes
    lines = own_lines(panel)
    assert lines["dynafed"].get_color() == METHODS["dynafed"].color
    grays = {lines[m].get_color() for m in baselines}
    assert all(len({c[1:3], c[3:5], c[5:]}) == 1 for c in grays)
    assert all(lines[m].get_linewidth() < lines["dynafed"].get_linewidth() for m in baselines)
    assert len(panel.collections) == 1  # one band, of the line in color
    assert baselines[0] == "fedavg" and lines["fedavg"].get_linestyle() == "--"
    names = ["fedavg", baselines[-1], "dynafed"]  # FedAvg, and the best of the others
    assert list(named(panel)) == names
    assert figure.get_supxlabel().replace("\n", " ") == (
        "line: mean of 2 seeds; band: one standard deviation over seeds; ◂: reported final value; "
        f"gray: {', '.join(baselines[1:])}, the best of them named"
    )
    assert panel.get_ylim()[1] > 60  # there is room for what was reported
    drawn(figure)


@pytest.mark.parametrize(
    ("metric", "best", "word"),
    [("test_accuracy", -1, "best"), ("train_loss", 0, "best"), ("drift_cosine", -1, "highest")],
)
def test_labeled_gray_line_follows_direction(metric, best, word):
    baselines = [name for name in METHODS if name not in ("dynafed", "fedavg")][:8]
    curves = [curve(m, [[10, 20 + k]]) for k, m in enumerate(baselines)]
    curves.append(curve("dynafed", [[10, 40]]))
    style = CurveMetric(metric)
    figure = plot_curve_panels(curves, columns=1, metric=style, highlight=["dynafed"])
    assert set(named(figure.axes[0])) == {baselines[best], "dynafed"}
    note = figure.get_supxlabel().replace("\n", " ")
    assert note.endswith(f"the {word} of them named")


def test_few_gray_lines_are_labeled():
    curves = [curve(m, [[10, 20 + k]]) for k, m in enumerate(["fedavg", "fedprox", "dynafed"])]
    (panel,) = plot_curve_panels(curves, columns=1, highlight=["dynafed"]).axes
    assert list(named(panel)) == ["fedavg", "fedprox", "dynafed"]
    assert named(panel)["dynafed"].get_fontweight() == "bold"
    assert len({line.get_color() for line in own_lines(panel).values()}) == 3


def test_labels_are_beside_line_ends():
    curves = [curve("fedavg", [[10, 20]]), curve("moon", [[10, 50]]), curve("fedbn", [[1, 50.5]])]
    figure = plot_curve_panels(curves, columns=1)
    drawn(figure)
    (panel,) = figure.axes
    boxes = {name: text.get_window_extent() for name, text in named(panel).items()}
    ends = {name: panel.transData.transform((2, y))[1] for name, y in (("fedavg", 20),)}
    assert boxes["fedavg"].y0 < ends["fedavg"] < boxes["fedavg"].y1
    assert boxes["fedbn"].y0 >= boxes["moon"].y1 - 1
    assert all(box.x0 > panel.get_window_extent().x1 for box in boxes.values())
    assert all(box.x1 <= figure.bbox.x1 for box in boxes.values())


def test_many_methods_have_small_panels():
    methods = [*METHODS][:12]
    curves = [
        curve(m, [[10, 20 + k], [12, 24 + k]], panel=panel)
        for panel in ("a", "b")
        for k, m in enumerate(methods)
        if (panel, m) != ("b", methods[3])
    ]
    figure = plot_curve_panels(curves, columns=2)
    panels = [panel for panel in figure.axes if panel.get_visible()]
    assert len(panels) == 24
    titled = {panel.get_title(loc="left"): panel for panel in panels}
    assert set(titled) == {*methods, ""}
    for k, method in enumerate(methods):
        own, others = own_lines(titled[method]), titled[method].lines
        assert list(own) == [method]
        np.testing.assert_allclose(own[method].get_ydata(), [11, 22 + k])
        assert len(others) == 12  # and eleven behind it
        dashed = [line.get_color() for line in others if line.get_linestyle() == "--"]
        assert dashed == ([] if method == "fedavg" else ["#000000"])
        assert f"{22 + k:.1f}" in named(titled[method])
    beside = figure.axes[figure.axes.index(titled[methods[3]]) + 1]
    assert "not run" in named(beside) and not own_lines(beside)
    drawn(figure)


def test_highlight_requires_known_method():
    results = pd.DataFrame({"algorithm": ["fedavg"], "digest": ["a"], "settings": ["s"]})
    results = results.assign(
        dataset="digits", seed=0, finished="2026", diverged=False, final_accuracy=0.5
    )
    curves = pd.DataFrame({"digest": ["a"], "round": [1], "test_accuracy": [0.5]})
    with pytest.raises(ConfigError, match=r"highlight = 'fedavgg' .* did you mean 'fedavg'"):
        plot_learning_curves(results, curves, highlight=["fedavgg"])
    (panel,) = plot_learning_curves(results, curves, highlight=["fedavg"]).axes
    assert own_lines(panel)["FedAvg"].get_color() == METHODS["fedavg"].color


def test_figure_grows_by_long_and_by_many_names():
    def measure(names):
        figure = Figure(figsize=(4, 3), layout="constrained")
        panel = figure.subplots()
        for index in range(len(names)):
            panel.plot([0, 1], [0, index])
        label_line_ends(
            figure, {panel: [LineLabel(name, index, "k") for index, name in enumerate(names)]}
        )
        return figure.get_size_inches()

    width, height = measure(["a", "b"])
    assert measure(["one-word-of-a-name-" * 4, "b"])[0] > width
    assert measure(list(map(str, range(40))))[1] > height
