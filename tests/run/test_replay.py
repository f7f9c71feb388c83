"""A recorded run is played from its file or folder: each state in its order, at any speed, and without a process.

The player is moved by hand, so no test waits for a clock.
"""

import json
import os
import re
import shutil
import time

import pytest

import mmfsdp
from mmfsdp.kit import cli
from mmfsdp.kit.run.adopt import find_same
from mmfsdp.kit.run.files.folder import heartbeat_path, read_events, read_json, write_json
from mmfsdp.kit.run.files.history import BACKBONES, BEAT, RANK, STATE, events_path
from mmfsdp.kit.run.files.run_record import RunRecord, Status, status_values, write_status
from mmfsdp.kit.run.handle import Run
from mmfsdp.kit.run.kill_rank import kill_rank
from mmfsdp.kit.run.progress import part_of
from mmfsdp.kit.run.replay.anonymous_recording import record as make_recording
from mmfsdp.kit.run.replay.player import GONE_AFTER_S, Player
from mmfsdp.kit.run.replay.recorder import recording_of
from mmfsdp.kit.run.replay.recording import LOG, ROW, Recording, shipped
from mmfsdp.kit.run.replay.replay import load, params_for, play, prepare
from mmfsdp.kit.run.state import read_ranks, run_state, runs_table
from mmfsdp.kit.run.trouble import STALLED, troubles
from mmfsdp.kit.widgets.actions import Actions
from mmfsdp.kit.widgets.compare import comparison
from mmfsdp.kit.widgets.form import RunForm
from mmfsdp.kit.widgets.launch_buttons import LAUNCH, STOP, LaunchButtons
from mmfsdp.kit.widgets.panel import RunPanel
from mmfsdp.kit.widgets.report import report_html
from mmfsdp.kit.widgets.starter import Starter
from mmfsdp.params import ParamError, RunParams
from tests.run.test_hostile_folder import CONTROLS, FILES, SEQUENCES, TAG, VALUES, folder, last_of
from tests.run.test_runs import GONE, record

__all__ = ["folder"]  # a fixture of test_hostile_folder: a run with every file that a run writes

LAUNCHED = 1_000_000.0
"""When the recorded runs of this file were launched, in unix seconds."""
RECORDINGS = shipped()
MAX_BYTES = 300_000
ENDS = {"preemption": Status.COMPLETED, "hang": Status.FAILED, "out_of_memory": Status.FAILED}


@pytest.fixture
def prepared(tmp_path):
    """Prepare the replay of a recording; returns the recording, its player and the run."""

    def go(source, name="replay") -> tuple[Recording, Player, Run]:
        recording = load(source)
        folder = prepare(recording, params_for(recording, source, tmp_path / name))
        return recording, Player(folder, recording), Run(folder)

    return go


def moments_of_states(recording: Recording) -> list[float]:
    """When it has another state: a run that is STARTING is RUNNING with its first row."""
    return [moment.at for moment in recording.moments if moment.kind in (STATE, ROW)]


def states_seen(recording: Recording, player: Player, run: Run, *, strides: int = 40) -> list[str]:
    """Play it in so many strides, and return the words of the states on the way, each once."""
    times = {recording.seconds * number / strides for number in range(strides + 1)}
    words: list[str] = []
    for at in sorted(times | set(moments_of_states(recording))):
        player.advance(at)
        state = run.state()
        told = f"{state.status} {state.reason}".strip()
        if words[-1:] != [told]:
            words.append(told)
    return words


# ---- the recordings that the package brings ----


def test_the_package_brings_a_preemption_a_hang_and_a_run_out_of_memory():
    assert set(RECORDINGS) == set(ENDS)


@pytest.mark.parametrize("name", sorted(RECORDINGS))
def test_a_recording_of_ours_is_small_neutral_and_says_what_it_was_made_on(name):
    text = RECORDINGS[name].read_text()
    assert len(text.encode()) < MAX_BYTES
    recording = Recording.read(RECORDINGS[name])
    assert "CPU" in recording.about and "gloo" in recording.about and len(recording.about) > 30
    hosts = {m.value["host"] for m in recording.moments if m.kind == "rank" and "host" in m.value}
    assert hosts <= {"node1", "node2"}
    assert not re.search(r"/home/|/root/|/work/|/tmp/|@", text), "a place or a person of the machine that made it"


