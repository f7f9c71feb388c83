"""`mmfsdp bench panel`: what the live page of a long run costs: its first show, a row more, a resize, a zoom."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from ..run.files.folder import MetricsWriter, metrics_path
from ..run.state import text_table

PIXELS, RESIZED = 240, 480
"""Widths of a chart in the strip of a run, before and after the window grows."""


def bench_panel(*, rows: int = 100_000, rounds: int = 20) -> dict[str, Any]:
    """Write metrics of a run, and answer what a page asks for. Starts no ranks and no browser.

    rounds: times that each question but the first is asked; their median is told. The ratio is to the first show: all
    rows read from the file, and all points sent.
    """
    from ..widgets.charts.charts import Charts

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        _write_rows(folder, rows)
        charts = Charts(folder, total=rows)
        writer = MetricsWriter(folder, after=rows)
        page: dict[str, Any] = {}  # what the page has: a row more is all that it lacks
        step = rows

        def ask(pixels: int, *, anew: bool = False, **view: float) -> int:
            """Ask as the script of the page does, until all is read; return the bytes that are sent."""
            sent = 0
            while True:
                reply = charts.reply({"pixels": pixels, "have": {} if anew else page} | view)
                sent += len(json.dumps(reply))
                for table in reply["tables"]:
                    page[table["name"]] = {key: table[key] for key in ("epoch", "bucket", "first", "end")}
                if not reply["more"]:
                    return sent

        def one_more() -> int:
            nonlocal step
            step += 1
            writer.write(_row(step))
            return ask(PIXELS)

        def resize() -> int:
            return ask(RESIZED, anew=True)

        def zoom() -> int:
            return ask(PIXELS, anew=True, low=rows / 2, high=rows / 2 + PIXELS / 2)

        seconds, sent = _measure(lambda: ask(PIXELS, anew=True), 1)
        result = [{"what": "first show", "seconds": seconds, "sent_bytes": sent, "ratio": 1.0}]
        for name, question in (("a row more", one_more), ("a resize", resize), ("a zoom", zoom)):
            if name == "a row more":
                ask(PIXELS, anew=True)
            question_s, sent = _measure(question, rounds)
            result.append({"what": name, "seconds": question_s, "sent_bytes": sent, "ratio": question_s / seconds})
        charts.close()
    return {"title": f"a live panel of {rows:,} rows, from a question of the page to its answer", "rows": result}


def _measure(question: Callable[[], int], rounds: int) -> tuple[float, int]:
    """Return the median of the seconds of a question, and the bytes of its newest answer."""
    times, sent = [], 0
    for _ in range(rounds):
        begin = time.perf_counter()
        sent = question()
        times.append(time.perf_counter() - begin)
    return median(times), sent


def _row(step: int) -> dict[str, Any]:
    """Return a row of metrics as a rank writes it."""
    row = {"step": step, "time": 1e9 + step / 10, "loss": 1 + 2 / step, "grad_norm": 1 + step % 7 / 10, "lr": 1e-3}
    return row | {"samples_per_s": 90.0 + step % 11, "mfu": 0.3, "memory_bytes": 50 << 20}


def _write_rows(folder: Path, rows: int) -> None:
    """Write the metrics of a run that has done so many steps, at once: the writer flushes each row."""
    lines = [json.dumps(_row(step)) for step in range(1, rows + 1)]
    metrics_path(folder).write_text("\n".join(lines) + "\n", encoding="utf-8")


def table(result: dict[str, Any]) -> str:
    """Return the rows as text."""
    lines = [("", "ms", "sent kB", "of the first show")]
    for row in result["rows"]:
        share = f"{row['ratio']:.2%}"
        lines.append((row["what"], f"{1e3 * row['seconds']:.1f}", f"{row['sent_bytes'] / 1e3:.1f}", share))
    return f"{result['title']}\n{text_table(lines)}"
