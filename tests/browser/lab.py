"""The lab of the benchmarks, and what tests want of it besides: themes and screenshots."""

from pathlib import Path

from playwright.sync_api import Page

from tests.bench.lab import chromium, jupyterlab, open_notebook, run_cell

ROOT = Path(__file__).resolve().parent.parent.parent
SHOTS = ROOT / "artifacts" / "browser"
"""Screenshots, to be looked at."""
__all__ = ["ROOT", "SHOTS", "chromium", "jupyterlab", "open_notebook", "run_cell", "set_theme", "shot"]


def set_theme(page: Page, theme: str) -> None:
    """Change the colors of everything."""
    page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", theme)
    page.wait_for_function(
        "dark => (document.body.dataset.jpThemeLight === 'false') === dark", arg=theme.endswith("Dark")
    )


def shot(page: Page, name: str) -> Path:
    """Keep a screenshot."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png")
    return SHOTS / f"{name}.png"
