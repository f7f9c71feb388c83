"""Lay what was measured beside what is aimed at. Imports Python's own library only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OPENFLAMINGO = "OpenFlamingo's scheme"
OURS = "frozen-aware"
MIN_MFU, MIN_SPEEDUP, MAX_MEMORY, MAX_NF4, MAX_ERROR = 0.5, 1.3, 0.6, 1.2, 0.15

Line = tuple[str, str, str, str]
"""What, the goal, what was measured, and whether it is met."""


def read_rows(folder: Path, part: str) -> list[dict[str, Any]]:
    """Return the rows of a part that were measured; a line that is half written is left out."""
    path = folder / f"{part}.jsonl"
    if not path.exists():
        return []
    text = path.read_text()
    rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [row for row in rows if "failed" not in row and "stopped" not in row]


def verdict(met: bool) -> str:
    """Return the last cell of a line."""
    return "met" if met else "NOT MET"


def closing_table(folder: Path) -> str:
    """Return the table, with a line for each part that failed or was stopped."""
    machine = (read_rows(folder, "machine") or [{"device": "unknown"}])[0]
    lines: list[Line] = [("", "goal", f"on {machine['device']}", "")]
    for about in (_waits, _kernel, _utilization, _openflamingo, _nf4, _saving, _predictions):
        lines += about(folder)
    if machine["device"] == "CPU":  # its figures say nothing about the goals
        lines = [(*line[:3], "") for line in lines]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    text = ["== summary"]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        text.append("  ".join(cells).rstrip())
    if machine["device"] == "CPU":
        text.append("on a CPU this only shows that everything runs")
    for event in _ends(folder):
        if "failed" in event:
            text.append(f"{event['part']}: {event['failed']}")
    return "\n".join(text)


def _ends(folder: Path) -> list[dict[str, Any]]:
    path = folder / "parts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _waits(folder: Path) -> list[Line]:
    rows = read_rows(folder, "waits")
    if not rows:
        return [("the host waits in a step", "never", "not measured", "")]
    waiting = [row for row in rows if row["waits of mmfsdp"]]
    others = sum(row["waits of others"] > 0 for row in rows)
    tried = [row["done before the GPU"] for row in rows if "done before the GPU" in row]
    return [
        ("steps in which mmfsdp waits", "0", f"{len(waiting)} of {len(rows)}", verdict(not waiting)),
        ("steps in which others wait", "", f"{others} of {len(rows)}", ""),
        ("steps issued before the GPU began", "", f"{sum(tried)} of {len(tried)}", ""),
    ]


def _kernel(folder: Path) -> list[Line]:
    rows = read_rows(folder, "kernel")
    equal = [row for row in rows if row.get("what") == "same bits"]
    runs = [row["runs"] for row in rows if row.get("what") == "fused kernel"]
    lines: list[Line] = [("fused kernel of nf4", "runs", str(runs == [True]), verdict(runs == [True]))]
    for row in equal:
        lines.append((f"{row['form']}: bits as on the CPU", "equal", "equal", verdict(True)))
    if len(equal) < 2:
        lines.append(("int8 and nf4: bits as on the CPU", "equal", "not measured, or not equal", verdict(False)))
    for row in rows:
        if "dequantize" in row:
            measured = f"{row['ms']:.3f} ms, {row['GB/s']:,.0f} GB/s"
            lines.append((f"dequantize {row['matrix']}, {row['dequantize']}", "", measured, ""))
    return lines


def _utilization(folder: Path) -> list[Line]:
    ours = [row for row in read_rows(folder, "methods") if row["way"].startswith(OURS)]
    if not ours:
        return [("MFU, of the measured matrix rate", f"{MIN_MFU:.0%}", "not measured", "")]
    best = max(ours, key=lambda row: row["MFU"])
    measured = f"{best['MFU']:.1%} ({best['way']}, {best['samples']} samples)"
    return [("MFU, of the measured matrix rate", f"{MIN_MFU:.0%}", measured, verdict(best["MFU"] >= MIN_MFU))]


def _openflamingo(folder: Path) -> list[Line]:
    rows = [row for row in read_rows(folder, "methods") if not row["mask"]]
    theirs = next((row for row in rows if row["way"] == OPENFLAMINGO), None)
    if theirs is None:
        return [("beside OpenFlamingo's scheme", "", "not measured", "")]
    lines: list[Line] = []
    for row in rows:
        if row["way"] == OPENFLAMINGO or row["samples"] != theirs["samples"]:
            continue
        speedup = row["samples/s"] / theirs["samples/s"]
        memory = row["peak GB"] / theirs["peak GB"]
        goal, met = "", ""
        if row["way"].startswith(OURS):
            goal = f"{MIN_SPEEDUP} x, {MAX_MEMORY} x"
            met = verdict(speedup >= MIN_SPEEDUP and memory <= MAX_MEMORY)
        measured = f"{speedup:.2f} x samples/s, {memory:.2f} x memory"
        lines.append((f"{row['way']} beside OpenFlamingo's", goal, measured, met))
    return lines


def _nf4(folder: Path) -> list[Line]:
    lines: list[Line] = []
    for row in read_rows(folder, "formats"):
        if row["form"] != "bf16":
            goal, met = "", ""
            if row["form"] == "nf4":
                goal, met = f"at most {MAX_NF4} x", verdict(row["s / bf16"] <= MAX_NF4)
            name = f"a step in {row['form']} beside bf16, {row['tokens']:,} tokens"
            lines.append((name, goal, f"{row['s / bf16']:.3f} x", met))
    return lines or [("a step in nf4 beside bf16", f"at most {MAX_NF4} x", "not measured", "")]


def _saving(folder: Path) -> list[Line]:
    lines: list[Line] = []
    for row in read_rows(folder, "saving"):
        if row["what"].startswith("async"):
            waited = "did not wait" if row["done before the GPU"] else "waited for the GPU"
            measured = (
                f"{row['call s']:.3f} s, {waited}; pinned {row['pinned MB']:,.0f} MB, files {row['files MB']:,.0f}"
            )
            lines.append((row["what"], "", measured, ""))
    return lines


def _predictions(folder: Path) -> list[Line]:
    lines: list[Line] = []
    rows = read_rows(folder, "formats") + read_rows(folder, "methods") + read_rows(folder, "vlm")
    peaks = [row["predicted peak / measured"] for row in rows if "predicted peak / measured" in row]
    if peaks:
        lines.append(
            ("predicted peak over measured", "", f"{min(peaks):.3f} to {max(peaks):.3f}, {len(peaks)} steps", "")
        )
    in_range = [row["seconds in range"] for row in rows if "seconds in range" in row]
    if in_range:
        lines.append(("seconds in the predicted range", "", f"{sum(in_range)} of {len(in_range)} steps", ""))
    usual = [row["usual s / measured"] for row in rows if "usual s / measured" in row]
    if usual:
        met = verdict(max(abs(ratio - 1) for ratio in usual) <= MAX_ERROR)
        measured = f"{min(usual):.2f} to {max(usual):.2f}, {len(usual)} steps"
        lines.append(("the usual seconds over measured", f"within {MAX_ERROR:.0%}", measured, met))
    return lines
