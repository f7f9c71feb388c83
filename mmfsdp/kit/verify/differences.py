"""Digests and differences of tensors, by name; digests of the generators of random numbers."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from ...core.checksums import tensor_checksum
from ...core.guards import list_all
from ...core.names import plain_name
from ...core.step import local_part
from ..models.own_kind import tensors_in

TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))
TOLERANCE = 1e-3
"""Relative difference of a gradient in fp32, above which it is another one; rounding stays below 1e-5."""
LOW_TOLERANCE = 0.05
"""TOLERANCE where ranks compute in 16 bits, and one process does not."""
SMALL = 1e-4
"""A gradient that is this small beside the whole one is compared with the whole one: it may be rounding alone."""

GENERATORS = ("Python's random", "numpy.random", "torch")
"""Generators of random numbers, in the order in which states and digests are listed."""


def digest(tensor: Tensor) -> int:
    """Return the CRC-32 of this rank's part of a tensor."""
    return tensor_checksum(local_part(tensor))


def frozen_digests(params: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Return the digest of this rank's part of each frozen parameter."""
    return {name: digest(p) for name, p in params.items() if not p.requires_grad and not p.is_meta}


def buffer_digests(model: nn.Module, *, wrapped: bool = False) -> dict[str, int]:
    """Return the digests of buffers, and of tensors that modules hold as plain attributes.

    The running statistics of batch norms are left out: each rank has its own. wrapped: attributes that begin with an
    underscore are left out, too: those of wrappers do.
    """
    digests = {}
    for name, tensor in _held(model, skip_private=wrapped):
        if not tensor.is_meta:
            digests[plain_name(name, model)] = digest(tensor)
    return digests


def _held(model: nn.Module, *, skip_private: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of each buffer and each plain attribute that is a tensor, or a list or dict of some."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if not isinstance(module, _NormBase):
            for key, buffer in module.named_buffers(recurse=False):
                yield prefix + key, buffer
        for key, value in vars(module).items():
            skipped = key in TORCH_ATTRIBUTES or (skip_private and key.startswith("_"))
            if skipped or not isinstance(value, (Tensor, list, tuple, dict)):
                continue
            for place, tensor in enumerate(tensors_in(value)):
                if not isinstance(tensor, nn.Parameter):
                    yield prefix + key + (f"[{place}]" if place else ""), tensor


def settings_of(optimizer: Optimizer) -> list[dict[str, str]]:
    """Return the settings of an optimizer's groups as text, with its class; without the parameters."""
    groups = []
    for group in optimizer.param_groups:
        settings = {"optimizer": type(optimizer).__name__}
        for key, value in group.items():
            if key not in ("params", "param_names"):
                settings[key] = f"{value.item():.6g}" if isinstance(value, Tensor) else str(value)
        groups.append(settings)
    return groups


def random_states() -> list[Any]:
    """Return the states of all generators."""
    return [random.getstate(), np.random.get_state(), torch.get_rng_state()]


def restore_random(states: list[Any]) -> None:
    """Give the generators states that `random_states` returned."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def random_digests() -> list[int]:
    """Return a CRC-32 of each generator's state, in the order of GENERATORS."""
    of_python, (name, keys, *rest), of_torch = random_states()
    parts = (repr(of_python).encode(), repr((name, keys.tolist(), *rest)).encode(), of_torch.numpy().tobytes())
    return [zlib.crc32(part) for part in parts]


def differences(ours: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Return the relative difference of each gradient of `theirs`; infinite where only one of the two has it.

    One that is small beside the whole gradient is compared with that: a bias of keys has a gradient of 0 and rounding.
    """
    norm = total_norm(theirs.values())
    found = {}
    for name, expected in theirs.items():
        got = ours.get(name)
        if expected is None or got is None:
            only_zeros = not total_norm([expected, got])  # FSDP1 has zeros where one process has none
            found[name] = 0.0 if only_zeros else float("inf")
            continue
        difference = float((got.double() - expected.double()).norm())
        found[name] = difference / max(float(expected.double().norm()), SMALL * norm, 1e-30)
    return found


def total_difference(ours: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None]) -> float:
    """Return the relative difference of a whole gradient."""
    rest = [_minus(ours.get(name), expected) for name, expected in theirs.items()]
    return total_norm(rest) / max(total_norm(theirs.values()), 1e-30)


def _minus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a.double() - b.double()


def total_norm(tensors: Iterable[Tensor | None]) -> float:
    """Return the 2-norm of all tensors together."""
    squares = [float(tensor.double().square().sum()) for tensor in tensors if tensor is not None]
    return sum(squares) ** 0.5


def rank_factors(
    ours: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None], ranks: int, tolerance: float
) -> list[float]:
    """Return the number that each rank's shards of a gradient are multiplied by; [] if they are not only scaled."""
    factors = []
    for rank in range(ranks):
        products = squares = own = 0.0
        for name, expected in theirs.items():
            got = ours.get(name)
            if expected is None or got is None or got.shape != expected.shape or not got.dim():
                continue
            a, b = got.double().chunk(ranks), expected.double().chunk(ranks)
            if rank < len(b):
                products += float((a[rank] * b[rank]).sum())
                squares += float(b[rank].square().sum())
                own += float(a[rank].square().sum())
        factor = products / squares if squares else 1.0
        if own - factor**2 * squares > (10 * tolerance) ** 2 * max(own, 1e-30):
            return []
        factors.append(factor)
    return factors


def parts(names: Iterable[str], all_names: Iterable[str]) -> str:
    """Return names in words: a module all of whose parameters are among them stands for these."""
    chosen = set(names)
    others = [name for name in all_names if name not in chosen]
    shown: dict[str, int] = {}
    for name in sorted(chosen):
        path, pieces = name, name.split(".")
        for depth in range(1, len(pieces)):
            prefix = ".".join(pieces[:depth])
            if not any(other.startswith(f"{prefix}.") for other in others):
                path = f"{prefix}.*"
                break
        shown[path] = shown.get(path, 0) + 1
    return list_all(list(shown))
