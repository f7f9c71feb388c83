"""Jobs that Slurm refuses, or accepts and will never start: the field to change.

The reasons are listed in https://slurm.schedmd.com/job_reason_codes.html. Slurm leaves such a job in the queue forever,
since an administrator might still raise the limit.
"""

from __future__ import annotations

import re

from ..files import reasons as why

_LIMIT = "(QOS|Assoc)Max"
KINDS = {
    f"PartitionTimeLimit|QOSTimeLimit|{_LIMIT}WallDurationPerJobLimit": why.OVER_TIME,
    # Not RunMinutes, which is about jobs that run now.
    "(QOS|Assoc)Grp(?!\\w*Run)\\w*Minutes(Limit)?|(QOS|Assoc)GrpWall(Limit)?": why.BUDGET,
    f"{_LIMIT}\\w*MinutesPerJob(Limit)?": why.OVER_MINUTES,
    f"PartitionNodeLimit|{_LIMIT}NodePerJobLimit": why.OVER_NODES,
    "PartitionConfig": why.NOT_IN_PARTITION,
    f"{_LIMIT}Cpu(PerJob|PerNode)(Limit)?": why.OVER_CPUS,
    f"{_LIMIT}(GRES|Gres)(PerJob|PerNode)": why.OVER_GPUS,
    f"{_LIMIT}(Memory|Mem)(PerJob|PerNode)|MaxMemPerLimit": why.OVER_MEMORY,
    f"{_LIMIT}\\w+(PerJob|PerNode)(Limit)?": why.OVER_LIMIT,
    "QOSMin\\w+": why.UNDER_LIMIT,
    "QOSNotAllowed|InvalidQOS|Job's QOS not permitted .*": why.NOT_IN_QOS,
    "AccountNotAllowed|InvalidAccount|Job's account not permitted .*": why.NOT_IN_ACCOUNT,
    "BadConstraints": why.NO_NODE,
    "DependencyNeverSatisfied": why.LOST_DEPENDENCY,
    "ReservationDeleted": why.RESERVATION_GONE,
    "JobHoldMaxRequeue|job[ _]requeued[ _]in[ _](held|special[ _]exit)[ _]state": why.REQUEUED_HELD,
    "JobHeldUser": why.HELD,
    "JobHeldAdmin": why.HELD_BY_ADMIN,
    "launch[ _]failed[ _]requeued[ _]held": why.HELD_AGAIN,
}
"""Pattern of Slurm's reason -> the kind. The first that matches counts."""


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


def why_never(reason: str) -> str:
    """Return the kind of Slurm's reason for which a job waits; "" where Slurm will start it by itself."""
    for pattern, kind in KINDS.items():
        if re.fullmatch(pattern, reason):
            return kind
    return ""
