"""mmfsdp: see, predict, run and measure FSDP training of mostly frozen multimodal models.

Names are resolved when first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PARAMS = (
    "RunParams ModelParams BackboneParams DataParams TrainParams FSDPParams LaunchParams Backend ShardingStrategy "
    "StateDictType BackwardPrefetch AutoWrapPolicy FrozenPolicy Precision ParamError"
).split()

_HOME = {name: "params" for name in _PARAMS} | {
    "build_model": "kit.models.build",
    "freeze": "core.freeze",
    "make_plan": "planning",
    "estimate": "predict",
    "wrap_fsdp": "planning",
    "fsdp": "kit.compat.zeta",
    "load_pretrained": "kit.compat.export",
    "describe": "kit.compat.describe",
    "train_step": "core.step",
    "train_mode": "core.freeze",
    "loss_in_head": "kit.models.loss_in_head",
    "loss_positions": "core.step_batch",
    "Flamingo": "kit.models",
    "MultimodalModel": "kit.models",
    "ModalEncoder": "kit.models",
    "launch": "kit.run.launch",
    "replay": "kit.run.replay.replay",
    "Run": "kit.run.handle",
    "sweep": "kit.run.sweep",
    "verify": "kit.verify.own_loop",
    "check": "kit.check.check",
    "Sweep": "kit.run.sweep",
    "name_hang": "kit.hangs.own_loop",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"mmfsdp has no {name!r}; it has {', '.join(sorted(_HOME))}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
