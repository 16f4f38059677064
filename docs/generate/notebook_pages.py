"""A notebook as a page: its text, its code, and the outputs that it is committed with."""

import re
from pathlib import Path


def title_of(path: Path) -> str:
    """Its first heading."""
    import nbformat

    cells = nbformat.read(path, as_version=4).cells
    (title, *_) = re.findall(r"^# (.+)$", "\n".join(cell.source for cell in cells), re.MULTILINE)
    return title


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """(Markdown, pictures by the names that the text has for them)."""
    from nbconvert import MarkdownExporter
    from traitlets.config import Config

    named = {"output_filename_template": path.stem + "_{cell_index}_{index}{extension}"}
    exporter = MarkdownExporter(config=Config({"ExtractOutputPreprocessor": named}))
    text, resources = exporter.from_filename(str(path))
    return of_the_site(text), dict(resources.get("outputs", {}))


def of_the_site(text: str) -> str:
    """Without what is a notebook's alone: a badge that is fetched, a data frame's own style."""
    text = re.sub(r"\[!\[Open in Colab\]\(.*?\)\]\((.*?)\)", r"[Open in Colab](\1)", text)
    text = re.sub(r"<style scoped>.*?</style>", "", text, flags=re.DOTALL)
    text = text.replace('<table border="1" class="dataframe">', "<table>")
    return text.replace("![png](", "![What the cell above draws](")
