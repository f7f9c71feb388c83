"""`python -m tests.bench.published`: predict what others have measured, and write notebooks/reference/published.md.

The measurements are in tests/files/published.yaml. Models are on the meta device; no GPU is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from mmfsdp.core.plan import WrapPlan
from mmfsdp.params import FSDPParams, TrainParams
from mmfsdp.planning import make_plan
from mmfsdp.predict import Times, estimate, machine_of, step_time

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "notebooks" / "reference" / "published.md"
DATA = yaml.safe_load((ROOT / "tests" / "files" / "published.yaml").read_text())
Row = dict[str, Any]
LORA_TARGETS = {
    64: ["q_proj", "k_proj", "v_proj", "up_proj", "down_proj", "gate_proj"],
    16: ["q_proj", "k_proj", "v_proj"],
}
"""Matrices beside which LoRA trains, by its rank: fsdp_qlora's and torchtune's."""


def model_of(row: Row) -> nn.Module:
    """Return the model of a measurement, without weights; with LoRA, all else is frozen."""
    sizes = {"model_type": "llama", "use_cache": False} | DATA["sizes"][row["model"]]
    config = AutoConfig.for_model(**sizes)
    with torch.device("meta"):
        dtype = getattr(torch, row.get("weights", "bfloat16"))
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if "lora" in row:
            lora = LoraConfig(r=row["lora"], target_modules=lora_targets(row), lora_dropout=0.0)
            model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    return model


def lora_targets(row: Row) -> list[str] | str:
    """Return the matrices beside which LoRA trains."""
    return row.get("targets") or LORA_TARGETS[row["lora"]]


def train_of(row: Row) -> TrainParams:
    """Return the step of a measurement."""
    return TrainParams(device="cuda", accumulation=row.get("accumulation", 1))


def plan_of(row: Row) -> WrapPlan:
    """Return the plan of a measurement."""
    fields = {"mixed_precision": "bf16", "activation_checkpointing": row["checkpointing"], **row.get("fsdp", {})}
    ids = torch.zeros(row["batch"], row["length"], dtype=torch.long)
    example = {"input_ids": ids, "labels": ids}
    return make_plan(model_of(row), FSDPParams(**fields), world_size=row["gpus"], example=example)


def predicted_memory(row: Row) -> float:
    """Return the predicted peak in GiB."""
    peak = estimate(plan_of(row), TrainParams(device="cuda")).peak_bytes
    assert peak
    return peak / 2**30


def predicted_times(row: Row) -> Times:
    """Return the predicted time of a step."""
    machine = machine_of(row["machine"], row.get("figures"))
    return step_time(plan_of(row), train_of(row), machine=machine)


def published_seconds(row: Row) -> float:
    """Return the seconds of a step that a throughput in tokens a second and GPU means."""
    return row["batch"] * row["length"] * row.get("accumulation", 1) / row["published"]


def settings(row: Row) -> str:
    """Return what is known of a measurement, in words."""
    words = [row["model"]]
    if "lora" in row:
        words.append(f"LoRA of rank {row['lora']}" + (" on all matrices" if "targets" in row else ""))
    words.append(f"{row['gpus']} GPUs" if row["gpus"] > 1 else "1 GPU")
    tokens = f"{row['batch']} x {row['length']} tokens"
    words.append(f"{tokens}, {row['accumulation']} micro-steps" if "accumulation" in row else tokens)
    words.append(f"checkpointing {row['checkpointing']}")
    words += [str(value) for value in row.get("fsdp", {}).values() if isinstance(value, str)]
    return ", ".join(words)


def source(row: Row) -> str:
    """Return a link to the source, with its date."""
    found = DATA["sources"][row["source"]]
    return f"[{found['name']}]({found['url']}), {found['date']}"


def memory_rows() -> list[list[str]]:
    """Return a row of cells for each measurement of memory."""
    rows = []
    for row in DATA["memory"]:
        ours = predicted_memory(row)
        difference = f"{ours / row['published'] - 1:+.0%}"
        cells = [
            source(row),
            settings(row),
            row["assumed"],
            f"{row['published']} {row['kind']}",
            f"{ours:.2f}",
            difference,
        ]
        rows.append(cells)
        print(*cells[1:], sep=" | ", flush=True)
    return rows


def seconds_rows() -> list[list[str]]:
    """Return a row of cells for each measurement of throughput."""
    rows = []
    for row in DATA["seconds"]:
        times, theirs = predicted_times(row), published_seconds(row)
        ours = f"{times.overlapped:.2f} to {times.slowest:.2f}"
        cells = [
            source(row),
            f"{settings(row)}, {row['machine']}",
            row["assumed"],
            str(row["published"]),
            f"{theirs:.2f}",
            ours,
        ]
        rows.append(
            [*cells, f"{theirs / times.overlapped:.2f}", f"{times.usual:.2f}", f"{times.usual / theirs - 1:+.0%}"]
        )
        print(*rows[-1][1:], sep=" | ", flush=True)
    return rows


def table(titles: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def replaced(page: str, name: str, text: str) -> str:
    """Return the page with a text between its marks of that name."""
    begin, end = f"<!-- bench: {name} -->\n", "<!-- bench end -->"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + text + end + after


def main() -> None:
    """Write both tables into the page."""
    page = PAGE.read_text()
    titles = ["source", "settings known", "assumed", "published GiB", "predicted GiB", "difference"]
    page = replaced(page, "memory", table(titles, memory_rows()))
    titles = [
        "source",
        "settings known",
        "assumed",
        "published tokens/s",
        "that is s",
        "predicted s",
        "published / lower end",
        "one number",
        "its error",
    ]
    page = replaced(page, "seconds", table(titles, seconds_rows()))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
