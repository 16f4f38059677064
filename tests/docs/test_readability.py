"""Sentences of the documentation are short, and its pages name the terms that readers search."""

import re
from statistics import mean

import pytest
from support.documentation_pages import (
    PAGES,
    ROOT,
    read_page,
    relative_page_path,
    strip_code_blocks,
)

MAX_WORDS, MAX_MEAN_WORDS = 40, 20
READ_PAGES = [page for page in PAGES if page.name != "CHANGELOG.md"]
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|et al|vs|Fig|Figs|Eq|Eqs|Sec|No|ca)\.$")

TERMS = {
    "learning rate": "docs/guide/local-training.md",
    "hyperparameter": "docs/guide/settings.md",
    "early stopping": "docs/guide/early-stopping.md",
    "validation": "docs/guide/validation.md",
    "aggregation": "docs/guide/settings.md",
    "quantity skew": "docs/data/skews.md",
    "label noise": "docs/data/skews.md",
    "feature skew": "docs/data/skews.md",
    "personalized": "docs/guide/personalized.md",
    "nnx": "docs/guide/custom-model.md",
    "client sampling": "docs/guide/settings.md",
    "participation": "docs/guide/settings.md",
    "dirichlet": "docs/data/partitions.md",
    "non-iid": "docs/data/partitions.md",
    "checkpoint": "docs/guide/checkpoints.md",
    "resume": "docs/guide/checkpoints.md",
    "gpu": "docs/start/install.md",
    "tpu": "docs/start/install.md",
    "custom dataset": "docs/data/custom-dataset.md",
    "custom model": "docs/guide/custom-model.md",
    "communication cost": "docs/guide/metrics.md",
    "convergence": "docs/guide/metrics.md",
    "fine-tuning": "docs/guide/saved-models.md",
}


def find_prose(text):
    """Yield the paragraphs and list items of a page, without code, tables and targets of links."""
    text = re.sub(r"<!--.*?-->", "", strip_code_blocks(text), flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"^ *(\||#+ |=== |!!! ).*$", "\n", text, flags=re.MULTILINE)
    for block in re.split(r"\n\s*\n|^ *(?:[*-]|\d+\.) ", text, flags=re.MULTILINE):
        if words := " ".join(block.split()).replace("**", ""):
            yield words


def find_sentences(text):
    """Yield the sentences of a page."""
    for block in find_prose(text):
        sentence = ""
        for part in re.split(r"(?<=[.!?])\s+(?=[A-Z\"'(*0-9]|code)", block):
            sentence = f"{sentence} {part}".strip()
            if not ABBREVIATION.search(sentence):
                yield sentence
                sentence = ""
        if sentence:
            yield sentence


def count_words(sentence):
    return len(re.findall(r"[\w'%.,/-]*\w[\w'%.,/-]*", sentence))


@pytest.mark.parametrize("page", READ_PAGES, ids=relative_page_path)
def test_sentences_are_short(page):
    lengths = {sentence: count_words(sentence) for sentence in find_sentences(read_page(page))}
    assert {sentence: n for sentence, n in lengths.items() if n > MAX_WORDS} == {}
    assert not lengths or mean(lengths.values()) < MAX_MEAN_WORDS


def test_sentences_are_found():
    text = (
        "# Title\n\nOne two, see [a link](b.md). `fedavg` counts as one, e.g. here.\n"
        "* An item:\n  it goes on\n\n| a | table |\n\n```python\nno = 'prose. At all.'\n```\n"
    )
    sentences = list(find_sentences(text))
    assert sentences == [
        "One two, see a link.",
        "code counts as one, e.g. here.",
        "An item: it goes on",
    ]
    assert [count_words(sentence) for sentence in sentences] == [5, 6, 5]


@pytest.mark.parametrize(("term", "page"), TERMS.items())
def test_page_answers_term(term, page):
    text = read_page(ROOT / page).lower()
    first = text.split("\n\n", 2)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    assert any(term in heading for heading in headings) or term in " ".join(first[1:2]).replace(
        "\n", " "
    )


if __name__ == "__main__":
    lengths = [
        (count_words(sentence), relative_page_path(page), sentence)
        for page in READ_PAGES
        for sentence in find_sentences(read_page(page))
    ]
    print(f"{len(lengths)} sentences, mean {mean(n for n, *_ in lengths):.1f} words")
    for n, name, sentence in sorted(lengths, reverse=True)[:40]:
        print(n, name, sentence)
