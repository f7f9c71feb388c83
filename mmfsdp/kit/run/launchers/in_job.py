"""InJob: what the ranks of a Slurm job have in common, whether the job is theirs alone or they are a step of it."""

from __future__ import annotations

import os

from ....params import LaunchParams
from ....params.run import read_cluster
from ....predict.machines import check_figures
from ..files.run_record import RunRecord
from ..files.snapshot import Snapshot
from ..local import RUN_VARIABLE
from ..slurm.job_gpus import gpus_of_node
from .launcher import Launcher, Place


def check_profile(launch: LaunchParams) -> None:
    """Raise ParamError for a profile whose figures for planning are not those of a machine."""
    if launch.cluster:
        check_figures(read_cluster(launch.cluster).machine)


class InJob(Launcher):
    """Ranks that srun starts in a Slurm job."""

    def place_of_rank(self) -> Place:
        """Return who this process is, as submitit knows it from Slurm's variables."""
        from submitit import JobEnvironment  # which no look at a run needs

        place: Place = JobEnvironment()
        return place

    def enter_rank(self, place: Place, record: RunRecord) -> None:
        """Set the threads by the job's CPUs here, and hide GPUs that are other jobs'."""
        cpus = int(os.environ.get("SLURM_CPUS_ON_NODE", "1")) // (place.num_tasks // place.num_nodes)
        os.environ["OMP_NUM_THREADS"] = str(record.threads or max(1, cpus))
        if gpus_of_node(os.environ) is None:
            # This job has no GPU: the node's GPUs are other jobs', unless the person says by hand which to use.
            os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
        os.environ[RUN_VARIABLE] = record.identity

    def allocated_gpus(self) -> int:
        """Return the GPUs of this node that the job has, by Slurm's variables or by launch.gpus_per_node."""
        return gpus_of_node(os.environ) or 0

    def where(self, look: Snapshot, record: RunRecord) -> str:
        """Return the number of the job."""
        return f"{record.executor} {look.job or ''}"
