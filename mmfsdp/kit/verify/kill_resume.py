"""check_resume: a run that is killed and resumed goes on as it did before, and its export loads."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.spawn import ProcessException

from ...core.micro_batch import loss_of
from ...params import RunParams
from ...params.enums import LAYOUTS
from .. import train
from ..compat.export import export
from ..compat.layout import layout_of
from ..data.open_sources import open_for
from ..run.files.folder import read_metrics
from ..run.local import LOOPBACK
from ..run.own_code import use_code_of
from ..run.ranks.address import loopback_interface, reserved_port
from ..run.trust import own_code_of, trust_run
from ..spawn_ranks import in_processes
from ..train.evaluate import load_run
from .batches import batches_of_data
from .differences import TOLERANCE
from .lines import NOTE, OK, WRONG, Line
from .outcome import RANKS
from .shallow import as_rank

SAVED, KILLED, STEPS = 2, 4, 5
"""Step of the checkpoint, step after which all ranks are killed, and last step."""


LIMIT_S = 600.0
"""Seconds that a run of so few steps may take."""
MAX_WORDS = 200
"""Letters of another library's error."""


class Killer:
    """A callback that kills rank 0, as the kernel does that has no memory left; the other ranks end with it."""

    rank0_only = True  # it has written the row of the step

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, row: dict[str, Any]) -> None:
        """Kill this process after a step, whose row is written."""
        if row["step"] == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def check_resume(params: RunParams, folder: Path) -> list[Line]:
    """Train in a folder until all ranks are killed, resume, and export. Return the lines of resume and export.

    params: of a short run on the CPU. folder: holds `code/`, if the run has code of its own.
    """
    run = folder / "run"
    run.mkdir()
    if (folder / "code").is_dir():
        shutil.copytree(folder / "code", run / "code")
    params = params.change(**{"train.steps": STEPS, "train.save_every": SAVED, "train.keep_last": None})
    killer = {"call": f"{__name__}:{Killer.__name__}", "step": KILLED}
    # The callback is in the first run only: the resumed one has the parameters of the person.
    params.change(**{"train.callbacks": [killer]}).to_yaml(run / "params.yaml")
    error = train_on_ranks(run)
    before = rows_of(run)
    if KILLED not in before:
        return [
            Line(WRONG, "resume", f"the run ended before step {KILLED}: {error}", "correct the error that it names")
        ]
    params.to_yaml(run / "params.yaml")
    error = train_on_ranks(run)
    if error:
        return [Line(WRONG, "resume", f"the killed run cannot be resumed: {error}", "correct the error that it names")]
    return [_compare(before, rows_of(run)), check_export(run, params, folder / "exported")]


def check_export(run: Path, params: RunParams, to: Path) -> Line:
    """Export the run, load the export as another program would, and compare a loss."""
    trust_run(run)
    try:
        export(run, to)
        _, model, processor = load_run(run, quantized=False)
        [batch] = batches_of_data(params, processor, open_for(processor, params), ranks=1).of_ranks
        with own_code_of(run, params):
            load = layout_of(params.model, LAYOUTS[0]).load
            if load is None:
                return Line(NOTE, "export", f"written, and not loaded: this kind's layout {LAYOUTS[0]} says not how")
            losses = [loss_on(each, batch) for each in (model, load(params, to))]
    except Exception as error:
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_WORDS]}"
        return Line(WRONG, "export", f"the run's export fails: {words}", "give the model a state dict that loads again")
    if abs(losses[0] - losses[1]) > TOLERANCE * max(abs(losses[0]), 1e-3):
        words = f"the loaded export has the loss {losses[1]:.6g}, and the run's model {losses[0]:.6g}"
        fix = "keep all that the forward needs in parameters and persistent buffers"
        return Line(WRONG, "export", words, fix)
    return Line(OK, "export", f"it loads, and has the loss of the run's model, {losses[0]:.4g}")


@torch.no_grad()
def loss_on(model: nn.Module, batch: Any) -> float:
    """Return the loss of a batch."""
    return float(loss_of(model.eval()(**batch.inputs())))


def _compare(before: dict[int, Any], after: dict[int, Any]) -> Line:
    """Return the line of the check: the steps after the checkpoint, before the kill and after the resume."""
    for step in range(SAVED + 1, KILLED + 1):
        for figure in ("loss", "grad_norm"):
            # To the last bit: on one machine the same steps give the same numbers, unless a state is missing.
            if before[step][figure] != after[step][figure]:
                words = f"{figure} of step {step} was {before[step][figure]:.8g}, and after kill and resume it is "
                fix = "draw random numbers from the global generators of Python, NumPy and torch, and keep what the "
                fix += "forward remembers in buffers: a checkpoint holds these"
                return Line(WRONG, "resume", f"{words}{after[step][figure]:.8g}", fix)
    words = f"killed after step {KILLED}, resumed from step {SAVED}: the loss and the norm are equal to the last bit"
    return Line(OK, "resume", words)


def rows_of(run: Path) -> dict[int, Any]:
    """Return the row of each step."""
    return {row["step"]: row for row in read_metrics(run) if "loss" in row}


def train_on_ranks(run: Path) -> str:
    """Train in a run folder on ranks of this machine. Return the error that ended them; "" if none."""
    errors = run.with_name("errors")
    errors.mkdir(exist_ok=True)
    torch_log = logging.getLogger("torch.multiprocessing.spawn")
    before = torch_log.level
    torch_log.setLevel(logging.ERROR)  # it warns of each rank that it ends after another one was killed
    try:
        with reserved_port() as port:
            in_processes(_train, RANKS, str(run), str(errors), port, limit_s=LIMIT_S)
    except (ProcessException, TimeoutError) as error:
        texts = [file.read_text() for file in sorted(errors.iterdir())]
        # A rank that wrote nothing was killed, and torch says by which signal.
        return texts[0] if texts else str(error).strip().splitlines()[-1]
    finally:
        torch_log.setLevel(before)
        shutil.rmtree(errors)
    return ""


def _train(rank: int, _: str, run: str, errors: str, port: int) -> None:
    """Train as one rank. What it prints goes to a file, and so does the error that ends it."""
    as_rank(rank)
    os.environ.update(MASTER_ADDR=LOOPBACK, MASTER_PORT=str(port))
    if loopback := loopback_interface():
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    log = os.open(f"{run}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    use_code_of(Path(run))
    try:
        train.run(Path(run))
    except Exception as error:
        text = " ".join(str(error).split())[-MAX_WORDS:]
        Path(errors, f"{rank}.txt").write_text(f"{type(error).__name__}: {text}")
        raise