@pytest.mark.parametrize("name", sorted(RECORDINGS))
def test_a_recording_of_ours_ends_as_its_run_did(name, prepared):
    recording, player, run = prepared(RECORDINGS[name])
    words = states_seen(recording, player, run)
    statuses = [line.split()[0] for line in words]
    assert statuses[0] == "QUEUED" and "STARTING" in statuses and statuses[-1] == ENDS[name], words
    assert run.state().done and player.ended


def test_a_preempted_job_waits_and_goes_on(prepared):
    recording, player, run = prepared(RECORDINGS["preemption"])
    words = [re.sub(r"job \d+", "job N", line) for line in states_seen(recording, player, run)]
    assert words == [
        "QUEUED being submitted",
        "QUEUED job N was submitted",
        "STARTING job N",
        "RUNNING job N",
        "QUEUED job N: preempted; requeued",
        "RUNNING job N",
        "COMPLETED",
    ], words
    kinds = [event["kind"] for event in run.events() if event["kind"] != "saved"]
    assert kinds == ["preempted", "requeued", "resumed"]
    assert [row["step"] for row in run.metrics(3)] == list(range(1, run.state().steps + 1))


def test_a_rank_that_hangs_stands_out_before_the_run_is_stopped(prepared):
    recording, player, run = prepared(RECORDINGS["hang"])
    last_beat = max(moment.at for moment in recording.moments if moment.kind == BEAT)
    player.advance((last_beat + recording.seconds) / 2)
    state = run.state()
    found = troubles(run.path, state)
    assert state.status is Status.RUNNING and [trouble.code for trouble in found] == [STALLED]
    waited_s = min(rank.age_s for rank in read_ranks(run.path, 2, state))
    assert waited_s == pytest.approx((recording.seconds - last_beat) / 2, abs=1.0), "in seconds of the recording"
    player.advance(recording.seconds)
    assert "never entered the all-reduce" in run.state().reason and run.state().rank == found[0].rank
    assert "most recent call" in run.logs(run.state().rank)


def test_a_run_out_of_memory_tells_what_to_do(prepared):
    recording, player, run = prepared(RECORDINGS["out_of_memory"])
    player.advance(recording.seconds)
    (trouble,) = troubles(run.path, run.state())
    assert "allocate memory" in trouble.message and "lower train.batch_size" in trouble.fix


# ---- a run folder ----


def happened(folder, at: float, kind: str, value, *, rank: int = 0) -> None:
    """Append a moment of a run, so many seconds after its launch."""
    with events_path(folder, rank).open("a") as file:
        file.write(json.dumps({"time": LAUNCHED + at, "kind": kind, "value": value}) + "\n")


