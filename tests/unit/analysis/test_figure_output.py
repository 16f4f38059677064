"""Formats of figures, animations, and grids of synthetic images."""

import matplotlib.colors as mc
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from fedjax_het.analysis.figures.collaboration import animate_collaboration
from fedjax_het.analysis.figures.style import (
    PALETTE,
    describe_figure,
    write_animation,
    write_figure,
)
from fedjax_het.analysis.figures.synthetic_images import (
    animate_synthesis,
    plot_condensed,
    select_samples_by_class,
)
from fedjax_het.cli import main
from fedjax_het.condensation.synthetic_data import SyntheticData
from fedjax_het.utils.errors import ConfigError


def figure(color="black"):
    result = Figure(figsize=(3, 2))
    panel = result.subplots()
    panel.plot([0, 1], [0, 1], color=color, lw=6)
    panel.fill_between([0, 1], [0.5, 0.5], color=PALETTE[0])
    panel.set_title("t")
    return result


def pixels(path):
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"), np.float64) / 255


def test_figure_is_written_in_further_formats(tmp_path):
    assert write_figure(tmp_path / "a.png", figure(), formats=["svg", "pdf"]) == tmp_path / "a.png"
    write_figure(tmp_path / "b", figure())
    names = {"a.png", "a.svg", "a.pdf", "b.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()
    np.testing.assert_array_equal(pixels(tmp_path / "a.png"), pixels(tmp_path / "b.png"))
    with pytest.raises(ConfigError, match=r"a suffix of these formats: .*png"):
        write_figure(tmp_path / "c.unknown", figure())


def test_description_has_the_first_line_of_a_label():
    figure = Figure()
    figure.subplots().set(xlabel="Client\ngray: own model", ylabel="Weight")
    assert describe_figure(figure) == "Weight against client."


@pytest.mark.parametrize("words", [["run"], ["report", "x"], ["table", "table1"]])
def test_unknown_format_is_rejected_first(words, capsys):
    assert main([*words, "--pictures", "pfd"]) == 2
    assert "did you mean 'pdf'" in capsys.readouterr().err


def frames(path):
    with Image.open(path) as picture:
        actual, times = [], []
        for place in range(picture.n_frames):
            picture.seek(place)
            actual.append(np.asarray(picture.convert("RGB"), np.float64) / 255)
            times.append(picture.info["duration"])
        return actual, times


def test_animation_rests_at_the_last_frame(tmp_path):
    path = write_animation(tmp_path / "a.gif", ["red", "blue", "green"], figure)
    actual, times = frames(path)
    assert times == [600, 600, 2000]
    for picture, color in zip(actual, ["red", "blue", "green"], strict=True):
        near = np.abs(picture - np.array(mc.to_rgb(color))).max(-1) < 0.1
        assert near.sum() > 50
    with pytest.raises(ConfigError, match="frames"):
        write_animation(tmp_path / "b.gif", [], figure)


def test_animated_synthesis_has_one_scale(tmp_path):
    probabilities = np.array([[0.8, 0.2], [0.3, 0.7], [0.1, 0.9]])
    assert select_samples_by_class(probabilities, 5) == {0: [0], 1: [2, 1]}
    assert select_samples_by_class(probabilities, 1) == {0: [0], 1: [2]}
    rising = {
        n: SyntheticData(np.full((3, 4, 4, 1), float(n)), np.log(probabilities), np.float32(0))
        for n in (0, 5, 10)
    }
    actual, _ = frames(animate_synthesis(rising, tmp_path / "a.gif"))
    # Black, gray and white images: the scale is that of all iterations.
    levels = [np.median(picture[50:60, 105:115]) for picture in actual]
    assert levels[0] < 0.1 and 0.4 < levels[1] < 0.6 and levels[2] > 0.9
    with pytest.raises(ConfigError, match="snapshots"):
        animate_synthesis({}, tmp_path / "b.gif")


def test_animated_collaboration_keeps_order_and_scale(tmp_path, monkeypatch):
    calls = []

    def drawn(weights, groups, titles, **settings):
        calls.append((weights, groups, titles, settings))
        return figure()

    monkeypatch.setattr("fedjax_het.analysis.figures.collaboration.plot_collaboration", drawn)
    weights = np.random.default_rng(0).random((50, 4, 4))
    weights[-1] = [[9, 0, 3, 0], [0, 9, 0, 3], [3, 0, 9, 0], [0, 3, 0, 9]]
    animate_collaboration(weights, tmp_path / "a.gif", title="fedamp")
    assert len(calls) == 40
    np.testing.assert_array_equal(calls[-1][0], weights[-1])
    rounds = [int(call[2][0].removeprefix("fedamp, round ")) for call in calls]
    assert max(np.diff(rounds)) - min(np.diff(rounds)) <= 1
    assert calls[0][2] == ["fedamp, round 1"] and calls[-1][2] == ["fedamp, round 50"]
    orders = {tuple(call[3]["order"]) for call in calls}
    assert orders in ({(0, 2, 1, 3)}, {(2, 0, 1, 3)}, {(0, 2, 3, 1)}, {(2, 0, 3, 1)})
    assert {call[3]["scale"] for call in calls} == {3.0}  # not the diagonal's 9
    with pytest.raises(ConfigError, match="shape of weights"):
        animate_collaboration(weights[0], tmp_path / "b.gif")


# Condensed images

CLIENTS, CLASSES = [1, 0, 1], [2, 1, 0]
SHAPE = (3, 4, 5, 6)  # pairs, images each, height, width


@pytest.fixture
def mosaics(monkeypatch):
    """What is handed to matplotlib, one array per client."""
    from matplotlib.axes import Axes

    shown, imshow = [], Axes.imshow

    def record(self, array, **settings):
        shown.append(np.asarray(array))
        return imshow(self, array, **settings)

    monkeypatch.setattr(Axes, "imshow", record)
    return shown


def test_condensed_rows_are_pairs_and_columns_images(mosaics):
    images = np.random.default_rng(0).normal(size=(*SHAPE, 3)).astype(np.float16)
    mean, std = np.array([0.5, 0.4, 0.3]), np.array([0.1, 0.2, 0.3])
    plot_condensed(images[:, :2], CLIENTS, CLASSES, mean=mean, std=std)
    assert [mosaic.shape for mosaic in mosaics] == [(5, 13, 3), (11, 13, 3)]

    def stored(pair, image):
        return (images[pair, image].astype(float) * std + mean).clip(0, 1)

    np.testing.assert_allclose(mosaics[0][:5, :6], stored(1, 0))  # client 0, class 1
    np.testing.assert_allclose(mosaics[1][:5, 7:], stored(2, 1))  # client 1: class 0, then 2
    np.testing.assert_allclose(mosaics[1][6:, :6], stored(0, 0))
    assert (mosaics[1][5] == 1).all() and (mosaics[1][:, 6] == 1).all()  # gaps are white


def test_condensed_gray_images_are_stretched(mosaics):
    images = np.random.default_rng(0).normal(size=(*SHAPE, 1))
    plot_condensed(images, CLIENTS, CLASSES, class_names=list("abc"))
    first = mosaics[0][:5, :6]
    assert (first.min(), first.max()) == (0, 1)
    np.testing.assert_array_equal(first[..., 0], first[..., 2])


def test_condensed_pairs_are_limited(mosaics):
    plot_condensed(np.zeros((61, 11, 5, 6, 1)), np.arange(61) // 60, np.arange(61))
    assert [mosaic.shape for mosaic in mosaics] == [(60 * 6 - 1, 10 * 7 - 1, 3)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": np.zeros(SHAPE)}, "shape of images"),
        ({"images": np.zeros((0, *SHAPE[1:], 1)), "clients": [], "classes": []}, "shape of images"),
        ({"clients": [0]}, "shape of clients"),
        ({"mean": (0.5,)}, "std = None"),
        ({"mean": (0.5, 0.5), "std": (1.0,)}, r"mean = .*a number per channel \(1\)"),
        ({"class_names": ["a", "b"]}, "class_names = .*: expected the names of 3 classes"),
        ({"classes": [0.5] * len(CLASSES)}, "classes = .*: expected integers"),
    ],
)
def test_condensed_bad_input_is_named(change, message):
    arguments = {"images": np.zeros((*SHAPE, 1)), "clients": CLIENTS, "classes": CLASSES, **change}
    with pytest.raises(ConfigError, match=message):
        plot_condensed(**arguments)
