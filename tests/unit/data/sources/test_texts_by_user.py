"""Shakespeare by speaker: texts in files of LEAF and in files of TensorFlow Federated."""

import json
import re
import string

import numpy as np
import pytest
from support.published_files import write_tff_sqlite

from fedjax_het import RunSpec, load_dataset, simulate
from fedjax_het.utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("private_cache")

PUNCTUATION = "\n !\"&'(),-.0123456789:;>?"
LETTERS = f"{PUNCTUATION}{string.ascii_uppercase}[]{string.ascii_lowercase}}}"
# The vocabulary of the tutorial on text generation.
VOCABULARY = [*"dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\n"]
VOCABULARY += [*"aeimquyAEIMQUY]!%)-159\r"]
PASSAGES = {
    "HAMLET_HAMLET": "To be, or not to be: that is the question:\n  Whether 'tis nobler in the mind "
    'to suffer\nThe slings & arrows (of "outrageous" fortune) - [Aside] 1603; yea! > no?\n',
    "HAMLET_OPHELIA": "Good my lord,\nHow does your honour for this many a day? I hope all will be "
    "well. We must be patient.",
    "MACBETH_PORTER": "Knock, knock!",  # no sequence of 80 characters
}
SMALL = {"model": "lstm", "network_options": {"hidden": 4, "layers": 1}, "batch_size": 8}


def cut(passage, length=80):
    """Cut a passage as LEAF's `shake_utils.py` does."""
    text = re.sub(r"   *", r" ", passage.replace("\n", " "))
    starts = range(len(text) - length)
    return [text[i : i + length] for i in starts], [text[i + length] for i in starts]


def write_leaf(folder):
    """Write both splits as LEAF does, with the keys `hierarchies` and `raw`."""
    expected = {}
    for split, rows in (("train", slice(0, -5)), ("test", slice(-5, None))):
        content = {"users": [], "hierarchies": [], "num_samples": [], "user_data": {}}
        expected[split] = {"x": [], "y": [], "users": []}
        for user, passage in PASSAGES.items():
            x, y = (values[rows] for values in cut(passage))
            content["users"].append(user)
            content["hierarchies"].append(user.partition("_")[0])
            content["num_samples"].append(len(x))
            content["user_data"][user] = {"raw": passage, "x": x, "y": y}
            expected[split]["x"] += [[LETTERS.find(c) for c in text] for text in x]
            expected[split]["y"] += [LETTERS.find(c) for c in y]
            expected[split]["users"] += [user] * len(x)
        (folder / split).mkdir(parents=True)
        (folder / split / f"all_data_niid_0_keep_0_{split}_9.json").write_text(json.dumps(content))
    return expected