@pytest.fixture
def local_run(tmp_path):
    """A run of two local ranks that have done four steps; rank 1 then failed. Their backbones were pretrained first."""
    folder = tmp_path / "recorded"
    (folder / "logs").mkdir(parents=True)
    values = vars(record(**GONE)) | {"created": LAUNCHED, "ranks": 2, "steps": 9, "pretrains": True, "entry": "x:y"}
    RunRecord(**values).write(folder)
    RunParams().to_yaml(folder / "params.yaml")
    happened(folder, 1, STATE, {"status": "PREPARING"})
    for share in (0.1, 0.5, 0.9):
        happened(folder, 1 + 28 * share, BACKBONES, {"label": "vision encoder", "share": share})
    happened(folder, 29, STATE, {"status": "STARTING"})
    for rank in range(2):
        rows = [{"step": step, "time": LAUNCHED + 50 + step, "loss": 1 / step, "data_s": 0.2} for step in range(1, 5)]
        name = f"metrics-rank{rank}.jsonl" if rank else "metrics.jsonl"
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        process = {"rank": rank, "host": "n1.lab", "pid": os.getpid(), "start": LAUNCHED + 30}
        report = process | {"time": LAUNCHED + 31, "state": "running"}
        happened(folder, 31, RANK, report, rank=rank)
        for at, activity in ((32, "importing"), (45, "planning"), (50, "step 1 data")):
            happened(folder, at, BEAT, activity, rank=rank)
        if rank == 1:
            report |= {"time": LAUNCHED + 56, "state": "failed", "error": "ValueError: bad", "traceback": "Tr"}
            happened(folder, 56, RANK, report, rank=rank)
        write_json(folder / f"logs/rank{rank}.json", report)
        (folder / f"logs/rank{rank}.beat").write_text(f"{'step 5 compute':<120} {LAUNCHED + 54.5}\n")
        log = "before\n" + "".join(f"step {step}/9  loss\n" for step in range(1, 5)) + "after\n"
        (folder / f"logs/1_{rank}_log.out").write_text(log)
    ended = {"status": "FAILED", "reason": "rank 1: ValueError: bad", "rank": 1, "traceback": "Tr"}
    happened(folder, 60, STATE, ended)
    write_json(folder / "status.json", ended | {"job": "77", "finished": LAUNCHED + 60})
    return folder


def test_a_run_folder_plays_by_the_times_in_its_files(local_run, prepared):
    recording, player, run = prepared(local_run)
    assert recording.seconds == 60
    player.advance(15)
    state = run.state()
    assert state.status is Status.PREPARING and part_of(run.path, state).share == pytest.approx(0.5)
    player.advance(30)
    assert run.state().status is Status.STARTING
    player.advance(52.5)
    assert (run.state().status, run.state().step) == (Status.RUNNING, 2)
    assert run.logs(0) == "before\nstep 1/9  loss\nstep 2/9  loss\n", "lines are tied to their step"
    assert [rank.activity for rank in read_ranks(run.path, 2, run.state())] == ["step 3 compute"] * 2
    player.advance(57)
    assert [rank.status for rank in read_ranks(run.path, 2, run.state())] == ["running", "failed"]
    player.advance(60)
    assert run.state().status is Status.FAILED and run.state().rank == 1 and run.logs(0).endswith("after\n")
    assert [row["time"] - LAUNCHED for row in run.metrics()] == [51, 52, 53, 54], "times are those of the recording"


def test_each_speed_gives_the_same_states_in_the_same_order(local_run, prepared):
    told = []
    for number, strides in enumerate((1, 7, 300)):
        told.append(states_seen(*prepared(local_run, f"replay{number}"), strides=strides))
    assert told[0] == told[1] == told[2]
    assert [line.split()[0] for line in told[0]] == ["QUEUED", "PREPARING", "STARTING", "RUNNING", "FAILED"]


def test_a_replay_plays_itself_to_the_end_and_its_file_gives_the_same(local_run, prepared, tmp_path):
    recording, player, run = prepared(local_run)
    player.play(1e6)
    assert run.state().status is Status.FAILED and player.ended
    recording.write(tmp_path / "again.jsonl")
    again, player, played = prepared(tmp_path / "again.jsonl", "again")
    assert again.moments == [moment._replace(at=round(moment.at, 3)) for moment in recording.moments]
    player.play(1e6)
    assert played.logs(0) == run.logs(0) and played.metrics(1) == run.metrics(1) and played.state() == run.state()


# ---- it is a replay everywhere, and only that ----


def test_a_replay_says_so_wherever_its_state_is_shown(prepared, capsys):
    recording, player, run = prepared(RECORDINGS["hang"])
    words = f"replay of a recording: {recording.about}"
    player.advance(recording.seconds)
    panel = RunPanel(run.path)
    panel.wait()
    assert words in str(run.state()) and words in repr(run) and words in panel.head.value
    assert words in report_html(run.path) and words in comparison([run.path])
    for command in ("status", "watch"):
        cli.main([command, str(run.path)])
        assert words in capsys.readouterr().out
    assert words in " ".join(runs_table({"r": run.path}).split())


