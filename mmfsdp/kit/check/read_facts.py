"""Read what the ranks of a check have written down (rank_facts.py).

Nodes may have other versions of mmfsdp, which is one of the faults that a check looks for, and a file may be damaged.
So what is of another type than expected is left out, and counts as what a rank has not come to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..run.files.folder import NUMBER, Row, Types, of_types, read_json
from ..run.files.run_record import MAX_RANKS
from .rank_facts import FACTS

MAX_TEXT = 1000
"""Characters of a text that are kept."""
PART_TYPES: dict[str, Types] = {
    "node": {"host": str, "node": str, "python": str, "mmfsdp": str, "environment": dict},
    "folders": {"token": str, "places": dict},
    "torch": {"version": str, "transformers": str, "cuda": str, "nccl": str, "gpus": list},
    "address": {"host": str, "GLOO_SOCKET_IFNAME": str, "fix": str},
    "hub": {"address": str, "cache": str, "offline": bool, "missing": list, "unreachable": str},
    "gloo": {"sum": NUMBER, "ranks": int, "times": list},
    "nccl": {"sum": NUMBER, "ranks": int, "skipped": str, "wanted": bool},
    "bandwidth": {"backend": str, "ranks": int, "local_ranks": int, "all": list, "inside": list},
}
"""The types of the values of each part; `error`, a text, may be in each."""
PLACE_TYPES: Types = {"path": str, "error": str, "free": NUMBER}
GPU_TYPES: Types = {"name": str, "memory": NUMBER}
ROW_TYPES: Types = dict.fromkeys(("bytes", "all_gather_s", "reduce_scatter_s"), NUMBER)


def read_facts(folder: Path, rank: int) -> Row | None:
    """Return what a rank of the run in a folder has found so far; None if it has written nothing."""
    values = read_json(folder / FACTS / f"rank{rank}.json")
    return None if values is None else facts_of(values)


def facts_of(values: Row) -> Row:
    """Return the facts of a rank as `judge.rank_lines` takes them."""
    doing = values.get("doing")
    facts: Row = {"doing": doing[:MAX_TEXT] if isinstance(doing, str) else ""}
    for part, types in PART_TYPES.items():
        if isinstance(values.get(part), dict):
            facts[part] = _of_types(values[part], {"error": str, **types})
    node, torch, folders, hub = (facts.get(part, {}) for part in ("node", "torch", "folders", "hub"))
    if "environment" in node:
        node["environment"] = {key: value for key, value in node["environment"].items() if isinstance(value, str)}
    if "gpus" in torch:
        torch["gpus"] = _complete(torch["gpus"], GPU_TYPES)
    if "places" in folders:
        places = {name: place for name, place in folders["places"].items() if isinstance(place, dict)}
        folders["places"] = {name: _of_types(place, PLACE_TYPES) for name, place in places.items()}
    if "missing" in hub:
        hub["missing"] = [name for name in hub["missing"] if isinstance(name, str)]
    for part in ("gloo", "nccl"):
        _check_group(facts, part)
    _check_bandwidth(facts)
    return facts


def _check_group(facts: Row, part: str) -> None:
    """Leave out the facts of a backend that do not say what came of it."""
    found = facts.get(part, {})
    if "times" in found:
        found["times"] = [time for time in found["times"] if _is_finite(time)]
    if not (found.get("error") or found.get("skipped") or 1 <= found.get("ranks", 0) <= MAX_RANKS):
        facts.pop(part, None)


def _check_bandwidth(facts: Row) -> None:
    """Leave out what no figures can be made of."""
    found = facts.get("bandwidth", {})
    for key in ("all", "inside"):
        rows = _complete(found.get(key, ()), ROW_TYPES)
        found[key] = [row for row in rows if min(row.values()) > 0]
    ranks, local_ranks = found.get("ranks", 0), found.get("local_ranks", 0)
    if not (1 <= local_ranks <= ranks <= MAX_RANKS and "backend" in found):
        facts.pop("bandwidth", None)


def _complete(rows: Iterable[Any], types: Types) -> list[Row]:
    """Return the mappings that have all these keys, with nothing else in them."""
    found = []
    for row in rows:
        known = _of_types(row, types) if isinstance(row, dict) else {}
        if known.keys() == types.keys():
            found.append(known)
    return found


def _of_types(values: Row, types: Types) -> Row:
    """Return the values of these keys that have their types; numbers that are finite, texts that are not too long."""
    known: Row = {}
    for key, value in of_types(values, types).items():
        if key in types and (not isinstance(value, float) or _is_finite(value)):
            known[key] = value[:MAX_TEXT] if isinstance(value, str) else value
    return known


def _is_finite(value: Any) -> bool:
    return isinstance(value, NUMBER) and abs(value) < 1e300 and math.isfinite(value)
