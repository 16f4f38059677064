"""A page for each method, of its entry: what `fedjax-het show` prints, and what papers report."""

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


def method_page(name: str) -> str:
    """Its Markdown; links are paths from docs/methods/."""
    from fedjax_het.algorithms import METHODS, get_possible_bases

    entry = METHODS[name]
    build = function_of(entry.build)
    source = build.__module__.replace(".", "/") + ".py"
    facts = [f"**Paper** {entry.paper}"] if entry.paper else []
    facts += [
        f"**Source** [{Path(source).name}](../../{source})",
        f"**Protocol** where none is named: [`{entry.protocol}`](../concepts/protocols.md)",
    ]
    if entry.has_base:
        facts.append(
            "**Goes over** " + ", ".join(f"[`{b}`]({b}.md)" for b in get_possible_bases(entry))
        )
    lines = [
        f"# {name}",
        f"{sentence(entry.description)}",
        formula(FORMULAS[name]),
        "\n".join(f"* {fact}" for fact in facts),
        f"```bash\nfedjax-het run --algorithm {name} --dataset digits --model mlp --rounds 3\n```",
        "## What it does, and where it departs from the paper",
        docstring((inspect.getdoc(build) or "").split("\n\nArgs:")[0]),
        *choices(entry),
        "## Settings by protocol",
        "What holds where nothing else is said, on Fashion-MNIST; a dash where the setting has no"
        " value, or the method no place in the protocol.",
        by_protocol(entry),
        *numbers_of_papers(name),
    ]
    return "\n\n".join(lines) + "\n"


