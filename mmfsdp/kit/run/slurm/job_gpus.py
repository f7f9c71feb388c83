"""The GPUs that a Slurm job has on a node: by its variables, of which each way to ask sets others, or by scontrol."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from .ask_slurm import ask_slurm

GPUS_VARIABLE = "MMFSDP_GPUS"
"""Environment variable of a job: the GPUs of each node, where Slurm does not manage them."""
JOB_VARIABLE = "SLURM_JOB_ID"
COUNTS = ("SLURM_GPUS_ON_NODE", GPUS_VARIABLE, "SLURM_GPUS_PER_NODE")
"""Variables with a count, or with types and counts, such as a100:2: the last is the only one that salloc sets."""
LISTS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
"""Variables with the numbers of the GPUs, such as 0,1."""
GPU_VARIABLES = (*COUNTS, *LISTS)
_OF_NODE = re.compile(r"\bGRES=(\S*)")
_GPUS = re.compile(r"\bgpu(?::[^:,(]+)?:(\d+)")

_told: dict[str, int] = {}
"""Job -> what scontrol has said: an allocation stays as it is."""


def gpus_of_node(environment: Mapping[str, str]) -> int | None:
    """Return the GPUs that the variables of a job give it on a node; None if none of them says."""
    for name in COUNTS:
        if value := environment.get(name):
            counts = [part.rpartition(":")[2] for part in value.split(",")]
            if all(count.isdecimal() for count in counts):
                return sum(map(int, counts))
    for name in LISTS:
        if value := environment.get(name):
            return len(value.split(","))
    return None


def gpus_of_allocation() -> int:
    """Return the GPUs that the job of this process has on each node, which scontrol knows where no variable says.

    Of nodes that differ, the fewest. 0 where it has none, or Slurm does not answer.
    """
    known, job = gpus_of_node(os.environ), os.environ.get(JOB_VARIABLE)
    if known is not None or job is None:
        return known or 0
    if job not in _told:
        answer = ask_slurm("scontrol", "show", "job", "--details", job)
        counts = [sum(map(int, _GPUS.findall(gres))) for gres in _OF_NODE.findall(answer.stdout)]
        if not counts:
            return 0
        _told[job] = min(counts)
    return _told[job]
