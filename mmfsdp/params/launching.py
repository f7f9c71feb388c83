"""LaunchParams: where the ranks run, on this machine or on a Slurm cluster, and where the run's folder is."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator
from typing_extensions import Self

from .base import ANY_OTHER, ParamError, Params, did_you_mean
from .enums import Device, Executor, GpusAs
from .own import OwnCode, check_own, is_own_code
from .sbatch_lines import options_of_line
from .shell_words import check_words

JOB_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a cluster sends to every process of a job, not to its ranks alone."""

Command = Annotated[str, AfterValidator(check_words)]
"""Words of a batch file in which bash expands variables and does nothing else."""

# Nothing that these patterns allow can end a line of the batch file or start a command in it: no quote, no line end, no
# `$(`. pydantic's `$` matches at the end of the text alone, not before a last line end as Python's does.
_NAMES = r"^[A-Za-z0-9_.,+@-]+$"
_WORD = r"[A-Za-z0-9_./:=@%+,-]+"
_FEATURES = r"^[A-Za-z0-9_.,:&|*()\[\]-]+$"
_NODES = r"^[A-Za-z0-9_.,\[\]-]+$"
_OPTION = r"^(comment=[A-Za-z0-9_.,:=+@%/&|*()\[\] -]+|[a-z][a-z-]*(=[A-Za-z0-9_.,:=+@%/&|*()\[\]-]+)?)$"
_SRUN_OPTION = r"^[a-z][a-z-]*(=[^ ]+)?$"
SrunOption = Annotated[Command, Field(pattern=_SRUN_OPTION)]
_GPUS = r"([A-Za-z0-9][A-Za-z0-9_.-]*):[0-9]{1,4}"
_GRES = r"^[A-Za-z][A-Za-z0-9_.-]*(:[A-Za-z0-9_.-]+){0,2}$"
_HOST = r"^[A-Za-z0-9_.-]*(\{host\}[A-Za-z0-9_.-]*)?$"
_INTERFACE = r"^[A-Za-z0-9_.@-]+$"

SBATCH_FIELDS = {
    **dict.fromkeys(
        ("account", "constraint", "exclude", "gres", "mem", "nodes", "partition", "qos", "reservation"), ""
    ),
    "clusters": "slurm_cluster",
    "cpus-per-gpu": "cpus_per_task",
    "cpus-per-task": "cpus_per_task",
    "error": "folder",
    "gpus": "gpus_per_node",
    "gpus-per-node": "gpus_per_node",
    "gpus-per-task": "gpus_as",
    "job-name": "name",
    "ntasks": "ranks",
    "ntasks-per-node": "ranks",
    "output": "folder",
    "time": "timeout_min",
}
"""Options of sbatch that the launcher sets -> the field of launch that sets it; "" where it has the option's name."""
SBATCH_BREAKS = ("array", "export", "open-mode", "parsable", "signal", "test-only", "wait", "wrap")
"""Options of sbatch that would break the launch."""

SRUN_FIELDS = {
    **dict.fromkeys(("gres", "nodes"), ""),
    "cpus-per-task": "cpus_per_task",
    "error": "folder",
    "gpus": "gpus_per_node",
    "gpus-per-node": "gpus_per_node",
    "gpus-per-task": "gpus_as",
    "ntasks": "ranks",
    "ntasks-per-node": "ranks",
    "output": "folder",
    "time": "timeout_min",
}
SRUN_BREAKS = ("distribution", "export", "jobid", "kill-on-bad-exit", "multi-prog", "relative", "unbuffered")
"""Options of srun that would break the launch."""

SLURM_FIELDS = (
    "cluster", "nodes", "gpus_per_node", "gpus_as", "gres", "cpus_per_task", "mem", "slurm_cluster", "partition",
    "account", "qos", "constraint", "exclude", "reservation", "host", "interface", "python", "modules", "setup",
    "sbatch", "srun", "hub_offline",
)  # fmt: skip
"""The fields that have an effect on a Slurm cluster only."""

STEP_FIELDS = ("cluster", "nodes", "gpus_per_node", "cpus_per_task", "host", "interface", "srun", "hub_offline")
"""The fields of SLURM_FIELDS that have an effect with executor srun, too."""

FIELDS_OF = {Executor.LOCAL: (), Executor.SLURM: SLURM_FIELDS, Executor.SRUN: STEP_FIELDS}
"""Executor -> the fields of SLURM_FIELDS that have an effect with it."""

CPUS_BESIDE_A_GPU = 8
"""CPUs of a rank on a GPU, for its threads and data workers: Slurm gives one. Nodes have 8 to 16 for each GPU."""


