"""From result files to a table, a sentence and a page; needs neither torch nor numpy."""

from batchformer.report.comparison import Comparison, compare_runs
from batchformer.report.page import write_report
from batchformer.report.runs import Run, load_runs
from batchformer.report.statistics import PairedDifference, Summary, paired_difference, summarise
from batchformer.report.tables import Verdict, format_table, verdict, verdicts

__all__ = ["Comparison", "PairedDifference", "Run", "Summary", "Verdict", "compare_runs", "format_table", "load_runs",
           "paired_difference", "summarise", "verdict", "verdicts", "write_report"]  # fmt: skip
