"""What Slurm is asked for: every field where it belongs, profiles beneath, and nothing that could leave its place."""

import os
import re
from contextlib import suppress

import psutil
import pytest
import yaml

from mmfsdp import ParamError, Run, RunParams, launch
from mmfsdp.cli import main
from mmfsdp.params import load
from mmfsdp.params.run import read_cluster
from mmfsdp.run import slurm_state as queue
from mmfsdp.run.folder import touch, write_json
from mmfsdp.run.job_array import largest_array
from mmfsdp.run.never_starts import refused_field
from mmfsdp.run.record import Status
from mmfsdp.run.slurm import _after_ranks, sbatch_text, slurm_executor
from mmfsdp.run.slurm_state import PREEMPTED_FILE
from mmfsdp.run.start import make_folder, start_in
from mmfsdp.run.state import run_state
from tests.run.test_runs import record
from tests.slurm.cluster import FILES
from tests.waiting import until

SLURM = {"launch.executor": "slurm", "launch.ranks": 8, "launch.nodes": 2, "train.device": "cuda"}

FIELDS = yaml.safe_load((FILES / "fields.yaml").read_text(encoding="utf-8"))
FULL, LINES, HOSTILE = FIELDS["full"], FIELDS["lines"], FIELDS["hostile"]


def test_every_field_reaches_the_batch_file():
    lines = sbatch_text(RunParams().change(**FULL)).splitlines()
    assert {line.removeprefix("#SBATCH ") for line in lines} >= set(LINES)
    load, export = lines.index("module load cuda/12.4"), lines.index("export NCCL_SOCKET_IFNAME=ib0")
    (srun,) = (i for i, line in enumerate(lines) if line.startswith("srun "))
    assert load < export < srun
    assert " --cpus-per-task=7 apptainer exec --nv /shared/mm.sif python -u -m submitit" in lines[srun]
    assert "--kill-on-bad-exit=1" in lines[srun]


def test_gpus_are_asked_for_by_device():
    def gpus(**changes):
        lines = sbatch_text(RunParams().change(**SLURM | changes)).splitlines()
        return [line for line in lines if "gpus" in line]

    assert gpus() == ["#SBATCH --gpus-per-node=4"]
    assert gpus(**{"train.device": "cpu"}) == []
    assert gpus(**{"train.device": "auto", "launch.gpus_per_node": 0}) == []
    with pytest.raises(ParamError, match="launch.gpus_per_node: is unset; set it"):
        gpus(**{"train.device": "auto"})
    with pytest.raises(ParamError, match="launch.gpus_per_node: 2 are too few for 4 ranks a node"):
        gpus(**{"launch.gpus_per_node": 2})
    with pytest.raises(ParamError, match="gpus_per_node: 3 are too few for 4 ranks a node on train.device auto; raise"):
        gpus(**{"launch.gpus_per_node": 3, "train.device": "auto"})


def test_ranks_on_gpus_have_eight_cpus_unless_somebody_says_otherwise(tmp_path):
    """A rank of one CPU, Slurm's default, waits for its data workers."""
    (tmp_path / "lab.yaml").write_text("cpus_per_task: 12\n")

    def cpus(**changes):
        lines = sbatch_text(RunParams().change(**SLURM | changes)).splitlines()
        asked = [line.partition("=")[2] for line in lines if line.startswith("#SBATCH --cpus-per-task=")]
        (srun,) = (line for line in lines if line.startswith("srun "))
        assert [f"--cpus-per-task={number}" for number in asked] == re.findall(r"--cpus-per-task=\d+", srun)
        return asked

    assert cpus() == ["8"] == cpus(**{"launch.threads": 2})
    assert cpus(**{"launch.threads": 16}) == ["16"]
    assert cpus(**{"launch.cpus_per_task": 3, "launch.threads": 2}) == ["3"]
    assert cpus(**{"launch.cluster": str(tmp_path / "lab.yaml")}) == ["12"]
    assert cpus(**{"train.device": "cpu"}) == []
    assert cpus(**{"train.device": "cpu", "launch.threads": 2}) == ["2"]
    assert cpus(**{"train.device": "auto", "launch.gpus_per_node": 0}) == []


