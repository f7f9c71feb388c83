"""fit: what it answers fits, one step further does not, and plans and real ranks say the same of both."""

import random
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from ranks import on_ranks

from mmfsdp.core import token_loss
from mmfsdp.core.plan import WrapPlan
from mmfsdp.kit import cli
from mmfsdp.kit.bench.bench_models import random_batch, random_model
from mmfsdp.kit.models import TokenIds
from mmfsdp.kit.train import fit_traces
from mmfsdp.kit.train.fit import Solver, fit
from mmfsdp.kit.train.fit_answers import Answer
from mmfsdp.kit.train.fit_search import search
from mmfsdp.kit.train.fit_traces import Traces
from mmfsdp.kit.train.prepare import preview
from mmfsdp.params import ParamError, load
from mmfsdp.predict import Machine, gpu_with
from mmfsdp.predict.lines import Lines
from tests.bench.peaks import measure

TINY = load("tiny").change(**{"model.vision.weights": None, "model.language.weights": None})


def machine(capacity: float) -> Machine:
    """A GPU with so many bytes, on which nothing must be free beyond the tensors."""
    return replace(gpu_with(1), capacity=capacity, context=0.0, fragmentation=0.0)


@cache
def peak(**changes) -> int:
    """The peak that a plan predicts for the run with other values."""
    _, cost = preview(TINY.change(**changes))
    return cost.peak_bytes


def test_the_search_finds_what_a_look_at_every_number_finds():
    generator = random.Random(0)
    for _ in range(200):
        steps = [generator.choice([0, 1, 1, 7, 40]) for _ in range(60)]
        needs = [sum(steps[:n]) for n in range(61)]
        limit, first = generator.uniform(-1, max(needs) + 2), generator.randint(1, 60)
        looked_at = set()

        def room(n, needs=needs, limit=limit, looked_at=looked_at):
            looked_at.add(n)
            return limit - needs[n]

        guesses = [None, partial(generator.randint, 1, 60)]  # a bad guess costs looks, and no wrong answer
        for guess in guesses:
            fits, too_many = search(room, first, guess=guess, most=60)
            assert fits == max((n for n in range(1, 61) if needs[n] <= limit), default=0)
            assert too_many == (None if fits == 60 else fits + 1)
            assert {fits, too_many} <= {0, None} | looked_at


@pytest.mark.parametrize("asked, field", [("batch", "train.batch_size"), ("length", "data.max_length")])
def test_the_largest_size_is_that_of_plans(asked, field):
    limit = peak(**{field: 40}) + 1
    [answer] = fit(TINY, machine(limit), asked).answers
    assert answer.change == {field: answer.value} and answer.further == answer.value + 1
    assert answer.peak == peak(**answer.change) <= limit < peak(**{field: answer.further}) == answer.further_peak
    assert answer.value == 40 and not answer.read_off


def test_what_needs_more_than_there_is_has_no_answer():
    least = peak(**{"train.batch_size": 1})
    solved = fit(TINY, machine(least - 1), "batch", "gpus")
    assert [answer.value for answer in solved.answers] == [0, 0] and not solved.all_fit
    assert str(solved).count("none fits") == 2


def test_pictures_end_at_the_length_of_the_text():
    [answer] = fit(
        TINY.change(**{"model.kind": "multimodal", "data.max_length": 100}), machine(1e9), "pictures"
    ).answers
    assert answer.value == 2 and answer.change == {}  # 36 tokens each
    assert "data.max_length: 100 is too short for 3 pictures of 108 tokens" in answer.why_not


def test_the_fewest_gpus_are_those_of_plans():
    limit = (peak(**{"launch.ranks": 4}) + peak(**{"launch.ranks": 3})) / 2
    [answer] = fit(TINY, machine(limit), "gpus").answers
    assert (answer.value, answer.further) == (4, 3)
    assert answer.peak == peak(**answer.change) <= limit < answer.further_peak == peak(**{"launch.ranks": 3})


def test_the_policy_sends_least_of_those_that_fit():
    params = TINY.change(**{"fsdp.activation_checkpointing": "all"})
    replicated = {"fsdp.frozen_policy": "REPLICATE", "fsdp.activation_checkpointing": "none"}
    [answer] = fit(params, machine(peak(**replicated) - 1), "policy").answers
    for way in answer.ways:
        if way.why_not:
            continue
        plan, cost = preview(params.change(**way.change))
        assert (way.peak, way.wire, way.flops) == (cost.peak_bytes, cost.wire_bytes, plan.hardware_flops)
    fitting = [way for way in answer.ways if way.fits]
    assert answer.change == min(fitting, key=lambda way: (way.wire, way.flops, way.peak)).change
    assert {way.fits for way in answer.ways} == {True, False}


PICTURE = {"tokens": 36, "pixel_values": [1, 3, 48, 48]}
LLAVA = load("tiny_llava").change(**{"model.weights": None, "model.picture": PICTURE, "data.max_length": 128})


