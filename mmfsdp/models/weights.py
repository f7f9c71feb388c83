"""Weights: what the tensors of a model on the meta device are to hold, each read or made only when it is asked for."""

from __future__ import annotations

import copy
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..params import ParamError
from . import hub
from .tokens import ExtendedEmbedding, first_rows

_FILES = ("model.safetensors", "open_clip_model.safetensors")


@dataclass(frozen=True)
class Origin:
    """What one tensor of a backbone is to hold."""

    tensor: Tensor
    """On the meta device, in the model."""
    path: Path = Path()
    key: str = ""
    """Where it is in a file."""
    value: Tensor | None = None
    """What it holds where no file has it."""


def origins(module: nn.Module, source: str | None, field: str) -> list[Origin] | None:
    """Where a backbone's tensors are in the safetensors files of a folder or hub name, by transformers' or open_clip's
    names; None where they are not all there by these names: then only their own loaders know.

    Raises ParamError naming a damaged file, or a tensor of another shape than the module's.
    """
    keys: dict[str, tuple[Path, list[int]]] = {}
    for path in _files(source):
        try:
            with safe_open(path, "pt") as file:
                keys |= {key: (path, file.get_slice(key).get_shape()) for key in file.keys()}
        except (SafetensorError, OSError) as error:
            if path.exists() and not os.access(path, os.R_OK):  # safetensors says that it is not there
                raise ParamError(f"{field}.weights", f"{path} is closed to you; ask its owner: chmod a+r") from None
            raise ParamError(f"{field}.weights", f"{path} is not whole ({error}); fetch it again") from None
    names: dict[Tensor, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(tensor, []).append(name)
    rest = _not_saved(module)
    for before, after in _renamings(module, keys):
        found = {t: next((k for n in called if (k := after + n.removeprefix(before)) in keys), "")
                 for t, called in names.items()}  # fmt: skip
        if rest is not None and all(found.values()):
            return rest + [_in_file(t, key, *keys[key], field=field) for t, key in found.items()]
    return None


def _files(source: str | None) -> list[Path]:
    folder = Path(source or "")
    if source and not folder.is_dir() and "/" in source:  # a hub name, downloaded once; what is none has no such files
        wanted = ["*.json", "*.safetensors"]
        try:
            folder = Path(snapshot_download(source, allow_patterns=wanted, local_files_only=not hub.answers()))
        except (OSError, ValueError):
            return []
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    return [path for name in _FILES if source and (path := folder / name).is_file()][:1]


def _renamings(module: nn.Module, keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Prefixes to take off the module's names and to put before them, so that they may be a file's."""
    yield "", ""
    if base := getattr(module, "base_model_prefix", ""):
        yield f"{base}.", ""
    first = next(iter(module.state_dict()), "")
    yield from (("", key.removesuffix(first)) for key in keys if key.endswith(f".{first}"))


def _in_file(tensor: Tensor, key: str, path: Path, shape: list[int], *, field: str) -> Origin:
    if tuple(shape) != tensor.shape:
        found = f"{key} is {tuple(shape)} in {path} and {tuple(tensor.shape)} in the model"
        raise ParamError(f"{field}.config", f"{found}; correct config or remove it")
    return Origin(tensor, path, key)


def _not_saved(module: nn.Module) -> list[Origin] | None:
    """Buffers that files leave out, as transformers computes them; None where nobody says how."""
    saved, found = set(module.state_dict()), []
    for name, buffer in module.named_buffers():
        if name in saved:
            continue
        owner, _, leaf = name.rpartition(".")
        if not isinstance(module, PreTrainedModel):
            return None
        one, other = (_shell(module.get_submodule(owner), "cpu", fill) for fill in (0, 1))
        for shell in (one, other):
            module._init_weights(shell)
        if not torch.equal(one._buffers[leaf], other._buffers[leaf]):  # type: ignore[arg-type]
            return None
        found.append(Origin(buffer, value=one._buffers[leaf]))
    return found


@torch.no_grad()
def _shell(owner: nn.Module, device: str, fill: float = 0) -> Any:
    """A copy of a module with tensors of its own on another device."""
    shell = copy.copy(owner)
    for kind in ("_parameters", "_buffers"):
        own = getattr(owner, kind).items()
        shell.__dict__[kind] = {k: t if t is None else torch.full_like(t, fill, device=device) for k, t in own}
    return shell


class Weights:
    """The tensors of a model by name: backbones' from files, new parts' made as their modules make them.

    Nothing is held but what is being made. New parts depend on torch's random state now, and not on who asks first.
    """

    def __init__(self, model: nn.Module, known: list[Origin]) -> None:
        """known: by the tensors themselves, whatever was built around them since. Raises LookupError where a module
        does not say how its tensors begin."""
        by_tensor = {origin.tensor: origin for origin in known}
        like = dict(model.named_parameters()) | dict(model.named_buffers())
        self.dtypes = {name: t.dtype for name, t in like.items()}
        self.origins = {name: by_tensor[t] for name, t in like.items() if t in by_tensor}
        if lost := len(by_tensor) - len(self.origins):
            raise LookupError(f"{lost} tensors of the backbones were replaced by others when the model was built")
        self.made = {n for n, _ in model.named_parameters()} - self.origins.keys()
        """Parameters that no file holds."""
        self.checksums: dict[str, int] = {}
        """CRC-32 of each tensor that was popped."""
        owners = {name.rpartition(".")[0] for name in like.keys() - self.origins.keys()}
        self._owners = {
            name: _shell(model.get_submodule(name), "meta") for name in owners
        }  # as they are before wrapping
        self._tables = {n: m.known for n, m in model.named_modules() if isinstance(m, ExtendedEmbedding)}
        self._siblings: dict[str, Tensor] = {}
        self._seed = int(torch.randint(2**32, ()))
        for name, owner in self._owners.items():
            if not hasattr(owner, "reset_parameters"):
                raise LookupError(f"{name}: {type(owner).__name__} has no reset_parameters")

    def read(self, name: str) -> Tensor:
        """A tensor, on the CPU. Raises ParamError where its file cannot be read."""
        origin = self.origins.get(name)
        if origin is None:
            return self._made(name)
        if origin.value is not None:
            return origin.value
        try:
            with safe_open(origin.path, "pt") as file:
                return file.get_tensor(origin.key).to(self.dtypes[name], copy=True)  # out of the file's mapped memory
        except (SafetensorError, OSError) as error:
            raise ParamError("model", f"{origin.key} cannot be read from {origin.path} ({error})") from None

    def pop(self, name: str, default: object = None) -> Tensor:
        """A tensor, on the CPU, for the last time."""
        tensor = self.read(name).contiguous()
        self._siblings.pop(name, None)
        self.checksums[name] = zlib.crc32(tensor.view(-1).view(torch.uint8).numpy().data)
        return tensor

    def _made(self, name: str) -> Tensor:
        parent = name.rpartition(".")[0]
        if name not in self._siblings:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(self._seed ^ zlib.crc32(parent.encode()))
                shell = _shell(self._owners[parent], "cpu")
                around = parent.removesuffix(".new_tokens")
                if around != parent and around in self._tables:
                    known = self.read(f"{around}.table.weight")[: self._tables[around]]
                    shell.weight.copy_(first_rows(known, len(shell.weight)))
                elif ".lora_B." not in name:  # which begin at 0, whatever a Linear does
                    shell.reset_parameters()
            self._siblings |= {f"{parent}.{key}": t for key, t in shell._parameters.items() if t is not None}
        return self._siblings[name]
