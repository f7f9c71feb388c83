"""Preemption on a laptop: real ranks save and start again, and the run ends as an unbroken one, to the last bit."""

import subprocess
import sys

import pytest

from mmfsdp import ParamError, Run, launch
from mmfsdp.kit.run.files.folder import add_event, read_events
from mmfsdp.kit.run.files.history import BEAT, RANK
from mmfsdp.kit.run.replay.recorder import recording_of
from mmfsdp.kit.run.replay.recording import AGAIN
from tests.tiny_run import tiny_run
from tests.train.test_resume import curve, final, rows
from tests.waiting import until

RESULT = ("frozen_parameters_changed", "wire_bytes_predicted", "wire_bytes_measured", "wire_measured")


def kinds(run: Run) -> list[tuple[str, int]]:
    return [(event["kind"], event["step"]) for event in run.events() if event["kind"] != "saved"]


@pytest.mark.real
def test_drills_leave_no_trace_but_the_events(tmp_path):
    params = tiny_run(tmp_path, **{"train.steps": 40, "train.save_every": 30, "train.keep_last": 2})
    whole = launch(params.change(**{"launch.name": "whole"}))
    assert whole.wait(600).ok
    run = launch(params)
    for _ in range(2):
        before = len(kinds(run))
        until(lambda before=before: len(run.metrics()) >= before // 4 * 5 + 2, seconds=600)
        run.drill()
        until(lambda before=before: len(kinds(run)) >= before + 4 or run.state().done, seconds=600)
    state = run.wait(600)
    assert state.ok and state.step == 40, state
    told = kinds(run)
    assert [kind for kind, _ in told] == 2 * ["drill", "preempted", "requeued", "resumed"]
    steps = [step for kind, step in told if kind != "drill"]
    assert steps[0] == steps[1] == steps[2] < steps[3] == steps[4] == steps[5] < 40, "and each life has done steps"
    assert curve(run.path) == curve(whole.path) and final(run.path) == final(whole.path)
    for rank in range(2):
        assert [row["step"] for row in rows(run.path, rank)] == list(range(1, 41)), "no step twice"
    assert {key: run.result()[key] for key in RESULT} == {key: whole.result()[key] for key in RESULT}
    assert run.result()["wire_bytes_predicted"] == run.result()["wire_bytes_measured"]
    assert f"preempted at step {steps[0]}, which is saved" in run.logs(0)
    moments = recording_of(run.path).moments
    assert sum(moment.kind == AGAIN for moment in moments) == 2
    for rank in range(2):
        stages = [moment.value.split()[0] for moment in moments if moment.kind == BEAT and moment.rank == rank]
        reports = [moment.value["state"] for moment in moments if moment.kind == RANK and moment.rank == rank]
        assert stages.count("importing") == stages.count("planning") == stages.count("step") == 3, stages
        assert reports == [*2 * ["running", "preempted"], "running", "done"]
    with pytest.raises(ParamError, match="is COMPLETED.*a drill needs a run whose ranks are all running"):
        run.drill()


@pytest.mark.real
def test_signals_to_all_processes_of_a_run_with_data_workers_leave_no_trace(tmp_path):
    params = tiny_run(tmp_path, **{"train.steps": 12, "train.save_every": 2, "train.eval_every": 2})
    whole = launch(params.change(**{"launch.name": "whole"}))
    assert whole.wait(1200).ok
    run = launch(params.change(**{"launch.name": "local", "data.workers": 1}), entry="tests.launch_entries:signalled")
    state = run.wait(1200)
    assert state.ok and state.step == 12, f"{state}\n{run.logs(0)}"
    assert [kind for kind, _ in kinds(run)] == 2 * ["preempted", "requeued", "resumed"]
    assert curve(run.path) == curve(whole.path) and final(run.path) == final(whole.path)


LISTENER = """
import os, signal, subprocess, sys
from mmfsdp.kit.run.preempt import PREEMPT_SIGNAL, listen_for_preemption, preemption_requested
listen_for_preemption(sigterm=True)
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"], stdout=-1)
child.stdout.readline()
assert not preemption_requested()
os.kill(child.pid, PREEMPT_SIGNAL)
os.kill(os.getpid(), PREEMPT_SIGNAL)
assert preemption_requested() and preemption_requested(PREEMPT_SIGNAL) and not preemption_requested(signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
assert preemption_requested(signal.SIGTERM) and child.poll() is None
child.kill()
"""


@pytest.mark.real
def test_a_notice_is_remembered_and_kills_neither_rank_nor_data_worker():
    subprocess.run([sys.executable, "-c", LISTENER], check=True, timeout=600)


def test_events_of_many_writers_are_whole_lines(tmp_path):
    assert read_events(tmp_path) == []
    add_event(tmp_path, "saved", step=3, text="first")
    with open(tmp_path / "events.jsonl", "ab") as file:
        file.write(b'[]\n{"kind": "unknown", "step": 1}\n{"half')
    assert [event["text"] for event in read_events(tmp_path)] == ["first"]