def test_nothing_can_be_trained_from_a_replay(prepared, monkeypatch, capsys):
    recording, player, run = prepared(RECORDINGS["preemption"])
    player.advance(recording.seconds / 2)
    for act in (run.resume, run.drill, lambda: kill_rank(run.path, 1)):
        with pytest.raises(ParamError, match="is a replay of a recording"):
            act()
    words = [["resume", "--trust"], ["resume"], ["caption"], ["track", "--to", "tensorboard"], ["drill"]]
    for command, *flags in words:
        assert cli.main([command, str(run.path), *flags]) == 2
    assert cli.main(["export", str(run.path), str(run.path.parent / "out")]) == 2
    assert cli.main(["record", str(run.path), str(run.path.parent / "out.jsonl"), "--about", "x"]) == 2
    assert capsys.readouterr().err.count("is a replay of a recording") == 7
    with pytest.raises(ParamError, match="is a replay"):
        recording_of(run.path)


def test_a_launch_of_the_same_choices_does_not_take_a_replay_for_its_run(prepared):
    _, _, run = prepared(RECORDINGS["preemption"], "tiny")
    match = find_same(run.params)
    assert match.run is None and match.params.launch.name == "tiny-2" and "is a replay of a recording" in match.words


def test_a_replay_names_no_process_and_no_job(local_run, prepared):
    """Its folder must not let anybody stop a process, or cancel a job, of whoever plays it."""
    recording, player, run = prepared(local_run)
    player.advance(57)
    assert run.job is None and "job" not in status_values(run.path)
    assert {read_json(run.path / f"logs/rank{rank}.json")["pid"] for rank in range(2)} == {0}
    assert run.record.host == "recording" and not run.record.digest


def test_cancel_ends_the_player(prepared):
    recording, player, run = prepared(RECORDINGS["hang"])
    player.advance(recording.seconds / 2)
    (run.path / "cancel").touch()
    assert str(run.state()).startswith("RUNNING") and "being cancelled" in run.state().reason
    player.play(1e-6)
    assert run.state().status is Status.CANCELLED and run.cancel() == run.state()


def test_a_replay_without_its_player_is_over(prepared):
    recording, player, run = prepared(RECORDINGS["hang"])
    player.advance(recording.seconds / 2)
    write_status(run.path, player.state, alive=time.time() - 2 * GONE_AFTER_S)
    for alive in (float("nan"), float("inf"), -1e300):
        write_status(run.path, player.state, alive=alive)
        assert run.state().status is Status.LOST
    (run.path / "logs/player.log").write_text("MemoryError\n")
    assert run.state().status is Status.LOST and run.state().replay_of and "(MemoryError)" in run.state().reason
    (run.path / "cancel").touch()
    assert run.cancel().status is Status.CANCELLED


def test_a_player_that_fails_says_why(prepared, tmp_path):
    recording, player, run = prepared(RECORDINGS["hang"])
    with pytest.raises(ParamError):
        play(run.path, 1e6, tmp_path / "removed.jsonl")
    state = run.state()
    assert state.status is Status.LOST and "its player has failed" in state.reason and "does not exist" in state.reason


def test_the_cockpit_offers_a_launch_and_no_resume_for_a_replay(prepared):
    recording, player, run = prepared(RECORDINGS["hang"])
    form = RunForm("tiny")
    buttons = LaunchButtons(form, Starter(form, show=print), state=run.state)

    def offered() -> list[str]:
        buttons.update()
        return [name for name, button in buttons.buttons.items() if not button.disabled]

    assert offered() == [LAUNCH, STOP], "a replay trains nothing: a run of the same choices can be started beside it"
    player.advance(recording.seconds)
    assert offered() == [LAUNCH]
    actions = Actions(run)
    actions.update(run.state())
    assert actions.buttons["Preempt"].disabled


# ---- mistakes, and folders and files of others ----


