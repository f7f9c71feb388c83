"""Kinds of causes that end a run, and what to do about each.

Whoever knows a cause writes its kind, a small string, next to the sentence that says it: into status.json and into the
report of a rank. Advice is looked up by the kind alone. A sentence may hold the text of a person's own exception, which
says nothing about a kind: it is never searched, and never cut.
"""

from __future__ import annotations

from ..hangs.find import CROSSED, DIFFERENT, ENDED, MISSING, NO_END, STOPPED, UNKNOWN_GROUP

MEMORY, SHARED_MEMORY, DISK = "memory", "shared memory", "disk"
COLLECTIVES, LOST_PEER, LIBRARY, CRASH = "collectives", "lost peer", "library", "crash"
SKIPPED_STEPS, SILENCE = "skipped steps", "silence"
SITE, NOT_STARTED, NO_LOG = "site", "not started", "no log"
GONE, NEVER_LAUNCHED, NO_RECORD, NO_SIGN = "gone", "never launched", "no record", "no sign"
NEVER_STARTS = "never starts"

LESS_MEMORY = "to need less memory, lower train.batch_size and raise train.accumulation, or set "
LESS_MEMORY += "fsdp.activation_checkpointing"
MORE_SHARED_MEMORY = "/dev/shm is full, the shared memory of data workers, 64 MB in most containers: start the "
MORE_SHARED_MEMORY += "container with more, or lower data.workers"
MORE_DISK = "free some disk space, or set launch.folder (MMFSDP_CACHE for backbones) to another disk"
SAME_COLLECTIVES = (
    "the ranks were in different collectives, or sent different sizes: a part of the model that trains was used on "
    "some ranks only (use it on all, as in `loss + 0 * part(blank).sum()`), a forward gathered held-out batches of "
    "different sizes (make train.eval_samples a multiple of the ranks), or a callback communicated on one rank"
)
ADVICE = {MEMORY: LESS_MEMORY, SHARED_MEMORY: MORE_SHARED_MEMORY, DISK: MORE_DISK, COLLECTIVES: SAME_COLLECTIVES}
"""What to do, by kind, where the reason of a state says it, too."""

FIXES = {
    **{kind: f"{words}; then resume" for kind, words in ADVICE.items()},
    STOPPED: "find out who stopped that process (`kill -CONT` lets it go on), or what it waits for; then resume",
    ENDED: "give all ranks the same number of steps: look at the length of their data, such as a last batch that only "
    "some have, and at code that ends on one rank only; then resume",
    CROSSED: "call the collectives of both process groups on all their ranks, in one order; then resume",
    UNKNOWN_GROUP: "look at what the other ranks do, in logs/ of the run; in a loop of your own call mmfsdp.name_hang "
    "after all process groups are made; then resume",
    NO_END: "look at the network between the nodes, and at the GPUs; then resume",
    DIFFERENT: "run forward and backward of the same units on all ranks, in one order: look for a batch without a "
    "picture, a skipped backward, and a call that only some ranks make, such as an evaluation",
    MISSING: "look at the line where it is: slow or broken data, a lock, or code that only some ranks run; if it is "
    "slow by nature, raise launch.silence_s; then resume",
    SILENCE: "read its stack below; if this work is slow by nature, raise launch.silence_s; then resume",
    CRASH: "look at the line that is named, and at the packages in C or C++ that it calls; then resume",
    LIBRARY: "read its last lines below, correct what they name, then resume",
    GONE: "free some disk space if the disk is full, then resume",
    SKIPPED_STEPS: "lower train.lr, or use bf16 rather than fp16",
    NEVER_LAUNCHED: "launch it again",
    NO_RECORD: "cancel it, in case that it still runs; then launch it again",
    NO_SIGN: "look at that machine: it is down, or does not see this folder",
}
"""What to do, by kind."""
OF_A_RANK = "its last lines are below: correct what they name, then resume"
"""What to do about any other error of a rank."""
OF_THE_SITE = (SITE, NOT_STARTED, NO_LOG)
"""Kinds that lie in a machine or a cluster rather than in a training."""
