"""Hooks of mkdocs, which add generated pages and files from outside docs/.

`mkdocs.yml` names this file. Nothing is written into docs/: generated pages exist during the build.
"""

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from api_pages import insert_groups
from dark_pictures import PICTURE, get_dark_path, insert_dark_variants, make_dark_variant
from method_pages import FORMULAS, make_method_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebook_pages import get_title, make_notebook_page
from registry_tables import insert_registry_tables
from repository_links import change_outside_code, convert_links

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(
    (ROOT / "notebooks").glob("*.ipynb"), key=lambda path: (path.stem != "quickstart", path.stem)
)
SHOWN = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "experiments/RESULTS.md": "benchmarks/index.md",
    **{
        f"experiments/{paper}/RESULTS.md": f"benchmarks/{paper}.md"
        for paper in (
            *("dynafed", "fedaf", "fedamp", "fsl", "niid_bench", "pfllib"),
            *("heterogeneity", "leaderboard", "privacy", "robustness", "text"),
        )
    },
    "experiments/ACROSS.md": "benchmarks/across.md",
    "experiments/LEAKAGE.md": "benchmarks/leakage.md",
    "experiments/SPEED.md": "benchmarks/speed.md",
    **{f"notebooks/{path.name}": f"tutorials/{path.stem}.md" for path in NOTEBOOKS},
}
"""Files of the repository that are pages, with the source of the page."""
NOTHING: Mapping[str, str] = MappingProxyType({})

GROUPS = ("Global model", "Training at the server", "Condensed data", "Personalized models")


def find_group(name: str) -> str:
    """Return the group of methods that contains a method."""
    from fedjax_het.algorithms import METHODS

    entry = METHODS[name]
    if entry.has_base or "server_data" in entry.required_data:
        return GROUPS[1]
    if not entry.trains_locally:
        return GROUPS[2]
    return GROUPS[0] if entry.evaluated_models[0] == "global" else GROUPS[3]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add notebooks and methods to the navigation."""
    (tutorials,) = (part for part in config.nav if "Tutorials" in part)
    tutorials["Tutorials"] = [
        {get_title(path): SHOWN[f"notebooks/{path.name}"]} for path in NOTEBOOKS
    ]
    (algorithms,) = (part for part in config.nav if "Algorithms" in part)
    for group in GROUPS:
        pages = [f"algorithms/{name}.md" for name in FORMULAS if find_group(name) == group]
        algorithms["Algorithms"].append({group: pages})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add generated pages and files from outside docs/.

    Args:
      files: files of the site.
      config: configuration of the site.

    Returns:
      The extended files.
    """
    generated: dict[str, str | bytes] = {
        f"algorithms/{name}.md": convert_page_links(
            make_method_page(name), f"docs/algorithms/{name}.md", config
        )
        for name in FORMULAS
    }
    for source, page in SHOWN.items():
        path = ROOT / source
        if path.suffix == ".ipynb":
            text, pictures = make_notebook_page(path)
            generated |= {f"tutorials/{name}": content for name, content in pictures.items()}
            shown = {f"notebooks/{name}": f"tutorials/{name}" for name in pictures}
        else:
            text = path.read_text()
            shown = find_outside_pictures(text, source)
            generated |= {uri: (ROOT / picture).read_bytes() for picture, uri in shown.items()}
        generated[page] = convert_page_links(text, source, config, shown)
    pictures = {file.src_uri: file.content_bytes for file in files if file.src_uri.endswith(".png")}
    pictures |= {uri: content for uri, content in generated.items() if isinstance(content, bytes)}
    for uri, content in pictures.items():
        generated[get_dark_path(uri)] = make_dark_variant(content)
    for uri, content in generated.items():
        files.append(File.generated(config, uri, content=content))
    return files


def find_outside_pictures(markdown: str, source: str) -> dict[str, str]:
    """Find the pictures of a page that lie outside docs/, which the site has to contain.

    Args:
      markdown: text of the page.
      source: path of the page's file from the root of the repository.

    Returns:
      The path of each picture in the site by its path from the root of the repository.
    """
    folder = posixpath.dirname(source)
    paths = [
        posixpath.normpath(posixpath.join(folder, f"{found[2]}.png"))
        for found in PICTURE.finditer(markdown)
    ]
    return {path: f"images/{path}" for path in paths if not path.startswith("docs/")}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Insert generated tables, convert links, and link the names in the table of methods.

    Args:
      markdown: text of the page.
      page: the page.
      config: configuration of the site.
      files: files of the site.

    Returns:
      The converted text.
    """
    if page.file.generated_by is not None:
        return markdown
    markdown = insert_groups(insert_registry_tables(markdown))
    if page.file.src_uri == "algorithms/index.md":
        cells = re.compile(r"^\| (`.*?`) \|", re.MULTILINE)
        markdown = cells.sub(
            lambda row: "| " + re.sub(r"`(\w+)`", r"[`\1`](\1.md)", row[1]) + " |", markdown
        )
        markdown = link_papers(markdown)
    return convert_page_links(markdown, f"docs/{page.file.src_uri}", config)


def link_papers(markdown: str) -> str:
    """Link the papers in the table of methods to arXiv."""
    from fedjax_het.algorithms import METHODS

    for paper in {entry.paper for entry in METHODS.values()}:
        if match := re.fullmatch(r"(.*?),? ?arXiv:(\S+)", paper):
            link = f"| [{match[1]}](https://arxiv.org/abs/{match[2]}) |"
            markdown = markdown.replace(f"| {match[1]} |", link)
    return markdown


def convert_page_links(
    markdown: str,
    source: str,
    config: MkDocsConfig,
    shown: Mapping[str, str] = NOTHING,
) -> str:
    """Return a file's text with links of the site and dark variants of its pictures.

    Args:
      markdown: text of the file.
      source: path of the file from the root of the repository.
      config: configuration of the site.
      shown: further pages of files, by path.

    Returns:
      The text with converted links.
    """
    uri = SHOWN.get(source, source.removeprefix("docs/"))
    pages = {**SHOWN, **shown}
    markdown = convert_links(markdown, source, uri, pages, f"{config.repo_url}/blob/main")
    return change_outside_code(insert_dark_variants, markdown)
