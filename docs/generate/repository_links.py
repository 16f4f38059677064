"""Links between the repository's files, as they are on the site.

Pages are written for the repository, where a link is a path from the file that it stands in. On the
site a file that has a page is that page, and any other is its place in the repository.
"""

import posixpath
import re
from collections.abc import Callable, Mapping

FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")


def outside_code(change: Callable[[str], str], markdown: str) -> str:
    """`change` of all that is not in a fenced block."""
    parts = FENCED.split(markdown)
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))


def links_on_site(
    markdown: str, source: str, uri: str, pages: Mapping[str, str], repository: str
) -> str:
    """The text of a file of the repository with links as its page has them.

    Args:
      source: the file's path from the repository's root; uri: its page's among the site's sources.
      pages: by path, the sources of the pages that show files outside docs/.
      repository: the address of a file there, its path left out.
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

    return outside_code(lambda text: LINK.sub(moved, text), markdown)
