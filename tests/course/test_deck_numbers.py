"""The numbers on the slides and in their notes, counted or computed again. The table of claims is taught.yaml."""

import json
import re

import pytest
from books import FOLDER, ROOT, read, solutions, tagged
from course.lessons import frozen, planned

from mmfsdp import FSDPParams, build_model, estimate, freeze, make_plan
from mmfsdp.kit.run.replay.recording import BEAT, Recording
from mmfsdp.kit.run.replay.replay import DEFAULT_SPEED
from mmfsdp.params import load
from mmfsdp.predict import machine_of, on_mesh, step_time

DECK = (ROOT / "slides" / "deck.md").read_text(encoding="utf-8").replace("&nbsp;", " ")
RECORDINGS = ROOT / "mmfsdp/kit/run/replay/recordings"
GiB = 2**30
RECIPES = {"stage 1": ("llava_stage1", None), "stage 2": ("llava_stage2", None), "LoRA": ("llava_lora", 16)}


def said(pattern):
    """The numbers in the only place of the deck that fits this pattern."""
    [found] = re.findall(pattern, DECK)
    return [float(number) for number in ([found] if isinstance(found, str) else found)]


def share_trained(model):
    """The share of a model's parameters that trains, and how many there are."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    total = sum(size for size, _ in sizes)
    return sum(size for size, trains in sizes if trains) / total, total


def test_shares_of_what_trains():
    share, total = share_trained(frozen("clip_llama_1b"))
    assert said(r"a Flamingo of (\d) billion parameters") == [int(total / 1e9)]
    assert said(r"here (\d+) percent") == [round(100 * share)]
    llava, _ = build_model(load("llava_7b").model, meta=True)
    freeze(llava, ["llava_stage1"])
    nine_billion, _ = share_trained(frozen("openflamingo_9b"))
    projector, _ = share_trained(llava)
    percents = said(r"OpenFlamingo 9B it is (\d+) percent, and in LLaVA's first stage ([\d.]+) percent")
    assert percents == [int(100 * nine_billion), round(100 * projector, 1)]


def test_bytes_on_paper():
    F_e, F_b, T, g = 0.3e9, 7e9, 0.2e9, 7 / 8
    sent = [g * (2 * F_e + 4 * F_b + 8 * T), g * (2 * F_e + 2 * F_b + 6 * T), g * 6 * T]
    numbers = said(
        r"(\d+) GB for SHARD, and with the trainable units kept (\d+) GB for KEEP and (\d+) GB for REPLICATE"
    )
    assert numbers == [round(sent_bytes / 1e9) for sent_bytes in sent]
    replicated = estimate(planned("openflamingo_9b", 8, frozen_policy="REPLICATE")).memory
    at_rest = replicated.parameters + replicated.gradients + replicated.optimizer
    assert said(r"On 24 GiB REPLICATE leaves (\d+) GiB") == [round(24 - at_rest / GiB)]
    in_bf16 = planned("openflamingo_9b", 8)
    trained = sum(unit.trainable_numel for unit in in_bf16.units)
    memory = estimate(in_bf16).memory
    weights = memory.parameters - sum(2 * (unit.numel - unit.trainable_numel) for unit in in_bf16.units) / 8
    assert said(r"So the (\d+) bytes of weight and moments") == [round(8 * (weights + memory.optimizer) / trained)]


@pytest.mark.parametrize("name", RECIPES)
def test_what_llava_sends(name):
    recipe, rank = RECIPES[name]
    model, _ = build_model(load("llava_7b").model.change(lora_rank=rank), meta=True)
    freeze(model, [recipe])
    sent = []
    for policy in ("SHARD", "REPLICATE"):
        fields = {"frozen_policy": policy, "mixed_precision": "bf16", "frozen_dtype": "bf16"}
        plan = make_plan(model, FSDPParams(**fields), world_size=8)
        sent.append(estimate(plan).wire_bytes / 1e9)
    numbers = said(rf"\| {name} \|[^|]*\| ([\d.]+) GB \| ([\d.]+) GB \|")
    assert numbers == [pytest.approx(gigabytes, rel=0.03) for gigabytes in sent]


def test_what_was_measured():
    measured = json.loads((FOLDER / "measured" / "bench_wrap_flamingo.json").read_text(encoding="utf-8"))
    assert said(r"bf16, (\d+) % frozen") == [round(100 * (1 - measured["trainable"] / measured["parameters"]))]
    in_4_bits = ["nf4" in row["way"] for row in measured["rows"]]
    assert in_4_bits == [False] * (len(in_4_bits) - 2) + [True, True]
    sent = {row["way"]: row["wire_bytes"] for row in measured["rows"]}
    by_layer, sharded = sent["FSDP2 per layer (Cornstarch)"], sent["frozen-aware SHARD"]
    assert sharded == pytest.approx(by_layer, rel=0.05), "FSDP2 by layer sends about as much as SHARD"


def test_recordings_play_as_the_notes_say():
    preempted = Recording.read(RECORDINGS / "preemption.jsonl")
    assert round(preempted.seconds / 60) == 3 and "of about three minutes" in DECK
    assert said(r"of about three minutes, in (\d+) seconds") == [round(preempted.seconds / DEFAULT_SPEED)]
    hang = Recording.read(RECORDINGS / "hang.jsonl")
    beats = [moment for moment in hang.moments if moment.kind == BEAT]
    last = {moment.rank: moment.value for moment in beats}
    assert last[0].startswith("step 24 callback") and last[1].startswith("step 25")
    speed = said(r"(?s)## Live.*?replay hang --to runs/live --speed (\d+)")[0]
    # Ranks are marked after half of the time that the supervisor waits.
    assert (hang.seconds - beats[-1].at) / speed / 2 == pytest.approx(15, abs=1)


def test_bug_3_costs_what_the_notes_say():
    page = (FOLDER / "rendered" / "08_find_the_bug.md").read_text(encoding="utf-8")
    described = page[page.index("```python\n%run_script 3 describe") :]
    described = described[: described.index("rank 1\n")]
    needed = described.count(" 1+1")
    measured = re.findall(r"all-gather, backward +(\d+)\.0 in a step", page)
    words = {7: "seven", 8: "eight"}
    assert measured and f"It costs {words[int(measured[0]) - needed]} all-gathers in each step" in DECK


def test_with_many_ranks_latency_grows_and_bytes_hardly():
    gpu = machine_of("h100-infiniband")
    plan = planned("openflamingo_9b", 8, frozen_policy="SHARD")
    shares, sent, held = [], [], []
    for ranks in (64, 1024):
        on_ranks = on_mesh(plan, 1, ranks)
        with_latency = step_time(on_ranks, machine=gpu, tokens=512).network
        sent.append(estimate(on_ranks).wire_bytes)
        held.append(estimate(on_ranks).memory_bytes)
        shares.append(1 - sent[-1] / gpu.bandwidth / with_latency)
    assert sent[1] == pytest.approx(sent[0], rel=0.03) and held[1] < held[0]
    assert shares[1] > 2 * shares[0]


# ---- lines of code ----


def lines(code):
    """The lines of code without comments, docstrings of one line and blank lines."""
    kept = [line.strip() for line in code.splitlines()]
    return [line for line in kept if line and not line.startswith(("#", '"""', "%%", "@"))]


