"""Reasons of a run's state: as data, of which the sentences that people read are made at the end; and what to do.

Whoever knows a cause writes its kind, a small string, beside the words: into status.json and into the report of a rank.
Advice is one table, by kind. Words may hold the text of a person's own exception, which says nothing about a kind: they
are never searched, and a cause that is a person's is never cut; all can be improved without a change of anything else.
A line of Slurm, PyTorch or another library is recognized once, where it is read: error_kinds.py, slurm_log.py,
never_starts.py.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from dataclasses import dataclass
from typing import NamedTuple

from ...hangs.compare import CROSSED, DIFFERENT, ENDED, MISSING, NO_END, STOPPED, UNKNOWN_GROUP

MEMORY, SHARED_MEMORY, DISK = "memory", "shared memory", "disk"
COLLECTIVES, LOST_PEER, LIBRARY, CRASH = "collectives", "lost peer", "library", "crash"
ON_PURPOSE = "on purpose"
SKIPPED_STEPS, SILENCE, RANK = "skipped steps", "silence", "rank"
SITE, NOT_STARTED, NO_LOG, NO_PYTHON = "site", "not started", "no log", "no python"
NOT_JOINED = "not joined"
GONE, NEVER_LAUNCHED, NO_RECORD, NO_SIGN = "gone", "never launched", "no record", "no sign"
NOT_FINITE, NOT_FINITE_FP16, SKIPPED, STALLED = "not finite", "not finite in fp16", "skipped", "stalled"
NEVER_FINITE, NEVER_FINITE_FP16 = "never finite", "never finite in fp16"
TIME_LIMIT, JOB_MEMORY, INTERRUPTED, PLAYER_GONE = "time limit", "memory of the job", "interrupted", "player gone"
CANCELLING, BATCH_SCRIPT, ALLOCATION_ENDED = "cancelling", "batch script", "allocation ended"
NOT_ITS_JOB, NO_SUCH_JOB, NO_ANSWER = "not its job", "no such job", "no answer"
OVER_TIME, OVER_MINUTES, OVER_NODES, OVER_CPUS = "over time", "over minutes", "over nodes", "over cpus"
OVER_GPUS, OVER_MEMORY, OVER_LIMIT, UNDER_LIMIT = "over gpus", "over memory", "over limit", "under limit"
NOT_IN_PARTITION, NOT_IN_QOS, NOT_IN_ACCOUNT, NO_NODE = "not in partition", "not in qos", "not in account", "no node"
LOST_DEPENDENCY, HELD, HELD_BY_ADMIN, HELD_AGAIN = "lost dependency", "held", "held by admin", "held again"
REQUEUED_HELD, BUDGET, RESERVATION_GONE = "requeued and held", "budget used up", "reservation gone"
NEVER_STARTS = (
    *(OVER_TIME, OVER_MINUTES, OVER_NODES, OVER_CPUS, OVER_GPUS, OVER_MEMORY, OVER_LIMIT, UNDER_LIMIT),
    *(NOT_IN_PARTITION, NOT_IN_QOS, NOT_IN_ACCOUNT, NO_NODE),
    *(LOST_DEPENDENCY, HELD, HELD_BY_ADMIN, HELD_AGAIN, REQUEUED_HELD, BUDGET, RESERVATION_GONE),
)
"""Kinds of a job that Slurm has accepted and will not start by itself."""


class Advice(NamedTuple):
    """Say what to do about a kind of cause."""

    words: str
    told: bool = False
    """The sentence of a state says it, too."""
    resume: bool = True
    """The run can then be resumed."""
    site: bool = False
    """The cause lies in a machine or a cluster rather than in a training, so that `mmfsdp check` may find it."""

    @property
    def fix(self) -> str:
        """All that is to do, in words."""
        return f"{self.words}; then resume" if self.words and self.resume else self.words


ADVICE = {
    MEMORY: Advice(
        "to need less memory, lower train.batch_size and raise train.accumulation, or set "
        "fsdp.activation_checkpointing",
        told=True,
    ),
    SHARED_MEMORY: Advice(
        "/dev/shm is full, the shared memory of data workers, 64 MB in most containers: start the container with more, "
        "or lower data.workers",
        told=True,
    ),
    DISK: Advice(
        "free some disk space, or set launch.folder (MMFSDP_CACHE for backbones) to another disk",
        told=True,
    ),
    COLLECTIVES: Advice(
        "the ranks were in different collectives, or sent different sizes: a part of the model that trains was used on "
        "some ranks only (use it on all, as in `loss + 0 * part(blank).sum()`), a forward gathered held-out batches of "
        "different sizes (make train.eval_samples a multiple of the ranks), or a callback communicated on one rank",
        told=True,
    ),
    STOPPED: Advice("find out who stopped that process (`kill -CONT` lets it go on), or what it waits for", told=True),
    ENDED: Advice(
        "give all ranks the same number of steps: look at the length of their data, such as a last batch that only "
        "some have, and at code that ends on one rank only",
        told=True,
    ),
    CROSSED: Advice("call the collectives of both process groups on all their ranks, in one order", told=True),
    UNKNOWN_GROUP: Advice(
        "look at what the other ranks do, in logs/ of the run; in a loop of your own call mmfsdp.name_hang after all "
        "process groups are made",
        told=True,
    ),
    NO_END: Advice("look at the network between the nodes, and at the GPUs", told=True),
    DIFFERENT: Advice(
        "run forward and backward of the same units on all ranks, in one order: look for a batch without a picture, a "
        "skipped backward, and a call that only some ranks make, such as an evaluation",
        told=True,
        resume=False,
    ),
    MISSING: Advice(
        "look at the line where it is: slow or broken data, a lock, or code that only some ranks run; if it is slow by "
        "nature, raise launch.silence_s",
        told=True,
    ),
    SILENCE: Advice("read its stack below; if this work is slow by nature, raise launch.silence_s"),
    CRASH: Advice("look at the line that is named, and at the packages in C or C++ that it calls"),
    ON_PURPOSE: Advice("resume it: it goes on from its newest checkpoint", told=True, resume=False),
    LIBRARY: Advice("read its last lines below, and correct what they name"),
    RANK: Advice("its last lines are below: correct what they name"),
    SKIPPED_STEPS: Advice("lower train.lr, or use bf16 rather than fp16", resume=False),
    NOT_FINITE: Advice("lower train.lr, or raise train.warmup_steps", resume=False),
    NOT_FINITE_FP16: Advice("use bf16 rather than fp16 (fsdp.mixed_precision), or lower train.lr", resume=False),
    NEVER_FINITE: Advice("look for values that are not finite in the data and in the weights", resume=False),
    NEVER_FINITE_FP16: Advice(
        "look for values that are not finite in the data and in the weights, or use bf16 (fsdp.mixed_precision)",
        resume=False,
    ),
    SKIPPED: Advice("none if it was few steps; else lower train.lr, or raise train.warmup_steps", resume=False),
    STALLED: Advice(
        "wait, or cancel it; if it goes on like this it is stopped, with the stack of that rank", resume=False
    ),
    SITE: Advice("", site=True),
    NOT_STARTED: Advice("", site=True),
    NOT_JOINED: Advice(
        "the ranks do not meet at that address and port: another program may listen there, or the name may lead to "
        "another machine; set launch.host, or export MASTER_ADDR and MASTER_PORT in launch.setup",
        site=True,
    ),
    NO_LOG: Advice("", site=True),
    NO_PYTHON: Advice(
        "set launch.python to the Python that mmfsdp is installed in, in a folder that all nodes see",
        resume=False,
        site=True,
    ),
    BATCH_SCRIPT: Advice("correct {field}; its output is in the log", resume=False),
    NO_ANSWER: Advice("wait: Slurm's controller is busy or down (`scontrol ping`)", resume=False),
    GONE: Advice("free some disk space if the disk is full"),
    NEVER_LAUNCHED: Advice("launch it again", resume=False),
    NO_RECORD: Advice("cancel it, in case that it still runs; then launch it again", told=True, resume=False),
    NO_SIGN: Advice("look at that machine: it is down, or does not see this folder", resume=False),
    TIME_LIMIT: Advice("raise launch.timeout_min", told=True, resume=False),
    JOB_MEMORY: Advice("raise launch.mem", told=True, resume=False),
    ALLOCATION_ENDED: Advice("resume continues it in another", told=True, resume=False),
    INTERRUPTED: Advice("resume it", told=True, resume=False),
    PLAYER_GONE: Advice("start another replay", told=True, resume=False),
    OVER_TIME: Advice("lower launch.timeout_min, {timeout_min} now", resume=False),
    OVER_MINUTES: Advice("lower launch.timeout_min, {timeout_min} now, or ask for less", resume=False),
    OVER_NODES: Advice("change launch.nodes or launch.partition, or wait if nodes are down", resume=False),
    OVER_CPUS: Advice("lower launch.cpus_per_task or launch.ranks", resume=False),
    OVER_GPUS: Advice("lower launch.gpus_per_node or launch.ranks", resume=False),
    OVER_MEMORY: Advice("lower launch.mem", resume=False),
    OVER_LIMIT: Advice("ask for less", resume=False),
    UNDER_LIMIT: Advice("ask for more, or choose another launch.qos", resume=False),
    NOT_IN_PARTITION: Advice(
        "lower launch.cpus_per_task, or change launch.nodes, launch.partition or launch.timeout_min, {timeout_min} "
        "now: no node of the partition has what it asks for, or the partition does not allow it",
        resume=False,
    ),
    NOT_IN_QOS: Advice("choose another launch.qos or launch.partition", resume=False),
    NOT_IN_ACCOUNT: Advice("choose another launch.account", resume=False),
    NO_NODE: Advice(
        "no node has what it asks for: change launch.constraint, gpus_per_node, cpus_per_task or mem", resume=False
    ),
    LOST_DEPENDENCY: Advice("the job that it depends on has failed; launch it again", resume=False),
    BUDGET: Advice(
        "the compute time of this account or QOS is used up: choose another launch.account or launch.qos, or ask for "
        "more (`sshare` tells what is left)",
        resume=False,
    ),
    RESERVATION_GONE: Advice(
        "launch.reservation names one that was deleted: cancel it, and launch it without, or with another", resume=False
    ),
    REQUEUED_HELD: Advice(
        "it was requeued, and is held: `scontrol release {job}` starts it again, and its ranks go on from their newest "
        "checkpoint; if it was requeued too often, find out first why its ranks end",
        resume=False,
    ),
    HELD: Advice("it is held; `scontrol release {job}` lets it start", resume=False),
    HELD_BY_ADMIN: Advice("an administrator holds it; ask why", resume=False),
    HELD_AGAIN: Advice(
        "its node could not start it, and Slurm holds it: tell the administrators; `scontrol release {job}` tries "
        "again",
        resume=False,
    ),
}
"""The fix, by kind. Whoever writes a reason of a kind with {fields} fills them, into `Reason.fix`."""
UNKNOWN = Advice("", resume=False)
"""Of a kind that nobody knows, as in the folder of another version."""


OF_LIBRARIES = (COLLECTIVES, LOST_PEER, LIBRARY)
"""Kinds whose words end with the message of a library, which says much and the place last."""
SHORT = 160
"""Characters of such a cause, and of what other ranks failed of, that the sentence of a state has."""


def in_short(text: str) -> str:
    """Return the beginning of a text in a line, without emoji and without places in the source of a library in C++.

    All of it stands in the trouble.
    """
    text = re.sub(r"\[(enforce fail at )?/[^\]]*\] ?", "", text)
    letters = [letter for letter in text if unicodedata.category(letter) not in ("So", "Mn", "Co", "Cn")]
    return textwrap.shorten("".join(letters), SHORT, placeholder=" ...")


@dataclass(frozen=True)
class Reason:
    """Hold why a run is in a state."""

    text: str = ""
    """The cause in words, without advice."""
    kind: str = ""
    """Kind of the cause; empty where nobody knows it."""
    fix: str = ""
    """The fix, where the kind alone does not say it."""
    rank: int | None = None
    """The rank that it began with."""
    others: tuple[Reason, ...] = ()
    """Failures of other ranks that came of it."""

    def __bool__(self) -> bool:
        return bool(self.text)

    def __str__(self) -> str:
        advice = ADVICE.get(self.kind, UNKNOWN)
        text = in_short(self.text) if self.kind in OF_LIBRARIES else self.text
        parts = [text, self.fix or (advice.words if advice.told else "")]
        parts += [f"then {in_short(other.text)}" for other in self.others]  # their fix is that of the cause
        return "; ".join(part for part in parts if part)

    @property
    def what_to_do(self) -> str:
        """Advice, in words; empty where nobody knows what to do."""
        fix = self.fix or ADVICE.get(self.kind, UNKNOWN).fix
        return ADVICE[RANK].fix if not fix and self.rank is not None else fix

    @property
    def of_site(self) -> bool:
        """True if the cause lies in a machine or a cluster rather than in a training."""
        return ADVICE.get(self.kind, UNKNOWN).site
