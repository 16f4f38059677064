"""Tables of the entries that settings can name, which replace markers in the pages of docs/."""

import re

from method_pages import make_table

MARKER = re.compile(r"<!-- entries: (.+?) -->")


def insert_registry_tables(markdown: str) -> str:
    """Replace each marker `<!-- entries: TITLE -->` by the table of a registry.

    Args:
      markdown: text of a page. The titles are the titles of `fedjax-het list`.

    Returns:
      The text with tables.
    """
    return MARKER.sub(lambda marker: make_registry_table(marker[1]), markdown)


def make_registry_table(title: str) -> str:
    """Return the table of a registry: names, descriptions, and options with their defaults."""
    from fedjax_het.analysis.inspection import REGISTRIES

    registry, describe = REGISTRIES[title]
    rows = []
    for entry in registry.values():
        options = ", ".join(" ".join(option.split()) for option in describe(entry))
        rows.append((f"`{entry.name}`", entry.description, options))
    return make_table(("name", "description", "options"), rows)