@pytest.mark.parametrize("params", [TINY.change(**{"data.max_length": 16}), LLAVA], ids=["tiny", "tiny_llava"])
def test_what_is_read_off_two_small_traces_is_what_a_trace_holds(params, monkeypatch):
    monkeypatch.setattr(token_loss, "PIECE_BYTES", 1)  # the loss in more pieces for each sample, as for large models
    solver = Solver(params, machine(1e9))
    traces = Traces(solver, solver.sizes["batch"]())
    lines = Lines(16, traces.trace(16), 32, traces.trace(32))  # of whole pieces of 128 positions
    assert lines.at(96) == traces.trace(96).memory_events


def long_batch(limit: int, few: int) -> tuple[Solver, Answer]:
    """Return the largest batch, where a batch of less than `few` is as large as that: not on the lines of more."""
    solver = Solver(TINY, machine(limit))
    size = solver.sizes["batch"]()
    return solver, solver.largest(replace(size, inputs=lambda n: size.inputs(max(n, few))))


def test_a_long_step_is_read_off_lines_on_which_a_third_trace_lies(monkeypatch):
    monkeypatch.setattr(fit_traces, "QUICK_OPERATORS", 0)
    peaks = {n: peak(**{"train.batch_size": n}) for n in (40, 41)}
    limit = peaks[40] + 1
    solver, answer = long_batch(limit, 2)
    assert solver.peaks["batch"].keys() == {2, 4, 40, 41} and not answer.read_off
    assert (answer.value, answer.peak, answer.further, answer.further_peak) == (40, peaks[40], 41, peaks[41])
    solver, answer = long_batch(limit, 3)
    assert solver.peaks["batch"].keys() == {2, 4, 76, 38, 40, 41}, "76 is not on the lines through 2 and 4"
    assert (answer.value, answer.peak, answer.further, answer.further_peak) == (40, peaks[40], 41, peaks[41])
    monkeypatch.setattr(fit_traces, "MAX_GROWTH", 0)  # a trace of the answer would take long
    solver, answer = long_batch(limit, 2)
    assert solver.peaks["batch"].keys() == {2, 3, 4, 40, 41} and answer.read_off
    assert (answer.value, answer.peak) == (40, peaks[40])


def test_a_machine_needs_room_beyond_the_tensors():
    gpu = gpu_with(2)
    [answer] = fit(TINY, gpu, "batch").answers
    assert gpu.needed_bytes(answer.peak) <= gpu.capacity < gpu.needed_bytes(answer.further_peak)
    assert answer.peak < gpu.capacity - gpu.context


def test_mistakes(capsys):
    with pytest.raises(ParamError, match="fit: 'colour' is not one of batch, length, "):
        fit(TINY, machine(1e9), "colour")
    with pytest.raises(ParamError, match="fit: Flamingo takes pictures of one size"):
        fit(TINY, machine(1e9), "picture")
    with pytest.raises(ParamError, match="train.freeze_from: the run has several phases"):
        fit(TINY.change(**{"train.freeze_from": {10: ["lang_encoder.*"]}}), machine(1e9))
    for line in ("fit --config tiny", "fit --config tiny --memory 24 --machine a100-nvlink"):
        assert cli.main(line.split()) == 2
        assert "--machine: is needed" in capsys.readouterr().err
    assert cli.main(["fit", "--config", "tiny", "--memory", "none"]) == 2
    assert "'none' is not a number of GiB above 0" in capsys.readouterr().err


def make(batch_size: int):
    torch.manual_seed(0)
    image = TokenIds.after(TINY.model.language.config["vocab_size"]).image
    side = TINY.model.vision.config["vision_cfg"]["image_size"]
    return random_model(TINY.model), [random_batch(image, image, (batch_size, TINY.data.max_length), side, seed=0)]


def measured(plans: dict[str, str]) -> list[int]:
    """Return the peak that the allocator counted on this rank with each batch size."""
    return [measure(partial(make, int(size)), WrapPlan.from_json(text))["peak"] for size, text in plans.items()]


@pytest.mark.real
def test_on_real_ranks_the_answer_fits_and_what_exceeds_the_margin_does_not():
    params = TINY.change(**{"train.device": "cpu"})  # gloo's copies are counted, which a GPU does not have
    gpu = replace(machine(13e6), fragmentation=0.01)  # a prediction may be off by less
    [answer] = fit(params, gpu, "batch").answers
    assert gpu.needed_bytes(answer.further_peak) > gpu.capacity
    plans, too_large = {}, answer.value
    while len(plans) < 2:
        plan, cost = preview(params.change(**{"train.batch_size": too_large}))
        if not plans or cost.peak_bytes > gpu.capacity:
            plans[str(too_large)] = plan.to_json()
        too_large += 1
    for fitting, further in on_ranks(measured, TINY.launch.world_size, plans, backend="one_thread_gloo"):
        assert fitting <= gpu.capacity < further
