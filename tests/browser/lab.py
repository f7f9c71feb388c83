"""A real JupyterLab on the loopback interface, driven through Debian's Chromium by Playwright; themes, screenshots."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parent.parent.parent
SHOTS = ROOT / "artifacts" / "browser"
"""Screenshots, to be looked at."""
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
TALL = 3600
"""Pixels of a window in which everything of a view is in sight."""
AXE = ROOT / "tests" / "files" / "axe" / "axe.min.js"
"""axe-core 4.14.1, which checks a page's accessibility; from npm, with its licence, for tests only."""
SLOW_START = "[anywidget] Failed to initialize model"
"""anywidget says so after 2 s, on a machine that does much else; its widget is there later."""
LOST_NODE = "Failed to execute 'removeChild' on 'Node': The node to be removed is not a child of this node"
"""JupyterLab raises it at times where cells move while they are scrolled. Left out only where no script of ours, which
anywidget loads as a blob, stands in the stack."""
PATIENCE_MS = 240_000
"""Milliseconds that a page may take for anything: kernels import torch and plan, on a machine that does much else."""
expect.set_options(timeout=PATIENCE_MS)
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "apputils-extension/themes": {"theme": "JupyterLab Light"},
}


@contextlib.contextmanager
def chromium(**context):
    """A browser page; keyword arguments go to the browser context. Every request that leaves this machine fails.
    page.problems: what went wrong in it."""
    with sync_playwright() as playwright:
        binary = shutil.which("chromium") or "/usr/bin/chromium"
        browser = playwright.chromium.launch(executable_path=binary, headless=True, args=QUIET)
        try:
            page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **context})
            page.set_default_timeout(PATIENCE_MS)
            page.problems = []

            def note(text: str) -> None:
                if SLOW_START not in text:
                    page.problems.append(text)

            def note_error(error) -> None:
                stack = error.stack or ""
                if not (LOST_NODE in error.message and "/static/lab/" in stack and "blob:" not in stack):
                    note(f"{error.message}\n{stack}")

            page.on("pageerror", note_error)
            page.on("console", lambda m: note(m.text) if m.type == "error" else None)
            page.route(lambda url: not url.startswith(("http://127.0.0.1:", "file:", "data:")), lambda r: r.abort())
            yield page
        finally:
            browser.close()


