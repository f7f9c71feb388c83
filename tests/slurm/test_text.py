"""What Slurm is asked for: every field where it belongs, profiles beneath, and nothing that could leave its place."""

import os
import re
import subprocess
import time
from contextlib import suppress

import psutil
import pytest
import yaml

from mmfsdp import ParamError, Run, RunParams, launch
from mmfsdp.kit.cli import main
from mmfsdp.kit.run.files.folder import touch, write_json
from mmfsdp.kit.run.files.reasons import (
    ADVICE,
    BUDGET,
    LOST_PEER,
    NO_ANSWER,
    NO_PYTHON,
    NOT_STARTED,
    REQUEUED_HELD,
    RESERVATION_GONE,
)
from mmfsdp.kit.run.files.run_record import TRAIN, Status
from mmfsdp.kit.run.files.snapshot import Snapshot
from mmfsdp.kit.run.launchers.registry import launcher_named
from mmfsdp.kit.run.launchers.srun_launcher import with_variables_of
from mmfsdp.kit.run.slurm import ask_slurm, job_array, site
from mmfsdp.kit.run.slurm import slurm_queue as queue
from mmfsdp.kit.run.slurm.job_array import largest_array, make_members, submit_in_parts
from mmfsdp.kit.run.slurm.never_starts import refused_field, why_never
from mmfsdp.kit.run.slurm.site import job_environment, minutes, notes, with_defaults
from mmfsdp.kit.run.slurm.slow_start import SCRIPT_FILE
from mmfsdp.kit.run.slurm.slurm import after_ranks, option_names, refusal, sbatch_text, slurm_executor
from mmfsdp.kit.run.slurm.slurm_log import failure_in_job, failure_without_rank, since_last_start
from mmfsdp.kit.run.slurm.slurm_state import PREEMPTED_FILE
from mmfsdp.kit.run.start import check_place, make_folder, start_in
from mmfsdp.kit.run.state import run_state, runs_table
from mmfsdp.kit.run.sweep import Sweep
from mmfsdp.params import load
from mmfsdp.params.run import read_cluster
from mmfsdp.params.shell_words import bash_words
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
    assert " --cpus-per-task=7 --cpu-bind=cores apptainer exec --nv /shared/mm.sif python -u" in lines[srun]
    assert "--kill-on-bad-exit=1" in lines[srun]


def test_gpus_are_asked_for_by_device():
    def gpus(**changes):
        lines = sbatch_text(RunParams().change(**SLURM | changes)).splitlines()
        return [line for line in lines if re.search("gpu|gres|GPU", line.partition("/")[0])]

    assert gpus() == ["#SBATCH --gpus-per-node=4"]
    typed = {"launch.gpus_per_node": "a100:4", "launch.gres": ["localssd:200", "craynetwork:0"]}
    joined = "localssd:200,craynetwork:0"
    assert gpus(**typed) == ["#SBATCH --gpus-per-node=a100:4", f"#SBATCH --gres={joined}"]
    assert gpus(**typed, **{"launch.gpus_as": "gres"}) == [f"#SBATCH --gres=gpu:a100:4,{joined}"]
    one_each = ["#SBATCH --gpus-per-task=a100:1", f"#SBATCH --gres={joined}"]
    assert gpus(**typed, **{"launch.gpus_as": "gpus-per-task"}) == one_each
    assert gpus(**{"launch.gpus_as": "none"}) == ["export MMFSDP_GPUS=4"]
    slices = {"launch.gpus_as": "none", "launch.gres": ["gpu:1g.10gb:4"]}
    assert gpus(**slices) == ["#SBATCH --gres=gpu:1g.10gb:4", "export MMFSDP_GPUS=4"]
    with pytest.raises(ParamError, match="launch.gres: 'gpu:a100:4' asks for GPUs, as launch.gpus_per_node does"):
        gpus(**{"launch.gres": ["gpu:a100:4"]})
    with pytest.raises(
        ParamError, match="launch.gpus_as: gpus-per-task gives each rank one GPU, but 4 ranks .* have 8"
    ):
        gpus(**{"launch.gpus_per_node": 8, "launch.gpus_as": "gpus-per-task"})
    with pytest.raises(ParamError, match="launch.gpus_per_node: 'four' is not allowed; write it as in 4 or a100:4"):
        gpus(**{"launch.gpus_per_node": "four"})
    assert gpus(**{"train.device": "cpu"}) == []
    assert gpus(**{"train.device": "auto", "launch.gpus_per_node": 0}) == []
    with pytest.raises(ParamError, match="launch.gpus_per_node: is unset; set it"):
        gpus(**{"train.device": "auto"})
    with pytest.raises(ParamError, match="launch.gpus_per_node: 2 are too few for 4 ranks a node"):
        gpus(**{"launch.gpus_per_node": 2})
    with pytest.raises(ParamError, match="gpus_per_node: 3 are too few for 4 ranks a node on train.device auto; raise"):
        gpus(**{"launch.gpus_per_node": 3, "train.device": "auto"})


LAB = {"launch.cluster": "lab", "launch.timeout_min": None}
PROFILE = """
interface: [ib0, ib1]
host: "{host}i"
setup: [export SIF=$HOME/mm.sif]
python: $VENV/bin/python
srun: ["container-image=nvcr.io#nvidia/pytorch:25.01-py3", cpu-bind=cores]
sbatch: [no-requeue, exclusive]
timeout_min: 60
"""


