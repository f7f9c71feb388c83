"""Vision-language models of transformers as they are, by name or configuration: no wrapper, no parameter renamed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel, ProcessorMixin

from ...core.plan import UnitKind, WrapPlan
from ...params import BackboneParams, ModelParams, ParamError
from ...params.model import PARTS
from ..data.chat import ChatProcessor
from .backbones import add_lora, build_from_config, is_causal, load_config, load_from_transformers, load_model
from .fused_norms import fuse_norms
from .fused_swiglu import fuse_swiglu
from .loss_in_head import loss_in_head
from .values_on_host import GivenValues, unwrap
from .weight_files import TensorSource, tensor_sources

CONNECTORS = ("merger", "projector", "connector", "aligner")
"""Words in the names of the parts that some families keep inside their vision encoder (Qwen-VL: visual.merger)."""
USUAL_IMAGE_SIZE = 224
CALLED_PER_PICTURE = {"lfm2_vl": "multi_modal_projector", "hunyuan_vl": "patch_merger"}
"""Model type -> the part that transformers 5.23 calls once for each picture, and others once for all of a batch."""


def build_vlm(
    params: ModelParams, *, meta: bool, download: bool, read: bool
) -> tuple[PreTrainedModel, ChatProcessor | None, list[TensorSource] | None]:
    """Return the model of kind transformers, in fp32, its processor and, with `read`, the sources of its tensors."""
    config = vlm_config(params)
    source = params.weights or params.name or None
    if meta or source is None:
        field = "model.config" if params.config else "model.name"
        model = build_from_config(AutoModelForImageTextToText, config, field, meta=meta)
    else:
        model = load_model(AutoModelForImageTextToText, source, "model.weights", config=config)
    # Before the adapters: sources are found by the names that the model has without them.
    sources = tensor_sources(model, source, "model") if read else None
    if params.lora_rank:
        add_lora(part_of(model, "language"), params.lora_rank, targets=params.lora_targets, meta=meta)
    processor = _processor(params, config, download=download)
    if processor is not None:
        # Experts' load-balancing loss leaves out padding by the mask.
        counts_padding = getattr(config.get_text_config(), "output_router_logits", False)
        processor.mask_padding = counts_padding or not is_causal(model.get_decoder())
        processor.given_values = GivenValues(model)
    model.register_forward_pre_hook(unwrap, with_kwargs=True)
    if params.loss_in_head and not loss_in_head(model) and processor is not None:
        processor.gives_loss_positions = True
    if params.fused_norms:
        fuse_norms(model)
    if params.fused_swiglu:
        fuse_swiglu(model)
    return model, processor, sources


def vlm_config(params: ModelParams) -> Any:
    """Return transformers' configuration. Raises ParamError if it is of no model that takes pictures and text."""
    source = params.name or params.weights or ""
    config = load_config(BackboneParams(name=source, config=params.config), "model")
    if type(config) not in AutoModelForImageTextToText._model_mapping:
        field = "model.config" if params.config else "model.name"
        words = f"{config.model_type} takes no pictures; choose one that does, such as Qwen/Qwen2.5-VL-7B-Instruct, "
        raise ParamError(field, words + "or build one around it: kind multimodal, and language.name")
    return config


def _processor(params: ModelParams, config: Any, *, download: bool) -> ChatProcessor | None:
    """Return the processor in the folder of the model or of its weights; None without either.

    With a configuration and without `download`, it is None without a folder.
    """
    sources = [source for source in (params.name, params.weights) if source]
    if params.config and not download:
        sources = [source for source in sources if Path(source).is_dir()]
    if not sources:
        return None
    source = sources[0]
    processor = load_from_transformers(AutoProcessor, source, "model.name")
    if not isinstance(processor, ProcessorMixin) or not hasattr(processor, "image_processor"):
        words = f"{source!r} gives no processor of pictures and text, only a {type(processor).__name__}"
        raise ParamError("model.name", f"{words}; add its processor_config.json or preprocessor_config.json")
    if config.is_encoder_decoder:  # its labels are no continuation of its inputs, which hold the answer
        raise ParamError("model.name", f"{source!r} is an encoder-decoder; choose a model that continues its prompt")
    vision = getattr(config, "vision_config", None)
    size = getattr(vision, "image_size", None) or USUAL_IMAGE_SIZE
    side = max(size) if isinstance(size, (list, tuple)) else size
    chat = ChatProcessor(processor.tokenizer, side, processor=processor, source=source)
    chat.check()
    return chat


