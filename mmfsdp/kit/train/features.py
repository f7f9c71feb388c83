"""FeatureCache: a frozen vision encoder's features of each picture, kept on disk for later epochs and runs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from ...core.collectives import gather_json, rank
from ...params import ParamError, RunParams
from ..data.batch import Batch
from ..models.kinds import kind_of
from ..run.files.folder import make_folders
from .callbacks import Callback, Training

Read = Callable[[str], Tensor]
"""Gives rank 0's tensor of this name, where the model is on the meta device."""


@dataclass
class FeatureCache(Callback):
    """Features by picture, in a folder for each encoder, precision and kind of device.

    A picture's name is a hash of its pixels as the processor hands them over, so that another preprocessing gives
    another picture.
    """

    folder: Path
    device: torch.device
    group: Any = None
    """A group of gloo where the model's is nccl: ranks agree on the CPU, and the host need not wait for a GPU."""
    model: nn.Module | None = field(default=None, init=False)
    """The wrapped model whose steps it fills."""
    cached: int = field(default=0, init=False)
    """Pictures whose features were read."""
    encoded: int = field(default=0, init=False)
    """Pictures whose features were computed."""

    @classmethod
    def open(
        cls, params: RunParams, model: nn.Module, device: torch.device, read: Read | None = None
    ) -> FeatureCache | None:
        """Open the cache, if `data.feature_cache` is set. Every rank must call it, with the model before wrapping.

        Raises ParamError if the model trains its vision encoder.
        """
        if params.data.feature_cache is None:
            return None
        check_cache(params, model)
        name = kind_of(params.model).vision_encoder
        encoder = model.get_submodule(name)
        key = ""
        if rank() == 0:
            settings = (params.fsdp.mixed_precision, params.fsdp.frozen_dtype, device.type)
            key = fingerprint(encoder, *settings, prefix=f"{name}.", read=read)
        key = gather_json(key)[0]
        group = dist.new_group(backend="gloo") if dist.is_initialized() and device.type == "cuda" else None
        return cls(Path(os.path.expanduser(params.data.feature_cache)) / key, device, group)

    def around_step(self, step: int, micro_batches: list[Batch]) -> AbstractContextManager[None]:
        """Put the features in place of the pictures of a step, before it begins."""
        assert self.model is not None
        micro_batches[:] = self.fill(self.model, micro_batches)
        return nullcontext()

    def on_train_end(self, result: dict[str, Any]) -> None:
        """Print how many pictures the cache had."""
        print(f"vision features of {self.cached} pictures from the cache, {self.encoded} encoded")

    def fill(self, model: nn.Module, batches: Sequence[Batch]) -> list[Batch]:
        """Return the batches with `vision_features` (B, T, F, P, D) in place of `vision`. Every rank must call it.

        All ranks compute a batch if any rank lacks a picture of it: the encoder's all-gathers need every rank. On a GPU
        the host waits only where features were computed, once, to write them.
        """
        paths = [[self._path(picture) for picture in batch.media["vision"].flatten(0, 2)] for batch in batches]
        from_disk = [_read(each) for each in paths]
        on_all_ranks = torch.tensor([features is not None for features in from_disk], dtype=torch.int32)
        if dist.is_initialized():
            dist.all_reduce(on_all_ranks, dist.ReduceOp.MIN, group=self.group)
        computed: dict[int, Tensor] = {}
        features_of_batches: list[Tensor] = []
        for i, batch in enumerate(batches):
            features = from_disk[i]
            if features is None or not on_all_ranks[i]:
                with torch.no_grad():
                    output = model(media=batch.to(self.device).media, features_only=True)
                features = computed[i] = output.vision_features.flatten(0, 2)
            else:
                self.cached += len(paths[i])
                if self.device.type == "cuda":
                    features = features.pin_memory()
            features_of_batches.append(features)
        if computed:
            self.encoded += self._write([paths[i] for i in computed], list(computed.values()))
        filled = []
        for batch, features in zip(batches, features_of_batches, strict=True):
            media = dict(batch.media)
            pictures = media.pop("vision")
            media["vision_features"] = features.unflatten(0, pictures.shape[:3])
            filled.append(replace(batch, media=media))
        return filled

    def _write(self, paths: list[list[Path]], features: list[Tensor]) -> int:
        """Write the features of some batches; return the number of pictures."""
        on_host = torch.cat(features).cpu()  # one copy: each waits for the GPU
        pictures = [path for batch in paths for path in batch]
        _write(pictures, on_host)
        return len(pictures)

    def _path(self, picture: Tensor) -> Path:
        name = hashlib.blake2b(picture.contiguous().numpy().data, digest_size=20).hexdigest()
        return self.folder / name[:2] / name[2:]


def check_cache(params: RunParams, model: nn.Module) -> None:
    """Raise ParamError for a feature cache of a model, before wrapping, that trains its vision encoder."""
    if params.data.feature_cache is None:
        return
    name = kind_of(params.model).vision_encoder
    for parameter, p in model.get_submodule(name).named_parameters(prefix=name):
        if p.requires_grad:
            message = f"the vision encoder trains ({parameter}), so that its features change; "
            raise ParamError("data.feature_cache", message + "freeze vision_encoder.* in model.freeze, or unset it")


def training_cache(training: Training) -> FeatureCache | None:
    """Return the cache of a training; it was opened before the model was wrapped."""
    cache = training.features
    assert cache is None or isinstance(cache, FeatureCache)
    if cache is not None:
        cache.model = training.setup.model
    return cache


def fingerprint(encoder: nn.Module, *settings: object, prefix: str = "", read: Read | None = None) -> str:
    """Return a hash of a module's structure and weights, and of whatever else its output depends on.

    read: gives the weights, by their names with `prefix`, if the module does not have them.
    """
    digest = hashlib.blake2b(repr((encoder, torch.__version__, *map(str, settings))).encode(), digest_size=16)
    for name, tensor in encoder.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if read is not None:
            tensor = read(prefix + name)
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read(paths: Sequence[Path]) -> Tensor | None:
    """Read the features (N, P, D) of N pictures; None if one is missing or damaged."""
    try:
        return torch.stack([load(path.read_bytes())["features"] for path in paths])
    except (OSError, SafetensorError):
        return None


def _write(paths: Sequence[Path], features: Tensor) -> None:
    """Write what is missing or damaged. Other ranks and runs may write the same pictures at the same time."""
    for path, picture_features in zip(paths, features, strict=True):
        if _read([path]) is None:
            make_folders(path.parent)
            temporary = path.with_name(f"{path.name}.{os.getpid()}")
            temporary.write_bytes(save({"features": picture_features.contiguous()}))
            temporary.replace(path)
