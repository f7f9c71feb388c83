"""The deck's figures, drawn from the package's own plots, plans and committed measurements."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GiB = 2**30
FROZEN_POLICIES = ("SHARD", "KEEP", "REPLICATE")


def figures() -> dict[str, str]:
    """Every figure by its name in deck.md, as one line of SVG."""
    sys.path.insert(0, str(ROOT / "notebooks"))
    from course import draw

    drawn: dict[str, Callable[[], str]] = {
        "flamingo": flamingo,
        "all_reduce": lambda: draw.collective("all-reduce"),
        "all_gather": lambda: draw.collective("all-gather"),
        "reduce_scatter": lambda: draw.collective("reduce-scatter"),
        "timeline_wait": lambda: draw.timeline(prefetch=False),
        "timeline_prefetch": lambda: draw.timeline(prefetch=True),
        "ledger_ddp": lambda: draw.ledger({"one card": _states(7e9, 1)}, limit=80),
        "ledger_fsdp": lambda: draw.ledger({"DDP": _states(7e9, 1), "FSDP, 8 ranks": _states(7e9, 8)}, limit=80),
        "media_mask": media_mask,
        "nine_billion": nine_billion,
        "waits": waits,
        "bench_bytes": lambda: measured("wire_bytes", "MB", 1e6),
        "bench_peak": lambda: measured("peak_bytes", "MB", 1e6),
        "bench_seconds": lambda: measured("seconds", "s", 1),
    }
    return {name: " ".join(draw_it().split()) for name, draw_it in drawn.items()}


def _states(parameters: float, ranks: int) -> dict[str, float]:
    sizes = {"parameters": 4, "gradients": 4, "optimizer": 8}
    return {what: parameters * size / ranks / GiB for what, size in sizes.items()}


def _planned(preset: str, **fields: Any) -> Any:
    from mmfsdp import FSDPParams, build_model, freeze, make_plan
    from mmfsdp.params import load

    params = load(preset)
    model, _ = build_model(params.model, meta=True)
    freeze(model, params.model.frozen_patterns)
    return make_plan(model, FSDPParams(**fields), world_size=8)


@cache
def _flamingo() -> Any:
    """The plan of a Flamingo of 1 billion parameters on 4 ranks, with the timeline of a step."""
    from mmfsdp.kit.train.prepare import preview
    from mmfsdp.kit.widgets.pictures.plan_pictures import timeline_of
    from mmfsdp.params import load

    params = load("clip_llama_1b").change(**{"launch.ranks": 4})
    plan, _ = preview(params)
    return plan, timeline_of(params, plan)


def flamingo() -> str:
    """What each of 4 ranks holds of a Flamingo, and one step of it on a rank, with a play head."""
    from mmfsdp.kit.widgets.pictures.plan_pictures import PLAY
    from mmfsdp.kit.widgets.pictures.play_head import PlayHead
    from mmfsdp.kit.widgets.pictures.rank_picture import WIDTH, Lanes, rank_picture
    from mmfsdp.kit.widgets.pictures.step_picture import step_picture

    plan, timeline = _flamingo()
    lanes = Lanes(plan, WIDTH)
    head = PlayHead(plan, timeline, lanes)
    ranks = rank_picture(plan, beneath=head.beneath(), above=head.above())
    words = f'<span class="mm-now"><span>{escape(head.sentence(head.fullest))}</span></span> {PLAY}'
    step = head.control(WIDTH) + step_picture(plan, timeline, head=head)
    return f'<span class="mm-plan">{ranks}{words}{step}</span>'


def nine_billion() -> str:
    """What a rank holds at rest of OpenFlamingo's 9B, by frozen policy."""
    from course import draw

    from mmfsdp import estimate

    rows = {}
    for policy in FROZEN_POLICIES:
        fields = {"frozen_policy": policy, "frozen_dtype": "bf16", "mixed_precision": "bf16"}
        memory = estimate(_planned("openflamingo_9b", **fields)).memory
        kinds = ("parameters", "gradients", "optimizer")
        rows[policy] = {kind: getattr(memory, kind) / GiB for kind in kinds}
    return draw.ledger(rows, limit=24)


def waits() -> str:
    """A step of OpenFlamingo's 9B on three numbers of GPUs, by frozen policy: compute, and exposed communication."""
    from course import draw, lessons

    rows = {name: row for name, row in lessons.waits().items() if "KEEP" not in name}
    return draw.ledger(rows, unit="ms")


def media_mask() -> str:
    """Which picture each token of a short text may see."""
    import torch
    from course import draw

    from mmfsdp.kit.models.cross_attention import media_mask as mask

    words = ["the", "<image>", "a", "cat", "<image>", "two", "dogs"]
    announced = torch.tensor([[w == "<image>" for w in words]]).cumsum(1)
    seen = mask(announced, pictures=2, latents=3, attend_all=False)[0, 0]
    return draw.grid(seen, rows=words, columns=[f"picture {p}, latent {n}" for p in (1, 2) for n in (1, 2, 3)])


def measured(key: str, unit: str, scale: float) -> str:
    """One figure of each way in the committed run of `mmfsdp bench wrap`."""
    from course import draw

    found = json.loads((ROOT / "notebooks" / "measured" / "bench_wrap_flamingo.json").read_text())
    return draw.ranking({row["way"]: row[key] / scale for row in found["rows"]}, unit=unit)
