"""Figures as SVG text: one palette and one style, legible on dark and on light pages, for screens and projectors."""

from .bars import bars
from .curves import History, Metric, Series, chart, charts, figure
from .memory import memory_bar
from .plan import plan_picture

__all__ = [
    "History",
    "Metric",
    "Series",
    "bars",
    "chart",
    "charts",
    "figure",
    "memory_bar",
    "plan_picture",
]
