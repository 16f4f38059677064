"""Tables and figures from results: what was measured, and nothing missing out of sight.

Every function but `write_report` is a function of its arguments: data frames in, a data frame, a
table of texts or a figure out. Accuracies are percentages from here on.
"""

from fedjax_het.report.against import plot_against, plot_against_alpha
from fedjax_het.report.cell import AVERAGE, Cell, parse_row
from fedjax_het.report.client_accuracies import paired_tests, plot_client_accuracies
from fedjax_het.report.collaboration import plot_collaboration
from fedjax_het.report.comparison import compare, diverged_runs
from fedjax_het.report.comparison_curves import plot_curves
from fedjax_het.report.comparison_table import caption, comparison_table
from fedjax_het.report.grouping import varying_settings
from fedjax_het.report.heat_map import plot_heat_map
from fedjax_het.report.learning_curves import plot_gradient_gaps, plot_learning_curves
from fedjax_het.report.overview import overview_table, pivot_table, summarise_runs
from fedjax_het.report.ranks import RankCorrelation, add_ranks, rank_correlations
from fedjax_het.report.render import TextTable, print_table, to_csv, to_latex, to_markdown
from fedjax_het.report.style import method_colours
from fedjax_het.report.write import write_report

__all__ = [
    "AVERAGE",
    "Cell",
    "RankCorrelation",
    "TextTable",
    "add_ranks",
    "caption",
    "compare",
    "comparison_table",
    "diverged_runs",
    "method_colours",
    "overview_table",
    "paired_tests",
    "parse_row",
    "pivot_table",
    "plot_against",
    "plot_against_alpha",
    "plot_client_accuracies",
    "plot_collaboration",
    "plot_curves",
    "plot_gradient_gaps",
    "plot_heat_map",
    "plot_learning_curves",
    "print_table",
    "rank_correlations",
    "summarise_runs",
    "to_csv",
    "to_latex",
    "to_markdown",
    "varying_settings",
    "write_report",
]
