"""What hangs on the loop, on two ranks: it ends a run on all of them in one step, and resumes to the last bit."""

from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mmfsdp import checkpoint
from mmfsdp.checkpoint.plain import from_json
from mmfsdp.kit.compat.export import export
from mmfsdp.kit.data import open_source
from mmfsdp.kit.run.files.folder import read_events, read_json
from mmfsdp.kit.run.trust import trust_run
from mmfsdp.kit.train.evaluate import load_run
from mmfsdp.params import ParamError, RunParams
from tests.ranks import in_processes
from tests.tiny_run import free_port, tiny_run, train_as_rank
from tests.train.test_resume import curve, final, rows, weights

pytestmark = pytest.mark.real

GATE, FROZEN = "perceiver.latents", "vision_encoder.visual.conv1.weight"


class Watch:
    """Reads a whole parameter in each step, notes the learning rates, and ends the run from rank 1 alone."""

    def __init__(self, last: int):
        self.last = last
        self.whole = None
        self.rates = {}

    def on_train_begin(self, training):
        self.training = training
        with pytest.raises(ParamError, match="no parameter 'perceiver.latent'; did you mean perceiver.latents"):
            training.parameter("perceiver.latent")

    def on_step_end(self, row):
        self.whole = self.training.parameter(GATE)
        assert self.training.optimizer.param_groups and self.training.step == row["step"]
        self.rates[row["step"]] = row["lr"]
        if dist.get_rank() == 1 and row["step"] == self.last:
            self.training.stop(f"as seen in\nstep {row['step']}")

    def state_dict(self):
        return {"rank": dist.get_rank(), "whole": self.whole, "rates": self.rates}

    def load_state_dict(self, state):
        assert state["rank"] == dist.get_rank(), "each rank has its own state"
        self.rates = state["rates"]


WATCH = [{"call": f"{__name__}:Watch", "last": 4}]
KEEP_BEST = {"train.eval_every": 1, "train.keep_best": "-heldout_loss"}
SAME = {
    "own callback": {"train.callbacks": WATCH, "fsdp.backend": "FSDP1"},
    "early stop": {**KEEP_BEST, "train.patience": 3, "train.min_delta": 1e6},
    **{
        f"moving average, {backend}": {"fsdp.backend": backend, "train.ema": 0.5, **KEEP_BEST}
        for backend in ("DDP", "FSDP1", "FSDP2")
    },
}
ENDS_AFTER = {"own callback": 5, "early stop": 4}


def runs_of_two_ranks(rank: int, _: str, folder: str, ports: list[int]) -> dict[str, str]:
    """Each run, and from its second step on once more. Returns what failed."""
    ports, failed = iter(ports), {}

    def go(name: str, params: RunParams, after: Path | None = None) -> Path:
        run = Path(folder, name)
        error = train_as_rank(rank, run, lambda: params, port=next(ports), after=after)
        if error:
            failed[name] = error
        return run

    base = tiny_run(Path(folder))
    for name, changes in SAME.items():
        whole = go(name, base.change(**changes))
        go(f"{name}-resumed", base.change(**changes), after=whole)
    return failed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    tiny_run(folder)
    failed = in_processes(runs_of_two_ranks, 2, str(folder), [free_port() for _ in range(2 * len(SAME))])
    assert failed == [{}, {}], "\n".join(text for some in failed for text in some.values())
    return folder


@pytest.mark.parametrize("name", SAME)
def test_a_run_that_is_broken_off_and_resumed_equals_the_unbroken_one_bitwise(folder, name):
    whole, resumed = folder / name, folder / f"{name}-resumed"
    assert [event["step"] for event in read_events(resumed) if event["kind"] == "resumed"] == [2]
    assert curve(whole) == curve(resumed)
    assert final(whole) == final(resumed)
    states = [checkpoint.marker_of(checkpoint.latest(run / "checkpoints"))["callbacks"] for run in (whole, resumed)]
    assert states[0] == states[1]
    assert bool(states[0]) == (name in ENDS_AFTER)


@pytest.mark.parametrize("name", ENDS_AFTER)
def test_a_callback_ends_the_run_on_all_ranks_after_one_step_which_is_saved(folder, name):
    for run in (folder / name, folder / f"{name}-resumed"):
        for rank in range(2):
            assert [row["step"] for row in rows(run, rank)] == list(range(1, ENDS_AFTER[name] + 1))
        assert checkpoint.latest(run / "checkpoints").name == f"step_{ENDS_AFTER[name]:08d}"
        assert read_json(run / "result.json")["stopped"] == read_events(run)[-1]["text"]


def test_the_reason_names_who_has_stopped_the_run(folder):
    own = read_json(folder / "own callback" / "result.json")["stopped"]
    assert own == f"stopped by {__name__}:Watch: as seen in step 4"
    early = read_json(folder / "early stop" / "result.json")
    assert early["stopped"].startswith("stopped by train.patience: 3 evaluations without a better heldout_loss than ")
    assert early["stopped"].endswith(" of step 1")
    losses = {row["step"]: row["heldout_loss"] for row in rows(folder / "early stop")}
    assert early["best"]["score"] == min(losses.values()), "keep_best takes any better score, however small the change"


def test_a_callback_reads_whole_parameters_and_keeps_a_state_for_each_rank(folder):
    run = folder / "own callback"
    trust_run(run)
    by_rank = checkpoint.marker_of(checkpoint.latest(run / "checkpoints"))["callbacks"]["own"]
    for rank, saved in enumerate(by_rank):
        (state,) = from_json(saved).values()
        state = from_json(state)
        assert state["rank"] == rank
        assert torch.equal(state["whole"], weights(run)[GATE])
        assert list(state["rates"].items()) == [(row["step"], row["lr"]) for row in rows(run)], "keys stay numbers"


@pytest.mark.parametrize("name", [name for name in SAME if "moving average" in name])
def test_the_average_is_evaluated_captioned_and_exported(folder, name, tmp_path):
    run = folder / name
    _, average, processor = load_run(run, ema=True)
    samples = list(
        islice(
            open_source(
                RunParams.from_yaml(run / "params.yaml").data, split="heldout", image_size=processor.image_size
            ),
            2,
        )
    )
    with torch.no_grad():
        loss = float(average(**processor(samples).inputs()).loss)
    assert rows(run)[-1]["heldout_loss"] == pytest.approx(loss, rel=1e-4)
    averaged = dict(average.named_parameters())
    plain = weights(run)
    assert not torch.equal(averaged[GATE], plain[GATE])
    assert torch.equal(averaged[FROZEN], plain[FROZEN])
    export(run, tmp_path / "exported", ema=True)
    assert torch.equal(load_file(tmp_path / "exported" / "model.safetensors")[GATE], averaged[GATE])
    best = read_json(run / "result.json")["best"]
    assert checkpoint.best(run / "checkpoints").name == f"step_{best['step']:08d}"
    if best["step"] == rows(run)[-1]["step"]:
        assert torch.equal(dict(load_run(run, best=True)[1].named_parameters())[GATE], averaged[GATE])


def test_a_run_without_an_average_cannot_export_one(folder, tmp_path):
    with pytest.raises(ParamError, match="step_00000004 has no moving average of its weights; train with train.ema"):
        export(folder / "early stop", tmp_path / "exported", ema=True)
