"""From result files to a table, a page and docs/results.md; needs neither torch nor numpy."""

from batchformer.report.comparison import ComparisonRow, comparison_table, format_table
from batchformer.report.statistics import PairedDifference, Summary, paired_difference, summarise
from batchformer.report.verdict import Verdict, verdict

__all__ = [
    "ComparisonRow",
    "PairedDifference",
    "Summary",
    "Verdict",
    "comparison_table",
    "format_table",
    "paired_difference",
    "summarise",
    "verdict",
]
