"""How each rank of a run is, from what it has left in the folder."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..runs import PathLike, RunState, Status, beat_path, metrics_path, read_metrics
from ..runs.files import NO_FILE
from ..runs.state import rank_word

QUIET = 10.0
"""Seconds without a sign of life, or five of its steps if they are longer, after which a rank stands out."""


@dataclass(frozen=True)
class Rank:
    """One rank at one moment."""

    rank: int
    status: str = "waiting"
    """waiting, running, quiet, failed, stopped or done."""
    doing: str = ""
    """What it said it was about to do."""
    step: int | None = None
    age: float | None = None
    """Seconds since its last sign of life."""
    memory: int | None = None
    """Bytes, after its last step."""
    step_s: float = 0.0
    error: str = ""
    traceback: str = ""


@dataclass
class Ranks:
    """Looks at the ranks of a run; files that have not changed are not read again."""

    path: PathLike
    count: int
    _seen: dict[Path, tuple[int, Any]] = field(default_factory=dict)

    def poll(self, state: RunState) -> list[Rank]:
        """Every rank as it is now, in a run that is in this state."""
        return [self._look(rank, state) for rank in range(self.count)]

    def _look(self, number: int, state: RunState) -> Rank:
        folder = Path(self.path)
        word = self._fresh(folder / "logs" / f"rank{number}.json", lambda: rank_word(folder, number)) or {}
        beat = beat_path(folder, number)
        doing = self._fresh(beat, lambda: beat.read_text(errors="replace").strip()[:40]) or ""
        row = self._fresh(metrics_path(folder, number), lambda: _last(folder, number)) or {}
        rank = Rank(number, doing=doing, step=row.get("step"), memory=row.get("memory_bytes"))
        if found := re.match(r"step (\d+)", doing):
            rank = replace(rank, step=int(found[1]))
        if (mtime := self._seen.get(beat, (0, None))[0]) and not state.done:
            rank = replace(rank, age=max(0.0, time.time() - mtime / 1e9), step_s=row.get("step_s") or 0.0)
        return replace(rank, status=_status(rank, word, state), **_failure(number, word, state))

    def _fresh(self, path: Path, read: Any) -> Any:
        """What `read` gives, called only when the file is another than at the last look; None where there is none."""
        try:
            mtime = os.stat(path).st_mtime_ns
            if self._seen.get(path, (0, None))[0] != mtime:
                self._seen[path] = mtime, read()
        except NO_FILE:
            return None
        return self._seen[path][1]


def _last(folder: Path, rank: int) -> dict[str, Any]:
    rows, _ = read_metrics(folder, rank, offset=-2000)
    return rows[-1] if rows else {}


def _status(rank: Rank, word: dict[str, Any], state: RunState) -> str:
    if word.get("state") in ("failed", "done"):
        return str(word["state"])
    if state.rank == rank.rank and state.status is Status.FAILED:
        return "failed"
    if state.done:
        return "done" if state.ok else "stopped"
    if rank.age is not None and rank.age > max(QUIET, 5 * rank.step_s):
        return "quiet"
    return "running" if rank.age is not None else "waiting"


def _failure(number: int, word: dict[str, Any], state: RunState) -> dict[str, Any]:
    if word.get("state") == "failed":
        return {"error": str(word.get("error", "")), "traceback": str(word.get("traceback", ""))}
    if state.rank == number:
        return {"error": state.reason, "traceback": state.traceback}
    return {}
