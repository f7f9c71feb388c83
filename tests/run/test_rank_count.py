"""Where a run's ranks go: how many there are where nobody has said, on which devices, and the line that says why."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mmfsdp import ParamError, Run, RunParams, launch, sweep
from mmfsdp.kit import cli
from mmfsdp.kit.run import rank_count
from mmfsdp.kit.run.rank_count import count_gpus, trains_on, with_ranks
from mmfsdp.kit.run.slurm.slurm import sbatch_text
from mmfsdp.kit.train.prepare import preview
from mmfsdp.params import load
from tests.processes import in_fresh_python
from tests.tiny_run import tiny_run
from tests.waiting import light, runs_of

ROOT = Path(__file__).resolve().parent.parent.parent
SLURM = {"launch.executor": "slurm", "launch.nodes": 2}


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """Sets the number of GPUs that torch sees, on a machine with a driver."""

    def see(number: int) -> None:
        if number:
            (tmp_path / "driver").touch()
        monkeypatch.setattr(rank_count, "DRIVER_FILES", (str(tmp_path / "driver"),))
        monkeypatch.setattr("torch.cuda.device_count", lambda: number)

    return see


COUNT = """
import sys
from mmfsdp.kit.run import rank_count
rank_count.DRIVER_FILES = (sys.argv[1],)
print(rank_count.count_gpus(), "torch" in sys.modules)
"""


def test_gpus_are_counted_without_torch_where_there_is_no_driver(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1 / 0)
    monkeypatch.setattr(rank_count, "DRIVER_FILES", ("/no/driver",))
    assert count_gpus() == 0
    assert in_fresh_python(COUNT, "/no/driver").split() == ["0", "False"]


@pytest.mark.real
def test_torch_counts_gpus_in_a_process_of_its_own_unless_it_is_imported_already(gpus, tmp_path, monkeypatch):
    gpus(3)
    assert count_gpus() == 3
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("class cuda:\n    device_count = lambda: 5\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    out = subprocess.run([sys.executable, "-c", COUNT, str(tmp_path / "driver")], capture_output=True, text=True)
    assert out.stdout.split() == ["5", "False"], out.stderr


PLACES = {  # GPUs here, changes -> the ranks, and the line
    "no GPU": (0, {}, 2, "trains on the CPU in 2 ranks, as launch.ranks is unset: torch sees no GPU here"),
    "one GPU": (1, {}, 1, "trains on 1 GPU in 1 rank, as launch.ranks is unset: a rank for each GPU"),
    "four GPUs": (4, {}, 4, "trains on 4 GPUs in 4 ranks, as launch.ranks is unset: a rank for each GPU"),
    "the CPU": (
        4,
        {"train.device": "cpu"},
        2,
        "trains on the CPU in 2 ranks, as launch.ranks is unset: train.device is cpu",
    ),
    "as many as GPUs": (2, {"launch.ranks": 2}, 2, "trains on 2 GPUs in 2 ranks: launch.ranks is 2"),
    "some of them": (4, {"launch.ranks": 2}, 2, "trains on 2 of 4 GPUs in 2 ranks: launch.ranks is 2"),
    "too few": (
        1,
        {"launch.ranks": 2},
        2,
        "trains on the CPU in 2 ranks: torch sees 1 GPU here, which is too few; set launch.ranks to 1 to train on GPUs",
    ),
    "a job": (
        0,
        SLURM | {"launch.gpus_per_node": 4},
        8,
        "trains on 8 GPUs in 8 ranks on 2 nodes, as launch.ranks is unset: train.device is auto",
    ),
    "a job by its profile": (
        0,
        SLURM | {"launch.cluster": "single_node_8gpu"},
        16,
        "trains on 16 GPUs in 16 ranks on 2 nodes, as launch.ranks is unset: train.device is auto",
    ),
    "a job with a number": (
        4,
        SLURM | {"launch.ranks": 4, "train.device": "cuda"},
        4,
        "trains on 4 GPUs in 4 ranks on 2 nodes: train.device is cuda",
    ),
    "a job on CPUs": (
        4,
        SLURM | {"launch.gpus_per_node": 4, "train.device": "cpu", "launch.nodes": 3},
        3,
        "trains on the CPU in 3 ranks on 3 nodes, as launch.ranks is unset: train.device is cpu",
    ),
    "a job without GPUs": (
        4,
        SLURM | {"launch.gpus_per_node": 0},
        2,
        "trains on the CPU in 2 ranks on 2 nodes, as launch.ranks is unset: the job asks for no GPU",
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_ranks_that_nobody_has_set_are_the_gpus_and_a_line_says_where_it_trains(gpus, name):
    number, changes, ranks, line = PLACES[name]
    gpus(number)
    params = RunParams().change(**changes)
    settled = with_ranks(params)
    assert settled.launch.ranks == ranks and with_ranks(settled) == settled
    assert settled.change(**{"launch.ranks": params.launch.ranks}) == params, "nothing else changes"
    assert trains_on(params) == line


def test_the_line_says_what_hides_the_gpus_that_are_there(gpus, monkeypatch):
    gpus(1)
    gpus(0)  # the driver stays
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert trains_on(RunParams()).endswith("though there is a driver; install a torch that is built for it")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert trains_on(RunParams()).endswith(": CUDA_VISIBLE_DEVICES hides all GPUs")


def test_a_number_that_does_not_fit_is_told_when_it_is_known(gpus):
    gpus(3)
    params = RunParams().change(
        **{"fsdp.sharding_strategy": "HYBRID_SHARD", "fsdp.dp_replicate": 2, "fsdp.dp_shard": 2}
    )
    with pytest.raises(ParamError, match="2 x dp_shard 2 makes 4 ranks, but launch.ranks is 3"):
        with_ranks(params)
    gpus(4)
    assert with_ranks(params).launch.ranks == 4


def test_plans_and_batch_files_have_the_number(gpus):
    gpus(3)
    tiny = load("tiny").change(**{"launch.ranks": None})
    assert preview(tiny)[0].world_size == 3
    job = tiny.change(**SLURM, **{"launch.gpus_per_node": 4})
    assert preview(job)[0].world_size == 8
    assert "--ntasks-per-node=4\n" in sbatch_text(job)
    by_profile = job.change(**{"launch.gpus_per_node": None, "launch.cluster": "single_node_8gpu"})
    plan = preview(by_profile)[0]
    assert plan.world_size == 16 and "fp32" in {finding.code for finding in plan.lint}, "it knows that they are GPUs"


def test_a_gpu_for_each_rank_is_checked_before_a_launch(gpus, tmp_path):
    gpus(1)
    with pytest.raises(ParamError, match="train.device: cuda needs a GPU per rank: .* 2 ranks, .* 1 GPU;"):
        launch(light(tmp_path, **{"launch.ranks": 2, "train.device": "cuda"}), entry="tests.launch_entries:talk")
    assert not list(tmp_path.glob("first"))


@pytest.mark.real
def test_a_launch_writes_the_number_and_a_resume_keeps_it(gpus, tmp_path):
    gpus(3)
    with runs_of(light(tmp_path)) as start:
        run = start("talk", **{"train.device": "auto"})
        assert run.record.ranks == run.params.launch.ranks == 3
        gpus(1)
        run.cancel()
        assert run.resume(params=run.params.change(**{"launch.ranks": None})).params.launch.ranks == 3
        run.cancel()
        started = sweep(
            light(tmp_path, **{"launch.name": "lr", "train.device": "auto"}),
            grid={"train.lr": [1, 2]},
            entry="tests.launch_entries:talk",
        )
        gpus(2)
        assert started.shared.launch.ranks == 1
        started.wait(600)
        assert [started.run(name).record.ranks for name in started.members] == [1, 1]


@pytest.mark.real
def test_without_a_gpu_two_ranks_train_and_say_so(tmp_path, monkeypatch, capsys):
    params = tiny_run(tmp_path, **{"train.device": "auto", "train.steps": 2})
    assert params.launch.ranks is None
    params.to_yaml(tmp_path / "params.yaml")
    line = "trains on the CPU in 2 ranks"
    assert cli.main(["launch", "--config", str(tmp_path / "params.yaml")]) == 0
    assert f"{line}, as launch.ranks is unset: torch sees no GPU here" in capsys.readouterr().out
    run = Run.open(tmp_path / "runs/first")
    assert run.wait(600).ok, run.state()
    assert yaml.safe_load((run.path / "params.yaml").read_text())["launch"]["ranks"] == 2
    assert f"\n{line}: torch sees no GPU here\n" in f"\n{run.logs(0)}" and line not in run.logs(1)
    assert run.result()["world_size"] == 2
