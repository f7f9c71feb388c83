"""How far a run is, from its folder alone: each start has a part that is shown, and none is taken for a hang."""

import time

import pytest

from mmfsdp import RunParams
from mmfsdp.kit.run.files import stages
from mmfsdp.kit.run.files.folder import MetricsWriter, heartbeat_path, read_heartbeat, write_json
from mmfsdp.kit.run.files.history import BACKBONES, BEAT, RANK, STATE, add_moment, read_moments, stage_seconds
from mmfsdp.kit.run.files.run_record import TRAIN, TRAIN_AND_CAPTION, RunState, Status, write_status
from mmfsdp.kit.run.files.stages import patience_s, progress_of, quiet_s
from mmfsdp.kit.run.pretraining import backbones_progress, pretrain_here, pretrains
from mmfsdp.kit.run.progress import part_of
from mmfsdp.kit.run.ranks.hang import Heartbeat
from mmfsdp.kit.run.state import run_state
from mmfsdp.kit.shapes import pretrain
from mmfsdp.kit.widgets.panel import parts_line
from mmfsdp.params import load
from tests.run.test_runs import record


@pytest.fixture
def folder(tmp_path):
    """The folder of a run of two ranks that goes on as long as this process does."""
    (tmp_path / "logs").mkdir()
    RunParams().to_yaml(tmp_path / "params.yaml")
    record(steps=8, entry=TRAIN_AND_CAPTION, pretrains=True).write(tmp_path)
    for rank in (0, 1):
        write_json(tmp_path / f"logs/rank{rank}.json", {"rank": rank, "state": "running", "time": time.time()})
    write_status(tmp_path, RunState(Status.STARTING))
    return tmp_path


def now(folder):
    return part_of(folder, run_state(folder))


ACTIVITIES = {
    "": "processes",
    "importing": "imports",
    "joining": "plan",
    "building": "plan",
    "opening the data": "plan",
    "planning": "plan",
    "wrapping: layers.0.weight": "weights",
    "taking up": "weights",
    "step 1 data": "first step",
    "step 1 compute": "first step",
}


@pytest.mark.parametrize("activity", ACTIVITIES)
def test_the_rank_that_is_furthest_behind_tells_the_part(folder, activity):
    Heartbeat(folder, 0)("step 1 save")
    if activity:
        Heartbeat(folder, 1)(activity)
    progress = now(folder)
    assert progress.part == ACTIVITIES[activity]
    assert activity.partition(": ")[2] in progress.words
    assert f"● {progress.part}</b>" in parts_line(progress) and "✓ backbones" in parts_line(progress)


def test_steps_and_captions_follow_the_first_step(folder):
    for rank in (0, 1):
        MetricsWriter(folder, rank).write({"step": 1, "time": time.time() + 1, "loss": 1.0})
        Heartbeat(folder, rank)("step 2 compute")
    assert now(folder).part == "steps" and "step 2 compute" in now(folder).words
    for rank in (0, 1):
        Heartbeat(folder, rank)("step 2 callback mine:Of.on_save")
    assert now(folder).words.startswith("step 2 callback, mine:Of.on_save")
    write_json(folder / "logs/rank1.json", {"rank": 1, "state": "done", "time": time.time()})
    Heartbeat(folder, 0)("captions: 50 of 200 texts")
    assert now(folder).part == "captions" and "50 of 200 texts" in now(folder).words
    write_status(folder, RunState(Status.COMPLETED))
    assert now(folder) is None and parts_line(None) == ""


def test_a_resumed_run_has_a_first_step_again(folder):
    for rank in (0, 1):
        MetricsWriter(folder, rank).write({"step": 5, "time": time.time() - 3600, "loss": 1.0, "step_s": 0.1})
        Heartbeat(folder, rank)("step 6 compute")
    assert now(folder).part == "first step"


def test_a_part_that_a_run_does_not_have_is_not_shown(folder):
    record(steps=8, entry=TRAIN).write(folder)
    assert not {"backbones", "captions"} & set(now(folder).parts)


def test_every_word_that_a_rank_reports_has_a_stage_in_order():
    known = ["importing", "starting", "joining", "building", "opening", "planning", "wrapping", "taking", "step"]
    assert list(stages.STAGES) == [*known, "trained", "captions"]
    order = [*ACTIVITIES, "step 1 save", "step 2 data", "trained: a", "captions: b"]
    places = [progress_of(activity) for activity in order]
    assert places == sorted(places)
    parts = [stage.part for stage in stages.STAGES.values()]
    assert parts == sorted(parts, key=stages.PARTS.index)


