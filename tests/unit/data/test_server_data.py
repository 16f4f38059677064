"""The server's examples: where each one is from, what glyphs and shrunk images look like, and what
is refused."""

import dataclasses
import json

import matplotlib
import numpy as np
import pytest
from PIL import Image
from support.tfds_data import write_tfds_dataset

from fedjax_het import RunSpec
from fedjax_het.analysis import plot_server_examples
from fedjax_het.data import (
    PARTITIONS,
    SERVER_SOURCES,
    dataset_from_arrays,
    draw_withheld_examples,
    load_dataset,
    make_partition,
    make_server_data,
    make_server_pool,
    partition_from_clients,
    register_server_source,
    resolve_server_options,
)
from fedjax_het.data.server_data import compute_total_variation
from fedjax_het.data.server_sources import block_mean
from fedjax_het.runtime.data_assignment import assign_data, build_partition
from fedjax_het.utils.errors import ConfigError

BALANCED = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"
CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
STL10 = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]


def make_dataset(labels, *, side=28, channels=1, num_classes=10, class_names=(), **more):
    """A data set of these training labels, each image all of its position's last byte."""
    images = (np.arange(len(labels)) % 256).astype(np.uint8)[:, None, None, None]
    images = np.tile(images, (1, side, side, channels))
    train = (images, np.asarray(labels))
    test = (np.zeros((num_classes, side, side, channels), np.uint8), np.arange(num_classes))
    settings = {"num_classes": num_classes, "class_names": class_names, **more}
    return dataset_from_arrays(*train, *test, **settings)


LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 200))


@pytest.fixture(scope="module")
def dataset():
    return make_dataset(LABELS, class_names=list("0123456789"))


@pytest.fixture(scope="module")
def partition():
    """40 clients of 50 examples, each of two classes."""
    return make_partition(
        "classes_per_client", LABELS, 10, num_clients=40, seed=0, classes_per_client=2
    )


# --- of all clients


def test_iid_balances_classes(dataset, partition):
    remainders = set()
    for seed in range(20):
        actual = make_server_data("iid", dataset, partition, seed, {"size": 57})
        assert actual.indices.dtype == np.int32 and len(np.unique(actual.indices)) == 57
        counts = np.bincount(LABELS[actual.indices], minlength=10)
        assert sorted(counts) == [5] * 3 + [6] * 7
        remainders.add(tuple(np.flatnonzero(counts == 6)))
    assert len(remainders) > 5  # which classes have one more is drawn


@pytest.mark.parametrize("source", ["iid", "held_out"])
def test_draws_are_uniform(source, dataset, partition):
    """Each of 2,000 examples, 200 in a class, is in a tenth of the draws of 200 examples."""
    times, counts = np.zeros(len(LABELS)), []
    for seed in range(300):
        if source == "iid":
            drawn = make_server_data("iid", dataset, partition, seed, {"size": 200}).indices
        else:
            drawn = draw_withheld_examples("held_out", dataset, seed, {"size": 200})
        times[drawn] += 1
        counts.append(np.bincount(LABELS[drawn], minlength=10))
    deviations = (times - 30) / np.sqrt(300 * 0.1 * 0.9)
    assert np.abs(deviations).max() < 5 and 0.9 < deviations.std() < 1.1
    # Equally many of each class, or a hypergeometric number.
    expected = 0 if source == "iid" else np.sqrt(200 * 0.1 * 0.9 * 1800 / 1999)
    assert np.std(counts) == pytest.approx(expected, rel=0.1)