@pytest.mark.parametrize("name", HOSTILE)
def test_what_could_leave_its_place_is_refused_by_name(name):
    with pytest.raises(ParamError) as caught:
        RunParams().change(**SLURM | {name: HOSTILE[name]})
    assert caught.value.field == name


@pytest.mark.parametrize("option, field", {"gres=gpu:4": "gpus_per_node", "partition=x": "partition"}.items())
def test_an_option_that_has_a_field_is_refused(option, field):
    with pytest.raises(ParamError, match="from other launch fields; remove it"):
        RunParams().change(**SLURM | {"launch.sbatch": [option]})
    for short, name in {"signal=USR1": "signal", "arra=0-2": "array", "expor=NONE": "export", "nod=3": "nodes"}.items():
        with pytest.raises(ParamError, match=f"mmfsdp sets {name} "):
            RunParams().change(**SLURM | {"launch.sbatch": [short]})
    RunParams().change(
        **SLURM | {"launch.sbatch": ["gres-flags=enforce-binding", "nodelist=n1", "export-file=x", "hint=x"]}
    )


def test_a_profile_gives_what_the_run_leaves_unset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clusters").mkdir()
    profile = tmp_path / "clusters/lab.yaml"
    profile.write_text("partition: gpu\naccount: lab\nsetup: [source /etc/lab.sh]\nmachine: {flops: 1.0e+15}\n")
    params = RunParams().change(**SLURM | {"launch.cluster": "lab", "launch.account": "mine"})
    text = sbatch_text(params.change(**{"launch.setup": ["export A=b"]}))
    assert "--partition=gpu" in text and "--account=mine" in text
    assert text.index("source /etc/lab.sh") < text.index("export A=b")
    assert sbatch_text(params.change(**{"launch.cluster": str(profile)})) == sbatch_text(params)
    assert read_cluster("lab").machine == {"flops": 1e15}
    with pytest.raises(ParamError, match="launch.cluster: there is no profile 'nope' in clusters .*; choose lab"):
        sbatch_text(params.change(**{"launch.cluster": "nope"}))
    for content, words in {
        "nodes: 3": "nodes: no such field",
        "partition: a b": "partition: 'a b' is not allowed; write it as in gpu",
        "machine: {flops: fast}": "machine.flops: 'fast' should be a valid number",
        "[1]": "is not a mapping",
        "a: [": "is not YAML",
    }.items():
        profile.write_text(content)
        with pytest.raises(ParamError, match=f"launch.cluster: .*lab.yaml.* {words}"):
            sbatch_text(params)


COMMANDS = {
    "sbatch": "echo 'Welcome! resubmit job 12345'; echo '77;cluster'; echo 'Bye: 3 jobs left'",
    "squeue": "echo 'Maintenance | on Friday'",
    "scancel": "echo Welcome >&2; echo $* >> ${0%/*}/cancelled",
    "scontrol": "echo 'MaxArraySize            = 3'",
    "sacct": "echo '*** a|b ***'; echo '78|TIMEOUT|Unknown|n1'; echo bye",
}


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
    """Commands of a Slurm whose site prints banners."""
    (tmp_path / "bin").mkdir()
    for name, script in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(queue, "_queues", {})
    return tmp_path / "bin"


@pytest.mark.real
def test_banners_are_no_jobs(fake_slurm, tmp_path):
    executor = slurm_executor(RunParams().change(**SLURM | {"launch.folder": str(tmp_path)}))
    executor.folder.mkdir(parents=True)
    assert executor.submit(print).job_id == "77"
    (fake_slurm / "squeue").write_text("#!/bin/sh\necho 'Maintenance | on Friday'; echo '77|RUNNING|None|N/A|n1'\n")
    assert queue.find_job("77", user=0).state == "RUNNING" and queue.find_job("78", user=0).state == "TIMEOUT"
    (fake_slurm / "squeue").write_text("#!/bin/sh\necho 'Maintenance | on Friday'; echo '77|COMPLETED'; echo bye\n")
    assert queue.current_state("77") == "COMPLETED"
    assert queue.scancel("77") == "" == queue.scancel("--signal=USR2", "77")
    assert largest_array() == 3
    (fake_slurm / "scontrol").write_text("#!/bin/sh\necho 'MaxArraySize            = 0'\n")
    assert largest_array() == 1


ENDS_IN_LOG = {" DUE TO TIME LIMIT": "FAILED: .*raise launch.timeout_min", "": "CANCELLED: cancelled by scancel"}


