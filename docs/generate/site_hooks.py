"""What mkdocs runs while it builds: pages that are made of the package and of files outside docs/.

`mkdocs.yml` names this file. Nothing is written into docs/: what is made exists during the build.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from method_pages import FORMULAS, method_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebook_pages import notebook_page, title_of
from repository_links import links_on_site

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(
    (ROOT / "notebooks").glob("*.ipynb"), key=lambda path: (path.stem != "quickstart", path.stem)
)
SHOWN = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "experiments/RESULTS.md": "results.md",
    "experiments/SPEED.md": "speed.md",
    **{f"notebooks/{path.name}": f"tutorials/{path.stem}.md" for path in NOTEBOOKS},
}
"""Files of the repository that are pages, with the page's source."""
NOTHING: Mapping[str, str] = MappingProxyType({})

GROUPS = ("One model for all", "What a server does besides", "Condensed data", "A model each")


def group_of(name: str) -> str:
    """The group of methods that one stands in."""
    from fedjax_het.algorithms import METHODS

    entry = METHODS[name]
    if entry.has_base or "server_data" in entry.required_data:
        return GROUPS[1]
    if not entry.trains_locally:
        return GROUPS[2]
    return GROUPS[0] if entry.evaluated_models[0] == "global" else GROUPS[3]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the notebooks and the methods into the navigation."""
    (tutorials,) = (part for part in config.nav if "Tutorials" in part)
    tutorials["Tutorials"] = [
        {title_of(path): SHOWN[f"notebooks/{path.name}"]} for path in NOTEBOOKS
    ]
    (methods,) = (part for part in config.nav if "Methods" in part)
    for group in GROUPS:
        pages = [f"methods/{name}.md" for name in FORMULAS if group_of(name) == group]
        methods["Methods"].append({group: pages})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is not in docs/."""
    made: dict[str, str | bytes] = {
        f"methods/{name}.md": with_links(method_page(name), f"docs/methods/{name}.md", config)
        for name in FORMULAS
    }
    for source, page in SHOWN.items():
        path = ROOT / source
        if path.suffix == ".ipynb":
            text, pictures = notebook_page(path)
            made |= {f"tutorials/{name}": content for name, content in pictures.items()}
            shown = {f"notebooks/{name}": f"tutorials/{name}" for name in pictures}
        else:
            text, shown = path.read_text(), {}
        made[page] = with_links(text, source, config, shown)
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Of a page in docs/: its links, and of the table of methods the names as links too."""
    if page.file.generated_by is not None:
        return markdown
    if page.file.src_uri == "methods/index.md":
        cells = re.compile(r"^\| (`.*?`) \|", re.MULTILINE)
        markdown = cells.sub(
            lambda row: "| " + re.sub(r"`(\w+)`", r"[`\1`](\1.md)", row[1]) + " |", markdown
        )
    return with_links(markdown, f"docs/{page.file.src_uri}", config)


def with_links(
    markdown: str,
    source: str,
    config: MkDocsConfig,
    shown: Mapping[str, str] = NOTHING,
) -> str:
    """A file's text with its links as the site has them; `shown`: besides what is a page."""
    uri = SHOWN.get(source, source.removeprefix("docs/"))
    pages = {**SHOWN, **shown}
    return links_on_site(markdown, source, uri, pages, f"{config.repo_url}/blob/main")
