"""Tiny models of transformers' multimodal architectures, by model type, each with a batch as its processor makes it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mmfsdp.kit.models.backbones import add_lora
from tests.tiny import Mapping

IMAGE, LENGTH = 150, 24


@dataclass(frozen=True)
class Family:
    """A tiny model of one of transformers' architectures."""

    config: dict[str, Any]
    media: dict[str, dict[str, Any]]
    """What the processor adds for two samples, by name: see `media_tensor`."""
    tokens: int = 4
    """Image tokens of a sample."""
    trains: str = "projector"
    """Part of the names of what trains."""

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return max(LENGTH, self.tokens + 8)


def media_tensor(kind: str, value: Any) -> torch.Tensor:
    """Return the tensor of an entry such as `random: [2, 3, 28, 28]` in families.yaml."""
    if kind == "random":
        return torch.randn(value, generator=torch.Generator().manual_seed(0))
    if kind == "ones":
        return torch.ones(value)
    if kind == "zeros":
        return torch.zeros(value)
    if kind == "mask":
        return torch.ones(value, dtype=torch.bool)
    if kind == "int_ones":
        return torch.ones(value, dtype=torch.long)
    if kind == "int_zeros":
        return torch.zeros(value, dtype=torch.long)
    if kind == "first":  # 1 at the first tokens of each sample
        return (torch.arange(LENGTH) < value).long().repeat(2, 1)
    if kind == "count":
        return torch.arange(value).repeat(2, 1)
    if kind == "grid":  # the places of a square of patches
        return torch.cartesian_prod(torch.arange(value), torch.arange(value)).repeat(2, 1, 1)
    assert kind == "values", kind
    return torch.tensor(value)


FAMILIES: dict[str, Family] = {}
for family, entry in yaml.safe_load((Path(__file__).parent / "files/families.yaml").read_text()).items():
    if family != "shared":
        FAMILIES[family] = Family(**entry)


def thirds(names: Iterable[str], third: int) -> list[Any]:
    """Return the families as parameters of a test: each third one by the name's place stays in `make test`.

    The others are marked `extended`. Tests that look at all families take another third each (0, 1, 2), so each family
    is looked at by one of three in `make test`, and by all in `make test-all`.
    """
    import pytest  # benches use the families, too, where it may not be installed

    order = sorted(FAMILIES)
    kept = [name for name in names if order.index(name) % 3 == third]
    return [name if name in kept else pytest.param(name, marks=pytest.mark.extended) for name in names]


def build(name: str, *, lora: bool = False, device: str = "cpu") -> nn.Module:
    """Return the family's model, of which the projector trains; with lora, adapters on its language model instead."""
    family = FAMILIES[name]
    image = {key: IMAGE for key in ("image_token_id", "image_token_index")}
    config = CONFIG_MAPPING[name](**image | family.config)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForImageTextToText.from_config(config)
        model.requires_grad_(False)
        if lora:
            add_lora(model.get_decoder(), rank=4)
        else:
            for parameter_name, p in model.named_parameters():
                if family.trains in parameter_name:
                    p.requires_grad_()
                    if device == "cpu":
                        nn.init.normal_(p, std=0.02)  # some gates and projectors begin as zeros
    return model


class Inputs(Mapping):
    """A batch of two samples: the mapping that transformers' processors return."""

    def __init__(self, name: str, seed: int = 0):
        family = FAMILIES[name]
        ids = (3 + 7 * seed + torch.arange(2 * family.length) % 110).view(2, family.length)
        ids[:, : family.tokens] = IMAGE
        labels = ids.masked_fill(ids == IMAGE, -100)
        labels[0, family.length - seed :] = -100  # label tokens of unlike number
        mapping = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        for key, entry in family.media.items():
            [(kind, value)] = entry.items()
            tensor = media_tensor(kind, value)
            if tensor.is_floating_point():
                tensor = tensor + seed / 8
            mapping[key] = tensor
        super().__init__(mapping)
