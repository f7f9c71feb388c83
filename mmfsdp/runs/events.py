"""events.jsonl: what befell a run, one line each, oldest first: {"time", "step", "kind", "text"}."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from .files import NO_FILE, PathLike, parse_rows

KINDS = ("saved", "drill", "preempted", "requeued", "resumed", "failed")


def note(folder: PathLike, kind: str, *, step: int, text: str) -> None:
    """Add an event, in one system call: the ranks, the supervisor and whoever drills write to the same file."""
    assert kind in KINDS, kind
    row = json.dumps({"time": time.time(), "step": step, "kind": kind, "text": text})
    file = os.open(Path(folder) / "events.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(file, row.encode() + b"\n")
    finally:
        os.close(file)


NEWEST = 1 << 17
"""Bytes of events.jsonl that hold more events than anybody looks at."""


def read_events(folder: PathLike, *, size: int | None = None) -> list[dict[str, Any]]:
    """The events of a run, those in the newest `size` bytes or all; damaged lines are left out."""
    try:
        with open(Path(folder) / "events.jsonl", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size) if size else 0)
            data = file.read()
    except NO_FILE:
        return []
    return [row for row in parse_rows(data) if row.get("kind") in KINDS and isinstance(row.get("step"), int)]


def marks(folder: PathLike) -> list[tuple[int, str]]:
    """(step, words) of what a curve marks: the newest 50 events, saves apart."""
    return [
        (row["step"], str(row.get("text", ""))) for row in read_events(folder, size=NEWEST) if row["kind"] != "saved"
    ][-50:]