def written(lesson, names=()):
    """The lines of the solutions of a lesson that its exercises do not give."""
    book = read(next(FOLDER.glob(f"{lesson}_*.ipynb")))
    solved, count = solutions(book), 0
    for cell in book.cells:
        name = tagged(cell, "exercise")
        if name and (name in names or not names):
            given = lines(cell.source)
            count += sum(line not in given for line in lines(solved[name]))
    return count


def test_lines_of_code_are_as_many_as_said():
    own_file = (FOLDER / "fsdp_in_200_lines.py").read_text(encoding="utf-8")
    assert len(lines(own_file)) <= 200
    parts = [f"02.{name}" for name in ("shard", "refill", "gather", "moments", "predict")]
    frozen_parts = [f"03.{name}" for name in ("backward", "policies", "predict")]
    own_lines = written("02", parts) + written("03", frozen_parts)
    assert said(r"they write about (\d+) lines") == [pytest.approx(own_lines, abs=6)]
    assert said(r"in 04.cross, in about (\d+) lines") == [pytest.approx(written("04", ["04.cross"]), abs=2)]
    predict = solutions(read(FOLDER / "02_fsdp_from_scratch.ipynb"))["02.predict"]
    assert said(r"this prediction yourself, in (\d+) lines") == [len(lines(predict)) + 1]  # and its docstring
    checkpoint = solutions(read(FOLDER / "07_checkpoints.ipynb"))["07.dcp"]
    functions = checkpoint[checkpoint.index("def save_to") : checkpoint.index("def sharded")]
    assert said(r"by hand, in (\d+) lines") == [len(lines(functions))]
    scripts = [path.read_text(encoding="utf-8").splitlines() for path in FOLDER.glob("course/clinic/*.py")]
    assert said(r"a script of about (\d+) lines") == [pytest.approx(sum(map(len, scripts)) / len(scripts), abs=5)]
