"""Lesson 02's proof that its mini-FSDP is right: the same losses as torch's `fully_shard`, on two ranks."""

import json
import re

import pytest
from books import FOLDER, read

from mmfsdp.widgets.ranks_magic import run_on_ranks

pytestmark = pytest.mark.real


def cell(magic: str) -> str:
    """Return the code below the lesson's cell that begins with this magic."""
    book = read(FOLDER / "02_fsdp_from_scratch.ipynb")
    return next(cell.source.partition("\n")[2] for cell in book.cells if cell.source.startswith(magic))


def losses_of(folder, module: str) -> dict[str, list[list[float]]]:
    """Run the lesson's comparison with this mini_fsdp.py. Return rank 0's losses, one list for each `reshard`."""
    (folder / "mini_fsdp.py").write_text(module)
    code = f"import sys\n\nsys.path.insert(0, {str(folder)!r})\n{cell('%%ranks 2 mini')}"
    code += "\nimport os\n\nprint('visible GPUs:', repr(os.environ.get('CUDA_VISIBLE_DEVICES')))"
    text = run_on_ranks(code, 2, "mini")[0]
    assert "bytes" in text, text
    assert "visible GPUs: ''" in text, "fully_shard would move the layers to a GPU, and gloo's ranks are on the CPU"
    losses = {}
    for name in ("mine", "torch"):
        losses[name] = [json.loads(found) for found in re.findall(rf"{name}: +(\[.*?\])", text)]
    return losses


def test_the_proof_holds_for_a_mean_and_fails_for_a_sum(tmp_path):
    module = cell("%%writefile mini_fsdp.py")
    losses = losses_of(tmp_path, module)
    assert len(losses["mine"]) == 2 and losses["mine"] == losses["torch"]
    assert losses["mine"][0][0] > losses["mine"][0][-1]
    mean = "return part / dist.get_world_size()"
    assert mean in module
    wrong = losses_of(tmp_path, module.replace(mean, "return part"))
    assert wrong["torch"] == losses["torch"]
    for mine, torchs in zip(wrong["mine"], wrong["torch"], strict=True):
        assert abs(mine[-1] - torchs[-1]) > 1e-3