def test_what_a_profile_says_of_names_srun_and_time_is_in_the_batch_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters/lab.yaml").write_text(PROFILE)
    lines = sbatch_text(RunParams().change(**SLURM | LAB | {"launch.srun": ["mpi=none"]})).splitlines()
    assert lines[0] == "#!/bin/bash -l", "a login shell has `module`"
    assert "#SBATCH --no-requeue" in lines and "#SBATCH --requeue" not in lines and "#SBATCH --exclusive" in lines
    assert "#SBATCH --time=60" in lines and not [line for line in lines if "wckey" in line]
    assert {"export GLOO_SOCKET_IFNAME=ib0,ib1", "export NCCL_SOCKET_IFNAME==ib0,ib1"} <= set(lines)
    assert "export MMFSDP_HOST='{host}i'" in lines
    assert 'export "SIF=$HOME/mm.sif"' in lines, "the job expands it"
    assert "begin_line 'launch.python: $VENV is not set in the job: test -v VENV'" in lines
    assert not [line for line in lines if " -c pass" in line], "there may be no Python outside of the container"
    (srun,) = (line for line in lines if line.startswith("srun "))
    container = "'--container-image=nvcr.io#nvidia/pytorch:25.01-py3' --cpu-bind=cores --mpi=none"
    assert f' --cpus-per-task=8 {container} "$VENV/bin/python" -u -m submitit' in srun
    own = sbatch_text(RunParams().change(**SLURM | LAB | {"launch.interface": "eth1", "launch.timeout_min": 5}))
    assert "GLOO_SOCKET_IFNAME=eth1\n" in own and "#SBATCH --time=5\n" in own and "USR2@75\n" in own
    assert "--wckey=mine" in sbatch_text(RunParams().change(**SLURM | {"launch.sbatch": ["wckey=mine"]}))


