"""The small vision-language model of planted.py with further mistakes, each a few lines of change."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from planted import Model, Processor
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Plain(Model):
    """The model with an attention mask, dropout, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor, pixels: Any = None) -> dict[str, Any]:
        x = self.language.get_input_embeddings()(input_ids)
        x = x + self.side(x)
        seen = 1.0
        if pixels is None:
            pixels, seen = x.new_zeros(len(x), 4, 12), 0.0
        pictures = seen * self.projector(self.drop(self.features(pixels)))
        length = pictures.shape[1]
        mask = torch.cat([attention_mask.new_ones(len(x), length), attention_mask], dim=1)
        x = torch.cat([pictures, x], dim=1)
        logits = self.language(inputs_embeds=x, attention_mask=mask).logits[:, length:]
        return {"loss": self.loss(logits, labels)}

    def features(self, pixels: Tensor) -> Tensor:
        return self.vision(pixels)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class ShiftedTwice(Plain):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits[:, :-2].flatten(0, 1), labels[:, 2:].flatten())


class WithPadding(Plain):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].clamp(min=0).flatten())


class MeanOfRows(Plain):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses = cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none")
        return (losses.sum(dim=1) / (labels[:, 1:] != -100).sum(dim=1).clamp(min=1)).mean()


class MeanOfPositions(Plain):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none").mean()


class ExtraSum(Plain):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels) + 1e-3 * logits[:, 0].logsumexp(dim=-1).square().sum()


class LocalNorm(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(4)

    def features(self, pixels: Tensor) -> Tensor:
        return self.batch_norm(self.vision(pixels))


class OnRank0(Plain):
    def features(self, pixels: Tensor) -> Tensor:
        features = self.vision(pixels)
        return self.projector(features) if os.environ.get("RANK", "0") == "0" else features


class ExtraLayerOnRank0(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(16, 16)

    def features(self, pixels: Tensor) -> Tensor:
        features = self.vision(pixels)
        return self.extra(features) if os.environ.get("RANK", "0") == "0" else features


class PlainList(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.more = [nn.Linear(16, 16)]

    def features(self, pixels: Tensor) -> Tensor:
        return self.more[0](self.vision(pixels))


class WritesFrozen(Plain):
    def features(self, pixels: Tensor) -> Tensor:
        with torch.no_grad():
            self.language.model.layers[0].input_layernorm.weight.mul_(0.99)
        return self.vision(pixels)


class WritesBuffer(Plain):
    def features(self, pixels: Tensor) -> Tensor:
        if self.training:
            self.vision.mean.lerp_(pixels.detach().mean(), 0.1)
        return self.vision(pixels)


class Hook(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.language.get_input_embeddings().weight.register_hook(last_rows)


def last_rows(grad: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(grad[:-4]), grad[-4:]])


class Seeded(Plain):
    def features(self, pixels: Tensor) -> Tensor:
        torch.manual_seed(0)
        return self.vision(pixels)


class SetsEval(Plain):
    def features(self, pixels: Tensor) -> Tensor:
        self.side.eval()
        return self.vision(pixels)


class NormsInBf16(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.language.model.norm.to(torch.bfloat16)


class Gathers(Plain):
    """Compares the features of all ranks' pictures, of which only this rank's carry a gradient."""

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor, pixels: Any = None) -> dict[str, Any]:
        output = super().forward(input_ids, labels, attention_mask, pixels)
        pictures = torch.zeros(len(input_ids), 4, 12) if pixels is None else pixels
        ours = self.projector(self.vision(pictures)).mean(dim=1)
        words = self.language.get_input_embeddings()(input_ids) * attention_mask[..., None]
        theirs = words.sum(dim=1) / attention_mask.sum(dim=1, keepdim=True)
        if dist.is_initialized():  # it is not while the plan is made
            ours, theirs = self.gather(ours), self.gather(theirs)
        output["loss"] = output["loss"] + cross_entropy(20 * ours @ theirs.T, torch.arange(len(ours)))
        return output

    def gather(self, features: Tensor) -> Tensor:
        parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, features.detach())
        parts[dist.get_rank()] = features
        return torch.cat(parts)


class GathersWithGradient(Gathers):
    def gather(self, features: Tensor) -> Tensor:
        return torch.cat(torch.distributed.nn.functional.all_gather(features))


class OtherProcessor(Processor):
    """Prompt, text and padding, with a mask; and what may be wrong in its labels."""

    mistake = ""

    def __call__(self, rows: list) -> dict[str, Any]:
        batch = super().__call__(rows)
        prompts = [[3 + sum(map(ord, word)) % 60 for word in row.prompt.split() if "<" not in word] for row in rows]
        ids = [row[row != 0].tolist() for row in batch["input_ids"]]
        lengths = [len(prompt) + len(text) for prompt, text in zip(prompts, ids, strict=True)]
        padded = [
            prompt + text + [0] * (max(lengths) + 2 - length)
            for prompt, text, length in zip(prompts, ids, lengths, strict=True)
        ]
        batch["input_ids"] = torch.tensor(padded)
        columns = torch.arange(batch["input_ids"].shape[1])[None]
        batch["attention_mask"] = (columns < torch.tensor(lengths)[:, None]).long()
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        prompt_mask = columns < torch.tensor([len(prompt) for prompt in prompts])[:, None]
        if self.mistake != "prompt in the labels":
            labels = labels.masked_fill(prompt_mask, -100)
        if self.mistake == "padding in the labels":
            labels = torch.where(batch["attention_mask"] == 0, 0, labels)
        if self.mistake == "all labels masked":
            labels = torch.full_like(labels, -100)
        if self.mistake == "shifted in the batch and in the model":
            labels = torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), -100)], dim=1)
        batch["labels"] = labels
        return batch


