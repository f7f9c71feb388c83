"""Export a trained model of transformers: whole, with its adapters merged, or as an adapter of the model before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.chat import ChatProcessor
from ..models.backbones import lora_config
from ..models.build import resolve_generated
from ..models.weight_files import make_readable
from ..params import ParamError, RunParams
from ..run.folder import read_json

CARD = """---
library_name: {library}
pipeline_tag: image-text-to-text
base_model: {base}
---

# {name}

{architecture}, trained by mmfsdp for {steps} steps, with model.freeze `{patterns}` (`!` trains).{score}

```python
{code}
```
"""
LOAD_WHOLE = """from transformers import AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained({folder!r})
processor = AutoProcessor.from_pretrained({folder!r})"""
LOAD_ADAPTER = """from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained({base!r})
model = PeftModel.from_pretrained(model, {folder!r})
processor = AutoProcessor.from_pretrained({folder!r})"""


def save_adapter(model: PreTrainedModel, params: RunParams, to: Path) -> None:
    """Write what was trained as an adapter of peft: LoRA, and whole modules such as the projector.

    Raises ParamError without LoRA.
    """
    rank = params.model.lora_rank
    if rank is None:
        raise ParamError("layout", "adapter needs model.lora_rank, and the run had none; use from_pretrained")
    targets = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    config = lora_config(rank, targets)
    config.modules_to_save, config.base_model_name_or_path = trained_modules(model), base_of(params)
    config.save_pretrained(to)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name or parameter.requires_grad:  # LLaVA-NeXT's image_newline is in no module that trains whole
            tensors[f"base_model.model.{name}".replace(".default.", ".")] = parameter.detach().contiguous()
    save_file(tensors, to / "adapter_model.safetensors", metadata={"format": "pt"})


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


def write_card(model: PreTrainedModel, processor: ChatProcessor, params: RunParams, run: Path, to: Path) -> None:
    """Write the processor and README.md, which says what the folder holds and how to load it."""
    processor.processor.save_pretrained(to)
    result: dict[str, Any] = read_json(run / "result.json") or {}
    score = result.get("heldout_exact_match")
    is_adapter = (to / "adapter_config.json").is_file()
    load = LOAD_ADAPTER if is_adapter else LOAD_WHOLE
    card = CARD.format(
        library="peft" if is_adapter else "transformers",
        base=base_of(params),
        name=params.launch.name,
        architecture=type(model).__name__,
        steps=result.get("caption_step", params.train.steps),
        patterns=" ".join(params.model.freeze),
        score="" if score is None else f" Exact match on held-out pictures: {score:.2f}.",
        code=load.format(base=base_of(params), folder=to.name),
    )
    (to / "README.md").write_text(card, encoding="utf-8")
    make_readable(to)


def base_of(params: RunParams) -> str:
    """Return the name of the model that the run began with."""
    model = resolve_generated(params.model, "model", meta=True)
    return model.name or model.weights or model.config["model_type"]
