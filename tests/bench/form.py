"""`python -m tests.bench.form`: how long a form takes to appear, and a plan to follow a choice."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from tests.bench import timings

table = timings
CHOICES = (
    ("fsdp.frozen_policy", "KEEP"),
    ("launch.ranks", 4),
    ("fsdp.sharding_strategy", "SHARD_GRAD_OP"),
    ("fsdp.frozen_policy", "REPLICATE"),
    ("fsdp.backend", "FSDP1"),
    ("train.batch_size", 3),
)
"""What a person would change, one after the other."""
_APPEARS = (
    "import time; began = time.perf_counter(); from mmfsdp.widgets import RunForm; RunForm('tiny'); import sys;"
    "assert 'torch' not in sys.modules; print(time.perf_counter() - began)"
)

_CELL = "from mmfsdp.widgets import RunForm\nRunForm('tiny')"
_SHOWN = """async () => { const app = window.jupyterapp, began = performance.now();
  app.commands.execute('notebook:run-all-cells');
  while (!document.querySelector('.mm-form input')?.offsetParent) await new Promise(requestAnimationFrame);
  return (performance.now() - began) / 1000 }"""


def bench_form(*, presets: tuple[str, ...] = ("tiny", "openflamingo_9b"), rounds: int = 3) -> list[dict[str, Any]]:
    """Seconds: of a fresh process from the import to a form; of JupyterLab from running a cell to the form on screen;
    of the kernel for a choice; until the new plan is drawn. Needs Playwright and Chromium.

    presets: what is planned, one after the other. rounds: of all choices, there and back; at least 1.
    """
    from mmfsdp.widgets import PlanView, RunForm

    command = [sys.executable, "-c", _APPEARS]
    fresh = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(rounds)]
    found = [{"what": "import and a form, torch not imported", "seconds": median(fresh), "most": max(fresh)}]
    shown = _until_on_screen(rounds)
    found.append({"what": "from running the cell to the form on screen", "seconds": median(shown), "most": max(shown)})
    for preset in presets:
        form = RunForm(preset)
        began = time.perf_counter()
        view = PlanView(form)
        view.wait()
        found.append({"what": f"{preset}: the first plan", "seconds": time.perf_counter() - began, "most": None})
        times: list[float] = []
        kernel, drawn, whole = [], [], []
        view.page.observe(lambda _, times=times: times.append(time.perf_counter()), "value")
        for name, value in [*CHOICES, *((n, form.rows[n].value) for n, _ in CHOICES)] * rounds:
            times.clear()
            began = time.perf_counter()
            form.reveal(name).children[0].value = value
            kernel.append(time.perf_counter() - began)
            view.wait()
            at = [*times, time.perf_counter()]  # nothing is drawn that looks the same
            drawn.append(at[0] - began)
            whole.append((times or at)[-1] - began)
        for what, seconds in (("in the kernel", kernel), ("until the plan is drawn", drawn), ("with its peak", whole)):
            found.append({"what": f"{preset}: a choice, {what}", "seconds": median(seconds), "most": max(seconds)})
        view.close()
        form.close()
    return found


def _until_on_screen(rounds: int) -> list[float]:
    """Seconds in a real JupyterLab and Chromium, with a kernel that has imported nothing."""
    import nbformat

    from tests.bench.lab import chromium, jupyterlab, open_notebook

    with TemporaryDirectory() as name:
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(_CELL)], metadata=kernel)
        nbformat.write(book, Path(name, "form.ipynb"))
        with jupyterlab(Path(name), Path(name, "home")) as (base, token):
            found = []
            for _ in range(rounds):
                with chromium() as page:
                    open_notebook(page, base, token, "form.ipynb")
                    found.append(page.evaluate(_SHOWN))
                    page.evaluate("() => window.jupyterapp.serviceManager.sessions.shutdownAll()")
            return found


if __name__ == "__main__":
    print(table(bench_form()))
