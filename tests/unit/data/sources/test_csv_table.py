"""Tables in CSV and parquet files, named as `csv:FILE`."""

from decimal import Decimal

import numpy as np
import pandas as pd
import pytest

from fedjax_het import RunSpec, dataset_from_arrays, load_dataset, simulate
from fedjax_het.data.sources.features import convert_features
from fedjax_het.utils.errors import ConfigError

RNG = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {
        "age": RNG.normal(50, 10, 40),
        "weight": RNG.normal(70, 5, 40),
        "sex": RNG.choice(["female", "male"], 40),
        "smoker": RNG.choice(["no", "yes", None], 40),
        "label": RNG.choice(["healthy", "sick"], 40),
        "client": RNG.choice(["A", "B"], 40),
    }
)
NUMBERS = FRAME[["age", "weight"]].to_numpy().astype(np.float32)


def write(folder, train, test=None, write_frame=pd.DataFrame.to_csv, suffix=".csv"):
    folder.mkdir(exist_ok=True)
    for name, frame in {"train": train, "test": test}.items():
        if frame is not None:
            write_frame(frame, folder / f"{name}{suffix}", index=False)
    return f"csv:{folder}"


@pytest.mark.parametrize(
    ("write_frame", "suffix"),
    [(pd.DataFrame.to_csv, ".csv"), (pd.DataFrame.to_parquet, ".parquet")],
)
def test_numbers_and_categories(write_frame, suffix, tmp_path):
    name = write(tmp_path / "t", FRAME[:30], FRAME[30:], write_frame, suffix)
    dataset = load_dataset(name)
    sex = (FRAME["sex"] == "male").to_numpy().astype(int)
    smoker = FRAME["smoker"].map({"no": 3, "yes": 4}).fillna(2).astype(int)  # after the sexes
    category = np.stack([sex, smoker], 1)
    labels = (FRAME["label"] == "sick").to_numpy().astype(int)

    def take(rows):
        return {"numbers": NUMBERS[rows], "category": category[rows]}

    clients = FRAME["client"].to_numpy().astype(str)
    expected = dataset_from_arrays(
        take(slice(30)),
        labels[:30],
        take(slice(30, 40)),
        labels[30:],
        num_tokens={"category": 5},
        train_users=clients[:30],
        test_users=clients[30:],
    )
    assert dataset.digest() == expected.digest()
    assert dataset.class_names == ("healthy", "sick") and dataset.source == "csv"
    spec = RunSpec(dataset=name, model="tabular_mlp", partition="natural", rounds=1)
    assert np.isfinite(simulate(spec).metrics["test_loss"]).all()


def test_numbers_alone_and_regression(tmp_path):
    frame = FRAME[["age", "weight"]].assign(price=NUMBERS.sum(1) / 3)
    frame.to_csv(tmp_path / "houses.csv", index=False)
    dataset = load_dataset(f"csv:{tmp_path}/houses.csv?label=price&test_fraction=0.25")
    assert (dataset.input_kind, dataset.task) == ("features", "regression")
    assert len(dataset.test_labels) == 10 and dataset.num_users == 0
    pairs = np.concatenate([dataset.train_inputs, dataset.test_inputs]).sum(1) / 3
    labels = np.concatenate([dataset.train_labels, dataset.test_labels])[:, 0]
    np.testing.assert_allclose(labels, pairs, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda f: f.rename(columns={"label": "z"}), "", "no column of labels"),
        (lambda f: f, "label=price", "label = 'price': no such column"),
        (lambda f: f.assign(age=np.nan), "", "column 'age' has missing numbers"),
        (lambda f: f.assign(label=None), "", "column 'label' of labels has missing values"),
        (lambda f: f, "task=regression", "column 'label' has texts"),
        (lambda f: f[["label"]], "", "no column besides labels"),
        (lambda f: f[:0], "", "has no rows"),
        (lambda f: f, "test_fraction=2", "test_fraction"),
    ],
)
def test_invalid_tables(change, options, message, tmp_path):
    name = write(tmp_path / "t", change(FRAME))
    options = options if "test_fraction" in options else f"{options}&test_fraction=0.2".strip("&")
    with pytest.raises(ConfigError, match=message) as error:
        load_dataset(f"{name}?{options}")
    assert "\n" not in str(error.value)


def test_missing_and_damaged_files(tmp_path):
    with pytest.raises(ConfigError, match="no table in"):
        load_dataset(f"csv:{tmp_path}")
    (tmp_path / "train.csv").write_bytes(b'a,b\n"1')
    with pytest.raises(ConfigError, match=r"train\.csv cannot be read"):
        load_dataset(f"csv:{tmp_path}?test_fraction=0.2")
    write(tmp_path, FRAME[:30], FRAME[30:].drop(columns="age"))
    with pytest.raises(ConfigError, match="split 'test' has no column 'age'"):
        load_dataset(f"csv:{tmp_path}")


