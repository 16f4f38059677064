"""UCI HAR, written in the format of its authors."""

import numpy as np
import pytest
from support.markers import slow_case

from fedjax_het import RunSpec, load_dataset, simulate
from fedjax_het.utils.errors import ConfigError

SIGNALS = ("body_acc_x", "body_acc_y", "body_acc_z", "body_gyro_x", "body_gyro_y")
SIGNALS += ("body_gyro_z", "total_acc_x", "total_acc_y", "total_acc_z")
SUBJECTS = {"train": [1, 1, 1, 1, 3, 3, 3, 3] * 2, "test": [30, 30, 2, 2] * 2}
ACTIVITIES = {"train": [5, 4, 6, 1, 2, 3, 5, 5] * 2, "test": [6, 1, 3, 3] * 2}

pytestmark = pytest.mark.usefixtures("private_cache")


def format_row(values):
    """Return a line with two blanks before positive numbers, as the authors' Matlab wrote it."""
    return "".join(f"{value:16.7e}" for value in values)


def write_har(folder):
    """Write both splits; return rows of all examples by the name of the file without its split."""
    rng, content = np.random.default_rng(0), {}
    for split, subjects in SUBJECTS.items():
        (folder / split / "Inertial Signals").mkdir(parents=True)
        files = {"X": rng.normal(size=(len(subjects), 561))}
        files |= {f"Inertial Signals/{s}": rng.normal(size=(len(subjects), 128)) for s in SIGNALS}
        for name, rows in files.items():
            text = "\n".join(map(format_row, rows)) + "\n"
            (folder / split / f"{name}_{split}.txt").write_text(text)
            content.setdefault(name, []).extend(
                [float(word) for word in line.split()] for line in text.splitlines()
            )
        for name, values in (("subject", subjects), ("y", ACTIVITIES[split])):
            (folder / split / f"{name}_{split}.txt").write_text("\n".join(map(str, values)) + "\n")
    return content


@pytest.mark.parametrize("name", ["har", slow_case("har_features")])
def test_examples(name, tmp_path):
    content = write_har(tmp_path / "UCI HAR Dataset")
    if name == "har":
        series = [content[f"Inertial Signals/{signal}"] for signal in SIGNALS]
        inputs = [np.array(rows).T for rows in zip(*series, strict=True)]
    else:
        inputs = list(map(np.array, content["X"]))
    subjects = [f"subject{s:02d}" for split in SUBJECTS.values() for s in split]
    labels = [label - 1 for split in ACTIVITIES.values() for label in split]
    expected = {
        (user, label, np.float32(x).tobytes())
        for user, label, x in zip(subjects, labels, inputs, strict=True)
    }
    dataset = load_dataset(name, data_dir=tmp_path)
    assert dataset.input_shape == ((128, 9) if name == "har" else (561,))
    assert (dataset.num_classes, dataset.class_names[3], dataset.order) == (6, "sitting", "files")
    actual = []
    for split in ("train", "test"):
        arrays = (getattr(dataset, f"{split}_{kind}") for kind in ("users", "labels", "inputs"))
        actual += [(str(u), int(y), x.tobytes()) for u, y, x in zip(*arrays, strict=True)]
    assert set(actual) == expected and len(actual) == len(subjects)
    users, counts = np.unique(dataset.test_users, return_counts=True)  # a quarter of each subject
    assert dict(zip(users.tolist(), counts.tolist(), strict=True)) == {
        **{"subject01": 2, "subject02": 1},
        **{"subject03": 2, "subject30": 1},
    }
    assert load_dataset(name, data_dir=tmp_path / "UCI HAR Dataset").digest() == dataset.digest()
    options = {"width": 4, "hidden": 4} if name == "har" else {"hidden": [4]}
    spec = RunSpec(dataset=name, rounds=1, local_epochs=1, network_options=options)
    result = simulate(spec, data_dir=tmp_path)
    assert result.spec.model == ("cnn1d" if name == "har" else "mlp")
    assert result.partition.client_names == ("subject01", "subject02", "subject03", "subject30")
    assert np.isfinite(result.metrics["test_loss"]).all()


def test_damaged_files(tmp_path):
    with pytest.raises(ConfigError, match=r"^dataset = 'har': no data in .*body_acc_x_train\.txt"):
        load_dataset("har", data_dir=tmp_path)
    write_har(tmp_path)
    path = tmp_path / "test/Inertial Signals/body_gyro_y_test.txt"
    text = path.read_text()
    for damaged, message in (
        (text[: 3 * len(text) // 5], "too few values in its line of data 5: expected 128"),
        (text.replace("e", "x", 1), "cannot be read .* expected lines of 128 values"),
        ("1 2\n", "lines of 2 values: expected 128"),
        ("".join(text.splitlines(keepends=True)[:-1]), "has 7 lines: expected 8 as body_acc_x"),
        ("", "cannot be read"),
    ):
        path.write_text(damaged)
        with pytest.raises(ConfigError, match=rf"^dataset = 'har': .*body_gyro_y_test.*{message}"):
            load_dataset("har", data_dir=tmp_path)
    path.unlink()
    with pytest.raises(ConfigError, match=r"no file .*body_gyro_y_test\.txt"):
        load_dataset("har", data_dir=tmp_path)
    (tmp_path / "train/y_train.txt").write_text("7\n" * 16)
    with pytest.raises(ConfigError, match=r"y_train\.txt has the label 6"):
        load_dataset("har_features", data_dir=tmp_path)
