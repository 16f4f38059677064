"""The pages that a reader sees, as they are in the repository: their blocks, commands and links."""

import re
import textwrap
from functools import cache

from support.paths import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "experiments").glob("*.md")),
    *sorted((ROOT / "experiments").glob("*/R*.md")),  # RESULTS.md, README.md
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCK_LANGUAGES = ("python", "bash", "bibtex", "text")


def relative_page_path(path):
    """A page's path from the root, which names it in a test."""
    return path.relative_to(ROOT).as_posix()


@cache
def read_page(path):
    return path.read_text()


def find_fences(path):
    """The words after every fence; "" closes."""
    return re.findall(r"^ *```(\w*)$", read_page(path), flags=re.MULTILINE)


def find_code_blocks(language, pages=PAGES):
    """(page, code) of every block of a language."""
    block = re.compile(rf"^( *)```{language}\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
    return [
        (page, textwrap.dedent(code))
        for page in pages
        for _, code in block.findall(read_page(page))
    ]


def find_commands(pages=PAGES):
    """Every command once, in order."""
    blocks = (block.replace("\\\n", " ") for _, block in find_code_blocks("bash", pages))
    lines = (line for block in blocks for line in block.splitlines())
    return list(dict.fromkeys(command for line in lines for command in line.split(" && ")))


def strip_code_blocks(text):
    """A page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)


def find_links(path):
    """Targets of its links and pictures that are files of the repository, anchors and all."""
    targets = re.findall(
        r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]+`", "", strip_code_blocks(read_page(path)))
    )
    modes = re.compile("#gh-(light|dark)-mode-only$")  # of pictures
    return [modes.sub("", target) for target in targets if "://" not in target]


def find_anchors(path):
    """What its headings may be linked by, as the site makes them."""
    headings = re.findall(r"^#+ (.+)$", strip_code_blocks(read_page(path)), flags=re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", anchor) for anchor in words}
