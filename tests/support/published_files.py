"""Small data sets, written in the formats in which others publish them."""

import contextlib
import gzip
import pickle
import sqlite3
import struct

import numpy as np


def random_splits(shape, num_classes, counts=(24, 9), seed=0):
    """Return images and labels of both splits by name; each class occurs."""
    rng, arrays = np.random.default_rng(seed), {}
    for split, count in zip(("train", "test"), counts, strict=True):
        arrays[f"{split}_inputs"] = rng.integers(0, 256, (count, *shape), np.uint8)
        labels = rng.permutation(np.arange(count) % num_classes)
        arrays[f"{split}_labels"] = labels.astype(np.int32)
    return arrays


def write_idx(path, values, *, compress=False):
    """Write uint8 values as an idx file."""
    content = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    content += values.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if compress else content)


def write_idx_splits(folder, arrays, *, prefix="", test="t10k", suffix="", transposed=False):
    """Write both splits as the four files of MNIST."""
    for split, name in (("train", "train"), ("test", test)):
        images = arrays[f"{split}_inputs"][..., 0]
        images = images.swapaxes(1, 2) if transposed else images
        for kind, values in (("images-idx3", images), ("labels-idx1", arrays[f"{split}_labels"])):
            path = folder / f"{prefix}{name}-{kind}-ubyte{suffix}"
            write_idx(path, values, compress=suffix == ".gz")


def write_cifar_binary(folder, arrays, *, num_batches, class_names):
    """Write the binary version of CIFAR-10 (five batches) or CIFAR-100 (one)."""
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        pixels = arrays[f"{split}_inputs"].transpose(0, 3, 1, 2).reshape(-1, 3072)
        labels = arrays[f"{split}_labels"][:, None].astype(np.uint8)
        if num_batches == 1:  # CIFAR-100 has the number of a group of classes first
            labels = np.concatenate([labels // 5, labels], axis=1)
        records = np.concatenate([labels, pixels], axis=1)
        if num_batches == 1:
            (folder / f"{split}.bin").write_bytes(records.tobytes())
        elif split == "test":
            (folder / "test_batch.bin").write_bytes(records.tobytes())
        else:
            for number, part in enumerate(np.array_split(records, num_batches), 1):
                (folder / f"data_batch_{number}.bin").write_bytes(part.tobytes())
    file = "fine_label_names.txt" if num_batches == 1 else "batches.meta.txt"
    (folder / file).write_text("".join(f"{name}\n" for name in class_names) + "\n")


class _Python2Array:
    """An array as Python 2 and NumPy 1 pickled it: its content is a text."""

    def __init__(self, array):
        self.array = array

    def __reduce__(self):
        reconstruct, arguments, state = self.array.__reduce__()
        return reconstruct, arguments, (*state[:-1], state[-1].decode("latin1"))


def write_cifar_python(folder, arrays, *, num_batches, class_names, keys_are_bytes=False):
    """Write the Python version of CIFAR-10 (five batches) or CIFAR-100 (one)."""
    folder.mkdir(parents=True)

    def write(file, values):
        values = {k.encode() if keys_are_bytes else k: v for k, v in values.items()}
        content = pickle.dumps(values, protocol=2)
        # The name of NumPy's module before version 2.
        content = content.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
        (folder / file).write_bytes(content)

    def write_batch(file, images, labels):
        pixels = images.transpose(0, 3, 1, 2).reshape(-1, 3072)
        values = {"fine_labels": labels.tolist(), "coarse_labels": (labels // 5).tolist()}
        values = values if num_batches == 1 else {"labels": labels.tolist()}
        write(file, {"data": _Python2Array(pixels), **values, "filenames": ["a.png"] * len(labels)})

    images, labels = arrays["train_inputs"], arrays["train_labels"]
    if num_batches == 1:
        write_batch("train", images, labels)
        write("meta", {"fine_label_names": list(class_names), "coarse_label_names": ["x"]})
    else:
        for number, rows in enumerate(np.array_split(np.arange(len(labels)), num_batches), 1):
            write_batch(f"data_batch_{number}", images[rows], labels[rows])
        write("batches.meta", {"label_names": list(class_names), "num_vis": 3072})
    test = "test" if num_batches == 1 else "test_batch"
    write_batch(test, arrays["test_inputs"], arrays["test_labels"])


def write_tff_sqlite(path, splits):
    """Write columns of each user of each split as the SQLite files of TensorFlow Federated."""
    from tensorflow_datasets.proto import tf_example_pb2

    def serialize(columns):
        example = tf_example_pb2.Example()
        for name, value in columns.items():
            feature = example.features.feature[name]
            if isinstance(value, bytes):
                feature.bytes_list.value.append(value)
            elif isinstance(value, np.ndarray):
                feature.float_list.value.extend(value.ravel().tolist())
            else:
                feature.int64_list.value.append(int(value))
        return example.SerializeToString()

    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL, "
            "serialized_example_proto BLOB NOT NULL);"
        )
        for split, users in splits.items():
            for user, columns in reversed(users.items()):
                for values in zip(*columns.values(), strict=True):
                    content = serialize(dict(zip(columns, values, strict=True)))
                    row = (split, user, content)
                    connection.execute("INSERT INTO examples VALUES (?, ?, ?);", row)
        connection.commit()


def assert_same_arrays(dataset, arrays):
    """Require the arrays of a data set, in this order."""
    for name, array in arrays.items():
        np.testing.assert_array_equal(getattr(dataset, name), array, err_msg=name)
