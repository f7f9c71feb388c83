"""What Slurm is asked for: every field where it belongs, profiles beneath, and nothing that could leave its place."""

import pytest

from mmfsdp import ParamError, RunParams
from mmfsdp.cli import main
from mmfsdp.params import load
from mmfsdp.params.run import read_cluster
from mmfsdp.run.slurm import sbatch_text

SLURM = {"launch.executor": "slurm", "launch.ranks": 8, "launch.nodes": 2, "train.device": "cuda"}

FULL = SLURM | {
    "launch.gpus_per_node": 6,
    "launch.cpus_per_task": 7,
    "launch.mem": "64G",
    "launch.timeout_min": 30,
    "launch.partition": "gpu",
    "launch.account": "lab",
    "launch.qos": "high",
    "launch.constraint": "a100&nvlink",
    "launch.exclude": "node[1-3],node7",
    "launch.reservation": "course",
    "launch.python": "apptainer exec --nv /shared/mm.sif python",
    "launch.modules": ["cuda/12.4"],
    "launch.setup": ["export NCCL_SOCKET_IFNAME=ib0"],
    "launch.sbatch": ["mail-type=END", "exclusive"],
}

LINES = """
--gpus-per-node=6 --cpus-per-task=7 --mem=64G --time=30 --partition=gpu --account=lab --qos=high
--constraint='a100&nvlink' --exclude='node[1-3],node7' --reservation=course --mail-type=END
--exclusive --nodes=2 --ntasks-per-node=4
""".split()


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


HOSTILE = {
    "launch.partition": "gpu\n#SBATCH --uid=0",
    "launch.account": "a b",
    "launch.qos": "high'",
    "launch.constraint": "a100;rm",
    "launch.exclude": "$(hostname)",
    "launch.reservation": "`id`",
    "launch.mem": "lots",
    "launch.cluster": "../x\n",
    "launch.python": 'python -c "x"',
    "launch.modules": ["cuda; rm"],
    "launch.setup": ["export A=b\nrm x"],
    "launch.sbatch": ["mail-type=END --uid=0"],
    "launch.folder": "runs/%j\n",
    "launch.name": "a b",
    "launch.ranks": 7,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_could_leave_its_place_is_refused_by_name(name):
    with pytest.raises(ParamError) as caught:
        RunParams().change(**SLURM | {name: HOSTILE[name]})
    assert caught.value.field == name


@pytest.mark.parametrize("option, field", {"gres=gpu:4": "gpus_per_node", "partition=x": "partition"}.items())
def test_an_option_that_has_a_field_is_refused(option, field):
    with pytest.raises(ParamError, match="from other launch fields; remove it"):
        RunParams().change(**SLURM | {"launch.sbatch": [option]})
    with pytest.raises(ParamError, match="mmfsdp sets signal"):
        RunParams().change(**SLURM | {"launch.sbatch": ["signal=USR1"]})


def test_slurm_fields_are_refused_elsewhere():
    with pytest.raises(ParamError, match="launch.partition: 'gpu' has no effect unless executor is slurm"):
        RunParams().change(**{"launch.partition": "gpu"})
    with pytest.raises(ParamError, match="launch.executor: local submits no job"):
        sbatch_text(RunParams())


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
        "machine: {flops: fast}": "machine: 'fast' should be a valid number",
        "[1]": "is not a mapping",
        "a: [": "is not YAML",
    }.items():
        profile.write_text(content)
        with pytest.raises(ParamError, match=f"launch.cluster: .*lab.yaml.* {words}"):
            sbatch_text(params)


def test_dry_run_prints_the_batch_file_and_starts_nothing(tmp_path, capsys):
    flags = ["--launch.executor", "slurm", "--launch.folder", str(tmp_path / "runs"), "--train.device", "cpu"]
    assert main(["launch", "--dry-run", "--config", "tiny", *flags]) == 0
    changes = {"launch.executor": "slurm", "launch.folder": str(tmp_path / "runs"), "train.device": "cpu"}
    assert capsys.readouterr().out == sbatch_text(load("tiny").change(**changes))
    assert not (tmp_path / "runs").exists()
