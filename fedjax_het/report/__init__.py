"""Tables and figures from results: what was measured, and nothing missing out of sight.

Every function but `write_report` is a function of its arguments: data frames in, a data frame, a
table of texts or a figure out. Accuracies are percentages from here on.
"""

from fedjax_het.report.against import plot_metric_vs_alpha, plot_metric_vs_setting
from fedjax_het.report.cell import AVERAGE, TableCell, parse_row
from fedjax_het.report.client_accuracies import plot_client_accuracies, run_paired_tests
from fedjax_het.report.collaboration import plot_collaboration
from fedjax_het.report.comparison import compare_with_reported, list_diverged_runs
from fedjax_het.report.comparison_curves import plot_table_curves
from fedjax_het.report.comparison_table import format_comparison_table, make_comparison_caption
from fedjax_het.report.grouping import find_varying_settings
from fedjax_het.report.heat_map import plot_heat_map
from fedjax_het.report.learning_curves import plot_gradient_gaps, plot_learning_curves
from fedjax_het.report.overview import make_overview_table, make_pivot_table, summarize_runs
from fedjax_het.report.ranks import RankCorrelation, add_ranks, compute_rank_correlations
from fedjax_het.report.render import TextTable, print_table, to_csv, to_latex, to_markdown
from fedjax_het.report.style import assign_method_colors
from fedjax_het.report.write import write_report

__all__ = [
    "AVERAGE",
    "RankCorrelation",
    "TableCell",
    "TextTable",
    "add_ranks",
    "assign_method_colors",
    "compare_with_reported",
    "compute_rank_correlations",
    "find_varying_settings",
    "format_comparison_table",
    "list_diverged_runs",
    "make_comparison_caption",
    "make_overview_table",
    "make_pivot_table",
    "parse_row",
    "plot_client_accuracies",
    "plot_collaboration",
    "plot_gradient_gaps",
    "plot_heat_map",
    "plot_learning_curves",
    "plot_metric_vs_alpha",
    "plot_metric_vs_setting",
    "plot_table_curves",
    "print_table",
    "run_paired_tests",
    "summarize_runs",
    "to_csv",
    "to_latex",
    "to_markdown",
    "write_report",
]
