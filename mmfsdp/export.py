"""A trained run's weights for others: a folder whose parts their own libraries load, or OpenFlamingo's layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from .build import build_model, found_backbone
from .data.processor import Processor
from .evaluate import load_run
from .models import Flamingo, MediaModel, MultimodalModel, load_tokenizer
from .models.interop import save_open_flamingo
from .models.pretrained import save_encoder, save_language, share
from .params import ModelParams, ParamError, RunParams

LAYOUTS = ("from_pretrained", "open_flamingo")
CONFIG, PARTS = "config.json", "model.safetensors"


def export(run: Path, to: Path, *, layout: str = "from_pretrained") -> Path:
    """Write the model of a run's newest checkpoint into the new folder `to`, from one process. Returns the folder.

    from_pretrained: see `save_pretrained`. open_flamingo: checkpoint.pt as github.com/mlfoundations/open_flamingo loads
    it. Raises ParamError for another layout, or for a model that is no Flamingo in OpenFlamingo's.
    """
    if layout not in LAYOUTS:
        raise ParamError("layout", f"{layout!r} is not one of {', '.join(LAYOUTS)}")
    params, model, processor = load_run(run)
    if layout == "from_pretrained":
        save_pretrained(model, processor, params.model, to)
    elif isinstance(model, Flamingo):
        with _new(to):
            params.to_yaml(to / "params.yaml")
            save_open_flamingo(model, to / "checkpoint.pt")
    else:
        raise ParamError("layout", f"open_flamingo is for a Flamingo, not a {type(model).__name__}; use {LAYOUTS[0]}")
    return to


def save_pretrained(model: MediaModel, processor: Processor, params: ModelParams, to: Path) -> None:
    """Take an unwrapped model to pieces, of no use afterwards, and write them into the new folder `to`.

    language/          for transformers' AutoModelForCausalLM and AutoTokenizer; new tokens are its tables' last
                       rows, LoRA adapters are merged into the matrices they stand beside
    vision/, audio/    for transformers' AutoModel, or as `local-dir:` for open_clip
    model.safetensors  all else: the perceiver and the cross-attention, or the projectors
    config.json        the model's parameters, for `load_pretrained`
    """
    with _new(to):
        ours = {name: t.contiguous() for name, t in model.state_dict().items() if _is_ours(name)}
        save_file(ours, to / PARTS)
        save_encoder(_encoder(model, "vision"), found_backbone(params, "vision"), to / "vision")
        for one in params.encoders:
            save_encoder(_encoder(model, one.modality.value), one, to / one.modality.value)
        tokenizer = processor.tokenizer
        if isinstance(model, MultimodalModel):  # its placeholders have no rows, and are added at each load
            tokenizer = load_tokenizer(found_backbone(params, "language"))
        save_language(model, tokenizer, to / "language")
        written = replace(
            params,
            vision=_placed(params.vision, "vision"),
            language=_placed(params.language, "language"),
            encoders=tuple(_placed(one, one.modality.value) for one in params.encoders),
            freeze=tuple(pattern for pattern in params.freeze if "lora_" not in pattern),
            lora_rank=None,
        )
        values = {"model": type(model).__name__} | RunParams(model=written).to_dict()["model"]
        (to / CONFIG).write_text(json.dumps(values, indent=1) + "\n")
        share(to)


def load_pretrained(folder: Path) -> tuple[MediaModel, Processor]:
    """The model in a folder that `save_pretrained` wrote, ready to caption, and its processor.

    Raises ParamError for another folder.
    """
    if not (folder / CONFIG).is_file():
        raise ParamError("folder", f"{str(folder)!r} holds no {CONFIG}; give one that `mmfsdp export` wrote")
    values = json.loads((folder / CONFIG).read_text())
    if values.pop("model", None) not in (Flamingo.__name__, MultimodalModel.__name__):
        raise ParamError("folder", f"{str(folder)!r} holds no model of ours; give one that `mmfsdp export` wrote")
    for one in (values["vision"], values["language"], *values["encoders"]):
        one["name"] = one["weights"] = str(folder / one["weights"])
    model, processor = build_model(RunParams.from_dict({"model": values}).model)
    assert processor is not None, "the language model's folder has a tokenizer"
    parts = load_file(folder / PARTS)
    missing, unknown = model.load_state_dict(parts, strict=False)
    if odd := [name for name in missing if _is_ours(name)] + unknown:
        raise ParamError("folder", f"{folder / PARTS} and {CONFIG} differ in {len(odd)} tensors, such as {odd[0]}")
    return model.eval(), processor


def _is_ours(name: str) -> bool:
    return name.startswith(("perceiver.", "projectors.")) or ".cross_attention." in name


@contextmanager
def _new(folder: Path) -> Iterator[None]:
    """A folder that is not left half-written, as by a full disk: it would look like a model, and be in the way."""
    folder.mkdir(parents=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _encoder(model: Any, key: str) -> Any:
    return model.vision_encoder if isinstance(model, Flamingo) else model.encoders[key]


def _placed(one: Any, folder: str) -> Any:
    """A backbone's parameters, taken from the export's own folder."""
    return replace(one, name=folder, weights=folder, config={})
