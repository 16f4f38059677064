"""Lines against the round as figures: in two weights, in colours, or one by one."""

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_het.common.pictures import plain_axes
from fedjax_het.common.text import DIVERGED, figure_text
from fedjax_het.report.line_ends import MARK, End, draw_mark, name_ends
from fedjax_het.report.measures import measure_label, scale_of
from fedjax_het.report.style import (
    GREYS,
    PALETTE,
    Sharing,
    add_note,
    distinct_colours,
    empty_panel,
    is_leftmost,
    is_lowest,
    line_styles,
    make_panels,
    whole_ticks,
    within_percent,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MANY = len(PALETTE)  # lines: beyond, no colours are left
_NAMED_GREYS = 5  # beyond, the best of them alone has its name
_THICK, _MEDIUM, _THIN = 2.0, 1.6, 1.0
_BAND = 0.13


class Curve(NamedTuple):
    """One line of the figure, and the runs behind it."""

    panel: str
    method: str
    label: str
    runs: "pd.DataFrame"
    """A row per measured round and a column per run, as measured, accuracies in percent."""
    diverged: bool = False
    """Whether a run is not in `runs` because it diverged."""
    reported: float = math.nan
    """A final value to compare with."""


class Averaged(NamedTuple):
    """What is drawn of a curve, by the round."""

    mean: "pd.Series"
    low: "pd.Series"
    high: "pd.Series"


class Look(NamedTuple):
    """How a line is drawn."""

    colour: str
    linestyle: Any
    width: float
    named: bool
    """At its end."""
    main: bool
    """Whether it has a band, and lies above the others."""


def averaged(curve: Curve, window: int, log: bool) -> Averaged:
    """Running means over `window` measured rounds, where there are as many before; their mean over
    seeds, and one standard deviation to both sides. Where `log`, of the logarithms."""
    import numpy as np
    import pandas as pd

    columns = {name: values.dropna().rolling(window).mean() for name, values in curve.runs.items()}
    runs = pd.DataFrame(columns).dropna(how="all").sort_index()
    if log:
        runs = np.log10(runs)
    mean, spread = runs.mean(axis=1), runs.std(axis=1).fillna(0)
    parts = (mean, mean - spread, mean + spread)
    return Averaged(*(10**part if log else part for part in parts))


def fitting_window(curves: Sequence[Curve], window: int) -> int:
    """`window`, or 1 where a run has fewer than twice as many measured rounds: a mean of what is
    not there would bend the line."""
    lengths = [values.count() for curve in curves for _, values in curve.runs.items()]
    return window if lengths and min(lengths) >= 2 * window else 1


def draw_curves(
    curves: Sequence[Curve],
    panels: Sequence[str],
    *,
    columns: int,
    measure: str = "test_accuracy",
    sharey: Sharing = "row",
    window: int = 1,
    reported: str = "final",
    log: bool = False,
    focus: Collection[str] = (),
) -> "Figure":
    """The figure of these lines, each with its name at its end. A panel without any run says so.

    Lines of the methods in `focus` are in colour and have bands of one standard deviation over
    seeds, the others are grey; of more than five of these the best alone has its name. Without
    such lines all are in colour, as far as there are colours; more have a small panel each
    (`small_multiples.draw_apart`). A triangle at the right edge is the reported value, of the kind
    that `reported` names. `window`: over how many measured rounds a line is a running mean.
    """
    from fedjax_het.report.small_multiples import draw_apart

    there = [curve for curve in curves if len(curve.runs)]
    window = fitting_window(there, window)
    looks = looks_of(there, focus)
    if not looks and there:
        return draw_apart(
            curves, panels, measure=measure, window=window, reported=reported, log=log
        )
    figure, axes = make_panels(panels, columns=columns, size=(3.5, 2.7), sharey=sharey)
    width, height = figure.get_size_inches()
    figure.set_size_inches(max(4.4, width), height + 0.3)
    ends: dict[str, list[tuple[Curve, float]]] = {panel: [] for panel in panels}
    for curve in there:
        lines = averaged(curve, window, log)
        draw_line(axes[curve.panel], curve, lines, looks[curve.label])
        ends[curve.panel].append((curve, float(lines.mean.iloc[-1])))
    for title, panel in axes.items():
        plain_axes(panel)
        if panel.lines:
            set_limits(panel, measure, log)
        else:
            lost = any(curve.diverged and curve.panel == title for curve in curves)
            empty_panel(panel, "diverged" if lost else "not run")
        if is_leftmost(panel):
            panel.set_ylabel(axis_label(there, measure, window, log), fontsize=9)
        if is_lowest(panel, axes.values()):
            panel.set_xlabel("Round", fontsize=9)
    name_ends(figure, {panel: _names(ends[title], looks) for title, panel in axes.items()})
    add_note(figure, note(curves, looks, reported))
    return figure


def looks_of(curves: Sequence[Curve], focus: Collection[str]) -> dict[str, Look]:
    """By label; none where there are more lines than colours and none of them is in `focus`."""
    lines = list(dict.fromkeys((curve.method, curve.label) for curve in curves))
    main = [line for line in lines if line[0] in focus]
    if main and len(main) <= MANY:
        # Of few methods in many variants: shades would not be told apart.
        colours = distinct_colours(main)
        looks = {label: Look(colours[label], "-", _THICK, True, True) for _, label in main}
    elif len({method for method, _ in main or lines}) <= MANY:
        looks = {
            label: Look(style["color"], style["linestyle"], _MEDIUM, True, True)
            for label, style in line_styles(main or lines).items()
        }
    else:
        return {}
    rest = [label for _, label in lines if label not in looks]
    few = len(rest) <= _NAMED_GREYS
    for place, label in enumerate(rest):
        grey = GREYS[place % len(GREYS)] if few else GREYS[1]
        looks[label] = Look(grey, "-", _THIN, named=few, main=False)
    return looks


def draw_line(panel: "Axes", curve: Curve, lines: Averaged, look: Look) -> None:
    """A line, its band, and the mark of its reported value, if the line is to be named; the
    vertical axis has room for it."""
    alone: dict[str, Any] = (
        {"marker": "o", "markersize": 4} if len(lines.mean) == 1 else {}
    )  # a point
    panel.plot(
        lines.mean.index,
        lines.mean,
        color=look.colour,
        linestyle=look.linestyle,
        lw=look.width,
        label=curve.label,
        zorder=3 if look.main else 2,
        **alone,
    )
    if curve.runs.shape[1] > 1 and look.main:
        panel.fill_between(
            lines.mean.index, lines.low, lines.high, color=look.colour, alpha=_BAND, linewidth=0
        )
    if look.named and not math.isnan(curve.reported):
        draw_mark(panel, curve.reported, look.colour, curve.label)
        panel.update_datalim([(lines.mean.index[-1], curve.reported)])
        panel.autoscale_view()


def set_limits(panel: "Axes", measure: str, log: bool) -> None:
    """The last round is the right edge; accuracies stay within 0 and 100."""
    whole_ticks(panel)
    first, last = panel.dataLim.intervalx
    panel.set_xlim(0 if first < last else first - 1, last)
    if log:
        panel.set_yscale("log")
    elif scale_of(measure) == 100:
        within_percent(panel)


def axis_label(curves: Sequence[Curve], measure: str, window: int, log: bool) -> str:
    """The measure, and of what the lines are means."""
    seeds = sorted({curve.runs.shape[1] for curve in curves})
    over = []
    if window > 1:
        rounds = {step for curve in curves for step in set(curve.runs.index.to_series().diff()[1:])}
        over.append(f"{window} rounds" if rounds == {1.0} else f"{window} tested rounds")
    if seeds and seeds[-1] > 1:
        over.append(f"{seeds[0]} seeds" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds")
    kind = "geometric mean" if log else "mean"
    label = figure_text(measure_label(measure))
    return f"{label}\n{kind} of {' and '.join(over)}" if over else label


def note(curves: Sequence[Curve], looks: dict[str, Look], reported: str) -> str:
    """What a legend would say, in a line."""
    there = [curve for curve in curves if len(curve.runs)]
    parts = []
    if any(curve.runs.shape[1] > 1 and looks[curve.label].main for curve in there):
        parts.append("band: one standard deviation over seeds")
    if any(looks[curve.label].named and not math.isnan(curve.reported) for curve in there):
        parts.append(f"{'◂' if MARK == '<' else MARK}: reported {reported} value")
    unnamed = [label for label, look in looks.items() if not look.named]
    if unnamed:
        parts.append(f"grey: {', '.join(unnamed)}, the best of them named")
    lost = list(dict.fromkeys(curve.label for curve in curves if curve.diverged))
    if lost:
        parts.append(f"{DIVERGED} runs that diverged are left out: {', '.join(lost)}")
    return "; ".join(parts)


def _names(ends: Sequence[tuple[Curve, float]], looks: dict[str, Look]) -> list[End]:
    """Of a panel's lines: those that are named, and the best of the others."""
    unnamed = [(height, curve.label) for curve, height in ends if not looks[curve.label].named]
    best = max(unnamed)[1] if unnamed else ""
    emphasis = any(not look.main for look in looks.values())
    return [
        End(
            f"{curve.label} {DIVERGED}" if curve.diverged else curve.label,
            height,
            look.colour,
            bold=emphasis and look.main,
        )
        for curve, height in ends
        for look in [looks[curve.label]]
        if look.named or curve.label == best
    ]
