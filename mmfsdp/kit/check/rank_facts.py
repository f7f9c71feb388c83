"""write_facts: the work of each rank of a check. It writes down what it finds, a part at a time, and judges nothing.

A fault of the site is a fact, too: a rank that ended with an error would end the others before they have found more.
Where a rank is killed, its facts name the part that it was in.

read_facts: what a rank has written, for the process that judges. Nodes may have other versions of mmfsdp, which is one
of the faults that a check looks for, and a file may be damaged. So what is of another type than expected is left out,
and counts as what a rank has not come to.
"""

from __future__ import annotations

import math
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

import mmfsdp

from ...params import Device, RunParams
from ..run.error_kinds import reason_of
from ..run.files.folder import NUMBER, Row, Types, make_inner_folder, of_types, read_json, touch, write_json
from ..run.files.run_record import MAX_RANKS, RunRecord
from ..run.hub_cache import hub_weights
from ..run.launchers.registry import launcher_in_run
from ..run.local import available_cores
from ..run.ranks.hang import Heartbeat
from ..run.slurm.job_gpus import GPU_VARIABLES, JOB_VARIABLE
from ..run.slurm.slurm_state import PREEMPTED_FILE, RESTART_COUNT
from .places import RUN_FOLDER, hub_facts, places_of, probe

FACTS = "facts"
"""Folder in the run folder: rank<N>.json, and TOKEN."""
TOKEN = "token.json"
"""File in it that the process that checks has written: each rank reads it."""
REQUEUE = "requeue"
"""File in it by which that process asks for a requeue of the job, as after a preemption."""
RESTARTED = "restarted"
"""File in it that a rank writes if Slurm has started the job again."""
SHOWN_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURMD_NODENAME", JOB_VARIABLE, "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
    *GPU_VARIABLES,
)  # fmt: skip
"""Environment variables that a rank writes down."""
DONE = "done"
"""The activity of a rank that has found all."""
START_WAIT_S = 20.0
"""Seconds by which one rank may start later than another: of one that is later, its node cannot see the folder."""
WAIT_S = 60.0
"""Seconds that ranks wait for each other's address before they meet: some may be slow to import torch."""
GROUP_TIMEOUT_S = 30.0
"""Seconds that they wait for each other in a group, and in a collective."""

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


