"""Preemption, time limit, node failure and requeue on a real Slurm: nothing is lost beyond the last save, and the run
ends as the unbroken one does, to the last bit."""

import time
from contextlib import contextmanager

import pytest

from mmfsdp import Run, RunParams, launch
from tests.run.test_preempt import kinds
from tests.slurm.cluster import NODES, SPARE
from tests.tiny_run import tiny_run
from tests.train.test_resume import curve, final, rows
from tests.waiting import until

pytestmark = pytest.mark.real

SLURM = {"launch.executor": "slurm", "launch.nodes": 2, "launch.timeout_min": 30}
LONG = {"train.steps": 32, "train.accumulation": 1, "train.save_every": 4, "train.keep_last": 2}
ENTRY = "tests.launch_entries:trains"


def resumed(run: Run) -> list[int]:
    return [step for kind, step in kinds(run) if kind == "resumed"]


def steps_done(run: Run, more: int = 2) -> int:
    """The step it is at, once it has done so many more since it was last taken up."""
    start = resumed(run)[-1] if resumed(run) else 0
    return until(lambda: (s := run.state()).step >= start + more and s.step, seconds=600, words=lambda: told(run))


def told(run: Run) -> str:
    logs = "\n".join(f"{p.name}: {p.read_text()[-300:]}" for p in sorted((run.path / "logs").glob("rank*")))
    said = (run.path / "status.json").read_text()
    return f"{run.state()}\n{said}\n{logs}\n{run.events()}\n{run.logs(0)[-3000:]}"


def goes_on(run: Run, cluster, times: int) -> None:
    """Until it is resumed so many times."""

    def begun() -> bool:
        time.sleep(0.5)
        cluster.release()
        done, found = run.state().done, len(resumed(run)) >= times  # it may have ended since then
        assert found or not done, told(run) + cluster.words()
        return found

    until(begun, seconds=600, words=lambda: told(run))


@contextmanager
def loses(node: str, cluster):
    """A node goes down, and the spare one takes its place. The node itself could not yet: for a minute Slurm may send
    it once more the end of the job's last life, which would hit the next one."""
    cluster.start_node(SPARE)
    cluster.stop_node(node)
    until(lambda: "down" in cluster.nodes()[node], seconds=600, words=lambda: str(cluster.nodes()))
    try:
        yield
    finally:
        cluster.stop_node(SPARE)
        cluster.ask("scontrol", "update", f"nodename={SPARE}", "state=future")
        cluster.start_node(node)
    until(lambda: cluster.nodes() == dict.fromkeys(NODES, "idle"), words=cluster.words)


def ends_like(run: Run, whole: Run, cluster) -> None:
    """Wait for its end, whatever is requeued on the way, and compare."""

    def over() -> bool:
        time.sleep(0.5)
        cluster.release()
        return run.state().done

    until(over, seconds=600, words=lambda: told(run))
    assert whole.wait(600).ok
    assert run.state().ok, told(run)
    assert curve(run.path) == curve(whole.path) and final(run.path) == final(whole.path)
    for rank in range(2):
        assert [row["step"] for row in rows(run.path, rank)] == list(range(1, whole.state().steps + 1))
    assert [p for p in (run.path / "checkpoints").iterdir() if not p.name.startswith("step_")] == []


def saving(run: Run) -> bool:
    return any((run.path / "checkpoints").glob(".*.writing"))


def test_signals_to_all_processes_of_a_job_with_data_workers_lose_nothing(cluster, tmp_path):
    params = tiny_run(tmp_path, **{"train.steps": 12, "train.save_every": 2, "train.eval_every": 2})
    whole = launch(params.change(**{"launch.name": "whole"}))
    one_node = SLURM | {"launch.nodes": 1, "launch.name": "job", "data.workers": 1}
    run = launch(params.change(**one_node), entry="tests.launch_entries:signalled")
    until(lambda: run.state().done, seconds=600, words=lambda: told(run))  # by SIGTERM, and Slurm does not requeue it
    run.resume()
    goes_on(run, cluster, 2)
    ends_like(run, whole, cluster)
    assert [kind for kind, _ in kinds(run)].count("preempted") == 2


BEFORE_ITS_TIME_IS_UP = ["preempted", "requeued", "resumed"]


def limited(params: RunParams, entry: str) -> Run:
    """Launch a job of one node with a time limit of two minutes, and keep it off the node that will be lost."""
    limit = {"launch.nodes": 1, "launch.exclude": NODES[1], "launch.timeout_min": 2, "launch.name": "limited"}
    return launch(params.change(**SLURM | limit), entry=f"tests.launch_entries:{entry}")


def test_every_way_to_be_requeued_loses_nothing(cluster, tmp_path):
    params = tiny_run(tmp_path, **LONG)
    timed = limited(params.change(**{"launch.ranks": 1}), "goes_on_once_preempted")
    run = launch(params.change(**SLURM), entry=ENTRY)
    whole = launch(params.change(**{"launch.name": "whole"}))

    at = steps_done(run)
    until(lambda: saving(run), seconds=600, words=lambda: told(run))
    run.drill()
    goes_on(run, cluster, 1)
    assert resumed(run)[0] == dict(kinds(run))["preempted"] >= at, "saved at the step boundary"

    steps_done(run)
    cluster.ask("scontrol", "requeue", run.job)
    goes_on(run, cluster, 2)

    at = steps_done(run, more=4)
    with loses(NODES[1], cluster):
        goes_on(timed, cluster, 1)
        assert timed.wait(600).ok and [kind for kind, _ in kinds(timed)] == BEFORE_ITS_TIME_IS_UP, told(timed)
        goes_on(run, cluster, 3)
        assert at - 4 <= resumed(run)[2], "nothing is lost beyond the last save"
        ends_like(run, whole, cluster)
    words = cluster.ask("scontrol", "show", "job", run.job).stdout
    told_of = [kind for kind, _ in kinds(run)].count("requeued")
    assert 3 <= told_of and f"Restarts={told_of} " in words, f"{told_of} are told, and Slurm knows of\n{words}"


@pytest.mark.extended
def test_a_training_that_its_time_limit_preempts_loses_nothing(cluster, tmp_path):
    params = tiny_run(tmp_path, **LONG | {"train.steps": 48})
    run = limited(params, "trains")
    whole = launch(params.change(**{"launch.name": "whole"}))
    ends_like(run, whole, cluster)
    assert [kind for kind, _ in kinds(run)][:3] == BEFORE_ITS_TIME_IS_UP
