"""The names and signatures that other people's code calls; what moves inside the package must not change them."""

import inspect
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import mmfsdp
from mmfsdp.params import load

ROOT = Path(__file__).resolve().parent.parent

NAMES = """RunParams ModelParams DataParams TrainParams FSDPParams LaunchParams Backend ShardingStrategy StateDictType
BackwardPrefetch AutoWrapPolicy FrozenPolicy Precision build_model freeze make_plan estimate wrap_fsdp fsdp train_step
Flamingo MultimodalModel launch Run sweep verify check""".split()

SIGNATURES = {
    "build_model": "(params, *, meta)",
    "freeze": "(model, patterns)",
    "make_plan": "(model, params, *, world_size, example, train",
    "estimate": "(plan, train, *, ",
    "wrap_fsdp": "(model, params, *, device, mesh, example)",
    "fsdp": "(model, auto_wrap, mp, shard_strat, TransformerBlock)",
    "train_step": "(model, micro_batches, optimizer, *, schedule, max_grad_norm",
    "launch": "(params",
    "sweep": "(params",
    "check": "(params, *, cluster",
    "verify": "(model, *, wrap, optimizer, step, batches, loss, without_picture)",
}


def shape(function) -> str:
    """Return the names of the parameters, with * before those that are keyword-only."""
    names = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append(parameter.name)
    return f"({', '.join(names)})"


def test_public_names_are_there():
    assert set(NAMES) <= set(mmfsdp.__all__)
    for name in mmfsdp.__all__:
        assert getattr(mmfsdp, name) is not None


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_stay(name):
    assert shape(getattr(mmfsdp, name)).startswith(SIGNATURES[name])


def test_methods_stay():
    assert shape(mmfsdp.Flamingo.wrap_fsdp) == "(self, wrapper_kwargs, device_id)"
    assert {"open", "wait", "cancel", "logs", "metrics", "resume", "state"} <= set(dir(mmfsdp.Run))
    assert {"to_yaml", "from_yaml", "change"} <= set(dir(mmfsdp.RunParams))
    assert load("tiny").change(**{"train.lr": 1e-3}).train.lr == 1e-3


@pytest.mark.real
def test_training_is_a_module_for_torchrun():
    ended = subprocess.run([sys.executable, "-m", "mmfsdp.kit.train"], capture_output=True, text=True)
    assert ended.returncode != 0 and "FOLDER" in ended.stdout + ended.stderr


def test_what_notebooks_import_is_there():
    pattern = re.compile(r"^\s*from (mmfsdp[\w.]*) import ([\w, ]+)", re.MULTILINE)
    imports = set()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            imports |= set(pattern.findall("".join(cell["source"])))
    assert imports
    for module, names in sorted(imports):
        for name in names.split(","):
            name = name.split(" as ")[0].strip()
            if not hasattr(import_module(module), name):
                import_module(f"{module}.{name}")
