"""What the course and its slides claim is shown: by a check, a cell, a test or a source. The table is taught.yaml."""

import pickle
import re
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from books import FOLDER, LESSONS, read, solutions
from claims import claims, texts

from mmfsdp import FSDPParams, estimate, make_plan
from mmfsdp.params import TrainParams
from mmfsdp.predict import machine_of, step_time

TESTS = Path(__file__).resolve().parent.parent
TABLE = yaml.safe_load((TESTS / "course" / "taught.yaml").read_text(encoding="utf-8"))
ENTRIES = [(place, entry) for place, entries in TABLE["claims"].items() for entry in entries]
NO_CLAIMS = [words for sentences in TABLE["no_claims"].values() for words in sentences]


def plain(text):
    """Text on one line, as `claims` gives it."""
    return re.sub(r"\s+", " ", text)


@cache
def lesson(number):
    """A lesson's notebook."""
    return read(next(path for path in FOLDER.glob("*.ipynb") if path.name.startswith(number)))


def test_each_claim_is_in_the_table():
    missing = []
    for place, sentence in claims():
        shown = any(where == place and entry["says"] in sentence for where, entry in ENTRIES)
        if not shown and not any(words in sentence for words in NO_CLAIMS):
            missing.append((place, sentence))
    assert not missing, "add to tests/course/taught.yaml what shows it, or say it in other words"


def test_the_words_of_the_table_stand_in_the_course():
    said = {}
    for place, text in texts():
        said[place] = said.get(place, "") + " " + plain(text)
    gone = [(place, entry["says"]) for place, entry in ENTRIES if entry["says"] not in said[place]]
    everything = " ".join(said.values())
    gone += [("", words) for words in NO_CLAIMS if words not in everything]
    assert not gone


@pytest.mark.parametrize("kind", ["check", "cell", "test", "source"])
def test_what_shows_a_claim_exists(kind):
    missing = []
    for place, entry in ENTRIES:
        found_kind, _, what = entry["shown"].partition(" ")
        number = entry.get("of") or place.split()[-1]
        if found_kind != kind:
            continue
        if kind == "check":
            there = any(what in solutions(read(path)) for path in LESSONS)
        elif kind == "cell":
            there = any(what in cell.source for cell in lesson(number).cells if cell.cell_type == "code")
        elif kind == "source":
            there = any(what in cell.source for cell in lesson(number).cells)
        else:
            file, _, name = what.partition("::")
            there = (TESTS / file).is_file() and f"def {name}(" in (TESTS / file).read_text(encoding="utf-8")
        missing += [] if there else [(place, entry["shown"])]
    assert not missing
    assert {entry["shown"].partition(" ")[0] for _, entry in ENTRIES} == {"check", "cell", "test", "source"}


# ---- probes of claims that no lesson and no other test shows ----


def test_torch_says_so_too():
    from torch.distributed.constants import default_pg_nccl_timeout
    from torch.nn.parallel import DistributedDataParallel

    assert default_pg_nccl_timeout == timedelta(minutes=10)
    assert torch.finfo(torch.bfloat16).eps == 2**-7  # 7 bits, and the leading one, which is not stored
    assert "25 MiB" in DistributedDataParallel.__doc__ or "25MiB" in DistributedDataParallel.__doc__


def test_what_torchs_ddp_does_besides():
    """Its buckets are a second copy of the gradients; with buffers, a forward begins with a broadcast."""
    from torch.nn.parallel import DistributedDataParallel

    from mmfsdp.kit.train.meters import Collectives, cpu_memory

    def held(**options):
        module = torch.nn.Linear(1000, 1000)
        with cpu_memory() as memory:
            model = DistributedDataParallel(module, **options)
            model(torch.ones(1, 1000)).sum().backward()
            memory.mark()
        return memory.at_mark / sum(p.numel() for p in module.parameters())

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert held() - held(gradient_as_bucket_view=True) == pytest.approx(4, abs=0.1)
        for norm, kinds in ((torch.nn.Identity(), set()), (torch.nn.BatchNorm1d(4), {"broadcast"})):
            model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), norm))
            with Collectives() as counted:
                model(torch.ones(2, 4))
            assert {row.kind for row in counted.rows() if row.phase == "forward"} == kinds
    finally:
        dist.destroy_process_group()


def note(words):
    """What the pickle below calls."""
    note.said = words


class CallsNote:
    def __reduce__(self):
        return note, ("run by the pickle",)


def test_a_pickle_runs_code_when_it_is_loaded():
    content = pickle.dumps(CallsNote())
    note.said = ""
    pickle.loads(content)
    assert note.said == "run by the pickle"


def test_what_is_arithmetic():
    assert [2 * (ranks - 1) / ranks for ranks in (16, 32)] == [1.875, 1.9375]
    assert (40 + 5 * 256, 40 + 5) == (1320, 45)  # words and patches; words and one <image> for each picture
    forward, backward = 1, 2
    assert (2 * forward + backward) / (forward + backward) == pytest.approx(1 + 1 / 3)  # all layers run again


def test_four_settings_of_lesson_05():
    from course.lessons import small_flamingo

    model, example = small_flamingo()

    @cache
    def plan_of(**fields):
        return make_plan(model, FSDPParams(**fields), world_size=2, example=example)

    def wire(train=None, **fields):
        rows = [row for row in estimate(plan_of(**fields), train).wire if row.phase != "control"]
        return {f"{row.kind} {row.phase}": row.wire_bytes for row in rows}

    whole, half = wire(), wire(mixed_precision="bf16")
    gathers = [sum(sent for name, sent in found.items() if "gather" in name) for found in (whole, half)]
    assert gathers[0] == 2 * gathers[1] and whole["reduce-scatter backward"] == half["reduce-scatter backward"]
    reductions = wire(mixed_precision="bf16", reduce_dtype="bf16")["reduce-scatter backward"]
    assert half["reduce-scatter backward"] == 2 * reductions and FSDPParams().reduce_dtype != "bf16"
    four = TrainParams(accumulation=4)
    kept = {"frozen_policy": "KEEP", "sharding_strategy": "SHARD_GRAD_OP"}
    assert wire(four, **kept) == wire(**kept)
    again, once = wire(four, frozen_policy="SHARD"), wire(frozen_policy="SHARD")
    assert again["all-gather forward"] == 4 * once["all-gather forward"]
    peaks = [estimate(plan_of(**kept), train).peak_bytes for train in (four, None)]
    assert peaks[0] >= peaks[1], "more micro-steps save no memory"


def test_the_paper_of_lesson_05_is_the_plan():
    from course.lessons import planned

    names = {}
    exec(solutions(lesson("05"))["05.bound"], names)
    for policy in ("SHARD", "KEEP", "REPLICATE"):
        plan = planned("openflamingo_9b", 64, frozen_policy=policy)
        F_e = sum(unit.numel for unit in plan.units if not unit.grad_flow)
        F_b = sum(unit.numel - unit.trainable_numel for unit in plan.units if unit.grad_flow)
        T = sum(unit.trainable_numel for unit in plan.units)
        gpu = machine_of("h100-nvlink")
        mine = names["times"](F_e, F_b, T, 64, policy, 512, gpu, gpu.bandwidth)
        assert mine["compute"] == pytest.approx(step_time(plan, machine=gpu, tokens=512).compute, rel=0.02)
        assert mine["network"] == pytest.approx(estimate(plan).wire_bytes / gpu.bandwidth, rel=0.02)


def test_rates_of_an_h100_node():
    h100 = machine_of("h100-infiniband")
    assert min(h100.inside, 8 * h100.bandwidth) == 360e9 and h100.bandwidth == 50e9
