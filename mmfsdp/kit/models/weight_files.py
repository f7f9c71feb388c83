"""Weights: the tensors of a model on the meta device, each read from its file or initialized when it is asked for.

So no rank holds the whole model. Which rank reads what is decided in core/shared_files.py.
"""

from __future__ import annotations

import copy
import json
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from ...core.tensor_files import InFile, TensorFiles
from ...params import ParamError
from ..data.sources.first_bytes import what_is_file
from .tokens import ExtendedEmbedding, initial_rows

FILES = ("model.safetensors", "open_clip_model.safetensors")


class Weights:
    """The tensors of a model by name: backbones' from files, new parts' initialized by their modules.

    Nothing is held. New parts depend on torch's random state at construction, and not on the
    order in which they are asked for.
    """

    def __init__(self, model: nn.Module, sources: list[TensorSource]) -> None:
        """Match sources to names by the tensors themselves, whatever was built around them since.

        Raises LookupError if a module has no `reset_parameters` to initialize it.
        """
        by_tensor = {source.tensor: source for source in sources}
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        self.dtypes = {name: t.dtype for name, t in tensors.items()}
        self.sources = {name: by_tensor[t] for name, t in tensors.items() if t in by_tensor}
        replaced = len(by_tensor) - len(self.sources)
        if replaced:
            raise LookupError(f"{replaced} tensors of the backbones were replaced by others when the model was built")
        self.new_parameters = {name for name, _ in model.named_parameters()} - self.sources.keys()
        """Names of the parameters that no file holds."""
        self.places: dict[str, InFile] = {}
        """The place of each tensor that is in a file, by which every rank can read it."""
        for name, source in self.sources.items():
            if source.value is None:
                dtype = str(self.dtypes[name]).removeprefix("torch.")
                self.places[name] = InFile(str(source.path), source.key, dtype)
        self.checksums: dict[str, int] = {}
        """CRC-32 of each frozen parameter; `apply_plan` adds them."""
        self._files = TensorFiles()
        self._seed = int(torch.randint(2**32, ()))
        self._known_tokens = {name: m.known for name, m in model.named_modules() if isinstance(m, ExtendedEmbedding)}
        self._owners: dict[str, Any] = {}
        for name in tensors.keys() - self.sources.keys():
            owner = name.rpartition(".")[0]
            module = model.get_submodule(owner)
            if not hasattr(module, "reset_parameters"):
                raise LookupError(f"{owner}: {type(module).__name__} has no reset_parameters")
            self._owners[owner] = _copy_of(module, "meta")  # as it is before wrapping

    def read(self, name: str) -> Tensor:
        """Return a tensor, on the CPU. Raises safetensors' or the system's error if its file has changed."""
        if name in self.places:
            return self._files.read(self.places[name])
        computed = self.sources[name].value if name in self.sources else None
        return self._initialized(name) if computed is None else computed

    def pop(self, name: str, /) -> Tensor:
        """Return a tensor, on the CPU, for the last time."""
        return self.read(name)

    def _initialized(self, name: str) -> Tensor:
        """Initialize the parameters of the module that owns `name`, always to the same values, and return this one."""
        owner, _, key = name.rpartition(".")
        embedding = owner.removesuffix(".new_tokens")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(self._seed ^ zlib.crc32(owner.encode()))
            module = _copy_of(self._owners[owner], "cpu")
            if embedding != owner and embedding in self._known_tokens:
                known = self.read(f"{embedding}.table.weight")[: self._known_tokens[embedding]]
                module.weight.copy_(initial_rows(known, len(module.weight)))
            elif ".lora_B." not in name:  # which begin at 0, whatever a Linear's reset_parameters does
                module.reset_parameters()
        return module._parameters[key]


@torch.no_grad()
def _copy_of(module: nn.Module, device: str, fill: float = 0) -> Any:
    """Return a shallow copy of a module with parameters and buffers of its own on another device."""
    shallow = copy.copy(module)
    for kind in ("_parameters", "_buffers"):
        tensors = {}
        for key, tensor in getattr(module, kind).items():
            tensors[key] = None if tensor is None else torch.full_like(tensor, fill, device=device)
        shallow.__dict__[kind] = tensors
    return shallow


@dataclass(frozen=True)
class TensorSource:
    """The value of one tensor of a backbone: in a file, or as computed."""

    tensor: Tensor
    """The tensor in the model, on the meta device."""
    path: Path = Path()
    key: str = ""
    """The name of the tensor in the file."""
    value: Tensor | None = None
    """The value of the tensor if no file has it."""


