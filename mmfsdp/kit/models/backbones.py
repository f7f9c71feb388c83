"""Backbones of transformers, from a name, a folder or a configuration, and the shapes of what a module returns."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...core.guards import WRAPPERS
from ...params import BackboneParams, ParamError
from ...params.base import unknown_key
from .why_not_loaded import explain_loading, leftover_keys

OPTIONAL_KEYS = {"head_dim", "rope_theta", "rope_scaling", "rotary_pct", "partial_rotary_factor", "attn_implementation"}
"""Keys that transformers reads where they are set, although the default configuration does not have them."""

PUBLISHED_KEYS = {"architectures", "transformers_version", "torch_dtype", "_name_or_path"}
"""Keys by which a configuration is known as the content of a published config.json."""

CACHE = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"
"""The name of a forward's KV cache in transformers: `cache` from 5.24 on."""

WITHOUT_KV_CACHE = {"falcon_mamba", "mamba", "mamba2", "recurrent_gemma", "xlm", "xlstm"}
"""Language models whose forward takes a cache of another kind under one of these names."""


def build_language(params: BackboneParams, *, meta: bool = False) -> PreTrainedModel:
    """Return the causal LM of `params` in fp32; with `meta` on the meta device, without weights or download.

    Raises ParamError, also if the weights do not have the shapes that `params.config` promises.
    """
    if not params.weights or (meta and params.config):
        config = load_config(params, "language")
        if type(config) not in AutoModelForCausalLM._model_mapping:
            raise ParamError("language", f"{config.model_type} is no causal language model; choose one, such as llama")
        return build_from_config(AutoModelForCausalLM, config, "language", meta=meta)
    if meta:
        return build_language(params.change(name=params.weights, weights=None), meta=True)
    model = load_model(AutoModelForCausalLM, params.weights, "language.weights")
    if params.config:
        _check_shapes(model, build_language(params, meta=True), params.weights)
    return model


def is_causal(language_model: Any) -> bool:
    """Return True if no token of a language model sees later ones: padding on the right then changes no other token.

    Attention modules of transformers say so; a model whose modules do not is taken as not causal.
    """
    flags = [module.is_causal for module in language_model.modules() if hasattr(module, "is_causal")]
    return bool(flags) and all(flags)


def forward_arguments(language_model: Any) -> Collection[str]:
    """Return the names of the arguments of a language model's forward, inside peft's wrapper if it has one."""
    adapted = getattr(language_model, "get_base_model", lambda: language_model)()
    return inspect.signature(adapted.forward).parameters.keys()


def check_language(model: Any) -> None:
    """Raise ParamError for a model of transformers that has no cache of keys and values (KV cache)."""
    if not isinstance(model, PreTrainedModel):
        return
    if CACHE not in forward_arguments(model) or model.config.model_type in WITHOUT_KV_CACHE:
        raise ParamError("language", f"{type(model).__name__} has no KV cache; choose another, such as llama")


def _check_shapes(model: nn.Module, planned: nn.Module, weights: str) -> None:
    """Raise ParamError naming a parameter of loaded weights that the configuration does not have in this shape."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    planned_shapes = {name: p.shape for name, p in planned.named_parameters()}
    for name in {**shapes, **planned_shapes}:
        if shapes.get(name) != planned_shapes.get(name):
            raise ParamError("language.config", f"{name} is not as in {weights!r}; correct config or remove it")


def load_config(params: BackboneParams, field: str) -> Any:
    """Return transformers' configuration: of `params.config`, which must set model_type, or of `params.name`."""
    values = dict(params.config)
    if not values:
        return load_from_transformers(AutoConfig, params.name, f"{field}.name")
    if "model_type" not in values:
        raise ParamError(f"{field}.config", f"{params.config!r} names no model_type; add one, such as llama")
    model_type = values.pop("model_type")
    try:
        default = AutoConfig.for_model(model_type)
        config = AutoConfig.for_model(model_type, **values)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ParamError(f"{field}.config", f"{params.config!r} is not a transformers configuration: {error}") from None
    unknown = [key for key in values if not hasattr(default, key) and key not in OPTIONAL_KEYS]
    if unknown and PUBLISHED_KEYS.intersection(values):
        unknown = leftover_keys(config, values, unknown)
        if unknown:
            words = f"config.json as published, in which transformers does not read {', '.join(unknown)}; remove them"
            raise ParamError(f"{field}.config", f"{words}, or put the file into a folder and set {field}.name to it")
    elif unknown:
        raise unknown_key(unknown[0], default.to_dict()).under(f"{field}.config")
    return config


