"""Heart Disease, written in the format of the UCI repository, and FLamby's preparation of it."""

import numpy as np
import pytest

from fedjax_het import RunSpec, load_dataset, simulate
from fedjax_het.utils.errors import ConfigError

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")

pytestmark = pytest.mark.usefixtures("private_cache")


def write_heart_disease(folder):
    """Write four hospitals with missing values; return the complete rows by hospital."""
    rng, content = np.random.default_rng(0), {}
    for number, hospital in enumerate(HOSPITALS):
        count = 40 - 6 * number
        columns = [
            *(rng.integers(30, 75, count), rng.integers(0, 2, count), rng.integers(1, 5, count)),
            *(rng.integers(90, 190, count), rng.integers(150, 400, count)),
            *(rng.integers(0, 2, count), rng.integers(0, 3, count), rng.integers(80, 190, count)),
            *(rng.integers(0, 2, count), rng.integers(0, 50, count) / 10),
            *(rng.integers(1, 4, count), rng.integers(0, 4, count), rng.integers(3, 8, count)),
            rng.integers(0, 5, count),
        ]
        if hospital == "switzerland":  # its cholesterol is 0, and almost all patients are ill
            columns[4], columns[13] = np.zeros(count), np.where(np.arange(count) < 2, 0, 3)
        rows = [[f"{float(value)}" for value in row] for row in zip(*columns, strict=True)]
        for row in rows[::5]:
            row[rng.integers(10, 13)] = "?"  # of the columns that are not used
        for row in rows[3::9]:
            row[rng.integers(0, 10)] = "?"
        text = "\n".join(",".join(row) for row in rows) + "\n"
        (folder / f"processed.{hospital}.data").write_text(text)
        used = [row[:10] + row[13:] for row in rows]
        content[hospital] = np.array([row for row in used if "?" not in row], float)
    return content


def prepare(rows):
    """Return features, classes and whether a row is a training example, as FLamby's code."""
    from sklearn.model_selection import train_test_split

    others = [column for column in range(10) if column not in (2, 6)]
    dummies = [rows[:, 2] == value for value in (2, 3, 4)] + [rows[:, 6] == v for v in (1, 2)]
    features = np.column_stack([rows[:, others], *dummies]).astype(float)
    labels = np.where(rows[:, 10] == 0, 0, 1)
    balanced = len(set(labels)) > 1 and all((labels == level).sum() > 2 for level in set(labels))
    _, test = train_test_split(
        *(np.arange(len(rows)),),
        test_size=1.0 - 0.66,
        train_size=0.66,
        random_state=43,
        shuffle=True,
        stratify=labels if balanced else None,
    )
    is_train = ~np.isin(np.arange(len(rows)), test)
    mean, std = features[is_train].mean(0), features[is_train].std(0, ddof=1)
    return (features - mean) / (std + 1e-9), labels, is_train


def test_preparation(tmp_path):
    content = write_heart_disease(tmp_path)
    dataset = load_dataset("heart_disease", data_dir=tmp_path)
    assert dataset.input_shape == (13,) and dataset.class_names == ("no disease", "disease")
    assert dataset.mean == (0,) * 13 and dataset.std == (1,) * 13
    for hospital, rows in content.items():
        features, labels, is_train = prepare(rows)
        for split, part in (("train", is_train), ("test", ~is_train)):
            chosen = getattr(dataset, f"{split}_users") == hospital
            assert getattr(dataset, f"{split}_labels")[chosen].tolist() == labels[part].tolist()
            inputs = getattr(dataset, f"{split}_inputs")[chosen]
            np.testing.assert_allclose(inputs, features[part], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_training(tmp_path):
    write_heart_disease(tmp_path)
    spec = RunSpec(dataset="heart_disease", rounds=1, network_options={"hidden": []})
    result = simulate(spec, data_dir=tmp_path)
    assert result.spec.model == "mlp" and result.partition.client_names == HOSPITALS
    assert np.isfinite(result.metrics["test_loss"]).all()


def test_damaged_files(tmp_path):
    write_heart_disease(tmp_path)
    path = tmp_path / "processed.va.data"
    row = ",".join(["1.0"] * 14)
    for content, message in (
        (f"{row}\n", "has 1 complete rows: expected more"),
        (row.replace("1.0", "a"), "has texts: expected numbers, or . for missing ones"),
        ("1.0,2.0\n", "has lines of 2 values: expected 14"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=rf"^dataset = 'heart_disease': .*va\.data {message}"):
            load_dataset("heart_disease", data_dir=tmp_path)
