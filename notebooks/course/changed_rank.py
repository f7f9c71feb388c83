"""`python -m course.changed_rank POLICY`: one rank of `course.changed.measure`, with the package first on the path."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch.distributed as dist

from mmfsdp import FSDPParams, make_plan, wrap_fsdp
from mmfsdp.kit.train.meters import Collectives

from .proof import planned_bytes
from .toys import pictures_and_texts, uneven_vlm


def main(policy: str) -> None:
    """Train two steps; rank 0 prints the result as JSON."""
    dist.init_process_group("gloo")
    example = pictures_and_texts(0)

    def plan_of(name: str, **fields: Any) -> Any:
        params = FSDPParams(frozen_policy=name, **fields)
        return make_plan(uneven_vlm(), params, world_size=dist.get_world_size(), example=example)

    def gathers(name: str, **fields: Any) -> dict[str, int]:
        return {unit.name: unit.gathers_backward for unit in plan_of(name, **fields).units if unit.frozen_policy}

    backward = {name: gathers(name) for name in dict.fromkeys(("SHARD", "KEEP", policy))}
    model = wrap_fsdp(uneven_vlm(), FSDPParams(frozen_policy=policy), example=example)
    for _ in range(2):
        with Collectives() as counted:
            model(**pictures_and_texts(dist.get_rank())).backward()
    measured = {f"{row.kind}, {row.phase}": row.wire_bytes for row in counted.rows()}
    result = {"predicted": planned_bytes(plan_of(policy)), "measured": measured, "backward": backward}
    result["in_bf16"] = gathers(policy, mixed_precision="bf16")
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
