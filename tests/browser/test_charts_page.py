"""Charts in a real JupyterLab: crosshair, zoom, log scale, files, a running cell; and a server without anywidget."""

import csv
import json
import re
import site
import subprocess
import sys
from pathlib import Path

import pytest
from lab import chromium, jupyterlab, open_notebook, run_cell, set_theme, shot, write_notebook
from playwright.sync_api import expect

from mmfsdp import RunParams
from mmfsdp.kit.run.files.folder import MetricsWriter

pytestmark = pytest.mark.real

STEPS = 5000
CELLS = {
    "charts": "from mmfsdp.kit.widgets.charts.charts import Charts\n"
    "charts = Charts('measured', total=5000, predicted={'memory_bytes': 60 << 20})\ncharts",
    "panel": "from mmfsdp.widgets import RunPanel\nRunPanel('measured')",
    "slow": "import mmfsdp.kit.widgets.charts.charts as module\n"
    "wait = 'if (!window.mmWaited) { window.mmWaited = true; await new Promise(done => setTimeout(done, 3000)); }'\n"
    "module._MODULE = wait + module._MODULE\nslow = module.Charts('measured')\nslow",
    "more": "import time\nfrom mmfsdp.kit.run.files.folder import MetricsWriter\n"
    "MetricsWriter('measured').write({'step': 5001, 'time': 1501.0, 'loss': 0.125})\ntime.sleep(4)\n"
    "print('asked while busy', charts.rows)",
    "renewed": "print('given anew', slow.renewals)",
}


def write_metrics(folder: Path) -> None:
    """Metrics with one spike, one value that is not finite, and a held-out loss now and then."""
    folder.mkdir()
    RunParams().to_yaml(folder / "params.yaml")
    writer = MetricsWriter(folder)
    for step in range(1, STEPS + 1):
        row = {"step": step, "time": 1000 + step / 10, "loss": 1 + 2 / step, "grad_norm": 1 + step % 7 / 10}
        row |= {"lr": 1e-3, "samples_per_s": 90.0, "mfu": 0.3, "memory_bytes": 50 << 20, "gpu_use": 0.9}
        if step == 2001:
            row["loss"] = 40.0
        if step == 3001:
            row["loss"] = float("nan")
        if step % 500 == 0:
            row["heldout_loss"] = 1.5
        writer.write(row)


def drawn(page):
    return page.evaluate("document.querySelector('.mm-live-charts').mmCharts.read()")


def wait_for(page, condition):
    """Wait until a condition holds on what is drawn, in JavaScript, named `it`."""
    page.wait_for_function(
        f"() => {{ const it = document.querySelector('.mm-live-charts').mmCharts.read(); {condition} }}"
    )


