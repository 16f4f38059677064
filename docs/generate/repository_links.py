"""Links between files of the repository, converted to links of the site."""

import posixpath
import re
from collections.abc import Callable, Mapping

FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")


def change_outside_code(change: Callable[[str], str], markdown: str) -> str:
    """Change the parts of a page that are no fenced blocks of code.

    Args:
      change: function of a part.
      markdown: text of the page.

    Returns:
      The changed text.
    """
    parts = FENCED.split(markdown)
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))


def convert_links(
    markdown: str, source: str, uri: str, pages: Mapping[str, str], repository: str
) -> str:
    """Convert the links of a file of the repository to links of its page.

    Args:
      markdown: text of the file.
      source: path of the file from the root of the repository.
      uri: path of the page among the sources of the site.
      pages: sources of pages that show files outside docs/, by path of the file.
      repository: address of files on the host, without their path.

    Returns:
      The text with converted links.
    """

    def moved(match: re.Match[str]) -> str:
        target, _, anchor = match[1].partition("#")
        if "://" in target or target.startswith("mailto:") or not target:
            return match[1]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        page = pages.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if page is None:
            return f"{repository}/{path}" + (f"#{anchor}" if anchor else "")
        here = posixpath.relpath(page, posixpath.dirname(uri) or ".")
        return here + (f"#{anchor}" if anchor else "")

    return change_outside_code(lambda text: LINK.sub(moved, text), markdown)
