"""What learners answer to each exercise: forms of the right answer, and typical wrong ones with words of the hint."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mmfsdp.params import ShardingStrategy

G = 7 / 8
TOKENS = ["there", "<image>", "red", "<|endofchunk|>", "<image>", "blue", "<|endofchunk|>"]
LEARNED = [False, False, True, True, False, True, True]
SHOTS = "<image> {}<|endofchunk|><image> {}<|endofchunk|><image>"
MASK = [(0, 0), (1, 0), (1, 0), (1, 0), (0, 1), (0, 1), (0, 1)]
MIXED = ["(root)", *(f"language_model.model.layers.{i}" for i in (1, 3, 5))]
LEDGER = (2.9e9 * 2 + 0.1e9 * 16) / 2**30
FLOOR = [G * (2 * 0.3 + 4 * 7 + 8 * 0.2), G * (2 * 0.3 + 2 * 7 + 6 * 0.2), G * 6 * 0.2]
MENDED = {"frozen_policy": "REPLICATE", "sharding_strategy": "SHARD_GRAD_OP", "mixed_precision": "bf16"}
SBATCH = {"partition": "gpu", "account": "lab7", "nodes": 2, "ranks": 8, "cpus_per_task": 8, "timeout_min": 120}


def forms(*values: float) -> list[tuple[Any, ...]]:
    """The same numbers as Python's, NumPy's and torch's."""
    return [values, tuple(np.float64(value) for value in values), tuple(torch.tensor(value) for value in values)]


def true_false(*answers: Any) -> list[Any]:
    """The same answers as bools, as numbers and as NumPy's bools."""
    return [list(map(kind, answers)) for kind in (bool, int, np.bool_)]


def flow(encoder: Any, decoder: Any, embedding: Any) -> dict[str, Any]:
    return {
        "the frozen token embedding, at the very start": embedding,
        "a layer of the vision encoder": encoder,
        "the last decoder layer of the language model": decoder,
    }


def gate(gates: Any, weights: Any, perceiver: Any) -> dict[str, Any]:
    return {"the perceiver": perceiver, "the gates": gates, "the cross-attention's weights": weights}


def contents(*answers: Any) -> dict[str, Any]:
    questions = [
        "the optimizer's moments",
        "the position in the learning rate schedule",
        "the random state of every rank",
        "the position in the data",
        "the activations of the last step",
        "the frozen weights themselves",
    ]
    return dict(reversed(list(zip(questions, answers, strict=True))))


def sbatch(**changes: Any) -> dict[str, Any]:
    fields = {"executor": "slurm"} | SBATCH | changes
    return {f"launch.{name}": value for name, value in fields.items()}


def overlap(a: tuple[float, float], b: tuple[float, float]) -> float:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def exposed_by_sums(compute, communication):
    return sum(b - a - sum(overlap((a, b), span) for span in compute) for a, b in communication)


def exposed_by_small_steps(compute, communication):
    at = np.arange(0, 20, 0.5) + 0.25
    busy = [sum((at > a) & (at < b) for a, b in spans) if spans else 0 * at for spans in (compute, communication)]
    return 0.5 * np.sum((busy[1] > 0) & (busy[0] == 0))


def exposed_with_torch(compute, communication):
    hidden = [overlap(span, other) for span in communication for other in compute]
    return torch.tensor([b - a for a, b in communication]).sum() - sum(hidden)


