"""AG News, written in the format of its authors."""

import csv
import io
from functools import partial

import numpy as np
import pandas as pd
import pytest

from fedjax_het import RunSpec, load_dataset, simulate
from fedjax_het.data.sources.texts import encode_texts
from fedjax_het.utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("private_cache")

TRAIN = r""""3","Wall St. Bears Claw Back (Reuters)","Reuters - ""Short-sellers"", Wall Street's \band."
"4","Web: Google's <br />IPO; up!","The price, of the IPO? #39;High"
"1","Ceasefire, again","the NA talks"
"2","Cup final","the cup
of the city"
"""
TEST = r""""2","The cup","zebra the (reuters)"
"1","NA",""
"""
# (class, words in lower case without quotation marks, colons and semicolons), by hand.
TRAIN_WORDS = [
    (2, "wall st . bears claw back ( reuters ) reuters - short-sellers , wall street ' s \\band ."),
    (3, "web google ' s ipo up ! the price , of the ipo ? #39 high"),
    (0, "ceasefire , again the na talks"),
    (1, "cup final the cup of the city"),
]
TEST_WORDS = [(1, "the cup zebra the ( reuters )"), (0, "na")]


def write_ag_news(folder, train=TRAIN, test=TEST):
    folder.mkdir(exist_ok=True)
    (folder / "train.csv").write_text(train)
    (folder / "test.csv").write_text(test)


def test_tokens(tmp_path):
    write_ag_news(tmp_path / "ag_news_csv")
    dataset = load_dataset("ag_news", data_dir=tmp_path)
    words = [word for _, text in TRAIN_WORDS for word in text.split()]
    ranked = sorted(set(words), key=lambda word: (-words.count(word), word))
    assert ranked[:3] == ["the", ",", "'"]  # five and three times, then by their characters
    assert dataset.num_tokens == len(ranked) + 2 and dataset.input_shape == (200,)
    for split, rows in (("train", TRAIN_WORDS), ("test", TEST_WORDS)):
        assert getattr(dataset, f"{split}_labels").tolist() == [label for label, _ in rows]
        for tokens, (_, text) in zip(getattr(dataset, f"{split}_inputs"), rows, strict=True):
            numbers = [ranked.index(w) + 2 if w in ranked else 1 for w in text.split()]
            assert tokens.tolist() == numbers + [0] * (200 - len(numbers))
    assert dataset.class_names == ("World", "Sports", "Business", "Sci/Tech")
    (tmp_path / "hf/data").mkdir(parents=True)
    for split, text in (("train", TRAIN), ("test", TEST)):
        rows = list(csv.reader(io.StringIO(text)))
        columns = {
            "text": [f"{row[1]} {row[2]}" for row in rows],
            "label": [int(r[0]) - 1 for r in rows],
        }
        path = tmp_path / f"hf/data/{split}-00000-of-00001.parquet"
        pd.DataFrame(columns).to_parquet(path)
    assert load_dataset("ag_news", data_dir=tmp_path / "hf").digest() == dataset.digest()
    path.write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match=r"test-00000.*cannot be read .*expected text and label"):
        load_dataset("ag_news", data_dir=tmp_path / "hf")


def test_limits(tmp_path, monkeypatch):
    few_tokens = partial(encode_texts, max_tokens=4)
    monkeypatch.setattr("fedjax_het.data.ag_news.encode_texts", few_tokens)
    train = "\n".join(f'"{c}","b a b","c{" a b" * 150}"' for c in (1, 2, 3, 4))
    write_ag_news(tmp_path, train=train)
    dataset = load_dataset("ag_news", data_dir=tmp_path)
    assert dataset.num_tokens == 4  # b is the more frequent word
    assert dataset.train_inputs[0].tolist() == [2, 3, 2, 1, *([3, 2] * 98)]


@pytest.mark.slow
def test_training(tmp_path):
    write_ag_news(tmp_path, train=TRAIN * 8)
    settings = {
        "partition": "iid",
        "num_clients": 2,
        "rounds": 1,
        "network_options": {"embedding": 4},
    }
    result = simulate(RunSpec(dataset="ag_news", **settings), data_dir=tmp_path)
    assert result.spec.model == "fasttext" and np.isfinite(result.metrics["test_loss"]).all()


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ('"5","a","b"\n', "has the label 4: expected 0 to 3"),
        ('"1","a"\n', "expected lines of class, title and description"),
        ('"World","a","b"\n', "cannot be read .*: expected lines of class"),
        ("", "expected lines of class, title and description"),
    ],
)
def test_damaged_files(test, message, tmp_path):
    write_ag_news(tmp_path, test=test)
    with pytest.raises(ConfigError, match=rf"^dataset = 'ag_news': .*test\.csv.*{message}"):
        load_dataset("ag_news", data_dir=tmp_path)
