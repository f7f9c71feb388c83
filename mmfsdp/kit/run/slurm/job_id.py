"""The name of a Slurm job: its number and, where it is on another cluster, that cluster, as in `123;gpu`.

sbatch prints it so. Clusters that share their accounting number their jobs each for itself, so that a number alone may
name two jobs.
"""

from __future__ import annotations


def number_of(job: str) -> str:
    """Return the number of a job, such as 123 or 123_4, for Slurm's commands."""
    return job.partition(";")[0]


def cluster_of(job: str) -> str:
    """Return the cluster of a job; "" where it is the one whose commands are installed here."""
    return job.partition(";")[2]


def task_of(job: str, task: int) -> str:
    """Return the name of a task of a job array."""
    number, semicolon, cluster = job.partition(";")
    return f"{number}_{task}{semicolon}{cluster}"


def job_words(job: str) -> str:
    """Return a job in words, such as `job 123` or `job 123 of cluster gpu`."""
    cluster = cluster_of(job)
    return f"job {number_of(job)} of cluster {cluster}" if cluster else f"job {job}"


def as_arguments(job: str) -> str:
    """Return a job as a person writes it behind a command of Slurm, such as `123` or `123 --clusters=gpu`."""
    cluster = cluster_of(job)
    return f"{number_of(job)} --clusters={cluster}" if cluster else job
