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
    "build_model": "models.build",
    "freeze": "core.freeze",
    "make_plan": "planning",
    "estimate": "predict",
    "wrap_fsdp": "planning",
    "fsdp": "compat.zeta",
    "load_pretrained": "compat.export",
    "describe": "compat.describe",
    "train_step": "core.step",
    "train_mode": "core.freeze",
    "loss_in_head": "models.loss_in_head",
    "loss_positions": "core.token_loss",
    "Flamingo": "models",
    "MultimodalModel": "models",
    "ModalEncoder": "models",
    "launch": "run.launch",
    "replay": "run.replay",
    "Run": "run.handle",
    "sweep": "run.sweep",
    "verify": "checks.own_loop",
    "check": "site_check.check",
    "Sweep": "run.sweep",
    "name_hang": "hangs.name_own",
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