def tensor_sources(module: nn.Module, source: str | None, field: str) -> list[TensorSource] | None:
    """Return the source of each tensor of a backbone in the safetensors files of a folder or hub name.

    The files may use transformers' or open_clip's names. Returns None if they do not have all tensors by these names,
    so that only the library can load them. Raises ParamError naming a damaged file, or a tensor of another shape.
    """
    stored = _stored_tensors(source, field)
    computed = _computed_buffers(module)
    if computed is None:
        return None
    file_keys = _file_keys(module, stored)
    names: dict[Tensor, list[str]] = {}  # a tied tensor has several, and a file may have any one of them
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(tensor, []).append(name)
    for removed, added in _prefixes(module, file_keys):
        sources = []
        for tensor, tensor_names in names.items():
            renamed = [added + name.removeprefix(removed) for name in tensor_names]
            keys = [file_keys[name] for name in renamed if name in file_keys]
            sources += [TensorSource(tensor, stored[key][0], key) for key in keys][:1]
        if len(sources) == len(names):
            for found in sources:
                shape = tuple(stored[found.key][1])
                if shape != found.tensor.shape:
                    shapes = f"{shape} in {found.path} and {tuple(found.tensor.shape)} in the model"
                    raise ParamError(f"{field}.config", f"{found.key} is {shapes}; correct config or remove it")
            return computed + sources
    return None


def no_tensor_sources(places: Mapping[str, str | None]) -> bool:
    """Return True if `tensor_sources` is known to return None for one of several backbones, before any is built.

    Hub names are not looked up. Raises ParamError naming a damaged file of any of them, as `tensor_sources` does.

    places: the folder or hub name of each backbone's weights, by its field.
    """
    if not any(map(_is_without_files, places.values())):
        return False
    for field, source in places.items():
        _stored_tensors(source, field)
    return True


def _is_without_files(source: str | None) -> bool:
    is_hub_name = source is not None and "/" in source and not Path(source).is_dir()
    return not is_hub_name and not _files(source)


def _stored_tensors(source: str | None, field: str) -> dict[str, tuple[Path, list[int]]]:
    """Return the file and the shape of each tensor in safetensors files, by the name that it has there."""
    stored: dict[str, tuple[Path, list[int]]] = {}
    for path in _files(source):
        try:
            with safe_open(path, "pt") as file:
                for key in file.keys():
                    stored[key] = (path, file.get_slice(key).get_shape())
        except (SafetensorError, OSError) as error:
            known = what_is_file(path) if path.is_file() else ""
            words = known or f"is not complete or not readable ({error})"
            raise ParamError(f"{field}.weights", f"{path} {words}") from None
    return stored


def _files(source: str | None) -> list[Path]:
    """Return the safetensors files of a folder, or of a hub name, which is downloaded once; without any, none."""
    if not source:
        return []
    folder = Path(source)
    if not folder.is_dir() and "/" in source:
        try:
            folder = Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors"]))
        except (OSError, ValueError):  # no name of the hub
            return []
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in sorted(set(shards))]
    return [folder / name for name in FILES if (folder / name).is_file()][:1]


def _file_keys(module: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """Return the key of each tensor in the files by the name that transformers gives it when it loads them.

    Files keep the names that a family was released with (Qwen2.5-VL: visual.blocks...), models have other ones.
    """
    renamings = []
    if isinstance(module, PreTrainedModel):
        # Those that only rename: a tensor that others make up, such as an expert's, is then found under no name.
        renamings = [step for step in get_model_conversion_mapping(module) if type(step).__name__ != "WeightConverter"]
    keys = {}
    for key in stored:
        name = key
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        keys[name] = key
    return keys


def _prefixes(module: nn.Module, stored: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (prefix to remove from the module's names, prefix to add) that may lead to a file's names."""
    yield "", ""
    base = getattr(module, "base_model_prefix", "")
    if base:
        yield f"{base}.", ""
    first = next(iter(module.state_dict()), "")
    for key in stored:
        if key.endswith(f".{first}"):
            yield "", key.removesuffix(first)


def _computed_buffers(module: nn.Module) -> list[TensorSource] | None:
    """Return the buffers that files do not hold, as transformers computes them; None if it does not compute one."""
    saved, sources = set(module.state_dict()), []
    for name, buffer in module.named_buffers():
        if name in saved:
            continue
        if not isinstance(module, PreTrainedModel):
            return None
        owner, _, key = name.rpartition(".")
        around = owner  # the innermost model of transformers around the buffer: it is the one that initializes it
        while not isinstance(module.get_submodule(around), PreTrainedModel):
            around = around.rpartition(".")[0]
        # Filled with two different values: a buffer that is then the same was computed.
        copies = [_copy_of(module.get_submodule(owner), "cpu", fill) for fill in (0, 1)]
        for shallow in copies:
            module.get_submodule(around)._init_weights(shallow)  # type: ignore[operator]
        from_zeros, from_ones = copies[0]._buffers[key], copies[1]._buffers[key]
        if not torch.equal(from_zeros, from_ones):
            return None
        sources.append(TensorSource(buffer, value=from_zeros))
    return sources


def make_readable(folder: Path) -> None:
    """Give the weights below a folder the permissions of its JSON files: safetensors makes them private."""
    json_file = next(folder.rglob("*.json"))
    for path in folder.rglob("*.safetensors"):
        shutil.copymode(json_file, path)
