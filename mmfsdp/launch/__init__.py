"""Starts the ranks of a run and gives a handle on it. Imports no torch; training is imported inside the ranks.

launch() -> a supervisor in a session of its own -> submitit -> one process per rank, each calling the entry function.
"""

from typing import TYPE_CHECKING

from .run import Run
from .start import launch
from .sweeps import Sweep, sweep

if TYPE_CHECKING:
    from ..params import RunParams

__all__ = ["Run", "Sweep", "launch", "sbatch_text", "sweep"]


def sbatch_text(params: "RunParams") -> str:
    """What sbatch will receive for a run: its batch file, to the byte. Raises ParamError as `launch` does."""
    from .slurm import sbatch_text

    return sbatch_text(params)
