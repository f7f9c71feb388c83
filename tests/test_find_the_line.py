"""A policy, a format and an optimizer, added to a copy of the package in only the files that CONTRIBUTING names."""

import re
import shutil
from pathlib import Path

import pytest

import mmfsdp
from tests.processes import in_fresh_python

PACKAGE = Path(mmfsdp.__file__).parent
CONTRIBUTING = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
POLICY, FORMAT, OPTIMIZER = "Add a frozen policy", "Add a format of quantized matrices", "Add an optimizer"
MOST_FILES = {POLICY: 4, FORMAT: 2, OPTIMIZER: 3}
"""Section of CONTRIBUTING -> files of the package that may have to be changed."""
CHANGES = {
    POLICY: {
        "params/enums.py": (
            '    AUTO = "AUTO", "Chosen',
            '    HOLD = "HOLD", "As KEEP, by another name."\n    AUTO = "AUTO", "Chosen',
        ),
        "core/units.py": (
            "keep = unit.frozen_policy is FrozenPolicy.KEEP",
            "keep = unit.frozen_policy in (FrozenPolicy.KEEP, FrozenPolicy.HOLD)",
        ),
        "params/fsdp.py": (
            "(Backend.DDP,), (FrozenPolicy.KEEP,)),",
            "(Backend.DDP,), (FrozenPolicy.KEEP, FrozenPolicy.HOLD)),",
        ),
    },
    FORMAT: {
        "params/enums.py": (
            "    NF4 = (",
            '    COARSE = ("coarse", "16 levels, in 8 bits.", "mmfsdp.quantized.coarse:FORMAT")\n    NF4 = (',
        ),
        "quantized/coarse.py": (
            "",
            "from ..core.quantize import Format, relative\n\n\n"
            "class Coarse(Format):\n"
            "    def quantize(self, matrix):\n"
            "        scales = matrix.abs().amax(dim=1, keepdim=True)\n"
            "        return (relative(matrix, scales) * 8).round().char(), scales\n\n"
            "    def dequantize(self, codes, scales, columns, dtype):\n"
            "        return (codes * scales / 8).to(dtype)\n\n\n"
            "FORMAT = Coarse()\n",
        ),
    },
    OPTIMIZER: {
        "params/optimizers.py": (
            "    MUON = (",
            '    SGD = ("sgd", "Without a state.", "mmfsdp.kit.train.optimizer:sgd", 0.0, 0)\n    MUON = (',
        ),
        "kit/train/optimizer.py": (
            "class LocalAdamW(",
            "def sgd(groups, *, lr):\n    return torch.optim.SGD(groups, lr=lr)\n\n\nclass LocalAdamW(",
        ),
    },
}
"""Section of CONTRIBUTING -> file -> text that is there, and the text in its place."""
USE = """
import sys
from copy import deepcopy

sys.path.insert(0, sys.argv[1])
import torch
from torch import nn

import mmfsdp
from mmfsdp import FSDPParams, RunParams, estimate, make_plan
from mmfsdp.core.quantize import quantize_model
from mmfsdp.kit.cli.flags import params_of, read_words
from mmfsdp.kit.cli.parser import build_parser
from mmfsdp.kit.train.optimizer import build_optimizer
from mmfsdp.kit.widgets.pictures.rank_picture import rank_picture
from mmfsdp.params import TrainParams
from mmfsdp.predict import auto

assert mmfsdp.__file__.startswith(sys.argv[1])
words = ["--fsdp.frozen-policy", "HOLD", "--fsdp.frozen-dtype", "coarse", "--train.optimizer", "sgd"]
values = read_words(build_parser(), ["plan", "--config", "tiny", *words])
assert RunParams.from_dict(params_of(values).to_dict()).train.optimizer == "sgd"

model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
model[:4].requires_grad_(False)
model[0].requires_grad_(True)
example = {"input": torch.randn(4, 64)}


def cost_of(optimizer="adamw", **fsdp):
    fsdp |= {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000}
    train = TrainParams(optimizer=optimizer)
    plan = make_plan(model, FSDPParams(**fsdp), world_size=4, example=example, train=train)
    return plan, estimate(plan, train)


sharded, kept, held = (cost_of(frozen_policy=policy)[1] for policy in ("SHARD", "KEEP", "HOLD"))
assert held.wire_bytes == kept.wire_bytes < sharded.wire_bytes
assert held.peak_bytes == kept.peak_bytes
try:
    FSDPParams(backend="DDP", frozen_policy="HOLD")
except ValueError as error:
    assert "frozen_policy" in str(error)
else:
    raise AssertionError("DDP cannot hold what it does not gather")

tried = []


class Noted(auto.PolicySearch):
    def __init__(self, plans, *others):
        tried.extend(plans)
        super().__init__(plans, *others)


auto.PolicySearch = Noted
chosen, _ = cost_of(frozen_policy="AUTO", memory_budget_gib=1)
assert tried == ["SHARD", "KEEP", "REPLICATE", "HOLD"], tried
assert "H hold" in rank_picture(chosen)

assert cost_of(frozen_dtype="coarse")[0].bytes_at_rest == cost_of(frozen_dtype="int8")[0].bytes_at_rest
coarse = deepcopy(model)
quantize_model(coarse, FSDPParams(frozen_dtype="coarse"))
print("off by", float((coarse[1].weight - model[1].weight).abs().max() / model[1].weight.abs().max()))

assert cost_of("sgd")[1].memory_bytes < cost_of()[1].memory_bytes
optimizer, _ = build_optimizer(model, TrainParams(optimizer="sgd"))
before = model[5].weight.clone()
model(**example).sum().backward()
optimizer.step()
assert not optimizer.state and not torch.equal(before, model[5].weight)
"""


def changed_copy(folder: Path) -> Path:
    """Copy the package into a folder, and make all changes."""
    shutil.copytree(PACKAGE, folder / "mmfsdp", ignore=shutil.ignore_patterns("__pycache__"))
    for changes in CHANGES.values():
        for name, (there, new) in changes.items():
            file = folder / "mmfsdp" / name
            text = file.read_text() if there else ""
            assert not there or text.count(there) == 1, f"{name} has another text than {there!r}"
            file.write_text(text.replace(there, new) if there else new)
    return folder


@pytest.mark.parametrize("section", CHANGES)
def test_the_files_are_those_that_contributing_names(section):
    table = CONTRIBUTING.partition(f"### {section}\n")[2].partition("\n### ")[0]
    named = set(re.findall(r"^\|.*\]\(mmfsdp/([^)]+)\)", table, flags=re.M))
    changed = {name for name, (there, _) in CHANGES[section].items() if there}
    examples = named - changed  # of new files
    assert changed <= named and len(examples) == len(CHANGES[section]) - len(changed)
    assert len(named) <= MOST_FILES[section]


def test_what_was_added_there_is_planned_predicted_chosen_and_trained(tmp_path):
    said = in_fresh_python(USE, str(changed_copy(tmp_path)))
    assert 0 < float(said.split()[-1]) < 0.1
