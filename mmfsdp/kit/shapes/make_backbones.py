"""Make the backbones that the package ships: `python -m mmfsdp.kit.shapes.make_backbones`, some minutes on two cores.

They are the backbones of the presets `tiny` and `tiny_llava`, pretrained as `ensure_backbones` does it, in 16 bits, in
`mmfsdp/kit/shapes/backbones/`. `about.json` in that folder says how well they know pictures and texts that the
pretraining did not show them. Run it again after each change of the generated pictures or of the recipe
(`RECIPE_VERSION`).
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from ...params import ModelParams, RunParams, load
from ..data.pictures import to_tensor
from ..models import VisionEncoder, build_language, build_vision
from ..models.backbones import load_tokenizer
from ..models.generated import RECIPE_VERSION, SHIPPED, generated_folder
from ..run.watch import ProgressBar
from .drawing import render
from .pretrain import Progress, Recipe, pretrain
from .scenes import draw_scene, split_combinations
from .texts import some_text

DTYPE = torch.float16
"""Of 16 bits, since these weights are small numbers and fp16 keeps three more bits of each than bf16."""


def main() -> None:
    """Make the folder that is shipped, and print what its backbones know."""
    params = load("tiny")
    folder = SHIPPED / generated_folder(params.model).name
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary) / folder.name
        about = make(params, made, ProgressBar())
        shutil.rmtree(SHIPPED, ignore_errors=True)
        shutil.copytree(made, folder)
    print(f"\n{folder}: {about}")


def make(params: RunParams, folder: Path, progress: Progress) -> dict[str, Any]:
    """Pretrain the backbones of `params` into a folder, in 16 bits. Return what `about.json` in it says of them."""
    pretrain(params, folder, Recipe(), progress)
    for path in folder.rglob("*.safetensors"):
        halve(path)
    about = {
        "recipe": RECIPE_VERSION,
        "torch": torch.__version__,
        **knowledge(params.model, folder),
        "sha256": checksums(folder),
    }
    (folder / "about.json").write_text(json.dumps(about, indent=2) + "\n")
    return about


def halve(path: Path) -> None:
    """Write a safetensors file again, in 16 bits."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor.to(DTYPE)
    mode = path.stat().st_mode
    save_file(tensors, path, metadata)
    path.chmod(mode)


def checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file below a folder but `about.json`, by its path in it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "about.json")
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def knowledge(params: ModelParams, folder: Path) -> dict[str, float]:
    """Return what the backbones in a folder know of pictures and texts that they were not trained on."""
    vision = params.vision.change(weights=str(folder / "vision"))
    language = params.language.change(weights=str(folder / "language"))
    return {
        "pictures_told_apart": round(pictures_told_apart(build_vision(vision)), 3),
        "loss_of_texts": round(loss_of_texts(build_language(language), load_tokenizer(language)), 3),
    }


@torch.no_grad()
def pictures_told_apart(encoder: VisionEncoder, known: int = 4) -> float:
    """Return the share of new pictures, one of each seen combination, whose nearest class is their own.

    A class is the mean feature of `known` other pictures of a combination.
    """
    combinations, _ = split_combinations()
    rng = random.Random("what the encoder knows")
    features = []
    for _ in range(known + 1):
        scenes = [draw_scene(rng, (combination,), pair=False) for combination in combinations]
        size = encoder.image_size
        pictures = [to_tensor(render(scene, size), size=size, mean=encoder.mean, std=encoder.std) for scene in scenes]
        tokens = encoder.eval()(torch.stack(pictures))  # (combinations, P, D)
        features.append(F.normalize(tokens.mean(dim=1), dim=-1))
    classes = F.normalize(torch.stack(features[:known]).mean(dim=0), dim=-1)
    nearest = (features[known] @ classes.T).argmax(dim=1)
    return float((nearest == torch.arange(len(combinations))).double().mean())


@torch.no_grad()
def loss_of_texts(model: nn.Module, tokenizer: PreTrainedTokenizerBase, texts: int = 256) -> float:
    """Return the language model's mean loss per token of new texts. A uniform guess has the log of the vocabulary."""
    rng = random.Random("what the language model knows")
    lines = [f"{some_text(rng)} {tokenizer.eos_token}" for _ in range(texts)]
    batch = tokenizer(lines, padding=True, return_tensors="pt")
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    return float(model.eval()(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss)


if __name__ == "__main__":
    main()
