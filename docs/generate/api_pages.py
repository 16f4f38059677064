"""Tables of the names on the pages of the API, which replace a marker in its first page."""

import functools
import re
from pathlib import Path

import griffe
import yaml
from method_pages import make_table

ROOT = Path(__file__).parents[2]
MARKER = "<!-- api: groups -->"
LINKS = re.compile(r"\[(.*?)\]\(.*?\)")


def list_pages() -> list[Path]:
    """Return the pages of the API in the order of the navigation, without the first page."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    (pages,) = (part["API"] for part in yaml.safe_load(navigation) if "API" in part)
    return [ROOT / "docs" / page for page in pages[1:]]


def list_entries(page: Path) -> list[str]:
    """Return the paths of the names that a page documents, as users import them."""
    return re.findall(r"^::: (\S+)$", page.read_text(), flags=re.MULTILINE)


def insert_groups(markdown: str) -> str:
    """Replace the marker by the groups of names.

    Args:
      markdown: text of a page.

    Returns:
      The text with a heading and a table for each page of the API.
    """
    if MARKER not in markdown:
        return markdown
    return markdown.replace(MARKER, "\n".join(map(make_group, list_pages())))


def make_group(page: Path) -> str:
    """Return the heading, the introduction and the table of the names of a page."""
    title, _, text = page.read_text().removeprefix("# ").partition("\n")
    introduction = LINKS.sub(r"\1", text.strip().split("\n\n")[0])
    rows = [
        (f"[`{path.rpartition('.')[2]}`]({page.name}#{path})", summarize(path))
        for path in list_entries(page)
    ]
    return f"## [{title}]({page.name})\n\n{introduction}\n\n{make_table(('name', 'use'), rows)}\n"


def summarize(path: str) -> str:
    """Return the first sentence of the documentation of a name."""
    docstring = load_package()[path.removeprefix("fedjax_het.")].docstring
    text = "" if docstring is None else " ".join(docstring.value.split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", text)[0]


@functools.cache
def load_package() -> griffe.Module:
    """Return the package without importing it."""
    return griffe.load("fedjax_het", search_paths=[ROOT], resolve_aliases=True)
