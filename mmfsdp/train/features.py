"""FeatureCache: what a frozen vision encoder makes of each picture, kept on disk for later epochs and runs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from ..data.batch import Batch
from ..params import ParamError, RunParams


@dataclass
class FeatureCache:
    """Features by picture, in a folder of their own for each encoder, precision and kind of device.

    A picture's name is a hash of its pixels as the processor hands them over, so that another preprocessing or another
    content is another picture.
    """

    folder: Path
    device: torch.device
    cached: int = field(default=0, init=False)
    """Pictures taken from the cache."""
    encoded: int = field(default=0, init=False)
    """Pictures that the encoder has seen."""

    @classmethod
    def open(
        cls,
        params: RunParams,
        model: nn.Module,
        device: torch.device,
        read: Callable[[str], Tensor] | None = None,
    ) -> FeatureCache | None:
        """The cache that `data.feature_cache` asks for, if it does. Every rank must call it, with the unwrapped model.

        read: gives rank 0's tensors by name where its model is on the meta device. Raises ParamError if the encoder
        trains.
        """
        if params.data.feature_cache is None:
            return None
        places = dict(model.named_modules())
        place = next((name for name in ("vision_encoder", "encoders.vision") if name in places), None)
        if place is None:
            raise ParamError("data.feature_cache", "the model has no vision encoder; unset it")
        encoder = places[place]
        if trains := [name for name, p in encoder.named_parameters() if p.requires_grad]:
            raise ParamError(
                "data.feature_cache",
                f"the vision encoder trains ({trains[0]} and {len(trains) - 1} more), so that its features change; "
                "freeze vision_encoder.* in model.freeze, or unset it",
            )
        key = [""]
        if not dist.is_initialized() or dist.get_rank() == 0:
            settings = (params.fsdp.mixed_precision, params.fsdp.frozen_dtype, device.type)
            key = [fingerprint(encoder, *settings, read=read and (lambda name: read(f"{place}.{name}")))]
        if dist.is_initialized():
            dist.broadcast_object_list(key)
        return cls(Path(os.path.expanduser(params.data.feature_cache)) / key[0], device)

    def fill(self, model: nn.Module, batches: Sequence[Batch]) -> list[Batch]:
        """The same batches with `vision_features` (B, T, F, P, D) in place of `vision`. Every rank must call it.

        A batch is encoded by all ranks or by none: one that lacks a picture takes the others along, so that every rank
        enters every unit.
        """
        paths = [[self._path(picture) for picture in batch.media["vision"].flatten(0, 2)] for batch in batches]
        found = [_read(names) for names in paths]
        known = torch.tensor([features is not None for features in found], dtype=torch.int32, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(known, dist.ReduceOp.MIN)
        filled = []
        for batch, names, features, everywhere in zip(batches, paths, found, known.tolist(), strict=True):
            if everywhere:
                assert features is not None
                self.cached += len(names)
            else:
                features = self._encode(model, batch)
                _write(names, features)
                self.encoded += len(names)
            shape = batch.media["vision"].shape[:3]
            media = {name: tensor for name, tensor in batch.media.items() if name != "vision"}
            filled.append(replace(batch, media=media | {"vision_features": features.unflatten(0, shape)}))
        return filled

    def _encode(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            out = model(media=batch.to(self.device).media, features_only=True)
        return out.vision_features.flatten(0, 2)

    def _path(self, picture: Tensor) -> Path:
        name = hashlib.blake2b(picture.contiguous().numpy().data, digest_size=20).hexdigest()
        return self.folder / name[:2] / name[2:]


def fingerprint(encoder: nn.Module, *settings: object, read: Callable[[str], Tensor] | None = None) -> str:
    """A hash of a module's structure and weights (which `read` gives, if set), and of what else its output needs."""
    found = hashlib.blake2b(repr((encoder, torch.__version__, *map(str, settings))).encode(), digest_size=16)
    for name, tensor in encoder.state_dict().items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        tensor = read(name) if read else tensor
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _read(paths: Sequence[Path]) -> Tensor | None:
    """Features (N, P, D) of N pictures; None if one is missing or damaged."""
    try:
        return torch.stack([load(path.read_bytes())["features"] for path in paths])
    except (OSError, SafetensorError):
        return None


def _write(paths: Sequence[Path], features: Tensor) -> None:
    """Keep what is missing or damaged. Other ranks and runs may write the same pictures at the same time."""
    for path, one in zip(paths, features.cpu(), strict=True):
        if _read([path]) is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(f"{path.name}.{os.getpid()}")
            beside.write_bytes(save({"features": one.contiguous()}))
            beside.replace(path)
