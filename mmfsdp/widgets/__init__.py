"""Notebook widgets: they draw what the parameters, the plan and the run folder say, and hold nothing of their own."""

from __future__ import annotations

from .captioner import Captioner
from .captions import show_captions
from .compare import Compare
from .form import RunForm
from .launcher import Launcher
from .panel import RunPanel
from .plan import PlanView

__all__ = ["Captioner", "Compare", "Launcher", "PlanView", "RunForm", "RunPanel", "show_captions"]
