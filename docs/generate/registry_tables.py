"""Tables of the entries that settings can name, which replace markers in the pages of docs/."""

import re

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
    from fedjax_het.cli.inspection import REGISTRIES

    registry, describe = REGISTRIES[title]
    lines = ["| name | description | options |", "|---|---|---|"]
    for entry in registry.values():
        options = ", ".join(" ".join(option.split()) for option in describe(entry))
        cells = (cell.replace("|", r"\|") for cell in (entry.description, options))
        lines.append(f"| `{entry.name}` | {' | '.join(cells)} |")
    return "\n".join(lines)
