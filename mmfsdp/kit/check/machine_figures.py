"""Figures of a machine for plans, from measured collectives: a `machine:` block as profiles of clusters have it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from math import log2
from pathlib import Path
from typing import Any

from ...core.plan import ring_bytes
from ...params import ParamError, RunParams
from ...params.base import read_yaml
from ...params.in_words import size
from ...params.run import read_cluster
from ...predict.cards import card_of
from ...predict.machines import MACHINES
from ..run.files.folder import write_text
from ..verify.lines import NOTE, OK, Line

TOO_SLOW = 0.5
"""Share of the bandwidth that a plan assumes below which a line says so."""


def machine_figures(found: Mapping[str, Any], *, memory: float = 0.0) -> dict[str, float]:
    """Return figures by the names of `predict.Machine`'s fields, of what the ranks have measured.

    `bandwidth` is what a rank sends to other nodes, and `inside` within its node, as predict/seconds.py uses them.
    memory: bytes of a rank's GPU.
    """
    ranks, local_ranks = found["ranks"], found["local_ranks"]
    nodes = max(1, ranks // local_ranks)
    # The largest tensor shows the bandwidth, the smallest the latency.
    *_, largest = found["all"]
    seconds = (largest["all_gather_s"] + largest["reduce_scatter_s"]) / 2
    sent = ring_bytes("all-gather", int(largest["bytes"]), ranks)
    if nodes > 1:  # each node takes in what the others hold, through as many cards as it has ranks
        sent = int(largest["bytes"] * (nodes - 1) / nodes / local_ranks)
    figures = {"bandwidth": sent / seconds}
    if found.get("inside"):
        *_, largest = found["inside"]
        sent = ring_bytes("all-gather", int(largest["bytes"]), local_ranks)
        # The mean of both collectives, which send as many bytes.
        figures["inside"] = 2 * sent / (largest["all_gather_s"] + largest["reduce_scatter_s"])
    smallest = found["all"][0]
    # predict/seconds.py adds a latency for each doubling of the nodes.
    figures["latency"] = (smallest["all_gather_s"] + smallest["reduce_scatter_s"]) / 2 / (1 + log2(nodes))
    if nodes > 1:
        figures["gpus_per_node"] = local_ranks
    if memory:
        figures["capacity"] = memory
    return figures


def bandwidth_line(found: Mapping[str, Any], figures: Mapping[str, float], params: RunParams, gpu: str) -> Line:
    """Return the line of what was measured, beside what plans assume. gpu: its name; "" for the CPU."""
    parts = []
    for key, words, ranks in (("all", "", found["ranks"]), ("inside", "within a node ", found["local_ranks"])):
        rates = []
        # Without the smallest, of which only the latency counts.
        for row in found.get(key, ())[1:]:
            sent = ring_bytes("all-gather", int(row["bytes"]), ranks)
            gather, reduce = sent / row["all_gather_s"] / 1e9, sent / row["reduce_scatter_s"] / 1e9
            rates.append(f"{gather:.3g} and {reduce:.3g} at {size(row['bytes'])}")
        if rates:
            parts.append(f"{words}{', '.join(rates)}")
    words = f"a rank sends, in GB/s of all-gather and reduce-scatter by {found['backend']}: {'; '.join(parts)}"
    for name, assumed, source in _assumed(params, gpu, figures):
        share = figures[name] / assumed
        words += f"; {source} has {name} {assumed:.3g}, measured {figures[name]:.3g}"
        if share < TOO_SLOW:
            fix = "plan with the measured figures (`mmfsdp check --write`); to find out why, export NCCL_DEBUG=INFO in "
            fix += "launch.setup: NCCL then says which network it uses"
            return Line(NOTE, "bandwidth", f"{words}, {share:.0%} of it", fix)
    return Line(OK, "bandwidth", words)


def _assumed(params: RunParams, gpu: str, figures: Mapping[str, float]) -> Iterator[tuple[str, float, str]]:
    """Yield (figure, value, where it is from) that plans assume: of the profile, else of the GPU's machine."""
    profile = read_cluster(params.launch.cluster).machine if params.launch.cluster else {}
    card = card_of(gpu) if gpu else None
    machines = []
    for machine in MACHINES.values():
        if card and (machine.flops, machine.memory) == (card.half, card.memory):
            # A machine of one node for ranks on one node, of several for ranks on several.
            if bool(machine.inside) == ("gpus_per_node" in figures):
                machines.append(machine)
    for name in ("bandwidth", "inside"):
        if name not in figures:
            continue
        if name in profile:
            yield name, profile[name], "the profile"
        elif machines:
            yield name, getattr(machines[0], name), machines[0].name


def machine_block(figures: Mapping[str, float], about: str) -> str:
    """Return figures as a `machine:` block of a profile, with a comment that says how they were measured."""
    about = " ".join(about.split())  # a line end would end the comment
    lines = [f"# Measured by `mmfsdp check` on {time.strftime('%Y-%m-%d')}: {about}.", "machine:"]
    for name, value in figures.items():
        lines.append(f"  {name}: {value}" if isinstance(value, int) else f"  {name}: {value:.2e}")
    return "\n".join(lines) + "\n"


def write_machine(path: Path, block: str) -> None:
    """Add a `machine:` block to a profile, or make a profile of it. Raises ParamError if it has one already."""
    text = ""
    if path.exists():
        text = path.read_text(encoding="utf-8")
        if "machine" in (read_yaml(text, name=str(path)) or {}):
            shown: Sequence[str] = block.strip().splitlines()
            raise ParamError("--write", f"{path} already has a machine: block; replace it with: {' | '.join(shown)}")
        if text and not text.endswith("\n"):
            text += "\n"
    write_text(path, text + block)
