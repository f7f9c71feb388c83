"""The run folder: reading and writing it, and the true state of a run, from any process. Imports no torch.

The folder is the database, and every file in it but events.jsonl has one writer:

    run.json                 `launch`, once: who and where (RunRecord)
    params.yaml              `launch`, once: the whole configuration
    status.json              the supervisor: job id, failure, final state
    logs/rank<N>.json        rank N: process, then done or failed with its traceback
    logs/rank<N>.beat        rank N: what it is about to do
    logs/*_<N>_log.out       rank N: what it prints (submitit's files)
    metrics.jsonl            rank 0: one line a step; metrics-rank<N>.jsonl for the others
    events.jsonl             whoever it befalls: preempted, resumed and the like, one line each
    plan.json, checkpoints/, result.json, report.html    the training itself
    cancel                   whoever wants the run to stop; its presence is the message
"""

from .checkpoints import complete_checkpoints, drop_after
from .events import NEWEST, marks, note, read_events
from .files import (
    RESERVE,
    Beat,
    MetricsWriter,
    PathLike,
    beat_path,
    last_row,
    metrics_path,
    read_json,
    read_metrics,
    refused,
    reserve,
    whose,
    write_json,
    write_text,
)
from .preempt import NOTICE, Preempted, asked, listen
from .state import RunRecord, RunState, Status, is_run, log_paths, run_state

__all__ = [
    "NEWEST",
    "NOTICE",
    "RESERVE",
    "Beat",
    "MetricsWriter",
    "PathLike",
    "Preempted",
    "RunRecord",
    "RunState",
    "Status",
    "asked",
    "beat_path",
    "complete_checkpoints",
    "drop_after",
    "is_run",
    "last_row",
    "listen",
    "log_paths",
    "marks",
    "metrics_path",
    "note",
    "read_events",
    "read_json",
    "read_metrics",
    "refused",
    "reserve",
    "run_state",
    "whose",
    "write_json",
    "write_text",
]
