"""The script of the page on nanoVLM trains a stand-in with its modules, and two ranks do what one process does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pages
from tests.ranks import printed_by_ranks

pytestmark = pytest.mark.real

STAND_IN = Path(__file__).parents[1] / "files" / "nanovlm"


SCRIPT = pages.PAGES / "nanovlm.py"


def losses(printed: str) -> list[float]:
    """Return the losses that the script prints."""
    return [float(loss) for loss in re.findall(r"^step \d+ loss ([\d.]+)$", printed, flags=re.M)]


def printed_by_torchrun(folder: Path, ranks: int) -> str:
    """Run the script as its page says, and return what it prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", SCRIPT]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(STAND_IN)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Warning: plan" not in done.stderr and "count_label_tokens" not in done.stderr
    return done.stdout


def test_two_ranks_print_the_losses_of_one_process(tmp_path):
    of_two = losses(printed_by_torchrun(tmp_path, 2))
    (printed,) = printed_by_ranks(SCRIPT, tmp_path, ranks=1, path=str(STAND_IN))
    of_one = losses(printed)
    assert len(of_one) == 5 and of_one[-1] < of_one[0]
    assert of_two == pytest.approx(of_one, abs=2e-5)