def test_a_persons_own_defaults_of_sbatch_stand_but_for_those_that_would_break_the_launch(monkeypatch):
    breaking = (
        "ARRAY_INX OUTPUT ERROR EXPORT WAIT OPEN_MODE JOB_NAME SIGNAL GRES GPUS GPUS_PER_NODE CLUSTERS NO_REQUEUE "
        "NO_KILL"
    )
    kept = {"SBATCH_ACCOUNT": "lab", "SBATCH_RESERVATION": "course", "SBATCH_EXCLUSIVE": "user", "SLURM_CONF": "/x"}
    field = {
        "SBATCH_PARTITION": "other",
        "SBATCH_TIMELIMIT": "90",
        "SBATCH_MEM_PER_CPU": "1G",
        "SBATCH_CPUS_PER_GPU": "1",
    }
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0")
    left = {"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "3", "MASTER_ADDR": "x", "SUBMITIT_EXECUTOR": "slurm"}
    for name in os.environ:
        if name.startswith(("SBATCH_", "SLURM_")):
            monkeypatch.delenv(name)
    for name, value in ({f"SBATCH_{name}": "1" for name in breaking.split()} | kept | field | left).items():
        monkeypatch.setenv(name, value)
    launch = RunParams().change(**SLURM | {"launch.partition": "gpu", "launch.mem": "8G"})
    executor = slurm_executor(launch)
    assert "#SBATCH --time=90\n" in sbatch_text(launch), "as SBATCH_TIMELIMIT says"
    environment = job_environment(option_names(executor))
    names = {name for name in environment if name.startswith(("SBATCH_", "SLURM_", "SUBMITIT_"))}
    assert names == set(kept) and not {"CUDA_VISIBLE_DEVICES", "MASTER_ADDR"} & environment.keys()
    assert environment["ROCR_VISIBLE_DEVICES"] == "0", "as the site sets it"
    by_field = job_environment(option_names(slurm_executor(launch.change(**{"launch.account": "mine"}))))
    assert "SBATCH_ACCOUNT" not in by_field, "it would win over the field"


TIMES = {"90": 90, "90:30": 90, "1:30:00": 90, "1-0": 1440, "1-01:30": 1530, "2-00:00:00": 2880, "0:20": 1}


def test_times_of_slurm_are_read_in_minutes():
    assert {text: minutes(text) for text in TIMES} == TIMES
    assert [minutes(text) for text in ("infinite", "n/a", "", "a|b", "1-2-3")] == [None] * 5


def test_a_job_says_what_its_one_gpu_a_rank_costs_and_what_its_container_lacks(tmp_path):
    params = RunParams().change(**SLURM | {"launch.folder": str(tmp_path), "launch.gpus_as": "gpus-per-task"})
    assert [note.partition(":")[0] for note in notes(params)] == ["launch.gpus_as gpus-per-task"]
    boxed = {"launch.srun": ["container-image=x"], "launch.gpus_as": None}
    (note,) = notes(params.change(**boxed))
    assert f"add container-mounts={tmp_path}:{tmp_path}" in note
    assert notes(params.change(**boxed | {"launch.srun": ["container-image=x", "container-mounts=/p:/p"]})) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("executor", ["slurm", "srun"])
def test_a_profile_that_another_user_has_written_is_told(executor, tmp_path, monkeypatch):
    """In a folder of somebody else, ./clusters/NAME.yaml comes before one's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clusters").mkdir()
    profile = tmp_path / "clusters/lab.yaml"
    profile.write_text("setup: [source /x/y.sh]\n")
    params = RunParams().change(
        **{"launch.executor": executor, "launch.cluster": "lab", "launch.ranks": 1, "train.device": "cpu"}
    )
    assert launcher_named(executor).notes(params) == []
    os.chown(profile, 4711, 4711)
    (note,) = launcher_named(executor).notes(params)
    assert "clusters/lab.yaml belongs to the user 4711, and your job runs what it says; read it first" in note


def test_a_job_says_which_gpus_have_no_rank(tmp_path):
    params = RunParams().change(**SLURM | {"launch.folder": str(tmp_path), "launch.nodes": 2})
    four = params.change(**{"launch.gpus_per_node": "a100:4", "launch.ranks": 2})
    (note,) = notes(four)
    assert note.startswith("3 of the 4 GPUs of each node have no rank") and "raise launch.ranks to 8" in note
    assert notes(four.change(**{"launch.ranks": 8})) == []
    assert notes(four.change(**{"train.device": "cpu"})) == []


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


SETUP = {
    "export LD_LIBRARY_PATH=/x:$LD_LIBRARY_PATH": "LD_LIBRARY_PATH=/x:",
    "export LD_LIBRARY_PATH=/x${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}": "LD_LIBRARY_PATH=/x",
    "export A=${B:-/y}/z": "A=/y/z",
    "export NCCL_IB_HCA=^mlx5_1": "NCCL_IB_HCA=^mlx5_1",
    "export VENV=~/venv": "VENV=/home/me/venv",
    "export TOOLS=/opt:~/tools": "TOOLS=/opt:/home/me/tools",
}


@pytest.mark.real
@pytest.mark.parametrize("line", SETUP)
def test_bash_reads_a_line_of_setup_as_it_stands(line, tmp_path):
    """The variables that the job lacks are those that the line itself sets, or has another text for."""
    params = RunParams().change(**SLURM | {"launch.setup": [line], "launch.folder": str(tmp_path)})
    (tmp_path / "first/logs").mkdir(parents=True)
    lines = sbatch_text(params).partition("# setup\n")[2].partition("begin_line 'launch.setup")[0].splitlines()
    lines += [part for part in sbatch_text(params).splitlines() if part.startswith("begin_line 'launch.setup")]
    lines += [bash_words(line), "stop_if_failed", "env"]
    done = subprocess.run(
        ["/bin/bash", "-c", "\n".join(lines)], env={"HOME": "/home/me"}, capture_output=True, text=True
    )
    assert done.returncode == 0 and SETUP[line] in done.stdout.splitlines(), done.stdout + done.stderr
    assert f"\n{bash_words(line)}\nstop_if_failed\n" in sbatch_text(params)


def test_a_profile_takes_what_headers_say():
    """Two modules in a line, a comment with a space, dashes, variables in mounts, and a Python in the home folder."""
    changes = {
        "launch.modules": ["gcc/12 cuda/12.4"],
        "launch.sbatch": ["--comment=my first run", "--mail-type=END"],
        "launch.srun": ["--container-mounts=$HOME/data:/data,~/out:/out", "container-image=a#b"],
        "launch.python": "~/venv/bin/python",
    }
    lines = sbatch_text(RunParams().change(**SLURM | changes)).splitlines()
    assert {"module load gcc/12", "module load cuda/12.4", "#SBATCH --comment='my first run'"} <= set(lines)
    assert "begin_line 'launch.srun: $HOME is not set in the job: test -v HOME'" in lines
    (srun,) = (line for line in lines if line.startswith("srun "))
    mounts = '"--container-mounts=$HOME/data:/data,$HOME/out:/out"'
    assert f" {mounts} '--container-image=a#b' \"$HOME/venv/bin/python\" -u -m submitit" in srun, srun


REFUSED = {
    "export A=${B%/*}": "only ${NAME}, ${NAME:-text} and ${NAME:+text} are allowed",
    "export A='x y'": "it holds a quote",
    "export A=$(id)": "it holds a command inside a command",
    "module purge; module load x": "more than one simple command",
    "source /x/*.sh": "a pattern of file names",
    "export A=b # why": "it holds a comment",
    "~you/bin/python": "another user's home folder",
    "export A=b\n": "a line break",
    "": "it is empty",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_line_of_setup_that_is_refused_says_why(line):
    with pytest.raises(ParamError) as caught:
        RunParams().change(**SLURM | {"launch.setup": [line]})
    assert caught.value.field == "launch.setup" and REFUSED[line] in str(caught.value)


def test_a_step_has_the_variables_of_this_process_in_its_options(monkeypatch):
    monkeypatch.setenv("DATA", "/data")
    monkeypatch.delenv("NO_SUCH", raising=False)
    launch = RunParams().change(**SLURM | {"launch.srun": ["container-mounts=$DATA:/d,${NO_SUCH:-/x}:/y"]}).launch
    assert with_variables_of(launch).srun == ("container-mounts=/data:/d,/x:/y",)
    with pytest.raises(ParamError, match="launch.srun: the variable NO_SUCH is not set here; set it"):
        with_variables_of(launch.change(srun=("container-mounts=$NO_SUCH:/y",)))


@pytest.mark.parametrize("name", HOSTILE)
def test_what_could_leave_its_place_is_refused_by_name(name):
    with pytest.raises(ParamError) as caught:
        RunParams().change(**SLURM | {name: HOSTILE[name]})
    assert caught.value.field == name


@pytest.mark.parametrize(
    "option, field", {"gres=gpu:4": "gres", "gpus=4": "gpus_per_node", "time=9": "timeout_min"}.items()
)
def test_an_option_that_has_a_field_is_refused(option, field):
    with pytest.raises(ParamError, match=f"from launch.{field}; remove it, set that"):
        RunParams().change(**SLURM | {"launch.sbatch": [option]})
    for short, name in {"signal=USR1": "signal", "arra=0-2": "array", "expor=NONE": "export", "nod=3": "nodes"}.items():
        with pytest.raises(ParamError, match=f"launch.sbatch: .* mmfsdp sets {name} "):
            RunParams().change(**SLURM | {"launch.sbatch": [short]})
    for short, name in {"output=x": "output", "multi": "multi-prog", "ntasks=3": "ntasks"}.items():
        with pytest.raises(ParamError, match=f"launch.srun: .* mmfsdp sets {name} "):
            RunParams().change(**SLURM | {"launch.srun": [short]})
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
    monkeypatch.setattr(queue, "known_queues", {})
    return tmp_path / "bin"


@pytest.mark.real
def test_commands_ask_the_cluster_that_took_the_job(fake_slurm, tmp_path, monkeypatch):
    """Clusters number their jobs each for itself: job 77 of `gpu` and job 77 of the cluster here are two jobs."""
    monkeypatch.setenv("SLURM_CLUSTERS", "gpu,old")
    params = with_defaults(RunParams().change(**SLURM | {"launch.folder": str(tmp_path), "launch.timeout_min": None}))
    assert params.launch.slurm_cluster == "gpu,old" and "#SBATCH --clusters=gpu,old\n" in sbatch_text(params)
    for name in ("squeue", "sacct", "sinfo", "scontrol", "scancel"):
        where = '[ "${1#--clusters=}" = "$1" ] || cluster=${1#*=}; echo "${0##*/} $* $SLURM_CLUSTERS" >> ${0%/*}/called'
        answer = {"squeue": 'echo "CLUSTER: $cluster"; [ $cluster ] && echo "77|RUNNING|None|N/A|n1|/x/logs/a.sh"'}
        (fake_slurm / name).write_text(f"#!/bin/bash\n{where}\n{answer.get(name, '')}\n")
        (fake_slurm / name).chmod(0o755)
    (fake_slurm / "sbatch").write_text("#!/bin/sh\necho '77;gpu'\n")
    executor = slurm_executor(params)
    executor.folder.mkdir(parents=True)
    assert executor.submit(print).job_id == "77" and executor.submitted == "77;gpu"
    write_json(tmp_path / "status.json", {"status": "QUEUED", "job": "77;gpu"})
    assert Snapshot(tmp_path).job == "77;gpu"
    assert queue.find_job("77;gpu", user=0).state == "RUNNING" and queue.find_job("77", user=0).state == ""
    assert queue.current_state("77;gpu").startswith("RUNNING") and not ask_slurm.scancel("--full", job="77_3;gpu")
    reason = str(queue.job_error(tmp_path, "77;gpu"))
    assert "job 77 of cluster gpu, whose batch" in reason and "scancel 77 --clusters=gpu ends it" in reason
    largest_array("gpu")
    with_defaults(params)
    lines = (fake_slurm / "called").read_text().splitlines()
    assert not [line for line in lines if line.endswith("gpu,old") and "--clusters=gpu,old" not in line], lines
    asked = {line.split()[0] for line in lines if "--clusters=gpu" in line}
    assert asked == {"squeue", "sinfo", "scontrol", "scancel"}, lines
    assert "scancel --clusters=gpu --full 77_3 " in lines
    for hostile in ("77;-x", "77;a b", "77;", "77;gpu;x"):
        write_json(tmp_path / "status.json", {"status": "QUEUED", "job": hostile})
        assert Snapshot(tmp_path).job is None


SOCKET = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


@pytest.mark.real
@pytest.mark.parametrize("taken", [True, False])
def test_an_array_for_which_sbatch_has_no_answer_is_looked_for_and_not_refused(
    taken, fake_slurm, tmp_path, monkeypatch
):
    """Slurm may have taken it all the same; only if it knows none is it offered again."""
    monkeypatch.setattr(job_array, "RETRY_S", 0.1)
    params = RunParams().change(**SLURM | {"launch.name": "lr", "launch.folder": str(tmp_path / "runs")})
    path = make_folder(params.launch)
    write_json(path / "sweep.json", {"members": [{"train.lr": 1}, {"train.lr": 2}], "at_once": 2, "entry": TRAIN})
    params.to_yaml(path / "base.yaml")
    first = f"mkdir {tmp_path}/first 2>/dev/null && {{ echo '{SOCKET}' >&2; exit 1; }}"
    (fake_slurm / "sbatch").write_text(f"#!/bin/sh\n{first}\necho 56\n")
    knows = f"echo '55|{path}/array_0/array.sh'" if taken else "true"
    # It does not answer when it is asked first.
    asked = f"mkdir {tmp_path}/asked 2>/dev/null && {{ echo '{SOCKET}' >&2; exit 1; }}"
    (fake_slurm / "squeue").write_text(f"#!/bin/sh\n{asked}\necho '54|/x/array.sh'; {knows}\n")
    members = Sweep(path)
    waiting = make_members(members)
    submit_in_parts(members, waiting)
    assert not waiting and (tmp_path / "asked").exists()
    jobs = [Snapshot(path / name).job for name in members.members]
    assert jobs == (["55_0", "55_1"] if taken else ["56_0", "56_1"])
    assert {Snapshot(path / name).status.status for name in members.members} == {Status.QUEUED}
    of_one = refusal(SOCKET)
    assert of_one.why.kind == NO_ANSWER and "may have taken it" in of_one.reason and "squeue --me" in of_one.reason


@pytest.mark.parametrize("executor", ["slurm", "srun"])
def test_a_figure_that_no_machine_has_is_refused_before_a_launch(executor, fake_slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (fake_slurm / "srun").write_text("#!/bin/sh\n")
    (fake_slurm / "srun").chmod(0o755)
    (tmp_path / "lab.yaml").write_text("machine: {flopps: 1.0e+15}\n")
    changes = {"launch.executor": executor, "launch.cluster": str(tmp_path / "lab.yaml"), "launch.ranks": 1}
    with pytest.raises(ParamError, match="flopps"):
        check_place(RunParams().change(**changes, **{"train.device": "cpu"}))


@pytest.mark.real
def test_banners_are_no_jobs(fake_slurm, tmp_path):
    executor = slurm_executor(RunParams().change(**SLURM | {"launch.folder": str(tmp_path)}))
    executor.folder.mkdir(parents=True)
    assert executor.submit(print).job_id == "77"
    (fake_slurm / "squeue").write_text(
        "#!/bin/sh\necho 'Maintenance | on Friday'; echo '77|RUNNING|None|N/A|n1|/a|b'\n"
    )
    assert queue.find_job("77", user=0).state == "RUNNING" and queue.find_job("78", user=0).state == "TIMEOUT"
    (fake_slurm / "squeue").write_text("#!/bin/sh\necho 'Maintenance | on Friday'; echo '77|COMPLETED'; echo bye\n")
    assert queue.current_state("77") == "COMPLETED"
    assert not ask_slurm.scancel(job="77") and not ask_slurm.scancel("--signal=USR2", job="77")
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
    assert (
        run_state(folder).reason
        == "its run.json is missing; cancel it, in case that it still runs; then launch it again"
    )
    assert Run.open(folder).job == "99"
    (fake_slurm / "squeue").write_text(f"#!/bin/sh\necho '99|{folder}/logs/submission.sh'\n")
    Run.open(folder).cancel()
    assert (folder / "cancel").exists() and "99" in (fake_slurm / "cancelled").read_text()


LOST = {"state": "failed", "rank": 0, "error": "RuntimeError: Connection closed by peer", "time": 2.0}
OWN = {"state": "failed", "rank": 2, "error": "ValueError: no", "time": 1.0}
RUNS = {"state": "running", "rank": 1}
SRUN = "srun: error: n{}: task{}: {}\n"
CRASH = SRUN.format(1, " 1", "Segmentation fault")
BY_SRUN = SRUN.format(2, "s 2-3", "Killed")
JOBS_THAT_FAILED = {
    "a rank was killed, and another failed because of it": (
        [LOST, RUNS, RUNS, RUNS],
        SRUN.format(1, " 1", "Killed") + SRUN.format(1, " 0", "Exited with exit code 1") + BY_SRUN,
        "rank 1 on n1: Killed; then rank 0: RuntimeError: Connection closed by peer",
    ),
    "the crash is told after what it caused": (
        [LOST, RUNS, RUNS, RUNS],
        SRUN.format(1, " 0", "Exited with exit code 1") + CRASH + BY_SRUN,
        "rank 1 on n1: Segmentation fault; then rank 0: RuntimeError: Connection closed by peer",
    ),
    "a rank has reported its error, and srun has ended the others": (
        [LOST, RUNS, OWN, RUNS],
        SRUN.format(2, " 2", "Exited with exit code 1") + SRUN.format(1, "s 0-1,3", "Killed"),
        "rank 2: ValueError: no",
    ),
    "out of memory": (
        [LOST, RUNS, RUNS, RUNS],
        SRUN.format(1, " 1", "Out Of Memory") + SRUN.format(1, " 0", "Exited with exit code 1"),
        "rank 1 on n1: Out Of Memory: out of memory; raise launch.mem; "
        "then rank 0: RuntimeError: Connection closed by peer",
    ),
    "a rank never started": ([RUNS, {}], CRASH, "rank 1 on n1: Segmentation fault before it started"),
    "no rank failed": ([RUNS], "", None),
}


@pytest.mark.parametrize("name", JOBS_THAT_FAILED)
def test_the_first_rank_that_failed_is_blamed_and_not_those_that_srun_ended(name, tmp_path):
    statuses, log, reason = JOBS_THAT_FAILED[name]
    look = Snapshot(tmp_path)
    look.reports = statuses
    state = failure_in_job(look, log)
    assert (state and state.reason) == reason


BEFORE = "rank 0 on n1: Exited with exit code 1 before it started"
LOGS = {
    "slurmstepd: error: execve(): /venv/bin/python: No such file or directory\n": (
        f"{BEFORE}: execve(): /venv/bin/python: No such file or directory",
        NO_PYTHON,
    ),
    "pyxis: importing docker image: x\n"
    "slurmstepd: error: pyxis: child 77 failed with error code: 1\n"
    "slurmstepd: error: pyxis:     [ERROR] URL https://x/y returned error code: 401 Unauthorized\n"
    "slurmstepd: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1\n": (
        f"{BEFORE}: URL https://x/y returned error code: 401 Unauthorized",
        NOT_STARTED,
    ),
}


@pytest.mark.parametrize("log", LOGS)
def test_the_cause_is_the_first_line_with_an_error(log, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/7_0_log.out").write_text(log)
    look = Snapshot(tmp_path)
    look.reports = [{}]
    state = failure_in_job(look, log + SRUN.format(1, " 0", "Exited with exit code 1"))
    assert (state.why.text, state.why.kind) == LOGS[log]


def test_the_words_of_lmod_are_told(tmp_path):
    (tmp_path / "logs").mkdir()
    words = 'Lmod has detected the following error:  The following module(s) are unknown: "cuda/99"\n\nPlease check\n'
    (tmp_path / "logs/7_0_log.out").write_text(f"{words}launch.modules: module load cuda/99 failed with exit code 1\n")
    (tmp_path / "logs" / SCRIPT_FILE).write_text("launch.modules: module load cuda/99\n")
    state = failure_without_rank(Snapshot(tmp_path), "")
    assert state.why.text == (
        'launch.modules: module load cuda/99 failed with exit code 1: The following module(s) are unknown: "cuda/99"'
    )
    assert state.why.fix.startswith("correct launch.modules")


def test_a_rank_that_left_with_0_is_blamed_for_what_the_others_lost(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/ranks.end").write_text("1\n")
    look = Snapshot(tmp_path)
    look.reports = [LOST | {"kind": LOST_PEER}, RUNS, RUNS]
    state = failure_in_job(look, SRUN.format(1, " 0", "Exited with exit code 1") + SRUN.format(2, " 2", "Killed"))
    assert state.rank == 1 and state.why.text.startswith("rank 1 ended with exit code 0 and without a report"), state


def test_a_job_that_was_held_is_not_said_to_be_cancelled_by_its_reason(fake_slurm, tmp_path):
    """squeue says why a job waited, and not who has cancelled it."""
    folder = submitted(tmp_path, job="77")
    queue.queue_of(os.getuid()).jobs["77"] = queue.Job("CANCELLED", "JobHeldUser", asked=time.time())
    queue.queue_of(os.getuid()).began = queue.queue_of(os.getuid()).answered = time.time()
    state = run_state(folder)
    assert state.status is Status.CANCELLED and "JobHeldUser" not in state.reason, state


def test_what_srun_printed_before_the_job_was_started_again_is_not_of_its_end(tmp_path):
    again = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-31T12:00:00 DUE TO NODE FAILURE, SEE LOG ***\n"
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/7_0_log.out").write_text(CRASH + again + BY_SRUN)
    assert since_last_start(Snapshot(tmp_path).log(0)) == BY_SRUN


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
    state = launch(params, entry="tests.launch_entries:places").wait(600)
    assert re.match(reason, f"{state.status}: {state.reason}"), state


@pytest.mark.real
def test_a_submission_that_raises_leaves_its_words(tmp_path):
    params = RunParams().change(
        **SLURM | {"train.device": "cpu", "launch.folder": str(tmp_path), "launch.cluster": "x"}
    )
    folder = make_folder(params.launch)
    start_in(folder, params, "tests.launch_entries:places")  # as if the profile were removed after the checks of launch
    state = Run(folder).wait(600)
    assert state.status is Status.FAILED and "ParamError" in state.traceback
    assert state.reason.startswith("the submission failed: launch.cluster: there is no profile 'x'"), state


@pytest.mark.real
def test_a_requeued_jobs_script_leaves_no_exit_code_whatever_is_ended_first(fake_slurm, tmp_path):
    """Slurm ends the processes of a requeued job one by one; the innermost is first here."""
    (fake_slurm / "scontrol").write_text("#!/bin/sh\nexit 0\n")
    (fake_slurm / "scontrol").chmod(0o700)
    touch(tmp_path / PREEMPTED_FILE)
    script = psutil.Popen(["bash", "-c", "\n".join(["true", *after_ranks(tmp_path)])])

    def sleeping():
        """Return the process that sleeps. Others of the script's end while one looks at them."""
        for process in [*script.children(), script]:
            with suppress(psutil.NoSuchProcess):  # as a zombie is, too
                if process.cmdline()[:1] == ["sleep"]:
                    return process
        return None

    sleep = until(sleeping, seconds=600)
    sleep.terminate()
    script.wait(600)
    assert sorted(path.name for path in tmp_path.glob("ranks.*")) == [PREEMPTED_FILE]


@pytest.mark.real
def test_a_preempted_job_whose_nodes_lack_scontrol_ends_with_the_reason(fake_slurm, tmp_path):
    folder = make_folder(RunParams().change(**{"launch.folder": str(tmp_path)}).launch)
    record(executor="slurm").write(folder)
    write_json(folder / "status.json", {"status": "QUEUED", "job": "77"})
    touch(folder / "logs" / PREEMPTED_FILE)
    (fake_slurm / "scontrol").unlink()
    lines = "\n".join(["true", *after_ranks(folder / "logs")])
    done = subprocess.run(["/bin/bash", "-c", lines], env={"PATH": str(fake_slurm)}, capture_output=True, text=True)
    assert done.returncode == 0 and "scontrol: command not found" in done.stderr
    state = run_state(folder)
    assert state.status is Status.FAILED and state.reason == "preempted, and not requeued; resume it"


@pytest.mark.real
def test_a_command_that_was_slow_has_more_time_and_none_in_time_is_no_refusal(fake_slurm, monkeypatch):
    monkeypatch.setattr(ask_slurm, "last_calls_s", ask_slurm.defaultdict(ask_slurm.last_calls_s.default_factory))
    monkeypatch.setattr(ask_slurm, "SHORTEST_LIMIT_S", 1.0)
    (fake_slurm / "squeue").write_text("#!/bin/bash\n[ -e ${0%/*}/late ] || { touch ${0%/*}/late; exec sleep 60; }\n")
    late = ask_slurm.ask_slurm("squeue")
    assert late.none_yet and not late.yes and not late.no and late.reason.kind == NO_ANSWER
    assert ask_slurm.limit_s("squeue") > 1.0 == ask_slurm.limit_s("sacct")
    assert ask_slurm.ask_slurm("squeue").yes
    (fake_slurm / "squeue").write_text(
        "#!/bin/sh\necho 'slurm_load_jobs error: Socket timed out on send/recv' >&2; exit 1\n"
    )
    assert ask_slurm.ask_slurm("squeue").none_yet and queue.current_state("77") is None
    (fake_slurm / "squeue").write_text(
        "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n"
    )
    assert ask_slurm.ask_slurm("squeue").no and queue.current_state("77") == ""


def submitted(folder, *, job):
    """Make the folder of a run that was submitted as a job long ago."""
    folder = make_folder(RunParams().change(**{"launch.folder": str(folder), "launch.name": f"job{job}"}).launch)
    record(executor="slurm").write(folder)
    write_json(folder / "status.json", {"status": "QUEUED", "job": job, "submitted": 1.0})
    os.utime(folder / "status.json", (1, 1))
    return folder


@pytest.mark.real
def test_slurm_is_asked_once_for_all_runs(fake_slurm, tmp_path):
    for name, answer in {"squeue": "", "sacct": "seq -f '%g|TIMEOUT|Unknown|n1' 77 96"}.items():
        (fake_slurm / name).write_text(f"#!/bin/bash\necho {name} $* >> ${{0%/*}}/asked\n{answer}\n")
    numbers = [str(number) for number in range(77, 97)]
    paths = {number: submitted(tmp_path, job=number) for number in numbers}
    assert runs_table(paths).count("the time limit was reached") == len(numbers)
    asked = (fake_slurm / "asked").read_text().splitlines()
    assert [line.partition(" ")[0] for line in asked] == ["squeue", "sacct"]
    assert asked[1].endswith(f"--jobs={','.join(numbers)}")


@pytest.mark.real
def test_a_look_does_not_wait_for_slurm_and_says_how_old_its_answer_is(fake_slurm, tmp_path, monkeypatch):
    """A job that is cancelled while it waits is known to be, once squeue has answered, however long that takes."""
    answer = (
        'while [ ! -e ${0%/*}/may_answer ]; do sleep 0.05; done\necho "77|$(cat ${0%/*}/may_answer)|None|N/A|n1|/x"'
    )
    (fake_slurm / "squeue").write_text(f"#!/bin/bash\n{answer}\n")
    monkeypatch.setattr(queue, "PATIENCE_S", 0.0)
    folder = submitted(tmp_path, job="77")
    first = run_state(folder)
    assert first.status is Status.QUEUED and re.search(
        r"Slurm was asked \d+ s ago and has not answered yet", first.reason
    )
    (fake_slurm / "may_answer").write_text("PENDING")
    state = until(lambda: (s := run_state(folder)).reason.endswith("job 77 waits") and s)
    assert state.status is Status.QUEUED and not state.notes
    (fake_slurm / "may_answer").unlink()
    monkeypatch.setattr(queue, "SQUEUE_INTERVAL_S", 0.0)
    monkeypatch.setattr(queue, "OLD_ANSWER_S", 0.0)
    old = run_state(folder)
    assert old.status is Status.QUEUED and re.search("has not answered yet; its last answer is .* s old", old.reason), (
        old
    )
    (fake_slurm / "may_answer").write_text("CANCELLED")
    assert until(lambda: (s := run_state(folder)).done and s).status is Status.CANCELLED


@pytest.mark.real
def test_what_ranks_report_after_slurms_answer_counts_more(fake_slurm, tmp_path):
    """Slurm is asked every 20 s; a job may have started, or gone on, since."""
    for state in ("PENDING", "SUSPENDED"):
        (fake_slurm / "squeue").write_text(f"#!/bin/sh\necho '77|{state}|None|N/A|n1|/x'\n")
        folder = submitted(tmp_path / state, job="77")
        queue.queue_of(os.getuid()).jobs.clear()
        queue.queue_of(os.getuid()).asked_for.clear()
        assert run_state(folder).status is (Status.QUEUED if state == "PENDING" else Status.SUSPENDED)
        write_json(folder / "logs/rank0.json", {"state": "running", "time": time.time() + 1})
        now = run_state(folder)
        assert now.status is Status.STARTING and "Slurm" not in now.reason, now


@pytest.mark.real
def test_a_cancel_answers_while_slurm_does_not(fake_slurm, tmp_path, monkeypatch):
    for name in ("squeue", "scancel"):
        (fake_slurm / name).write_text("#!/bin/sh\nexec sleep 60\n")
    folder = make_folder(RunParams().change(**{"launch.folder": str(tmp_path)}).launch)
    record(executor="slurm").write(folder)
    write_json(folder / "status.json", {"status": "QUEUED", "job": "77"})
    state = Run(folder).cancel()
    assert not state.done and "being cancelled; Slurm was asked" in state.reason, state
    assert state.reason.endswith("Slurm was asked, no answer yet; this process goes on asking while it lives"), state
    assert (folder / "cancel").exists()
    (fake_slurm / "scancel").write_text(f"#!/bin/bash\n{COMMANDS['scancel']}\n")
    (fake_slurm / "squeue").write_text(
        f"#!/bin/sh\ncase $* in *%o*) echo '77|{folder}/logs/submission.sh';; *) echo '77|CANCELLED';; esac\n"
    )
    assert Run(folder).wait(600).status is Status.CANCELLED and "77" in (fake_slurm / "cancelled").read_text()


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


def test_dry_run_prints_the_batch_file_and_starts_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")  # as on a laptop
    monkeypatch.setenv("SHARED", str(tmp_path))
    flags = ["--launch.executor", "slurm", "--launch.folder", "$SHARED/runs", "--train.device", "cpu"]
    flags += ["--launch.gpus-per-node", "a100:4", "--launch.interface", "ib0"]
    assert main(["launch", "--dry-run", "--config", "tiny", *flags]) == 0
    changes = {"launch.executor": "slurm", "launch.folder": str(tmp_path / "runs"), "train.device": "cpu"}
    changes |= {"launch.gpus_per_node": "a100:4", "launch.interface": "ib0"}
    out, err = capsys.readouterr()
    assert out == sbatch_text(load("tiny").change(**changes))
    assert "asks for 4 GPUs for 720 min: at most 48 GPU-hours" in err and "sbatch is not installed here" in err
    assert not (tmp_path / "runs").exists()


SINFO = """main*|infinite|8|gpu:4
main*|infinite|64|(null)
big|2-00:00:00|128|gpu:a100:4(S:0-1),localssd:100
big|2-00:00:00|32|gpu:v100:8
short|10:00|8|(null)
"""
BY_DEFAULT = {
    "a share of the node": ({}, {"launch.cpus_per_task": 2}),
    "a type of GPU": ({"launch.partition": "big", "launch.gpus_per_node": "a100:4"}, {}),
    "any type of GPU": ({"launch.partition": "big"}, {"launch.cpus_per_task": 4}),
    "GPUs without a rank": ({"launch.gpus_per_node": 4, "launch.ranks": 2}, {"launch.cpus_per_task": 8}),
    "said": ({"launch.cpus_per_task": 12}, {}),
    "said by the threads": ({"launch.threads": 12}, {}),
    "few threads": ({"launch.threads": 1}, {"launch.cpus_per_task": 2}),
    "no GPU": ({"train.device": "cpu", "launch.partition": "short"}, {"launch.timeout_min": 10}),
    "unknown": ({"launch.partition": "other"}, {}),
}


@pytest.mark.real
@pytest.mark.parametrize("name", BY_DEFAULT)
def test_the_cpus_of_a_rank_follow_the_nodes_of_the_partition(fake_slurm, monkeypatch, name):
    monkeypatch.setattr(site, "known_kinds", {})
    monkeypatch.delenv("SBATCH_PARTITION", raising=False)
    (fake_slurm / "sinfo").write_text(f"#!/bin/sh\necho Welcome\ncat <<'END'\n{SINFO}END\n")
    (fake_slurm / "sinfo").chmod(0o755)
    asked, decided = BY_DEFAULT[name]
    params = RunParams().change(**SLURM | asked)
    expected = params.change(**decided)
    if name == "GPUs without a rank":
        assert site.cpus_of_rank(params.launch, 4, site.kinds_in("", "")) == 8
        expected = params  # which is the default
    assert with_defaults(params) == expected


REASONS = {
    "AssocGrpCPUMinutesLimit": BUDGET,
    "AssocGrpGRESMinutes": BUDGET,
    "QOSGrpBillingMinutes": BUDGET,
    "AssocGrpWallLimit": BUDGET,
    "AssocGrpCPURunMinutesLimit": "",
    "QOSGrpGRES": "",
    "ReservationDeleted": RESERVATION_GONE,
    "JobHoldMaxRequeue": REQUEUED_HELD,
    "job_requeued_in_held_state": REQUEUED_HELD,
    "Resources": "",
    "Priority": "",
}


@pytest.mark.parametrize("reason", REASONS)
def test_reasons_for_which_a_job_never_starts_have_advice(reason):
    assert why_never(reason) == REASONS[reason]
    assert not REASONS[reason] or ADVICE[REASONS[reason]].fix.format(job=7, timeout_min=9)


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
