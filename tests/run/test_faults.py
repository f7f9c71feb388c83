"""What may happen to a rank, and what is known of it afterwards. Real trainings, real processes."""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from mmfsdp import ParamError, Run, launch
from mmfsdp.checkpoint.steps import complete_checkpoints
from mmfsdp.kit import cli
from mmfsdp.kit.run.files.folder import read_events, read_json
from mmfsdp.kit.run.files.reasons import ADVICE, MEMORY
from mmfsdp.kit.run.files.run_record import Status
from mmfsdp.kit.run.local import processes_of, stop_processes
from mmfsdp.kit.train.evaluate import caption_held_out
from mmfsdp.kit.widgets.report import write_report
from tests.tiny_run import tiny_run
from tests.waiting import until

pytestmark = pytest.mark.real

SILENCE = 10
"""Of the runs that hang. All others wait as long as any run does, so that a rank that is slow ends none of them."""


@dataclass(frozen=True)
class Fault:
    """What happens to a rank (as tests/fault_entries.py names it), and what is expected of the run, which fails."""

    entry: str
    reason: str
    """In the state's reason, in this order: its parts between ANY."""
    traceback: str = ""
    """In what is shown of the rank."""


ANY = "..."
KILLED = "died without a traceback: killed from outside, out of memory, or a crash"
FAULTS = {
    "raises": Fault("raises_1_step", "rank 1: RuntimeError: a bad day", traceback='RuntimeError("a bad day")'),
    "is killed in a save": Fault("killed_0_save", f"rank 0 {KILLED}"),
    "hangs at its start": Fault(
        "hangs_1_start", "in which rank 0 waits; it is in hangs (fault_entries.py, line ", "in hangs"
    ),
    "hangs": Fault(
        "hangs_1_step",
        "rank 1 never entered the all-reduce of token counts at the start of a step (collective ...), in which rank 0 "
        "waits; it is in hangs (fault_entries.py, line ...); no rank has reported for launch.silence_s, 10 s (rank 1: "
        "step 4 data)",
        "in hangs",
    ),
    "has no memory": Fault(
        "memoryless_1_step", f"rank 1: RuntimeError{ANY}; {ADVICE[MEMORY].words}", traceback="allocate memory"
    ),
    "is killed for lack of memory": Fault(
        "starved_1_step",
        "rank 1 died without a traceback: Linux has killed a process for lack of memory since the ranks started",
    ),
    "may write no more": Fault("barred_1_step", "rank 1 could not write: [Errno 27] File too large"),
}


@pytest.fixture
def start(tmp_path):
    """Launches the tiny run; whatever is left of it after the test is stopped."""
    started = []

    def go(entry: str, **changes) -> Run:
        silence = {"launch.silence_s": SILENCE} if ":hangs_" in entry else {}
        params = tiny_run(tmp_path, **{"train.save_every": None, **silence, **changes})
        started.append(launch(params, entry=entry))
        return started[-1]

    yield go
    for run in started:
        if run.record:
            stop_processes(run.record, run.path, grace_s=0)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_the_run_with_its_cause(start, name):
    fault = FAULTS[name]
    if fault.entry.startswith("starved") and not os.access("/sys/fs/cgroup", os.W_OK):
        pytest.skip("only root can give a process a limit of memory")
    run = start(f"tests.fault_entries:{fault.entry}")
    state = run.wait(600)
    reason = ".*".join(map(re.escape, fault.reason.split(ANY)))
    assert state.status is Status.FAILED and state.rank == int(fault.entry.split("_")[1]), state
    assert re.search(reason, state.reason, re.DOTALL), state
    assert fault.traceback in state.traceback
    until(lambda: not processes_of(run.record, run.path))  # the supervisor is the last to end
    for group in Path("/sys/fs/cgroup").glob("**/mmfsdp-*"):  # that the starved rank has made
        group.rmdir()


LAUNCHER = """
import sys
from mmfsdp import RunParams, launch
print(launch(RunParams.from_yaml(sys.argv[1])).wait(600))
"""


