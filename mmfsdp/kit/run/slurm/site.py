"""The customs of a cluster: launch fields as options of sbatch and srun, and the variables that a job inherits.

A cluster is data, a profile of launch fields (params/presets/clusters); nothing here knows one by its name.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass

from ....params import Device, GpusAs, LaunchParams, RunParams
from ....params.launching import CPUS_BESIDE_A_GPU
from ....params.profiles import hidden_profiles, profile_path
from ....params.run import with_cluster
from ....params.shell_words import needed_variables
from ....params.variables import with_variables
from ..launchers.registry import launcher_named
from ..rank_count import count_of, with_ranks
from ..ranks.address import HOST_VARIABLE
from .ask_slurm import CLUSTERS, ask_slurm
from .job_gpus import GPUS_VARIABLE
from .never_starts import refused_field
from .slurm_state import SUBMIT_TIMEOUT_S

HIDDEN_GPUS = (
    "NCCL finds no NVLink to a GPU that it does not see, and falls back to PCIe, which is several times slower. With "
    "launch.gpus_as gpus-per-node or gres, a rank sees all GPUs of the job on its node, if the cluster allows it"
)
"""The cost where a rank sees its own GPU only: https://github.com/NVIDIA/nccl/issues/1066."""


# ---- options of sbatch and srun ----


def sbatch_options(launch: LaunchParams, gpus: int) -> dict[str, str | bool]:
    """Return the options of sbatch that depend on the cluster, by name; True for one without a value."""
    options: dict[str, str | bool] = dict(gpu_options(launch, gpus))
    if launch.slurm_cluster:
        options["clusters"] = launch.slurm_cluster
    if launch.reservation:
        options["reservation"] = launch.reservation
    for option in launch.sbatch:
        name, equals, value = option.partition("=")
        options[name] = value if equals else True
    if not any(name.startswith("no-r") for name in options):  # no-requeue, which sbatch takes cut short
        options["requeue"] = True
    return options


def gpu_options(launch: LaunchParams, gpus: int) -> dict[str, str]:
    """Return the options of sbatch that ask for so many GPUs of each node, and for other generic resources."""
    typed = f"{launch.gpu_type}:" if launch.gpu_type else ""
    options, gres = {}, list(launch.gres)
    way = launch.gpus_as or GpusAs.GPUS_PER_NODE
    if gpus and way is GpusAs.GPUS_PER_NODE:
        options["gpus-per-node"] = f"{typed}{gpus}"
    elif gpus and way is GpusAs.GPUS_PER_TASK:
        options["gpus-per-task"] = f"{typed}1"
    elif gpus and way is GpusAs.GRES:
        gres.insert(0, f"gpu:{typed}{gpus}")
    if gres:
        options["gres"] = ",".join(gres)  # of two options --gres, sbatch takes the last alone
    return options


def srun_options(launch: LaunchParams, cpus: int | None) -> list[str]:
    """Return the options of the srun that starts the ranks."""
    # In blocks over nodes and over sockets: a rank that sees the GPUs of its socket takes its own by LOCAL_RANK.
    options = ["--kill-on-bad-exit=1", "--distribution=block:block"]
    if cpus:
        options.append(f"--cpus-per-task={cpus}")
    return options + [f"--{option}" for option in launch.srun]


def in_container(launch: LaunchParams) -> bool:
    """Return True if srun starts the ranks in a container, as Pyxis does: the batch script itself is outside."""
    return any(option.startswith("container-") for option in launch.srun)


# ---- lines of the batch file ----


def export_lines(launch: LaunchParams, gpus: int, *, offline: bool) -> list[str]:
    """Return the lines that tell the ranks what the profile says; what launch.setup exports wins over them."""
    lines = ["export HF_HUB_OFFLINE=1"] if offline else []
    if launch.interface:
        names = ",".join(launch.interface)
        lines += [f"export GLOO_SOCKET_IFNAME={names}", f"export NCCL_SOCKET_IFNAME=={names}"]  # = for the exact name
    if launch.host:
        lines.append(f"export {HOST_VARIABLE}={shlex.quote(launch.host)}")
    if gpus and launch.gpus_as is GpusAs.NONE:
        lines.append(f"export {GPUS_VARIABLE}={gpus}")
    return lines


def variable_lines(field: str, text: str) -> list[str]:
    """Return the lines that end the job with a reason if it lacks a variable that a command names."""
    lines = []
    for name in needed_variables(text):
        begin = f"begin_line 'launch.{field}: ${name} is not set in the job: test -v {name}'"
        lines += [begin, f"test -v {name}", "stop_if_failed"]
    return lines


# ---- the variables that a job inherits ----

