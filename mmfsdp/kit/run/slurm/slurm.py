"""The Slurm job of a run: the text of its batch file, and its submission. Both by submitit, from one executor."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import time
import traceback
from pathlib import Path

from submitit import SlurmExecutor
from submitit.core.utils import DelayedSubmission, FailedJobError, FailedSubmissionError

from ....params import LaunchParams, ParamError, RunParams
from ....params.own import path_of
from ....params.run import with_cluster
from ....params.shell_words import bash_words
from ..error_kinds import kind_of
from ..files.folder import write_text
from ..files.reasons import NO_ANSWER
from ..files.run_record import JOB_NUMBER, RunRecord, RunState, Status, because, write_status
from ..files.snapshot import EXIT_CODE_FILE
from ..hub_cache import is_offline
from ..pretraining import pretrain_first
from ..rank_count import with_ranks
from ..ranks.address import PORTS
from ..ranks.rank import run_rank
from .ask_slurm import CLUSTERS, Answer, scancel
from .job_id import number_of
from .never_starts import refused_field
from .site import export_lines, in_container, job_environment, sbatch_options, srun_options, time_limit, variable_lines
from .slow_start import SCRIPT_FILE, STARTS_RANKS
from .slurm_state import PREEMPTED_FILE

MAX_PREEMPT_NOTICE_S = 90
"""Slurm sends the preemption signal this long before the time limit; in a short job, 15 s for each of its minutes."""

SBATCH = ("sbatch", "--parsable")

BATCH_FILE = "member.sh"
"""File in logs/ of a run in a job array: its batch script."""


class _Executor(SlurmExecutor):
    """Can be created where there is no Slurm, too, so that a batch file can be shown anywhere."""

    submitted = ""
    """The job that it has submitted last, as job_id.py names it."""

    @classmethod
    def affinity(cls) -> int:
        return 2

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        # A login shell: `module` is a function of it, which a notebook's server may not hand on.
        text = super()._make_submission_file_text(command, uid)
        for option in self.parameters.get("srun_args", ()):  # which submitit quotes so that nothing is expanded
            text = text.replace(f" {shlex.quote(option)} ", f" {bash_words(option)} ")
        return text.replace("#!/bin/bash\n", "#!/bin/bash -l\n", 1)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return [*SBATCH, str(submission_file_path)]

    def _get_job_id_from_submission_command(self, string: str | bytes) -> str:  # type: ignore[override]
        self.submitted = submitted_job(str(string))
        if not self.submitted:
            raise FailedJobError(str(string))
        return number_of(self.submitted)  # as Slurm writes it into the names of logs


def sbatch_text(params: RunParams) -> str:
    """Return the batch file that sbatch will receive, to the byte. Raises ParamError as `launch` does."""
    return text_of(slurm_executor(params))


def text_of(executor: SlurmExecutor) -> str:
    """Return the batch file of an executor."""
    return executor._make_submission_file_text(executor._submitit_command_str, "")


def slurm_executor(params: RunParams) -> _Executor:
    """Return submitit's executor with all options of a run. Raises ParamError naming the field that is wrong."""
    if params.launch.unavailable("sbatch"):
        raise ParamError("launch.executor", f"{path_of(params.launch.executor)} submits no job; set it to slurm")
    params = with_ranks(params)
    launch = with_cluster(params.launch)
    logs = Path(os.path.expanduser(launch.folder)).absolute() / launch.name / "logs"
    python = bash_words(launch.python) if launch.python else shlex.quote(sys.executable)
    gpus = launch.gpus(params.train.device)
    cpus = launch.cpus(gpus)
    limit_min = time_limit(launch)
    same_name = {"nodes", "mem", "partition", "account", "qos", "constraint", "exclude"}
    options = launch.model_dump(include=same_name) | {
        "job_name": launch.name,
        "ntasks_per_node": launch.ranks_per_node,
        "cpus_per_task": cpus,
        "time": limit_min,
        "signal_delay_s": min(MAX_PREEMPT_NOTICE_S, 15 * limit_min),
        "additional_parameters": sbatch_options(launch, gpus),
        "stderr_to_stdout": True,
        "srun_args": srun_options(launch, cpus),
        "setup": before_ranks(launch, logs, python, export_lines(launch, gpus, offline=is_offline(params))),
        "teardown": after_ranks(logs),
    }
    options = {name: value for name, value in options.items() if value is not None}
    executor = _Executor(logs, python=python)
    executor.update_parameters(**options, wckey=None)  # submitit's own is "submitit"
    return executor


