"""Figures as SVG text: one palette and one style, legible on dark and on light pages, for screens and projectors."""

from .bars import bars, compared
from .curves import History, Metric, Series, chart, charts, figure
from .memory import memory_bar
from .plan import plan_picture
from .timeline import timeline

__all__ = [
    "History",
    "Metric",
    "Series",
    "bars",
    "chart",
    "charts",
    "compared",
    "figure",
    "memory_bar",
    "plan_picture",
    "timeline",
]
