"""OpenFlamingo: Flamingo.wrap_fsdp as in its training loop, and its checkpoints, loaded and saved.

Source: github.com/mlfoundations/open_flamingo, `Flamingo.wrap_fsdp` and the layout of its released checkpoints.
"""

from __future__ import annotations

import gc
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.optim import Optimizer

from ...core.precision import cast_inputs
from ...core.weights import copy_from_rank0
from ..models.flamingo import Flamingo
from .layout import Exported, Layout

TABLE, NEW_TOKENS = ".table.weight", ".new_tokens.weight"


def wrap_flamingo(model: Flamingo, wrapper_kwargs: dict[str, Any], device_id: torch.device) -> None:
    """Wrap a Flamingo with FSDP1 in place; see `Flamingo.wrap_fsdp`.

    Raises ValueError for a wrapped model, or an optimizer that has its parameters already.
    """
    if any(isinstance(module, (FullyShardedDataParallel, FSDPModule)) for module in model.modules()):
        raise ValueError("wrap_fsdp: the model is wrapped already; call it once, on a model as it was built")
    own = set(model.parameters())
    for optimizer in gc.get_objects():
        if issubclass(type(optimizer), Optimizer):  # isinstance would ask lazy modules, too
            if any(p in own for group in optimizer.param_groups for p in group["params"]):
                raise ValueError(
                    "wrap_fsdp: an optimizer has the parameters already, and would update none of the new ones; "
                    "call wrap_fsdp first, then make the optimizer"
                )
    wrapper_kwargs = {"device_id": device_id, **wrapper_kwargs}
    if wrapper_kwargs.get("sync_module_states"):  # FSDP1 does it on GPUs only, and for what is in units
        copy_from_rank0(model, torch.device(device_id))
        wrapper_kwargs["sync_module_states"] = False
    names = ["vision_encoder", "perceiver"]
    for i, layer in enumerate(model.layers):
        prefix = f"language_model.{model.layers_name}.{i}"
        if layer.cross_attention is not None:
            names.append(f"{prefix}.cross_attention")
        names.append(f"{prefix}.decoder_layer")
    for name in names:
        parent, _, key = name.rpartition(".")
        # Twice, as OpenFlamingo does: FSDP1 keeps the outermost unit's parameters gathered, so it should have none.
        inner = FullyShardedDataParallel(model.get_submodule(name), **wrapper_kwargs)
        setattr(model.get_submodule(parent), key, FullyShardedDataParallel(inner, **wrapper_kwargs))
    _replicate_other_modules(model, device_id)


def _replicate_other_modules(model: nn.Module, device: torch.device) -> None:
    """Move the modules outside units to the device, and average their gradients over the ranks."""
    averaged = set()
    for name, module in list(model.named_modules()):
        if "_fsdp_wrapped_module" in name or isinstance(module, FullyShardedDataParallel):
            continue
        for p in module.parameters(recurse=False):
            if p.requires_grad and p not in averaged:  # a tied parameter has several modules
                p.register_post_accumulate_grad_hook(_average_gradient)
                averaged.add(p)
            p.data = p.data.to(device)
            # A unit's output may have another dtype than these weights.
            module.register_forward_pre_hook(partial(cast_inputs, p.dtype), with_kwargs=True)
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, buffer.to(device))


def _average_gradient(p: torch.Tensor) -> None:
    assert p.grad is not None
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()


def load_open_flamingo(model: Flamingo, path: str | Path) -> None:
    """Load a checkpoint in OpenFlamingo's layout into a model, in place, before wrapping.

    Takes names with or without `module.`; all weights or, as released, only the perceiver, the
    gated cross-attention and the embeddings, whose last rows are the new tokens'. Raises ValueError naming weights that
    are missing for these parts, that the model does not have, or whose shapes differ.
    """
    tensors = torch.load(path, map_location="cpu", weights_only=True)
    tensors = tensors.get("model_state_dict", tensors)  # a training checkpoint
    layers = f"lang_encoder.{model.layers_name}"
    checkpoint: dict[str, Tensor] = {}  # without `module.`, and without the second names of OpenFlamingo's lists
    for name, value in tensors.items():
        name = name.removeprefix("module.")
        name = re.sub(r"^lang_encoder\.gated_cross_attn_layers\.(\d+)", rf"{layers}.\1.gated_cross_attn_layer", name)
        name = re.sub(r"^lang_encoder\.old_decoder_blocks\.(\d+)", rf"{layers}.\1.decoder_layer", name)
        checkpoint[name.replace("lang_encoder.embed_out.", "lang_encoder.lm_head.")] = value  # GPT-NeoX of old

    state = model.state_dict()
    names = {name: _their_name(name) for name in state}
    parameters = {name for name, _ in model.named_parameters()}  # of tied parameters, one name
    required = set()
    for name in names:
        is_trained = name.startswith("perceiver.") or ".cross_attention." in name or name.endswith(NEW_TOKENS)
        if is_trained and name in parameters:
            required.add(names[name])
    missing = sorted(required - checkpoint.keys())
    unknown = sorted(checkpoint.keys() - set(names.values()))
    for problem, wrong in (("missing", missing), ("not in the model", unknown)):
        if wrong:
            raise ValueError(f"{path}: {problem} {', '.join(wrong[:4])}; {len(wrong)} in all")
    values = {}
    for name, their_name in names.items():
        if their_name in checkpoint:
            values[name] = _rows_of(name, state[name], checkpoint[their_name], model)
    for name, value in values.items():  # all fit: only now is the model changed
        target = state[name][: len(value)] if value.ndim else state[name]
        target.copy_(value)


def save_open_flamingo(model: Flamingo, path: str | Path) -> None:
    """Save an unwrapped model's trainable parameters and embeddings in OpenFlamingo's layout."""
    state = model.state_dict()
    trainable = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        if name.endswith(TABLE):
            new = state[name.removesuffix(TABLE) + NEW_TOKENS]
            tensors[_their_name(name)] = torch.cat((value[: model.tokens.known], new.to(value.dtype)))
        elif name in trainable and not name.endswith(NEW_TOKENS):
            tensors[_their_name(name)] = value.contiguous()
    torch.save(tensors, path)


def _write_layout(exported: Exported, to: Path) -> None:
    exported.params.to_yaml(to / "params.yaml")
    save_open_flamingo(exported.model, to / "checkpoint.pt")


OPEN_FLAMINGO = Layout(_write_layout)
"""The checkpoint of what was trained, beside the run's parameters."""


def _their_name(name: str) -> str:
    """Return OpenFlamingo's name of a weight of ours."""
    name = re.sub(r"^vision_encoder\.visual\.", "vision_encoder.", name)
    name = re.sub(r"^language_model\.", "lang_encoder.", name).replace(".cross_attention.", ".gated_cross_attn_layer.")
    return name.replace(TABLE, ".weight").replace(NEW_TOKENS, ".weight")


def _rows_of(name: str, target: Tensor, value: Tensor, model: Flamingo) -> Tensor:
    """Return the rows of a checkpoint's tensor that belong to ours: it holds known and new tokens in one table."""
    known, new = model.tokens.known, model.tokens.new
    if new and name.endswith((TABLE, NEW_TOKENS)):
        if len(value) < known + new:
            raise ValueError(f"{_their_name(name)} has {len(value)} rows; {known} tokens and {new} new ones need more")
        value = value[known : known + new] if name.endswith(NEW_TOKENS) else value[:known]
        target = target[: len(value)]
    if value.shape != target.shape:
        raise ValueError(f"{_their_name(name)} is {tuple(value.shape)}, the model's is {tuple(target.shape)}")
    return value
