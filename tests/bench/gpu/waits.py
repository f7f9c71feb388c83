"""Count what makes the host wait for the GPU in a training step."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import masking_utils

from mmfsdp.core.plan import WrapPlan
from mmfsdp.core.step import train_step
from mmfsdp.core.wrap import apply_plan
from mmfsdp.kit.bench.bench_models import copy_to
from mmfsdp.kit.train.optimizer import build_optimizer, build_scaler
from mmfsdp.params import TrainParams
from tests.bench.gpu.device import DEVICE, ON_GPU, synchronize
from tests.bench.gpu.flamingo import plan_of, quantized, small_batch, small_model
from tests.bench.gpu.rows import Rows

BF16 = {"mixed_precision": "bf16"}
KEEP = {"frozen_policy": "KEEP", "sharding_strategy": "SHARD_GRAD_OP"}
FORMS: dict[str, dict[str, Any]] = {
    "bf16": BF16,
    "fp16": {"mixed_precision": "fp16"},
    "int8": quantized("int8"),
    "nf4": quantized("nf4"),
}
MORE: dict[str, dict[str, Any]] = {
    "bf16 KEEP": {**BF16, **KEEP},
    "bf16 REPLICATE": {**BF16, "frozen_policy": "REPLICATE"},
    "bf16 recomputed": {**BF16, "activation_checkpointing": "all"},
    "bf16 DDP": {**BF16, "backend": "DDP"},
    "bf16 FSDP1": {**BF16, "backend": "FSDP1"},
}
SYNC_MESSAGE = "called a synchronizing CUDA operation"
"""torch's warning under `set_sync_debug_mode` (c10/cuda/CUDAFunctions.cpp)."""
PACKAGES = ("mmfsdp", "transformers", "open_clip")
SLEEP_CYCLES = 600_000_000
"""Cycles of the GPU's clock, about a third of a second: longer than the host takes to issue a step of a small model."""


def waits(rows: Rows) -> None:
    """Write a row for each way to train, for the formats also one with two micro-batches; and one with a mask."""
    cases = []
    for way, fields in FORMS.items():
        cases += [(way, fields, 1, False), (way, fields, 2, False)]
    cases.append(("bf16", BF16, 1, True))
    for way, fields in MORE.items():
        cases.append((way, fields, 1, False))
    if not ON_GPU:  # nothing waits here: it only has to run
        cases = [case for case in cases if case[0] in ("fp16", "nf4") and case[2] == 2]
    plans: dict[tuple[str, bool], WrapPlan] = {}
    for way, fields, accumulation, mask in cases:
        about = {"way": way, "micro-batches": accumulation, "mask": mask}
        if (way, mask) not in plans:
            plans[way, mask] = plan_of(small_model(), small_batch(mask=mask), fields)
        rows.attempt(about, partial(waits_of, plans[way, mask], accumulation, mask=mask))


def waits_of(plan: WrapPlan, accumulation: int, *, mask: bool) -> dict[str, Any]:
    """Return how often the host waits in a step: by torch's debug mode, and by whether it was done before the GPU."""
    batches = [small_batch(mask=mask)] * accumulation
    model = apply_plan(copy_to(small_model(), DEVICE), plan, device=DEVICE)
    optimizer, schedule = build_optimizer(model, TrainParams())
    scaler = build_scaler(model)

    def step() -> None:
        train_step(model, batches, optimizer, schedule=schedule, max_grad_norm=1.0, scaler=scaler)

    for _ in range(2):  # the first step checks the loss, makes the optimizer's states, compiles kernels
        step()
    synchronize()
    with noted_waits() as places:  # all of them: in the mode "error" the first would hide the others
        step()
    row = counts(places)
    if mask:  # transformers reads it, whatever we do
        return row
    with without_reads_of_transformers():
        return row | issued_ahead(step, plan.kernels * accumulation, is_clean=not row["waits of mmfsdp"])


@contextmanager
def without_reads_of_transformers() -> Iterator[None]:
    """Leave out the one value that transformers reads in each forward without a mask: whether samples are packed."""
    find = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


def issued_ahead(step: Callable[[], None], operators: int, *, is_clean: bool) -> dict[str, Any]:
    """Return whether the host is done with a step before the GPU begins it; raise at a wait where none was found."""
    if is_clean:
        with debug_mode("error"):
            step()  # raises at the first wait
    # The debug mode does not see copies by pageable memory, nor collectives. But a step of more than about a thousand
    # kernels fills the queue of launches, and then the host waits for that; so does FSDP1 before a third all-gather.
    # The first time, pinned memory for copies that all wait at once is still to be had from the driver, which may wait.
    is_done_before_gpu(step)
    return {"done before the GPU": is_done_before_gpu(step), "operators": operators}


def counts(places: Counter[str]) -> dict[str, Any]:
    """Return how many waits are ours, how many are not, and where they are."""
    ours = sum(count for place, count in places.items() if place.startswith("mmfsdp/"))
    row: dict[str, Any] = {"waits of mmfsdp": ours, "waits of others": sum(places.values()) - ours}
    return row | {"places": dict(places)} if places else row


@contextmanager
def noted_waits() -> Iterator[Counter[str]]:
    """Count, by place, the operations inside that make the host wait for the GPU, as far as torch knows them."""
    places: Counter[str] = Counter()

    def note(message: Any, category: Any, filename: str, line: int, *_: Any) -> None:
        if SYNC_MESSAGE in str(message):
            places[place_of(f"{filename}:{line}")] += 1

    with debug_mode("warn"), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # type: ignore[assignment]
        yield places


def place_of(last: str) -> str:
    """Return the last line of ours, or of a package that we call, on the stack; `last` if there is none.

    What waits in backward is told after it, so its place is the call of backward.
    """
    for frame in reversed(traceback.extract_stack()):
        for package, folder in package_folders().items():
            path = Path(frame.filename)
            if path.is_relative_to(folder):
                return f"{package}/{path.relative_to(folder)}:{frame.lineno} {(frame.line or '')[:80]}"
    return last


@cache
def package_folders() -> dict[str, Path]:
    """Return where PACKAGES are."""
    folders = {}
    for name in PACKAGES:
        spec = find_spec(name)
        assert spec and spec.origin
        folders[name] = Path(spec.origin).parent
    return folders


@contextmanager
def debug_mode(mode: str) -> Iterator[None]:
    """Have torch warn of what waits for the GPU, or raise."""
    if not ON_GPU:
        yield
        return
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def is_done_before_gpu(work: Callable[[], object]) -> bool:
    """Return whether the host has done the work while the GPU, busy with something long before it, has not begun."""
    if not ON_GPU:
        work()
        return True
    synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    slept = torch.cuda.Event()
    slept.record()
    work()
    done_before = not slept.query()
    synchronize()
    return done_before
