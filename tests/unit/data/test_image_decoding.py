"""One picture decodes alike from all formats of image files, or a message names the image."""

import io
import logging

import numpy as np
import pytest
from PIL import Image

from fedjax_het import load_dataset, load_image_folder
from fedjax_het.data.image_decoding import decode_images

GRAY = np.random.default_rng(0).integers(0, 256, (6, 5), np.uint8)
COLOR = np.random.default_rng(1).integers(0, 8, (6, 5, 3), np.uint8) * 32
ALPHA = np.full((6, 5, 1), 255, np.uint8)


def encode(image, file_format="PNG", **options):
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def make_palette(colors):
    """An image of at most 256 different colors and its palette."""
    values, positions = np.unique(colors.reshape(-1, 3), axis=0, return_inverse=True)
    image = Image.fromarray(positions.reshape(colors.shape[:2]).astype(np.uint8)).convert("P")
    image = Image.frombytes("P", image.size, positions.astype(np.uint8).tobytes())
    image.putpalette(values.astype(np.uint8).tobytes())
    return image


GRAY_COLORS = np.repeat(GRAY[..., None], 3, axis=-1)
GRAY_FILES = {
    "gray": encode(Image.fromarray(GRAY)),
    "tiff": encode(Image.fromarray(GRAY), "TIFF"),
    "16 bits": encode(Image.fromarray(GRAY.astype(np.uint16) * 257)),
    "gray and alpha": encode(
        Image.merge("LA", [Image.fromarray(GRAY), Image.fromarray(ALPHA[..., 0])])
    ),
    "color": encode(Image.fromarray(GRAY_COLORS)),
    "palette": encode(make_palette(GRAY_COLORS)),
}
COLOR_FILES = {
    "color": encode(Image.fromarray(COLOR)),
    "bmp": encode(Image.fromarray(COLOR), "BMP"),
    "webp": encode(Image.fromarray(COLOR), "WEBP", lossless=True),
    "alpha": encode(Image.fromarray(np.concatenate([COLOR, ALPHA], axis=-1))),
    "palette": encode(make_palette(COLOR)),
    "opaque palette": encode(make_palette(COLOR), transparency=bytes([255] * 30)),
}


@pytest.mark.parametrize(
    ("files", "color", "expected"),
    [
        (GRAY_FILES, False, GRAY[..., None]),
        (GRAY_FILES, True, GRAY_COLORS),
        (GRAY_FILES, None, GRAY_COLORS),  # a file of them has three channels
        (dict(list(GRAY_FILES.items())[:4]), None, GRAY[..., None]),
        (COLOR_FILES, True, COLOR),
        (COLOR_FILES, None, COLOR),
        (COLOR_FILES | {"gray": GRAY_FILES["gray"]}, None, [COLOR] * 6 + [GRAY_COLORS]),
    ],
)
def test_formats_decode_alike(files, color, expected, caplog):
    names = list(files)
    images = decode_images(list(files.values()), names.__getitem__, color=color)
    for name, image, pixels in zip(
        names, images, np.broadcast_to(expected, images.shape), strict=True
    ):
        np.testing.assert_array_equal(image, pixels, err_msg=name)
    assert not caplog.records


def test_jpeg_is_close():
    smooth = np.add.outer(np.arange(8), np.arange(8))[..., None].astype(np.uint8) * np.array(
        [8, 4, 2], np.uint8
    )
    jpeg = encode(Image.fromarray(smooth), "JPEG", quality=100, subsampling=0)
    (image,) = decode_images([jpeg], str)
    assert np.abs(image.astype(int) - smooth).max() <= 3


@pytest.mark.parametrize("kind", ["alpha", "palette", "one color"])
def test_transparent_images_are_named(kind, caplog):
    alpha = ALPHA.copy()
    alpha[2, 3] = 7
    file = {
        "alpha": encode(Image.fromarray(np.concatenate([COLOR, alpha], axis=-1))),
        "palette": encode(make_palette(COLOR), transparency=bytes([255] * 3 + [0])),
        "one color": encode(Image.fromarray(COLOR), transparency=tuple(COLOR[0, 0].tolist())),
    }[kind]
    with caplog.at_level(logging.WARNING):
        images = decode_images([COLOR_FILES["color"], file], ["a.png", "b.png"].__getitem__)
    np.testing.assert_array_equal(images[1], COLOR)
    (record,) = caplog.records
    assert "1 of 2 images have transparent pixels" in record.getMessage()
    assert record.getMessage().endswith("b.png")


def test_images_of_pillow_stay_unchanged():
    image = Image.fromarray(COLOR)
    image.getexif()[0x0112] = 6  # the user has decoded it: no second rotation
    assert decode_images([image], str).shape == (1, 6, 5, 3)
    assert image.size == (5, 6) and image.getexif()[0x0112] == 6


def test_folder_of_all_formats(tmp_path):
    """`images:FOLDER` equals `load_image_folder`; class names are the folders' names."""
    for split in ("train", "test"):
        for name, files in (("gray", GRAY_FILES), ("vivid", COLOR_FILES)):
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for number, content in enumerate(files.values()):
                (folder / f"{number}.png").write_bytes(content)
    cache = {"cache_dir": tmp_path / "cache"}
    dataset = load_dataset("images:data", data_dir=tmp_path, **cache)
    expected = load_image_folder(tmp_path / "data", **cache)
    assert dataset.digest() == expected.digest()
    assert dataset.class_names == expected.class_names == ("gray", "vivid")
    np.testing.assert_array_equal(dataset.train_inputs[:6], [GRAY_COLORS] * 6)
    np.testing.assert_array_equal(dataset.train_inputs[6:], [COLOR] * 6)
    assert (dataset.source, dataset.order) == ("images", "class and file name")
    small = load_dataset(f"images:{tmp_path}/data?size=[3,4]&color=false", **cache)
    assert small.input_shape == (3, 4, 1)
    half = load_dataset(f"images:{tmp_path}/data?size=3", **cache)
    assert half.digest() == load_image_folder(tmp_path / "data", size=3, **cache).digest()