def option_names(executor: SlurmExecutor) -> set[str]:
    """Return the names of the options that the batch file of an executor has."""
    names = {*executor.parameters, *executor.parameters["additional_parameters"]} - {"wckey"}
    return {name.replace("_", "-") for name in names}


_FIND_PORT = f"""[ -n "$MASTER_PORT" ] || for MASTER_PORT in $(shuf -i {PORTS[0]}-{PORTS[-1]} -n 999); do
  (exec 3<>/dev/tcp/127.0.0.1/$MASTER_PORT) 2>/dev/null || break
done"""
"""Finds a port at which nobody listens on the first node. In bash alone: where the ranks run in a container, there may
be no Python outside of it."""


def before_ranks(launch: LaunchParams, logs: Path, python: str, exports: list[str]) -> list[str]:
    """Return the lines of the batch script before srun."""
    exit_code = shlex.quote(str(logs / EXIT_CODE_FILE))
    lines = [
        # Whoever watches the job is told the line that is slow.
        f'begin_line() {{ script_line=$1; echo "$1" > {shlex.quote(str(logs / SCRIPT_FILE))}; }}',
        f"rm -f {shlex.quote(str(logs))}/rank*",  # what ranks reported before the job was requeued
        f"unset SLURM_{CLUSTERS}",  # of a start file: what the script asks Slurm is about this job
        'stop_if_failed() { code=$?; [ $code = 0 ] && return; echo "$script_line failed with exit code $code"',
        f"echo $code > {exit_code}; exit $code; }}",
        *exports,
    ]
    for module in launch.modules:
        load = f"module load {shlex.quote(module)}"
        lines += [f"begin_line 'launch.modules: module load {module}'", load, "stop_if_failed"]
    for line in launch.setup:
        lines += variable_lines("setup", line)
        lines += [f"begin_line 'launch.setup: {line}'", bash_words(line), "stop_if_failed"]  # it holds no quote
    lines += variable_lines("python", launch.python or "")
    lines += variable_lines("srun", " ".join(launch.srun))
    if not in_container(launch):
        lines += [f"begin_line {shlex.quote(f'launch.python: {python}')}", f"{python} -c pass", "stop_if_failed"]
    return [*lines, _FIND_PORT, "export MASTER_PORT", f"begin_line {STARTS_RANKS}"]


def after_ranks(logs: Path) -> list[str]:
    """Return the lines of the batch script after srun: requeue a preempted job, else leave its exit code.

    `exec`: Slurm ends the script's processes one by one. If a `sleep` of the shell's went first, the shell would go on
    and leave an exit code, as of a job that was not requeued.
    """
    preempted, cancelled = shlex.quote(str(logs / PREEMPTED_FILE)), shlex.quote(str(logs.parent / "cancel"))
    return [
        "code=$?",
        f"[ -e {preempted} ] && [ ! -e {cancelled} ] && scontrol requeue $SLURM_JOB_ID && exec sleep 60",
        f"echo $code > {shlex.quote(str(logs / EXIT_CODE_FILE))}",
        "exit $code",
    ]


def check_slurm(params: RunParams) -> None:
    """Raise ParamError if there is no sbatch here, and for fields that cannot be written into a batch file."""
    if not shutil.which("sbatch"):
        words = "slurm needs sbatch, which is not on PATH here; set it to local, or launch on a cluster's login node"
        raise ParamError("launch.executor", words)
    sbatch_text(params)


def submit(folder: Path) -> None:
    """Submit a run from its folder, and write the job's number, or why there is none, into status.json."""
    try:
        _submit(folder)
    except Exception as error:
        write_status(folder, failed_submission(error), finished=time.time())
        raise