def check_calls(model: nn.Module, plan: WrapPlan) -> None:
    """Raise ParamError if the number of collectives that a rank calls would depend on the pictures in its batch."""
    assert isinstance(model, PreTrainedModel)
    part = CALLED_PER_PICTURE.get(model.config.model_type)
    if part is None:
        return
    trained_before = False
    for unit in sorted(plan.units, key=lambda unit: unit.forward_end):
        if unit.sharded and any(name.endswith(part) for name in unit.modules):
            per_picture = f"all-gathers {unit.name} for each picture, so ranks with different numbers would hang"
            if trained_before:  # FSDP2 also reshards, and reduces, after the backward of each call
                raise ParamError("fsdp.backend", f"FSDP {per_picture}; set it to DDP")
            if unit.reshard_after_forward and unit.kind is UnitKind.FROZEN:
                raise ParamError("fsdp.frozen_policy", f"SHARD {per_picture}; set it to KEEP or REPLICATE")
            if unit.reshard_after_forward:
                strategy = plan.fsdp.sharding_strategy
                raise ParamError("fsdp.sharding_strategy", f"{strategy} {per_picture}; set it to SHARD_GRAD_OP")
        trained_before |= unit.trainable_numel > 0


def part_of(model: PreTrainedModel, part: str) -> PreTrainedModel:
    """Return the vision encoder or the language model, without its output matrix. Raises ParamError without one."""
    module = model.get_encoder("image") if part == "vision" else model.get_decoder()
    if module is model or module is model.base_model:
        parts = ", ".join(name for name, _ in model.base_model.named_children())
        message = f"transformers does not say which part of {type(model).__name__} is its {part}; "
        raise ParamError("freeze", message + f"give patterns of names. Its parts are {parts}")
    return module


def spell_out_parts(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Return the patterns with the parts of the model among them (vision, projector, language, lora) spelled out.

    The projector is what belongs neither to the vision encoder nor to the language model, by whatever name a family has
    for it. Raises ParamError for a part that the model does not have, or a word that is none.
    """
    assert isinstance(model, PreTrainedModel)
    spelled_out: list[str] = []
    for pattern in patterns:
        part = pattern.removeprefix("!")
        if part.isidentifier() and part not in PARTS:
            raise ParamError("model.freeze", f"{pattern!r} is no pattern of names, and not one of {', '.join(PARTS)}")
        if part not in PARTS:
            spelled_out.append(pattern)
            continue
        sign = pattern.removesuffix(part)
        spelled_out += [sign + name for name in _patterns_of(model, part)]
    return spelled_out


def _patterns_of(model: PreTrainedModel, part: str) -> list[str]:
    """Return the patterns of a part's parameters."""
    if part == "lora":
        return ["*.lora_?.*"]
    language = [part_of(model, "language")]
    if model.get_output_embeddings() is not None:
        language.append(model.get_output_embeddings())
    if part == "language":
        return [f"{name}.*" for name, module in model.named_modules() if module in language]
    encoder = part_of(model, "vision")
    inside = [m for name, m in encoder.named_children() if any(word in name.lower() for word in CONNECTORS)]
    if part == "vision":
        prefix = next(name for name, module in model.named_modules() if module is encoder)
        return [f"{prefix}.{name}" for name in _outside(encoder, inside)]
    connectors = [f"{name}.*" for name, module in model.named_modules() if module in inside]
    connectors += _outside(model, [*language, encoder])
    if not connectors:
        raise ParamError("freeze", f"{type(model).__name__} has nothing between its two models; give patterns of names")
    return connectors


def _outside(module: nn.Module, others: list[nn.Module]) -> Iterator[str]:
    """Yield a pattern for each parameter of a module, and for each module in it, that is in none of the others."""
    yield from (name for name, _ in module.named_parameters(recurse=False))
    for name, child in module.named_children():
        if any(child is other for other in others) or not list(child.parameters()):
            continue
        if any(other in child.modules() for other in others):
            yield from (f"{name}.{pattern}" for pattern in _outside(child, others))
        else:
            yield f"{name}.*"
