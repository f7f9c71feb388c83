"""LaunchParams: where the ranks run, on this machine or on a Slurm cluster, and where the run's folder is."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from .check import at_least, coerce, need
from .enums import Device, Executor

_NAME = re.compile(r"\w[\w.+-]{0,99}")
_WORD = r"[\w./:=@%+,-]+"
_PATTERNS = {
    "partition": (r"[\w.,+@-]+", "a partition's name"),
    "account": (r"[\w.,+@-]+", "an account's name"),
    "qos": (r"[\w.,+@-]+", "the name of a quality of service"),
    "reservation": (r"[\w.,+@-]+", "a reservation's name"),
    "constraint": (r"[\w.,:&|*()\[\]-]+", "features of nodes, such as a100 or a100&nvlink"),
    "exclude": (r"[\w.,\[\]-]+", "node names, such as node[1-3],node7"),
    "mem": (r"\d+[KMGT]?", "a size, such as 64G"),
    "cluster": (r"[\w.+/~-]+", "a profile's name or YAML file"),
    "modules": (_WORD, "the name of a module, such as cuda/12.4"),
    "setup": (rf"{_WORD}( +{_WORD})*", "one command of plain words; put anything more into a script and source that"),
    "python": (rf"{_WORD}( +{_WORD})*", "a command of plain words, such as /shared/venv/bin/python"),
    "sbatch": (r"[a-z][a-z-]*(=[\w.,:=+@%/&|*()\[\]-]+)?", "name=value or name, such as mail-type=END or exclusive"),
}
"""Field -> what its value, or each of its values, must match, and that in words. Nothing here can leave its place in
the file that sbatch receives: no quote, no line end, no character that a shell expands."""

_OWN = {
    "nodes": "nodes", "ntasks": "ranks", "ntasks-per-node": "ranks", "time": "timeout_min", "job-name": "name",
    "gpus": "gpus_per_node", "gpus-per-task": "gpus_per_node", "gres": "gpus_per_node",
    "cpus-per-gpu": "cpus_per_task", "output": "folder", "error": "folder",
}  # fmt: skip
"""sbatch option -> the field that says it."""
_KEPT = ("array", "export", "no-requeue", "open-mode", "parsable", "signal", "test-only", "wait", "wrap")
"""sbatch options on which mmfsdp itself depends."""


@dataclass(frozen=True, kw_only=True)
class LaunchParams:
    """Where the ranks run and where the run's folder is."""

    name: str = "first"
    """Name of the run and of its folder; letters, digits, and . _ + - within. Default first."""

    folder: str = "runs"
    """Folder of all runs; on Slurm, on a file system that all nodes share. Default runs, in the current folder."""

    executor: Executor = Executor.LOCAL
    """What starts the ranks: local (this machine), slurm (a job). Default local."""

    ranks: int = 2
    """Processes that train together, on all nodes; a count. Default 2."""

    threads: int | None = None
    """CPU threads per rank; a count. Default unset: the cores shared evenly; on Slurm, all CPUs of the rank."""

    timeout_min: int = 720
    """The run is stopped after so many minutes; on Slurm, the job's time limit. Default 720."""

    silence_s: float = 60.0
    """A rank that shows no progress for so long hangs, and the run is stopped with its name and stack; in seconds. The
    first step and checkpoints may take 5 times that, and any other 5 times the longest so far. Default 60."""

    replace: bool = False
    """If a finished run has this name already, rename it (name-1, name-2, ...) rather than refuse. Default false."""

    cluster: str | None = None
    """Slurm: profile with values for the fields below that are unset here: the name of a YAML file in ./clusters or
    ~/.config/mmfsdp/clusters, or its path. Default unset: none."""

    nodes: int = 1
    """Slurm: machines over which the ranks are spread evenly; a count. Default 1."""

    gpus_per_node: int | None = None
    """Slurm: GPUs of each node; a count. Default unset: one per rank where train.device is cuda, none where cpu."""

    cpus_per_task: int | None = None
    """Slurm: CPUs of each rank; a count. Default unset: launch.threads, or else what the cluster gives."""

    mem: str | None = None
    """Slurm: memory of each node, such as 64G; 0 for all of it. Default unset: what the cluster gives."""

    partition: str | None = None
    """Slurm: the partition (queue). Default unset: the cluster's default."""

    account: str | None = None
    """Slurm: the account that pays. Default unset: the user's default."""

    qos: str | None = None
    """Slurm: quality of service. Default unset: the user's default."""

    constraint: str | None = None
    """Slurm: features that nodes must have, such as a100&nvlink. Default unset: none."""

    exclude: str | None = None
    """Slurm: nodes not to be used, such as node[1-3],node7. Default unset: none."""

    reservation: str | None = None
    """Slurm: the reservation to run in. Default unset: none."""

    python: str | None = None
    """Slurm: command that starts Python on the nodes, of a virtual environment (/shared/venv/bin/python) or in a
    container (apptainer exec --nv /shared/mm.sif python). Default unset: the Python that launches."""

    modules: tuple[str, ...] = ()
    """Slurm: environment modules to load, such as cuda/12.4; the profile's come first. Default none."""

    setup: tuple[str, ...] = ()
    """Slurm: commands run on the first node before the ranks start, one simple command each, such as
    `export NCCL_SOCKET_IFNAME=ib0` or `source /shared/env.sh`; the profile's come first. Default none."""

    sbatch: tuple[str, ...] = ()
    """Slurm: further options of sbatch, as name=value or name; the profile's come first. Default none."""

    def __post_init__(self) -> None:
        coerce(self)
        at_least(self, 1, "ranks", "threads", "timeout_min", "silence_s", "nodes", "cpus_per_task")
        at_least(self, 0, "gpus_per_node")
        need(
            bool(_NAME.fullmatch(self.name)),
            "name",
            f"{self.name!r} cannot name a folder; use up to 100 letters, digits and . _ + -, "
            "beginning with a letter, a digit or _",
        )
        need(bool(self.folder), "folder", "is empty; name a folder, such as runs")
        for name, (pattern, words) in _PATTERNS.items():
            value = getattr(self, name)
            for one in value if isinstance(value, tuple) else () if value is None else (value,):
                need(bool(re.fullmatch(pattern, one, re.ASCII)), name, f"{one!r} is not {words}")
        self._check_sbatch()
        if self.executor is Executor.SLURM:
            self._check_slurm()
        else:
            for f in SLURM_FIELDS:
                value = getattr(self, f)
                need(
                    value == _DEFAULTS[f],
                    f,
                    f"{value!r} is for Slurm alone; remove it, or set launch.executor to slurm",
                )

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node."""
        return self.ranks // self.nodes

    def gpus(self, device: Device) -> int:
        """GPUs to ask for on each node. Raises ParamError where too few are asked for, or nobody has said how many."""
        field = "launch.gpus_per_node"
        if self.gpus_per_node is None:
            need(
                device is not Device.AUTO,
                field,
                "is unset while train.device is auto: say how many GPUs each node gives, 0 for none; or set "
                "train.device to cuda or cpu",
            )
            return self.ranks_per_node if device is Device.CUDA else 0
        enough = device is not Device.CUDA or self.gpus_per_node >= self.ranks_per_node
        need(
            enough,
            field,
            f"{self.gpus_per_node} are too few for {self.ranks_per_node} ranks a node on train.device cuda; raise it, "
            "lower launch.ranks, or spread them over more launch.nodes",
        )
        return self.gpus_per_node

    def _check_slurm(self) -> None:
        need(
            self.ranks % self.nodes == 0,
            "ranks",
            f"{self.ranks} do not spread evenly over {self.nodes} nodes; make it a multiple of launch.nodes",
        )
        folder = re.fullmatch(r"[^\x00-\x1f\x7f%\\]+", self.folder)
        need(bool(folder), "folder", f"{self.folder!r} holds % or \\ or a control character, which Slurm interprets")

    def _check_sbatch(self) -> None:
        for option in self.sbatch:
            name = option.partition("=")[0]
            own = _OWN.get(name, name.replace("-", "_") if name.replace("-", "_") in SLURM_FIELDS else None)
            need(own is None, "sbatch", f"{option!r}: set launch.{own} instead")
            need(name not in _KEPT, "sbatch", f"{option!r}: mmfsdp depends on {name}; remove it")


_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(LaunchParams)}
SLURM_FIELDS = tuple(_DEFAULTS)[list(_DEFAULTS).index("cluster") :]
"""The fields that only Slurm has."""
