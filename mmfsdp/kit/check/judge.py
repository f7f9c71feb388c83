"""Lines of what the ranks of a check have written down: what is as it should be, what is wrong, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...params import Device, Precision, RunParams
from ...params.fsdp import EMULATED
from ...params.in_words import size
from ..run.hub_cache import hub_weights, is_offline
from ..run.launchers.registry import launcher_named
from ..run.slurm.job_gpus import gpus_of_node
from ..run.slurm.site import HIDDEN_GPUS
from ..verify.lines import NOTE, OK, WRONG, Line
from .machine_figures import bandwidth_line, machine_figures
from .places import RUN_FOLDER
from .this_machine import hub_line, place_line

CLOCK_NOTE_S, CLOCK_WRONG_S = 2.0, 60.0
"""Seconds by which the clocks of nodes may differ: events and logs are then out of order."""
VERSIONS = ("python", "torch", "transformers", "mmfsdp")

Ranks = Mapping[int, Mapping[str, Any]]
"""The facts of each rank that has reported."""


@dataclass(frozen=True)
class Asked:
    """Hold what the ranks were started with."""

    params: RunParams
    ranks: int
    token: str
    """The text that each rank should read in the run folder."""
    versions: Mapping[str, str]
    """Versions on the machine that checks, by the names in VERSIONS."""

    @property
    def is_job(self) -> bool:
        """Return True if the ranks are a Slurm job, or a step of one."""
        return not launcher_named(self.params.launch.executor).here


def rank_lines(asked: Asked, ranks: Ranks) -> Iterator[Line]:
    """Yield a line for each check of the ranks that have reported."""
    yield _versions(asked, ranks)
    yield _gpus(asked, ranks)
    if asked.is_job:  # else the ranks are on the machine whose folders were looked at before
        yield from _folders(asked, ranks)
        yield _hub(asked, ranks)
    yield _address(asked, ranks)
    yield _group("gloo", ranks)
    yield _group("nccl", ranks)
    if measured(ranks):
        yield bandwidth_line(measured(ranks), figures_of(ranks), asked.params, _gpu_of(ranks).get("name", ""))
    for of in ranks.values():
        if asked.is_job and of.get("gloo", {}).get("times"):
            yield _clocks(of["gloo"]["times"])
            break


def measured(ranks: Ranks) -> dict[str, Any]:
    """Return the bandwidth that the ranks have measured; {} if they have not come so far."""
    # Every rank has the figures of the slowest, so those of any rank will do.
    found = dict(ranks[min(ranks)].get("bandwidth", {})) if ranks else {}
    return found if found.get("all") else {}


def figures_of(ranks: Ranks) -> dict[str, float]:
    """Return the figures for plans that the ranks have measured; {} if they have not come so far."""
    found = measured(ranks)
    # Over gloo the ranks have moved data of CPUs, whose memory is no figure of a plan.
    memory = _gpu_of(ranks).get("memory", 0.0) if found.get("backend") == "nccl" else 0.0
    return machine_figures(found, memory=memory) if found else {}


def _gpu_of(ranks: Ranks) -> Mapping[str, Any]:
    """Return the first GPU that the first rank sees; {} if it sees none."""
    gpus = ranks[min(ranks)].get("torch", {}).get("gpus", ())
    return gpus[0] if gpus else {}


def where(ranks: Ranks, rank: int) -> str:
    """Return such as `rank 2 on node7`."""
    node = ranks[rank].get("node", {}).get("node", "")
    return f"rank {rank} on {node}" if node else f"rank {rank}"


def nodes_of(ranks: Ranks) -> dict[str, list[int]]:
    """Return the ranks of each node, by its name."""
    nodes: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        nodes.setdefault(str(ranks[rank].get("node", {}).get("node", "?")), []).append(rank)
    return nodes


def _versions(asked: Asked, ranks: Ranks) -> Line:
    """Return whether all ranks have the same Python and packages, and whether these are those of this machine."""
    found: dict[str, dict[str, list[int]]] = {name: {} for name in VERSIONS}
    for rank, of in sorted(ranks.items()):
        for name in VERSIONS:
            # rank_facts.py writes each version where it is found: torch takes seconds to import.
            part = "torch" if name in ("torch", "transformers") else "node"
            value = str(of.get(part, {}).get("version" if name == "torch" else name, ""))
            found[name].setdefault(value, []).append(rank)
        if error := of.get("torch", {}).get("error"):
            words = f"{where(ranks, rank)} cannot import torch: {error}"
            return Line(WRONG, "versions", words, _python_fix(asked))
    # Ranks that differ among each other are wrong; ranks that differ from this machine alone only plan otherwise.
    different = []
    for name, by_version in found.items():
        if len(by_version) > 1:
            parts = [f"{version or 'none'} on {where(ranks, members[0])}" for version, members in by_version.items()]
            different.append(f"{name} is {', '.join(parts)}")
    if different:
        fix = _python_fix(asked) + ", the same on all nodes; the start files of your shell must not select another one"
        return Line(WRONG, "versions", "; ".join(different), fix)
    words = ", ".join(f"{name} {next(iter(by_version))}" for name, by_version in found.items())
    others = []
    for name, version in asked.versions.items():
        on_ranks = next(iter(found[name]))
        if version.partition("+")[0] != on_ranks.partition("+")[0]:  # the part after + is the build, such as cu130
            others.append(name)
    if others:
        here = ", ".join(f"{name} {asked.versions[name]}" for name in others)
        return Line(NOTE, "versions", f"{words} on all ranks; this machine, which makes the plan, has {here}")
    return Line(OK, "versions", f"{words} on all ranks")


def _python_fix(asked: Asked) -> str:
    return "set launch.python to a Python on a shared folder" if asked.is_job else "install mmfsdp again"


def _gpus(asked: Asked, ranks: Ranks) -> Line:
    """Return whether each rank sees the GPU that it is to train on."""
    device = asked.params.train.device
    if device is Device.CPU:
        return Line(OK, "GPUs of ranks", "none needed: train.device is cpu")
    if any(of.get("torch", {}).get("error") for of in ranks.values()):
        return Line(NOTE, "GPUs of ranks", "not checked because of the errors above")
    counts = {rank: len(of.get("torch", {}).get("gpus", ())) for rank, of in ranks.items()}
    wanting = []
    for rank, gpus in sorted(counts.items()):
        environment = ranks[rank].get("node", {}).get("environment", {})
        local_ranks = asked.params.launch.ranks_per_node
        # A job may hide the GPUs of its other ranks from a rank, which then sees one of several.
        allocated = gpus_of_node(environment) or 0
        if not (gpus >= local_ranks or (gpus and allocated >= local_ranks)) and (
            device is Device.CUDA or (asked.is_job and allocated)
        ):
            wanting.append((rank, gpus, allocated, local_ranks))
    if wanting:
        return _missing_gpus(asked, ranks, wanting)
    if not any(counts.values()):
        return Line(OK, "GPUs of ranks", "none, and none requested: the ranks train on the CPU")
    first = ranks[min(ranks)].get("torch", {})
    names = ", ".join(dict.fromkeys(f"{gpu['name']} of {size(gpu['memory'])}" for gpu in first.get("gpus", ())))
    words = f"each rank sees {', '.join(map(str, sorted(set(counts.values()))))}: {names}, CUDA {first.get('cuda')}"
    if max(counts.values()) < asked.params.launch.ranks_per_node:
        return Line(NOTE, "GPUs of ranks", f"{words}. {HIDDEN_GPUS}")
    emulating = [gpu["name"] for gpu in first.get("gpus", ()) if gpu.get("bf16") is False]
    if emulating and asked.params.fsdp.mixed_precision is Precision.BF16:
        return Line(NOTE, "GPUs of ranks", f"{words}. {emulating[0]} {EMULATED}; set fsdp.mixed_precision to fp16")
    return Line(OK, "GPUs of ranks", words)


def _missing_gpus(asked: Asked, ranks: Ranks, wanting: Sequence[tuple[int, int, int, int]]) -> Line:
    rank, gpus, allocated, local_ranks = wanting[0]
    words = f"{where(ranks, rank)} sees {gpus} of {local_ranks}"
    if allocated:
        words += f", and the job has {allocated} on that node"
    if len(wanting) > 1:
        others = "another rank" if len(wanting) == 2 else f"{len(wanting) - 1} other ranks"
        words += f"; it is the same for {others}"
    built = ranks[rank].get("torch", {})
    # A build for CPUs sees no GPU, whatever the job has.
    if not built.get("cuda"):
        fix = f"torch {built.get('version')} is a build for CPUs: install another one (`python3 install.py "
        return Line(
            WRONG, "GPUs of ranks", words, fix + "--torch-index URL` or --system-torch), or set train.device cpu"
        )
    fix = "run `srun nvidia-smi` on that node; its driver may be older than this torch's CUDA "
    fix += f"{built['cuda']}, or launch.gpus_as does not match how this cluster allocates GPUs"
    return Line(WRONG, "GPUs of ranks", words, fix)


def _folders(asked: Asked, ranks: Ranks) -> Iterator[Line]:
    """Yield a line on the run folder, which all must share, and on each other folder that ranks write into."""
    for rank, of in sorted(ranks.items()):
        if of.get("folders", {}).get("token", asked.token) != asked.token:
            words = (
                f"{where(ranks, rank)} does not see the file that this machine wrote: it is a different folder there"
            )
            yield Line(WRONG, RUN_FOLDER, words, "set launch.folder to a folder on a file system that all nodes share")
            break
    else:
        yield _place(RUN_FOLDER, ranks)
    names = dict.fromkeys(name for of in ranks.values() for name in of.get("folders", {}).get("places", {}))
    for name in names:
        if name != RUN_FOLDER:
            yield _place(name, ranks)


def _place(name: str, ranks: Ranks) -> Line:
    """Return the line of a folder: of the first rank that cannot use it, else of the one with the least room."""
    lines = []
    for rank, of in sorted(ranks.items()):
        found = of.get("folders", {}).get("places", {}).get(name)
        if found is not None:
            lines.append((place_line(name, found), found.get("free", 0), rank))
    if not lines:
        return Line(NOTE, name, "not checked: no rank got this far")
    # A fault of any rank counts before a note of another one.
    for state in (WRONG, NOTE):
        for line, _, rank in lines:
            if line.level == state:
                return Line(state, name, f"{where(ranks, rank)}: {line.message}", line.fix)
    line, _, _ = min(lines, key=lambda item: item[1])
    return Line(OK, name, f"{line.message}, from all ranks" if len(lines) > 1 else line.message)


def _hub(asked: Asked, ranks: Ranks) -> Line:
    fields = hub_weights(asked.params)
    offline = is_offline(asked.params)
    first: Line | None = None
    for rank, of in sorted(ranks.items()):
        if "hub" not in of:
            continue
        # Its packages cannot be imported there.
        if error := of["hub"].get("error"):
            return Line(WRONG, "hub", f"{where(ranks, rank)}: {error}", _python_fix(asked))
        line = hub_line(of["hub"], fields, job_is_offline=offline, where=f"{where(ranks, rank)}: ")
        if line.level == WRONG:
            return line
        first = first or line
    return first or Line(NOTE, "hub", "not checked: no rank got this far")


def _address(asked: Asked, ranks: Ranks) -> Line:
    """Return whether the name of the first node has an address on all nodes, and answers."""
    for rank, of in sorted(ranks.items()):
        if error := of.get("address", {}).get("error"):
            return Line(WRONG, "address", f"{where(ranks, rank)}: {error}", of["address"].get("fix", ""))
    hosts = {str(of["address"].get("host")): of["address"] for of in ranks.values() if of.get("address")}
    if not hosts:
        return Line(NOTE, "address", "not checked: no rank got this far")
    first = next(iter(hosts.values()))
    words = f"all ranks reach {first.get('host')} over {first.get('GLOO_SOCKET_IFNAME') or 'any interface'}"
    # On one node the ranks meet at the loopback address, which tells nothing about the network.
    if asked.is_job and asked.params.launch.nodes == 1:
        words += "; the job is on one node: --launch.nodes 2 also checks names and the network between nodes"
        return Line(NOTE, "address", words)
    return Line(OK, "address", words)


def _group(backend: str, ranks: Ranks) -> Line:
    """Return whether a backend brings numbers from each rank to each rank."""
    found = {rank: of[backend] for rank, of in ranks.items() if backend in of}
    # A part in progress that has no result: the process ended inside, as by a signal.
    dead = [rank for rank, of in ranks.items() if of.get("doing") == backend]
    if dead:
        words = f"{where(ranks, dead[0])} was killed during this check"
        return Line(WRONG, backend, words, f"{FIXES[backend]}; its log says more")
    for rank, of in sorted(found.items()):
        if of.get("error"):
            return Line(WRONG, backend, f"{where(ranks, rank)}: {of['error']}", FIXES[backend])
    if not found:
        return Line(NOTE, backend, "not checked because of the errors above")
    if len(found) < len(ranks):
        missing = min(set(ranks) - set(found))
        return Line(WRONG, backend, f"{where(ranks, missing)} did not get this far", FIXES[backend])
    first = found[min(found)]
    if first.get("skipped"):
        return Line(NOTE if first.get("wanted") else OK, backend, f"not used: {first['skipped']}")
    # Each rank has added its number plus 1.
    expected = first["ranks"] * (first["ranks"] + 1) / 2
    if any(of.get("sum") != expected for of in found.values()):
        return Line(WRONG, backend, f"a sum over the ranks is wrong: {[of.get('sum') for of in found.values()]}", "")
    return Line(OK, backend, f"{first['ranks']} ranks can communicate")


FIXES = {
    "gloo": "set launch.interface to the network by which the nodes reach each other (`ip addr` on a node lists them), "
    "and look for an exported GLOO_SOCKET_IFNAME",
    "nccl": "export NCCL_DEBUG=INFO in launch.setup and run the check again; set launch.interface, and look for "
    "exported NCCL_ variables",
}


def _clocks(times: Sequence[float]) -> Line:
    """Return by how much the clocks differ. times: of all ranks at the same moment, in unix seconds."""
    difference = max(times) - min(times)
    words = f"those of the nodes differ by {difference:.1f} s"
    fix = "ask the administrators to synchronize them (chrony, NTP)"
    if difference > CLOCK_NOTE_S:
        return Line(WRONG if difference > CLOCK_WRONG_S else NOTE, "clocks", words, fix)
    return Line(OK, "clocks", words)


def missing_ranks(asked: Asked, ranks: Ranks) -> list[int]:
    """Return the ranks that have reported nothing."""
    return [rank for rank in range(asked.ranks) if rank not in ranks]
