"""The script of the page on nanoVLM trains a stand-in with its modules, and two ranks do what one process does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pages

pytestmark = pytest.mark.real

STAND_IN = Path(__file__).parents[1] / "files" / "nanovlm"


def losses(folder: Path, ranks: int) -> list[str]:
    """Run the script on so many ranks, and return the losses that it prints."""
    script = pages.PAGES / "nanovlm.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", script]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(STAND_IN)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Warning: plan" not in done.stderr and "count_label_tokens" not in done.stderr
    return re.findall(r"^step \d+ loss ([\d.]+)$", done.stdout, flags=re.M)


def test_two_ranks_print_the_losses_of_one_process(tmp_path):
    of_one, of_two = (list(map(float, losses(tmp_path, ranks))) for ranks in (1, 2))
    assert len(of_one) == 5 and of_one[-1] < of_one[0]
    assert of_two == pytest.approx(of_one, abs=2e-5)
