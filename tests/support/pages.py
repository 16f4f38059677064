"""The pages that a reader sees, as they are in the repository: their blocks, commands and links."""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / "experiments" / name for name in ("RESULTS.md", "SPEED.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
KINDS = ("python", "bash", "bibtex", "text")


def named(path):
    """A page's path from the root, which names it in a test."""
    return path.relative_to(ROOT).as_posix()


@cache
def text(path):
    return path.read_text()


def fences(path):
    """The words after every fence; "" closes."""
    return re.findall(r"^ *```(\w*)$", text(path), flags=re.MULTILINE)


def blocks(language, pages=PAGES):
    """(page, code) of every block of a language."""
    block = re.compile(rf"^```{language}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return [(page, code) for page in pages for code in block.findall(text(page))]


def commands(pages=PAGES):
    """Every command once, in order."""
    lines = (line for _, block in blocks("bash", pages) for line in block.splitlines())
    return list(dict.fromkeys(command for line in lines for command in line.split(" && ")))


def prose(path):
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", text(path), flags=re.DOTALL | re.MULTILINE)


def links(path):
    """Targets of its links and pictures that are files of the repository, anchors and all."""
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]+`", "", prose(path)))
    return [target for target in found if "://" not in target]


def anchors(path):
    """What its headings may be linked by, as the site makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(path), flags=re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", each) for each in words}
