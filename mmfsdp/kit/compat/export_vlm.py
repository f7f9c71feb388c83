"""Layouts of an export of a vision-language model of transformers: whole as transformers loads it, or an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

from ...params import ParamError, RunParams
from ..models.backbones import lora_config, merge_lora
from ..models.generated import resolve_generated
from ..models.values_on_host import unwrap
from ..models.weight_files import make_readable
from ..run.files.folder import read_json
from .layout import Exported, Layout

CARD = """---
library_name: {library}
pipeline_tag: image-text-to-text
base_model: {base}
---

# {name}

{architecture}, trained by mmfsdp for {steps} steps, with model.freeze `{patterns}` (`!` trains).{score}
"""


def save_adapter(model: PreTrainedModel, params: RunParams, to: Path) -> None:
    """Write what was trained as an adapter of peft: LoRA, and whole modules such as the projector."""
    rank = params.model.lora_rank
    assert rank is not None, "no LoRA"
    targets = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    config = lora_config(rank, targets)
    config.modules_to_save, config.base_model_name_or_path = trained_modules(model), base_of(params)
    config.save_pretrained(to)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name or parameter.requires_grad:  # LLaVA-NeXT's image_newline is in no module that trains whole
            tensors[f"base_model.model.{name}".replace(".default.", ".")] = parameter.detach().contiguous()
    save_file(tensors, to / "adapter_model.safetensors", metadata={"format": "pt"})


def write_card(model: PreTrainedModel, params: RunParams, run: Path, to: Path) -> None:
    """Write README.md, the model card: what the folder holds, from which model, and how good it is."""
    result: dict[str, Any] = read_json(run / "result.json") or {}
    score = ""
    if result.get("heldout_exact_match") is not None:
        score = f" Exact match on held-out pictures: {result['heldout_exact_match']:.2f}."
    card = CARD.format(
        library="peft" if (to / "adapter_config.json").is_file() else "transformers",
        base=base_of(params),
        name=params.launch.name,
        architecture=type(model).__name__,
        steps=result.get("caption_step", params.train.steps),
        patterns=" ".join(params.model.frozen_patterns),
        score=score,
    )
    (to / "README.md").write_text(card, encoding="utf-8")


def base_of(params: RunParams) -> str:
    """Return the name of the model that the run began with."""
    model = resolve_generated(params.model, "model", meta=True)
    return model.name or model.weights or model.config["model_type"]


def trained_modules(module: nn.Module, prefix: str = "") -> list[str]:
    """Return the names of the outermost modules, but adapters, all of whose parameters train."""
    names: list[str] = []
    for key, child in module.named_children():
        trains = [parameter.requires_grad for parameter in child.parameters()]
        if key.startswith("lora_") or not any(trains):
            continue
        if all(trains) and not isinstance(child, nn.ModuleList):  # which peft refuses
            names.append(prefix + key)
        else:
            names += trained_modules(child, f"{prefix}{key}.")
    return names


def _write_whole(exported: Exported, to: Path) -> None:
    merge_lora(exported.model)
    exported.model.save_pretrained(to)
    _write_beside(exported, to)


def _write_adapter(exported: Exported, to: Path) -> None:
    save_adapter(exported.model, exported.params, to)
    _write_beside(exported, to)


def _write_beside(exported: Exported, to: Path) -> None:
    """Write the processor and the model card, and let others read all."""
    processor: Any = exported.processor
    processor.processor.save_pretrained(to)
    write_card(exported.model, exported.params, exported.run, to)
    make_readable(to)


def _load_whole(params: RunParams, folder: Path) -> nn.Module:
    model = AutoModelForImageTextToText.from_pretrained(folder)
    model.register_forward_pre_hook(unwrap, with_kwargs=True)  # its batches hold values for the host
    return model


def _check_adapter(params: RunParams) -> None:
    if params.model.lora_rank is None:
        raise ParamError("layout", "adapter needs model.lora_rank, and the run had none; use from_pretrained")


WHOLE = Layout(_write_whole, _load_whole)
"""The layout that plain transformers loads."""
ADAPTER = Layout(_write_adapter, check=_check_adapter)
"""LoRA and projector, as peft loads them."""