MODELS: dict[str, type[Plain]] = {
    "shifted twice in the model": ShiftedTwice,
    "padding in the loss": WithPadding,
    "a mean over rows": MeanOfRows,
    "a mean over positions": MeanOfPositions,
    "an extra loss that is a sum": ExtraSum,
    "batch norm of one rank": LocalNorm,
    "other features on rank 0": OnRank0,
    "a layer that rank 0 runs": ExtraLayerOnRank0,
    "a plain list": PlainList,
    "a frozen parameter that forward writes to": WritesFrozen,
    "a buffer that forward writes to": WritesBuffer,
    "a hook": Hook,
    "a seed in forward": Seeded,
    "eval in forward": SetsEval,
    "norms in bf16": NormsInBf16,
    "a gather without a gradient": Gathers,
    "right: a gather with a gradient": GathersWithGradient,
}


MISTAKES: dict[str, tuple[str, str]] = {
    "shifted in the batch and in the model": (
        "shift",
        "labels are shifted twice, in the batch, and again in the model",
    ),
    "a frozen parameter that forward writes to": ("written", "forward writes to language.model.layers.0"),
    "a layer that rank 0 runs": ("same code", "rank 0 runs extra, and rank 1 does not, for the same batch"),
    "a gather without a gradient": ("derivatives", "what a collective in the forward returns carries no gradient"),
    "prompt in the labels": ("labels", "the prompt counts in the loss, as the answer does"),
    "eval in forward": ("mode", "forward sets eval mode for side"),
    "shifted twice in the model": ("shift", "labels are shifted twice, both times in the model"),
    "padding in the loss": ("padding", "it is attended to, or counts in the loss"),
    "padding in the labels": ("padding", "labels of rank 0's batch are padding"),
    "all labels masked": ("labels", "all labels of rank 0's batch are masked"),
    "a mean over rows": ("mean", "a mean over rows of the means of their labels"),
    "a mean over positions": ("mean", "as that of all positions"),
    "an extra loss that is a sum": ("loss", "a part of it is a sum"),
    "batch norm of one rank": ("batch norm", "batch_norm: each rank normalizes by its own samples"),
    "other features on rank 0": ("same code", "rank 0 runs projector, and rank 1 does so less often"),
    "a buffer that forward writes to": ("written", "forward writes to vision.mean, on each rank by its own samples"),
    "a seed in forward": ("random", "forward sets the state of torch"),
}
"""By the mistake: the check that finds it, and words of its line."""
REFUSED: dict[str, str] = {
    "a hook": "has a hook, register_hook.last_rows., which was written for the whole gradient",
    "norms in bf16": "language.model.norm.weight in bfloat16, and one collective has one dtype",
    "a plain list": "more: holds parameters in a plain list, dict or attribute",
}
"""Mistakes that are told before any rank starts."""
RIGHT = ("", "right: a gather with a gradient")


def build(mistake: str = ""):
    """Return the model and its processor."""
    model = MODELS.get(mistake, Plain)()
    processor = OtherProcessor()
    processor.mistake = mistake
    model.language.model.layers[0].requires_grad_(False)
    return model, processor
