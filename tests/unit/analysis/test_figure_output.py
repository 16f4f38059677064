"""Kinds of pictures, dark pages, animations."""

import io

import matplotlib.colors as mc
import numpy as np
import pytest
from fedjax_het.analysis.figures.animation import (
    animate_collaboration,
    animate_synthesis,
    select_evenly_spaced,
    select_samples_by_class,
    write_animation,
)
from matplotlib.figure import Figure
from PIL import Image

from fedjax_het.analysis.figures.style import (
    GRAYS,
    PALETTE,
    apply_dark_theme,
    to_dark_color,
    write_extra_formats,
    write_figure,
)
from fedjax_het.condensation.synthetic_data import SyntheticData
from fedjax_het.utils.errors import ConfigError


def figure(colour="black"):
    made = Figure(figsize=(3, 2))
    panel = made.subplots()
    panel.plot([0, 1], [0, 1], color=colour, lw=6)
    panel.fill_between([0, 1], [0.5, 0.5], color=PALETTE[0])
    panel.set_title("t")
    return made


def pixels(path):
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"), np.float64) / 255


def luminance(colour):
    rgb = np.array(mc.to_rgb(colour))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4) @ (
        0.2126,
        0.7152,
        0.0722,
    )


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_besides_the_png_there_is_what_was_asked_for(tmp_path):
    with write_extra_formats(["svg", "dark", "pdf"]):
        assert write_figure(tmp_path / "a.png", figure()) == tmp_path / "a.png"
    write_figure(tmp_path / "b.png", figure())
    names = {f"a{mark}.{kind}" for mark in ("", "-dark") for kind in ("png", "svg", "pdf")}
    assert {path.name for path in tmp_path.iterdir()} == names | {"b.png"}
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    assert b"<svg" in (tmp_path / "a-dark.svg").read_bytes()
    # The light one is drawn before, and the dark one is dark.
    np.testing.assert_array_equal(pixels(tmp_path / "a.png"), pixels(tmp_path / "b.png"))
    assert pixels(tmp_path / "a-dark.png")[0, 0].max() < 0.15


def test_another_kind_is_refused_by_its_name(tmp_path):
    with (
        pytest.raises(ConfigError, match=r"pictures = 'pfd' is unknown: did you mean 'pdf'"),
        write_extra_formats(["pfd"]),
    ):
        pass
    write_figure(tmp_path / "c.png", figure())
    assert len(list(tmp_path.iterdir())) == 1


def test_colours_are_seen_on_the_dark_page():
    paper = to_dark_color("white")
    assert contrast(to_dark_color("black"), paper) > 12
    for colour in PALETTE:
        assert contrast(to_dark_color(colour), paper) > 4.4, colour
        hue, own = (mc.rgb_to_hsv(mc.to_rgb(c))[0] for c in (to_dark_color(colour), colour))
        assert colour == "#000000" or abs(hue - own) < 0.02
    shades = [luminance(to_dark_color(grey)) for grey in ("black", *GRAYS, "white")]
    assert shades == sorted(shades, reverse=True)  # greys turn around
    assert mc.to_rgba(to_dark_color((0, 0, 0, 0.3)))[3] == pytest.approx(0.3, abs=0.01)
    assert to_dark_color("none") == "none"


def test_all_that_is_drawn_is_recoloured_but_images():
    made = Figure(figsize=(4, 2))
    left, right = made.subplots(1, 2)
    left.plot([0, 1], [0, 1], color="black", marker="o", markerfacecolor="white")
    left.scatter([0.5], [0.2], color="black")
    left.bar([0.2], [0.5], color="black")
    right.imshow(np.zeros((2, 2)), cmap="gray", vmin=-1, vmax=1)
    over = right.text(0, 0, "x", color="black")
    apply_dark_theme(made)
    made.savefig(io.BytesIO(), format="png")
    ink, paper = mc.to_rgba(to_dark_color("black")), mc.to_rgba(to_dark_color("white"))
    (line,) = left.lines
    assert mc.to_rgba(line.get_color()) == pytest.approx(ink)
    assert mc.to_rgba(line.get_markerfacecolor()) == pytest.approx(paper)
    assert left.collections[0].get_facecolor()[0] == pytest.approx(ink)
    assert left.patches[0].get_facecolor() == pytest.approx(ink)
    assert left.get_facecolor() == made.get_facecolor() == pytest.approx(paper)
    assert mc.to_rgba(left.get_xticklabels()[0].get_color()) == pytest.approx(ink)
    assert mc.to_rgba(left.spines["left"].get_edgecolor()) == pytest.approx(ink)
    assert over.get_color() == "black"  # it stands on the image


