"""A person's own callbacks: what is checked before ranks start, and how they are called."""

import json
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmfsdp.kit.run.ranks.hang import HangDetector, Heartbeat
from mmfsdp.kit.train.callbacks import Callbacks
from mmfsdp.kit.train.own_callbacks import OwnCallbacks, check_callbacks, own_callbacks
from mmfsdp.own.calls import OwnCodeError
from mmfsdp.params import RunParams
from tests.ranks import fake_group
from tests.run.test_runs import GONE, record
from tests.tracebacks import shows_package

MODULE = """
from mmfsdp.kit.train.callbacks import Callback

calls = []

class Log:
    def __init__(self, name="log"):
        calls.append(f"{name} is made")
        self.name = name
    def on_step_end(self, row):
        calls.append((self.name, dict(row)))
        row["loss"] = row["parts"]["a"] = None
    def close(self):
        calls.append(f"{self.name} is closed")

class OnlyRank0(Log):
    rank0_only = True

class Typo:
    def on_step_ends(self, row): ...

class TakesNothing:
    def on_step_end(self): ...

class TakesAll:
    @staticmethod
    def on_save(step, folder=None): ...
    @classmethod
    def on_evaluate(cls, *args): ...
    def on_train_end(self, *args, **kwargs): ...

class Nothing:
    def step_end(self, row): ...

class Ours(Callback):
    def on_save(self, step): ...

class OverridesOurs(Callback):
    def after_step(self, step): ...

class Raises:
    def on_step_end(self, row):
        raise ValueError(f"step {row['step']}")

class OneHalfOfAState(Log):
    def state_dict(self): ...

class Counts:
    count = 0
    def on_train_begin(self, training):
        self.training = training
    def on_step_end(self, row):
        self.count += 1
        if row["loss"] < 1:
            self.training.stop("learned\\x1b[2J\\nenough")
    def state_dict(self):
        return {"count": self.count if self.count < 3 else make}
    def load_state_dict(self, state):
        self.count = state["count"]

def make(size):
    return Nothing() if size == 0 else Log(f"made of {size}")
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_calls.py").write_text(textwrap.dedent(MODULE))


def params(*callbacks) -> RunParams:
    return RunParams().change(**{"train.callbacks": list(callbacks)})


def training(*callbacks, beats):
    setup = SimpleNamespace(params=params(*callbacks))
    return SimpleNamespace(setup=setup, state=SimpleNamespace(step=0), beat=beats.append, stop_asked="")


def test_classes_are_checked_and_not_made_before_ranks_start():
    words = check_callbacks(params("my_calls:Log", {"call": "my_calls:make", "size": 3}, "my_calls:Ours"))
    assert words[:2] == ["my_calls:Log: on_step_end", "my_calls:make: made when the run starts"]
    assert words[2].endswith("on_save, on_train_end")
    assert check_callbacks(params("my_calls:TakesAll")) == ["my_calls:TakesAll: on_evaluate, on_save, on_train_end"]
    assert sys.modules["my_calls"].calls == []


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        ("my_calls:Typo", "my_calls:Typo has a method on_step_ends, which nobody calls; did you mean on_step_end?"),
        (
            "my_calls:TakesNothing",
            "TakesNothing.on_step_end is called as on_step_end(row), which it does not take: too many",
        ),
        ("my_calls:Nothing", "gives a Nothing, which has none of the methods on_train_begin, on_step_end, on_evaluate"),
        (
            "my_calls:OverridesOurs",
            "my_calls:OverridesOurs overrides after_step, which is not called on an own callback",
        ),
        ("my_calls:OneHalfOfAState", "has one of state_dict and load_state_dict; a state needs both"),
        ({"call": "my_calls:Log", "nam": "x"}, "called wrongly: got an unexpected keyword argument 'nam'"),
        ("my_calls:Lock", "Lock is not there in "),
        ("my_cals:Log", "there is no module 'my_cals' in the current folder or installed; did you mean my_calls?"),
    ],
)
def test_a_wrong_callback_is_refused_before_ranks_start(callback, message):
    with pytest.raises(OwnCodeError) as error:
        check_callbacks(params(callback))
    assert str(error.value).startswith("train.callbacks: ")
    assert message in str(error.value)


def test_callbacks_are_called_in_their_order_each_with_a_row_of_its_own():
    beats = []
    with fake_group(2):
        run = training("my_calls:Log", {"call": "my_calls:make", "size": 3}, "my_calls:OnlyRank0", beats=beats)
        callbacks = own_callbacks(run)
        run.state.step = 5
        row = {"step": 5, "loss": 1.0, "parts": {"a": 1}}
        callbacks.on_step_end(row)
        callbacks.on_save(5)
        callbacks.on_train_end({})
        callbacks.close()
    names = ["log", "made of 3", "log"]
    same = {"step": 5, "loss": 1.0, "parts": {"a": 1}}
    assert row == same
    made, called, closed = ([f"{name} {what}" for name in names] for what in ("is made", "", "is closed"))
    calls = sys.modules["my_calls"].calls
    assert calls[:3] == made
    assert [name for name, _ in calls[3:6]] == names
    assert calls[6:] == closed
    assert [step["loss"] for _, step in calls[3:6]] == [1.0] * 3
    paths = ["my_calls:Log", "my_calls:make", "my_calls:OnlyRank0"]
    assert beats[:3] == [f"taking up callback {path}" for path in paths]
    assert beats[3:] == [f"step 5 callback {path}.on_step_end" for path in paths], "of methods that are there"
    assert own_callbacks(training(beats=beats)) is None


def test_a_callback_sees_the_training_asks_for_its_end_and_keeps_a_state():
    with fake_group(1):
        run = training("my_calls:Counts", "my_calls:Log", "my_calls:Counts", beats=[])
        callbacks = Callbacks({"own": own_callbacks(run)})
        with callbacks.around_training():
            callbacks.on_step_end({"loss": 0.5, "parts": {"a": 1}})
        assert run.stop_asked == "my_calls:Counts: learned enough"
        states = json.loads(json.dumps(callbacks.state_dicts()))
        resumed = Callbacks({"own": own_callbacks(run)})
        resumed.load_state_dicts(states)
        assert resumed.state_dicts() == states
        resumed.on_step_end({"loss": 1, "parts": {"a": 1}})
        assert resumed.state_dicts() != states
        resumed.load_state_dicts({"early stop": [{"best": 1}]})  # of a callback that this run does not have
        resumed.on_step_end({"loss": 1, "parts": {"a": 1}})
        with pytest.raises(OwnCodeError, match="my_calls:Counts.state_dict returned a function, which a checkpoint"):
            resumed.state_dicts()


def test_a_callback_for_rank_0_is_not_made_elsewhere(monkeypatch):
    with fake_group(2):
        monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
        OwnCallbacks(training(beats=[]), ("my_calls:OnlyRank0",)).on_step_end({"step": 1})
    assert sys.modules["my_calls"].calls == []


def test_what_a_callback_raises_ends_the_run_by_its_name():
    with fake_group(1):
        callbacks = own_callbacks(training("my_calls:Raises", beats=[]))
        with pytest.raises(OwnCodeError) as error:
            callbacks.on_step_end({"step": 7})
        assert str(error.value) == "train.callbacks: my_calls:Raises.on_step_end raised ValueError: step 7"
        assert not shows_package(error.value.traceback)
        with pytest.raises(OwnCodeError, match="my_calls:make gives a Nothing, which has none of the methods"):
            own_callbacks(training({"call": "my_calls:make", "size": 0}, beats=[]))


@pytest.mark.parametrize("waits", ["on rank 0 alone", "on both ranks"])
def test_a_callback_in_which_ranks_wait_is_named(tmp_path, monkeypatch, waits):
    now = [0.0]
    monkeypatch.setattr("mmfsdp.kit.run.ranks.hang.time.monotonic", lambda: now[0])
    folder = tmp_path / "run"
    beats = [Heartbeat(folder, rank) for rank in (0, 1)]
    detector = HangDetector(folder, record(**GONE, ranks=2, hang_timeout_s=60))
    path = "my_experiment.callbacks:UploadEverything.on_step_end"

    def after(seconds: int):
        for _ in range(seconds):
            now[0] += 1.0
            if state := detector.check():
                return state
        return None

    for beat in beats:
        beat("step 3 compute")
    assert after(2) is None
    for rank, beat in enumerate(beats):
        beat(f"step 3 callback {path}" if waits == "on both ranks" or rank == 0 else "step 4 compute")
    assert after(200) is None, "it may take longer than a step"
    state = after(200)
    assert state.rank == 0
    assert state.reason.startswith(f"rank 0 does not answer (in step 3 callback {path}): it hangs")
