"""Try a file in the arena: it must compute what torch's `fully_shard` does, and send what it says."""

from __future__ import annotations

import secrets
from math import isclose
from pathlib import Path
from typing import Any

from ...params import ParamError
from ...params.findings import Finding
from ..spawn_ranks import on_ranks
from .clock import as_fp32
from .ranks import measure
from .result import Counts, Result, digest
from .rounding import LEAST_BITS, rounded_weights, trained_alone
from .step_log import sent

WORLDS = (2, 3)
TIMEOUT_S = 60.0
"""Of a collective: a file whose ranks call different ones would wait for ever."""
SLACK = 1 << 18
"""Bytes that the ranks write beside what the model sends: to find each other, and the norm of the gradient."""


class Refused(Exception):
    """A file that the arena does not take. findings: why. traceback: of a file that fails, else empty."""

    def __init__(self, findings: list[Finding], *, traceback: str = "") -> None:
        super().__init__("; ".join(finding.message for finding in findings))
        self.findings, self.traceback = findings, traceback


def try_file(path: str) -> Result:
    """Run a file on two and on three ranks, beside torch's `fully_shard`, and return its result.

    The file's code is executed, in processes of their own. Raises ParamError if there is no such file, Refused if it
    fails, computes anything else, rounds more than frozen weights to 4 bits, or sends what it does not count.
    """
    if not Path(path).is_file():
        raise ParamError("FILE", f"{path!r} is not a file; lessons 02 and 03 write my_fsdp.py")
    path = str(Path(path).resolve())
    seed = secrets.randbelow(1 << 30)
    found: dict[int, list[dict[str, Any]]] = {}
    for world in WORLDS:
        try:
            found[world] = on_ranks(measure, world, path, seed, timeout_s=TIMEOUT_S)
        except Exception as error:
            words = f"on {world} ranks, the file fails: {last_line(error)}"
            raise Refused([Finding("error", "fails", words)], traceback=str(error)) from error
        mine, torchs = ([rank[name] for rank in found[world]] for name in ("mine", "torchs"))
        rounded, findings = rounded_weights(mine[0]["weights"])
        mine[0]["rounded"], torchs[0]["rounded"] = sum(weight.numel() for weight in rounded.values()), 0
        alone = trained_alone(rounded, seed, world) if rounded else None
        if findings := findings or faults(mine, alone or torchs):
            raise Refused(findings)
    counts = {name: Counts.of(found[2][0][name], found[3][0][name]) for name in ("mine", "torchs")}
    return Result(Path(path).name, digest(path), **counts)


def last_line(error: Exception) -> str:
    """Return the line of a rank's traceback that names the error."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def faults(mine: list[dict[str, Any]], right: list[dict[str, Any]]) -> list[Finding]:
    """Return what is wrong with a file's measurements, by rank. right: the losses and norms that are right."""
    world, rounded = len(mine), mine[0]["rounded"]
    whose = "that of the model with these rounded weights" if rounded else "fully_shard's"
    found: list[Finding] = []

    def add(code: str, message: str, fix: str) -> None:
        found.append(Finding("error", code, f"on {world} ranks, {message}", fix))

    for rank, (own, other) in enumerate(zip(mine, right, strict=True)):
        for name in ("losses", "norms"):
            for step, (value, expected) in enumerate(zip(own[name], other[name], strict=True)):
                if not found and not isclose(value, expected, rel_tol=1e-4):
                    what = {"losses": "the loss", "norms": "the norm of the gradient"}[name]
                    words = f"{what} of step {step} on rank {rank} is {value:.6g}, and {whose} is {expected:.6g}"
                    add(name, words, "%%ranks 2 03.backward shows which unit differs")
        if own["events"] and sent(own["events"], world) != sent(mine[0]["events"], world):
            add(
                "ranks-differ", f"rank {rank} sends other bytes than rank 0", "let every rank call the same collectives"
            )
        if own["written"] is not None and own["written"] > 1.1 * own["sent"] + SLACK:
            words = f"rank {rank} wrote {own['written']:,} bytes, and {own['sent']:,} were counted"
            add("not-counted", words, "send by torch.distributed's collectives alone, and leave the counter alone")
    own = mine[0]
    # All as in fp32, of which the clock takes half: of 4 bytes of a rounded number so many are enough.
    enough = own["whole"] - rounded * (4 - LEAST_BITS / 8 * 2)
    rest = own["rest"] + own["packed"]
    forward = sent(as_fp32(own["events"]), world).get("all-gather, forward", 0)
    if forward < 0.98 * (enough - rest):
        words = f"a rank holds {rest:,} bytes at rest and gathers {forward:,}, and it lacks {enough - rest:,.0f}"
        add("hidden", words, "keep and send weights in tensors of torch, in their own dtype, where they are counted")
    averaged = sum(n for kind, n in sent(own["events"], world).items() if kind.startswith(("reduce", "all-reduce")))
    if averaged < 0.98 * own["trainable"] * (world - 1) / world:
        add("not-averaged", f"a rank sends {averaged:,} bytes of gradients", "reduce each gradient that trains")
    return found
