"""export: a run's weights as a folder that other libraries load, or as a checkpoint of OpenFlamingo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ...core.quantize import dequantize, format_of, is_transposed, matrices, quantize
from ...params import BackboneParams, FSDPParams, ModelParams, ParamError, RunParams
from ...params.enums import LAYOUTS
from ..data.processor import SampleProcessor
from ..models import MediaModel
from ..models.backbones import load_tokenizer, merge_lora
from ..models.build import build_model
from ..models.generated import resolve_generated
from ..models.kinds import kind_of
from ..models.open_clip_towers import NO_TEXT, open_clip_config
from ..models.weight_files import make_readable
from ..run.files.folder import check_links
from ..run.trust import own_code_of
from ..train.evaluate import load_run
from .layout import CONFIG_FILE, WEIGHTS_FILE, Exported, Layout, layout_of


def export(run: Path, to: Path, *, layout: str = "from_pretrained", best: bool = False, ema: bool = False) -> Path:
    """Write the model of a run's newest checkpoint into a new folder, from one process.

    The layouts are:

    - from_pretrained: see `save_pretrained`. A model of kind transformers is written as plain transformers loads it. Of
      one of kind own there are model.safetensors, its state dict, and config.json, which names `model.build`.
    - adapter: the LoRA adapters and the projector, as peft loads them.
    - open_flamingo: checkpoint.pt, as github.com/mlfoundations/open_flamingo loads it.

    Args:
        run: The run's folder.
        to: The folder to make.
        layout: One of the layouts above.
        best: Take the checkpoint that `train.keep_best` kept.
        ema: Take the moving average of the weights (`train.ema`). With `best` it is taken if there is one, since it
            has the score.

    Returns:
        The new folder.

    Raises:
        ParamError: For another layout, for one that does not suit the model, and for a link out of the run folder.
    """
    if layout not in LAYOUTS:
        raise ParamError("layout", f"{layout!r} is not one of {', '.join(LAYOUTS)}")
    check_links(run)
    params, model, processor = load_run(run, quantized=False, best=best, ema=ema)
    with own_code_of(run, params):
        chosen = layout_of(params.model, layout)
        chosen.check(params)
        round_beside_adapters(model, params.fsdp)
        to.mkdir(parents=True)
        chosen.write(Exported(run, params, model, processor), to)
    return to


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


def save_pretrained(model: MediaModel, processor: SampleProcessor, params: ModelParams, to: Path) -> None:
    """Write an unwrapped model into a folder. The model is taken apart and cannot be used afterwards.

    language/          for transformers' AutoModelForCausalLM and AutoTokenizer; new tokens are its tables' last
                       rows, LoRA adapters are merged into their matrices
    vision/            for transformers' AutoModel, or as `local-dir:` for open_clip
    model.safetensors  the other weights: the perceiver and the cross-attention, or the projectors
    config.json        the model's parameters, for `load_pretrained`

    Args:
        model: A model of two backbones, with all its weights.
        processor: The processor of its samples, whose tokenizer is written beside the language model.
        params: The parameters by which the model was built.
        to: The folder. It is made if it is missing; files of these names in it are replaced.
    """
    to.mkdir(parents=True, exist_ok=True)
    own = {name: value.contiguous() for name, value in model.state_dict().items() if model.is_of_no_backbone(name)}
    save_file(own, to / WEIGHTS_FILE)
    encoder = model.get_submodule(kind_of(params).vision_encoder)
    visual: Any = getattr(encoder, "visual", None)
    if hasattr(visual, "save_pretrained"):
        visual.save_pretrained(to / "vision")
    else:
        _save_open_clip(encoder, resolve_generated(params, "vision"), to / "vision")
    # Placeholders that have no rows are added at each load.
    tokenizer = processor.tokenizer if model.tokens.new else load_tokenizer(resolve_generated(params, "language"))
    language: Any = model.take_language_model()
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
    if config.pop("model", None) not in [model.__name__ for model in MediaModel.__subclasses__()]:
        raise ParamError(
            "folder", f"{str(folder)!r} holds no {CONFIG_FILE} of ours; give one that `mmfsdp export` wrote"
        )
    for backbone in (config["vision"], config["language"]):
        backbone["name"] = backbone["weights"] = str(folder / backbone["weights"])
    model, processor = build_model(RunParams.from_dict({"model": config}).model)
    assert processor is not None, "the language model's folder has a tokenizer"
    missing, unknown = model.load_state_dict(load_file(folder / WEIGHTS_FILE), strict=False)
    different = [name for name in missing if model.is_of_no_backbone(name)] + unknown
    if different:
        message = f"{str(folder)!r}: {WEIGHTS_FILE} and {CONFIG_FILE} differ in {len(different)} tensors, such as "
        raise ParamError("folder", message + different[0])
    return model.eval(), processor


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


def _write_ours(exported: Exported, to: Path) -> None:
    save_pretrained(exported.model, exported.processor, exported.params.model, to)


def _load_ours(params: RunParams, folder: Path) -> nn.Module:
    return load_pretrained(folder)[0]


OURS = Layout(_write_ours, _load_ours)
"""The layout that `load_pretrained` loads."""


def _write_state_dict(exported: Exported, to: Path) -> None:
    merge_lora(exported.model)
    # Copies: a file may not hold a tied tensor twice, and `load_state_dict` wants it under all its names.
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in exported.model.state_dict().items()}
    save_file(tensors, to / WEIGHTS_FILE, metadata={"format": "pt"})
    params = exported.params.model
    (to / CONFIG_FILE).write_text(json.dumps({"kind": str(params.kind), "build": params.build}, indent=1) + "\n")
    make_readable(to)


def _load_state_dict(params: RunParams, folder: Path) -> nn.Module:
    model, _ = build_model(params.model)
    merge_lora(model)
    model.load_state_dict(load_file(folder / WEIGHTS_FILE))
    return model


STATE_DICT = Layout(_write_state_dict, _load_state_dict)
"""The model's own state dict, for whoever can build the model."""
