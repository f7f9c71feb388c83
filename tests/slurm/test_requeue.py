"""Preemption, time limit, node failure and requeue on a real Slurm: nothing is lost beyond the last save, and the run
ends as the unbroken one does, to the last bit."""

import time
from contextlib import contextmanager

import pytest

from mmfsdp import Run, launch
from tests.run.test_preempt import kinds
from tests.slurm.cluster import NODES, SPARE
from tests.tiny_run import tiny_run
from tests.train.test_resume import curve, final, rows
from tests.waiting import until

pytestmark = pytest.mark.real

SLURM = {"launch.executor": "slurm", "launch.nodes": 2, "launch.timeout_min": 30}
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
    changes = {"train.steps": 12, "train.save_every": 2, "train.eval_every": 2, "data.workers": 2}
    params = tiny_run(tmp_path, **changes)
    whole = launch(params.change(**{"launch.name": "whole"}))
    one_node = SLURM | {"launch.nodes": 1, "launch.name": "job"}
    run = launch(params.change(**one_node), entry="tests.launch_entries:signalled")
    until(lambda: run.state().done, seconds=600, words=lambda: told(run))  # by SIGTERM, and Slurm does not requeue it
    run.resume()
    goes_on(run, cluster, 2)
    ends_like(run, whole, cluster)
    assert [kind for kind, _ in kinds(run)].count("preempted") == 2


def test_every_way_to_be_requeued_loses_nothing(cluster, tmp_path):
    params = tiny_run(tmp_path, **{"train.steps": 48, "train.save_every": 4, "train.keep_last": 2})
    limit = {"launch.nodes": 1, "launch.exclude": "127.0.0.2", "launch.timeout_min": 2}
    limited = launch(params.change(**SLURM | limit | {"launch.name": "limited"}), entry=ENTRY)
    run = launch(params.change(**SLURM), entry=ENTRY)
    whole = launch(params.change(**{"launch.name": "whole"}))

    at = steps_done(run)
    run.drill()
    goes_on(run, cluster, 1)
    assert resumed(run)[0] >= at, "saved at the step boundary"

    until(lambda: saving(run), seconds=600, words=lambda: told(run))
    cluster.ask("scancel", "--signal=USR2", run.job)
    goes_on(run, cluster, 2)

    steps_done(run)
    cluster.ask("scontrol", "requeue", run.job)
    goes_on(run, cluster, 3)

    at = steps_done(run)
    cluster.ask("scancel", "--signal=USR2", run.job)
    goes_on(run, cluster, 4)
    assert resumed(run)[3] >= at

    at = steps_done(run, more=4)
    with loses(NODES[1], cluster):
        ends_like(limited, whole, cluster)
        assert [kind for kind, _ in kinds(limited)][:3] == ["preempted", "requeued", "resumed"], "before its time is up"
        goes_on(run, cluster, 5)
        assert at - 4 <= resumed(run)[4], "nothing is lost beyond the last save"
        ends_like(run, whole, cluster)
    words = cluster.ask("scontrol", "show", "job", run.job).stdout
    told_of = [kind for kind, _ in kinds(run)].count("requeued")
    assert 5 <= told_of and f"Restarts={told_of} " in words, f"{told_of} are told, and Slurm knows of\n{words}"