def build_from_config(auto_class: Any, config: Any, field: str, *, meta: bool) -> PreTrainedModel:
    """Return a model of a configuration without weights, in fp32.

    Raises ParamError if it wants a package that is not installed, such as flash_attn.
    """
    try:
        with torch.device("meta" if meta else "cpu"):
            return auto_class.from_config(config, dtype=torch.float32)
    except ImportError as error:
        raise ParamError(field, explain_loading(error, config.model_type, auto_class.__name__)) from None


def load_tokenizer(params: BackboneParams) -> PreTrainedTokenizerBase:
    """Return the tokenizer that belongs to the language model. Raises ParamError if there is none."""
    return load_from_transformers(AutoTokenizer, params.weights or params.name, "language.name")


def load_from_transformers(auto_class: Any, source: str, field: str, **kwargs: Any) -> Any:
    """Return `auto_class.from_pretrained(source)`. Raises ParamError naming `field`, which is set to `source`.

    Without a network, HF_HUB_OFFLINE=1 takes what was downloaded before and does not try for half a minute.
    """
    try:
        if auto_class is AutoConfig or hasattr(auto_class, "_model_mapping"):
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
            quantization = getattr(config, "quantization_config", None)
            if quantization:  # the layers of its weights are another library's
                values = quantization if isinstance(quantization, dict) else quantization.to_dict()
                library = values.get("quant_method", "another library")
                words = f"{source!r} holds weights quantized by {library}, which are not read; give the original "
                raise ParamError(field, words + "weights, and set fsdp.frozen_dtype to nf4 or int8")
        # Unless told False, transformers asks at the terminal whether to run code that comes with the weights.
        return auto_class.from_pretrained(source, trust_remote_code=False, **kwargs)
    except ParamError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        kind = auto_class.__name__.removeprefix("Auto")
        raise ParamError(field, f"{source!r} {explain_loading(error, source, kind)}") from None


def load_model(auto_class: Any, source: str, field: str, **kwargs: Any) -> PreTrainedModel:
    """Return a model with the weights of `source`, in fp32. Raises ParamError, also naming a weight that it lacks."""
    kwargs = {"dtype": torch.float32, "output_loading_info": True, **kwargs}
    model, info = load_from_transformers(auto_class, source, field, **kwargs)
    missing = sorted(info["missing_keys"])
    if missing:
        raise ParamError(field, f"{source!r} lacks {len(missing)} weights, such as {missing[0]}")
    return model


LORA_SCALE = 2
"""Factor of the product of an adapter's two matrices when it is added to the output: lora_alpha / rank."""


def lora_config(rank: int, targets: Collection[str] = ()) -> Any:
    """Return peft's configuration of LoRA adapters (Hu et al. 2021)."""
    try:
        from peft import LoraConfig
    except ImportError:
        raise ParamError("lora_rank", f"{rank} needs peft; `pip install peft`, or remove it") from None
    return LoraConfig(r=rank, lora_alpha=LORA_SCALE * rank, target_modules=list(targets) or "all-linear")


def add_lora(language: nn.Module, rank: int, *, targets: Collection[str] = (), meta: bool = False) -> None:
    """Add LoRA adapters to all matrices but the output's, in place, by peft; at first, a no-op.

    With `targets`, only to matrices of these names. Raises ParamError if there are none.
    """
    config = lora_config(rank, targets)
    if not targets and any(name.endswith(".router") for name, _ in language.named_modules()):
        config.exclude_modules = {"router"}  # Llama 4's is a Linear that returns a tuple
    from peft import inject_adapter_in_model

    try:
        inject_adapter_in_model(config, language, low_cpu_mem_usage=meta)
    except ValueError as error:
        raise ParamError("lora_targets", f"{list(targets)} gives no adapters: {error}") from None


def merge_lora(model: nn.Module) -> None:
    """Merge the adapters of `add_lora` into their matrices, in place: nothing of them is left."""
    for name, module in list(model.named_modules()):
        if hasattr(module, "lora_A"):
            module.merge()
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, module.base_layer)


def output_shape(module: nn.Module, example: torch.Tensor) -> torch.Size:
    """Return the shape of `module(example)`; costs neither memory nor arithmetic, on whatever device the module is."""
    return run_on_meta(module, torch.empty_like(example, device="meta")).shape


@torch.no_grad()
def run_on_meta(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return `module(*args, **kwargs)` with the module's tensors on the meta device, where the arguments must be."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, inner in module.named_modules():
        if isinstance(inner, WRAPPERS):
            raise ValueError(f"{type(module).__name__}: {name} is wrapped already; build the whole model, then wrap it")
    on_meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    return functional_call(module, on_meta, args, kwargs)
