"""Pictures of every view at two sizes, light and dark, to be looked at: `python -m tests.browser.shots [VIEW ...]`.

They lie in artifacts/browser/views. Without names, all of them are made; a name is the beginning of a view's.
start_page.py makes README's picture.
"""

import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Locator, Page, expect

from mmfsdp.kit.widgets.compare import write_comparison
from mmfsdp.kit.widgets.report import write_report

from .lab import PATIENCE_MS, ROOT, SHOTS, chromium, jupyterlab, open_notebook, run_cell, set_theme, write_notebook

SIZES = {"1440x900": {"width": 1440, "height": 900}, "1280x720": {"width": 1280, "height": 720}}
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
ROWS = """from PIL import Image
def read():
    return [{"image": Image.new("RGB", (8, 8)), "text": f"row {i}"} for i in range(40)]
"""
CELLS = {
    "import": "import os\nos.environ |= {'CUDA_VISIBLE_DEVICES': '', 'MMFSDP_ENTRIES': 'tests.launch_entries'}\n"
    "from mmfsdp import RunParams, check, launch, replay, sweep\nfrom mmfsdp.params import load\n"
    "from mmfsdp.widgets import Captioner, Cockpit, RunPanel, show_captions, show_comparison",
    "cockpit": "cockpit = Cockpit('tiny', **{'train.steps': 120})\ncockpit",
    "finished": "cockpit.launch(); cockpit.wait()",
    "panel": "RunPanel('runs/tiny')",
    "nan": "named = RunParams().change(**{'launch.name': 'nan'})\n"
    "RunPanel(launch(named, entry='tests.launch_entries:diverge').path)",
    "killed": "named = RunParams().change(**{'launch.name': 'killed'})\n"
    "RunPanel(launch(named, entry='tests.launch_entries:die').path)",
    "ranks": "named = RunParams().change(**{'launch.name': 'ranks', 'launch.ranks': 16})\n"
    "many = launch(named, entry='tests.launch_entries:stream')\nRunPanel(many.path)",
    "end": "many.cancel()",
    "check": "check()",
    "plan": "from IPython.display import HTML, display\n"
    "from mmfsdp.kit.widgets.plan_page import PlannedRun, plan_page\n"
    "from mmfsdp.kit.widgets.style import STYLE\nfrom mmfsdp.kit.train.prepare import previews\n"
    "params = load('tiny')\n"
    "*_, (plan, cost) = previews(params)\n"
    "display(HTML(STYLE + plan_page(PlannedRun(params, plan, cost), machine='laptop')))",
    "printed": "print(plan)\nprint(cost)",
    "sweep": "rates = sweep(load('tiny').change(**{'train.steps': 20, 'launch.name': 'rates'}),"
    " grid={'train.lr': [1e-3, 1e-2]})\nrates.wait()\nprint(rates)",
    "compared": "show_comparison(['runs/tiny', *sorted(rates.path.glob('0*'))])",
    "captions": "show_captions('runs/tiny')",
    "captioner": "Captioner('runs/tiny')",
    "quiz": "from course import quiz\nquiz('01')",
    "form": "from mmfsdp.widgets import RunForm\nRunForm('tiny')",
}

COCKPITS = {
    "auto": {
        "preset": "openflamingo_9b",
        "fsdp.frozen_policy": "AUTO",
        "fsdp.memory_budget_gib": 16,
    },
    "hybrid": {
        "preset": "clip_llama_1b",
        "launch.ranks": 16,
        "fsdp.sharding_strategy": "HYBRID_SHARD",
        "fsdp.dp_shard": 4,
        "fsdp.dp_replicate": 4,
    },
    "many": {"preset": "llava_7b", "launch.ranks": 64},
    "mistake": {"preset": "tiny"},
    "data": {"preset": "tiny"},
}
"""Cockpits that are not launched: their presets, and the choices that differ."""
OF_A_RUN = ("panel", "sweep", "compared", "comparison", "captions", "captioner", "report")
"""Views of what the cockpit's run leaves."""
RECORDINGS = ("hang", "preemption", "out_of_memory")
CALLS = {
    "check": "check()",
    "plan": "plan_page(",
    "printed": "print(cost)",
    "compared": "show_comparison(",
    "captions": "show_captions(",
    "captioner": "Captioner(",
    "quiz": "quiz(",
    "form": "RunForm(",
}
"""A cell -> code that only it has."""


