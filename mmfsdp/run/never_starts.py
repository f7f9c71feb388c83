"""Jobs that Slurm refuses, or accepts and will never start: the field to change.

The reasons are listed in https://slurm.schedmd.com/job_reason_codes.html. Slurm leaves such a job in the queue forever,
since an administrator might still raise the limit.
"""

from __future__ import annotations

import re

_LIMIT = "(QOS|Assoc)Max"
FIXES = {
    f"PartitionTimeLimit|{_LIMIT}WallDurationPerJobLimit": "lower launch.timeout_min, {timeout_min} now",
    f"{_LIMIT}\\w*MinutesPerJob(Limit)?": "lower launch.timeout_min, {timeout_min} now, or ask for less",
    f"PartitionNodeLimit|{_LIMIT}NodePerJobLimit": "change launch.nodes or launch.partition, or wait if nodes are down",
    "PartitionConfig": "change launch.partition, launch.nodes or launch.timeout_min, {timeout_min} now",
    f"{_LIMIT}Cpu(PerJob|PerNode)(Limit)?": "lower launch.cpus_per_task or launch.ranks",
    f"{_LIMIT}(GRES|Gres)(PerJob|PerNode)": "lower launch.gpus_per_node or launch.ranks",
    f"{_LIMIT}(Memory|Mem)(PerJob|PerNode)": "lower launch.mem",
    f"{_LIMIT}\\w+(PerJob|PerNode)(Limit)?": "ask for less",
    "QOSMin\\w+": "ask for more, or choose another launch.qos",
    "QOSNotAllowed|InvalidQOS|Job's QOS not permitted .*": "choose another launch.qos or launch.partition",
    "AccountNotAllowed|InvalidAccount|Job's account not permitted .*": "choose another launch.account",
    "BadConstraints": "no node has what it asks for: change launch.constraint, gpus_per_node, cpus_per_task or mem",
    "DependencyNeverSatisfied": "the job that it depends on has failed; launch it again",
    "JobHeldUser": "it is held; `scontrol release {job}` lets it start",
    "JobHeldAdmin": "an administrator holds it; ask why",
    "launch[ _]failed[ _]requeued[ _]held": "its node could not start it, and Slurm holds it: tell the administrators; "
    "`scontrol release {job}` tries again",
}
"""Pattern of Slurm's reason -> what to do. The first that matches counts."""


REFUSALS = {
    "submitjob": "",  # a limit on submitted jobs: one waits for one's turn
    "accounting/qos": "qos, launch.account or launch.timeout_min",
    "configuration is not available": "nodes, launch.gpus_per_node, launch.cpus_per_task or launch.mem",
    "node name": "exclude",
    "node count": "nodes",
    "reservation": "reservation",
    "account": "account",
    "partition": "partition",
    "invalid qos": "qos",
    "time limit": "timeout_min",
    "feature": "constraint",
    "constraints": "constraint",
    "generic resource": "gpus_per_node",
    "gres": "gpus_per_node",
    "memory specification": "mem",
    "cpu count": "cpus_per_task",
    "more processors": "ranks",
    "unrecognized option": "sbatch",
    "invalid option": "sbatch",
}
"""Part of sbatch's words, in lower case -> the field of launch that they are about. The first that is there counts."""


def refused_field(words: str) -> str:
    """Return the field that sbatch's words are about, such as launch.partition; "" where they name none."""
    for part, field in REFUSALS.items():
        if part in words.lower():
            return f"launch.{field}" if field else ""
    return ""


def what_to_do(reason: str, *, job: str, timeout_min: int) -> str:
    """Return what to do so that a job can start; "" where Slurm will start it by itself."""
    for pattern, words in FIXES.items():
        if re.fullmatch(pattern, reason):
            return words.format(job=job, timeout_min=timeout_min)
    return ""
