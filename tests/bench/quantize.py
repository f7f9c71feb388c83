"""`python -m tests.bench.quantize`: what frozen matrices in int8 and nf4 cost and save, beside bf16.

Relative errors of layers' outputs and of the loss; time to dequantize.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmfsdp.core.freeze import freeze
from mmfsdp.core.quantize import dequantize, matrices, quantize, quantize_model
from mmfsdp.kit.bench.bench_models import flamingo_batch, model_params, random_model
from mmfsdp.kit.data.open_sources import open_source
from mmfsdp.kit.models.build import build_model
from mmfsdp.kit.shapes.pretrain import ensure_backbones
from mmfsdp.params import FrozenDtype, FSDPParams, load

FORMS = ("bf16", "int8", "nf4")


def demo() -> tuple[nn.Module, dict[str, Any]]:
    """Return the demo's model with its pretrained backbones, and a batch of pictures that training does not show."""
    params = load("tiny")
    ensure_backbones(params)
    model, processor = build_model(params.model)
    assert processor is not None
    freeze(model, params.model.frozen_patterns)
    for name, p in model.named_parameters():
        if name.endswith("_gate"):
            p.data.fill_(0.5)  # at 0 nothing of the pictures would reach the loss
    samples = iter(open_source(params.data, split="heldout", image_size=processor.image_size, seed=0))
    return model, processor([next(samples) for _ in range(32)]).inputs()


def errors(model: nn.Module, inputs: dict[str, Any], form: str) -> tuple[list[float], float]:
    """Return the relative errors of each quantized layer's output on its own inputs, and of the loss."""
    rounded = copy.deepcopy(model)
    names = {name.rpartition(".")[0] for name, _, _ in matrices(model, FSDPParams(frozen_dtype="nf4"))}
    if form == "bf16":
        for name in names:
            for p in rounded.get_submodule(name).parameters():
                p.data = p.data.bfloat16().float()
    quantize_model(rounded, FSDPParams(frozen_dtype=form))
    found: list[float] = []

    def compare(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        exact = whole(out)
        found.append(float((whole(module.rounded[0](*args, **kwargs)) - exact).norm() / exact.norm()))

    def whole(out: Any) -> torch.Tensor:
        return out[0] if isinstance(out, tuple) else out

    hooks = []
    for name in names:
        module = model.get_submodule(name)
        module.rounded = [rounded.get_submodule(name)]  # in a list: no module of its own
        hooks.append(module.register_forward_hook(compare, with_kwargs=True))
    with torch.no_grad():
        exact = model(**inputs).loss
        for hook in hooks:
            hook.remove()
        loss = rounded(**inputs).loss
    return found, float(abs(loss - exact) / exact)


def seconds(rows: int, columns: int, tokens: int, device: torch.device, rounds: int = 15) -> dict[str, float]:
    """Return the median seconds to dequantize a matrix to bf16, and of a product with it; measured in turn."""
    matrix = torch.randn(rows, columns, device=device).bfloat16()
    x = torch.randn(tokens, columns, device=device).bfloat16()
    works: dict[str, Callable[[], Any]] = {"product": lambda: nn.functional.linear(x, matrix)}
    for form in (FrozenDtype.INT8, FrozenDtype.NF4):
        its_format = form.load()
        codes = quantize(matrix, its_format)
        works[form.value] = partial(dequantize, *codes, columns, torch.bfloat16, its_format)
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def check_same_codes(device: torch.device) -> None:
    """Raise AssertionError unless a GPU makes the codes and scales that the CPU makes, bit by bit."""
    matrix = torch.randn(4096, 4128, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for form in (FrozenDtype.INT8, FrozenDtype.NF4):
            on_cpu, on_gpu = quantize(matrix.to(dtype), form.load()), quantize(matrix.to(device, dtype), form.load())
            for expected, found in zip(on_cpu, on_gpu, strict=True):
                assert torch.equal(expected, found.cpu()), f"{form} of {dtype}: the GPU rounds otherwise"


def measure() -> dict[str, Any]:
    """Return the two tables: rows of errors, and of seconds on this machine."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    check_same_codes(device)
    result: dict[str, Any] = {"where": where, "torch": torch.__version__, "errors": [], "seconds": []}
    larger = random_model(model_params()), flamingo_batch(seed=0).inputs()
    for name, (model, inputs) in {"the demo's backbones": demo(), "52.7 M random weights": larger}.items():
        for form in FORMS:
            layers, loss = errors(copy.deepcopy(model), inputs, form)
            row = {"model": name, "format": form, "median layer": statistics.median(layers), "worst layer": max(layers)}
            result["errors"].append(row | {"loss": loss})
    # A layer of a 1B and one of a 7B model; on a CPU the products of these would take minutes.
    for rows, columns in ((2048, 2048), (4096, 11008)) if device.type == "cuda" else ((1024, 1024),):
        for tokens in (64, 2048):
            times = seconds(rows, columns, tokens, device)
            row = {"matrix": f"{rows} x {columns}", "tokens": tokens, "product ms": times["product"] * 1e3}
            result["seconds"].append(row | {form: times[form] / times["product"] for form in FORMS[1:]})
    return result


def tables(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    titles = {
        "errors": "Relative error of the output of layers, each on its own inputs, and of the loss:",
        "seconds": f"Time of a product in bf16 and, as a share of it, of dequantizing its matrix "
        f"({result['where']}, torch {result['torch']}):",
    }
    lines = []
    for key, title in titles.items():
        names = list(result[key][0])
        lines += [title, "", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
        for row in result[key]:
            cells = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Print the two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result to this file, too")
    choices = parser.parse_args()
    result = measure()
    if choices.json:
        choices.json.write_text(json.dumps(result, indent=1) + "\n")
    print(tables(result))


if __name__ == "__main__":
    main()