@pytest.mark.real
@pytest.mark.parametrize("cause", ENDS_IN_LOG)
def test_a_job_that_slurm_has_forgotten_is_known_by_its_log(fake_slurm, tmp_path, cause):
    """Without accounting; status.json and then run.json are deleted, too."""
    (fake_slurm / "sacct").write_text("#!/bin/sh\nexit 1\n")
    folder = make_folder(RunParams().change(**{"launch.folder": str(tmp_path)}).launch)
    RunParams().change(**SLURM | {"train.device": "cpu"}).to_yaml(folder / "params.yaml")
    record(executor="slurm").write(folder)
    (folder / "logs/99_submitted.pkl").touch()
    line = f"slurmstepd: error: *** JOB 99 ON n1 CANCELLED AT 2026-01-01T12:00:00{cause} ***\n"
    (folder / "logs/99_0_log.out").write_text(f"step 1\n{line}srun: Job step aborted\n")
    write_json(folder / "status.json", {"status": "QUEUED", "job": "99"})
    os.utime(folder / "status.json", (1, 1))
    state = run_state(folder)
    assert re.match(ENDS_IN_LOG[cause], f"{state.status}: {state.reason}"), state
    (folder / "run.json").unlink()
    assert run_state(folder).status is state.status
    (folder / "status.json").unlink()
    os.utime(folder, (1, 1))
    assert run_state(folder).reason == "its run.json is missing; cancel it, in case that it still runs"
    assert Run.open(folder).job == "99"
    (fake_slurm / "squeue").write_text(f"#!/bin/sh\necho '99|{folder}/logs/submission.sh'\n")
    Run.open(folder).cancel()
    assert (folder / "cancel").exists() and "99" in (fake_slurm / "cancelled").read_text()


SUBMISSIONS = {
    "a site's check on stdout": (
        "#!/bin/sh\necho 'Choose an account'; echo 'sbatch: error: Batch job submission failed' >&2; exit 1",
        "FAILED: Slurm refuses it: sbatch: error: Batch job submission failed; sbatch printed: Choose an account; "
        "change launch.account",
    ),
    "only that": (
        "#!/bin/sh\necho 'Choose an account'; exit 1",
        "FAILED: Slurm refuses it: Choose an account; change launch.account",
    ),
    "killed": (
        "#!/bin/sh\necho 'no memory is left' >> {log}; kill -9 $PPID\n",
        "LOST: its submission from .* was interrupted; its last words are: no memory is left",
    ),
}


@pytest.mark.real
@pytest.mark.parametrize("name", SUBMISSIONS)
def test_a_submission_that_fails_leaves_its_words(fake_slurm, tmp_path, name):
    sbatch, reason = SUBMISSIONS[name]
    (fake_slurm / "sbatch").write_text(sbatch.format(log=tmp_path / "runs/first/logs/supervisor.log"))
    params = RunParams().change(**SLURM | {"train.device": "cpu", "launch.folder": str(tmp_path / "runs")})
    state = launch(params, entry="tests.launch_entries:places").wait(60)
    assert re.match(reason, f"{state.status}: {state.reason}"), state


@pytest.mark.real
def test_a_submission_that_raises_leaves_its_words(tmp_path):
    params = RunParams().change(
        **SLURM | {"train.device": "cpu", "launch.folder": str(tmp_path), "launch.cluster": "x"}
    )
    folder = make_folder(params.launch)
    start_in(folder, params, "tests.launch_entries:places")  # as if the profile were removed after the checks of launch
    state = Run(folder).wait(60)
    assert state.status is Status.FAILED and "ParamError" in state.traceback
    assert state.reason.startswith("the submission failed: launch.cluster: there is no profile 'x'"), state


@pytest.mark.real
def test_a_requeued_jobs_script_leaves_no_exit_code_whatever_is_ended_first(fake_slurm, tmp_path):
    """Slurm ends the processes of a requeued job one by one; the innermost is first here."""
    (fake_slurm / "scontrol").write_text("#!/bin/sh\nexit 0\n")
    (fake_slurm / "scontrol").chmod(0o700)
    touch(tmp_path / PREEMPTED_FILE)
    script = psutil.Popen(["bash", "-c", "\n".join(["true", *_after_ranks(tmp_path)])])

    def sleeping():
        """Return the process that sleeps. Others of the script's end while one looks at them."""
        for process in [*script.children(), script]:
            with suppress(psutil.NoSuchProcess):  # as a zombie is, too
                if process.cmdline()[:1] == ["sleep"]:
                    return process
        return None

    sleep = until(sleeping, seconds=20)
    sleep.terminate()
    script.wait(20)
    assert sorted(path.name for path in tmp_path.glob("ranks.*")) == [PREEMPTED_FILE]


