"""export: a run's weights as a folder that other libraries load, or as a checkpoint of OpenFlamingo."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core.quantize import dequantize, format_of, is_transposed, matrices, quantize
from ..data.chat import ChatProcessor
from ..data.processor import SampleProcessor
from ..models import Flamingo, MediaModel, MultimodalModel
from ..models.backbones import load_tokenizer, lora_config, merge_lora
from ..models.build import build_model
from ..models.generated import resolve_generated
from ..models.kinds import kind_of
from ..models.open_clip_towers import NO_TEXT, open_clip_config
from ..models.tokens import merge_vocabulary
from ..models.weight_files import make_readable
from ..params import BackboneParams, FSDPParams, ModelKind, ModelParams, ParamError, RunParams
from ..params.enums import LAYOUTS
from ..run.folder import check_links, read_json
from ..train.evaluate import load_run
from .openflamingo import save_open_flamingo

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
CARD = """---
library_name: {library}
pipeline_tag: image-text-to-text
base_model: {base}
---

# {name}

{architecture}, trained by mmfsdp for {steps} steps, with model.freeze `{patterns}` (`!` trains).{score}
"""


def export(run: Path, to: Path, *, layout: str = "from_pretrained", best: bool = False) -> Path:
    """Write the model of a run's newest checkpoint into the new folder `to`, from one process. Return the folder.

    best: of the checkpoint that `train.keep_best` kept.
    from_pretrained: see `save_pretrained`; of kind transformers as plain transformers loads it; of kind own
    model.safetensors, the model's state dict, and config.json, which names `model.build`. adapter: its LoRA and
    projector, as peft loads them. open_flamingo: checkpoint.pt as github.com/mlfoundations/open_flamingo loads it.
    Raises ParamError for another layout, for one that does not suit the model, and for a link out of the run folder.
    """
    if layout not in LAYOUTS:
        raise ParamError("layout", f"{layout!r} is not one of {', '.join(LAYOUTS)}")
    check_links(run)
    params, model, processor = load_run(run, quantized=False, best=best)
    writer = WRITERS.get((params.model.kind, layout))
    if writer is None:
        kinds = ", ".join(kind for kind, its_layout in WRITERS if its_layout == layout)
        words = f"{layout} is for model.kind {kinds}, not {params.model.kind}; use {LAYOUTS[0]}"
        raise ParamError("layout", words)
    if layout == "adapter" and params.model.lora_rank is None:
        raise ParamError("layout", "adapter needs model.lora_rank, and the run had none; use from_pretrained")
    round_beside_adapters(model, params.fsdp)
    to.mkdir(parents=True)
    writer(model, processor, params, to)
    if params.model.kind is ModelKind.TRANSFORMERS:
        write_card(model, params, run, to)
        make_readable(to)
    return to


def _write_ours(model: MediaModel, processor: SampleProcessor, params: RunParams, to: Path) -> None:
    save_pretrained(model, processor, params.model, to)


def _write_transformers(model: PreTrainedModel, processor: SampleProcessor, params: RunParams, to: Path) -> None:
    assert isinstance(processor, ChatProcessor)
    merge_lora(model)
    model.save_pretrained(to)
    processor.processor.save_pretrained(to)


def _write_adapter(model: PreTrainedModel, processor: SampleProcessor, params: RunParams, to: Path) -> None:
    assert isinstance(processor, ChatProcessor)
    save_adapter(model, params, to)
    processor.processor.save_pretrained(to)


def _write_open_flamingo(model: Flamingo, processor: SampleProcessor, params: RunParams, to: Path) -> None:
    params.to_yaml(to / "params.yaml")
    save_open_flamingo(model, to / "checkpoint.pt")


def _write_own(model: nn.Module, processor: SampleProcessor, params: RunParams, to: Path) -> None:
    merge_lora(model)
    # Copies: a file may not hold a tied tensor twice, and `load_state_dict` wants it under all its names.
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, to / WEIGHTS_FILE, metadata={"format": "pt"})
    config = {"kind": str(params.model.kind), "build": params.model.build}
    (to / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n")
    make_readable(to)


WRITERS: dict[tuple[ModelKind, str], Callable[[Any, SampleProcessor, RunParams, Path], None]] = {
    (ModelKind.FLAMINGO, "from_pretrained"): _write_ours,
    (ModelKind.FLAMINGO, "open_flamingo"): _write_open_flamingo,
    (ModelKind.MULTIMODAL, "from_pretrained"): _write_ours,
    (ModelKind.TRANSFORMERS, "from_pretrained"): _write_transformers,
    (ModelKind.TRANSFORMERS, "adapter"): _write_adapter,
    (ModelKind.OWN, "from_pretrained"): _write_own,
}
"""Kind of model and layout: what writes it into a new folder."""


@torch.no_grad()
def round_beside_adapters(model: nn.Module, fsdp: FSDPParams) -> None:
    """Round matrices that have LoRA adapters, in place, to what they were when the adapters were trained."""
    form = format_of(fsdp)
    if form is None:
        return
    for name, module, key in matrices(model, fsdp):
        if ".base_layer." in name:
            matrix = module.get_parameter(key)
            rows = matrix.T if is_transposed(module) else matrix
            rows.copy_(dequantize(*quantize(rows, form), rows.shape[1], rows.dtype, form))


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


def save_pretrained(model: MediaModel, processor: SampleProcessor, params: ModelParams, to: Path) -> None:
    """Write an unwrapped model into the folder `to`. The model is taken apart and cannot be used afterwards.

    language/          for transformers' AutoModelForCausalLM and AutoTokenizer; new tokens are its tables' last
                       rows, LoRA adapters are merged into their matrices
    vision/            for transformers' AutoModel, or as `local-dir:` for open_clip
    model.safetensors  the other weights: the perceiver and the cross-attention, or the projectors
    config.json        the model's parameters, for `load_pretrained`
    """
    to.mkdir(parents=True, exist_ok=True)
    own = {name: value.contiguous() for name, value in model.state_dict().items() if _is_own(name)}
    save_file(own, to / WEIGHTS_FILE)
    encoder = model.get_submodule(kind_of(params).vision_encoder)
    visual: Any = getattr(encoder, "visual", None)
    if hasattr(visual, "save_pretrained"):
        visual.save_pretrained(to / "vision")
    else:
        _save_open_clip(encoder, resolve_generated(params, "vision"), to / "vision")
    language: Any = model.language_model
    if isinstance(model, Flamingo):
        tokenizer = processor.tokenizer
        layers: Any = model.layers
        for i, layer in enumerate(layers):
            layers[i] = layer.decoder_layer  # without cross-attention
        merge_vocabulary(language, model.tokens)
    else:  # its placeholders have no rows, and are added at each load
        tokenizer = load_tokenizer(resolve_generated(params, "language"))
    merge_lora(language)
    language.save_pretrained(to / "language")
    tokenizer.save_pretrained(to / "language")
    exported = params.change(
        vision=params.vision.change(name="vision", weights="vision", config={}),
        language=params.language.change(name="language", weights="language", config={}),
        freeze=tuple(pattern for pattern in params.frozen_patterns if "lora_" not in pattern),
        lora_rank=None,
    )
    config = {"model": type(model).__name__, **RunParams(model=exported).to_dict()["model"]}
    (to / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n")
    make_readable(to)


def load_pretrained(folder: str | Path) -> tuple[MediaModel, SampleProcessor]:
    """Return the model in a folder that `save_pretrained` wrote, and its processor.

    Args:
        folder: The folder, as `mmfsdp export` writes it.

    Returns:
        The model on the CPU, in eval mode, and the processor of its samples.

    Raises:
        ParamError: If the folder holds no such model.
    """
    folder = Path(folder)
    config = json.loads((folder / CONFIG_FILE).read_text()) if (folder / CONFIG_FILE).is_file() else {}
    if config.pop("model", None) not in (Flamingo.__name__, MultimodalModel.__name__):
        raise ParamError(
            "folder", f"{str(folder)!r} holds no {CONFIG_FILE} of ours; give one that `mmfsdp export` wrote"
        )
    for backbone in (config["vision"], config["language"]):
        backbone["name"] = backbone["weights"] = str(folder / backbone["weights"])
    model, processor = build_model(RunParams.from_dict({"model": config}).model)
    assert processor is not None, "the language model's folder has a tokenizer"
    missing, unknown = model.load_state_dict(load_file(folder / WEIGHTS_FILE), strict=False)
    different = [name for name in missing if _is_own(name)] + unknown
    if different:
        message = f"{str(folder)!r}: {WEIGHTS_FILE} and {CONFIG_FILE} differ in {len(different)} tensors, such as "
        raise ParamError("folder", message + different[0])
    return model.eval(), processor


def _is_own(name: str) -> bool:
    """Return whether a weight belongs to no backbone."""
    return name.startswith(("perceiver.", "projectors.")) or ".cross_attention." in name


def _save_open_clip(encoder: Any, params: BackboneParams, folder: Path) -> None:
    """Save an encoder as open_clip does. The part that the model lacks, a text tower, is tiny and untrained."""
    import open_clip

    config = open_clip_config(params)
    vision = config["vision_cfg"]
    quick_gelu = any(type(module).__name__ == "QuickGELU" for module in encoder.visual.modules())
    config = {"embed_dim": config["embed_dim"], "vision_cfg": vision, "text_cfg": NO_TEXT, "quick_gelu": quick_gelu}
    clip = open_clip.CLIP(**config)
    clip.visual.load_state_dict(encoder.visual.state_dict(), strict=False)  # a head that is not used is not there
    folder.mkdir()
    preprocessing = {"mean": list(encoder.mean), "std": list(encoder.std)}
    text = json.dumps({"model_cfg": config, "preprocess_cfg": preprocessing}, indent=1)
    (folder / "open_clip_config.json").write_text(text + "\n")
    save_file(clip.state_dict(), folder / "open_clip_model.safetensors")