def function_of(build: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a method's builder is, without the arguments that it is given."""
    while isinstance(build, partial):
        build = build.func
    return build


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def formula(latex: str) -> str:
    """A display of MathML, which browsers set by themselves; a line for each of its parts."""
    from latex2mathml.converter import convert

    parts = (part.strip().removesuffix(",") for part in latex.split(r"\qquad"))
    lines = "".join(convert(part, display="block") for part in parts)
    return f'<div class="formula">{lines}</div>'


def docstring(text: str) -> str:
    """A docstring as Markdown: its displays are code, what hangs in it hangs, signs are signs."""
    return "\n\n".join(
        part for block in re.split(r"\n\s*\n", text.strip("\n")) for part in _block(block)
    )


def _block(block: str) -> Iterator[str]:
    lines = block.split("\n")
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
    # Lines that hang belong to the one above; others that stand together are one paragraph.
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
    """HTML of a paragraph of a docstring: names in code, all else as it stands."""
    text = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def table(head: Iterable[str], rows: Iterable[Iterable[str]], numbers: int = 0) -> str:
    """Markdown; the last so many columns are of numbers."""
    head = list(head)
    rules = ["---"] * (len(head) - numbers) + ["---:"] * numbers
    lines = [head, rules, *(list(row) for row in rows)]
    cells = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def choices(entry: Any) -> Iterator[str]:
    """Sections of its options and of its numbers."""
    from fedjax_het.algorithms import get_algorithm_spec
    from fedjax_het.utils.config import document_fields, hyperparameters_of

    defaults = get_algorithm_spec(entry.name, {}).complete_options({})
    if fields := document_fields(entry.options):
        yield "## Options"
        presets = ", ".join(f"`{name}`" for name in entry.options.PRESETS)
        yield "`options={...}` in Python, `--option NAME=VALUE` on the command line." + (
            f" Presets of them and of the numbers: {presets}." if presets else ""
        )
        yield table(
            ("option", "default", "what it is"),
            (
                (f"`{name}`", f"`{defaults[name]}`", described(text, words))
                for name, (words, text) in fields.items()
            ),
        )
    record = entry.make_hyperparameter_record({}, num_clients=10)
    if numbers := hyperparameters_of(record):
        fields = document_fields(type(record))
        yield "## Numbers"
        yield (
            "`hp={...}` in Python, `--hp NAME=VALUE` on the command line, besides those of"
            " [local training](../howto/local-training.md); a sweep over them compiles nothing."
        )
        yield table(
            ("number", "default", "what it is"),
            (
                (f"`{name}`", f"`{number.default:g}`", described(fields[name][1], fields[name][0]))
                for name, number in numbers.items()
            ),
        )


def described(text: str, words: str) -> str:
    """What an option is, and what it may be."""
    return f'{_inline(text)} <span class="may-be">{_inline(words)}</span>'


def by_protocol(entry: Any) -> str:
    from fedjax_het.cli.inspection import collect_settings_by_protocol, format_setting
    from fedjax_het.config.protocols import PROTOCOLS

    return table(
        ("setting", *(f"`{protocol}`" for protocol in PROTOCOLS)),
        (
            (f"`{name}`", *(format_setting(values[p]) if p in values else "–" for p in PROTOCOLS))
            for name, values in collect_settings_by_protocol(entry).items()
        ),
    )


def numbers_of_papers(name: str) -> Iterator[str]:
    """Sections of what was measured beside what is reported, and of all that is reported."""
    if measured := list(measured_rows(name)):
        yield "## Measured beside reported"
        yield (
            "At the scales that [Results](../../experiments/RESULTS.md) says, where differences are"
            " discussed: percent, mean ± deviation over seeds."
        )
        head = ("table", "data, network", "row", "measured", "reported", "seeds")
        yield table(head, measured, numbers=3)
    if reported := list(reported_rows(name)):
        yield "## What papers report"
        head = ("paper, item", "data, network", "level", "row", "of", "reported")
        shown = f"<summary>{len(reported)} values</summary>\n\n{table(head, reported, numbers=1)}"
        yield f'<details markdown="1">{shown}\n\n</details>'


def measured_rows(name: str) -> Iterator[tuple[str, ...]]:
    """Of the tables that are committed with their runs."""
    import pandas as pd

    for path in sorted((ROOT / "experiments").glob("*/results/*/*.csv")):
        values = pd.read_csv(path)
        if not {"method", "mean", "std", "reported_mean"} <= set(values):
            continue
        run = path.relative_to(ROOT).parent
        for row in values[values["method"].map(method_of) == name].to_dict("records"):
            if row["mean"] != row["mean"]:
                continue
            level = f", alpha {row['alpha']:g}" if row["alpha"] == row["alpha"] else ""
            several = row["seeds"] > 1
            yield (
                f"[{run.parts[1]} {run.name}](../../{run})",
                f"{row['dataset']}, {row['model']}{level}",
                f"`{row['method']}`",
                f"{row['mean']:.2f}" + (f" ± {row['std']:.2f}" if several else ""),
                plus_minus(row["reported_mean"], row["reported_std"]),
                str(row["seeds"]),
            )


def reported_rows(name: str) -> Iterator[tuple[str, ...]]:
    from fedjax_het.papers.reported import load_reported_values

    folder = ROOT / "fedjax_het" / "papers" / "reported"
    for paper in sorted(path.stem for path in folder.glob("*.csv")):
        values = load_reported_values(paper).astype(object)
        for row in values[values["method"].map(method_of) == name].to_dict("records"):
            said = {key: str(value) for key, value in row.items() if value == value}
            yield (
                f"{paper}, {row['item']}",
                ", ".join(said[key] for key in ("dataset", "model") if key in said),
                " ".join(said[key] for key in ("partition", "level") if key in said),
                f"`{row['method']}`",
                f"`{row['metric']}`",
                plus_minus(row["mean"], row["std"]),
            )


def method_of(row: str) -> str:
    """The method of a table's row: of "dynafed(preset='code')" `dynafed`."""
    return row.partition("(")[0]


def plus_minus(mean: float, deviation: float) -> str:
    if mean != mean:
        return "–"
    return f"{mean:g}" + (f" ± {deviation:g}" if deviation == deviation else "")