def test_crosshair_zoom_scales_files_and_rows_that_come_while_a_cell_runs(lab):
    base, token, folder = lab
    write_metrics(folder / "measured")
    write_notebook(folder / "charts.ipynb", CELLS)
    with chromium(viewport={"width": 1280, "height": 900}) as page:
        open_notebook(page, base, token, "charts.ipynb")
        run_cell(page, "charts")
        expect(page.locator(".mm-live-charts canvas")).to_have_count(6)
        charts = drawn(page)["charts"]
        assert list(charts) == ["loss", "gradient norm", "throughput", "memory of rank 0", "learning rate", "GPU use"]
        assert max(value or 0 for value in charts["loss"]["lines"]["training"]) == 40, "one step of thousands"
        assert "MFU: 30 % at first" in charts["throughput"]["text"] and charts["memory of rank 0"]["y"][1] > 60 << 20

        # The crosshair stands at the same step in all charts, and each says its value there.
        plot = page.locator(".mm-chart .u-over").first.bounding_box()
        page.mouse.move(plot["x"] + plot["width"] * 0.4, plot["y"] + 40)
        wait_for(page, "return it.charts['GPU use'].cursor")
        charts = drawn(page)["charts"]
        assert len({chart["cursor"]["x"] for chart in charts.values()}) == 1
        assert re.fullmatch(r"90 %step (19|20)\d\d", charts["GPU use"]["read"])
        shot(page, "charts-light")

        # A zoom asks for the points of this part: every step.
        page.mouse.down()
        page.mouse.move(plot["x"] + plot["width"] * 0.41, plot["y"] + 40, steps=3)
        page.mouse.move(plot["x"] + plot["width"] * 0.45, plot["y"] + 40, steps=3)
        page.mouse.up()
        wait_for(page, "return Object.values(it.tables)[0].bucket === 1")
        zoomed = drawn(page)
        ranges = {tuple(chart["xs"]) for chart in zoomed["charts"].values()}
        assert ranges == {tuple(zoomed["state"]["zoom"])}, "all charts show the same part"
        assert len(zoomed["charts"]["loss"]["x"]) < 500
        page.get_by_role("button", name="Whole run").click()
        wait_for(page, "return Object.values(it.tables)[0].bucket > 1")

        # A click makes a chart large, in front of the page, with all that it does; Escape puts it back.
        page.locator(".mm-chart .u-over").first.click()
        in_front = page.locator("dialog.mm-chart-large")
        expect(in_front.get_by_label(re.compile("^loss. training"))).to_be_focused()
        assert drawn(page)["charts"]["loss"]["isLarge"] and in_front.locator("canvas").bounding_box()["width"] > 1000
        shot(page, "charts-large")
        page.keyboard.press("Escape")
        expect(in_front).to_be_hidden()
        assert list(drawn(page)["charts"]) == list(charts) and page.locator(".mm-chart-grid .mm-chart").count() == 6
        again = page.locator(".mm-chart .u-over").first.bounding_box()
        assert (again["width"], again["height"]) == (plot["width"], plot["height"])

        page.get_by_label("log").check()
        assert [drawn(page)["charts"][name]["distr"] for name in ("loss", "throughput")] == [3, 1]
        page.get_by_title("Draw over the optimizer steps").get_by_role("combobox").select_option("time")
        wait_for(page, "return Math.round(it.charts.loss.xs[1]) === 500")
        page.get_by_title("Average over earlier points").get_by_role("slider").fill("0.9")
        assert drawn(page)["state"]["smooth"] == 0.9

        # By keyboard: the value is said.
        loss = page.get_by_label(re.compile("^loss. training: 3 at first"))
        loss.focus()
        page.keyboard.press("End")
        expect(page.locator(".mm-spoken")).to_contain_text("training 1")

        with page.expect_download() as download:
            page.get_by_role("button", name="CSV").click()
        rows = list(csv.DictReader(Path(download.value.path()).read_text().splitlines()))
        assert {row["loss"] for row in rows} >= {"40", "nan"} and rows[-1]["step"] == str(STEPS)
        with page.expect_download() as download:
            page.get_by_role("button", name="PNG").click()
        assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")

        run_cell(page, "more")  # rows come while the cell runs
        expect(page.locator(".jp-OutputArea-output", has_text="asked while busy")).to_contain_text("5001")
        wait_for(page, "return Object.values(it.tables)[0].rows === 5001")
        set_theme(page, "JupyterLab Dark")
        shot(page, "charts-dark")
        set_theme(page, "JupyterLab Light")

        # anywidget drops what it gets for a widget whose script took more than 2 s to load.
        run_cell(page, "slow")
        expect(page.locator(".mm-live-charts canvas")).to_have_count(12)
        run_cell(page, "renewed")
        expect(page.locator(".jp-OutputArea-output", has_text="given anew")).to_contain_text(re.compile("[1-5]"))
        assert page.problems == []


def server_environment(folder: Path) -> str:
    """Make an environment with JupyterLab and the widgets, but without anywidget's extension; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "all.pth").write_text("\n".join(site.getsitepackages()))
    share = Path(sys.prefix) / "share/jupyter"
    (folder / "share/jupyter/labextensions").mkdir(parents=True)
    for path in share.iterdir():
        if path.name not in ("labextensions", "kernels"):
            (folder / "share/jupyter" / path.name).symlink_to(path)
    for path in (share / "labextensions").iterdir():
        if path.name != "anywidget":
            (folder / "share/jupyter/labextensions" / path.name).symlink_to(path)
    return str(folder / "bin/python")


def test_a_server_without_anywidget_shows_pictures_and_says_what_to_install(tmp_path):
    root, home = tmp_path / "root", tmp_path / "home"
    root.mkdir()
    write_metrics(root / "measured")
    write_notebook(root / "charts.ipynb", CELLS)
    kernel = home / "data_dir/kernels/python3"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "Python 3", "language": "python"}))
    python = server_environment(tmp_path / "server")
    with jupyterlab(root, home, python=python) as (base, token), chromium() as page:
        open_notebook(page, base, token, "charts.ipynb")
        run_cell(page, "charts")
        expect(page.get_by_text("pip install anywidget")).to_be_visible()
        expect(page.locator(".mm-charts svg")).to_have_count(7)
        shot(page, "charts-without-anywidget")
        assert page.locator(".mm-live-charts").count() == 0
        run_cell(page, "panel")
        expect(page.get_by_text("pip install anywidget")).to_have_count(2)
        broken = page.get_by_text("Click to show javascript error")
        assert [text.is_visible() for text in broken.all()] == [False] * broken.count(), "a broken icon"