class Views:
    """The views of one notebook, and where their pictures go."""

    def __init__(self, page: Page, wanted: list[str]):
        self.page, self._wanted = page, wanted
        self.made: list[Path] = []

    def wants(self, *names: str) -> bool:
        """Return True if one of these views is to be made."""
        return not self._wanted or any(name.startswith(start) for name in names for start in self._wanted)

    def wants_any_of(self, beginning: str) -> bool:
        """Return True if a view whose name begins so is to be made."""
        return self.wants(beginning) or any(start.startswith(beginning) for start in self._wanted)

    def take(self, name: str, selector: str) -> None:
        """Keep pictures of what is in sight from an element's top on, at each size and in each theme."""
        if not self.wants(name):
            return
        for theme, title in THEMES.items():
            set_theme(self.page, title)
            for size, viewport in SIZES.items():
                self.page.set_viewport_size(viewport)
                self.page.wait_for_timeout(400)
                self.page.locator(selector).last.evaluate("e => e.scrollIntoView()")
                self.page.wait_for_timeout(300)
                self.keep(f"{name}-{size}-{theme}")

    def take_file(self, name: str, path: Path) -> None:
        """Keep pictures of a page that stands alone."""
        for theme in THEMES:
            self.page.emulate_media(color_scheme=theme)
            for size, viewport in SIZES.items():
                self.page.set_viewport_size(viewport)
                self.page.goto(path.as_uri())
                height = self.page.evaluate("document.documentElement.scrollHeight")
                for part in range(math.ceil(height / viewport["height"])):
                    self.page.evaluate("y => scrollTo(0, y)", part * viewport["height"])
                    self.keep(f"{name}-{part + 1}-{size}-{theme}")

    def keep(self, name: str) -> None:
        """Keep a picture of what is in sight."""
        path = SHOTS / "views" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=path)
        self.made.append(path)


def _add_cells() -> None:
    """Add the cells of the cockpits that are not launched, and of recordings."""
    for name, choices in COCKPITS.items():
        changes = {key: value for key, value in choices.items() if key != "preset"}
        CELLS[name] = f"Cockpit({choices['preset']!r}, **{changes!r})"
    for name in RECORDINGS:
        CELLS[f"replay-{name}"] = (
            f"played = replay('{name}', to='runs/replayed-{name}', speed=1000)\nplayed.wait()\nRunPanel(played.path)"
        )