def test_a_mistake_is_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "text.jsonl").write_text("no recording\n")
    header, *lines = RECORDINGS["hang"].read_text().splitlines()
    header = json.loads(header)
    header |= {"format": 2, "run": header["run"] | {"version": "9.9"}}
    (tmp_path / "newer.jsonl").write_text("\n".join([json.dumps(header), *lines]))
    os.mkfifo(tmp_path / "pipe")
    for recording, values, words in (
        ("preemtion", {}, "did you mean preemption"),
        ("hang", {"speed": 0}, "not a number above 0"),
        ("hang", {"speed": float("nan")}, "not a number above 0"),
        ("hang", {"to": "there"}, "to: 'there' exists already; name another folder, or remove this one"),
        ("hang", {"speed": 10**400}, "not a number above 0"),
        ("hang", {"to": "my run"}, "to: 'my run' cannot be a run folder: 'my run' is not allowed"),
        ("text.jsonl", {}, "is not a recording that this version"),
        ("hang", {"to": "text.jsonl/run"}, "to: .*text.jsonl' cannot hold runs"),
        ("newer.jsonl", {}, "has format 2, and this version of mmfsdp reads 1; .* that made it, 9.9"),
        ("~nobody/x.jsonl", {}, "does not exist"),
        ("pipe", {}, "is no file"),
        ("there", {}, "not the folder of a run"),
    ):
        with pytest.raises(ParamError, match=words):
            mmfsdp.replay(recording, **values)
    assert sorted(os.listdir(tmp_path)) == ["newer.jsonl", "pipe", "text.jsonl", "there"]


def test_a_recording_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("mmfsdp.kit.run.replay.recording.MAX_MOMENTS", 10)
    with pytest.raises(ParamError, match="is too large: at most 128 MiB and 10 lines"):
        Recording.read(RECORDINGS["hang"])


def test_a_replay_gets_a_name_that_a_run_can_have(local_run, tmp_path, monkeypatch):
    """Also where a link to nothing has the first one."""
    monkeypatch.chdir(tmp_path)
    folder = local_run.rename(tmp_path / "my run, v1.2")
    recording = load(folder)
    assert params_for(recording, folder, None).launch.name == "my-run-v1.2-replay"
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/my-run-v1.2-replay").symlink_to("nowhere")
    assert params_for(recording, folder, None).launch.name == "my-run-v1.2-replay-2"


