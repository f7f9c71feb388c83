"""A run folder that somebody hands over is data, whatever each of its files holds, for every command that reads it."""

import json
import os
from pathlib import Path

import pytest

from mmfsdp.checkpoint.steps import write_marker
from mmfsdp.kit import cli
from mmfsdp.kit.run.files.folder import MetricsWriter, add_event, check_links, read_events, read_json, write_json
from mmfsdp.kit.run.files.run_record import RunRecord, RunState, Status, because
from mmfsdp.kit.run.handle import Run
from mmfsdp.kit.run.progress import part_of
from mmfsdp.kit.run.state import read_ranks, run_state, runs_table
from mmfsdp.kit.run.trouble import headline, troubles
from mmfsdp.kit.widgets.banner import banner, tracebacks
from mmfsdp.kit.widgets.compare import Comparison, comparison
from mmfsdp.kit.widgets.panel import RunPanel, parts_line, rank_grid
from mmfsdp.kit.widgets.report import report_html
from mmfsdp.params import RunParams
from tests.run.test_runs import GONE, record
from tests.watched import watch

SEQUENCES = "\x1b]52;c;ZXZpbA==\x07\x1b]0;title\x1b\\\x1b[31m\x9b2J\r\x08"
"""To the clipboard, to the window's title, and over what stands there."""
CONTROLS = "\x1b\x07\x9b\x08\r"
TAG = "<img src=x onerror=alert(1)>"
VALUES = (f"{SEQUENCES}{TAG}", 10**400, float("nan"), None, [TAG], {TAG: TAG})