class Facts:
    """Holds what a rank has found so far, in a file that is replaced after each part."""

    def __init__(self, folder: Path, rank: int):
        make_inner_folder(folder / FACTS)
        self.folder, self.rank = folder / FACTS, rank
        self.values: dict[str, Any] = {"rank": rank}
        self._beat = Heartbeat(folder, rank)

    def add(self, part: str, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Write down what a function returns, or its error, and return that."""
        self._beat(f"checking {part}")
        self.values["doing"] = part
        self._write()
        start = time.monotonic()
        try:
            found = {"error": "", **find()}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}
            if reason := reason_of(error):
                found = {"error": reason.text, "fix": reason.fix}
        self.values[part] = found | {"seconds": round(time.monotonic() - start, 3)}
        self.values["doing"] = ""
        self._write()
        return found

    def end(self) -> None:
        """Write down that all is found."""
        self.values["doing"] = DONE
        self._write()

    def _write(self) -> None:
        write_json(self.folder / f"rank{self.rank}.json", self.values)


def write_facts(folder: Path) -> None:
    """Find out all that a check judges, as one rank."""
    if os.environ.get(RESTART_COUNT, "0") != "0":
        touch(folder / FACTS / RESTARTED)  # the requeue works, and there is nothing more to find
        return
    params, rank = RunParams.from_yaml(folder / "params.yaml"), int(os.environ["RANK"])
    facts = Facts(folder, rank)
    facts.add("node", node_facts)
    facts.add("folders", lambda: folder_facts(folder, params))
    facts.add("torch", torch_facts)
    facts.add("address", lambda: meet(folder))
    is_first_of_node = os.environ["LOCAL_RANK"] == "0"
    facts.add("hub", lambda: hub_facts(hub_weights(params).values(), ask=is_first_of_node))
    # torch would wait for minutes for a rank that cannot come.
    if wait_for_addresses(folder):
        check_group(facts, params)
    facts.end()
    if (folder / FACTS / REQUEUE).exists() and rank == 0:
        touch(folder / "logs" / PREEMPTED_FILE)  # has the batch script requeue the job, as of a preempted run


def check_group(facts: Facts, params: RunParams) -> None:
    """Find out with the other ranks what only they find together."""
    from .group_facts import bandwidth_facts, gloo_facts, leave_group, nccl_facts

    if facts.add("gloo", lambda: gloo_facts(GROUP_TIMEOUT_S))["error"]:
        return
    device = params.train.device
    wanted = device is Device.CUDA or (device is Device.AUTO and bool(facts.values["torch"].get("gpus")))
    nccl = facts.add("nccl", lambda: nccl_facts(GROUP_TIMEOUT_S, wanted=wanted))
    if not nccl["error"] and int(os.environ["WORLD_SIZE"]) > 1:
        on_gpus = "skipped" not in nccl
        facts.add("bandwidth", lambda: bandwidth_facts(GROUP_TIMEOUT_S, on_gpus=on_gpus))
    leave_group()


def node_facts() -> dict[str, Any]:
    """Return what this process is, and where."""
    memory = psutil.virtual_memory()
    return {
        "host": socket.gethostname(),
        "node": os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        "python": platform.python_version(),
        "executable": sys.executable,
        "mmfsdp": mmfsdp.__version__,
        "cores": available_cores(),
        "memory": memory.total,
        "time": time.time(),
        "environment": {name: os.environ[name] for name in SHOWN_VARIABLES if name in os.environ},
    }


def folder_facts(folder: Path, params: RunParams) -> dict[str, Any]:
    """Return whether this rank sees what was written into the run folder, and can write where a run writes."""
    token = read_json(folder / FACTS / TOKEN) or {}
    places = places_of(folder)
    if int(os.environ["LOCAL_RANK"]) > 0:  # one rank of a node is enough
        places = {RUN_FOLDER: places[RUN_FOLDER]}
    return {"token": token.get("token", ""), "places": {name: probe(path) for name, path in places.items()}}


def torch_facts() -> dict[str, Any]:
    """Import torch, and return its version and the GPUs that it sees."""
    import torch

    from .this_machine import version_of

    gpus = []
    for number in range(torch.cuda.device_count()):
        values = torch.cuda.get_device_properties(number)
        with torch.cuda.device(number):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        uuid = str(getattr(values, "uuid", ""))
        gpus.append({"name": values.name, "memory": values.total_memory, "uuid": uuid, "bf16": bf16})
    found = {"version": torch.__version__, "cuda": torch.version.cuda or torch.version.hip or "", "gpus": gpus}
    found["transformers"] = version_of("transformers")
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def meet(folder: Path) -> dict[str, Any]:
    """Set the address at which the ranks meet, try it, and return it. Raises OSError that says why it cannot be."""
    record = RunRecord.read(folder)
    assert record, f"{folder} has no run.json"
    launcher = launcher_in_run(folder, record)
    launcher.meet(launcher.place_of_rank())
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    interfaces = {name: os.environ.get(name, "") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    return {"host": host, "port": port, **interfaces}


def wait_for_addresses(folder: Path) -> bool:
    """Wait until all ranks have tried the address. Return False if one could not: the others would wait for it.

    False also where a rank does not start. True where it is only late: the group itself waits, too.
    """
    start = time.monotonic()
    left = set(range(int(os.environ["WORLD_SIZE"])))
    while left and time.monotonic() < start + WAIT_S:
        absent = False
        for rank in sorted(left):
            facts = read_json(folder / FACTS / f"rank{rank}.json")
            # No file yet: the rank has not started, or its node does not see this folder.
            absent = absent or facts is None
            address = (facts or {}).get("address")
            if address is not None:
                left.discard(rank)
                if address.get("error"):
                    return False
        if absent and time.monotonic() > start + START_WAIT_S:
            return False
        time.sleep(0.1)
    return True


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
