"""Values as JSON and back to the last bit: numbers, texts, tuples, dicts with any keys, small tensors. No pickle."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch

MAPPINGS: dict[str, type[dict]] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
"""Kinds of dicts by name. JSON has texts as keys only, so a dict is written as pairs."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
}
"""Dtypes of tensors by name. A Python number holds each value of them exactly."""
CPU = torch.device("cpu")


class NotPlain(ValueError):
    """A value that JSON cannot hold. The text is its kind, such as `a function`."""


def to_json(value: Any) -> Any:
    """Return a value as JSON holds it. Raises NotPlain. A tensor on a GPU is waited for."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [to_json(each) for each in value]
    if type(value) is tuple:
        return {"tuple": [to_json(each) for each in value]}
    for name, kind in MAPPINGS.items():
        if type(value) is kind:
            return {name: [[to_json(key), to_json(each)] for key, each in value.items()]}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {"numpy": value.item(), "dtype": str(value.dtype)}
    if type(value) is torch.Tensor and str(value.dtype).removeprefix("torch.") in DTYPES:
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": value.tolist(), "dtype": dtype, "shape": list(value.shape), "device": value.device.type}
    raise NotPlain(f"a {type(value).__name__}")


def from_json(value: Any, device: torch.device = CPU) -> Any:
    """Return what `to_json` was given.

    device: of the tensors that were on a device of its type. Other tensors are on the CPU.
    """
    if isinstance(value, list):
        return [from_json(each, device) for each in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(from_json(each, device) for each in value["tuple"])
    if "tensor" in value:
        tensor = torch.tensor(value["tensor"], dtype=DTYPES[value["dtype"]]).reshape(value["shape"])
        return tensor.to(device) if value["device"] == device.type else tensor
    if "numpy" in value:
        return np.dtype(value["dtype"]).type(value["numpy"])
    ((name, pairs),) = value.items()
    return MAPPINGS[name]({from_json(key, device): from_json(each, device) for key, each in pairs})