class LaunchParams(Params):
    """The place of the ranks and of the run folder."""

    name: str = Field("first", pattern=r"^\w[\w.+-]{0,99}$", examples=["first-run", "lr_1e-3"])
    """Name of the run and of its folder; letters, digits, and . _ + - within. Default first."""

    folder: str = Field("runs", min_length=1)
    """Folder of all runs; on Slurm, on a file system that all nodes share. Default runs, in the current folder."""

    executor: Executor | OwnCode = Executor.LOCAL
    """Launcher of the ranks: local (this machine), slurm (a job), srun (a step of the job that this notebook or
    terminal runs in), or the import path of your own, such as my_scheduler:Queue. Default local."""

    ranks: int | None = Field(None, ge=1)
    """Processes that train together, on all nodes; a count. Default unset: one for each GPU of this machine, or on
    Slurm that the job asks for; 2 without GPUs. The run's params.yaml has the number."""

    threads: int | None = Field(None, ge=1)
    """CPU threads per rank; a count. Default unset: the cores shared evenly; on Slurm, all CPUs of the rank."""

    timeout_min: int | None = Field(None, ge=1)
    """The run is stopped after so many minutes; on Slurm, the job's time limit. Default unset: 720; on Slurm the
    profile's, or else that of your SBATCH_TIMELIMIT, or else 720 but no more than the partition takes."""

    silence_s: float = Field(60.0, ge=1)
    """A rank that shows no progress for so long hangs, and the run is stopped with its name and stack; in seconds. The
    first step, profiles, checkpoints and each tensor of a model that is wrapped may take 5 times that, imports and the
    opening of the data 20 times, and any other step 5 times the longest so far. Default 60."""

    replace: bool = False
    """If a finished run has this name already, rename it (name-1, name-2, ...) rather than refuse. Default false."""

    cluster: str | None = Field(None, pattern=r"^[A-Za-z0-9_.+/~-]+$", examples=["lab"])
    """Slurm: profile with values for the fields below that are unset here: the name of a YAML file in the folder
    $MMFSDP_CLUSTERS, in ./clusters or in ~/.config/mmfsdp/clusters, or its path. Default unset: none."""

    nodes: int = Field(1, ge=1)
    """Slurm: machines over which the ranks are spread evenly; a count. Default 1."""

    gpus_per_node: int | str | None = None
    """Slurm: GPUs of each node: a count, or their type and a count, such as a100:4. Default unset: one per rank where
    train.device is cuda, none where cpu."""

    gpus_as: GpusAs | None = None
    """Slurm: how GPUs are asked for, as the cluster documents it: gpus-per-node, gres, gpus-per-task, none. Default
    unset: gpus-per-node."""

    gres: tuple[Annotated[str, Field(pattern=_GRES)], ...] = Field((), examples=["localssd:200"])
    """Slurm: other generic resources of each node, such as localssd:200; the profile's come first. Slices of GPUs that
    only a gres names, such as gpu:1g.10gb:2, are here too, with gpus_as none. Default none."""

    cpus_per_task: int | None = Field(None, ge=1)
    """Slurm: CPUs of each rank; a count. Default unset: with GPUs 8, or launch.threads if set and more; fewer if a
    node has fewer for each of its GPUs. Without GPUs launch.threads, or else what the cluster gives."""

    mem: str | None = Field(None, pattern=r"^[0-9]+[KMGT]?$", examples=["64G"])
    """Slurm: memory of each node, such as 64G; 0 for all of it. Default unset: what the cluster gives."""

    slurm_cluster: str | None = Field(None, pattern=_NAMES, examples=["gpu"])
    """Slurm: the cluster to submit to, where several share their accounting, as sbatch's -M names it. Default unset:
    that of your SLURM_CLUSTERS, or else the one whose commands are installed here."""

    partition: str | None = Field(None, pattern=_NAMES, examples=["gpu"])
    """Slurm: the partition (queue). Default unset: the cluster's default."""

    account: str | None = Field(None, pattern=_NAMES, examples=["lab"])
    """Slurm: the account that pays. Default unset: the user's default."""

    qos: str | None = Field(None, pattern=_NAMES, examples=["high"])
    """Slurm: quality of service. Default unset: the user's default."""

    constraint: str | None = Field(None, pattern=_FEATURES, examples=["a100&nvlink"])
    """Slurm: features that nodes must have, such as a100&nvlink. Default unset: none."""

    exclude: str | None = Field(None, pattern=_NODES, examples=["node[1-3],node7"])
    """Slurm: nodes not to be used, such as node[1-3],node7. Default unset: none."""

    reservation: str | None = Field(None, pattern=_NAMES, examples=["course"])
    """Slurm: the reservation to run in. Default unset: none."""

    host: str | None = Field(None, min_length=1, pattern=_HOST, examples=["{host}i", "{host}.ib.cluster"])
    """Slurm: name by which the other nodes reach the job's first node, whose own name {host} stands for, such as
    {host}i. A MASTER_ADDR that launch.setup exports wins. Default unset: {host}."""

    interface: tuple[Annotated[str, Field(pattern=_INTERFACE)], ...] | None = Field(None, examples=["ib0"])
    """Slurm: network interfaces by which gloo and NCCL connect, such as ib0; one or several. Default unset: the
    profile's, or else the one that leads to the job's first node, as with an empty list."""

    python: Command | None = Field(None, examples=["/shared/venv/bin/python"])
    """Slurm: command that starts Python on the nodes, of a virtual environment (/shared/venv/bin/python) or in a
    container (apptainer exec --nv /shared/mm.sif python). The job expands $NAME and ~. Default unset: the Python that
    launches."""

    modules: tuple[Annotated[str, Field(pattern=rf"^{_WORD}$")], ...] = Field((), examples=["cuda/12.4"])
    """Slurm: environment modules to load, such as cuda/12.4; the profile's come first. Default none."""

    setup: tuple[Command, ...] = Field((), examples=["source /shared/env.sh"])
    """Slurm: commands run on the first node before the ranks start, one simple command each, such as
    `export NCCL_DEBUG=INFO` or `source ~/env.sh`; the job expands $NAME, ${NAME:-text}, ${NAME:+text} and ~; the
    profile's come first. Default none."""

    sbatch: tuple[Annotated[str, Field(pattern=_OPTION)], ...] = Field((), examples=["mail-type=END"])
    """Slurm: further options of sbatch, as name=value or name, such as exclusive or no-requeue, or lines of a batch
    file, such as `#SBATCH -L scratch`; the profile's come first. Default none."""

    srun: tuple[SrunOption, ...] = Field((), examples=["cpu-bind=cores", "mpi=none"])
    """Slurm: further options of the srun that starts the ranks, as name=value or name, such as cpu-bind=cores or
    Pyxis' container-image=FILE; the job expands $NAME and ~; the profile's come first. Default none."""

    hub_offline: bool | None = None
    """Slurm: the ranks take models and data sets of the Hugging Face hub from its cache and do not ask the network; a
    job that lacks weights is not submitted. Default unset: true, but false with own code, which may load what it wants.
    """

    NEEDS: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = {
        name: ("executor", tuple(executor for executor, fields in FIELDS_OF.items() if name in fields))
        for name in SLURM_FIELDS
    }

    def unavailable(self, name: str, value: Any = ANY_OTHER) -> str:
        """Return why the field cannot have this value, or "".

        A launcher of one's own says at the launch which fields it uses: naming it runs nothing.
        """
        return "" if is_own_code(self.executor) else super().unavailable(name, value)

    @property
    def world_size(self) -> int:
        """Return the number of ranks. Raise ParamError if it is unset."""
        if self.ranks is None:
            raise ParamError("launch.ranks", "is unset; set it, or take `mmfsdp.kit.run.rank_count.with_ranks(params)`")
        return self.ranks

    @property
    def ranks_per_node(self) -> int:
        """Return the number of ranks on each node. Raise ParamError if `ranks` is unset."""
        return self.world_size // self.nodes

    @property
    def gpu_type(self) -> str:
        """Return the type of GPUs that `gpus_per_node` names, such as a100; "" if it names none."""
        return str(self.gpus_per_node).rpartition(":")[0]

    @property
    def gpu_count(self) -> int | None:
        """Return how many GPUs a node has by `gpus_per_node`; None if it is unset."""
        return None if self.gpus_per_node is None else int(str(self.gpus_per_node).rpartition(":")[2])

    def gpus(self, device: Device) -> int:
        """Return the GPUs to request on each node. Raise ParamError if they are too few or nobody has said how many."""
        if self.gpu_count is None and device is Device.AUTO:
            raise ParamError("launch.gpus_per_node", "is unset; set it (0 for none), or train.device to cuda or cpu")
        needed = 0
        if device is Device.CUDA or (device is Device.AUTO and self.gpu_count):  # with GPUs, auto wants them, too
            needed = self.ranks_per_node
        gpus = needed if self.gpu_count is None else self.gpu_count
        if gpus < needed:
            words = f"{gpus} are too few for {needed} ranks a node on train.device {device}; raise it, lower "
            raise ParamError("launch.gpus_per_node", words + "launch.ranks, or spread them over more launch.nodes")
        if gpus and self.gpus_as is GpusAs.GPUS_PER_TASK and gpus != self.ranks_per_node:
            words = f"gpus-per-task gives each rank one GPU, but {self.ranks_per_node} ranks a node have {gpus}"
            raise ParamError("launch.gpus_as", f"{words}; make them equal, or choose gpus-per-node or gres")
        return gpus

    def cpus(self, gpus: int) -> int | None:
        """Return the CPUs to request for each rank of a job with so many GPUs on a node; None for Slurm's default."""
        if self.cpus_per_task is not None:
            return self.cpus_per_task
        if gpus:
            return max(CPUS_BESIDE_A_GPU, self.threads or 0)
        return self.threads

    @field_validator("executor", mode="before")
    @classmethod
    def _read_executor(cls, value: Any) -> Any:
        """Return the entry of the registry that has this name, or what names own code."""
        path = value.get("call") if isinstance(value, dict) else value
        if isinstance(path, str) and ":" in path:
            return check_own(value)
        if isinstance(value, str) and value in list(Executor):
            return Executor(value)
        words = f"{value!r} is not allowed{did_you_mean(str(value), list(Executor))}"
        raise ValueError(f"{words}, or the import path of your own launcher, such as my_scheduler:Queue")

    @field_validator("gpus_per_node", mode="before")
    @classmethod
    def _read_gpus(cls, value: Any) -> Any:
        """Return digits, as flags and forms give them, as a number."""
        if value is None or re.fullmatch(_GPUS, str(value)):
            return value
        if str(value).isdecimal():
            return int(value)
        raise ValueError(f"{value!r} is not allowed; write it as in 4 or a100:4")

    @field_validator("modules", mode="before")
    @classmethod
    def _read_modules(cls, value: Any) -> Any:
        """Return each module by itself, where a text names several as `module load` takes them."""
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
            return value
        return [word for text in texts for word in text.split(" ") if word]

    @field_validator("sbatch", "srun", mode="before")
    @classmethod
    def _read_options(cls, value: Any, info: ValidationInfo) -> Any:
        """Return options without the dashes before them; for sbatch also those in lines of a batch file."""
        if not isinstance(value, (list, tuple)) or not all(isinstance(option, str) for option in value):
            return value
        if info.field_name == "srun":
            return [option.removeprefix("--") for option in value]
        return [option for line in value for option in options_of_line(line)]

    @field_validator("interface", mode="before")
    @classmethod
    def _read_interface(cls, value: Any) -> Any:
        """Return one name as a list of one."""
        return value.split(",") if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_slurm(self) -> Self:
        if self.ranks is not None and self.ranks % self.nodes:
            words = f"{self.ranks} do not spread evenly over {self.nodes} nodes; make it a multiple of launch.nodes"
            raise ParamError("ranks", words)
        if self.unavailable("srun") or is_own_code(self.executor):  # Slurm does not start the ranks
            return self
        check_options("sbatch", self.sbatch, SBATCH_FIELDS, SBATCH_BREAKS)
        check_options("srun", self.srun, SRUN_FIELDS, SRUN_BREAKS)
        if self.gpus_as is not GpusAs.NONE:
            for gres in self.gres:
                if gres.partition(":")[0] == "gpu":
                    words = f"{gres!r} asks for GPUs, as launch.gpus_per_node does; set that with launch.gpus_as gres"
                    raise ParamError("gres", f"{words}, or launch.gpus_as to none if only a gres can name them")
        if any(letter in "%\\\x7f" or letter < " " for letter in self.folder):
            raise ParamError("folder", f"{self.folder!r} holds % or \\ or a control character, which Slurm interprets")
        return self


def check_options(field: str, options: Iterable[str], fields: Mapping[str, str], breaks: Iterable[str]) -> None:
    """Raise ParamError for an option of sbatch or srun that another field sets, or that would break the launch."""
    for option in options:
        name = option.partition("=")[0]
        for own in (*fields, *breaks):
            if own.startswith(name):  # both take a name that is cut short, too
                words = f"{option!r}: mmfsdp sets {own} itself, and the launch needs it so; remove it"
                if own in fields:
                    words = f"{option!r}: mmfsdp sets {own} from launch.{fields[own] or own}; remove it, set that"
                raise ParamError(field, words)