def frames(path):
    with Image.open(path) as picture:
        found, times = [], []
        for place in range(picture.n_frames):
            picture.seek(place)
            found.append(np.asarray(picture.convert("RGB"), np.float64) / 255)
            times.append(picture.info["duration"])
        return found, times


def test_an_animation_has_a_picture_for_each_frame_and_rests_at_the_last(tmp_path):
    path = write_animation(tmp_path / "a.gif", ["red", "blue", "green"], figure)
    found, times = frames(path)
    assert times == [600, 600, 2000]
    for picture, colour in zip(found, ["red", "blue", "green"], strict=True):
        near = np.abs(picture - np.array(mc.to_rgb(colour))).max(-1) < 0.1
        assert near.sum() > 50
    with pytest.raises(ConfigError, match="frames"):
        write_animation(tmp_path / "b.gif", [], figure)


def test_many_frames_are_thinned_evenly_with_both_ends():
    assert select_evenly_spaced(5, 40) == [0, 1, 2, 3, 4]
    found = select_evenly_spaced(200, 40)
    assert (found[0], found[-1], len(found)) == (0, 199, 40)
    assert max(np.diff(found)) - min(np.diff(found)) <= 1


def test_synthesis_shows_the_images_of_each_class_on_one_scale(tmp_path):
    logits = np.log([[0.8, 0.2], [0.3, 0.7], [0.1, 0.9]])
    assert select_samples_by_class(logits, 5) == {0: [0], 1: [2, 1]}
    assert select_samples_by_class(logits, 1) == {0: [0], 1: [2]}
    rising = {
        n: SyntheticData(np.full((3, 4, 4, 1), float(n)), logits, np.float32(0)) for n in (0, 5, 10)
    }
    found, _ = frames(animate_synthesis(rising, tmp_path / "a.gif", num_images=2))
    # Black, grey and white images: the scale is that of all iterations.
    levels = [np.median(picture[50:60, 105:115]) for picture in found]
    assert levels[0] < 0.1 and 0.4 < levels[1] < 0.6 and levels[2] > 0.9
    with pytest.raises(ConfigError, match="snapshots"):
        animate_synthesis({}, tmp_path / "b.gif")


def test_weights_over_the_rounds_keep_the_order_and_scale_of_the_last(tmp_path, monkeypatch):
    calls = []

    def drawn(weights, groups, titles, **settings):
        calls.append((weights, groups, titles, settings))
        return figure()

    monkeypatch.setattr("fedjax_het.analysis.figures.animation.plot_collaboration", drawn)
    weights = np.random.default_rng(0).random((50, 4, 4))
    weights[-1] = [[9, 0, 3, 0], [0, 9, 0, 3], [3, 0, 9, 0], [0, 3, 0, 9]]
    animate_collaboration(weights, tmp_path / "a.gif", title="fedamp")
    assert len(calls) == 40
    np.testing.assert_array_equal(calls[-1][0], weights[-1])
    assert calls[0][2] == ["fedamp, round 1"] and calls[-1][2] == ["fedamp, round 50"]
    orders = {tuple(call[3]["order"]) for call in calls}
    assert orders in ({(0, 2, 1, 3)}, {(2, 0, 1, 3)}, {(0, 2, 3, 1)}, {(2, 0, 3, 1)})
    assert {call[3]["scale"] for call in calls} == {3.0}  # not the diagonal's 9
    with pytest.raises(ConfigError, match="shape of weights"):
        animate_collaboration(weights[0], tmp_path / "b.gif")
