"""Trackers: what a run's metrics say is what TensorBoard and Weights & Biases have, also after a kill and a resume."""

import json
import math
import struct
import subprocess

import pytest
from filelock import FileLock
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from mmfsdp import ParamError, Run, launch
from mmfsdp.kit.cli import main
from mmfsdp.kit.run.files.folder import MetricsWriter, add_event, metrics_path, read_metrics, write_json, write_text
from mmfsdp.kit.run.start import make_folder
from mmfsdp.kit.run.state import SWEEP_FILE
from mmfsdp.kit.run.trackers import track
from mmfsdp.params import TrackerKind
from tests.run.test_runs import record
from tests.tiny_run import tiny_run
from tests.waiting import light, until

TRACKERS = ["tensorboard", "wandb"]


def in_tensorboard(folder) -> dict[str, dict[int, float]]:
    """Tag: step: value, as TensorBoard shows them."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found = {}
    for tag in events.Tags()["scalars"]:
        scalars = events.Scalars(tag)
        found[tag] = {event.step: event.value for event in scalars}
        assert len(found[tag]) == len(scalars), "each step once"
    return found


def wandb_records(path) -> list[Record]:
    """The records of a .wandb file: a log as LevelDB writes it, after 7 bytes of W&B's own."""
    data, records, position, partial = path.read_bytes(), [], 7, b""
    assert data.startswith(b":W&B")
    while position + 7 <= len(data):
        left = 32768 - position % 32768  # of a block
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        if left < 7 or kind == 0:
            position += left
            continue
        partial += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(Record.FromString(partial))
            partial = b""
    return records


def in_wandb(folder) -> tuple[dict[str, dict[int, float]], set[str]]:
    """Key: step: the newest value; and the ids of the runs."""
    found, ids = {}, set()
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for each in wandb_records(path):
            if each.HasField("run"):
                ids.add(each.run.run_id)
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in each.history.item}
            for key, value in row.items():
                found.setdefault(key, {})[row["train_step"]] = value
    return found, ids


def differences(found: dict[str, dict[int, float]], rows: list[dict]) -> list[str]:
    """Return what of the rows of metrics is missing, and what is there besides."""
    wrong = []
    for row in rows:
        for key, value in track.numbers(row).items():
            got = found.get(key, {}).get(row["step"], "nothing")
            if got != pytest.approx(value, rel=1e-6, nan_ok=True):
                wrong.append(f"{key} of step {row['step']}: {got}, not {value}")
    steps = {row["step"] for row in rows}
    return wrong + [f"{key} of steps {set(values) - steps}" for key, values in found.items() if set(values) - steps]


