"""Wrong answers get the hint that is meant for them; right ones pass (that is in tests/notebooks/test_lessons.py)."""

from inspect import signature

import numpy as np
import pytest
import torch
from books import LESSONS, read, solutions
from course.checks import _CHECKS, hint_for, number, passed, progress
from course.ranks import run_on_ranks

G = 7 / 8
TOKENS = ["there", "<image>", "red", "<|endofchunk|>", "<image>", "blue", "<|endofchunk|>"]
SHOTS = "<image> {}<|endofchunk|><image> {}<|endofchunk|><image>"


def flow(encoder: bool, decoder: bool, embedding: bool) -> dict[str, bool]:
    return {
        "the frozen token embedding, at the very start": embedding,
        "a layer of the vision encoder": encoder,
        "the last decoder layer of the language model": decoder,
    }


VALUES = [
    ("01.wire", (350,), "one half of it"),
    ("01.wire", (800,), "keeps its own part"),
    ("01.wire", (7e8,), "megabytes"),
    ("01.wire", (12,), "too small"),
    ("01.wire", ("700 MB",), "A number is wanted"),
    ("01.ledger", (44.7,), "no gradient"),
    ("01.ledger", (7.4,), "2³⁰"),
    ("01.ledger", (5.77,), "gradient and two moments"),
    ("02.traffic", (2,), "DDP"),
    ("02.traffic", (4,), "reduce-scattered only"),
    ("02.traffic", (1.5,), "Relative to DDP"),
    ("02.hidden", (14.4, 13), "without prefetch"),
    ("02.hidden", (8, 13), "very first gather"),
    ("02.hidden", (8.8, 12), "after the last gather"),
    ("02.strategy", ({"sharding_strategy": "NO_SHARD"},), "does not fit"),
    ("02.strategy", ({"sharding_strategy": "FULL_SHARD"},), "gathered again in backward"),
    ("02.strategy", ({"sharding_strategy": "SHARD_ALL"},), "sharding_strategy"),
    ("02.strategy", ({"sharding_strategy": "NO_SHARD", "mixed_precision": "bf16"},), "Leave mixed_precision"),
    ("03.flow", (flow(True, True, False),), "before the vision encoder"),
    ("03.flow", (flow(False, False, False),), "above a trainable"),
    ("03.flow", (flow(False, True, True),), "comes first"),
    ("03.mixed", ([],), "more of them"),
    ("03.mixed", (["perceiver"],), "is not mixed"),
    ("03.mixed", ("(root)",), "list of names"),
    ("03.floor", (G * (4 * 7.3 + 1.6), 1, 1), "encoder in backward"),
    ("03.floor", (G * (0.6 + 28 + 1.6), G * (14.6 + 1.6), 1), "6 T"),
    ("03.floor", (0.6 + 28 + 1.6, 1, 1), "need not send itself"),
    ("03.mend", ({"sharding_strategy": "ALL"},), "sharding_strategy"),
    ("03.mend", ({"frozen_policy": "KEEP"},), "sends none of them"),
    ("03.mend", ({"frozen_policy": "REPLICATE"},), "how often"),
    ("04.length", (1319, 45), "too small"),
    ("03.mend", ({"backend": "DDP", "mixed_precision": "bf16"},), "hold"),
    ("09.freeze", (["language_model.*"],), "An encoder trains"),
    ("09.freeze", (["llava_stage1"],), "`projectors.*` are two"),
    ("09.freeze", (["encoder.*"],), "matches no parameter"),
    ("09.freeze", (["encoders.*", "projectors.vision.*"],), "The language model trains"),
    ("09.lora", (8 * 128 * 256,), "thin"),
    ("09.lora", (1024,), "the second goes back up"),
    ("09.lora", (32768,), "frozen matrix"),
    ("09.labels", (TOKENS, [True] * 7), "Before the first picture"),
    ("09.labels", (TOKENS, [False, True, True, True, True, True, True]), "Nobody has to *predict*"),
    ("09.labels", (TOKENS, [False, False, True, False, False, True, False]), "when to stop"),
    ("09.labels", (TOKENS, [False, False, True, True, False, False, True]), "'blue'"),
    ("09.prompt", ("<image> circles<image> hearts<image>", ""), "ends with `<|endofchunk|>`"),
    ("09.prompt", (SHOTS.format("red", "black"), "blue"), "goes on with a color"),
    ("09.prompt", (SHOTS.format("circles", "hearts") + " stars", ""), "Leave the last"),
    ("09.prompt", ("<image>", ""), "three pictures"),
    ("10.exposed", (lambda compute, talk: sum(b - a for a, b in talk),), "all the communication"),
    ("10.exposed", (lambda compute, talk: None,), "returns nothing"),
    ("10.exposed", (lambda compute, talk: max(0, talk[-1][1] - compute[-1][1]),), "IndexError"),
    ("10.gain", (60.6,), "no shorter"),
    ("10.gain", (15,), "of the *step*"),
    ("10.gain", (10,), "not of 300"),
    ("10.tokens", (512,), "still holds it"),
    ("10.tokens", (65536,), "Half as many"),
    ("10.tokens", (1000,), "power of two"),
    ("10.cache", (1048.6,), "not 4"),
    ("10.cache", (2.048,), "256 tokens"),
    ("10.cache", (488.3,), "GiB"),
]


