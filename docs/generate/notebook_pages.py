"""Pages of notebooks: text, code and committed outputs."""

import re
from pathlib import Path


def get_title(path: Path) -> str:
    """Return the first heading of a notebook."""
    import nbformat

    cells = nbformat.read(path, as_version=4).cells
    (title, *_) = re.findall(r"^# (.+)$", "\n".join(cell.source for cell in cells), re.MULTILINE)
    return title


def make_notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return the page of a notebook as Markdown, and its pictures by name."""
    from nbconvert import MarkdownExporter
    from traitlets.config import Config

    named = {"output_filename_template": path.stem + "_{cell_index}_{index}{extension}"}
    exporter = MarkdownExporter(config=Config({"ExtractOutputPreprocessor": named}))
    text, resources = exporter.from_filename(str(path))
    return adapt_to_site(text), dict(resources.get("outputs", {}))


def adapt_to_site(text: str) -> str:
    """Return a text with buttons for badges that are fetched and without styles of data frames."""
    text = re.sub(
        r"\[!\[Open in Colab\]\(.*?\)\]\((.*?)\)", r"[Open in Colab](\1){ .md-button }", text
    )
    text = re.sub(r"<style scoped>.*?</style>", "", text, flags=re.DOTALL)
    text = text.replace('<table border="1" class="dataframe">', "<table>")
    return text.replace("![png](", "![Figure drawn by the cell above](")
