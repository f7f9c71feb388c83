"""LaunchParams: where the ranks run, on this machine or on a Slurm cluster, and where the run's folder is."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator
from typing_extensions import Self

from .base import ParamError, Params
from .enums import Device, Executor

# Nothing that these patterns allow can end a line of the batch file or be expanded by a shell: no quote, no line end,
# no `$`. pydantic's `$` matches at the end of the text alone, not before a last line end as Python's does.
_NAMES = r"^[A-Za-z0-9_.,+@-]+$"
_WORD = r"[A-Za-z0-9_./:=@%+,-]+"
_COMMAND = rf"^{_WORD}( +{_WORD})*$"
_FEATURES = r"^[A-Za-z0-9_.,:&|*()\[\]-]+$"
_NODES = r"^[A-Za-z0-9_.,\[\]-]+$"
_OPTION = r"^[a-z][a-z-]*(=[A-Za-z0-9_.,:=+@%/&|*()\[\]-]+)?$"

_SET_BY_MMFSDP = (
    "array", "cpus-per-gpu", "error", "export", "gpus", "gpus-per-task", "gres", "job-name", "no-requeue", "ntasks",
    "ntasks-per-node", "open-mode", "output", "parsable", "signal", "test-only", "time", "wait", "wrap",
)  # fmt: skip
"""sbatch options that the launcher sets from other fields, or that would break it; besides those named as fields."""

SLURM_FIELDS = (
    "cluster", "nodes", "gpus_per_node", "cpus_per_task", "mem", "partition", "account", "qos", "constraint", "exclude",
    "reservation", "python", "modules", "setup", "sbatch",
)  # fmt: skip
"""The fields that have an effect on a Slurm cluster only."""

CPUS_BESIDE_A_GPU = 8
"""CPUs of a rank on a GPU, for its threads and data workers: Slurm gives one. Nodes have 8 to 16 for each GPU."""


class LaunchParams(Params):
    """The place of the ranks and of the run folder."""

    name: str = Field("first", pattern=r"^\w[\w.+-]{0,99}$", examples=["first-run", "lr_1e-3"])
    """Name of the run and of its folder; letters, digits, and . _ + - within. Default first."""

    folder: str = Field("runs", min_length=1)
    """Folder of all runs; on Slurm, on a file system that all nodes share. Default runs, in the current folder."""

    executor: Executor = Executor.LOCAL
    """Place of the ranks: local (this machine), slurm (a job). Default local."""

    ranks: int | None = Field(None, ge=1)
    """Processes that train together, on all nodes; a count. Default unset: one for each GPU of this machine, or on
    Slurm that the job asks for; 2 without GPUs. The run's params.yaml has the number."""

    threads: int | None = Field(None, ge=1)
    """CPU threads per rank; a count. Default unset: the cores shared evenly; on Slurm, all CPUs of the rank."""

    timeout_min: int = Field(720, ge=1)
    """The run is stopped after so many minutes; on Slurm, the job's time limit. Default 720."""

    silence_s: float = Field(60.0, ge=1)
    """A rank that shows no progress for so long hangs, and the run is stopped with its name and stack; in seconds. The
    first step, profiles, checkpoints and each tensor of a model that is wrapped may take 5 times that, imports and the
    opening of the data 20 times, and any other step 5 times the longest so far. Default 60."""

    replace: bool = False
    """If a finished run has this name already, rename it (name-1, name-2, ...) rather than refuse. Default false."""

    cluster: str | None = Field(None, pattern=r"^[A-Za-z0-9_.+/~-]+$", examples=["lab"])
    """Slurm: profile with values for the fields below that are unset here: the name of a YAML file in ./clusters or
    ~/.config/mmfsdp/clusters, or its path. Default unset: none."""

    nodes: int = Field(1, ge=1)
    """Slurm: machines over which the ranks are spread evenly; a count. Default 1."""

    gpus_per_node: int | None = Field(None, ge=0)
    """Slurm: GPUs of each node; a count. Default unset: one per rank where train.device is cuda, none where cpu."""

    cpus_per_task: int | None = Field(None, ge=1)
    """Slurm: CPUs of each rank; a count. Default unset: with GPUs 8, or launch.threads if that is more; without GPUs
    launch.threads, or else what the cluster gives."""

    mem: str | None = Field(None, pattern=r"^[0-9]+[KMGT]?$", examples=["64G"])
    """Slurm: memory of each node, such as 64G; 0 for all of it. Default unset: what the cluster gives."""

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

    python: str | None = Field(None, pattern=_COMMAND, examples=["/shared/venv/bin/python"])
    """Slurm: command that starts Python on the nodes, of a virtual environment (/shared/venv/bin/python) or in a
    container (apptainer exec --nv /shared/mm.sif python). Default unset: the Python that launches."""

    modules: tuple[Annotated[str, Field(pattern=rf"^{_WORD}$")], ...] = Field((), examples=["cuda/12.4"])
    """Slurm: environment modules to load, such as cuda/12.4; the profile's come first. Default none."""

    setup: tuple[Annotated[str, Field(pattern=_COMMAND)], ...] = Field((), examples=["source /shared/env.sh"])
    """Slurm: commands run on the first node before the ranks start, one simple command each, such as
    `export NCCL_SOCKET_IFNAME=ib0` or `source /shared/env.sh`; the profile's come first. Default none."""

    sbatch: tuple[Annotated[str, Field(pattern=_OPTION)], ...] = Field((), examples=["mail-type=END"])
    """Slurm: further options of sbatch, as name=value or name; the profile's come first. Default none."""

    NEEDS: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = dict.fromkeys(
        SLURM_FIELDS, ("executor", (Executor.SLURM,))
    )

    @property
    def world_size(self) -> int:
        """Return the number of ranks. Raise ParamError if it is unset."""
        if self.ranks is None:
            raise ParamError("launch.ranks", "is unset; set it, or take `mmfsdp.run.placement.with_ranks(params)`")
        return self.ranks

    @property
    def ranks_per_node(self) -> int:
        """Return the number of ranks on each node. Raise ParamError if `ranks` is unset."""
        return self.world_size // self.nodes

    def gpus(self, device: Device) -> int:
        """Return the GPUs to request on each node. Raise ParamError if they are too few or nobody has said how many."""
        if self.gpus_per_node is None and device is Device.AUTO:
            raise ParamError("launch.gpus_per_node", "is unset; set it (0 for none), or train.device to cuda or cpu")
        needed = 0
        if device is Device.CUDA or (device is Device.AUTO and self.gpus_per_node):  # with GPUs, auto wants them, too
            needed = self.ranks_per_node
        gpus = needed if self.gpus_per_node is None else self.gpus_per_node
        if gpus < needed:
            words = f"{gpus} are too few for {needed} ranks a node on train.device {device}; raise it, lower "
            raise ParamError("launch.gpus_per_node", words + "launch.ranks, or spread them over more launch.nodes")
        return gpus

    def cpus(self, gpus: int) -> int | None:
        """Return the CPUs to request for each rank of a job with so many GPUs on a node; None for Slurm's default."""
        if self.cpus_per_task is not None:
            return self.cpus_per_task
        if gpus:
            return max(CPUS_BESIDE_A_GPU, self.threads or 0)
        return self.threads

    @model_validator(mode="after")
    def _check_slurm(self) -> Self:
        if self.executor is not Executor.SLURM:
            return self
        own_options = [*_SET_BY_MMFSDP, *(field.replace("_", "-") for field in self.NEEDS)]
        for option in self.sbatch:
            name = option.partition("=")[0]
            for own in own_options:
                if own.startswith(name):  # sbatch takes a name that is cut short, too
                    words = f"{option!r}: mmfsdp sets {own} from other launch fields; remove it, set those"
                    raise ParamError("sbatch", words)
        if self.ranks is not None and self.ranks % self.nodes:
            words = f"{self.ranks} do not spread evenly over {self.nodes} nodes; make it a multiple of launch.nodes"
            raise ParamError("ranks", words)
        if any(letter in "%\\\x7f" or letter < " " for letter in self.folder):
            raise ParamError("folder", f"{self.folder!r} holds % or \\ or a control character, which Slurm interprets")
        return self
