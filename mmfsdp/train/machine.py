"""What this run's ranks reach here, measured on all of them at once: for the time that is predicted of a step."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from operator import attrgetter
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..estimate import Machine, estimate
from ..params import AutoWrapPolicy, FSDPParams, LaunchParams
from ..params.cluster import read_cluster
from ..plan import WrapPlan, make_plan
from ..plan.work import Operator, Shape
from ..wrap import apply_plan

ROUNDS = 5
MIB = 2**20
REPEATS = 3
BUDGET_S = 0.06
"""For a plan's operators with arithmetic, and as long for those without: a step of a small model. What is left has the
rate of those that were timed."""


def versions() -> dict[str, str]:
    """Of Python and the libraries that a step's bytes and figures depend on, by name."""
    return {name: version(name) for name in ("torch", "transformers", "open_clip_torch")} | {
        "Python": platform.python_version()
    }


def machine_here(
    launch: LaunchParams, device: torch.device, *, dtype: torch.dtype, plan: WrapPlan | None = None
) -> Machine:
    """The figures of these ranks, those of the cluster's profile before measured ones. Every rank must call it; takes
    a quarter of a second, less without a plan.

    dtype: what matrices are multiplied in. plan: CPUs have the rates that its example's operators reach, and what calls
    and collectives cost in its wrapper, since small operators stay far below what large ones reach, and the ranks' own
    cores carry the traffic. GPUs are given their work ahead and have links beside it: they have the hardware's rates.
    """
    on_gpu = device.type == "cuda"
    product, copied, gathered = (4096, 256, 64) if on_gpu else (384, 8, 4)
    x = torch.ones(product, product, device=device, dtype=dtype)
    buffer = torch.ones(copied * MIB, dtype=torch.uint8, device=device)
    other = torch.empty_like(buffer)
    seconds = {
        "product": lambda: x @ x,
        "copy": lambda: other.copy_(buffer),
        "latency": _gathering(torch.ones(64, device=device)),
        "gather": _gathering(torch.ones(gathered * MIB // 4, device=device)),
    }
    took = {name: _median(act, device) for name, act in seconds.items()}
    sent = gathered * MIB * (dist.get_world_size() - 1)
    figures = {
        "flops": 2 * product**3 / took["product"],
        "memory": 2 * buffer.nbytes / took["copy"],
        "bandwidth": max(1, sent) / max(took["gather"] - took["latency"], 1e-9),
        "latency": took["latency"],
        "overlap": on_gpu,
    }
    if plan is not None and not on_gpu:
        figures |= _reached(plan, figures) | _wrapped(plan, device)
    profile = read_cluster(launch.cluster).machine if launch.cluster else {}
    name = torch.cuda.get_device_name(device) if on_gpu else "this machine's CPU"
    return Machine(**{"efficiency": 1.0, **figures, **profile}, name=name)  # type: ignore[arg-type]


def _reached(plan: WrapPlan, figures: dict[str, float]) -> dict[str, float]:
    """What the plan's operators reach: those that take longest by the given rates first, as far as time allows."""
    few = torch.ones(4)
    call = min(_seconds(lambda: few * few) for _ in range(ROUNDS))
    kinds = {name: [op for op in plan.operators if getattr(op, name)] for name in ("flops", "moved")}
    found = {}
    for (name, ops), rate in zip(kinds.items(), ("flops", "memory"), strict=True):
        rows = _timed(ops, lambda op, name=name, rate=rate: getattr(op, name) / figures[rate])  # type: ignore[misc]
        seconds = sum(max(took - call, 0.0) * op.calls for op, took in rows)
        if seconds:  # else all are so small that calls are what they take
            found[rate] = min(figures[rate], sum(getattr(op, name) * op.calls for op, _ in rows) / seconds)
    return found


def _timed(operators: Sequence[Operator], expected: Callable[[Operator], float]) -> list[tuple[Operator, float]]:
    """Operators with the seconds of a call, those first that are expected to take longest."""
    acts: list[tuple[Operator, Callable[[], object]]] = []
    tensors: dict[Shape, torch.Tensor] = {}
    ends, each = time.perf_counter() + BUDGET_S, 0.0
    for op in sorted(operators, key=lambda op: -expected(op) * op.calls):
        if expected(op) > BUDGET_S / 10:  # so large that it reaches what the machine can
            continue
        if time.perf_counter() + REPEATS * each > ends:
            break
        args, kwargs = _given(op.args, tensors), {k: _given(v, tensors) for k, v in op.kwargs}
        act = partial(attrgetter(op.name)(torch.ops), *args, **kwargs)
        try:
            act()
        except (RuntimeError, IndexError):  # it asks for other values than shapes tell
            continue
        acts.append((op, act))
        each += _seconds(act)
    dist.barrier()
    # All in turn, so that caches hold as little of what an operator reads as in a step.
    rounds = [[_seconds(act) for _, act in acts] for _ in range(REPEATS)]
    return [(op, median(took)) for (op, _), *took in zip(acts, *rounds, strict=True)]


def _seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _given(value: Any, tensors: dict[Shape, torch.Tensor]) -> Any:
    """Arguments like those: ones, and zeros for what may be indices. tensors: made before."""
    if not isinstance(value, Shape):
        return tuple(_given(v, tensors) for v in value) if isinstance(value, tuple) else value
    if value not in tensors:
        extent = sum((n - 1) * step for n, step in zip(value.shape, value.stride, strict=True)) + 1
        fill = 1 if value.dtype.is_floating_point else 0
        flat = torch.full((max(0, extent),), fill, dtype=value.dtype)
        tensors[value] = flat.as_strided(value.shape, value.stride)
    return tensors[value]


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, tokens, width]; the same comes back."""
        heads = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads.unbind())
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def _wrapped(plan: WrapPlan, device: torch.device) -> dict[str, float]:
    """What calls and collectives take beside work and bytes, by two small layers in the plan's wrapper and without."""
    fsdp = FSDPParams(
        backend=plan.backend,
        auto_wrap_policy=AutoWrapPolicy.TRANSFORMER_BASED_WRAP,
        transformer_layer_cls=Block.__name__,
        sync_module_states=False,
    )
    plain, model = (nn.Sequential(Block(), Block()) for _ in range(2))
    layers = make_plan(model, fsdp, world_size=plan.world_size)
    collectives = sum(w.count for w in estimate(layers).wire if w.phase != "control")
    x = torch.ones(1, 4, 16)

    def passes(model: nn.Module) -> None:
        model(x).sum().backward()
        model.zero_grad()

    with _Calls() as counted:
        passes(plain)
    alone = _median(lambda: passes(plain), device)
    found = {"overhead": alone / counted.made}
    if collectives:
        wrapped = apply_plan(model, layers, device=device)
        passes(wrapped)
        found["latency"] = max(0.0, _median(lambda: passes(wrapped), device) - alone) / collectives
    return found


class _Calls(TorchDispatchMode):
    """Counts operators as a plan does: those that make something."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, got = (
            {t.untyped_storage().data_ptr() for t in tree_leaves(x) if isinstance(t, torch.Tensor)} for x in (args, out)
        )
        self.made += not got <= given
        return out


def _gathering(part: torch.Tensor) -> Callable[[], object]:
    whole = part.new_empty(part.numel() * dist.get_world_size())

    def act() -> torch.Tensor:
        dist.all_gather_into_tensor(whole, part)
        return whole.clone()  # as wrappers take a unit's parameters out of it

    return act


def _median(act: Callable[[], object], device: torch.device) -> float:
    """Seconds of an act that every rank does at the same time; the first, which warms up, is left out."""
    found = []
    for _ in range(ROUNDS + 1):
        _settled(device)
        dist.barrier()
        began = time.perf_counter()
        act()
        _settled(device)
        found.append(time.perf_counter() - began)
    return median(found[1:])


def _settled(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
