"""Several ranks on one GPU, by nccl where it can (2.30): they train, and send and hold what was predicted."""

from __future__ import annotations

import json
from typing import Any

import torch

from mmfsdp.kit.spawn_ranks import on_ranks
from tests.bench.gpu.device import BACKEND, ON_GPU
from tests.bench.gpu.rows import Rows
from tests.bench.gpu.works import KEEP, write_on_rank0

BF16 = {"mixed_precision": "bf16"}
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "FSDP2, 2 ranks": BF16,
        "FSDP2 KEEP, 2 ranks": {**KEEP, **BF16},
        "DDP, 2 ranks": {"backend": "DDP", **BF16},
        "FSDP1, 2 ranks": {"backend": "FSDP1", **BF16},
    },
    4: {"FSDP2, 2 x 2 ranks": {"sharding_strategy": "HYBRID_SHARD", "dp_shard": 2, **BF16}},
}
"""FSDP fields by number of ranks and name."""


def several(rows: Rows) -> None:
    """Write a row for each case: bytes that were sent, and the peak of the first rank."""
    if torch.cuda.device_count() > 1:  # `works` has them, a GPU each
        rows.write({"way": "several ranks", "left out": "each rank has a GPU of its own here"})
        return
    for ranks, cases in CASES.items():
        if not ON_GPU:
            cases = dict(list(cases.items())[:1])
        rows.attempt({"way": f"{ranks} ranks join"}, lambda ranks=ranks, cases=cases: join(rows, ranks, cases))
    rows.failed = any("failed" in json.loads(line) for line in rows.path.read_text().splitlines())


def join(rows: Rows, ranks: int, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Write the rows of cases, on ranks of their own."""
    arguments = str(rows.path), cases, rows.seconds_left
    on_ranks(write_on_rank0, ranks, *arguments, method="spawn", backend=BACKEND, share_gpus=True)
    return {"cases": len(cases)}
