"""Equal arrays from every source give equal digests and equal runs; names of classes survive."""

import io

import jax
import numpy as np
import pandas as pd
import pytest
from PIL import Image
from support.published_files import write_idx_splits
from support.tfds_data import write_tfds_dataset
from support.tfrecords import write_tfrecords

from fedjax_het import RunSpec, dataset_from_object, load_dataset, load_model, simulate
from fedjax_het.analysis import plot_partition
from fedjax_het.data import Dataset

SETTINGS = {"model": "mlp", "partition": "iid", "num_clients": 2, "rounds": 1, "batch_size": 8}

pytestmark = pytest.mark.usefixtures("private_cache")


def encode(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def write_all(root, arrays):
    """Write MNIST's arrays in every format; return settings and data_dir, or a data set."""
    write_idx_splits(root / "plain", arrays)
    write_idx_splits(root / "compressed/MNIST/raw", arrays, suffix=".gz")
    names = {
        f"{part}_{split}": arrays[f"{split}_{kind}"]
        for split in ("train", "test")
        for part, kind in (("x", "inputs"), ("y", "labels"))
    }
    np.savez(root / "arrays.npz", **names)
    (root / "table").mkdir()
    frames = {}
    for split in ("train", "test"):
        images = [encode(image[..., 0]) for image in arrays[f"{split}_inputs"]]
        frames[split] = pd.DataFrame({"image": images, "label": arrays[f"{split}_labels"]})
        frames[split].to_parquet(root / f"table/{split}.parquet")
    return {
        "plain": ("mnist", root / "plain"),
        "compressed": ("mnist", root / "compressed"),
        "npz": (f"npz:{root}/arrays.npz", None),
        "parquet": ("hf:table", root),
        "frames": (dataset_from_object(frames), None),
    }


def test_equal_arrays_give_equal_runs(tmp_path):
    import tensorflow_datasets as tfds

    with tfds.core.registered.skip_registration():
        write_tfds_dataset(tmp_path / "prepared", "mnist", (28, 28, 1), 10)
    sources = {"array_record": ("mnist", tmp_path / "prepared")}
    base = load_dataset("mnist", data_dir=tmp_path / "prepared")
    names = ("train_inputs", "train_labels", "test_inputs", "test_labels")
    sources |= write_all(tmp_path, {name: getattr(base, name) for name in names})
    results, digests = {}, set()
    for source, (data, data_dir) in sources.items():
        if isinstance(data, Dataset):
            results[source] = simulate(RunSpec("fedavg", "user", **SETTINGS), dataset=data)
            continue
        spec = RunSpec("fedavg", data, normalization="dataset", **SETTINGS)
        results[source] = simulate(spec, data_dir=data_dir)
    write_tfrecords(tmp_path / "prepared/mnist/1.0.0")
    spec = RunSpec("fedavg", "mnist", normalization="dataset", **SETTINGS)
    results["tfrecord"] = simulate(spec, data_dir=tmp_path / "prepared")
    expected = results["array_record"]
    for source, result in results.items():
        digests.add(result.summary["dataset_digest"])
        for metric, values in expected.metrics.items():
            np.testing.assert_array_equal(result.metrics[metric], values, err_msg=source)
        pairs = zip(
            *(jax.tree.leaves(r.model().variables) for r in (result, expected)), strict=True
        )
        assert all(np.array_equal(one, other) for one, other in pairs), source
    assert len(digests) == 1
    recorded = {r.summary["dataset_source"]: r.summary["dataset_order"] for r in results.values()}
    assert recorded == {
        "tensorflow-datasets 1.0.0, array_record": "tensorflow-datasets",
        "tensorflow-datasets 1.0.0, tfrecord": "tensorflow-datasets",
        **{"idx files in plain": "files", "idx files in raw": "files"},
        **{"npz": "files", "hf": "files", "pandas.DataFrame": "rows"},
    }


@pytest.mark.parametrize("source", ["images", "hf"])
def test_class_names_survive(source, tmp_path):
    """From folders or a table to the saved model and the labels of a figure."""
    names, frames = ("cat", "dog & fox"), {}
    for split, count in (("train", 8), ("test", 4)):
        images = np.random.default_rng(0).integers(0, 256, (2 * count, 6, 6, 3), np.uint8)
        files, labels = list(map(encode, images)), [names[i % 2] for i in range(2 * count)]
        frames[split] = pd.DataFrame({"img": files, "label": labels})
        frames[split].to_parquet(tmp_path / f"{split}.parquet")
        for number, (file, name) in enumerate(zip(files, labels, strict=True)):
            (tmp_path / split / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / split / name / f"{number}.png").write_bytes(file)
    setting = f"{source}:{tmp_path}"
    result = simulate(RunSpec("fedavg", setting, **SETTINGS))
    dataset = load_dataset(setting)
    assert dataset.class_names == names
    saved_model = load_model(result.model().save(tmp_path / "model.msgpack"))
    assert saved_model.input_spec.class_names == names
    figure = plot_partition(
        result.partition, dataset.train_labels, 2, class_names=dataset.class_names
    )
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == list(names)
