"""Pages of methods: contents of `fedjax-het show`, and values reported in papers."""

import html
import inspect
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FORMULAS: dict[str, str] = tomllib.loads((Path(__file__).parent / "formulas.toml").read_text())


# Symbols that formulas share, and their meanings.
SYMBOLS = {
    r"\\in S": "S: clients of the round",
    r"\bp_[ki]": "p: their weights (`averaging`)",
    r"F_[ki]": "F: a client's loss",
    r"SGD": "SGD: local training",
    r"\\eta(?![_a-z])": "η: `local_lr`",
    r"\\eta_g": "η<sub>g</sub>: `server_lr`",
}


def make_method_page(name: str) -> str:
    """Return the page of a method as Markdown; links are paths from docs/algorithms/."""
    from fedjax_het.algorithms import METHODS, get_possible_bases

    entry = METHODS[name]
    build = find_builder_function(entry.build)
    source = build.__module__.replace(".", "/") + ".py"
    facts = [f"**Paper** {link_arxiv(entry.paper)}"] if entry.paper else []
    facts += [
        f"**Source** [{Path(source).name}](../../{source})",
        f"**Default protocol**: [`{entry.protocol}`](../guide/protocols.md)",
    ]
    if entry.has_base:
        facts.append(
            "**Possible bases** " + ", ".join(f"[`{b}`]({b}.md)" for b in get_possible_bases(entry))
        )
    lines = [
        f"# {name}",
        f"{to_sentence(entry.description)}",
        render_formula(FORMULAS[name]),
        describe_symbols(FORMULAS[name]),
        "\n".join(f"* {fact}" for fact in facts),
        f"```bash\nfedjax-het run --algorithm {name} --dataset digits --model mlp --rounds 3\n```",
        "## Description and departures from the paper",
        docstring_to_markdown((inspect.getdoc(build) or "").split("\n\nArgs:")[0]),
        *describe_choices(entry),
        "## Settings by protocol",
        "Default settings on Fashion-MNIST; a dash if the setting has no value, or if the protocol"
        " does not have the method.",
        make_protocol_table(entry),
        *list_paper_values(name),
    ]
    return "\n\n".join(lines) + "\n"


def link_arxiv(paper: str) -> str:
    """Return a citation with a link to arXiv."""
    return re.sub(r"arXiv:([\w.]+\d)", r"[arXiv:\1](https://arxiv.org/abs/\1)", paper)


