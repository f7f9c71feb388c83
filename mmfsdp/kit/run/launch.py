"""launch: prepare a run, and start it."""

from __future__ import annotations

from collections.abc import Callable

from ...params import RunParams
from ...params.findings import Finding
from .adopt import check_name
from .files.run_record import TRAIN, check_entry
from .handle import Run
from .interrupt import interruptible
from .start import Prepared, prepared, start, warn


def launch(params: RunParams | Prepared, *, entry: str = TRAIN, tell: Callable[[Finding], object] = warn) -> Run:
    """Check and plan a run, start it, and return. Its ranks survive an interrupt, a restart or the end of the caller.

    Args:
        params: The parameters of the run, or what `train.prepare` made of them.
        entry: What every rank runs, by its name: "train" or "train_and_caption" (see run_record.py). The
            variables of torch.distributed are set. Only a training is planned.
        tell: Called with each finding of the plan. Default: a Python warning.

    Returns:
        A handle on the run, which may still be starting: `run.wait()`, `run.logs()`, `run.cancel()`.

    Raises:
        ParamError: If the run's name is taken, if its data cannot be read, or if it cannot be planned.
    """
    entry = check_entry(entry)
    check_name(params if isinstance(params, RunParams) else params.params)  # before seconds of planning
    with interruptible("nothing was started"):
        params, plan, code = prepared(params, entry, tell)
    return Run(start(params, entry, plan, code))