VALUES: dict[str, tuple[list[tuple[Any, ...]], list[tuple[tuple[Any, ...], str]]]] = {
    "01.wire": (
        [*forms(700), (np.int64(700),)],
        [
            ((350,), "one half of it"),
            ((800,), "keeps its own part"),
            ((7e8,), "megabytes"),
            ((12,), "too small"),
            (("700 MB",), "A number is wanted"),
        ],
    ),
    "01.ledger": (
        [*forms(LEDGER), (6.9,)],
        [((44.7,), "no gradient"), ((7.4,), "2³⁰"), ((5.77,), "gradient and two moments")],
    ),
    "02.traffic": (
        forms(3),
        [((2,), "DDP"), ((4,), "reduce-scattered only"), ((1.5,), "Relative to DDP")],
    ),
    "02.hidden": (
        forms(8.8, 13),
        [
            ((14.4, 13), "without prefetch"),
            ((8, 13), "very first all-gather"),
            ((8.8, 12), "after the last all-gather"),
        ],
    ),
    "02.strategy": (
        [
            ({"sharding_strategy": "SHARD_GRAD_OP"},),
            ({"dp_shard": None, "sharding_strategy": "SHARD_GRAD_OP"},),
            ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},),
        ],
        [
            (({"sharding_strategy": "NO_SHARD"},), "does not fit"),
            (({"sharding_strategy": "FULL_SHARD"},), "gathered again in backward"),
            (({"sharding_strategy": "SHARD_ALL"},), "sharding_strategy"),
            (({"sharding_strategy": "NO_SHARD", "mixed_precision": "bf16"},), "Leave mixed_precision"),
        ],
    ),
    "03.flow": (
        [(flow(*answers),) for answers in true_false(False, True, False)],
        [
            ((flow(True, True, False),), "before the vision encoder"),
            ((flow(False, False, False),), "comes after trainable"),
            ((flow(False, True, True),), "comes first"),
            ((flow(False, "True", False),), "without quotes"),
            ((flow(None, True, False),), "'a layer of the vision encoder'"),
        ],
    ),
    "03.mixed": (
        [(MIXED,), (tuple(MIXED),), (set(MIXED),)],
        [
            (([],), "4 more of them"),
            ((["perceiver"],), "is not mixed"),
            (("(root)",), "list of names"),
        ],
    ),
    "03.floor": (
        [*forms(*FLOOR), (26.4, 13.8, 1.05)],
        [
            ((G * (4 * 7.3 + 1.6), 1, 1), "encoder in backward"),
            ((FLOOR[0], G * (14.6 + 1.6), 1), "6 T"),
            ((FLOOR[0] / G, 1, 1), "need not send itself"),
            ((FLOOR[0], FLOOR[1], G * 8 * 0.2), "DDP's 8 T"),
        ],
    ),
    "03.mend": (
        [
            (MENDED | {"frozen_dtype": "bf16"},),
            (MENDED | {"frozen_dtype": "bf16", "auto_wrap_policy": "FROZEN_AWARE", "backend": "FSDP2"},),
            (MENDED | {"frozen_dtype": "bf16", "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},),
        ],
        [
            (({"sharding_strategy": "ALL"},), "sharding_strategy"),
            (({"frozen_policy": "KEEP"},), "sends none of them"),
            (({"frozen_policy": "REPLICATE"},), "how often"),
            (({"backend": "DDP", "mixed_precision": "bf16"},), "Too much to hold"),
            ((MENDED | {"frozen_dtype": "bf16", "auto_wrap_policy": "NO_WRAP"},), "keeps frozen and trainable apart"),
        ],
    ),
    "04.perceiver": (
        [((2, 3, 64, 1024),), ([2, 3, 64, 1024],), (torch.Size([2, 3, 64, 1024]),)],
        [
            (((2, 3, 4, 64, 1024),), "no dimension of frames"),
            (((2, 3, 256, 1024),), "Patches are what goes in"),
            (((2, 64, 1024),), "Four dimensions"),
            (((2, 3, 1024, 64),), "Order"),
        ],
    ),
    "04.gate": (
        [(gate(*answers),) for answers in true_false(True, False, False)],
        [
            ((gate(False, False, False),), "at 0 is 1"),
            ((gate(True, True, False),), "multiplied by tanh(0)"),
            ((gate(True, False, True),), "behind a gate"),
        ],
    ),
    "04.mask": (
        [(MASK,), ([[bool(v) for v in pair] for pair in MASK],), (torch.tensor(MASK),)],
        [
            (([(1, 0), *MASK[1:]],), "no picture to see"),
            ((MASK[:4] + [(1, 1)] * 3,), "cross_attend_all"),
            (([(0, 0), (0, 0), *MASK[2:]],), "itself announces"),
            ((MASK[:6],), "seven pairs"),
        ],
    ),
    "04.overfit": (
        [([2.0, 0.05],), ((2.0, 0.09),), (np.array([2.0, 0.05]),)],
        [(([],), "learning rate first"), (([2.0, 9.0, 5.0],), "too long"), (([2.0, 1.9],), "too slowly")],
    ),
    "04.length": (
        forms(1320, 45),
        [((40, 45), "patches stand in"), ((296, 45), "there are five"), ((1320, 40), "its one"), ((1319, 45), "small")],
    ),
    "05.precision": (
        [*forms(2, 1), (0.5, 1)],
        [((4, 1), "ratio"), ((1, 1), "where fp32 has 4"), ((2, 2), "only if"), ((2, 4), "in which dtype")],
    ),
    "05.recompute": (
        [*forms(100 / 3), (33,)],
        [
            ((50,), "the whole step"),
            ((133.3,), "how much *longer*"),
            ((25,), "relative to the old"),
            ((1 / 3,), "percent"),
        ],
    ),
    "05.accumulate": (
        forms(1, 4),
        [((4, 4), "not gathered again"), ((2, 4), "gathered once"), ((1, 1), "as a whole step")],
    ),
    "05.fits": (
        forms(16),
        [((8,), "more ranks"), ((64,), "32 ranks are enough"), ((12,), "power of two")],
    ),
    "05.bound": (
        [
            (["h100-nvlink", "h100-infiniband", "a100-infiniband"],),
            ({"a100-infiniband", "h100-nvlink", "h100-infiniband"},),
            (("a100-infiniband", "h100-infiniband", "h100-nvlink"),),
        ],
        [
            ((["a100-nvlink"],), "bound by compute with SHARD"),
            ((["h100-nvlink"],), "2 more"),
            ((["h200"],), "is not one of"),
            (("h100-nvlink",), "A list of names"),
        ],
    ),
    "06.sbatch": (
        [(sbatch(),), (sbatch(gpus_per_node=4),), (sbatch(mem="100G"),)],
        [
            ((sbatch(ranks=4),), "--ntasks-per-node=2"),
            ((sbatch(timeout_min=2),), "two hours"),
            ((sbatch(account=None),), "--account=(nothing)"),
            ((sbatch(nodes=...),), "launch.nodes is not filled in"),
        ],
    ),
    "07.contents": (
        [(contents(*answers),) for answers in true_false(True, True, True, True, False, False)],
        [
            ((contents(False, True, True, True, False, False),), "fresh start"),
            ((contents(True, True, False, True, False, False),), "draw numbers"),
            ((contents(True, True, True, True, True, False),), "Each step makes its own"),
            ((contents(True, True, True, True, False, True),), "a checksum"),
        ],
    ),
    "08.class": (
        [
            ("TransformerEncoderLayer",),
            ("torch.nn.modules.transformer.TransformerEncoderLayer",),
            (torch.nn.TransformerEncoderLayer,),
        ],
        [
            (("TransformerEncoder",), "The largest unit"),
            (("Linear",), "stay in the root"),
            (("TransformerEncoderLayer,Linear",), "too many"),
            (("EncoderLayer",), "EncoderLayer"),
            ((12,), "as a string"),
        ],
    ),
    "09.freeze": (
        [
            (["encoders.*", "language_model.*", "projectors.vision.*"],),
            (("*", "!projectors.audio.*"),),
            (["llava_stage1", "projectors.vision.*"],),
        ],
        [
            ((["language_model.*"],), "An encoder trains"),
            ((["llava_stage1"],), "`projectors.*` are two"),
            ((["encoder.*"],), "matches no parameter"),
            ((["encoders.*", "projectors.vision.*"],), "The language model trains"),
        ],
    ),
    "09.lora": (
        forms(8 * (128 + 256)),
        [((8 * 128 * 256,), "thin"), ((1024,), "the second goes back up"), ((32768,), "frozen matrix")],
    ),
    "09.labels": (
        [(TOKENS, answers) for answers in true_false(*LEARNED)],
        [
            ((TOKENS, [True] * 7), "Before the first picture"),
            ((TOKENS, [False, True, True, True, True, True, True]), "does not predict"),
            ((TOKENS, [False, False, True, False, False, True, False]), "when to stop"),
            ((TOKENS, [False, False, True, True, False, False, True]), "'blue'"),
        ],
    ),
    "09.prompt": (
        [
            (SHOTS.format("circles", "hearts"), "stars"),
            (SHOTS.format("circles", "hearts").replace("<image> ", "<image>"), "stars"),
            (SHOTS.format("circles ", "hearts ") + " ", "stars"),
        ],
        [
            (("<image> circles<image> hearts<image>", ""), "ends with `<|endofchunk|>`"),
            ((SHOTS.format("red", "black"), "blue"), "goes on with a color"),
            ((SHOTS.format("circles", "hearts") + " stars", ""), "Leave the last"),
            (("<image>", ""), "three pictures"),
        ],
    ),
    "10.exposed": (
        [(exposed_by_sums,), (exposed_by_small_steps,), (exposed_with_torch,)],
        [
            ((lambda compute, talk: sum(b - a for a, b in talk),), "all the communication"),
            ((lambda compute, talk: None,), "returns nothing"),
            ((lambda compute, talk: max(0, talk[-1][1] - compute[-1][1]),), "IndexError"),
        ],
    ),
    "10.gain": (
        [*forms(100 * 30 / 330), (9,)],
        [((60.6,), "no shorter"), ((15,), "of the *step*"), ((10,), "not of 300")],
    ),
    "10.tokens": (
        forms(2048),
        [((512,), "bound by the network"), ((65536,), "Half as many"), ((1000,), "power of two")],
    ),
    "10.cache": (
        forms(1e6 * 256 * 1024 * 2 / 1e9),
        [((1048.6,), "not 4"), ((2.048,), "256 tokens"), ((488.3,), "GiB")],
    ),
}
"""(Right answers, [(wrong answer, words of its hint)]) of exercises that check a value."""

SECOND_EXCHANGE = """    if rank == 0:
        dist.send(halves[mine], dst=other)
        dist.recv(halves[other], src=other)
    else:
        theirs = torch.empty_like(halves[other])
        dist.recv(theirs, src=other)
        dist.send(halves[mine], dst=other)
        halves[other] = theirs"""
REDUCE_SCATTER = "dist.reduce_scatter_tensor(part, grad.contiguous())"
ROW = "row = (torch.arange(shard.numel()) + rank * shard.numel()) // WIDTH\nkeep = (row >= 6).float()"
EVAL = """with torch.no_grad():  # every rank: each forward gathers, and an all-gather needs all of them
    loss = net(x).square().mean()"""
TEXT = "x = text + (seen if pictures is not None else 0 * seen)"
LOAD = 'set_model_state_dict(resumed, state["model"])'
ZERO = "    frozen.requires_grad_(False).zero_grad()  # or clear frozen's gradients, too; best never to compute them\n"
MIN = "dist.all_reduce(finite, op=dist.ReduceOp.MIN)"
FINITE = "finite = torch.isfinite(grad).all().float()\n    " + MIN
CLIP = "torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)"
EACH = "for layer in net:\n    torch.nn.utils.clip_grad_norm_(layer.parameters(), {})"

CODE: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str, str]]]] = {
    "01.ring": (
        [
            (SECOND_EXCHANGE, "    # no dist.all_reduce here\n" + SECOND_EXCHANGE),
            (
                SECOND_EXCHANGE,
                "    sent = dist.isend(halves[mine], dst=other)\n"
                "    dist.recv(halves[other], src=other)\n    sent.wait()",
            ),
            (
                SECOND_EXCHANGE,
                "    sent = dist.P2POp(dist.isend, halves[mine], other)\n"
                "    received = dist.P2POp(dist.irecv, halves[other], other)\n"
                "    for work in dist.batch_isend_irecv([sent, received]):\n        work.wait()",
            ),
        ],
        [
            (
                "        dist.send(halves[mine], dst=other)\n        dist.recv(halves[other], src=other)",
                "        pass",
                "deadlocked",
            ),
            ("halves[mine] = halves[mine] + got", "pass", "is [0"),
            (SECOND_EXCHANGE, "", "not of the other one"),
            ("%%ranks 2", "%%ranks 1", "is for 2 ranks"),
            ("total = ring_sum(x)", "dist.all_reduce(x)\ntotal = x", "no `all_reduce`"),
            (SECOND_EXCHANGE, "    dist.all_gather(halves, halves[mine].clone())", "no `all_gather`"),
            (
                SECOND_EXCHANGE,
                "    halves[other] = torch.arange(6.0).chunk(2)[other] * 3",
                "Right for this x only",
            ),
            ("total = ring_sum(x)", "total = torch.arange(6.0) * 3\ndel ring_sum", "'ring_sum' is not defined"),
            ("theirs = torch.empty_like", "theirs = torch.emty_like", "Rank 1 failed: AttributeError"),
            ("got = torch.empty_like(halves[mine])", "got = torch.empty(2)", "different shapes"),
        ],
    ),
    "01.ddp": (
        [
            (
                "dist.all_reduce(p.grad)\n        p.grad /= world_size",
                "p.grad /= world_size\n        dist.all_reduce(p.grad)",
            ),
            ("dist.broadcast(p.data, src=0)", "with torch.no_grad():\n                dist.broadcast(p, src=0)"),
        ],
        [
            ("dist.broadcast(p.data, src=0)", "pass", "broadcast is missing"),
            ("        dist.all_reduce(p.grad)\n", "", "drift apart"),
            ("p.grad /= world_size", "pass", "twice too long"),
            ("dist.all_reduce(p.grad)", "dist.all_reduce(p.gradient)", "AttributeError"),
        ],
    ),
    "02.gather": (
        [
            (REDUCE_SCATTER, "dist.all_reduce(grad)\n        part = grad.chunk(world_size)[rank]"),
            (REDUCE_SCATTER, "dist.reduce_scatter(part, list(grad.chunk(world_size)))"),
        ],
        [
            ("return part / world_size", "return part", "is the sum"),
            (REDUCE_SCATTER, "pass", "still zero"),
            (REDUCE_SCATTER, "part = grad.chunk(2)[rank] * 2", "own gradient"),
        ],
    ),
    "08.clip": (
        [
            (CLIP, "torch.nn.utils.clip_grad_norm_([p for layer in net for p in layer.parameters()], 1.0)"),
            (CLIP, "total = direction.norm()\nfor p in net.parameters():\n    p.grad /= total"),
        ],
        [
            (CLIP, EACH.format(1.0), "each clipped to 1"),
            (CLIP, EACH.format(0.5), "points elsewhere"),
            (CLIP, "torch.nn.utils.clip_grad_value_(net.parameters(), 1.0)", "together"),
        ],
    ),
    "08.mask": (
        [
            (
                ROW,
                "begin = rank * shard.numel()\nkeep = torch.zeros(ROWS, WIDTH)\nkeep[6:] = 1\n"
                "keep = keep.flatten()[begin : begin + shard.numel()]",
            ),
            (ROW, "keep = torch.zeros_like(grad)\nif rank == 1:\n    keep[2 * WIDTH :] = 1"),
        ],
        [
            (ROW, "keep = torch.zeros_like(grad)\nkeep[[6, 7]] = 1", "the shard is flat"),
            (" + rank * shard.numel()", "", "starts at 0 again"),
            ("(row >= 6)", "(row >= 5)", "only 6 and 7"),
            (ROW, "keep = torch.zeros_like(grad)\nkeep[[8, 12]] = rank", "only in part"),
        ],
    ),
    "08.stale": (
        [
            (ZERO, "    frozen.zero_grad()\n"),
            (ZERO, "    for p in frozen.parameters():\n        p.grad = None\n"),
        ],
        [
            (ZERO, "", "Still growing"),
            (ZERO, "    trained.requires_grad_(False)\n    frozen.zero_grad()\n", "no gradient"),
            (ZERO, "    frozen.zero_grad()\n    x = x * 0\n", "this `x`"),
            (ZERO, "    frozen.zero_grad()\n    norms.clear()\n", "leave `norms`"),
            (
                ZERO,
                "    optimizer = torch.optim.SGD([*frozen.parameters(), *trained.parameters()], lr=0.0)\n"
                "    optimizer.zero_grad()\n",
                "would change them",
            ),
        ],
    ),
    "08.resume": (
        [
            (LOAD, 'resumed.load_state_dict(state["model"])  # what was trained'),
            (
                LOAD,
                "with torch.no_grad():\n    for name, p in resumed.named_parameters():\n"
                '        p.copy_(state["model"][name])',
            ),
        ],
        [
            (LOAD, "pass", "its own initial weights"),
            (LOAD, "resumed = sharded(1)", "After a crash"),
            (LOAD, 'resumed.weight.data.copy_(state["model"]["weight"])', "a weight and a bias"),
            (LOAD, "set_model_state_dict(trained, get_model_state_dict(resumed))", "has changed"),
            (LOAD, "set_model_state_dict(resumed, state)", "Rank 0 failed"),
        ],
    ),
    "08.eval": (
        [
            (EVAL, "loss = net(x).square().mean().detach()"),
            (EVAL, "net.eval()\nwith torch.no_grad():\n    loss = net(x).square().mean()\ndist.broadcast(loss, src=0)"),
        ],
        [
            ("save(loss=loss)", "save(loss=loss * 0)", "that of the data"),
            ("net(x).square()", "nett(x).square()", "NameError"),
            ("save(loss=loss)", "pass", "without a `save"),
            (EVAL, "loss = net(x).square().mean().detach() if rank == 0 else x.mean()", "Who must call"),
        ],
    ),
    "08.text": (
        [
            (TEXT, "x = text + seen * (pictures is not None)"),
            (TEXT, "x = text + seen if pictures is not None else text + 0 * seen.sum()"),
        ],
        [
            (TEXT, "x = text + seen", "has changed"),
            (TEXT, "x = text + 0 * seen", "must count"),
            (TEXT, TEXT.replace("seen if", "2 * seen if"), "Rank 0's output"),
            (TEXT, "x = text if pictures is None else text + seen", "wait for each other"),
        ],
    ),
    "08.scaler": (
        [
            (MIN, "dist.all_reduce(finite)\n    finite = finite == world_size"),
            (
                MIN,
                "flags = torch.zeros(world_size)\n    dist.all_gather_into_tensor(flags, finite[None])\n"
                "    finite = flags.all()",
            ),
        ],
        [
            (FINITE, "finite = torch.isfinite(grad).all()", "one rank stepped"),
            (MIN, "dist.broadcast(finite, src=1)", "Step 1"),
            (MIN, "finite = torch.zeros(())", "Step 2"),
            (MIN, "finite = overflows is None", "only makes the example"),
        ],
    ),
}
"""(Changes of the solution that stay right, [(a change, words of its hint)]) of exercises that check a `%%ranks` cell;
a change is text of the solution and what stands in its place."""

