"""Training on every rank, and the only place where all parts meet."""

from .job import run

__all__ = ["run"]