def _submit(folder: Path) -> None:
    executor = slurm_executor(RunParams.from_yaml(folder / "params.yaml"))
    enter_job_environment(executor)
    record = RunRecord.read(folder)
    if record and record.pretrains and (state := pretrain_first(folder, lambda: cancel_requested(folder))):
        return write_status(folder, state, finished=time.time())
    if state := cancel_requested(folder):
        return write_status(folder, state)
    try:
        job = executor.submit(run_rank, str(folder))
    except (FailedJobError, FailedSubmissionError) as failure:
        printed = getattr(failure.__cause__, "output", "")  # submitit's own words are those on stderr
        return write_status(folder, refusal(str(failure), printed), finished=time.time())
    job.paths.submitted_pickle.chmod(0o600)
    write_status(folder, RunState(Status.QUEUED), job=executor.submitted, submitted=time.time())
    if (folder / "cancel").exists():
        scancel(job=executor.submitted)


def cancel_requested(folder: Path) -> RunState | None:
    """Return the final state of a run that is cancelled before it is submitted; None if it is not."""
    return because(Status.CANCELLED, "cancelled") if (folder / "cancel").exists() else None


def write_call(params: RunParams, folder: Path) -> None:
    """Write what a task of a job array needs to run a run: its batch file, and submitit's pickled call."""
    write_text(folder / "logs" / BATCH_FILE, sbatch_text(params))
    call = DelayedSubmission(run_rank, str(folder))
    call.set_timeout(time_limit(with_cluster(params.launch)), 1)
    call.dump(folder / "logs" / "member_submitted.pkl")
    (folder / "logs" / "member_submitted.pkl").chmod(0o600)


def accept_call(folder: Path, *, job: str) -> None:
    """Give the call the name that submitit looks for, and write the job's number into status.json."""
    (folder / "logs" / "member_submitted.pkl").rename(folder / "logs" / f"{number_of(job)}_submitted.pkl")
    write_status(folder, RunState(Status.QUEUED), job=job, submitted=time.time())


def refusal(error: str, printed: str = "") -> RunState:
    """Return the state of a run that Slurm refuses: its error message in one line, without a cluster's banners.

    printed: what sbatch wrote to stdout, where a site's own checks may say why.
    """
    lines = [line for line in error.splitlines() if re.match("sbatch|slurm|allocation", line)]
    words = (" ".join(lines) or error.strip())[:500]
    printed = " ".join(printed.split())[:500]
    if words and printed:
        words += f"; sbatch printed: {printed}"
    words = words or printed or "sbatch gave no job number and no reason; ask the administrators"
    if Answer(1, "", error).none_yet:
        fix = "look with `squeue --me` whether it is there, and scancel it if so; then resume"
        return because(Status.FAILED, f"Slurm did not answer, and may have taken it: {words}", kind=NO_ANSWER, fix=fix)
    field = refused_field(words)
    return because(Status.FAILED, f"Slurm refuses it: {words}", fix=f"change {field}" if field else "")


def failed_submission(error: Exception) -> RunState:
    """Return the state of a run whose submission raised an exception. Call it where that is caught."""
    cause = f"the submission failed: {error or type(error).__name__}"
    return because(Status.FAILED, cause, kind=kind_of(error), traceback=traceback.format_exc())


def submitted_job(output: str) -> str:
    """Return the job, such as 123 or 123;gpu, from what `sbatch --parsable` printed; "" if none.

    A site's banners are left out.
    """
    jobs = [line for line in output.splitlines() if JOB_NUMBER.fullmatch(line)]
    return jobs[-1] if jobs else ""


def enter_job_environment(executor: SlurmExecutor) -> None:
    """Give this process, which submits and then ends, the environment that the jobs of an executor are to have."""
    environment = job_environment(option_names(executor))
    os.environ.clear()
    os.environ.update(environment | {"SUBMITIT_LOG_LEVEL": "CRITICAL", "PYTHONUNBUFFERED": "1"})