def test_two_replays_that_start_at_once_get_a_folder_each(local_run, tmp_path, monkeypatch):
    """The second finds the name free, and taken a moment later."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mmfsdp.kit.run.replay.replay.start_detached", lambda *words, **options: None)
    lexists, looks = os.path.lexists, []

    def free_at_first(path) -> bool:
        looks.append(path)
        if len(looks) == 1:
            assert not lexists(path)
            prepare(load(local_run), params_for(load(local_run), local_run, path))
            return False
        return lexists(path)

    monkeypatch.setattr("mmfsdp.kit.run.replay.replay.os.path.lexists", free_at_first)
    assert mmfsdp.replay(local_run).name == "recorded-replay-2"


def test_a_run_that_goes_on_is_not_played(local_run, tmp_path):
    RunRecord(**vars(RunRecord.read(local_run)) | {"host": "elsewhere"}).write(local_run)
    write_json(local_run / "status.json", {"status": "RUNNING", "alive": time.time()})
    with pytest.raises(ParamError, match="play it once it has ended"):
        mmfsdp.replay(local_run, to=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_link_out_of_a_run_folder_is_not_followed(local_run, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("step 1 secret\n")
    for target in (secret, "2_0_log.out"):  # the second leads to itself
        (local_run / "logs/2_0_log.out").symlink_to(target)
        with pytest.raises(ParamError, match="a link out of the folder"):
            recording_of(local_run)
        (local_run / "logs/2_0_log.out").unlink()


PLAYED = {"logs", "run.json", "params.yaml", "plan.json", "status.json", "events.jsonl", "result.json"}
PLAYED |= {"metrics.jsonl", "metrics-rank1.jsonl"}
"""All that a player writes of a run of two ranks."""
HOSTILE = (SEQUENCES + TAG, "../../x", "\ud800", 10**400, 10**18, -1, True, float("nan"), None, [TAG], {TAG: TAG})


@pytest.mark.parametrize("place", ["moment", "value", "header", "run"])
def test_a_hostile_recording_is_data(local_run, prepared, tmp_path, place):
    """Whatever a file says: nothing is written outside of the folder, and no text reaches a page as it is."""
    recording_of(local_run).write(tmp_path / "good.jsonl")
    header, *lines = map(json.loads, (tmp_path / "good.jsonl").read_text().splitlines())
    rows = [header, *lines]
    for value in HOSTILE:
        if place == "moment":
            changed = [
                [value if index == part else item for index, item in enumerate(line)]
                for line in lines
                for part in range(4)
            ]
            rows = [header, *lines, *changed]
        elif place == "value":
            changed = [
                [*line[:3], line[3] | {key: value}] for line in lines if isinstance(line[3], dict) for key in line[3]
            ]
            rows = [header, *changed]
        elif place == "header":
            rows = [header | {"about": value, "created": value, "plan": value}, *lines]
        else:
            rows = [header | {"run": header["run"] | {"host": value, "pid": value, "digest": value}}, *lines]
        path = tmp_path / "bad.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        before = set(os.listdir(tmp_path))
        recording, player, run = prepared(path, "played")
        player.advance(recording.seconds)
        shown = f"{run.state()}{runs_table({'r': run.path})}{read_events(run.path)}{run.logs()}{run.logs(1)}"
        shown += "".join(map(str, troubles(run.path, run_state(run.path))))
        assert not set(CONTROLS) & set(shown)
        assert TAG not in report_html(run.path)
        assert set(os.listdir(tmp_path)) == before | {"played"}
        assert {path.name for path in run.path.iterdir()} <= PLAYED
        shutil.rmtree(run.path)


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_run_folder_is_data(folder, name, tmp_path):
    """Each value of each file: it plays, or is refused by name."""
    path = folder / name
    before, values = path.read_text(), last_of(path)
    for key in values:
        for value in VALUES:
            changed = json.dumps(values | {key: value})
            path.write_text(before + changed + "\n" if path.suffix == ".jsonl" else changed)
            try:
                recording = recording_of(folder)
            except ParamError as error:
                assert name == "run.json", error
                continue
            text = "".join(str(moment.value) for moment in recording.moments if moment.kind in (LOG, BEAT, STATE))
            assert not set(CONTROLS) & set(text) and all(0 <= m.at <= recording.seconds for m in recording.moments)
    path.unlink()
    os.mkfifo(path)
    if name != "run.json":
        recording_of(folder)  # and does not wait for somebody who writes


def test_parameters_that_are_none_are_refused(local_run, tmp_path):
    recording_of(local_run).write(tmp_path / "r.jsonl")
    header, *lines = (tmp_path / "r.jsonl").read_text().splitlines()
    header = json.loads(header) | {"params": {"train": {"steps": TAG}}}
    (tmp_path / "r.jsonl").write_text("\n".join([json.dumps(header), *lines]))
    with pytest.raises(ParamError, match="parameters that cannot be read"):
        mmfsdp.replay(tmp_path / "r.jsonl", to=tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- mmfsdp record ----


def test_a_recording_names_no_person_machine_or_place(local_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    text = "step 4/9  loss\n  File /home/ada/lab/src/x.py of ada on n1.lab (n1), 130.5.6.7 and 127.0.0.1, http://a.b/c/d/e\n"
    (local_run / "logs/1_0_log.out").write_text(text)
    assert cli.main(["record", str(local_run), str(tmp_path / "r.jsonl"), "--about", "2 ranks on a laptop"]) == 0
    made = (tmp_path / "r.jsonl").read_text()
    assert "File .../src/x.py of user on node1 (node1), 10.0.0.1 and 127.0.0.1, http://a.b/c/d/e" in made
    assert (
        not re.search(r"\bada\b|n1\.lab|/home", made)
        and Recording.read(tmp_path / "r.jsonl").about == "2 ranks on a laptop"
    )
    assert cli.main(["record", str(local_run), str(tmp_path / "r.jsonl"), "--about", "x"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_user_whose_name_no_database_has_can_record(local_run, tmp_path, monkeypatch):
    """As in a container that is run under another user's number."""

    def unknown(_):
        raise KeyError("uid not found")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    assert Recording.read(make_recording(local_run, tmp_path / "r.jsonl", about="x")).about == "x"