@contextlib.contextmanager
def jupyterlab(folder: Path, home: Path, *, python: str = sys.executable):
    """JupyterLab serving a folder, with settings of its own under `home`: its base address and token."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    kinds = "CONFIG_DIR DATA_DIR RUNTIME_DIR".split()
    own = {f"JUPYTER_{kind}": str(home / kind.lower()) for kind in kinds} | {"IPYTHONDIR": str(home / "ipython")}
    own |= {f"JUPYTERLAB_{kind}_DIR": str(home / kind.lower()) for kind in ("SETTINGS", "WORKSPACES")}
    for name, values in SETTINGS.items():
        path = home / f"settings/@jupyterlab/{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    flags = f"--no-browser --allow-root --ip=127.0.0.1 --port={port} --expose-app-in-browser".split()
    flags += [f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}"]
    with open(home / "lab.log", "w") as log:
        command = [python, "-m", "jupyterlab", *flags, "--LabApp.extension_manager=readonly"]
        server = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log, start_new_session=True)
    base = f"http://127.0.0.1:{port}"
    try:
        _until_up(f"{base}/api?token={token}", home / "lab.log")
        yield base, token
    finally:
        server.send_signal(signal.SIGTERM)  # it stops its kernels
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


def _until_up(address: str, log: Path) -> None:
    for _ in range(PATIENCE_MS // 100):
        try:
            urllib.request.urlopen(address, timeout=1)
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(log.read_text())


def open_notebook(page: Page, base: str, token: str, path: str) -> None:
    """Open a notebook and wait until its kernel is idle."""
    page.goto(f"{base}/lab/tree/{path}?token={token}&reset", timeout=PATIENCE_MS)
    page.wait_for_function(
        """() => { const p = window.jupyterapp?.shell.currentWidget;
                   return !document.querySelector('#jupyterlab-splash') && document.querySelector('.jp-Notebook')
                          && p?.sessionContext?.session?.kernel?.status === 'idle' }""",
        timeout=PATIENCE_MS,
    )


def write_notebook(path: Path, cells: dict[str, str]) -> None:
    """Write a notebook of code cells, by their ids."""
    code = [nbformat.v4.new_code_cell(text, id=name) for name, text in cells.items()]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=code, metadata=kernel), path)


def run_cell(page: Page, cell_id: str, *, wait: bool = True) -> None:
    """Run one cell, by its id in the file, and wait until it is done, or do not wait."""
    page.evaluate(
        """async ([id, wait]) => {
             const panel = window.jupyterapp.shell.currentWidget, notebook = panel.content;
             notebook.activeCellIndex = notebook.widgets.findIndex(c => c.model.id === id);
             notebook.deselectAll();
             const done = window.jupyterapp.commands.execute('notebook:run-cell');
             if (wait) await done }""",
        [cell_id, wait],
    )


def press(page: Page, name: str) -> None:
    """Press the last button of this name."""
    page.locator("button.jupyter-button", has_text=name).last.click()


def set_theme(page: Page, theme: str) -> None:
    """Change the colors of everything."""
    page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", theme)
    # A splash screen covers the page while a theme is loaded, and for a fifth of a second after the colors changed.
    page.wait_for_function(
        """dark => (document.body.dataset.jpThemeLight === 'false') === dark
                  && !document.getElementById('jupyterlab-splash')""",
        arg=theme.endswith("Dark"),
    )


def serious_findings(page: Page, selector: str = "html") -> list[str]:
    """Return what axe-core finds in a part of the page that keeps a person from using it: serious or critical."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    # JupyterLab's body is 0 pixels high and hides what overflows it: axe-core would take all text for invisible. Nor
    # does it see what is scrolled away under a toolbar.
    size = page.viewport_size
    page.set_viewport_size({**size, "height": TALL})
    page.evaluate("document.body.style.minHeight = '100vh'")
    two_frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    page.evaluate(two_frames)  # the page follows its window
    page.locator(selector).first.evaluate("e => e.scrollIntoView()")
    page.evaluate(two_frames)
    kinds = ["violations", "passes", "incomplete"]
    found = page.evaluate("([selector, resultTypes]) => axe.run(selector, {resultTypes})", [selector, kinds])
    page.evaluate("document.body.style.minHeight = ''")
    page.set_viewport_size(size)
    contrasts = [node for rule in found["passes"] if rule["id"] == "color-contrast" for node in rule["nodes"]]
    texts = [node for node in contrasts if not node["html"].startswith(("<input", "<select", "<button"))]
    unknown = [node for rule in found["incomplete"] if rule["id"] == "color-contrast" for node in rule["nodes"]]
    why = {check["message"] for node in unknown for check in node["any"]}
    assert len(texts) > 5, f"the contrast of {len(texts)} texts was looked at; of {len(unknown)} it is not known: {why}"
    lines = []
    for violation in found["violations"]:
        if violation["impact"] in ("serious", "critical"):
            lines.append(f"{violation['id']}: {[node['html'][:200] for node in violation['nodes'][:3]]}")
    return lines


def smallest_text(page: Page, selector: str) -> float:
    """Return the size in pixels of the smallest text that is visible in an element."""
    return page.locator(selector).first.evaluate(
        """root => {
             let smallest = Infinity;
             const texts = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
             while (texts.nextNode()) {
               const element = texts.currentNode.parentElement;
               if (/\\S/.test(texts.currentNode.data) && element.checkVisibility() && element.getClientRects().length)
                 smallest = Math.min(smallest, parseFloat(getComputedStyle(element).fontSize));
             }
             return smallest;
           }"""
    )


def shot(page: Page, name: str) -> Path:
    """Keep a screenshot."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png")
    return SHOTS / f"{name}.png"
