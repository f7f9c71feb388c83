"""What learners answer to each exercise: tests/files/answers.yaml and clinic_answers.yaml; here what only Python can
write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from mmfsdp.params import ShardingStrategy

FILES = Path(__file__).resolve().parent.parent / "files"
DATA = yaml.safe_load((FILES / "answers.yaml").read_text(encoding="utf-8"))
SCRIPTS = yaml.safe_load((FILES / "clinic_answers.yaml").read_text(encoding="utf-8"))
CELLS, PARTS, FUNCTIONS, RUNS = DATA["cells"], DATA["parts"], DATA["functions"], DATA["runs"]

Given = tuple[Any, ...]
MIXED = ["(root)", *(f"language_model.model.layers.{i}" for i in (1, 3, 5))]
FALLING = [2.0 * 0.9**step for step in range(40)]
MENDED = {"frozen_policy": "REPLICATE", "mixed_precision": "bf16", "frozen_dtype": "bf16"}
ZERO2 = {"sharding_strategy": "SHARD_GRAD_OP"}
SBATCH = {"partition": "gpu", "account": "lab7", "nodes": 2, "ranks": 8, "cpus_per_task": 8, "timeout_min": 120}


def sbatch(**changes: Any) -> dict[str, Any]:
    fields = {"executor": "slurm"} | SBATCH | changes
    return {f"launch.{name}": value for name, value in fields.items()}


def overlap(a: tuple[float, float], b: tuple[float, float]) -> float:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def exposed_by_sums(compute, communication):
    return sum(b - a - sum(overlap((a, b), span) for span in compute) for a, b in communication)


def exposed_by_small_steps(compute, communication):
    at = np.arange(0, 20, 0.5) + 0.25
    busy = [sum((at > a) & (at < b) for a, b in spans) if spans else 0 * at for spans in (compute, communication)]
    return 0.5 * np.sum((busy[1] > 0) & (busy[0] == 0))


def exposed_with_torch(compute, communication):
    hidden = [overlap(span, other) for span in communication for other in compute]
    return torch.tensor([b - a for a, b in communication]).sum() - sum(hidden)


RIGHT: dict[str, list[Any]] = {
    "02.strategy": [ZERO2, {"dp_shard": None, **ZERO2}, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}],
    "03.mixed": [MIXED, tuple(MIXED), set(MIXED)],
    "03.mend": [
        MENDED | ZERO2,
        MENDED | ZERO2 | {"auto_wrap_policy": "FROZEN_AWARE", "backend": "FSDP2"},
        MENDED | {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    ],
    "04.overfit": [FALLING, tuple(FALLING), np.array(FALLING)],
    "06.sbatch": [sbatch(), sbatch(gpus_per_node=4), sbatch(mem="100G")],
    "08.class": [
        "TransformerEncoderLayer",
        "torch.nn.modules.transformer.TransformerEncoderLayer",
        torch.nn.TransformerEncoderLayer,
    ],
    "10.exposed": [exposed_by_sums, exposed_by_small_steps, exposed_with_torch],
}
"""Right answers of exercises that take one value."""
WRONG: dict[str, dict[str, Any]] = {
    "04.overfit": {
        "steps are too long": [2.0] * 20 + [9.0] * 19 + [5.0],
        "too slowly": [2.0] * 20 + [1.5] * 20,
        "Nothing is learned": [2.0] * 40,
    },
    "06.sbatch": {
        "--ntasks-per-node=2": sbatch(ranks=4),
        "two hours": sbatch(timeout_min=2),
        "--account=(nothing)": sbatch(account=None),
        "launch.nodes is not filled in": sbatch(nodes=...),
    },
    "10.exposed": {
        "all the communication": lambda compute, talk: sum(b - a for a, b in talk),
        "returns nothing": lambda compute, talk: None,
        "IndexError": lambda compute, talk: max(0, talk[-1][1] - compute[-1][1]),
    },
}
"""Words of a hint, and the wrong answer that gets it."""
VALUES = {name: {"wrong": {}} for name in WRONG} | DATA["values"]


def right_answers(name: str) -> list[Given]:
    """Return the arguments of `check` for forms of the right answer."""
    exercise = VALUES[name]
    answers: list[Given] = [(answer,) for answer in RIGHT.get(name, [])]
    answers += map(tuple, exercise.get("right", []))
    if "numbers" in exercise:
        numbers = exercise["numbers"]
        answers += [tuple(numbers), tuple(np.array(numbers)), tuple(torch.tensor(numbers))]
    for kind in (bool, int, np.bool_) if "answers" in exercise else ():
        answers.append(true_false(exercise, [kind(answer) for answer in exercise["answers"]]))
    return answers


def wrong_answers(name: str) -> dict[str, Given]:
    """Return words of each hint, and the arguments of `check` that get it."""
    wrong = {words: (answer,) for words, answer in WRONG.get(name, {}).items()}
    for words, given in VALUES[name]["wrong"].items():
        wrong[words] = true_false(VALUES[name], given) if "answers" in VALUES[name] else tuple(given)
    return wrong


def true_false(exercise: dict[str, Any], answers: list[Any]) -> Given:
    """Return the arguments of `check`: questions with their answers, or tokens beside them."""
    if "tokens" in exercise:
        return exercise["tokens"], answers
    return (dict(zip(exercise["questions"], answers, strict=True)),)
