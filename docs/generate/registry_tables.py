"""Tables of the entries that settings can name, which replace markers in the pages of docs/."""

import re

from method_pages import make_table

MARKER = re.compile(r"<!-- entries: (.+?) -->")
INPUTS_MARKER = "<!-- methods by input -->"


def insert_registry_tables(markdown: str) -> str:
    """Replace each marker `<!-- entries: TITLE -->` by the table of a registry.

    Args:
      markdown: text of a page. The titles are the titles of `fedjax-het list`.

    Returns:
      The text with tables.
    """
    if INPUTS_MARKER in markdown:
        markdown = markdown.replace(INPUTS_MARKER, make_inputs_table())
    return MARKER.sub(lambda marker: make_registry_table(marker[1]), markdown)


def make_inputs_table() -> str:
    """Return the table of the kinds of inputs and tasks that each method accepts."""
    from fedjax_het.algorithms import METHODS
    from fedjax_het.utils.input_kinds import INPUT_KINDS

    rows = []
    for method in METHODS.values():
        marks = ["yes" if kind in method.input_kinds else "no" for kind in INPUT_KINDS]
        tasks = "no: reads classes" if method.needs_classes else "yes"
        rows.append((f"[`{method.name}`](../algorithms/{method.name}.md)", *marks, tasks))
    return make_table(("method", *INPUT_KINDS, "tasks without classes"), rows)


def make_registry_table(title: str) -> str:
    """Return the table of a registry: names, descriptions, and options with their defaults."""
    from fedjax_het.analysis.inspection import REGISTRIES

    registry, describe = REGISTRIES[title]
    rows = []
    for entry in registry.values():
        lines = [" ".join(line.split()) for line in describe(entry)]
        options = [line for line in lines if not line.startswith("options (")]
        if title == "data sources":  # their pages describe the options
            options = [option.partition(":")[0] for option in options]
        rows.append((f"`{entry.name}`", entry.description, "<br>".join(options)))
    if not any(options for _, _, options in rows):
        return make_table(("name", "description"), [row[:2] for row in rows])
    return make_table(("name", "description", "options"), rows)
