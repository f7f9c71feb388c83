"""What the hang detector takes for a hang, by what the ranks report and when; the clock is moved by hand."""

import contextlib
import json
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mmfsdp.kit.run.files.folder import read_heartbeat
from mmfsdp.kit.run.files.reasons import NOT_JOINED
from mmfsdp.kit.run.ranks import hang
from mmfsdp.kit.run.ranks.hang import HangDetector, Heartbeat
from mmfsdp.kit.train.job import wrap
from mmfsdp.kit.train.profile import WARMUP_STEPS, StepProfile
from mmfsdp.params import FSDPParams, RunParams
from mmfsdp.planning import make_plan
from tests.ranks import fake_group
from tests.run.test_runs import GONE, record
from tests.tiny import tiny_flamingo

LIMIT_S = 60


class Ranks:
    """Two ranks that report what the test says, and their detector, with a clock of the test."""

    def __init__(self, folder, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(hang.time, "monotonic", lambda: self.now)
        self.beats = [Heartbeat(folder, rank) for rank in (0, 1)]
        self.detector = HangDetector(folder, record(**GONE, ranks=2, hang_timeout_s=LIMIT_S))

    def report(self, activity: str) -> None:
        """Both ranks begin this."""
        for beat in self.beats:
            beat(activity)
        assert self.detector.check() is None

    def hangs_within(self, seconds: float) -> bool:
        """Let time pass, and look as often as the supervisor does."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            self.found = self.detector.check()
            if self.found:
                return True
        return False


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    return Ranks(tmp_path, monkeypatch)


def test_wrapping_may_take_any_time_as_long_as_tensors_follow_each_other(ranks):
    for tensor in range(20):
        ranks.report(f"wrapping: layers.{tensor}.weight_codes")
        assert not ranks.hangs_within(4 * LIMIT_S)
    assert ranks.hangs_within(2 * LIMIT_S)


@pytest.mark.parametrize("activity", ["importing", "opening the data"])
def test_work_that_nobody_can_divide_may_take_long(ranks, activity):
    """Imports from a network disk, and a person's own reader."""
    assert not ranks.hangs_within(1)
    ranks.report(activity)
    assert not ranks.hangs_within(19 * LIMIT_S)
    assert ranks.hangs_within(2 * LIMIT_S)


def test_ranks_that_do_not_meet_say_at_which_address(ranks):
    """Where another program listens, torch waits for half an hour."""
    assert not ranks.hangs_within(1)
    ranks.report("joining: at 10.1.2.3:20123")
    assert not ranks.hangs_within(4 * LIMIT_S)
    assert ranks.hangs_within(2 * LIMIT_S)
    why = ranks.found.why
    assert "(in joining: at 10.1.2.3:20123)" in why.text and why.kind == NOT_JOINED, why
    assert "set launch.host" in why.what_to_do


def test_a_profile_may_be_written_for_longer_than_a_step_takes(ranks):
    for step in range(1, 4):
        ranks.report(f"step {step} data")
        ranks.report(f"step {step} compute")
        assert not ranks.hangs_within(2)
    ranks.report("step 3 profile")
    assert not ranks.hangs_within(4 * LIMIT_S)
    # It tells nothing of how long a step is.
    ranks.report("step 4 data")
    assert ranks.hangs_within(LIMIT_S + 2)


def test_a_profile_is_announced_before_it_is_written(tmp_path):
    beat = Heartbeat(tmp_path, 0)
    files_at_beat = []

    def announce(activity: str) -> None:
        beat(activity)
        files_at_beat.append(os.path.exists(tmp_path / "profile"))

    setup = SimpleNamespace(folder=tmp_path, params=RunParams().change(**{"train.profile": 1}))
    training = SimpleNamespace(setup=setup, device=torch.device("cpu"), beat=announce, profiled=False, ends=False)
    profile = StepProfile(training)
    with fake_group(1), contextlib.closing(profile):
        for step in range(1, WARMUP_STEPS + 2):
            assert not files_at_beat
            torch.ones(3) @ torch.ones(3)
            profile.after_step(step)
            assert training.profiled == (step == WARMUP_STEPS)
    assert files_at_beat == [False]
    assert json.loads((tmp_path / "profile" / "rank0.json").read_text())["steps"] == 1
    assert read_heartbeat(tmp_path, 0)[0] == "step 3 profile"


@pytest.mark.parametrize("ends_at", ["the last step", "a preemption"])
def test_a_training_that_ends_before_its_profile_writes_none_and_fails_of_nothing(ends_at, tmp_path):
    setup = SimpleNamespace(folder=tmp_path, params=RunParams().change(**{"train.profile": 1}))
    training = SimpleNamespace(setup=setup, device=torch.device("cpu"), beat=print, profiled=False, ends=False)
    profile = StepProfile(training)
    with fake_group(1):
        for step in range(1, WARMUP_STEPS + 1):
            training.ends = ends_at == "the last step" and step == WARMUP_STEPS
            profile.after_step(step)
        if ends_at == "the last step":
            assert not training.profiled
            profile.on_train_end({})
        else:
            assert training.profiled
        profile.close()
    assert not (tmp_path / "profile").exists()
    with torch.profiler.profile():  # none is left active
        pass


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_run_reports_each_tensor_while_it_wraps_a_model(one_rank):
    """Its checksum, its quantization, and its way from rank 0."""
    model, nf4 = tiny_flamingo(), FSDPParams(frozen_dtype="nf4", backend="DDP", sharding_strategy="NO_SHARD")
    before = [name for name, p in model.named_parameters() if not p.requires_grad]
    reports: list[tuple[str, bool]] = []
    plan = make_plan(model, nf4, world_size=1)

    def beat(activity: str) -> None:
        name = activity.removeprefix("wrapping: ")
        reports.append((name, any(name == known for known, _ in model.named_parameters())))

    wrapped, checksums = wrap(model, plan, None, torch.device("cpu"), beat)
    after = [name for name, p in model.named_parameters() if not p.requires_grad]
    codes = [name for name in after if name.endswith("_codes")]
    quantized = [name for name in before if f"{name}_codes" in codes]
    # Each is named while it is there: before the work, and not after.
    assert quantized and reports == [(name, True) for name in [*before, *quantized, *after]]
    assert checksums.keys() == {*before, *after}
