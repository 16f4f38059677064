"""PAMAP2, written in the format of its authors, and PFLlib's windows."""

import functools

import numpy as np
import pytest

from fedjax_het import RunSpec, load_dataset, simulate
from fedjax_het.utils.errors import ConfigError

# Numbers of the activities and PFLlib's classes.
CLASSES = {24: 0, **{n: n for n in range(1, 8)}, 12: 8, 13: 9, 16: 10, 17: 11}

pytestmark = pytest.mark.usefixtures("private_cache")


@functools.cache
def make_recording(number):
    """Return lines of a recording with transitions (0), a missing heart rate and missing values."""
    rng = np.random.default_rng(number)
    counts = [20, 360, 420, 20, 380, 50, 286]  # 256 + 10 * 128 rows
    activities = np.repeat([0, 1, 24, 0, 12 + number % 2, 9, 17], counts)
    rows = np.round(rng.normal(scale=9, size=(len(activities), 54)), 2)
    rows[rng.random(rows.shape) < 0.002] = np.nan
    rows[:, 0], rows[:, 1] = np.arange(len(rows)) / 100, activities
    rows[:, 2] = np.where(np.arange(len(rows)) % 11, np.nan, 100)
    return [" ".join("NaN" if np.isnan(v) else f"{v:g}" for v in row) for row in rows]


def write_pamap2(folder):
    """Write the subjects, and return their rows by subject; three subjects have one recording."""
    folder.mkdir(parents=True)
    content = {}
    for subject in range(101, 110):
        lines = make_recording(subject % 3)
        (folder / f"subject{subject}.dat").write_text("\n".join(lines) + "\n")
        content[f"subject{subject}"] = lines
    return content


def cut_windows(rows):
    """Cut windows as PFLlib's `load_data_PAMAP2`, without its scaling."""
    parts = [rows[:, first:last] for first, last in ((1, 2), (4, 7), (10, 16), (21, 24), (27, 33))]
    data = np.concatenate([*parts, rows[:, 38:41], rows[:, 44:50]], axis=1).astype(np.float32)
    data[np.isnan(data)] = 0
    start, windows = 0, []
    while start + 256 < len(data):
        window = data[start : start + 256]
        label = np.unique(window[:, 0].astype(int))[0]
        if label in CLASSES:
            windows.append((CLASSES[label], window[:, 1:].tobytes()))
        start += 128
    return windows


def test_windows(tmp_path):
    content = write_pamap2(tmp_path / "PAMAP2_Dataset/Protocol")
    dataset = load_dataset("pamap2", data_dir=tmp_path)
    assert dataset.input_shape == (256, 27) and dataset.class_names[0] == "rope jumping"
    assert (dataset.num_classes, dataset.class_names[9]) == (12, "descending stairs")
    expected_windows = {}
    for subject, lines in content.items():
        if (key := tuple(lines[:3])) not in expected_windows:
            rows = np.array([list(map(float, line.split())) for line in lines])
            expected_windows[key] = cut_windows(rows)
        expected = expected_windows[key]
        actual = []
        for split in ("train", "test"):
            chosen = getattr(dataset, f"{split}_users") == subject
            labels = getattr(dataset, f"{split}_labels")[chosen]
            inputs = getattr(dataset, f"{split}_inputs")[chosen]
            actual += [(int(y), x.tobytes()) for y, x in zip(labels, inputs, strict=True)]
        assert sorted(actual) == sorted(expected) and len({y for y, _ in expected}) > 2
        assert (dataset.test_users == subject).sum() == round(0.25 * len(expected))


@pytest.mark.slow
def test_training(tmp_path):
    write_pamap2(tmp_path / "Protocol")
    spec = RunSpec(
        dataset="pamap2", rounds=1, local_epochs=1, network_options={"width": 4, "hidden": 4}
    )
    result = simulate(spec, data_dir=tmp_path)
    assert result.spec.model == "cnn1d" and result.spec.num_clients == 9
    assert np.isfinite(result.metrics["test_loss"]).all()


def test_damaged_files(tmp_path):
    write_pamap2(tmp_path / "Protocol")
    path = tmp_path / "Protocol/subject109.dat"
    text = path.read_text()
    for damaged, message in (
        ("\n".join(text.splitlines()[:200]), "has no window of 256 rows with one of the 12"),
        (text.replace("NaN", "none", 1), "cannot be read .*: expected lines of 54 values"),
        (text.replace(" ", "\t"), "cannot be read|lines of 1 values: expected 54"),
    ):
        path.write_text(damaged)
        with pytest.raises(
            ConfigError, match=rf"^dataset = 'pamap2': .*subject109\.dat.*{message}"
        ):
            load_dataset("pamap2", data_dir=tmp_path)
    path.unlink()
    with pytest.raises(ConfigError, match=r"no file .*subject109\.dat"):
        load_dataset("pamap2", data_dir=tmp_path)
