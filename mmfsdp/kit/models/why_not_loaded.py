"""Models as they are published: why one cannot be loaded, and what to load in its place."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from ..data.sources.first_bytes import what_is_file

TWINS = {
    "internvl_chat": "OpenGVLab/InternVL3-1B-hf (each has one of its name and -hf)",
    "llava_llama": "llava-hf/llava-1.5-7b-hf",
    "llava_mistral": "llava-hf/llava-v1.6-mistral-7b-hf",
    "llava_qwen": "llava-hf/llava-onevision-qwen2-7b-ov-hf",
    "llava_qwen2": "KamilaMila/FastVLM-0.5B",
    "ovis": "thisisiron/Ovis2-1B-hf",
    "ovis2": "thisisiron/Ovis2-1B-hf",
    "multi_modality": "deepseek-community/Janus-Pro-1B or deepseek-community/deepseek-vl-1.3b-chat",
    "videollama3_qwen2": "lkhl/VideoLLaMA3-2B-Image-HF",
}
"""Model type of a repository with code of its own -> one that holds the same in transformers' own format."""
MAX_LISTED = 6
"""Keys or files that a message lists."""


def explain_loading(error: Exception, source: str, kind: str) -> str:
    """Return why transformers' `kind` could not be loaded from a folder or hub name, and what to do."""
    pointer = _file_that_is_no_weights(source)
    if pointer:
        return pointer
    foreign = _folder_without_model_type(source)
    if foreign:
        return f"gives no {kind}: {foreign}"
    text = str(error)
    reason = text.splitlines()[0] if text else type(error).__name__
    flash = "flash" in text.lower() and isinstance(error, ImportError)
    if flash or "flash_attn" in text:
        return (
            "wants FlashAttention, and the package flash_attn is not installed: pip install flash-attn (it needs a "
            "GPU), or set attn_implementation to sdpa in its configuration (model.config, or config.json in a copy of "
            "the folder)"
        )
    if "custom code" in text or "does not recognize this architecture" in text or "trust_remote_code" in text:
        return f"gives no {kind} ({reason}); {_twin_of(source)}"
    return f"gives no {kind} ({reason}); give a folder or a hub name"


def _file_that_is_no_weights(source: str) -> str:
    """Return which file of a folder is no weights, and what it is; "" if all may be."""
    for path in sorted(Path(source).glob("*.safetensors")):
        known = what_is_file(path)
        if known:
            return f"holds no weights: {path.name} {known}"
    return ""


def _folder_without_model_type(source: str) -> str:
    """Return what a folder holds whose files do not name a model of transformers, and what to do; "" for another.

    transformers asks for a `model_type` in config.json, whatever is there.
    """
    folder = Path(source)
    if not folder.is_dir():
        return ""
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(values, dict) or "model_type" in values:
            return ""
    except FileNotFoundError:
        return _without_config(folder)
    except (OSError, ValueError):  # transformers says what is wrong with it
        return ""
    keys = ", ".join(sorted(map(str, values))[:MAX_LISTED]) or "no keys"
    words = f"its config.json names no model_type (it has {keys}), so it is of another library; set model.build to a"
    return f"{words} function that loads the model with that library"


def _without_config(folder: Path) -> str:
    """Return what a folder without config.json holds, and what to do."""
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        try:
            base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
        except (OSError, ValueError, AttributeError):
            base = None
        of = f" of {base!r}" if base else ""
        words = f"it holds adapters{of} (adapter_config.json) and not the model"
        return f"{words}; load both with peft, call merge_and_unload() and save_pretrained(), and give that folder"
    if any(folder.glob("*.gguf")):
        return "it holds GGUF files, which are not read; give the original weights, in transformers' format"
    names = sorted(path.name for path in folder.iterdir())
    held = ", ".join(names[:MAX_LISTED]) + (f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else "")
    return f"it has no config.json (it holds {held or 'nothing'}); give the folder that save_pretrained() wrote"


def _twin_of(source: str) -> str:
    """Return what to load in place of a repository whose code is not run here."""
    try:
        values, _ = PretrainedConfig.get_config_dict(source)
    except (OSError, ValueError):
        values = {}
    known = TWINS.get(values.get("model_type", ""))
    name = Path(source).name if Path(source).is_dir() else source
    twin = known or f"on the hub look for {name}-hf"
    return f"code that comes with a model is never run; take its twin in transformers' own format, {twin}"


def leftover_keys(config: Any, values: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """Return the keys of a published config.json that have no effect on its configuration.

    Older ones write the language model's keys among the others; transformers moves them to where they belong.
    """
    parts = [part for part in vars(config).values() if isinstance(part, PretrainedConfig)]
    return [key for key in keys if not any(getattr(part, key, None) == values[key] for part in parts)]