@pytest.mark.real
def test_a_run_that_is_killed_and_resumed_is_one_tracked_run(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    changes = {"train.trackers": TRACKERS, "train.save_every": 2, "train.steps": 5, "launch.ranks": 2}
    run = launch(tiny_run(tmp_path, **changes), entry="tests.fault_entries:is_killed_once")
    assert not run.wait(600).ok
    until(lambda: all((run.path / f"tracked-{kind}.json").exists() for kind in TRACKERS), words=lambda: log(run))
    until(lambda: not tracking(run), words=lambda: log(run))
    before = read_metrics(run.path)
    assert before and not differences(in_tensorboard(run.path), before), log(run)

    run.resume()
    assert run.wait(600).ok, run.state()
    until(lambda: not tracking(run), words=lambda: log(run))
    rows = read_metrics(run.path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    values, ids = in_wandb(run.path)
    for found in (in_tensorboard(run.path), values):
        assert {key for key in found if key.startswith("result/")} >= {
            "result/world_size",
            "result/wire_bytes_measured",
        }
        found = {
            key: value for key, value in found.items() if not key.startswith(("result/", "train_step", "time", "_"))
        }
        assert not differences(found, rows)
    assert len(ids) == 1, "W&B goes on with the same run"
    assert "params/text_summary" in texts(run.path)
    found_before = in_tensorboard(run.path)

    assert main(["track", str(run.path), "--to", "tensorboard"]) == 0
    assert in_tensorboard(run.path) == found_before, "nothing twice"


def test_rows_of_steps_that_are_done_again_replace_those_before(tmp_path):
    """In one process: steps 3 and 4 are logged, then the run goes on from step 2."""
    folder = make_folder(light(tmp_path).launch)
    write_text(folder / "params.yaml", light(tmp_path).to_yaml())
    write(folder, [1, 2, 3, 4], loss=1.0)
    tracked = track.Tracked(folder, TrackerKind.TENSORBOARD)
    tracked.poll()
    with metrics_path(folder).open("ab") as file:
        file.write(b'{"step": 5, "lo')  # a row that is being written
    tracked.poll()
    assert in_tensorboard(folder) == {"loss": {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}}
    add_event(folder, "resumed", step=2, text="")
    tracked.poll()  # the ranks have not cut the file yet
    MetricsWriter(folder, after=2).write({"step": 3, "time": 0.0, "loss": float("nan")})
    tracked.poll()
    tracked.close()
    again = track.Tracked(folder, TrackerKind.TENSORBOARD)
    write(folder, [4], loss=2.0)
    again.poll()
    again.close()
    found = in_tensorboard(folder)["loss"]
    assert math.isnan(found.pop(3)) and found == {1: 1.0, 2: 1.0, 4: 2.0}


def test_a_row_that_is_half_written_before_or_after_the_file_is_cut_is_neither_lost_nor_mixed(tmp_path):
    folder = make_folder(light(tmp_path).launch)
    write_text(folder / "params.yaml", light(tmp_path).to_yaml())
    tracked = track.Tracked(folder, TrackerKind.TENSORBOARD)
    path = metrics_path(folder)
    path.write_bytes(b'{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    tracked.poll()
    add_event(folder, "resumed", step=0, text="")
    write_text(path, '{"step": 1, "loss": 3.0}\n{"step": 2, "lo')  # a new file, as a resumed run makes it
    tracked.poll()
    with path.open("ab") as file:
        file.write(b'ss": 4.0}\n')
    tracked.poll()
    tracked.close()
    assert in_tensorboard(folder) == {"loss": {1: 3.0, 2: 4.0}}


def write(folder, steps, *, loss: float) -> None:
    for step in steps:
        MetricsWriter(folder).write({"step": step, "time": 1e9 + step, "loss": loss})


def test_what_somebody_else_wrote_into_the_state_is_ignored(tmp_path):
    folder = make_folder(light(tmp_path).launch)
    write_text(folder / "params.yaml", light(tmp_path).to_yaml())
    write_json(folder / "tracked-tensorboard.json", {"sent": "all", "state": [], "inode": None})
    write(folder, [1], loss=1.0)
    tracked = track.Tracked(folder, TrackerKind.TENSORBOARD)
    tracked.poll()
    tracked.close()
    assert in_tensorboard(folder) == {"loss": {1: 1.0}}
    (tmp_path / "elsewhere").mkdir()
    other = make_folder(light(tmp_path, **{"launch.name": "other"}).launch)
    write_text(other / "params.yaml", light(tmp_path).to_yaml())
    (other / "tensorboard").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="a link stands where a folder of the run belongs"):
        track.Tracked(other, TrackerKind.TENSORBOARD)


def test_a_missing_package_and_a_folder_without_a_run_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(TrackerKind, "package", "no_such_package")
    params = light(tmp_path, **{"train.trackers": ["wandb"]})
    with pytest.raises(ParamError, match=r"^train.trackers: wandb needs the package no_such_package.*mmfsdp\[wandb\]"):
        launch(params, entry="tests.launch_entries:talk")
    assert not list(tmp_path.iterdir())
    assert main(["track", str(tmp_path), "--to", "wandb"]) == 2
    assert "no_such_package" in capsys.readouterr().err
    assert main(["track", str(tmp_path)]) == 2
    assert "is neither a run nor a sweep" in capsys.readouterr().err


def test_a_sweep_is_tracked_by_one_process_until_its_members_are_done(tmp_path):
    params = light(tmp_path, **{"launch.name": "many"})
    parent = make_folder(params.launch)
    write_json(parent / SWEEP_FILE, {"members": [{}, {}]})
    for name in ("000", "001"):
        member = make_folder(light(parent, **{"launch.name": name}).launch)
        write_text(member / "params.yaml", params.to_yaml())
        record(steps=1).write(member)
        write_json(member / "status.json", {"status": "COMPLETED"})
        write(member, [1], loss=float(name))
    track.track(parent, [TrackerKind.TENSORBOARD])
    assert [in_tensorboard(parent / name) for name in ("000", "001")] == [{"loss": {1: 0.0}}, {"loss": {1: 1.0}}]
    with FileLock(parent / "tracked.lock"), pytest.raises(ParamError, match="is tracked by another process already"):
        track.track(parent, [TrackerKind.TENSORBOARD])


def texts(folder) -> list[str]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events.Tags()["tensors"]


def log(run: Run) -> str:
    path = run.path / "track.log"
    return path.read_text() if path.exists() else "no log"


def tracking(run: Run) -> bool:
    """Return whether a process tracks the run."""
    found = subprocess.run(["pgrep", "-f", f"mmfsdp.kit.run {run.path} track"], capture_output=True)
    return found.returncode == 0