def test_columns_of_parquet(tmp_path):
    """Decimals and large integers are numbers; lists, bytes and times are refused."""
    labels = np.arange(12) % 3
    columns = {"price": [Decimal(i) / 4 for i in range(12)], "id": [2**70 + i for i in range(12)]}
    frame = pd.DataFrame({"price": columns["price"], "label": labels})
    dataset = load_dataset(write(tmp_path / "a", frame, frame, pd.DataFrame.to_parquet, ".parquet"))
    np.testing.assert_array_equal(dataset.train_inputs[:, 0], np.arange(12) / 4)
    frame = pd.DataFrame({"id": columns["id"], "label": labels})
    assert convert_features([frame], ["id"])[0][0].dtype == np.float32
    others = {"list": [[1, 2]] * 12, "bytes": [b"x"] * 12}
    others["datetime64"] = list(pd.date_range("2020", periods=12))
    for word, values in others.items():
        frame = pd.DataFrame({"a": values, "label": labels})
        with pytest.raises(ConfigError, match=rf"^column 'a' has a? ?{word}.*: expected numbers"):
            convert_features([frame], ["a"])


def test_rows_without_a_name_or_a_client(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b,label\n" + "r1,1,2,x\nr2,3,4,y\n" * 9)
    with pytest.raises(ConfigError, match="rows with more values than the header"):
        load_dataset(f"csv:{path}?test_fraction=0.25")
    path.write_text("a,client,label\n" + "1,u,x\n3,,y\n" * 9)
    with pytest.raises(ConfigError, match="column 'client' of clients has missing values"):
        load_dataset(f"csv:{path}?test_fraction=0.25")


def test_numbers_beside_a_text_are_reported(tmp_path, caplog):
    path = tmp_path / "a.csv"
    path.write_text("a,label\n" + "".join(f"{i or '?'},{i % 2}\n" for i in range(20)))
    load_dataset(f"csv:{path}?test_fraction=0.25")
    assert "column 'a' has categories, as it has texts such as '?' beside numbers" in caplog.text


@pytest.mark.parametrize("gap", ["", "NA", "?"])
def test_truth_values_with_gaps_follow_the_rule_of_numbers(gap, tmp_path, caplog):
    """A missing truth value is an error as a missing number, and another text makes categories."""
    path = tmp_path / "a.csv"
    messages = []
    for values in (("True", "false", gap), ("1", "0", gap)):
        rows = "".join(f"{values[i % 3]},{i},{i % 2}\n" for i in range(18))
        path.write_text(f"flag,n,label\n{rows}")
        caplog.clear()
        try:
            load_dataset(f"csv:{path}?test_fraction=0.25")
            messages.append(caplog.text)
        except ConfigError as error:
            messages.append(str(error))
    assert messages[0] == messages[1]
    expected = "as it has texts such as '?' beside numbers or truth values"
    if gap != "?":
        expected = "'flag' has missing numbers: expected a number or a truth value in each row"
    assert expected in messages[0]
    path.write_text("flag,label\n" + "".join(f"{i % 2 == 0},{i % 3}\n" for i in range(18)))
    dataset = load_dataset(f"csv:{path}?test_fraction=0.25")
    assert set(dataset.train_inputs.ravel()) == {0.0, 1.0}


def test_features_with_large_means():
    features = np.array([[5e6, 1.7e9], [7e6, 1.8e9]] * 3, np.float32)
    dataset = dataset_from_arrays(features, [0, 1] * 3, features, [0, 1] * 3)
    np.testing.assert_allclose(dataset.mean, features.mean(0, np.float64), rtol=1e-6)


def test_index_of_pandas_is_no_feature(tmp_path, caplog):
    frame = FRAME[["age", "weight", "label"]]
    frame.to_csv(tmp_path / "a.csv")
    dataset = load_dataset(f"csv:{tmp_path}/a.csv?test_fraction=0.25")
    assert dataset.input_shape == (2,)
    assert "1 columns without a name are left out" in caplog.text


def test_the_column_of_labels_is_no_input(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("age,label\n" + "1,0\n2,1\n" * 10)
    with pytest.raises(ConfigError, match=r"inputs = .*: expected other columns than the column"):
        load_dataset(f"csv:{path}?inputs=age,label&test_fraction=0.2")


def test_whole_numbers_from_one_are_classes_without_a_gap(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("age,label\n" + "1,1\n2,10\n3,2\n" * 10)
    dataset = load_dataset(f"csv:{path}?test_fraction=0.2")
    assert dataset.class_names == ("1", "2", "10")
    assert np.bincount(dataset.train_labels).tolist() == [8, 8, 8]