def test_iid_default_size_and_limits(dataset):
    held = np.flatnonzero((LABELS != 3) & (np.arange(2000) % 2 == 0))
    partition = partition_from_clients(np.array_split(held, 7))
    actual = make_server_data("iid", dataset, partition, 0)
    assert set(actual.indices) <= set(held) and len(actual.indices) == max(len(held) // 100, 9)
    assert set(LABELS[actual.indices]) == set(range(10)) - {3}
    all_held = partition_from_clients(np.array_split(np.arange(2000), 7))
    assert len(make_server_data("iid", dataset, all_held, 0).indices) == 20
    whole = make_server_data("iid", dataset, partition, 0, {"size": len(held)})
    np.testing.assert_array_equal(whole.indices, held)
    for size in (len(held) + 1, 2000):
        with pytest.raises(ConfigError, match=rf"size = {size}: .* from 1 to {len(held)}"):
            make_server_data("iid", dataset, partition, 0, {"size": size})


# --- of no client


def named(size=None, **settings):
    options = {} if size is None else {"size": size}
    defaults = {"partition": "iid", "num_clients": 7, "model": "mlp", "rounds": 1}
    server = {"server_data": "held_out", "server_options": options}
    return RunSpec("feddf", "user", **{**defaults, **server, **settings}).resolved()


@pytest.mark.parametrize(
    "split",
    [
        {"partition": "iid"},
        {"partition": "dirichlet_balanced", "alpha": 0.1},
        {"partition": "dirichlet", "alpha": 0.1},
        {"partition": "classes_per_client", "classes": 3},
        {"partition": "grouped", "num_clients": 10},
    ],
    ids=lambda split: split["partition"],
)
def test_held_out_examples_have_no_owner(split, dataset):
    spec = named(90, seed=3, **split)
    partition = build_partition(spec, dataset)
    out = draw_withheld_examples("held_out", dataset, 3, {"size": 90})
    assert len(np.unique(out)) == 90 and not set(out) & set(partition.indices)
    actual = make_server_data("held_out", dataset, partition, 3, {"size": 90})
    np.testing.assert_array_equal(actual.indices, out)
    # The rest is split as if it were all there is.
    rest = np.setdiff1d(np.arange(len(LABELS)), out)
    rest_arrays = {"train_inputs": dataset.train_inputs[rest], "train_labels": LABELS[rest]}
    smaller = dataclasses.replace(dataset, **rest_arrays)
    whole = dataclasses.replace(spec, server_data="iid", server_options={})
    alone = build_partition(whole, smaller)
    np.testing.assert_array_equal(rest[alone.indices], partition.indices)
    np.testing.assert_array_equal(alone.offsets, partition.offsets)
    assert alone.parameters == partition.parameters
    # Without it, the split is that of all examples.
    arguments = {"alpha": spec.alpha, "classes_per_client": spec.classes}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    arguments |= {"num_clients": spec.num_clients, "class_names": dataset.class_names}
    plain = make_partition(spec.partition, LABELS, 10, seed=3, **arguments)
    assert build_partition(whole, dataset).digest() == plain.digest()


def test_held_out_with_domains(dataset):
    domains = np.arange(len(LABELS)) % 4
    data = dataclasses.replace(
        dataset, train_domains=domains, test_domains=np.arange(10) % 4, domain_names=tuple("abcd")
    )
    partition = build_partition(named(50, partition="by_domain", num_clients=4), data)
    assert partition.sizes.sum() == len(LABELS) - 50
    for k in range(4):
        assert len(set(domains[partition.client_indices(k)])) == 1


SPLITS = {
    "dirichlet": {"alpha": 0.1},
    "dirichlet_balanced": {"alpha": 0.1},
    "dirichlet_capped": {"alpha": 0.5},
    "classes_per_client": {"classes": 2},
}


@pytest.mark.parametrize("source", ["held_out", "first_withheld", "iid", "clients", "user"])
@pytest.mark.parametrize("scheme", PARTITIONS)
def test_server_examples_of_all_partitions(scheme, source):
    register_server_source(
        "first_withheld", draw=lambda withheld, *, size=40: withheld, withheld=lambda size: size
    )
    domains = {"train_domains": np.arange(2000) % 8, "test_domains": np.arange(10) % 8}
    groups = {"by_domain": domains, "natural": {"train_users": np.arange(2000) % 10}}
    server = {"server_inputs": np.zeros((5, 28, 28, 1), np.uint8), "server_labels": range(5)}
    dataset = make_dataset(LABELS, **server, **groups.get(scheme, {}))
    settings = {"held_out_clients": None if scheme == "by_domain" else 2, "num_clients": 8}
    if source == "clients":
        options = {"clients": 4, "per_client": 10}
    else:
        options = {} if source == "user" else {"size": 40}
    spec = RunSpec(
        "fsl", "user", partition=scheme, server_data=source, server_options=options, model="mlp",
        rounds=1, seed=5, **settings, **SPLITS.get(scheme, {}),
    ).resolved()  # fmt: skip
    assigned = assign_data(spec, dataset, make_server_pool(source, dataset))
    held = set(assigned.partition.indices)
    held_out = set() if assigned.held_out is None else set(assigned.held_out.partition.indices)
    actual = assigned.server_data.indices
    assert len(np.unique(actual)) == len(actual) == (5 if source == "user" else 40)
    if source in ("iid", "clients"):
        assert set(actual) <= held and not set(actual) & held_out
    else:
        assert not set(actual) & (held | held_out)
        expected = draw_withheld_examples(source, dataset, 5, options)
        np.testing.assert_array_equal(actual[actual < 2000], expected)
        # Uniform draws: 40 examples of two of ten classes have a probability below 1e-20.
        assert source == "user" or len(set(LABELS[actual])) > 5


def test_withheld_examples_with_user_partition(dataset, caplog):
    """A partition of the user that holds withheld examples: the server gets unassigned ones."""
    partition = partition_from_clients(np.array_split(np.arange(1500), 7))
    actual = make_server_data("held_out", dataset, partition, 0, {"size": 90}).indices
    assert len(np.unique(actual)) == 90 and actual.min() >= 1500
    assert "clients hold withheld examples; the server receives 90 other examples" in caplog.text
    clients = partition_from_clients(np.array_split(np.arange(1500), 9))
    assigned = assign_data(named(450, held_out_clients=2), dataset, None, clients)
    assert assigned.server_data.indices.min() >= 1500  # no example of a held-out client
    register_server_source("others", draw=lambda: [3], withheld=lambda: 4)
    with pytest.raises(ConfigError, match=r"draw of server_data 'others' = '1 other examples'"):
        make_server_data("others", dataset, partition, 0)


def test_held_out_default_size(dataset):
    assert len(draw_withheld_examples("held_out", dataset, 0)) == 20
    few = dataclasses.replace(
        dataset, train_inputs=dataset.train_inputs[:50], train_labels=LABELS[:50]
    )
    assert len(draw_withheld_examples("held_out", few, 0)) == 10
    for source in (None, "iid", "user"):
        assert len(draw_withheld_examples(source, dataset, 0)) == 0


def test_held_out_rejects_large_size(dataset):
    for size in (2000, 5000):
        with pytest.raises(ConfigError, match=rf"size = {size}: .* 1999"):
            draw_withheld_examples("held_out", dataset, 0, {"size": size})
    everything = partition_from_clients([np.arange(2000)])
    with pytest.raises(ConfigError, match=r"size = 20: .* at most 0"):
        make_server_data("held_out", dataset, everything, 0)


# --- of a few clients


def test_clients_source_counts(dataset, partition):
    owner = np.empty(len(LABELS), int)
    owner[partition.indices] = np.repeat(np.arange(40), partition.sizes)
    chosen = set()
    for seed in range(30):
        options = {"clients": 3, "per_client": 20}
        actual = make_server_data("clients", dataset, partition, seed, options)
        assert len(np.unique(actual.indices)) == 60
        counts = np.bincount(owner[actual.indices], minlength=40)
        assert sorted(counts[counts > 0]) == [20, 20, 20]
        chosen |= set(np.flatnonzero(counts))
    assert len(chosen) > 30  # of 40: 36 are expected


def test_clients_source_takes_all_examples(dataset, partition):
    actual = make_server_data("clients", dataset, partition, 1, {"clients": 40, "per_client": 50})
    np.testing.assert_array_equal(actual.indices, np.sort(partition.indices))


def test_clients_source_skips_small_clients(dataset):
    clients = [np.arange(5), np.arange(5, 15), np.arange(15, 18), np.arange(18, 40)]
    partition = partition_from_clients(clients)
    for seed in range(10):
        options = {"clients": 2, "per_client": 6}
        actual = make_server_data("clients", dataset, partition, seed, options)
        assert set(actual.indices) <= {*clients[1], *clients[3]} and len(actual.indices) == 12
    with pytest.raises(ConfigError, match="clients = 3: expected at most 2, the clients with"):
        make_server_data("clients", dataset, partition, 0, {"clients": 3, "per_client": 6})


@pytest.mark.parametrize("source", ["iid", "held_out", "clients"])
def test_draws_follow_seed(source, dataset, partition):
    options = {"clients": 2, "per_client": 25} if source == "clients" else {"size": 50}
    if source == "held_out":
        partition = partition_from_clients(np.array_split(np.arange(1500), 7))
    np.random.default_rng(0).random(3)
    first, again, other = (
        make_server_data(source, dataset, partition, seed, options) for seed in (4, 4, 5)
    )
    np.testing.assert_array_equal(first.indices, again.indices)
    assert not np.array_equal(first.indices, other.indices)
    assert make_server_pool(source, dataset, options) is None
    images, labels = first.get_examples(dataset, None)
    np.testing.assert_array_equal(labels, LABELS[first.indices])
    np.testing.assert_array_equal(images, dataset.train_inputs[first.indices])


# --- glyphs


def test_glyphs_of_all_sizes_and_rotations():
    dataset = make_dataset(np.arange(45), num_classes=45, class_names=BALANCED[:45])
    images, labels = make_server_pool("glyphs", dataset)
    assert images.shape == (675, 28, 28, 1) and images.dtype == np.uint8
    assert labels.dtype == np.int32
    np.testing.assert_array_equal(np.bincount(labels), [15] * 45)
    assert len({image.tobytes() for image in images}) == 675
    again, _ = make_server_pool("glyphs", dataset)
    assert again.tobytes() == images.tobytes()
    # White on black; digits with room around them.
    assert images.max() == 255 and (images.mean((1, 2, 3)) < 80).all()
    digits = images[:150]
    for edge in (digits[:, 0], digits[:, -1], digits[:, :, 0], digits[:, :, -1]):
        assert edge.max() == 0
    ink = images[..., 0].reshape(45, 3, 5, 28 * 28).sum(-1, dtype=np.int64)
    assert (np.diff(ink, axis=1) > 0).all()  # a larger size has more of it
    few, few_labels = make_server_pool("glyphs", dataset, {"sizes": [110], "rotations": [0]})
    np.testing.assert_array_equal(few, images.reshape(45, 3, 5, 28, 28, 1)[:, 1, 2])
    np.testing.assert_array_equal(few_labels, np.arange(45))


def cropped(image):
    """The part that has ink."""
    rows, columns = (np.flatnonzero((image > 127).any(axis)) for axis in (1, 0))
    return image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


@pytest.mark.parametrize(
    ("name", "drawn"), [("A", "\U0001d4d0"), ("q", "\U0001d4fa"), ("e", "\U0001d4ee"), ("7", "7")]
)
def test_glyph_matches_matplotlib(name, drawn):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties

    path = f"{matplotlib.get_data_path()}/fonts/ttf/STIXGeneralBolIta.ttf"
    font = FontProperties(fname=path, size=110)
    dataset = make_dataset(np.zeros(2, int), side=144, num_classes=2, class_names=[name, "0"])
    for rotation in (0, 20, -20):
        figure = Figure(figsize=(2, 2), dpi=72, facecolor="black")
        canvas = FigureCanvasAgg(figure)
        centre = {"ha": "center", "va": "center", "color": "white"}
        figure.text(0.5, 0.5, drawn, rotation=rotation, fontproperties=font, **centre)
        canvas.draw()
        theirs = cropped(np.asarray(canvas.buffer_rgba())[..., 0].astype(float))
        images, _ = make_server_pool("glyphs", dataset, {"sizes": [110], "rotations": [rotation]})
        whole = images[0, ..., 0].astype(float)
        ours = cropped(whole)
        assert np.abs(np.subtract(ours.shape, theirs.shape)).max() <= 2
        resized = Image.fromarray(theirs).resize(ours.shape[::-1], Image.Resampling.BILINEAR)
        assert np.corrcoef(ours.ravel(), np.asarray(resized).ravel())[0, 1] > 0.9
        if rotation == 0:  # its ink is in the middle
            for axis in (0, 1):
                inked = np.flatnonzero((whole > 127).any(axis))
                assert abs(inked[0] + inked[-1] - 143) <= 2


def test_glyph_image_size(partition):
    images, labels = make_server_pool("glyphs", load_dataset("digits"))
    assert images.shape == (150, 8, 8, 1) and len(labels) == 150
    wide = make_dataset(LABELS, class_names=list("0123456789"))
    wide = dataclasses.replace(wide, train_inputs=np.zeros((2000, 20, 30, 1), np.uint8))
    assert make_server_pool("glyphs", wide)[0].shape == (150, 20, 30, 1)


def test_glyph_font_option(dataset, partition):
    font = f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSerif-Italic.ttf"
    plain, script = (
        make_server_pool("glyphs", dataset, arguments) for arguments in ({"font": font}, {})
    )
    assert not np.array_equal(plain[0], script[0])
    actual = make_server_data("glyphs", dataset, partition, 0, {"font": font}, plain)
    summary = actual.summarize(dataset, partition, plain)
    assert summary.font == "DejaVu Serif Italic" and summary.font_version == "2.35"
    actual = make_server_data("glyphs", dataset, partition, 0, {}, script)
    summary = actual.summarize(dataset, partition, script)
    assert "STIXGeneral Bold Italic" in summary.font
    assert summary.font_version == f"1.0.0, matplotlib {matplotlib.__version__}"
    assert "STIX" in str(summary) and "\n" not in str(summary)
    assert (summary.num_examples, summary.class_min, summary.class_max) == (150, 15, 15)


def test_glyphs_reject_missing_font(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"font = '/no/such\.ttf': expected a \.ttf"):
        resolve_server_options("glyphs", {"font": "/no/such.ttf"})
    (tmp_path / "text.ttf").write_text("no font")
    with pytest.raises(ConfigError, match=r"font = .*text\.ttf"):
        resolve_server_options("glyphs", {"font": tmp_path / "text.ttf"})
    monkeypatch.setattr(matplotlib, "get_data_path", lambda: str(tmp_path))
    with pytest.raises(ConfigError, match=r"STIXGeneralBolIta.*set the option font"):
        resolve_server_options("glyphs")


def test_glyphs_reject_invalid_datasets(dataset):
    for names in ((), tuple(CIFAR10), (*"012345678", "é")):
        with pytest.raises(ConfigError, match=r"class_names = .*single letters and digits"):
            make_server_pool("glyphs", dataclasses.replace(dataset, class_names=names))
    with pytest.raises(ConfigError, match="one channel"):
        make_server_pool("glyphs", make_dataset(LABELS, channels=3, class_names=list("0123456789")))
    with pytest.raises(ConfigError, match="uint8"):
        floats = dataset.train_inputs.astype(np.float32)
        make_server_pool("glyphs", dataclasses.replace(dataset, train_inputs=floats))
    with pytest.raises(ConfigError, match="a font with '0'"):  # it has symbols only
        font = f"{matplotlib.get_data_path()}/fonts/ttf/STIXSizFiveSymReg.ttf"
        make_server_pool("glyphs", dataset, {"font": font})
    with pytest.raises(ConfigError, match="leaves no ink"):
        make_server_pool("glyphs", load_dataset("digits"), {"sizes": [1]})


# --- STL-10


def test_block_mean_matches_float64():
    images = np.random.default_rng(0).integers(0, 256, (5, 96, 96, 3), np.uint8)
    for height, width in ((32, 32), (48, 24)):
        small = block_mean(images, height, width)
        down, across = 96 // height, 96 // width
        for row, column in ((0, 0), (height - 1, 2), (7, width - 1)):
            top, left = row * down, column * across
            block = images[:, top : top + down, left : left + across].astype(np.float64)
            expected = np.floor(block.mean((1, 2)) + 0.5)
            np.testing.assert_array_equal(small[:, row, column], expected)
    assert block_mean(np.full((1, 96, 96, 3), 255, np.uint8), 32, 32).min() == 255
    with pytest.raises(ConfigError, match="divide 96x96"):
        block_mean(images, 28, 28)


def test_stl10_source(tmp_path, monkeypatch):
    """Each image says its class and its number, so that they are known again after all of it."""
    import tensorflow_datasets as tfds

    monkeypatch.setenv("FEDJAX_HET_CACHE", str(tmp_path / "cache"))

    def split(count):
        labels = np.repeat(np.arange(10), count)
        images = np.zeros((len(labels), 96, 96, 3), np.uint8)
        images[..., 0] = 20 * labels[:, None, None]
        images[..., 1] = np.tile(np.arange(count), 10)[:, None, None]
        return images, labels

    content = {"train": split(7), "test": split(1)}
    with tfds.core.registered.skip_registration():
        write_tfds_dataset(tmp_path, "stl10", (96, 96, 3), 10, content=content, class_names=STL10)
    cifar10 = make_dataset(LABELS, side=32, channels=3, class_names=CIFAR10)
    images, labels = make_server_pool("stl10", cifar10, {"per_class": 5}, data_dir=tmp_path)
    assert images.shape == (45, 32, 32, 3) and images.dtype == np.uint8
    counts = np.bincount(labels, minlength=10)
    assert counts[CIFAR10.index("frog")] == 0 and sorted(counts) == [0] + [5] * 9
    called = {name: name for name in STL10} | {"car": "automobile"}
    for image, label in zip(images, labels, strict=True):
        assert (image == image[0, 0]).all()
        assert called[STL10[image[0, 0, 0] // 20]] == CIFAR10[label]
    assert len({image.tobytes() for image in images}) == 45  # no image twice
    # Another numbering of the classes changes labels, not what they say.
    other = make_dataset(LABELS, side=32, channels=3, class_names=CIFAR10[::-1])
    _, reversed_labels = make_server_pool("stl10", other, {"per_class": 5}, data_dir=tmp_path)
    assert {CIFAR10[9 - label] for label in reversed_labels} == {CIFAR10[label] for label in labels}
    fewer, _ = make_server_pool("stl10", cifar10, {"per_class": 2}, data_dir=tmp_path)
    assert {image.tobytes() for image in fewer} < {image.tobytes() for image in images}

    partition = partition_from_clients([np.arange(2000)])
    pool = (images, labels)
    actual = make_server_data("stl10", cifar10, partition, 3, {"per_class": 5}, pool)
    np.testing.assert_array_equal(actual.indices, 2000 + np.arange(45))
    summary = actual.summarize(cifar10, partition, pool)
    assert (summary.num_present, summary.class_min, summary.class_max) == (9, 0, 5)
    assert summary.class_distance == pytest.approx(0.1)  # a tenth of the clients' are frogs
    np.testing.assert_array_equal(actual.get_examples(cifar10, pool)[0], images)

    with pytest.raises(ConfigError, match=r"per_class = 8: expected at most 7"):
        make_server_pool("stl10", cifar10, {"per_class": 8}, data_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"class_names = .*STL-10"):
        unlike = make_dataset(LABELS, side=32, channels=3, class_names=list("abcdefghij"))
        make_server_pool("stl10", unlike, data_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"no data in.*prepare stl10"):
        make_server_pool("stl10", cifar10, data_dir=tmp_path / "nowhere")


# --- a user's own


def test_user_source(partition):
    images = np.full((3, 28, 28, 1), 9, np.uint8)
    plain, arguments = (
        make_dataset(LABELS),
        make_dataset(LABELS, server_inputs=images, server_labels=[4, 4, 1]),
    )
    other = make_dataset(LABELS, server_inputs=images, server_labels=[4, 4, 2])
    assert len({plain.digest(), arguments.digest(), other.digest()}) == 3
    pool = make_server_pool("user", arguments)
    actual = make_server_data("user", arguments, partition, 0, pool=pool)
    assert actual.indices.tolist() == [2000, 2001, 2002] and actual.indices.dtype == np.int32
    taken, labels = actual.get_examples(arguments, pool)
    np.testing.assert_array_equal(taken, images)
    assert labels.tolist() == [4, 4, 1] and labels.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        arguments.server_labels[0] = 0


BAD_SERVER_ARRAYS = {
    "empty": ({"server_inputs": np.zeros((0, 28, 28, 1), np.uint8)}, "shape of server_inputs"),
    "shape": ({"server_inputs": np.zeros((3, 32, 32, 1), np.uint8)}, "format of server_inputs"),
    "type": ({"server_inputs": np.zeros((3, 28, 28, 1), np.float32)}, "format of server_inputs"),
    "length": ({"server_labels": [1, 2]}, r"len\(server_labels\) = 2"),
    "class": ({"server_labels": [1, 10, 2]}, r"server_labels\[1\] = 10: .* in \[0, 10\)"),
    "negative": ({"server_labels": [1, 0, -2]}, r"server_labels\[2\] = -2"),
    "no labels": ({"server_labels": None}, "server_labels = None"),
    "no images": ({"server_inputs": None}, "server_inputs = None"),
}


@pytest.mark.parametrize("kind", BAD_SERVER_ARRAYS)
def test_user_source_rejects_invalid_arrays(kind, dataset):
    change, message = BAD_SERVER_ARRAYS[kind]
    arguments = {"server_inputs": np.zeros((3, 28, 28, 1), np.uint8), "server_labels": [1, 0, 2]}
    with pytest.raises(ConfigError, match=message):
        make_dataset(LABELS, **(arguments | change))
    replaced = dataclasses.replace(dataset, **(arguments | change))  # past the first check
    with pytest.raises(ConfigError, match=message):
        make_server_pool("user", replaced)


def test_user_source_requires_examples(dataset):
    with pytest.raises(ConfigError, match=r"server_data = 'user'.*server_inputs"):
        make_server_pool("user", dataset)


# --- options, summary, picture


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("idd", {}, "did you mean 'iid'"),
        ("iid", {"n_0": 5}, r"'iid' has no option 'n_0' \(it takes size\)"),
        ("user", {"size": 5}, "it takes none"),
        ("iid", {"size": 0}, "size = 0"),
        ("iid", {"size": 2.5}, r"size = 2\.5"),
        ("clients", {"clients": 0}, "clients = 0"),
        ("clients", {"per_client": -1}, "per_client = -1"),
        ("glyphs", {"sizes": []}, r"sizes = \[\]"),
        ("glyphs", {"sizes": [100, 0]}, r"sizes\[1\] = 0: expected a number in \[1, 288\]"),
        ("glyphs", {"sizes": "100"}, "sizes = '100'"),
        ("glyphs", {"rotations": [float("nan")]}, r"rotations\[0\] = nan"),
        ("stl10", {"per_class": True}, "per_class = True"),
    ],
)
def test_resolve_options_rejects_invalid_values(source, options, message):
    with pytest.raises(ConfigError, match=message):
        resolve_server_options(source, options)


@pytest.mark.parametrize("source", SERVER_SOURCES)
def test_resolved_options_round_trip(source):
    options = resolve_server_options(source)
    assert options.keys() == SERVER_SOURCES[source].options.keys()
    assert json.loads(json.dumps(options)) == options == resolve_server_options(source, options)
    assert SERVER_SOURCES[source].description


def test_total_variation():
    assert compute_total_variation(np.array([1, 1, 2]), np.array([5, 5, 10])) == 0
    assert compute_total_variation(np.array([3, 0]), np.array([0, 1])) == 1
    # Shares 1/2, 1/2, 0 and 1/4, 1/4, 1/2.
    assert compute_total_variation(np.array([4, 4, 0]), np.array([1, 1, 2])) == pytest.approx(0.5)


def test_server_summary():
    """Clients hold 6 of class 0 and 2 of class 1, a class that the server never sees is class 2."""
    labels = np.array([0] * 6 + [1] * 6 + [2] * 4)
    dataset = make_dataset(labels, num_classes=3)
    partition = partition_from_clients([np.arange(6), np.array([6, 7])])
    actual = make_server_data("clients", dataset, partition, 0, {"clients": 1, "per_client": 6})
    summary = actual.summarize(dataset, partition, None)
    assert summary.num_examples == summary.class_max == 6
    assert (summary.num_present, summary.num_classes, summary.class_min) == (1, 3, 0)
    assert summary.class_distance == pytest.approx(0.25) and summary.font is None
    assert json.loads(json.dumps(dataclasses.asdict(summary)))["source"] == "clients"
    assert "6 examples (clients) of 1 of 3 classes" in str(summary) and "\n" not in str(summary)


def test_server_data_rejects_foreign_partition(partition):
    for source in ("iid", "clients"):
        with pytest.raises(ConfigError, match="another data set"):
            make_server_data(source, make_dataset(LABELS[:100]), partition, 0)


def test_plot_server_examples(dataset):
    """Every image is flat, so each cell of a panel says which image it is."""
    images = np.repeat(np.arange(7, 43, 7, dtype=np.uint8), 28 * 28).reshape(6, 28, 28, 1)
    labels = np.array([2, 2, 2, 9, 9, 4])
    figure = plot_server_examples(dataset, images, labels, num_images=2)
    left, right = figure.axes
    assert [text.get_text() for text in left.get_yticklabels()] == ["2", "4", "9"]
    cells = [np.asarray(axes.images[0].get_array())[14::29, 14::29, 0] for axes in (left, right)]
    firsts = [np.flatnonzero(c == LABELS)[:2] % 256 for c in (2, 4, 9)]
    np.testing.assert_allclose(cells[0] * 255, firsts)
    # The first and the last of class 2; class 4 has one only, and white beside it.
    np.testing.assert_allclose(cells[1] * 255, [[7, 21], [42, 255], [28, 35]])
    fewer = plot_server_examples(dataset, images, labels, num_classes=2)
    assert [text.get_text() for text in fewer.axes[0].get_yticklabels()] == ["2", "9"]
    with pytest.raises(ConfigError, match="shape of server_images"):
        plot_server_examples(dataset, images[:0], labels[:0])
    with pytest.raises(ConfigError, match="server_labels"):
        plot_server_examples(dataset, images, labels + 1)