def write_pictures(folder: Path) -> None:
    """Write a folder of pictures with their texts, of which one is broken."""
    folder.mkdir()
    for number in range(12):
        picture = Image.new("RGB", (48, 32), (20 * number, 90, 200 - 10 * number))
        picture.save(folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text(f"a plain picture, the number {number} of twelve")
    (folder / "03.png").write_bytes((folder / "03.png").read_bytes()[:60])


def main() -> None:
    """Make the views that were named, or all, in one JupyterLab."""
    with tempfile.TemporaryDirectory() as directory:
        folder, home = Path(directory) / "root", Path(directory) / "home"
        folder.mkdir()
        (folder / "my_rows.py").write_text(ROWS)
        (folder / "course").symlink_to(ROOT / "notebooks/course")
        write_pictures(folder / "pictures")
        _add_cells()
        write_notebook(folder / "views.ipynb", CELLS)
        with jupyterlab(folder, home) as (base, token), chromium() as page:
            open_notebook(page, base, token, "views.ipynb")
            page.evaluate("window.jupyterapp.shell.collapseLeft()")
            page.set_default_timeout(60_000)
            expect.set_options(timeout=60_000)
            views = Views(page, sys.argv[1:])
            run_cell(page, "import")
            if views.wants_any_of("cockpit") or views.wants(*OF_A_RUN):
                _cockpit(views)
            _planned_cockpits(views)
            _runs(views)
            _others(views)
            _pages(views, folder)
            _slides(views, folder / "slides")
    print(*views.made, sep="\n")


def _cockpit(views: Views) -> None:
    """The cockpit: before a run, with a pinned plan, with its drawers, while a run goes on and after it; stacked."""
    page = views.page
    run_cell(page, "cockpit")
    expect(page.locator(".mm-cockpit-figures", has_text="peak, longest texts")).to_be_visible()
    cockpit = ".mm-cockpit"
    views.take("cockpit-planned", cockpit)
    if views.wants("cockpit-choices", "cockpit-try", "cockpit-share"):
        _press(page, "All choices")
        views.take("cockpit-choices", cockpit)
        page.get_by_placeholder("search all parameters").fill("reader")
        page.get_by_placeholder("search all parameters").press("Enter")
        row = page.locator(".mm-form .mm-row", has=page.get_by_label("reader", exact=True)).first
        row.get_by_label("reader", exact=True).fill("my_rows:read")
        row.get_by_label("reader", exact=True).press("Tab")
        row.get_by_role("button", name="Try").click()
        expect(row).to_contain_text("rows to train on")
        views.take("cockpit-try", cockpit)
        source = page.locator(".mm-form .mm-row", has=page.get_by_label("source", exact=True)).first
        source.get_by_label("source", exact=True).select_option("shapes")
        page.get_by_placeholder("search all parameters").fill("")
        page.get_by_placeholder("search all parameters").press("Enter")
        _press(page, "All choices")
        _press(page, "YAML, command")
        views.take("cockpit-share", cockpit)
        _press(page, "YAML, command")
    _press(page, "Pin")
    _press(page, "REPLICATE")
    expect(page.locator(".mm-cockpit-figures .mm-less")).to_be_visible()
    views.take("cockpit-pinned", cockpit)
    _press(page, "Launch")
    expect(page.locator(".mm-parts")).to_be_visible()
    views.take("cockpit-starting", cockpit)
    expect(page.locator(".mm-run canvas").first).to_be_visible(timeout=300_000)
    page.wait_for_timeout(5000)
    views.take("cockpit-running", cockpit)
    run_cell(page, "finished")
    views.take("cockpit-finished", cockpit)
    if views.wants("cockpit-stacked"):
        page.evaluate("window.jupyterapp.shell.expandLeft()")
        views.take("cockpit-stacked", cockpit)
        views.take("cockpit-stacked-figures", ".mm-cockpit-right")
        page.evaluate("window.jupyterapp.shell.collapseLeft()")


def _planned_cockpits(views: Views) -> None:
    """Cockpits that are not launched: AUTO, groups of ranks, many ranks, a mistake, a bad record, units unfolded."""
    page = views.page
    for name in COCKPITS:
        if not views.wants_any_of(name):
            continue
        run_cell(page, name)
        cockpit = page.locator(".mm-cockpit").last
        expect(cockpit.locator(".mm-cockpit-figures", has_text="peak, longest texts")).to_be_visible(
            timeout=PATIENCE_MS
        )
        expect(cockpit.locator(".mm-cockpit-top")).to_contain_text("parameters train", timeout=PATIENCE_MS)
        if name == "mistake":
            _write(cockpit, "steps", "0")
            expect(cockpit.locator(".mm-choices .mm-error")).to_be_visible()
        if name == "data":
            _write(cockpit, "your data", "pictures")
            expect(cockpit.locator(".mm-choices")).to_contain_text("are skipped")
        views.take(name, ".mm-cockpit")
        if name == "hybrid":
            cockpit.locator(".mm-cockpit-right > .widget-html details > summary").last.click()
            views.take("hybrid-units", ".mm-cockpit details[open]")
        if name == "many":
            _press(cockpit, "All choices")
            views.take("many-choices", ".mm-cockpit")


def _runs(views: Views) -> None:
    """A run's strip alone; runs in trouble; recordings; a run of many ranks."""
    signs = {"panel": "COMPLETED", "nan": "What to do", "killed": "died without a traceback"}
    signs |= {"ranks": "16 ranks"} | {f"replay-{name}": "replay" for name in RECORDINGS}
    for cell, sign in signs.items():
        if views.wants(cell):
            run_cell(views.page, cell)
            expect(views.page.locator(".mm-run").last).to_contain_text(sign)
            views.page.wait_for_timeout(2000)
            views.take(cell, ".mm-run")
            if cell == "ranks":
                run_cell(views.page, "end")


def _others(views: Views) -> None:
    """A plan alone, a sweep, a comparison, captions, a quiz, the form."""
    page = views.page
    if views.wants("compared", "sweep"):
        run_cell(page, "sweep")
        views.take("sweep", ".jp-CodeCell:has-text('rates = sweep')")
    for cell, code in CALLS.items():
        if views.wants(cell):
            run_cell(page, cell)
            page.wait_for_timeout(5000)
            if cell == "quiz":
                page.locator(".widget-radio-box label").nth(1).click()
            views.take(cell, f".jp-CodeCell:has-text('{code}')")


def _pages(views: Views, folder: Path) -> None:
    """The report of a run, and a page of runs compared."""
    run = folder / "runs/tiny"
    if views.wants("report"):
        views.take_file("report", write_report(run))
    others = sorted((folder / "runs/rates").glob("0*"))
    if views.wants("comparison") and others:
        views.take_file("comparison", write_comparison([run, *others], folder / "comparison.html"))


def _slides(views: Views, folder: Path) -> None:
    """Each slide of the workshop's deck, which has one theme."""
    if not views.wants("slides"):
        return
    command = [sys.executable, "slides/build.py", "--no-pdf", "--to", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    for size, viewport in SIZES.items():
        views.page.set_viewport_size(viewport)
        views.page.goto((folder / "index.html").as_uri())
        views.page.wait_for_function("window.Reveal && Reveal.isReady()")
        for number in range(views.page.evaluate("Reveal.getTotalSlides()")):
            views.page.evaluate("number => Reveal.slide(number)", number)
            views.keep(f"slides-{number + 1:02}-{size}")


def _press(page: Page | Locator, name: str) -> None:
    """Press a button of the cockpit, or of the page's first, by its whole text; an icon may stand before it."""
    cockpit = page.locator(".mm-cockpit") if isinstance(page, Page) else page
    cockpit.get_by_role("button", name=re.compile(rf"^\W*{name}$")).first.click()


def _write(cockpit: Locator, label: str, words: str) -> None:
    """Write into one of the cockpit's inputs."""
    box = cockpit.locator(".mm-choices").get_by_label(label, exact=True).last
    box.fill(words)
    box.press("Tab")


if __name__ == "__main__":
    main()