@pytest.mark.real
def test_a_cancel_answers_while_slurm_does_not(fake_slurm, tmp_path, monkeypatch):
    for name in ("squeue", "scancel"):
        (fake_slurm / name).write_text("#!/bin/sh\nexec sleep 60\n")
    folder = make_folder(RunParams().change(**{"launch.folder": str(tmp_path)}).launch)
    record(executor="slurm").write(folder)
    write_json(folder / "status.json", {"status": "QUEUED", "job": "77"})
    with pytest.raises(TimeoutError, match="first is not cancelled yet: squeue did not answer.*goes on trying"):
        Run(folder).cancel()
    assert (folder / "cancel").exists()
    (fake_slurm / "scancel").write_text(f"#!/bin/bash\n{COMMANDS['scancel']}\n")
    (fake_slurm / "squeue").write_text(
        f"#!/bin/sh\ncase $* in *%o*) echo '77|{folder}/logs/submission.sh';; *) echo '77|CANCELLED';; esac\n"
    )
    assert Run(folder).wait(20).status is Status.CANCELLED and "77" in (fake_slurm / "cancelled").read_text()


NO_JOBS = [
    "--user=root",
    "--me",
    "77 78",
    "77,78",
    "77;78",
    "-u",
    "",
    "77\n",
    "٧٧",
    ["77"],
    {"a": 1},
    None,
    True,
    10**400,
]


@pytest.mark.parametrize("job", NO_JOBS)
def test_what_is_no_job_number_reaches_no_command_of_slurm(fake_slurm, tmp_path, job):
    for name in ("squeue", "sacct"):
        (fake_slurm / name).write_text("#!/bin/bash\necho $* >> ${0%/*}/asked\n")
    folder = make_folder(RunParams().change(**{"launch.folder": str(tmp_path)}).launch)
    record(executor="slurm", host="elsewhere", created=1.0).write(folder)
    write_json(folder / "status.json", {"status": "QUEUED", "job": job})
    for rank in range(2):
        write_json(folder / f"logs/rank{rank}.json", {"state": "running", "time": 2.0})
    (folder / "logs/5 --me_submitted.pkl").touch()
    assert Run(folder).job is None
    with pytest.raises(ParamError):
        Run(folder).drill()
    Run(folder).cancel()
    assert not (fake_slurm / "cancelled").exists() and not (fake_slurm / "asked").exists()


def test_dry_run_prints_the_batch_file_and_starts_nothing(tmp_path, capsys):
    flags = ["--launch.executor", "slurm", "--launch.folder", str(tmp_path / "runs"), "--train.device", "cpu"]
    assert main(["launch", "--dry-run", "--config", "tiny", *flags]) == 0
    changes = {"launch.executor": "slurm", "launch.folder": str(tmp_path / "runs"), "train.device": "cpu"}
    assert capsys.readouterr().out == sbatch_text(load("tiny").change(**changes))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "words, field",
    [
        ("sbatch: error: invalid partition specified: nope", "launch.partition"),
        ("sbatch: error: Invalid account or account/partition combination specified", "launch.account"),
        ("sbatch: error: Invalid qos specification", "launch.qos"),
        ("sbatch: error: Requested time limit is invalid (missing or exceeds some limit)", "launch.timeout_min"),
        ("sbatch: error: Invalid generic resource (gres) specification", "launch.gpus_per_node"),
        ("sbatch: error: Invalid node name specified", "launch.exclude"),
        (
            "sbatch: error: Job violates accounting/QOS policy (user's size and/or time limits)",
            "launch.qos, launch.acc",
        ),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit", ""),
        ("sbatch: error: something else", ""),
    ],
)
def test_a_refusal_names_the_field_that_slurms_words_are_about(words, field):
    assert refused_field(words).startswith(field)
    assert bool(refused_field(words)) == bool(field)