@pytest.mark.parametrize(("name", "given", "words"), VALUES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_wrong_value_gets_its_hint(name, given, words):
    hint = hint_for(name, *given)
    assert hint and words in hint, hint


CODE = [
    (
        "01.ring",
        "    dist.send(halves[mine], dst=other)\n    dist.recv(halves[other], src=other)",
        "    pass",
        "waited",
    ),
    ("01.ring", "halves[mine] = halves[mine] + got", "pass", "is [0"),
    ("01.ring", "%%ranks 2", "%%ranks 1", "is for 2 ranks"),
    ("01.ddp", "dist.broadcast(p.data, src=0)", "pass", "broadcast is missing"),
    ("01.ddp", "        dist.all_reduce(p.grad)\n", "", "drift apart"),
    ("01.ddp", "p.grad /= world_size", "pass", "twice too long"),
    ("01.ddp", "dist.all_reduce(p.grad)", "dist.all_reduce(p.gradient)", "AttributeError"),
    ("02.gather", "return part / world_size", "return part", "is the sum"),
    ("02.gather", "dist.reduce_scatter_tensor(part, grad.contiguous())", "pass", "still zero"),
    (
        "02.gather",
        "dist.reduce_scatter_tensor(part, grad.contiguous())",
        "part = grad.chunk(2)[rank] * 2",
        "own gradient",
    ),
    ("01.ring", "save(sum=torch.cat(halves))", "dist.all_reduce(x); save(sum=x)", "nothing but"),
    ("08.stale", "frozen.requires_grad_(False)", "trained.requires_grad_(False), frozen", "no gradient"),
    ("08.resume", 'set_model_state_dict(resumed, state["model"])', "resumed = sharded(3)", "its own first weights"),
    ("08.eval", "save(loss=loss)", "save(loss=loss * 0)", "that of the data"),
    ("08.eval", "net(x).square()", "nett(x).square()", "NameError"),
    ("08.eval", "save(loss=loss)", "pass", "Who must enter"),
    ("08.scaler", "dist.all_reduce(finite, op=dist.ReduceOp.MIN)", "dist.broadcast(finite, src=1)", "Step 1"),
]


@pytest.mark.parametrize(("name", "right", "wrong", "words"), CODE, ids=[f"{c[0]}-{i}" for i, c in enumerate(CODE)])
def test_wrong_code_gets_its_hint(name, right, wrong, words):
    lesson = next(path for path in LESSONS if path.name.startswith(name[:2]))
    first, code = solutions(read(lesson))[name].split("\n", 1)
    whole = f"{first}\n{code}"
    assert right in whole
    first, code = whole.replace(right, wrong, 1).split("\n", 1)
    run_on_ranks(code, int(first.split()[1]), name)
    hint = hint_for(name)
    assert hint and words in hint, hint


@pytest.mark.parametrize("given", [None, "some words", [], {"a": None}], ids=str)
def test_what_is_no_answer_at_all_gets_a_hint_too(given):
    exercises = {name for path in LESSONS for name in solutions(read(path))}
    for name in sorted(exercises):
        hint_for(name, ...)
        count = len(signature(_CHECKS[name]).parameters)
        assert hint_for(name, *[given] * count), (name, given)


def test_nothing_to_check_yet_is_said():
    assert "run the `%%ranks 2 01.ring` cell first" in hint_for("01.ring")
    assert "three dots" in hint_for("01.wire", ...)
    with pytest.raises(ValueError, match="01.rang"):
        hint_for("01.rang")


def test_progress_is_kept_and_survives_a_broken_file(tmp_path):
    assert progress() == set()
    passed("01.ring")
    passed("02.traffic")
    assert progress() == {"01.ring", "02.traffic"}
    (tmp_path / "progress.json").write_text("{broken")
    assert progress() == set()


def test_a_number_that_fits_no_known_slip_says_which_way():
    assert "formula" in number(5, 10, {}, "a formula.") and "Think of" not in number(5, 10, {}, "another.")
    assert number(5, 10, {}, "a formula.") == "5 is too small. Think of a formula."
    assert number(10.05, 10, {}, "a formula.") is None


RIGHT = [
    ("01.wire", (np.int64(700),)),
    ("01.wire", (torch.tensor(700),)),
    ("03.flow", (flow(False, True, False),)),
    ("05.precision", (0.5, 1)),
    ("05.recompute", (33,)),
    ("10.gain", (9,)),
]


@pytest.mark.parametrize(("name", "given"), RIGHT, ids=lambda v: v if isinstance(v, str) else "")
def test_a_right_answer_of_another_form_is_right(name, given):
    assert hint_for(name, *given) is None
