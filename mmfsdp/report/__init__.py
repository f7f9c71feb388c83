"""HTML pages from run folders alone: one run's report.html, and runs compared."""

from .comparison import compare, write_comparison
from .run import captions, figures, findings, levels, report_html, unit_table, write_report

__all__ = [
    "captions",
    "compare",
    "figures",
    "findings",
    "levels",
    "report_html",
    "unit_table",
    "write_comparison",
    "write_report",
]