Step = tuple[str, str, str | None]


def copies(name: str, wrong: dict[str, str], *right: str) -> list[Step]:
    """Steps in which a run is missing, and then is there as a copy of another one, with changes."""
    words = wrong | dict.fromkeys(right)
    return [("", "", f"no run {name!r}"), *((f"copied({name!r}, {change})", "", words[change]) for change in words)]


RUNS: dict[str, list[Step]] = {
    "06.drill": copies(
        "drilled", {"": "was not drilled", "drilled_at=2, loss=1e-6": "losses differ"}, "drilled_at=2", "drilled_at=5"
    ),
    "06.sweep": [
        ("", "1e-2", "no sweep named"),
        ("start_sweep()", "1e-2", "`.wait()`"),
        ("wait_for_sweep()", "1e-4", "Another rate ends lower"),
        ("", "lowest['loss']", "That is its loss"),
        ("", "lowest", "a whole row"),
        ("", "lowest['name']", "Give one of"),
        ("", "np.float64(lowest['train.lr'])", None),
        ("", "torch.tensor(lowest['train.lr'])", None),
    ],
    "07.resume": copies("stopped", {"steps=4": "4 of 8 steps", "loss=1e-6": "losses differ"}, "", "drilled_at=6"),
    "07.reshard": copies(
        "resharded",
        {
            "strategy='SHARD_GRAD_OP'": "one was asked for",
            "ranks=1": "Its strategy is FULL_SHARD",
            "ranks=1, strategy='SHARD_GRAD_OP', steps=4": "has not completed",
        },
        "ranks=1, strategy='SHARD_GRAD_OP'",
        "ranks=1, strategy='SHARD_GRAD_OP', backend='FSDP1'",
    ),
    "07.damage": [
        ("", "'step_00000008'", "the damaged one"),
        ("", "'step_00000002'", "a newer one is"),
        ("", "'step 6'", "Read the end"),
        ("", "'step_00000006'", None),
        ("", "whole.path / 'checkpoints' / 'step_00000006'", None),
    ],
}
"""Steps of exercises that check runs: (what is done, what `check` is given, words of the hint or None if right). The
runs are copies of one that two ranks made; the solutions themselves run in tests/notebooks."""