@pytest.mark.parametrize("activity", [*ACTIVITIES, "step 1 callback mine", "trained", "captions: b"])
def test_a_rank_is_called_quiet_before_it_is_taken_for_hung_and_never_soon(activity):
    silence_s = 60.0
    assert quiet_s(activity, silence_s, None) >= silence_s
    assert quiet_s(activity, silence_s, None) < patience_s(activity, silence_s)
    assert quiet_s("step 3 compute", silence_s, 0.1) == stages.QUIET_S


def test_a_heartbeat_that_is_opened_again_is_never_empty(tmp_path):
    Heartbeat(tmp_path, 0)("importing")
    again = Heartbeat(tmp_path, 0)
    assert read_heartbeat(tmp_path, 0)[0] == "importing"
    again("joining")
    assert read_heartbeat(tmp_path, 0)[0] == "joining"


def test_a_rank_appends_each_stage_that_it_enters_with_its_time(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("mmfsdp.kit.run.files.history.time.time", lambda: now)
    lives = [["importing", "opening the data", "step 1 data", "step 1 compute", "step 2 data"]]
    lives.append(["importing", "planning", "planning", "step 2 data", "trained"])
    for activities in lives:
        beat = Heartbeat(tmp_path, 1)
        for activity in activities:
            beat(activity)
            now += 2
        again = Heartbeat(tmp_path, 1)  # another part of the rank, in the same stage
        again(activity)
        add_moment(tmp_path, RANK, {"state": "preempted"}, rank=1)
        heartbeat_path(tmp_path, 1).unlink()  # as before ranks are started again
    moments = read_moments(tmp_path, 1)
    told = [moment.value for moment in moments if moment.kind == BEAT]
    assert told == ["importing", "opening the data", "step 1 data", "importing", "planning", "step 2 data", "trained"]
    words = [stages.stage_of(activity).words for activity in told[3:]]
    assert stage_seconds(moments) == list(zip(words, [2, 4, 2, 2], strict=True)), "of the last life"
    assert read_moments(tmp_path) == [], "a rank appends to a file of its own"
    folder = tmp_path
    write_status(folder, RunState(Status.STARTING))
    write_status(folder, RunState(Status.STARTING), alive=now)
    write_status(folder, RunState(Status.COMPLETED))
    states = [moment.value["status"] for moment in read_moments(folder) if moment.kind == STATE]
    assert states == ["STARTING", "COMPLETED"], "a state once"


def test_how_far_the_pretraining_is_stands_in_the_folder(folder, monkeypatch):
    def ensure(params, progress):
        for step in range(1, 4):
            monkeypatch.setattr("mmfsdp.kit.run.pretraining.time.monotonic", lambda step=step: 1000.0 + 2 * step)
            progress("vision encoder", step / 10)

    monkeypatch.setattr(pretrain, "ensure_backbones", ensure)
    write_status(folder, RunState(Status.PREPARING))
    assert now(folder).part == "backbones" and now(folder).share is None
    pretrain_here(folder)
    assert backbones_progress(folder) == ("vision encoder", 0.3, pytest.approx(14.0)), "2 s for each tenth"
    assert "pretraining the vision encoder" in now(folder).words and now(folder).share == 0.3
    shares = [moment.value["share"] for moment in read_moments(folder) if moment.kind == BACKBONES]
    assert shares == [0.1, 0.2, 0.3]
    assert "30%, 0:00:14 left" in parts_line(now(folder)) and 'value="0.300"' in parts_line(now(folder))


def test_only_a_training_with_generated_weights_that_are_missing_pretrains(tmp_path, monkeypatch):
    monkeypatch.setenv("MMFSDP_CACHE", str(tmp_path))
    tiny = load("tiny")
    assert not pretrains(tiny, TRAIN), "they ship with the package"
    larger = tiny.to_dict()
    larger["model"]["language"]["config"]["intermediate_size"] = 80
    larger = RunParams.from_dict(larger)
    assert pretrains(larger, TRAIN) and pretrains(larger, TRAIN_AND_CAPTION)
    assert not pretrains(larger, "tests.launch_entries:talk") and not pretrains(RunParams(), TRAIN)
