"""Tables and figures from results, with every missing or diverged run reported.

Every function but `write_report` is a function of its arguments: data frames in, a data frame, a
table of texts or a figure out. Accuracies are percentages.
"""

from fedjax_het.analysis.comparison import (
    AVERAGE,
    RankCorrelation,
    TableCell,
    add_ranks,
    compare_with_reported,
    compute_rank_correlations,
    format_comparison_table,
    list_diverged_runs,
    make_comparison_caption,
    parse_row,
)
from fedjax_het.analysis.figures.client_accuracies import plot_client_accuracies, run_paired_tests
from fedjax_het.analysis.figures.collaboration import plot_collaboration
from fedjax_het.analysis.figures.curves import (
    plot_gradient_gaps,
    plot_learning_curves,
    plot_table_curves,
)
from fedjax_het.analysis.figures.data_plots import plot_partition
from fedjax_het.analysis.figures.metric_vs_setting import (
    plot_heat_map,
    plot_metric_vs_alpha,
    plot_metric_vs_setting,
)
from fedjax_het.analysis.figures.split_figures import plot_client_measures, plot_metric_vs_measure
from fedjax_het.analysis.figures.style import assign_method_colors
from fedjax_het.analysis.figures.synthetic_images import plot_condensed, plot_server_examples
from fedjax_het.analysis.membership import (
    AttackResult,
    measure_membership_inference,
)
from fedjax_het.analysis.overview import (
    find_varying_settings,
    make_overview_table,
    make_pivot_table,
    summarize_runs,
)
from fedjax_het.analysis.render import TextTable, print_table, to_csv, to_latex, to_markdown
from fedjax_het.analysis.report import write_report

__all__ = [
    "AVERAGE",
    "AttackResult",
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
    "measure_membership_inference",
    "parse_row",
    "plot_client_accuracies",
    "plot_client_measures",
    "plot_collaboration",
    "plot_condensed",
    "plot_gradient_gaps",
    "plot_heat_map",
    "plot_learning_curves",
    "plot_metric_vs_alpha",
    "plot_metric_vs_measure",
    "plot_metric_vs_setting",
    "plot_partition",
    "plot_server_examples",
    "plot_table_curves",
    "print_table",
    "run_paired_tests",
    "summarize_runs",
    "to_csv",
    "to_latex",
    "to_markdown",
    "write_report",
]