def find_builder_function(build: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a method's builder, without bound arguments."""
    while isinstance(build, partial):
        build = build.func
    return build


def to_sentence(text: str) -> str:
    """Return a text with a capital letter and a period."""
    return text[:1].upper() + text[1:].rstrip(".") + "."


def render_formula(latex: str) -> str:
    """Return a LaTeX formula as displayed MathML, one display for each line."""
    from latex2mathml.converter import convert

    parts = (part.strip().removesuffix(",") for part in latex.split(r"\qquad"))
    lines = "".join(convert(part, display="block") for part in parts)
    return f'<div class="formula">{lines}</div>'


def describe_symbols(latex: str) -> str:
    """Return a line with the meanings of the shared symbols of a formula."""
    meanings = [text for symbol, text in SYMBOLS.items() if re.search(symbol, latex)]
    return f"*{'; '.join(meanings)}.*" if meanings else ""


def docstring_to_markdown(text: str) -> str:
    """Return a docstring as Markdown; indented blocks become code."""
    return "\n\n".join(
        part for block in re.split(r"\n\s*\n", text.strip("\n")) for part in _block(block)
    )


def _block(block: str) -> Iterator[str]:
    lines = block.split("\n")
    if all(line.lstrip().startswith("|") for line in lines):  # a table
        yield textwrap.dedent(block)
        return
    indents = [len(line) - len(line.lstrip()) for line in lines]
    if min(indents) >= 4:
        yield "```text\n" + textwrap.dedent(block) + "\n```"
        return
    if lines[0].rstrip().endswith(":") and len(lines) > 1 and min(indents[1:]) > indents[0]:
        yield _prose(lines[0])
        yield from _block(textwrap.dedent("\n".join(lines[1:])))
        return
    base = min(indents)
    if max(indents) == base:
        yield _prose(block)
        return
    items: list[list[str]] = []
    for line, indent in zip(lines, indents, strict=True):
        if indent == base or not items:
            items.append([])
        items[-1].append(line)
    # Indented lines belong to the line above; other adjacent lines are one paragraph.
    joined: list[tuple[bool, str]] = []
    for item in items:
        hangs = len(item) > 1 or re.match(r"\s*[\"`]?[\w ,()\[\]\"`]{1,30}: ", item[0]) is not None
        if joined and not hangs and not joined[-1][0]:
            joined[-1] = (False, joined[-1][1] + "\n" + item[0])
        else:
            joined.append((hangs, "\n".join(item)))
    for hangs, text in joined:
        if text.split("\n")[0].rstrip().endswith(":") and "\n" in text:
            yield from _block(text)
        else:
            yield f'<p class="hangs">{_inline(text)}</p>' if hangs else _prose(text)


def _prose(text: str) -> str:
    return f"<p>{_inline(text)}</p>"


def _inline(text: str) -> str:
    """Return a paragraph of a docstring as HTML, with names in code."""
    text = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def make_table(head: Iterable[str], rows: Iterable[Iterable[str]], numbers: int = 0) -> str:
    """Return a table as Markdown.

    Args:
      head: titles of the columns.
      rows: cells of each row.
      numbers: number of right-aligned columns at the end.

    Returns:
      The lines of the table.
    """
    head = list(head)
    rules = ["---"] * (len(head) - numbers) + ["---:"] * numbers
    lines = [head, rules, *(list(row) for row in rows)]
    cells = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def describe_choices(entry: Any) -> Iterator[str]:
    """Yield the sections on the options and hyperparameters of a method."""
    from fedjax_het.algorithms import get_algorithm_spec
    from fedjax_het.utils.config import document_fields, hyperparameters_of

    defaults = get_algorithm_spec(entry.name, {}).complete_options({})
    if fields := document_fields(entry.options):
        yield "## Options"
        presets = ", ".join(f"`{name}`" for name in entry.options.PRESETS)
        yield "`options={...}` in Python, `--option NAME=VALUE` on the command line." + (
            f" Presets of them and of the hyperparameters: {presets}." if presets else ""
        )
        yield make_table(
            ("option", "default", "meaning"),
            (
                (f"`{name}`", f"`{defaults[name]}`", format_description(text, words))
                for name, (words, text) in fields.items()
            ),
        )
    record = entry.make_hyperparameter_record({}, num_clients=10)
    if numbers := hyperparameters_of(record):
        fields = document_fields(type(record))
        yield "## Hyperparameters"
        yield (
            "`hp={...}` in Python, `--hp NAME=VALUE` on the command line, in addition to the learning rate"
            " and the other hyperparameters of [local training](../guide/local-training.md). A sweep over"
            " them compiles once."
        )
        yield make_table(
            ("hyperparameter", "default", "meaning"),
            (
                (
                    f"`{name}`",
                    f"`{number.default:g}`",
                    format_description(fields[name][1], fields[name][0]),
                )
                for name, number in numbers.items()
            ),
        )


def format_description(text: str, words: str) -> str:
    """Return the description and the valid values of an option as HTML.

    Args:
      text: description.
      words: valid values in words.

    Returns:
      HTML.
    """
    return f'{_inline(text)} <span class="may-be">{_inline(words)}</span>'


def make_protocol_table(entry: Any) -> str:
    """Return a table of the settings of each protocol."""
    from fedjax_het.analysis.inspection import collect_settings_by_protocol
    from fedjax_het.analysis.overview import format_setting_value
    from fedjax_het.config.protocols import PROTOCOLS

    return make_table(
        ("setting", *(f"`{protocol}`" for protocol in PROTOCOLS)),
        (
            (
                f"`{name}`",
                *(format_setting_value(values[p]) if p in values else "–" for p in PROTOCOLS),
            )
            for name, values in collect_settings_by_protocol(entry).items()
        ),
    )


def list_paper_values(name: str) -> Iterator[str]:
    """Yield the sections on measured and reported values of a method."""
    if measured := list(list_measured_rows(name)):
        yield "## Measured and reported values"
        yield (
            "Percent, mean ± standard deviation over seeds. [Results](../../experiments/RESULTS.md)"
            " states the scales and discusses differences."
        )
        head = ("table", "data, network", "row", "measured", "reported", "seeds")
        yield make_table(head, measured, numbers=3)
    if reported := list(list_reported_rows(name)):
        yield "## Reported values"
        head = ("paper, item", "data, network", "level", "row", "of", "reported")
        shown = (
            f"<summary>{len(reported)} values</summary>\n\n{make_table(head, reported, numbers=1)}"
        )
        yield f'<details markdown="1">{shown}\n\n</details>'


def list_measured_rows(name: str) -> Iterator[tuple[str, ...]]:
    """Yield the rows of committed tables that contain a method."""
    import pandas as pd

    for path in sorted((ROOT / "experiments").glob("*/results/*/*.csv")):
        values = pd.read_csv(path)
        if not {"method", "mean", "std", "reported_mean"} <= set(values):
            continue
        run = path.relative_to(ROOT).parent
        for row in values[values["method"].map(parse_method_name) == name].to_dict("records"):
            if row["mean"] != row["mean"]:
                continue
            level = f", alpha {row['alpha']:g}" if row["alpha"] == row["alpha"] else ""
            several = row["seeds"] > 1
            yield (
                f"[{run.parts[1]} {run.name}](../../{run})",
                f"{row['dataset']}, {row['model']}{level}",
                f"`{row['method']}`",
                f"{row['mean']:.2f}" + (f" ± {row['std']:.2f}" if several else ""),
                format_mean_and_std(row["reported_mean"], row["reported_std"]),
                str(row["seeds"]),
            )


def list_reported_rows(name: str) -> Iterator[tuple[str, ...]]:
    """Yield the values that papers report for a method."""
    from fedjax_het.papers.reported import load_reported_values

    folder = ROOT / "fedjax_het" / "papers" / "reported"
    for paper in sorted(path.stem for path in folder.glob("*.csv")):
        values = load_reported_values(paper).astype(object)
        for row in values[values["method"].map(parse_method_name) == name].to_dict("records"):
            said = {key: str(value) for key, value in row.items() if value == value}
            yield (
                f"{paper}, {row['item']}",
                ", ".join(said[key] for key in ("dataset", "model") if key in said),
                " ".join(said[key] for key in ("partition", "level") if key in said),
                f"`{row['method']}`",
                f"`{row['metric']}`",
                format_mean_and_std(row["mean"], row["std"]),
            )


def parse_method_name(row: str) -> str:
    """Return the method of a table's row: `dynafed` for "dynafed(preset='code')"."""
    return row.partition("(")[0]


def format_mean_and_std(mean: float, deviation: float) -> str:
    """Return mean and standard deviation as text.

    Args:
      mean: mean; NaN if it is not reported.
      deviation: standard deviation; NaN if it is not reported.

    Returns:
      Text, e.g. "64 ± 2".
    """
    if mean != mean:
        return "–"
    return f"{mean:g}" + (f" ± {deviation:g}" if deviation == deviation else "")
