"""From result files to a table, a page and docs/results.md; needs neither torch nor numpy."""

from batchformer.report.comparison import ComparisonRow, comparison_table, format_table
from batchformer.report.page import write_report
from batchformer.report.runs import Run, load_runs
from batchformer.report.statistics import PairedDifference, Summary, paired_difference, summarise
from batchformer.report.verdict import Verdict, verdict

__all__ = [
    "ComparisonRow",
    "PairedDifference",
    "Run",
    "Summary",
    "Verdict",
    "comparison_table",
    "format_table",
    "load_runs",
    "paired_difference",
    "summarise",
    "verdict",
    "write_report",
]