_NOT_INHERITED = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_")
_OF_A_RUN = {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
_OF_A_CHOICE = {"CUDA_VISIBLE_DEVICES", HOST_VARIABLE, GPUS_VARIABLE}
_BREAKING = {
    "ARRAY_INX", "CLUSTERS", "ERROR", "EXPORT", "GRES", "JOB_NAME", "NO_KILL", "NO_REQUEUE", "OPEN_MODE", "OUTPUT",
    "REQUEUE", "SIGNAL", "WAIT",
}  # fmt: skip
"""Variables SBATCH_... that would break the launch. Those that ask for GPUs would ask for other ones than it does."""
_OPTIONS = {"timelimit": ("time",), "mem-per-node": ("mem",), "mem-per-cpu": ("mem",), "mem-per-gpu": ("mem",)}
_OPTIONS["cpus-per-gpu"] = ("cpus-per-task",)
"""Name of a variable without SBATCH_ -> the options that replace it; others have the name of their option."""


def job_environment(options: Collection[str]) -> dict[str, str]:
    """Return this process's environment without what an allocation, another run or a choice of GPUs has left in it.

    A person's SBATCH_ variables stay, such as SBATCH_ACCOUNT, but for those that would break the launch, and those of
    `options`, the options that the batch file has: sbatch takes a variable before a line of the file.
    """
    environment = {}
    for name, value in os.environ.items():
        if name.startswith("SBATCH_"):
            stays = _stays(name.removeprefix("SBATCH_"), options)
        else:
            stays = not name.startswith(_NOT_INHERITED) or name == "SLURM_CONF"
        if stays and name not in _OF_A_RUN | _OF_A_CHOICE:
            environment[name] = value
    return environment


def _stays(variable: str, options: Collection[str]) -> bool:
    """Return whether the variable SBATCH_`variable` holds for a job whose batch file has these options."""
    option = variable.lower().replace("_", "-")
    if variable in _BREAKING or variable.startswith("GPUS"):
        return False
    return not {option, *_OPTIONS.get(option, ())} & set(options)


# ---- what nobody says ----


def time_limit(launch: LaunchParams) -> int:
    """Return the time limit of a run in minutes: the one that is set, else its launcher's."""
    return launcher_named(launch.executor).time_limit(launch)


def chosen_cluster(launch: LaunchParams) -> str:
    """Return the cluster to submit to: the one that is set, else that of SBATCH_CLUSTERS or SLURM_CLUSTERS, else ""."""
    of_variables = os.environ.get(f"SBATCH_{CLUSTERS}") or os.environ.get(f"SLURM_{CLUSTERS}")
    return launch.slurm_cluster or of_variables or ""


def with_defaults(params: RunParams) -> RunParams:
    """Return the parameters with what the launcher decides where nobody says it: a job's time limit and its CPUs."""
    return launcher_named(params.launch.executor).with_defaults(params)


def settled(params: RunParams) -> RunParams:
    """Return the parameters that a launch settles: the ranks, the variables in paths, a job's time limit and its CPUs.

    Raises ParamError as `with_ranks` and `with_variables` do.
    """
    return with_defaults(with_ranks(with_variables(params)))


@dataclass(frozen=True)
class NodeKind:
    """Nodes of a partition that are alike."""

    partition: str
    is_default: bool
    limit_min: int | None
    """Time limit of the partition in minutes; None for none."""
    cpus: int
    gpus: dict[str, int]
    """Type of GPUs, or "" where Slurm names none -> how many of them a node has."""

    def gpu_count(self, gpu_type: str) -> int:
        """Return how many GPUs of a type a node has, or of any type for ""."""
        return self.gpus.get(gpu_type, 0) if gpu_type else sum(self.gpus.values())


known_kinds: dict[tuple[str, str], list[NodeKind]] = {}
"""Kinds that `node_kinds` has found, by the variable by which commands find their Slurm, and cluster: a sweep asks
once."""


def node_kinds(cluster: str) -> list[NodeKind]:
    """Return the kinds of nodes of all partitions of a cluster. Empty where Slurm does not answer."""
    slurm = os.environ.get("SLURM_CONF", ""), cluster
    if slurm in known_kinds:
        return known_kinds[slurm]
    kinds = []
    options = ("--noheader", "--all", "--exact", "--format=%P|%l|%c|%G")
    for line in ask_slurm("sinfo", *options, cluster=cluster).stdout.splitlines():
        name, _, others = line.strip().partition("|")
        limit, bar, others = others.partition("|")
        cpus, _, gres = others.partition("|")
        if bar and cpus.isdecimal():
            gpus = {kind or "": int(count) for kind, count in _GPU_GRES.findall(gres)}
            kinds.append(NodeKind(name.removesuffix("*"), name.endswith("*"), minutes(limit), int(cpus), gpus))
    if kinds:
        known_kinds[slurm] = kinds
    return kinds


_GPU_GRES = re.compile(r"(?:^|,)gpu(?::([^:,()]+))?:(\d+)")
"""GPUs in the generic resources of a node, such as gpu:a100:4(S:0-1) or gpu:4."""


def kinds_in(partitions: str, cluster: str) -> list[NodeKind]:
    """Return the kinds of nodes of some partitions of a cluster, separated by commas; of the default one for ""."""
    names = partitions.split(",")
    return [kind for kind in node_kinds(cluster) if (kind.partition in names if partitions else kind.is_default)]


def cpus_of_rank(launch: LaunchParams, gpus: int, kinds: list[NodeKind]) -> int | None:
    """Return the CPUs that each rank on GPUs has by default: the share of its GPUs in those of a node, at most 8.

    gpus: how many the job asks for on each node. None where no node is known that has them.
    """
    shares = []
    for kind in kinds:
        of_node = kind.gpu_count(launch.gpu_type)
        if of_node >= gpus:
            shares.append(kind.cpus * gpus // (of_node * launch.ranks_per_node))
    return max(1, min(CPUS_BESIDE_A_GPU, *shares)) if shares else None


def minutes(text: str) -> int | None:
    """Return a time of Slurm in minutes, at least one: 90, 90:00, 1:30:00, 1-0, 1-0:30; None for any other text."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if not match:
        return None
    days, first, second, third = (int(part or 0) for part in match.groups())
    hours = first
    if match[1] is None and match[4] is None:  # minutes, or minutes:seconds
        hours, second, third = 0, first, second
    seconds = ((days * 24 + hours) * 60 + second) * 60 + third
    return max(1, seconds // 60)


# ---- what a person should know before the job is submitted ----


def notes(params: RunParams) -> list[str]:
    """Return what a person should know of the job that `params` ask for, a sentence each."""
    launch = with_cluster(with_ranks(params).launch)
    found = profile_notes(params.launch.cluster)
    gpus = launch.gpu_count or 0
    idle = gpus - launch.ranks_per_node
    if idle > 0 and params.train.device is not Device.CPU:
        of_them = f"{idle} of the {gpus} GPUs of each node have no rank, and are paid for: "
        found.append(f"{of_them}raise launch.ranks to {gpus * launch.nodes}, or lower launch.gpus_per_node")
    if launch.gpus_as is GpusAs.GPUS_PER_TASK and launch.gpus(params.train.device) > 1:
        found.append(f"launch.gpus_as gpus-per-task: each rank sees its own GPU only. {HIDDEN_GPUS}")
    mounts = any(option.startswith(("container-mounts", "container-mount-home")) for option in launch.srun)
    if in_container(launch) and not mounts:
        folder = os.path.abspath(os.path.expanduser(launch.folder))
        words = f"launch.srun has a container and no container-mounts: unless your cluster mounts {folder} by itself, "
        found.append(f"{words}add container-mounts={folder}:{folder}, and the folder that mmfsdp is installed in")
    return found


def profile_notes(name: str | None) -> list[str]:
    """Return what a person should know of the file of a profile: which one is read, and that it is another user's."""
    found: list[str] = []
    if not name:
        return found
    path = profile_path(name)
    if hidden := hidden_profiles(name):
        found.append(f"launch.cluster {name}: {path} is read, and not {' and '.join(map(str, hidden))}")
    owner = path.stat().st_uid
    if owner not in (0, os.getuid()):
        words = f"launch.cluster {name}: {path} belongs to the user {owner}, and your job runs what it says; "
        found.append(f"{words}read it first, or take a copy of your own")
    return found


def question_lines(params: RunParams, text: str, options: Collection[str]) -> list[str]:
    """Return what the job asks for, and when and where Slurm would start it: in each of its partitions, a line each.

    text: of the batch file. It is a question: nothing is submitted, and a refusal is told as Slurm words it.
    """
    params = with_ranks(params)
    launch = with_cluster(params.launch)
    limit, gpus = time_limit(launch), launch.nodes * launch.gpus(params.train.device)
    asks = f"asks for {count_of(gpus, 'GPU')} for {limit} min: at most {gpus * limit / 60:.4g} GPU-hours"
    if not gpus:
        asks = f"asks for {count_of(launch.world_size, 'task')} without a GPU for {limit} min"
    lines = [asks, *notes(params)]
    for partition in (launch.partition or "").split(","):
        place = [f"--partition={partition}"] if partition else []
        done = ask_slurm(
            *("sbatch", "--test-only", *place),
            text=text,
            environment=job_environment(options),
            timeout=SUBMIT_TIMEOUT_S,
        )
        lines.append(_answer(done.stdout + done.stderr, partition))
    return lines


_WOULD_START = re.compile(r"Job \d+ to start at (\S+) using (\d+) processors on nodes (\S+) in partition (\S+)")


def _answer(words: str, partition: str) -> str:
    """Return a line on what `sbatch --test-only` has said."""
    if found := _WOULD_START.search(words):
        start, _, nodes, place = found.groups()
        return f"{place}: Slurm would start it at {start.replace('T', ' ')} on {nodes}"
    place = partition or "its partition"
    refused = [line for line in words.splitlines() if re.search("allocation failure|submission failed", line)]
    if not refused:
        return f"{place}: Slurm does not say when it would start it: {' '.join(words.split())[:300] or 'no answer'}"
    field = refused_field(" ".join(refused))
    fix = f"; change {field}" if field else ""
    return f"{place}: Slurm would refuse it: {' '.join(refused)[:500]}{fix}"
