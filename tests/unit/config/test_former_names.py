"""Names of version 0.6: settings in calls, files, command lines and digests, and arrays of data."""

import dataclasses
import hashlib
import json
from typing import NamedTuple

import numpy as np
import pytest

import fedjax_het
from fedjax_het import ConfigError, RunSpec, dataset_from_arrays, grid, load_dataset
from fedjax_het.cli.options import load_config_file, rename_flags
from fedjax_het.config.settings import FORMER_SETTING_NAMES
from fedjax_het.data.array_cache import load_cached_arrays
from fedjax_het.methods import Batch
from fedjax_het.runtime.checkpointing import load_checkpoint, save_checkpoint
from fedjax_het.utils.former_names import FORMER_ARRAY_NAMES
from fedjax_het.utils.io import write_npz

VALUES = {
    "accumulation": 2,
    "local_tests": True,
    "measures": "macro_f1",
    "min_gain": 0.01,
    "normalisation": "unit",
    "scored": "client",
    "stop_at": 0.9,
}
# Settings without which a setting is an error.
REQUIRED = {"min_gain": {"patience": 3}, "scored": {"client_tests": True}}


def test_every_former_name_is_tried():
    assert VALUES.keys() == FORMER_SETTING_NAMES.keys()


@pytest.mark.parametrize("former_name", VALUES)
def test_former_name_is_deprecated(former_name):
    name, value = FORMER_SETTING_NAMES[former_name], VALUES[former_name]
    with pytest.warns(DeprecationWarning, match=f"{former_name} is deprecated, use {name}"):
        spec = RunSpec("scaffold", **{former_name: value}, **REQUIRED.get(former_name, {}))
    assert spec == RunSpec("scaffold", **{name: value}, **REQUIRED.get(former_name, {}))
    settings = {"algorithm": "scaffold", former_name: value, **REQUIRED.get(former_name, {})}
    assert RunSpec.from_dict(settings) == spec  # no warning
    with pytest.raises(ConfigError, match=f"expected only {name}"):
        RunSpec.from_dict({former_name: value, name: value})


def test_grid_accepts_former_name():
    with pytest.warns(DeprecationWarning, match="grid: stop_at is deprecated"):
        specs = grid(algorithm="fedavg", stop_at=[0.5, 0.6])
    assert [spec.target_accuracy for spec in specs] == [0.5, 0.6]


def test_load_dataset_accepts_former_name():
    with pytest.warns(DeprecationWarning, match="load_dataset: normalisation"):
        dataset = load_dataset("digits", normalisation="unit")
    assert dataset.digest() == load_dataset("digits", normalization="unit").digest()


def test_digest_contains_former_names():
    """Names of results from version 0.6 stay valid."""
    settings = {FORMER_SETTING_NAMES[name]: value for name, value in VALUES.items()}
    spec = RunSpec("scaffold", "digits", patience=3, **settings).resolved()
    former = {name: former_name for former_name, name in FORMER_SETTING_NAMES.items()}
    stored = {former.get(name, name): value for name, value in spec.to_dict().items()}
    assert VALUES.keys() <= stored.keys() | {"scored", "local_tests"}
    text = json.dumps(stored, sort_keys=True).encode()
    assert spec.digest() == hashlib.sha256(text).hexdigest()[:16]


def test_digest_omits_defaults_of_added_options():
    former = {"algorithm": "fedgen", "dataset": "digits", "protocol": "dynafed"}
    spec = RunSpec(**former)
    assert spec.digest() == "65f08e231b011de1"  # of version 0.6.0
    assert RunSpec(**former, options={"teacher_weights": "code"}).digest() != spec.digest()


def test_file_and_flags_accept_former_names(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("stop-at: 0.9\nlocal_tests: true\n")
    assert load_config_file(path) == {"target_accuracy": 0.9, "client_tests": True}
    words = ["--stop-at=0.9", "--min_gain", "0.1", "--alpha", "1", "--local-tests", "True"]
    expected = ["--target-accuracy=0.9", "--min-delta", "0.1", "--alpha", "1", "--client-tests"]
    assert rename_flags(words) == [*expected, "True"]
    assert rename_flags(["--measure", "bmta"]) == ["--metric", "bmta"]


def test_former_function_is_deprecated():
    with pytest.warns(DeprecationWarning, match="register_measure is deprecated, use register_met"):
        assert fedjax_het.register_measure is fedjax_het.register_metric


def make_dataset(**arrays):
    rows, labels = np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6) % 2
    arrays = {"train_inputs": rows, "test_inputs": rows[:2], **arrays}
    return dataset_from_arrays(**arrays, train_labels=labels, test_labels=labels[:2])


def test_dataset_accepts_former_names():
    dataset, rows = make_dataset(), np.ones((6, 2), np.float32)
    for former_name, name in FORMER_ARRAY_NAMES.items():
        message = f"Dataset.{former_name} is deprecated, use {name}"
        with pytest.warns(DeprecationWarning, match=message) as record:
            assert getattr(dataset, former_name) is getattr(dataset, name)
        assert len(record) == 1 and record[0].filename == __file__
    with pytest.warns(
        DeprecationWarning, match="train_images is deprecated, use train_i"
    ) as record:
        changed = dataclasses.replace(dataset, train_images=rows)
    assert len(record) == 1 and record[0].filename == __file__
    assert changed.train_inputs is rows and changed.test_inputs is dataset.test_inputs
    arguments = {"test_images": rows[:2], "train_labels": [0, 1] * 3, "test_labels": [0, 1]}
    with pytest.warns(DeprecationWarning, match="dataset_from_arrays: test_images") as record:
        changed = dataset_from_arrays(rows, **arguments)
    assert record[0].filename == __file__
    np.testing.assert_array_equal(changed.test_inputs, rows[:2])


def test_cached_arrays_have_present_names(tmp_path):
    write_npz(tmp_path / "old.npz", {"train_images": np.arange(3), "train_labels": np.ones(3)}, {})
    arrays, _ = load_cached_arrays("old", tmp_path)
    assert arrays.keys() == {"train_inputs", "train_labels"}


def test_inputs_of_examples_accept_former_names():
    rows = np.ones((4, 2), np.float32)
    with pytest.warns(
        DeprecationWarning, match="Batch: images is deprecated, use inputs"
    ) as record:
        batch = Batch(images=rows, labels=None, mask=None, step_index=0)
    assert len(record) == 1 and record[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="Batch.images is deprecated, use inputs"):
        assert batch.images is rows
    with pytest.warns(DeprecationWarning, match="Batch: images is deprecated"):
        changed = batch._replace(images=rows + 1)
    assert changed._fields == batch._fields and changed.inputs is not rows


def test_states_with_former_names_are_read(tmp_path):
    class FormerState(NamedTuple):
        images: np.ndarray

    class State(NamedTuple):
        inputs: np.ndarray

    save_checkpoint(tmp_path / "state", [FormerState(np.arange(3))], {})
    (state,) = load_checkpoint(tmp_path / "state", [State(np.zeros(3, np.arange(3).dtype))])
    np.testing.assert_array_equal(state.inputs, np.arange(3))