def test_leaf(tmp_path):
    expected = write_leaf(tmp_path / "shakespeare/data")
    name = f"leaf:{tmp_path}/shakespeare"
    dataset = load_dataset(name)
    assert (dataset.task, dataset.num_tokens, dataset.num_classes) == ("classification", 80, 80)
    assert dataset.class_names == tuple(LETTERS) and dataset.input_kind == "tokens"
    for split, arrays in expected.items():
        assert getattr(dataset, f"{split}_inputs").tolist() == arrays["x"]
        assert getattr(dataset, f"{split}_labels").tolist() == arrays["y"]
        assert getattr(dataset, f"{split}_users").tolist() == arrays["users"]
    again = load_dataset(name)  # from the cache
    assert again.digest() == dataset.digest() and again.class_names == dataset.class_names
    result = simulate(RunSpec("fedavg", name, partition="natural", rounds=1, **SMALL))
    assert result.partition.client_names == ("HAMLET_HAMLET", "HAMLET_OPHELIA")
    assert np.isfinite(result.metrics["test_loss"]).all()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"x": ["a" * 80, "b" * 79], "y": ["b", "c"]}, r"have \[79, 80\] characters: expected one"),
        ({"x": ["a" * 80], "y": ["bc"]}, "labels have 2 characters: expected one"),
        (
            {"x": ["a" * 80], "y": [1]},
            "are <U80 and int64: expected lists of numbers and integers, ",
        ),
        ({"x": ["a" * 80], "y": [""]}, "expected one length"),
    ],
)
def test_unusable_texts(data, message, tmp_path):
    write_leaf(tmp_path)
    text = json.dumps({"users": ["f1"], "user_data": {"f1": data}})
    (tmp_path / "train/all_data_1.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"^dataset = 'leaf:.*all_data_1\.json.*'f1'.*{message}"):
        load_dataset(f"leaf:{tmp_path}")


def test_characters_outside_the_vocabulary(tmp_path):
    """They are the last character, as in LEAF's one-hot labels."""
    data = {"x": ["é" + "a" * 78 + "€", "$" + "a" * 79], "y": ["é", "z"]}
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        text = json.dumps({"users": ["f1"], "user_data": {"f1": data}})
        (tmp_path / split / "all.json").write_text(text)
    dataset = load_dataset(f"leaf:{tmp_path}")
    assert dataset.train_inputs[:, 0].tolist() == [79, 79] and dataset.train_inputs[0, -1] == 79
    assert dataset.train_labels.tolist() == [79, 78]


def encode_by_hand(snippet):
    """Return the examples of a snippet as lists, from the steps of TensorFlow Federated."""
    tokens = [88] + [VOCABULARY.index(c) + 1 if c in VOCABULARY else 87 for c in snippet] + [89]
    while len(tokens) % 81:
        tokens.append(0)
    rows = [tokens[i : i + 81] for i in range(0, len(tokens), 81)]
    return [row[:-1] for row in rows], [[t if t else -1 for t in row[1:]] for row in rows]


def test_tff(tmp_path):
    h5py = pytest.importorskip("h5py")
    assert len(VOCABULARY) == 86
    snippets = {
        "train": {
            "KING_LEAR_KENT": ["Hark!", PASSAGES["HAMLET_HAMLET"], "x" * 79],
            "THE_TAMING_CUPID": ["Hail to thee, worthy Timon {~}"],
        },
        "test": {"KING_LEAR_KENT": ["'Twas a rough fight."]},
    }
    for split, users in snippets.items():
        with h5py.File(tmp_path / f"shakespeare_{split}.h5", "w") as file:
            for user, texts in users.items():
                values = [text.encode() for text in texts]
                group = file.create_group(f"examples/{user}")
                group.create_dataset("snippets", data=values, dtype=h5py.string_dtype("ascii"))
    name = f"tff:{tmp_path}"
    dataset = load_dataset(name)
    assert (dataset.task, dataset.num_tokens, dataset.num_outputs) == ("next_token", 90, 90)
    for split, users in snippets.items():
        tokens, labels, owners = [], [], []
        for user, texts in users.items():
            for x, y in map(encode_by_hand, texts):
                tokens, labels, owners = tokens + x, labels + y, owners + [user] * len(x)
        assert getattr(dataset, f"{split}_inputs").tolist() == tokens
        assert getattr(dataset, f"{split}_labels").tolist() == labels
        assert getattr(dataset, f"{split}_users").tolist() == owners
    assert load_dataset(f"{name}/shakespeare_train.h5").digest() == dataset.digest()
    columns = {
        split: {user: {"snippets": [t.encode() for t in texts]} for user, texts in users.items()}
        for split, users in snippets.items()
    }
    write_tff_sqlite(tmp_path / "shakespeare.sqlite", columns)
    assert load_dataset(f"{name}/shakespeare.sqlite").digest() == dataset.digest()
    result = simulate(RunSpec("fedavg", name, partition="natural", rounds=1, **SMALL))
    assert result.spec.num_clients == 2 and np.isfinite(result.metrics["test_loss"]).all()
    with pytest.raises(ConfigError, match=r"no column pixels"):
        load_dataset(f"{name}?image=pixels")
