"""TensorBoard: event files in the run folder, in `tensorboard/`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ....params import RunParams
from ..files.folder import make_inner_folder
from .track import State, Tracker


class TensorBoardTracker(Tracker):
    """Writes a scalar for each metric, and the parameters as a text."""

    def __init__(self, folder: Path, params: RunParams, state: State) -> None:
        self.folder = folder / "tensorboard"
        make_inner_folder(self.folder)
        self._open()
        if not state.get("has_params"):
            self._writer.add_text("params", "".join(f"    {line}\n" for line in params.to_yaml().splitlines()))
            state["has_params"] = True

    def _open(self, first: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder), purge_step=first, flush_secs=5)

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Write the metrics of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=at)
        self._writer.flush()

    def go_back(self, step: int) -> None:
        """Begin a file that tells TensorBoard to drop what is after a step."""
        self._writer.close()
        self._open(step + 1)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def open_tensorboard(folder: Path, params: RunParams, state: State) -> Tracker:
    """Return the tracker that writes event files of TensorBoard."""
    return TensorBoardTracker(folder, params, state)
