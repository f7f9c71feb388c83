"""`python -m tests.bench.stream`: from the line that a rank writes to the page, in a real JupyterLab and Chromium.

Needs Python Playwright and Chromium (the extra `test`, and Debian's `chromium`).
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
import psutil

from mmfsdp.params import RunParams
from mmfsdp.run.folder import MetricsWriter, metrics_path, write_json
from mmfsdp.run.local import process_start
from mmfsdp.run.record import RunRecord
from tests.bench.lab import chromium, jupyterlab, open_notebook, run_cell

STEPS = 100_000
_TICKS = """() => {
  window.ticks ??= {};
  const look = () => { const at = Date.now() / 1000, log = document.querySelector('.mm-log')?.textContent ?? '';
    for (const m of log.matchAll(/tick (\\d+)\\./g)) window.ticks[m[1]] ??= at };
  new MutationObserver(() => requestAnimationFrame(() => requestAnimationFrame(look)))
    .observe(document.body, {subtree: true, childList: true, characterData: true}) }"""
"""Notes when each line has been painted: two frames after it came into the page."""


def bench_stream(*, seconds: float = 60.0) -> dict[str, Any]:
    """The figures, in seconds, shares of a core and MiB. seconds: how long 10,000 lines a second are written."""
    with TemporaryDirectory() as name, _panel(Path(name)) as (page, log, kernel):
        found: dict[str, Any] = {"load_before": os.getloadavg()[0], "cores": os.cpu_count()}
        found["cpu_kernel_alone"] = _cpu(kernel, 8)
        run_cell(page, "panel")
        page.evaluate(_TICKS)
        time.sleep(12)  # nothing comes: it looks less often
        found["cpu_idle"] = _cpu(kernel, 10)
        found |= _latency(page, log)
        found |= _reload(page, log)
        with _flood(log, rate=1000, seconds=12):
            found["cpu_1000_lines"] = _cpu(kernel, 10)
        found |= _endure(page, log, kernel, seconds)
        found |= _open_long(page, Path(name), kernel)
        return found | {"load_after": os.getloadavg()[0]}


@contextmanager
def _panel(folder: Path) -> Iterator[tuple[Any, Path, psutil.Process]]:
    """A page with a notebook on a run that seems to go on, that run's log, and the kernel's process."""
    home = folder / "home"
    home.mkdir()
    log = make_run(folder / "run") / "logs/0_0_log.out"
    log.touch()
    cells = {
        "start": "import os\nfrom mmfsdp.widgets import RunPanel\nopen('pid', 'w').write(str(os.getpid()))",
        "panel": "panel = RunPanel('run')\npanel",
        "long": "RunPanel('long')",
    }
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text, id=key) for key, text in cells.items()])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(book, folder / "book.ipynb")
    with jupyterlab(folder, home) as (base, token), chromium() as page:
        open_notebook(page, base, token, "book.ipynb")
        run_cell(page, "start")
        yield page, log, psutil.Process(int((folder / "pid").read_text()))


def make_run(folder: Path, *, steps: int = 100) -> Path:
    """The folder of a run that goes on as long as this process does."""
    (folder / "logs").mkdir(parents=True)
    RunParams().to_yaml(folder / "params.yaml")
    write_json(folder / "status.json", {"status": "STARTING"})
    values: dict[str, Any] = {"executor": "local", "entry": "", "ranks": 2, "steps": steps, "threads": 1}
    values |= {"timeout_min": 60, "device": "cpu", "host": socket.gethostname(), "pid": os.getpid()}
    values |= {"start": process_start(os.getpid()), "identity": "", "created": time.time(), "version": "", "commit": ""}
    RunRecord(**values).write(folder)
    return folder


def _cpu(process: psutil.Process, seconds: float) -> float:
    """The share of a core that a process takes."""
    before = sum(process.cpu_times()[:2])
    time.sleep(seconds)
    return (sum(process.cpu_times()[:2]) - before) / seconds


def _latency(page: Any, log: Path) -> dict[str, float]:
    """From the moment before a line is written to the moment after it is painted."""
    written, count = {}, 60
    for i in range(count):
        written[i] = time.time()
        _append(log, f"tick {i}.\n")
        time.sleep(random.uniform(0.1, 0.5))
    page.wait_for_function(f"() => window.ticks[{count - 1}]", timeout=30_000)
    took = sorted(page.evaluate("() => window.ticks")[str(i)] - at for i, at in written.items())
    return {"line_to_pixel_median": statistics.median(took), "line_to_pixel_p95": took[round(0.95 * count) - 1]}


def _reload(page: Any, log: Path) -> dict[str, int]:
    """60 lines, written while the page is loaded again; how many of them it shows afterwards."""
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_timeout(1000)
    with _flood(log, rate=6, seconds=10, words="around"):
        page.wait_for_timeout(3000)
        page.reload()
    page.locator(".mm-log", has_text="around 59.").wait_for(timeout=60_000)
    text = page.locator(".mm-log").text_content()
    return {"lines_of_60_around_reload": sum(f"around {i}." in text for i in range(60))}


def _endure(page: Any, log: Path, kernel: psutil.Process, seconds: float) -> dict[str, float]:
    """10,000 lines a second; how long after their end the last one is in the page, and what memory grew to."""
    heap = "() => performance.memory.usedJSHeapSize / 2 ** 20"
    before = kernel.memory_info().rss / 2**20, page.evaluate(heap)
    busy = sum(kernel.cpu_times()[:2])
    with _flood(log, rate=10_000, seconds=seconds, words="flood"):
        time.sleep(seconds + 0.5)
    end, last = time.time(), f"flood {round(10_000 * seconds) - 1}."
    page.locator(".mm-log", has_text=last).wait_for(timeout=60_000)
    return {
        "last_line_after_flood": time.time() - end,
        "cpu_10000_lines": (sum(kernel.cpu_times()[:2]) - busy) / seconds,
        "flood_mib": log.stat().st_size / 2**20,
        "kernel_mib_before": before[0],
        "kernel_mib_after": kernel.memory_info().rss / 2**20,
        "browser_mib_before": before[1],
        "browser_mib_after": page.evaluate(heap),
    }


def _open_long(page: Any, folder: Path, kernel: psutil.Process) -> dict[str, float]:
    """From running the cell to the curves of a run of STEPS steps, to their last step."""
    run = make_run(folder / "long", steps=STEPS)
    MetricsWriter(run).close()
    row = {"grad_norm": 0.5, "samples_per_s": 99.0, "memory_bytes": 2**28, "step_s": 0.1, "lr": 1e-3}
    more = {"tokens": 320.0, "data_s": 0.01, "tokens_per_s": 1e3, "wire_bytes": 7822888, "skipped_steps": 0}
    with open(metrics_path(run), "w") as file:
        file.writelines(
            json.dumps({"step": i + 1, "time": 1e9 + i, "loss": STEPS / (i + 1), **row, **more}) + "\n"
            for i in range(STEPS)
        )
    start, busy = time.time(), sum(kernel.cpu_times()[:2])
    run_cell(page, "long")
    page.locator(".jp-Cell", has_text="RunPanel('long')").locator("svg", has_text=", 1 now").first.wait_for()
    return {
        "open_100000_steps": time.time() - start,
        "its_kernel_cpu": sum(kernel.cpu_times()[:2]) - busy,
        "its_metrics_mib": metrics_path(run).stat().st_size / 2**20,
    }


@contextmanager
def _flood(log: Path, *, rate: int, seconds: float, words: str = "line") -> Iterator[None]:
    """Within (and to the end, whatever else takes how long), a process writes so many lines a second."""
    code = (
        "import sys, time\n"
        f"rate, total, start, done = {rate}, round({rate * seconds}), time.time(), 0\n"
        f"log = open({str(log)!r}, 'ab', buffering=0)\n"
        "while done < total:\n"
        "    until = min(total, int((time.time() - start) * rate) + 1)\n"
        f"    lines = [f'{words} {{i}}. of a rank that has much to say\\n' for i in range(done, until)]\n"
        "    done = until\n"
        "    log.write(''.join(lines).encode())\n"
        "    time.sleep(0.02)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
        process.wait(timeout=10 * seconds)
    finally:
        process.kill()
        process.wait()


def _append(log: Path, text: str) -> None:
    with open(log, "a") as file:
        file.write(text)


def table(found: dict[str, Any]) -> str:
    """A figure a line, with its bar where there is one."""
    bars = {
        "cpu_idle": "under 0.02",
        "cpu_1000_lines": "under 0.1",
        "line_to_pixel_median": "under 0.7",
        "line_to_pixel_p95": "under 1.2",
        "lines_of_60_around_reload": "60",
        "last_line_after_flood": "under 2",
        "open_100000_steps": "under 1",
    }
    return "\n".join(f"{name:<28} {value:>10.3f}  {bars.get(name, '')}".rstrip() for name, value in found.items())


if __name__ == "__main__":
    print(table(bench_stream()))
