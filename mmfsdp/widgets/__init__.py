"""Notebook widgets: they draw what the parameters, the plan and the run folder say, and hold nothing of their own."""

from __future__ import annotations

from .compare import show_comparison
from .form import RunForm
from .launcher import Launcher
from .panel import RunPanel
from .plan_view import PlanView
from .report import show_captions

__all__ = ["Launcher", "PlanView", "RunForm", "RunPanel", "show_captions", "show_comparison"]
