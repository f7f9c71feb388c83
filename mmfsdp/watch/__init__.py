"""Follows a run as its files are written, in bounded memory. The terminal and the notebook both use this."""

from .follow import Bar, Progress, clock, follow
from .ranks import Rank, Ranks
from .rows import Rows
from .tail import COLOR, MAX_LINE, LogLine, Tail, clean, first_error, level, read_log

__all__ = [
    "COLOR",
    "MAX_LINE",
    "Bar",
    "LogLine",
    "Progress",
    "Rank",
    "Ranks",
    "Rows",
    "Tail",
    "clean",
    "clock",
    "first_error",
    "follow",
    "level",
    "read_log",
]
