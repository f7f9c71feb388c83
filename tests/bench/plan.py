"""`python -m tests.bench.plan`: how long planning takes a core."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from mmfsdp.params import RunParams, load
from tests.bench import timings

table = timings
LLAMA_70B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
CASES = {
    "tiny on 2 ranks": ("tiny", 2, {}),
    "9B Flamingo on 64 ranks": ("openflamingo_9b", 64, {}),
    "70B Flamingo on 4,096 ranks": (
        "openflamingo_9b",
        4096,
        {"model.language.config": LLAMA_70B, "model.decoder_layers": "model.layers"},
    ),
}


def bench_plan(*, rounds: int = 3) -> list[dict[str, Any]]:
    """CPU seconds of this process, which imports and builds before it measures: for the plan with its estimate; with an
    example's activations that are counted anew; and with those of an example that was counted before."""
    found = []
    for name, (preset, ranks, changes) in CASES.items():
        acts = _acts(load(preset).change(**{"launch.ranks": ranks, **changes}))
        for act in acts.values():
            act()
        took: dict[str, list[float]] = {what: [] for what in acts}
        for _ in range(rounds):
            for what, act in acts.items():
                began = time.process_time()
                act()
                took[what].append(time.process_time() - began)
        found += [{"what": f"{name}: {w}", "seconds": median(s), "most": max(s)} for w, s in took.items()]
    return found


def _acts(params: RunParams) -> dict[str, Callable[[], Any]]:
    from mmfsdp.core.planner import with_memory_events
    from mmfsdp.train.preview import cost_of, example_of, frozen_model, plan_of, preview

    model = frozen_model(params.model)
    plan = plan_of(model, params)
    return {
        "plan and estimate": lambda: cost_of(plan_of(model, params), params),
        "with activations, first": lambda: cost_of(with_memory_events(model, plan, example_of(model, params)), params),
        "with activations, again": lambda: preview(params),
    }


if __name__ == "__main__":
    print(table(bench_plan()))
