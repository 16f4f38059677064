"""Adult, written in the format of the UCI repository."""

import gzip

import numpy as np
import pytest

from fedjax_het import RunSpec, load_dataset, simulate
from fedjax_het.utils.errors import ConfigError

NUMBERS = (0, 2, 4, 10, 11, 12)
CATEGORIES = (1, 3, 5, 6, 7, 8, 9, 13)
# The first lines of both files, and lines with missing values.
TRAIN = """\
39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, \
2174, 0, 40, United-States, <=50K
50, Self-emp-not-inc, 83311, Bachelors, 13, Married-civ-spouse, Exec-managerial, Husband, White, \
Male, 0, 0, 13, United-States, <=50K
27, ?, 177119, Some-college, 10, Divorced, ?, Unmarried, White, Female, 0, 0, 44, ?, <=50K
52, Self-emp-not-inc, 209642, HS-grad, 9, Married-civ-spouse, Exec-managerial, Husband, White, \
Male, 0, 0, 45, United-States, >50K
28, Private, 338409, Bachelors, 13, Married-civ-spouse, Prof-specialty, Wife, Black, Female, 0, \
1902, 40, Cuba, >50K

"""
TEST = """\
|1x3 Cross validator
25, Private, 226802, 11th, 7, Never-married, Machine-op-inspct, Own-child, Black, Male, 0, 0, 40, \
United-States, <=50K.
18, ?, 103497, Some-college, 10, Never-married, ?, Own-child, White, Female, 0, 0, 30, \
United-States, <=50K.
44, Private, 160323, Some-college, 10, Married-civ-spouse, Machine-op-inspct, Husband, Black, \
Male, 7688, 0, 40, United-States, >50K.

"""


def split_lines(text):
    return [line.split(", ") for line in text.splitlines() if line and line[0] != "|"]


def write_adult(folder, train=TRAIN, test=TEST):
    folder.mkdir(exist_ok=True)
    (folder / "adult.data").write_text(train)
    (folder / "adult.test").write_text(test)


def test_tables(tmp_path):
    write_adult(tmp_path / "adult")
    dataset = load_dataset("adult", data_dir=tmp_path)
    rows = {"train": split_lines(TRAIN), "test": split_lines(TEST)}
    categories, offset = {}, 0
    for column in CATEGORIES:
        values = sorted({row[column] for split in rows.values() for row in split})
        categories[column] = {value: i for i, value in enumerate(values, offset)}
        offset += len(values)
    for split, own_rows in rows.items():
        inputs = getattr(dataset, f"{split}_inputs")
        numbers = [[float(row[column]) for column in NUMBERS] for row in own_rows]
        assert inputs["numbers"].tolist() == numbers
        codes = [[categories[column][row[column]] for column in CATEGORIES] for row in own_rows]
        assert inputs["category"].tolist() == codes
        labels = [int(row[-1].startswith(">")) for row in own_rows]
        assert getattr(dataset, f"{split}_labels").tolist() == labels
    assert dataset.class_names == ("<=50K", ">50K")
    assert dict(dataset.num_tokens) == {"category": offset, "numbers": None}
    for name in ("adult.data", "adult.test"):
        path = tmp_path / "adult" / name
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert load_dataset("adult", data_dir=tmp_path).digest() == dataset.digest()


@pytest.mark.slow
def test_training(tmp_path):
    write_adult(tmp_path, train=TRAIN * 8)
    options = {"hidden": [4], "embedding": 2}
    settings = {"partition": "iid", "num_clients": 2, "rounds": 1, "network_options": options}
    result = simulate(RunSpec(dataset="adult", **settings), data_dir=tmp_path)
    assert result.spec.model == "tabular_mlp"
    assert np.isfinite(result.metrics["test_loss"]).all()


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (TEST.replace("<=50K.", "<=60K."), "column 'income': the name '<=60K' is not among <=50K"),
        (TEST.replace("25,", "young,"), "has texts in column 'age': expected numbers"),
        (TEST.replace(", 7688", ""), "has texts in column 'hours-per-week'"),
        (TEST.replace(",", ";"), "lines of 1 values: expected 15"),
        ("|1x3 Cross validator\n\n", "cannot be read .*: expected lines of 15 values"),
    ],
)
def test_damaged_files(test, message, tmp_path):
    write_adult(tmp_path, test=test)
    with pytest.raises(ConfigError, match=rf"^dataset = 'adult': .*adult\.test.*{message}"):
        load_dataset("adult", data_dir=tmp_path)
