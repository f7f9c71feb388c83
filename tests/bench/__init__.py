"""Measurements for developers: `python -m tests.bench.NAME`. They print figures and assert nothing."""

from __future__ import annotations

from typing import Any


def timings(found: list[dict[str, Any]]) -> str:
    """Rows of what, seconds (the median) and most, as text: a line each."""
    lines = [f"{'':<56} {'median':>9} {'most':>9}"]
    for row in found:
        most = f"{row['most']:>7.3f} s" if row["most"] is not None else ""
        lines.append(f"{row['what']:<56} {row['seconds']:>7.3f} s {most:>9}".rstrip())
    return "\n".join(lines)
