"""Starts the ranks of a run and gives a handle on it. Imports no torch; training is imported inside the ranks.

launch() -> a supervisor in a session of its own -> submitit -> one process per rank, each calling the entry function.
"""

from .run import Run
from .start import launch

__all__ = ["Run", "launch"]
