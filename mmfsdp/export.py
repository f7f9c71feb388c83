"""A trained run's weights for others: one safetensors file of the whole model, or OpenFlamingo's layout."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_model, save_model
from torch import nn

from .build import build_model
from .evaluate import load_run
from .models import Flamingo
from .models.interop import save_open_flamingo
from .params import ParamError, RunParams

LAYOUTS = ("safetensors", "open_flamingo")


def export(run: Path, to: Path, *, layout: str = "safetensors") -> Path:
    """Write the model of a run's newest checkpoint into the new folder `to`, from one process. Returns the file.

    safetensors: model.safetensors with all weights, backbones included, beside the run's params.yaml, for
    `load_exported`. open_flamingo: checkpoint.pt as github.com/mlfoundations/open_flamingo loads it. Raises ParamError
    for another layout, or for a model that is no Flamingo in OpenFlamingo's.
    """
    if layout not in LAYOUTS:
        raise ParamError("layout", f"{layout!r} is not one of {', '.join(LAYOUTS)}")
    params, model, _ = load_run(run)
    if layout == "open_flamingo" and not isinstance(model, Flamingo):
        raise ParamError("layout", f"open_flamingo is for a Flamingo, not a {type(model).__name__}; use safetensors")
    to.mkdir(parents=True)
    params.to_yaml(to / "params.yaml")
    file = to / ("checkpoint.pt" if layout == "open_flamingo" else "model.safetensors")
    if isinstance(model, Flamingo) and layout == "open_flamingo":
        save_open_flamingo(model, file)
    else:
        save_model(model, str(file))
    return file


def load_exported(folder: Path) -> nn.Module:
    """The model in a folder that `export` wrote as safetensors, ready to caption."""
    model, _ = build_model(RunParams.from_yaml(folder / "params.yaml").model)
    load_model(model, folder / "model.safetensors")
    return model.eval()
