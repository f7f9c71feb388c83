"""`make demo`, for real: pretrained backbones, two ranks, captions of pictures never seen, figures that hold."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parent.parent
COMMAND = ["run", "--config", "tiny", "--launch.name", "demo", "--launch.replace"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = [str(Path(sys.executable).parent / "mmfsdp"), *COMMAND]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder, done.stdout


def test_make_demo_is_this_command():
    printed = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "mmfsdp " + " ".join(COMMAND) in printed


def test_the_demo_learns_to_caption_new_pictures_by_looking_at_them(demo):
    folder, _ = demo
    result = json.loads((folder / "runs/demo/result.json").read_text())
    print({key: value for key, value in result.items() if key != "captions"})
    assert result["heldout_exact_match"] >= 0.90
    assert result["heldout_exact_match"] - result["text_only_exact_match"] >= 0.5
    assert 0 <= result["unseen_combination_exact_match"] <= 1
    assert result["wire_bytes_predicted"] == result["wire_bytes_measured"] > 0
    assert result["frozen_parameters_changed"] == 0
    assert result["world_size"] == 2
    assert all(len(row["truth"].split()) >= 4 for row in result["captions"]), "count, size, color and shape at least"


def test_the_demo_shows_plan_progress_captions_and_report(demo):
    folder, said = demo
    assert "frozen" in said and "trainable" in said and "a rank sends in an optimizer step" in said
    assert "step 1/" in said and "truth:" in said and said.count("truth:") == 5
    report = (folder / "runs/demo/report.html").read_text()
    assert "<svg" in report and "data:image/png;base64" in report
    for named in ("http://www.w3.org", "https://github.com/leeoniya/uPlot"):  # a name space and a licence, not fetched
        report = report.replace(named, "")
    assert "http://" not in report and "https://" not in report
    rows = [json.loads(line) for line in (folder / "runs/demo/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    keys = "loss lr grad_norm samples_per_s tokens_per_s data_s memory_bytes wire_bytes"
    assert set(keys.split()) <= set(rows[0])
    assert rows[-1]["loss"] < rows[0]["loss"] / 4
