"""Pretrains the two small backbones for the generated pictures, once, in the formats of open_clip and transformers."""

from __future__ import annotations

import math
import os
import random
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from filelock import FileLock
from torch import nn

from ...params import GENERATED, BackboneParams, BackboneSource, ParamError, RunParams
from ..data.pictures import to_tensor
from ..models import build_language
from ..models.generated import generated_folder, needs_backbones
from ..models.weight_files import make_readable
from ..run.files.folder import make_folders
from .drawing import render
from .scenes import COLORS, Scene, caption, draw_scene, split_combinations
from .small_llava import backbones_of, write_llava
from .texts import some_text, word_tokenizer

Progress = Callable[[str, float], None]
"""Called after each step with what is being pretrained and the fraction of it that is done."""

MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


@dataclass(frozen=True)
class Recipe:
    """Steps and learning rates. Muon trains the matrices of blocks at `block_lr`, AdamW the other parameters at `lr`;
    both rates warm up and fall on a cosine."""

    vision_steps: int = 400
    vision_colors: int = 3
    """A batch holds a picture of every seen combination of so many colors, so that each caption meets its near
    misses: the same but for the shape, the count or the size."""
    vision_lr: float = 1e-3
    vision_block_lr: float = 1e-2
    language_steps: int = 200
    language_batch: int = 64
    language_lr: float = 5e-3
    language_block_lr: float = 3e-3
    """Low: large hidden states would drown the cross-attention's output, which is added to them."""
    warmup_steps: int = 30
    seed: int = 0


def ensure_backbones(params: RunParams, progress: Progress | None = None, *, recipe: Recipe | None = None) -> None:
    """Pretrain the backbones whose weights are `generated`, unless that was done before.

    Any number of processes may call it at the same time: one works, the others wait. A folder is complete or not there.
    Raises ParamError naming the field for a backbone that cannot be pretrained here.
    """
    if not needs_backbones(params.model):
        return
    if params.model.weights == GENERATED:
        ensure_backbones(RunParams(model=backbones_of(params.model)), progress, recipe=recipe)
    folder = generated_folder(params.model)
    try:
        make_folders(folder.parent)
        with FileLock(f"{folder}.lock", mode=0o666):  # whoever may write in a shared cache may take it
            if needs_backbones(params.model):
                pretrain(params, folder, recipe or Recipe(), progress or (lambda label, fraction: None))
    except OSError as error:
        why = f"{str(folder.parent)!r} cannot keep the pretrained backbones ({error})"
        raise ParamError("MMFSDP_CACHE", f"{why}; set this variable to a writable folder with free space") from None


def pretrain(params: RunParams, folder: Path, recipe: Recipe, progress: Progress) -> None:
    """Pretrain the generated backbones of a model into a folder that is not there yet."""
    temporary = folder.with_name(f"{folder.name}.{os.getuid()}.part")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        if params.model.weights == GENERATED:
            write_llava(params.model, temporary)
        if params.model.vision.weights == GENERATED:
            pretrain_vision(params.model.vision, temporary / "vision", recipe, progress)
        if params.model.language.weights == GENERATED:
            pretrain_language(params.model.language, temporary / "language", recipe, progress)
        make_readable(temporary)
    os.rename(temporary, folder)


