"""Draws the path from settings to a result that `docs/developers/architecture.md` shows.

python docs/generate/architecture_picture.py writes docs/images/architecture.png. Every file that it
names is one of the package (`tests/docs/test_contributing.py`).
"""

from pathlib import Path

from fedjax_het.analysis.figures.style import write_figure

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "images" / "architecture.png"
# (title, description in a few words, file)
HOST = (
    ("Settings", "defaults from\nmethod and protocol", "config/resolve.py"),
    ("Splits", "clients' examples,\nsampled clients, order", "runtime/data_assignment.py"),
    ("Placement", "devices, lanes,\nmemory check", "runtime/placement.py"),
    ("Program", "shared by runs that\ndiffer only in numbers", "runtime/compiled_programs.py"),
    ("Advance", "call by call; checkpoint,\nstop, resume", "runtime/runner.py"),
    ("Result", "curves, costs, models;\nwritten under a digest", "runtime/result_store.py"),
)
DEVICE = (
    ("A chunk of rounds", "scanned: one compiled program", "core/round_program.py"),
    ("A method's round", "broadcast, train, aggregate, server's step", "algorithms/builders.py"),
    ("Lanes", "all sampled clients' steps, packed end to end", "core/client_loop.py"),
    ("A client's step", "gradient, the method's correction, optimizer", "core/local_training.py"),
)
INK, PALE, ACCENT = "#1a1a1a", "#555555", "#00598c"


def draw():
    """Draw the path from settings to a result, and write it to docs/images/architecture.png."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    figure = Figure(figsize=(10, 5.1))
    FigureCanvasAgg(figure)
    panel = figure.add_axes((0, 0, 1, 1))
    panel.set_xlim(0, 100)
    panel.set_ylim(0, 51)
    panel.axis("off")

    def box(left, bottom, width, height, edge, face):
        style = "round,pad=0,rounding_size=0.8"
        panel.add_patch(
            FancyBboxPatch((left, bottom), width, height, style, fc=face, ec=edge, lw=1.2)
        )

    def arrow(start, end):
        panel.add_patch(
            FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=PALE)
        )

    def say(x, y, text, size, colour=INK, side="center", **style):
        panel.text(x, y, text, fontsize=size, color=colour, ha=side, va="center", **style)

    width, gap = 14.6, 1.75
    say(1.4, 49, "On the host, NumPy", 10, PALE, "left", fontstyle="italic")
    for place, (title, entries, file) in enumerate(HOST):
        left = 1.5 + place * (width + gap)
        box(left, 35, width, 12, INK, "#ffffff")
        middle = left + width / 2
        say(middle, 44.8, title, 11, fontweight="bold")
        say(middle, 41, entries, 8)
        say(middle, 37.4, file.replace("/", "/\n"), 7, ACCENT, family="monospace")
        if place:
            arrow((left - gap, 41), (left, 41))
    # Calls of `advance`, and their results.
    advance = 1.5 + 4 * (width + gap) + width / 2
    arrow((advance - 2, 35), (advance - 2, 29.3))
    arrow((advance + 2, 29.3), (advance + 2, 35))
    say(advance - 2.8, 32.1, "state, schedules, numbers", 8, PALE, "right")
    say(advance + 2.8, 32.1, "state, curves", 8, PALE, "left")
    say(1.4, 31, "On the device, one compiled program", 10, PALE, "left", fontstyle="italic")
    shades = ("#f3f7fb", "#e3edf6", "#d0e2f1", "#bcd6ec")
    for depth, ((title, entries, file), shade) in enumerate(zip(DEVICE, shades, strict=True)):
        inset = 2.2 * depth
        bottom, height = 1.5 + 0.9 * depth, 27.5 - 6.9 * depth
        box(1.5 + inset, bottom, 97 - 2 * inset, height, ACCENT, shade)
        y = bottom + height - 3.3
        for x, text, size, style in (
            (3.5 + inset, title, 11, {"fontweight": "bold"}),
            (31, entries, 9, {}),
            (73, file, 8.5, {"family": "monospace"}),
        ):
            say(x, y, text, size, ACCENT if "family" in style else INK, "left", **style)
    return figure


if __name__ == "__main__":
    write_figure(PICTURE, draw(), dpi=120)
    print(f"Written: {PICTURE}")
