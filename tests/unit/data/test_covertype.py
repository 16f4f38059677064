"""Covertype, written in the format of the UCI repository."""

import gzip

import numpy as np
import pytest

from fedjax_het import RunSpec, load_dataset, simulate
from fedjax_het.utils.errors import ConfigError

NUM_TRAIN = 11_340 + 3_780

pytestmark = pytest.mark.usefixtures("private_cache")


def make_rows(num_rows):
    """Return rows with ten numbers, indicators of 4 areas and 40 soils, and the type."""
    rng = np.random.default_rng(0)
    areas, soils = rng.integers(0, 4, num_rows), rng.integers(0, 40, num_rows)
    columns = [rng.integers(0, 4000, (num_rows, 10)), np.eye(4, dtype=int)[areas]]
    types = rng.integers(1, 8, num_rows)
    return np.concatenate([*columns, np.eye(40, dtype=int)[soils], types[:, None]], axis=1)


def test_splits_and_training(tmp_path):
    rows = make_rows(NUM_TRAIN + 30)
    text = "\n".join(",".join(map(str, row)) for row in rows.tolist()) + "\n\n"
    (tmp_path / "covtype.data.gz").write_bytes(gzip.compress(text.encode(), 1))
    dataset = load_dataset("covertype", data_dir=tmp_path)
    for split, part in (("train", rows[:NUM_TRAIN]), ("test", rows[NUM_TRAIN:])):
        np.testing.assert_array_equal(getattr(dataset, f"{split}_inputs"), part[:, :54])
        np.testing.assert_array_equal(getattr(dataset, f"{split}_labels"), part[:, 54] - 1)
    assert dataset.input_kind == "features" and dataset.class_names[6] == "krummholz"
    settings = {
        "num_clients": 2,
        "rounds": 1,
        "local_epochs": 1,
        "network_options": {"hidden": [4]},
    }
    result = simulate(RunSpec(dataset="covertype", **settings), data_dir=tmp_path)
    assert (result.spec.model, result.spec.partition) == ("mlp", "dirichlet_capped")
    assert np.isfinite(result.metrics["test_loss"]).all()


def test_damaged_files(tmp_path):
    path = tmp_path / "covtype.data"
    for content, message in (
        ("\n".join(["1," * 54 + "1"] * 20), "has 20 lines: expected more than 15,120"),
        ("1,2,3\n", "has lines of 3 values: expected 55"),
        ("a," * 54 + "1", "cannot be read .*: expected lines of 55 values"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=rf"^dataset = 'covertype': .*covtype.*{message}"):
            load_dataset("covertype", data_dir=tmp_path)