@pytest.fixture
def folder(finished_run):
    """A run that has failed, with every file that a run writes."""
    logs = finished_run / "logs"
    logs.mkdir()
    record(**GONE).write(finished_run)
    failed = {"status": "FAILED", "reason": "rank 1: a cause", "rank": 1, "traceback": "Traceback", "job": "77"}
    write_json(finished_run / "status.json", failed | {"submitted": 1.0, "finished": 2.0})
    for rank in range(2):
        report = {"rank": rank, "host": "n1", "pid": 1, "start": 1.0, "time": 2.0, "state": "failed", "step": 1}
        write_json(logs / f"rank{rank}.json", report | {"error": "a cause", "traceback": "Traceback"})
        (logs / f"rank{rank}.beat").write_text("step 1 compute")
        (logs / f"77_{rank}_log.out").write_text(f"first {SEQUENCES}\n{TAG}\n")
    row = {"step": 21, "time": 1.0, "loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "samples_per_s": 1.0, "tokens_per_s": 1.0}
    row |= {"memory_bytes": 1, "wire_bytes": 1, "step_s": 0.1, "heldout_loss": 1.0, "rank_tokens_per_s": 1.0}
    row |= {"skipped_steps": 1, "skipped_in_a_row": 1}
    row |= {"reserved_bytes": 1, "mfu": 0.4, "hfu": 0.5, "mfu_6n": 0.6}
    row |= {"gpu_use": 0.9, "power_w": 650.0, "temperature_c": 60.0}
    MetricsWriter(finished_run).write(row)
    MetricsWriter(finished_run, 1).write(row)
    write_json(logs / "backbones.json", {"label": "vision encoder", "share": 0.5, "left_s": 7.0})
    add_event(finished_run, "failed", step=1, text="rank 1: a cause")
    (finished_run / "profile").mkdir()
    profile = {"host": "n1", "steps": 1, "seconds": 1.0, "communication_s": 0.1, "exposed_s": 0.1, "compute_s": 0.5}
    write_json(finished_run / "profile/rank0.json", profile | {"lanes": {"compute": [[0.0, 0.5]]}})
    return watch(finished_run)


def shown(folder: Path, *, report: bool = True) -> tuple[str, str]:
    """Return what a terminal shows of a run, and what a browser does; the report, which takes long, on request."""
    run, state = Run(folder), run_state(folder)
    ranks = read_ranks(folder, run.record.ranks if run.record else 2, state)
    text = f"{run} {state} {runs_table({'run': folder})} {read_events(folder)}{run.job}{run.result()}{run.logs()}"
    found = troubles(folder, state, ranks=ranks)
    text += headline(state, found) + "".join(map(str, found))
    html = rank_grid(ranks, found) + tracebacks(ranks, found) + banner(found)
    for status in (Status.PREPARING, Status.RUNNING):
        part = part_of(folder, RunState(status))
        text += part.words if part else ""
        html += parts_line(part)
    html += f'<progress value="{state.step}" max="{state.steps}">'
    return text, html + (report_html(folder) + comparison([folder]) if report else "")


def last_of(path: Path) -> dict:
    """Return the object of a file of JSON, or the last one of a file of rows."""
    return json.loads(path.read_text().splitlines()[-1] if path.suffix == ".jsonl" else path.read_text())


OF_STATE = ("run.json", "status.json", "logs/backbones.json", "logs/rank1.json", "metrics-rank1.jsonl")
OF_REPORT = ("result.json", "plan.json", "metrics.jsonl", "events.jsonl", "profile/rank0.json")
OF_REPORT += ("captions/watched.json", "captions/watched.jsonl")
FILES = (*OF_STATE, *OF_REPORT)


@pytest.mark.parametrize("name", FILES)
def test_no_value_of_any_field_reaches_a_terminal_or_a_page_as_it_is(folder, name):
    path = folder / name
    before, values = path.read_text(), last_of(path)
    for key in (*values, "losses", "new"):
        for value in VALUES:
            changed = json.dumps(values | {key: value})
            path.write_text(before + changed + "\n" if path.suffix == ".jsonl" else changed)
            text, html = shown(folder, report=name in OF_REPORT)
            assert not set(CONTROLS) & set(text + html) and TAG not in html, (key, value)


@pytest.mark.parametrize("name", [f"{SEQUENCES}{TAG}".replace("/", ""), "\udcff\udcfe"])
def test_the_name_of_a_folder_is_text_on_a_page(folder, name, capsys):
    """Also one that is not UTF-8."""
    named = folder.rename(folder.with_name(name))
    panel = RunPanel(named)
    panel.wait()
    compared = Comparison([named, named])
    html = report_html(named) + comparison([named, named], scripted=True) + panel.head.value + compared.table.value
    plain = "".join(button.description + button.tooltip for button in compared.open_buttons)  # no HTML in a button
    (html + plain).encode()
    assert not set(CONTROLS) & set(html + plain) and TAG not in html
    for words in (["report", str(named)], ["report", str(named), str(named)], ["status", str(named)]):
        assert cli.main(words) in (0, 1)
        assert not set(CONTROLS) & set(capsys.readouterr().out)


def test_names_in_a_plan_are_escaped(folder):
    plan = (folder / "plan.json").read_text()
    (folder / "plan.json").write_text(plan.replace('"tower', json.dumps(SEQUENCES + TAG)[:-1]))
    text, html = shown(folder)
    assert "&lt;img src=x onerror=alert(1)&gt;" in html and TAG not in html and not set(CONTROLS) & set(text + html)


@pytest.mark.parametrize("name", FILES)
def test_what_is_nested_too_deep_is_damaged(folder, name):
    (folder / name).write_text('{"a": ' + "[" * 100_000)
    shown(folder)


def test_commands_print_no_control_sequence_and_no_traceback(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "10000")
    text = f"{SEQUENCES}{TAG}"
    for name in ("status.json", "logs/rank1.json", "result.json"):
        values = read_json(folder / name)
        texts = {key for key, value in values.items() if isinstance(value, str)} - {"status", "job"}
        write_json(folder / name, values | dict.fromkeys(texts, text))
    add_event(folder, "preempted", step=1, text=text)
    sweep = folder.parent / "sweep"
    sweep.mkdir()
    write_json(sweep / "sweep.json", {"members": [{text: text}, text, 1], "at_once": text, "entry": text})
    (folder / "params.yaml").write_text(json.dumps({"train": {text: text}}))
    words = [["runs", str(folder.parent)], ["sweep", str(sweep)], ["cancel", str(sweep)]]
    words += [
        [command, str(folder)] for command in ("watch", "status", "cancel", "drill", "resume", "caption", "report")
    ]
    words += [["export", str(folder), str(folder / "out")]]
    for line in words:
        assert cli.main(line) in (0, 1, 2)
        said = capsys.readouterr()
        assert not set(CONTROLS) & set(said.out + said.err), line
        assert "Traceback (most" not in said.err, line


@pytest.mark.parametrize("name", ["params.yaml", "run.json", "status.json"])
def test_no_command_waits_for_a_pipe(folder, capsys, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    for command in ("runs", "watch", "status", "cancel", "drill", "resume", "report"):
        assert cli.main([command, str(folder)]) in (0, 1, 2)


def test_a_reason_of_megabytes_is_cut_before_it_is_searched(folder):
    """A pattern such as `never entered .* instead` would take hours for it."""
    words = "never entered rank 0: it hangs " * 100_000
    for name, key in (("status.json", "reason"), ("logs/rank1.json", "error"), ("logs/rank1.json", "traceback")):
        write_json(folder / name, read_json(folder / name) | {key: words})
    text, _ = shown(folder, report=False)
    assert len(text) < 1_000_000


def test_texts_that_need_no_file_are_clean_where_they_are_printed():
    assert "\x1b" not in str(because(Status.FAILED, f"a cause {SEQUENCES}"))


def test_nothing_is_written_through_a_link(folder, tmp_path, capsys):
    """Links lead to files of whoever cancels or resumes the run."""
    mine, my_folder = tmp_path / "mine", tmp_path / "my folder"
    mine.write_text("precious")
    my_folder.mkdir()
    (my_folder / "rank0.json").write_text("precious")
    (my_folder / "1_submitted.pkl").write_text("precious")
    sweep = folder.parent / "sweep"
    sweep.mkdir()
    write_json(sweep / "sweep.json", {"members": [{}], "at_once": 1, "entry": "x"})
    record(host="elsewhere").write(folder)
    write_json(folder / "status.json", {"status": "STARTING"})
    for rank in range(2):
        write_json(folder / f"logs/rank{rank}.json", {"state": "running"})
    for name in ("cancel", "events.jsonl", "metrics.jsonl", "../sweep/cancel", "../sweep/.queue.lock"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(mine)
    assert cli.main(["cancel", str(folder)]) == 2
    assert "a link stands where a file of the run belongs; remove it" in capsys.readouterr().err
    assert cli.main(["cancel", str(sweep)]) == 2
    (sweep / "cancel").unlink()
    assert cli.main(["cancel", str(sweep)]) == 2
    cli.main(["drill", str(folder)])
    with pytest.raises(OSError):
        MetricsWriter(folder)
    RunRecord(**vars(record(**GONE)) | {"steps": 99}).write(folder)
    write_json(folder / "status.json", {"status": "FAILED"})
    RunParams().to_yaml(folder / "params.yaml")
    for name in ("captions", "logs"):
        (folder / name).rename(folder / f"{name}-")
        (folder / name).symlink_to(my_folder)
        assert cli.main(["resume", str(folder), "--trust"]) == 2
        assert f"{folder / name} is a link; remove it" in capsys.readouterr().err
    assert mine.read_text() == "precious" and os.listdir(my_folder) == ["rank0.json", "1_submitted.pkl"]
    assert {path.read_text() for path in my_folder.iterdir()} == {"precious"}


@pytest.fixture
def my_run(tmp_path):
    """Checkpoints of another run, of whoever is given the folder."""
    checkpoints = tmp_path / "mine/checkpoints"
    for step in (10, 20, 30):
        (checkpoints / f"step_{step:08d}").mkdir(parents=True)
        write_marker(checkpoints / f"step_{step:08d}", {"step": step})
    return checkpoints.parent


LINKS = (
    "checkpoints",
    "checkpoints/step_00000020",
    "checkpoints/.best.json.writing",
    "tracked.lock",
    "wandb",
)
DOORS = (["resume", "--step", "10", "--trust"], ["track", "--to", "tensorboard"], ["export"])


@pytest.mark.parametrize("name", LINKS)
def test_a_link_out_of_the_folder_is_refused_by_all_that_work_in_it(folder, my_run, capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "10000")
    RunParams().to_yaml(folder / "params.yaml")
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(my_run / "checkpoints", target_is_directory=True)
    before = sorted(my_run.rglob("*"))
    for command, *options in DOORS:
        more = [str(folder.parent / "exported")] if command == "export" else []
        assert cli.main([command, str(folder), *more, *options]) == 2
        words = f"{path} is a link; remove it, or put what it leads to, {my_run}/checkpoints, in its place"
        assert words in capsys.readouterr().err
    assert sorted(my_run.rglob("*")) == before and not (folder.parent / "exported").exists()


def test_a_run_below_a_link_and_links_inside_of_it_are_no_links_out_of_it(folder, tmp_path, monkeypatch):
    """A home is often a link, and W&B links to its newest run and its log."""
    (tmp_path / "home").symlink_to(folder.parent)
    (folder / "wandb/offline-run-1").mkdir(parents=True)
    (folder / "wandb/latest-run").symlink_to("offline-run-1")
    (folder / "wandb/offline-run-1/debug-core.log").symlink_to(tmp_path / "home")
    (folder / "best.json").symlink_to("checkpoints/best.json")
    check_links(folder)
    check_links(tmp_path / "home" / folder.name)
    monkeypatch.chdir(tmp_path / "home")
    check_links(folder.name)
    check_links(".")


def test_a_member_of_a_sweep_that_is_a_link_is_not_cancelled(tmp_path):
    """It may lead to another run of whoever cancels the sweep."""
    other, sweep = tmp_path / "other", tmp_path / "sweep"
    (other / "logs").mkdir(parents=True)
    record(host="elsewhere").write(other)
    write_json(other / "status.json", {"status": "STARTING"})
    sweep.mkdir()
    write_json(sweep / "sweep.json", {"members": [{}], "at_once": 1, "entry": "x"})
    (sweep / "000").symlink_to(other)
    assert cli.main(["cancel", str(sweep)]) == 0
    assert not (other / "cancel").exists()