def pretrain_vision(params: BackboneParams, folder: Path, recipe: Recipe, progress: Progress) -> None:
    """Train an open_clip CLIP, by open_clip's contrastive loss, to match captions and pictures.

    It sees the combinations that training may see, no others. Writes a `folder` that open_clip loads by `local-dir:`.
    """
    import open_clip
    from open_clip.model import set_model_preprocess_cfg
    from open_clip.push_to_hf_hub import save_for_hf

    is_clip = {"embed_dim", "vision_cfg", "text_cfg"} <= params.config.keys()
    if params.source is not BackboneSource.OPEN_CLIP or not is_clip:
        message = "generated needs source open_clip and a config of embed_dim, vision_cfg and text_cfg; "
        raise ParamError("model.vision.weights", message + "see the preset tiny")
    size = params.config["vision_cfg"]["image_size"]
    words = word_tokenizer(close=True)
    _check_vocabulary("model.vision.config", params.config["text_cfg"].get("vocab_size", len(words)), len(words))
    model = open_clip.CLIP(**{"text_cfg": {}, **params.config})
    contrast = open_clip.ClipLoss()

    def loss(step: int) -> torch.Tensor:
        scenes = near_misses(random.Random(f"{recipe.seed}/vision/{step}"), recipe.vision_colors)
        pictures = torch.stack([to_tensor(render(scene, size), size=size, mean=MEAN, std=STD) for scene in scenes])
        texts = words([caption(s) for s in scenes], padding="max_length", max_length=model.context_length)
        return contrast(*model(pictures, torch.tensor(texts.input_ids)))

    peaks = recipe.vision_block_lr, recipe.vision_lr
    _fit(model, loss, peaks, recipe.vision_steps, recipe.warmup_steps, partial(progress, "vision encoder"))
    set_model_preprocess_cfg(model, {"mean": MEAN, "std": STD})
    config = {**params.config, "text_cfg": {**params.config["text_cfg"], "hf_tokenizer_name": "words"}}
    save_for_hf(model, words, config, folder, safe_serialization=True)


def near_misses(rng: random.Random, colors: int) -> list[Scene]:
    """Return a scene of every seen combination of a few colors."""
    seen, _ = split_combinations()
    chosen = rng.sample(sorted(COLORS), min(colors, len(COLORS)))
    return [draw_scene(rng, (c,), pair=False) for c in seen if c.color in chosen]


def pretrain_language(params: BackboneParams, folder: Path, recipe: Recipe, progress: Progress) -> None:
    """Train a causal language model on captions, questions and answers about all combinations, without pictures.

    Writes a `folder` that transformers loads, tokenizer included.
    """
    words = word_tokenizer(close=False)
    model = build_language(params.change(weights=None))
    _check_vocabulary("model.language.config", model.config.get_text_config().vocab_size, len(words))

    def loss(step: int) -> torch.Tensor:
        rng = random.Random(f"{recipe.seed}/language/{step}")
        texts = [f"{some_text(rng)} {words.eos_token}" for _ in range(recipe.language_batch)]
        batch = words(texts, padding=True, return_tensors="pt")
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        return model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss

    peaks = recipe.language_block_lr, recipe.language_lr
    _fit(model, loss, peaks, recipe.language_steps, recipe.warmup_steps, partial(progress, "language model"))
    model.config.bos_token_id, model.config.eos_token_id = words.bos_token_id, words.eos_token_id
    model.config.pad_token_id = words.pad_token_id
    model.save_pretrained(folder)
    words.save_pretrained(folder)


def _check_vocabulary(field: str, vocab_size: int, words: int) -> None:
    if vocab_size < words:
        message = f"vocab_size {vocab_size} is too small for the {words} words of the generated texts; raise it"
        raise ParamError(field, message)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) with AdamW's size of updates (Liu et al.
    2025, https://arxiv.org/abs/2502.16982, equation 4).

    torch.optim.Muon does the same in bfloat16, which takes three times as long per step on CPUs that emulate it.
    """

    def __init__(self, params: Iterable[nn.Parameter]):
        super().__init__(params, {"lr": 0.0, "momentum": 0.95, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalize(p.grad.lerp(momentum, group["momentum"]))  # Nesterov's momentum
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape)))


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix with the same singular vectors and singular values near 1, by five Newton-Schulz steps."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def _fit(
    model: nn.Module,
    loss: Callable[[int], torch.Tensor],
    peaks: tuple[float, float],
    steps: int,
    warmup_steps: int,
    done: Callable[[float], None],
) -> None:
    """Minimize `loss(step)` for so many steps; leave the model in eval mode.

    peaks: the highest learning rates of Muon, for the matrices within numbered blocks, and of AdamW, for the rest.
    """
    blocks: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        in_block = re.search(r"\.\d+\.", name) is not None
        if in_block and parameter.ndim == 2:
            blocks.append(parameter)
        else:
            others.append(parameter)
    optimizers = Muon(blocks), torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    for step in range(steps):
        share = min(1.0, (step + 1) / warmup_steps) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        model.zero_grad()
        loss(step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * share
            optimizer.step()
        done((step + 1) / steps)
    model.eval()
