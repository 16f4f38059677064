"""TCGA-BRCA, written in the format of FLamby's repository."""

import csv

import numpy as np
import pytest

from fedjax_het import RunSpec, load_dataset, simulate
from fedjax_het.utils.errors import ConfigError

REGIONS = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")

pytestmark = pytest.mark.usefixtures("private_cache")


def write_tcga_brca(folder):
    """Write 72 patients and two that are in no split; return both tables as rows."""
    rng = np.random.default_rng(0)
    names = [f"feature_{i}" for i in range(36)]
    names = ["age_at_index", *names, "primary_diagnosis_Infiltrating duct carcinoma, NOS", "race"]
    patients = [f"TCGA-{i:02d}-A{i * 7 % 100:02d}" for i in range(74)]
    table = [["pid", *names, "E", "T"]]
    for patient in patients:
        features = [int(rng.integers(26, 91)), *rng.integers(0, 2, 38).tolist()]
        table.append([patient, *features, float(rng.random() < 0.4), float(rng.integers(0, 5000))])
    table[1][-2:], table[2][-2:], table[3][-2:] = [1.0, 800.0], [0.0, 800.0], [1.0, 4000.0]
    folds = [["pid", "fold", "fold2"]]
    for number, patient in enumerate(rng.permutation(patients[:72]).tolist()):
        split = "test" if number % 4 == 0 else "train"
        folds.append([patient, split, f"{split}_{number // 4 % 6}"])
    (folder / "dataset_creation_scripts").mkdir(parents=True)
    for name, rows in (
        ("brca.csv", table),
        ("dataset_creation_scripts/train_test_split.csv", folds),
    ):
        with open(folder / name, "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
    return table[1:], folds[1:]


def test_patients(tmp_path):
    table, folds = write_tcga_brca(tmp_path / "flamby/datasets/fed_tcga_brca")
    fold_by_patient = {patient: fold for patient, _, fold in folds}
    dataset = load_dataset("tcga_brca", data_dir=tmp_path)
    assert (dataset.task, dataset.num_outputs, dataset.input_shape) == ("survival", 7, (39,))
    for split in ("train", "test"):
        rows = [row for row in table if fold_by_patient.get(row[0], "").startswith(split)]
        assert getattr(dataset, f"{split}_inputs").tolist() == [row[1:40] for row in rows]
        users = [REGIONS[int(fold_by_patient[row[0]][-1])] for row in rows]
        assert getattr(dataset, f"{split}_users").tolist() == users
        for row, labels in zip(rows, getattr(dataset, f"{split}_labels"), strict=True):
            years, event = row[-1] / 365.25, row[-2]
            num_survived = sum(years > end for end in (1, 2, 3, 4, 5, 7, 10))
            expected = [0] * num_survived + ([1] if event and num_survived < 7 else [])
            assert labels.tolist() == expected + [-1] * (7 - len(expected))


@pytest.mark.slow
def test_training(tmp_path):
    write_tcga_brca(tmp_path)
    spec = RunSpec(dataset="tcga_brca", rounds=2, network_options={"hidden": []})
    result = simulate(spec, data_dir=tmp_path)
    assert result.spec.model == "mlp" and result.partition.client_names == tuple(sorted(REGIONS))
    assert np.isfinite(result.metrics["test_loss"]).all()
    predictions = result.model().predict(load_dataset("tcga_brca", data_dir=tmp_path).test_inputs)
    assert (np.diff(predictions) <= 0).all() and (predictions >= 0).all()


def test_damaged_files(tmp_path):
    write_tcga_brca(tmp_path)
    path = tmp_path / "dataset_creation_scripts/train_test_split.csv"
    text = path.read_text()
    for damaged, message in (
        (text.replace("TCGA-05", "TCGA-99"), "has 72 patients: .* of brca.csv, which has 71 of"),
        (text.replace("train_5", "train_6"), "has the fold 'train_6': expected train_0 to test_5"),
        ("a,b\n1,2\n", "has lines of 2 values: expected 3"),
    ):
        path.write_text(damaged)
        with pytest.raises(ConfigError, match=rf"^dataset = 'tcga_brca': .*split\.csv {message}"):
            load_dataset("tcga_brca", data_dir=tmp_path)