def test_a_long_run_makes_a_small_recording(local_run, tmp_path):
    rows = [{"step": step, "time": LAUNCHED + 50 + step / 2000, "loss": 1 / 3} for step in range(1, 5001)]
    (local_run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (local_run / "logs/1_0_log.out").write_text("".join(f"step {step} said\n" for step in range(1, 5001)))
    path = make_recording(local_run, tmp_path / "r.jsonl", about="x")
    recording = Recording.read(path)
    steps = [moment.value["step"] for moment in recording.moments if moment.kind == ROW and moment.rank == 0]
    assert path.stat().st_size < MAX_BYTES and steps[:3] == [1, 2, 3] and steps[-2:] == [4999, 5000]
    assert steps == sorted(steps) and any("lines not recorded" in str(m.value) for m in recording.moments)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_the_ranks_of_a_long_run_never_seem_to_hang(local_run, prepared, tmp_path, monkeypatch, is_recorded):
    """The recording leaves steps out, for hours of the run; the ranks went on meanwhile."""
    monkeypatch.setattr("mmfsdp.kit.run.replay.recorder.MAX_ROWS", 500)
    for rank in range(2):
        rows = [{"step": step, "time": LAUNCHED + 30 + step, "loss": 1.0, "step_s": 1.0} for step in range(1, 5001)]
        name = "metrics-rank1.jsonl" if rank else "metrics.jsonl"
        (local_run / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        (local_run / f"logs/rank{rank}.beat").write_text(f"{'step 5001 callback':<120} {LAUNCHED + 5030.0}\n")
        events_path(local_run, rank).unlink()
        happened(local_run, 29, STATE, {"status": "STARTING"})
        happened(local_run, 30, RANK, {"state": "running"}, rank=rank)
    write_json(local_run / "status.json", {"status": "CANCELLED", "finished": LAUNCHED + 6000})
    source = make_recording(local_run, tmp_path / "r.jsonl", about="x") if is_recorded else local_run
    recording, player, run = prepared(source)
    assert len(recording.moments) < 5000
    steps = []
    for at in range(100, 5000, 70):
        player.advance(at)
        ranks = read_ranks(run.path, 2, run.state())
        assert [rank.status for rank in ranks] == ["running"] * 2 and not troubles(run.path, run.state())
        steps.append(ranks[0].step)
    assert steps == sorted(steps) and all(
        abs(step - at) < 60 for step, at in zip(steps, range(70, 4970, 70), strict=True)
    )
    player.advance(5800)
    assert [trouble.code for trouble in troubles(run.path, run.state())] == [STALLED], "and one that hangs does"


def test_a_run_that_goes_on_is_not_recorded(local_run, tmp_path):
    RunRecord(**vars(RunRecord.read(local_run)) | {"host": "elsewhere"}).write(local_run)
    write_json(local_run / "status.json", {"status": "STARTING", "alive": time.time()})
    with pytest.raises(ParamError, match="record it once it has ended"):
        make_recording(local_run, tmp_path / "r.jsonl", about="x")


# ---- the process ----


@pytest.mark.real
def test_a_replay_by_name_plays_in_a_process_of_its_own(tmp_path, monkeypatch, capsys):
    """At such a speed that it is over when it begins; one that takes hours is cancelled."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["replay", "out_of_memory", "--speed", "100000"]) == 0
    assert "replay of a recording" in capsys.readouterr().out
    run = Run.open("runs/out_of_memory-replay")
    assert run.state().status is Status.FAILED and not heartbeat_path(run.path, 0).is_symlink()
    slow = mmfsdp.replay("hang", to="runs/slow", speed=1e-3)
    assert not slow.state().done and slow.cancel().status is Status.CANCELLED