def test_a_full_shared_memory_is_told_as_such(tmp_path):
    """With a /dev/shm of its own, of 64 kB, that only this run sees."""
    changes = {"launch.silence_s": SILENCE, "data.workers": 1, "launch.ranks": 1, "train.save_every": None}
    tiny_run(tmp_path, **changes).to_yaml(tmp_path / "params.yaml")
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm; exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", LAUNCHER, tmp_path / "params.yaml"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert "rank 0 does not answer (in step 1 data): it hangs" in done.stdout
    assert "/dev/shm is full, the shared memory of data workers" in done.stdout and "disk" not in done.stdout


def test_a_run_whose_loss_is_not_finite_completes_and_is_not_ok(start, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # each process of the run prints what it imports
    changes = {"train.lr": 1e30, "train.warmup_steps": 0, "train.steps": 8, "train.eval_every": 4}
    run = start("train", **changes)
    state = run.wait(600)
    assert str(state) == "COMPLETED, 7 of 8 steps skipped: loss not finite since step 2" and not state.ok
    assert cli.main(["watch", str(run.path)]) == 1
    assert run.name + ": COMPLETED, step 8 of 8\n" in (printed := capsys.readouterr().out)
    page = write_report(run.path).read_text()
    for shown in (printed, page):  # once, with what to do
        assert shown.count(state.reason) == 1 and "What to do: lower train.lr" in shown
    assert "not finite now" in page and "held-out 0" not in page
    with pytest.raises(ParamError, match="all 8 of .* are done"):
        run.resume()
    of_all = (run.path / "logs" / "supervisor.log").read_text()  # of the process that the ranks are forks of
    for rank in range(2):
        names = re.findall(r"^import time: .*\| +([\w.]+)$", of_all + run.logs(rank), re.MULTILINE)
        packages = {name.partition(".")[0] for name in names if "." in name}
        assert packages >= {"open_clip", "transformers"} and not packages & {"wandb", "accelerate", "timm"}
        assert "the ranks plan again" not in run.logs(rank)
    # Of rank 1. Rank 0 predicts the peak of its largest batch at the end, since this launch has not looked at the data.
    assert "torch.utils.flop_counter" not in names and "triton" not in packages


def test_a_launched_run_is_resumed_in_its_folder(start):
    run = start("tests.fault_entries:is_killed_once", **{"train.save_every": 1, "train.steps": 5})
    assert f"rank 1 {KILLED}" in (state := run.wait(600)).reason and state.status is Status.FAILED
    broken = run.record
    with pytest.raises(ValueError, match=r"step: 9 has no complete checkpoint; those of .* are \[1, 2, 3\]"):
        run.resume(step=9)
    reports: list[str] = []
    captioned = caption_held_out(run.path, beat=reports.append)
    frozen = [name for name in reports if name.startswith("language_model.")]
    # Each frozen tensor before its checksum is taken, then each batch: of a large model, either takes minutes.
    assert frozen and reports.index("the data") > reports.index(frozen[-1]) and reports[-1].endswith(" texts")
    assert captioned["caption_step"] == 3 and captioned["captions"] and write_report(run.path).stat().st_size
    assert captioned["seconds"] < time.time() - broken.created
    damaged = run.path / "checkpoints/step_00000003/ranks/00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    state = run.resume().wait(600)
    assert state.status is Status.FAILED and "00001.safetensors is missing, truncated or altered" in state.reason
    assert "the one before is step_00000002: go on from it with `mmfsdp resume RUN --step 2`" in state.reason
    more = run.params.change(**{"train.steps": 6})
    again = run.resume(step=2, params=more)
    with pytest.raises(ParamError, match="cancel it before it is resumed"):
        run.resume()
    state = again.wait(600)
    assert state.ok and state.step == state.steps == 6, state
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4, 5, 6]
    assert [event["step"] for event in read_events(run.path) if event["kind"] == "resumed"] == [2]
    assert run.record.identity != broken.identity and read_json(run.path / "status.json")["status"] == "COMPLETED"
    assert [path.name[-8:] for path in complete_checkpoints(run.path / "checkpoints")][0] == "00000001"
    for rank in range(2):
        assert f"rank {rank} of 2: cpu, process " in run.logs(rank) and "resumed from step 2" in run.logs(rank)
        assert f"rank {rank}: done" in run.logs(rank)
    with pytest.raises(ParamError, match="train.steps: all 6 of .* are done; ask for more"):
        run.resume()
