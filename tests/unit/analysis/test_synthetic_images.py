"""The grid of condensed images shows the right images in the right rows."""

import numpy as np
import pytest
from PIL import Image

from fedjax_het.analysis.figures.synthetic_images import plot_condensed
from fedjax_het.utils.errors import ConfigError

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


def test_rows_are_pairs_by_client_and_class_and_columns_the_first_images(tmp_path, mosaics):
    images = np.random.default_rng(0).normal(size=(*SHAPE, 3)).astype(np.float16)
    mean, std = np.array([0.5, 0.4, 0.3]), np.array([0.1, 0.2, 0.3])
    path = tmp_path / "condensed.png"
    plot_condensed(images, CLIENTS, CLASSES, path, mean=mean, std=std, num_images=2)
    with Image.open(path) as picture:
        assert picture.width > 100
    assert [mosaic.shape for mosaic in mosaics] == [(5, 13, 3), (11, 13, 3)]

    def stored(pair, image):
        return (images[pair, image].astype(float) * std + mean).clip(0, 1)

    np.testing.assert_allclose(mosaics[0][:5, :6], stored(1, 0))  # client 0, class 1
    np.testing.assert_allclose(mosaics[1][:5, 7:], stored(2, 1))  # client 1: class 0, then 2
    np.testing.assert_allclose(mosaics[1][6:, :6], stored(0, 0))
    assert (mosaics[1][5] == 1).all() and (mosaics[1][:, 6] == 1).all()  # gaps are white


def test_grey_images_without_constants_are_stretched(tmp_path, mosaics):
    images = np.random.default_rng(0).normal(size=(*SHAPE, 1))
    plot_condensed(images, CLIENTS, CLASSES, tmp_path / "x.png", class_names=list("abc"))
    first = mosaics[0][:5, :6]
    assert (first.min(), first.max()) == (0, 1)
    np.testing.assert_array_equal(first[..., 0], first[..., 2])


def test_many_pairs_are_cut_and_that_is_said(tmp_path, mosaics):
    plot_condensed(np.zeros((*SHAPE, 1)), CLIENTS, CLASSES, tmp_path / "x.png", num_pairs=2)
    assert [len(mosaic) for mosaic in mosaics] == [5, 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": np.zeros(SHAPE)}, "shape of images"),
        ({"images": np.zeros((0, *SHAPE[1:], 1)), "clients": [], "classes": []}, "shape of images"),
        ({"clients": [0]}, "shape of clients"),
        ({"mean": (0.5,)}, "std = None"),
        ({"num_images": 0}, "num_images = 0"),
    ],
)
def test_bad_input_is_named(tmp_path, change, message):
    given = {"images": np.zeros((*SHAPE, 1)), "clients": CLIENTS, "classes": CLASSES, **change}
    with pytest.raises(ConfigError, match=message):
        plot_condensed(**given, path=tmp_path / "x.png")
