"""The command line of every table."""

from dataclasses import dataclass


@dataclass
class TableArguments:
    """The command line of every table."""

    preset: str
    """What is run, unless a filter below says otherwise."""
    datasets: tuple[str, ...] | None = None
    """Data sets instead of the preset's."""
    models: tuple[str, ...] | None = None
    """Networks instead of the preset's."""
    alphas: tuple[float, ...] | None = None
    """Dirichlet concentrations instead of the preset's."""
    classes: tuple[int, ...] | None = None
    """Labels per client instead of the preset's."""
    methods: tuple[str, ...] | None = None
    """Only these rows of the table: a method's name stands for all its variants, `all` for every
    row, those that a preset leaves out among them."""
    seeds: tuple[int, ...] | None = None
    """Seeds instead of the preset's."""
    rounds: int | None = None
    """Rounds of every run."""
    width: int | None = None
    """Filters of the ConvNet."""
    tuned: bool = False
    """Besides, each method with the best of five values of its main number, all by one rule, on a
    seed that is not averaged."""
    output_dir: str | None = None
    """Folder of the results (default: results/TABLE-PRESET). A run found there is not repeated."""
    list: bool = False
    """Print the runs and whether they are done; run nothing."""
    show: bool = False
    """Print and draw what is there; run nothing."""
    pictures: tuple[str, ...] = ()
    """Kinds of pictures besides PNG: pdf, svg; dark: each on a dark page, too, as NAME-dark.png."""
    quiet: bool = False
    """Nothing but errors on stderr, and of stdout one last line, a JSON object. Otherwise stdout
    gets a line per run, and stderr what is running: where it is no terminal, a line every 30 s, and
    less often the longer it takes, every 10 min in the end."""
    json: bool = False
    """Progress, the lines of runs, notes and errors on stderr as one JSON object a line; the last
    line of stdout is one, too."""
