"""Loops of people's own on two ranks: evaluations between and inside steps, what train_step takes, and mistakes."""

import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import transformers
from ranks import on_ranks, printed_by_ranks
from tiny import Mapping, tiny_batch, tiny_flamingo
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from mmfsdp.core.freeze import freeze
from mmfsdp.core.inference import keep_gathered
from mmfsdp.core.model_record import plan_of
from mmfsdp.core.names import plain_name
from mmfsdp.core.step import train_step
from mmfsdp.core.wrap import apply_plan
from mmfsdp.kit.train.meters import Collectives
from mmfsdp.params import FSDPParams, ParamError
from mmfsdp.planning import make_plan, plan_on_rank_0, wrap_fsdp
from mmfsdp.predict.plan_cache import PlanCache
from tests import pages

pytestmark = pytest.mark.real

RANKS = 2
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
FROZEN = {
    "all but head and norm": ["model.*", "!model.norm.weight"],
    "all but layer 1, head and norm": ["model.embed_tokens.*", "model.layers.0.*"],
    "all but the first MLP": ["*", "!model.layers.0.mlp.*"],
    "nothing": [],
}
KEEP = {"frozen_policy": "KEEP", "sharding_strategy": "SHARD_GRAD_OP"}
WAYS = {
    "FSDP2": {},
    "FSDP2 keep": KEEP,
    "FSDP2 replicate": {"frozen_policy": "REPLICATE"},
    "FSDP2 one unit": {"auto_wrap_policy": "NO_WRAP"},
    "FSDP1": {"backend": "FSDP1"},
    "FSDP1 keep": {"backend": "FSDP1", **KEEP},
    "FSDP1 flat": {"backend": "FSDP1", "use_orig_params": False},
    "DDP": {"backend": "DDP"},
    "no shard": {"sharding_strategy": "NO_SHARD"},
}
COMBINATIONS = {
    f"{way}, frozen: {frozen}": (frozen, way)
    for frozen in FROZEN
    for way in WAYS
    # FSDP1 makes one flat parameter of frozen and trainable ones only if a unit has one kind.
    if (frozen, way) != ("all but head and norm", "FSDP1 flat")
}


def llama(frozen: str) -> nn.Module:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    freeze(model, FROZEN[frozen])
    return model


def inputs_of(seed: int) -> dict[str, torch.Tensor]:
    """Two texts of which every token is a label."""
    ids = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def evaluated(model: nn.Module) -> float:
    """A held-out loss, as people compute it."""
    model.eval()
    with torch.no_grad():
        loss = model(**inputs_of(99)).loss.item()
    model.train()
    if isinstance(model, FSDPModule):
        assert all(isinstance(p, DTensor) for p in model.parameters() if p.requires_grad)
    return loss


def loop(model: nn.Module, ranks: list[int]) -> list[float]:
    """The losses of a loop with an evaluation wherever one can stand. ranks: whose data this process has."""
    losses = [evaluated(model)]
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)

    def mean_loss(step: int) -> torch.Tensor:
        return torch.stack([model(**inputs_of(10 * step + rank)).loss for rank in ranks]).mean()

    for step in range(2):
        losses.append(train_step(model, [Mapping(inputs_of(10 * step + rank)) for rank in ranks], optimizer).loss)
        losses.append(evaluated(model))
    # Between backward and step: what was gathered for this evaluation is old after the step.
    mean_loss(2).backward()
    losses.append(evaluated(model))
    optimizer.step()
    optimizer.zero_grad()
    losses.append(evaluated(model))
    # Between forward and backward: backward must gather again what the evaluation has freed.
    loss = mean_loss(3)
    losses.append(evaluated(model))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(evaluated(model))
    return losses


RECORDED = PlanCache()
"""Recordings of `llama`: most ways to wrap it compute the same."""


def wrapped_llama(frozen: str, fields: dict) -> nn.Module:
    """Wrap the model as `wrap_fsdp` does, with what was recorded of it before."""
    model = llama(frozen)
    make = partial(make_plan, model, FSDPParams(**fields), world_size=RANKS, example=inputs_of(0), cache=RECORDED)
    return apply_plan(model, plan_on_rank_0(model, make))


def own_loops() -> dict:
    rank, example = torch.distributed.get_rank(), tiny_batch().inputs()
    found: dict = {"losses": {}}
    for name, (frozen, way) in COMBINATIONS.items():
        found["losses"][name] = loop(wrapped_llama(frozen, WAYS[way]), [rank])
    found["sent in a step"] = {way: sent_with_evaluations(fields) for way, fields in WAYS.items()}
    found["gathers"] = gathers_of_forwards()
    found["prefetched"] = after_part_of_a_forward(wrap_fsdp(tiny_flamingo(), FSDPParams(**PREFETCH), example=example))
    found["not optimized"] = not_optimized()
    found["outputs"] = {
        f"{way}, {form}": steps_of(form, WAYS[way]) for way in ("FSDP1", "FSDP2", "DDP") for form in FORMS
    }
    found["micro-batches"] = micro_batches_of_ranks()
    found["parts first"] = {way: parts_first(WAYS[way]) for way in ("FSDP1", "FSDP2", "FSDP2 replicate", "DDP")}
    found["troubles"] = {}
    for way in TROUBLED_WAYS:
        with pytest.MonkeyPatch.context() as patch:
            if "older torch" in way:
                patch.delattr(FSDPModule, "reset_iter_state", raising=False)  # as before torch 2.14
            found["troubles"][way] = losses_after_troubles(way, [rank])
    found["DDP after an error"] = ddp_after_an_error()
    found["first in inference mode"] = first_in_inference_mode()
    found["frozen later"] = {way: frozen_later(way) for way in ("FSDP1", "FSDP2", "DDP", "plain DDP")}
    return found


def sent_with_evaluations(fields: dict) -> list[list]:
    """What a step sends: after no evaluation, after two, and after a forward without a backward."""
    model = wrapped_llama("all but layer 1, head and norm", fields)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)

    def sent() -> list:
        counted.reset()
        train_step(model, [Mapping(inputs_of(0))], optimizer)
        return sorted([row.kind, row.phase, row.count, row.wire_bytes] for row in counted.rows())

    with Collectives() as counted:
        sent()
        sent()  # in its second step DDP sends its new order of buckets
        rows = [sent()]
        evaluated(model)
        evaluated(model)
        rows.append(sent())
        model(**inputs_of(0))
        rows.append(sent())
    return rows


def gathers_of_forwards() -> list[list[int]]:
    """The all-gathers of one forward, of four that may share what they gather, and of the units freed after each."""
    model, prompt = wrap_fsdp(tiny_flamingo(), FSDPParams(**KEEP), example=tiny_batch().inputs()), tiny_batch()
    freed = [unit.name for unit in plan_of(model).gathered_units if unit.reshard_after_forward]
    counts: list[list[int]] = [[], []]
    with Collectives() as counted:
        for number in (1, 4):
            counted.reset()
            model.generate(prompt.input_ids, media=prompt.media, max_new_tokens=number, min_new_tokens=number)
            counts[0].append(sum(row.count for row in counted.rows() if row.kind == "all-gather"))
            counted.reset()
            with torch.no_grad(), keep_gathered(model):
                for _ in range(number):
                    model(**prompt.inputs())
            counts[1].append(sum(row.count for row in counted.rows() if row.kind == "all-gather"))
    counts[0].append(len([name for name in freed if name.startswith("language")]))  # pictures are encoded once
    counts[1].append(len(freed))
    return counts


PREFETCH = {"forward_prefetch": True}


def after_part_of_a_forward(model: nn.Module) -> float:
    """The loss after a step, between backward and update of which only pictures were encoded.

    The encoder's last unit starts the all-gather of the next one, which that forward does not use.
    """
    inputs = tiny_batch().inputs()
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model(**inputs).loss.backward()
    with torch.no_grad():
        model(media=inputs["media"], features_only=True)
    optimizer.step()
    with torch.no_grad():
        return model(**inputs).loss.item()


def not_optimized() -> list[str]:
    """What is said of optimizers that lack something: one made after a forward with gradients, others by intention."""
    texts = []
    for frozen, left_out in (("all but layer 1, head and norm", "lm_head"), ("nothing", "layers")):
        model = wrapped_llama(frozen, {})
        optimizer = SGD([p for name, p in model.named_parameters() if p.requires_grad and left_out not in name], lr=1)
        texts.append(refusal(model, optimizer, [inputs_of(0)]))
    model = wrapped_llama("all but layer 1, head and norm", {})
    model(**inputs_of(0))  # leaves head and norm gathered
    texts.append(refusal(model, SGD([p for p in model.parameters() if p.requires_grad], lr=1), [inputs_of(0)]))
    return texts


def refusal(model: nn.Module, optimizer: SGD, batches: list) -> str:
    with pytest.raises(ParamError) as error:
        train_step(model, batches, optimizer)
    return str(error.value)


FORMS = {
    "object": lambda output: output,
    "dict": lambda output: {"loss": output.loss, "logits": output.logits},
    "tuple": lambda output: (output.loss, output.logits),
    "loss": lambda output: output.loss,
}


class Returning(nn.Module):
    """A model with an output of another form."""

    def __init__(self, model: nn.Module, form: str):
        super().__init__()
        self.model, self.form = model, form

    def forward(self, **inputs):
        return FORMS[self.form](self.model(**inputs))


def steps_of(form: str, fields: dict | None) -> list[list[float]]:
    """Loss, gradient norm and samples of two steps over mappings, of unequal size on the ranks. fields: None for one
    process, which has the data of all ranks."""
    model: nn.Module = Returning(llama("all but layer 1, head and norm"), form)
    ranks = range(RANKS)
    if fields is not None:
        model = wrap_fsdp(model, FSDPParams(**fields), example=inputs_of(0))
        ranks = [torch.distributed.get_rank()]
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    figures = []
    for step in range(2):
        batches = [{key: value[rank:] for key, value in inputs_of(10 * step + rank).items()} for rank in ranks]
        metrics = train_step(model, batches, optimizer)
        figures.append([metrics.loss, metrics.grad_norm, metrics.samples])
    return figures


def micro_batches_of_ranks() -> list[str]:
    """What is said where a rank has one micro-batch more, or none, or other sources: within seconds, on all ranks."""
    rank, texts = torch.distributed.get_rank(), []
    model = wrapped_llama("all but layer 1, head and norm", {})
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=1)
    other_source = Mapping(inputs_of(0))
    other_source.source = f"data {rank}"
    for batches in ([inputs_of(0)] * (1 + rank), [inputs_of(0)] * rank, [], [other_source]):
        texts.append(refusal(model, optimizer, batches))
    train_step(model, [inputs_of(0)], optimizer)  # the ranks are still in step
    return texts


def parts_first(fields: dict) -> list:
    """What two parts return or say before the first forward of the whole, and one of them after it."""
    model = wrapped_llama("all but head and norm", fields)
    inner = getattr(model, "module", model)
    ids = inputs_of(0)["input_ids"]
    found = []
    with torch.no_grad():
        for part, inputs in ((inner.model, ids), (inner.model.layers[1].mlp, torch.ones(1, 2, 16))):
            try:
                found.append(float(part(inputs)[0].sum()))
            except ParamError as error:
                found.append(str(error))
        model(**inputs_of(0))
        found.append(float(inner.model(ids)[0].sum()))
    return found


class Stop(Exception):
    """Stands for an error that a loop catches, such as one for too little memory."""


def part_of(model: nn.Module, wanted: str) -> nn.Module:
    return next(module for name, module in model.named_modules() if plain_name(name, model) == wanted)


def stop(*_):
    raise Stop


@contextmanager
def stopped_forward(model: nn.Module, name: str):
    """Inside, the forward of a part raises, and the error is caught."""
    handle = part_of(model, name).register_forward_pre_hook(stop)
    with pytest.raises(Stop):
        yield
    handle.remove()


@contextmanager
def stopped_backward(model: nn.Module, name: str, micro_batch: int = 0):
    """Inside, the backward of a part raises in one micro-batch, and the error is caught."""
    forwards = []

    def stop_in_backward(module, inputs, output):
        forwards.append(name)
        if output.requires_grad and len(forwards) == micro_batch + 1:
            output.register_hook(stop)

    handle = part_of(model, name).register_forward_hook(stop_in_backward)
    with pytest.raises(Stop):
        yield
    handle.remove()


def call_part(model: nn.Module, grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        part_of(model, "model")(inputs_of(5)["input_ids"])


def stop_forward(model: nn.Module, name: str, grad: bool) -> None:
    with torch.set_grad_enabled(grad), stopped_forward(model, name):
        model(**inputs_of(5))


def stop_backward(model: nn.Module, name: str) -> None:
    with stopped_backward(model, name):
        model(**inputs_of(5)).loss.backward()
    model.zero_grad()


def stop_step(model: nn.Module, name: str, micro_batch: int) -> None:
    """Stop a train_step of two micro-batches; nothing is done about its gradients."""
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    with stopped_backward(model, name, micro_batch):
        train_step(model, [inputs_of(5), inputs_of(6)], optimizer)


def stop_micro_batch(model: nn.Module, name: str) -> None:
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    with stopped_forward(model, name):
        train_step(model, [inputs_of(5)], optimizer)


TROUBLES = {
    "a part was called under no_grad": partial(call_part, grad=False),
    "a part was called": partial(call_part, grad=True),
    "an error in a forward": partial(stop_forward, name="model.layers.1.mlp", grad=True),
    "an error in the norm": partial(stop_forward, name="model.norm", grad=True),
    "an error in an evaluation": partial(stop_forward, name="model.norm", grad=False),
    "an error in a step's forward": partial(stop_micro_batch, name="lm_head"),
}
AFTER_BACKWARD = ("a part was called under no_grad", "an error in a forward", "an error in an evaluation")
IN_BACKWARD = {
    "an error in a backward": partial(stop_backward, name="model.layers.1.mlp"),
    "an error at the end of a backward": partial(stop_backward, name="model.layers.0.mlp"),
    "an error in a step's first backward": partial(stop_step, name="model.layers.1.mlp", micro_batch=0),
    "an error in a step's last backward": partial(stop_step, name="model.norm", micro_batch=1),
}
TROUBLED_WAYS = {
    "FSDP2": {},
    "FSDP2 keep, older torch": KEEP,
    "FSDP2 checkpointed": {"activation_checkpointing": "all"},
    "FSDP1": WAYS["FSDP1"],
    "FSDP1 keep": WAYS["FSDP1 keep"],
    "DDP": WAYS["DDP"],
}


def losses_after_troubles(way: str | None, ranks: list[int]) -> dict[str, list[float]]:
    """The losses of a step by train_step and of one by hand, and an evaluation, after each trouble.

    way: None for one process without any trouble.
    """
    model = llama("nothing")
    troubles = TROUBLES | IN_BACKWARD
    if way is not None:
        model = wrap_fsdp(model, FSDPParams(**TROUBLED_WAYS[way]), example=inputs_of(0))
        if isinstance(model, DistributedDataParallel):
            troubles = TROUBLES  # after an error in backward, DDP itself raises in the next forward
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = {}
    seed = 0

    def inputs() -> list[dict]:
        return [inputs_of(seed + rank) for rank in ranks]

    train_step(model, inputs(), optimizer)
    for name, trouble in troubles.items():
        losses[name] = []
        for by_hand in (False, True):
            if way is not None:
                trouble(model)
            seed += 10
            if by_hand:
                for micro_batch in inputs():
                    (model(**micro_batch).loss / len(ranks)).backward()
                if way is not None and name in AFTER_BACKWARD:
                    trouble(model)  # what it has gathered is old after the step
                optimizer.step()
                optimizer.zero_grad()
            else:
                losses[name].append(train_step(model, inputs(), optimizer).loss)
        losses[name].append(evaluated(model))
    return losses


@cache
def losses_without_troubles() -> dict[str, list[float]]:
    """Those of one process with the data of all ranks."""
    return losses_after_troubles(None, list(range(RANKS)))


def ddp_after_an_error() -> str:
    model = wrap_fsdp(llama("nothing"), FSDPParams(**WAYS["DDP"]), example=inputs_of(0))
    stop_backward(model, "model.layers.1.mlp")
    with pytest.raises(RuntimeError) as error:
        model(**inputs_of(0))
    return str(error.value)


def first_in_inference_mode() -> str:
    model = wrapped_llama("nothing", {})
    with pytest.raises(ParamError) as error, torch.inference_mode():
        model(**inputs_of(0))
    return str(error.value)


def frozen_later(way: str) -> str | float:
    """What a step says, or its loss, where a parameter has been frozen since the model was wrapped."""
    model = llama("nothing")
    if way == "plain DDP":
        model = DistributedDataParallel(model)
    else:
        model = wrap_fsdp(model, FSDPParams(**WAYS[way]), example=inputs_of(0))
    for name, p in model.named_parameters():
        p.requires_grad_("lm_head" not in name)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    try:
        train_step(model, [inputs_of(0)], optimizer)
        return train_step(model, [inputs_of(1)], optimizer).loss
    except ParamError as error:
        return str(error)


@pytest.fixture(scope="module")
def two_ranks() -> list[dict]:
    return on_ranks(own_loops, RANKS)


@pytest.mark.parametrize("case", COMBINATIONS)
def test_evaluations_change_nothing(two_ranks, case):
    frozen, _ = COMBINATIONS[case]
    wanted = loop(llama(frozen), list(range(RANKS)))
    for rank in two_ranks:
        assert rank["losses"][case] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("way", TROUBLED_WAYS)
def test_a_step_after_a_call_of_a_part_or_a_caught_error_is_as_without_it(two_ranks, way):
    wanted = losses_without_troubles()
    for rank in two_ranks:
        losses = rank["troubles"][way]
        assert len(losses) >= len(TROUBLES)
        for name in losses:
            assert losses[name] == pytest.approx(wanted[name], rel=1e-5), name


def test_ddp_says_itself_that_a_backward_has_failed(two_ranks):
    for rank in two_ranks:
        assert "Expected to have finished reduction in the prior iteration" in rank["DDP after an error"]


def test_a_first_forward_in_inference_mode_is_refused(two_ranks):
    for rank in two_ranks:
        assert "model: its first forward cannot be under torch.inference_mode()" in rank["first in inference mode"]


@pytest.mark.parametrize("way", WAYS)
def test_a_step_after_an_evaluation_sends_as_much_as_any(two_ranks, way):
    plain, after_evaluations, after_forward = two_ranks[0]["sent in a step"][way]
    assert after_evaluations == plain
    assert after_forward == plain


def test_generation_and_a_shared_evaluation_gather_once(two_ranks):
    for one, four, freed_each_time in two_ranks[0]["gathers"]:
        assert four == one + 3 * freed_each_time
        assert one > freed_each_time


def test_an_all_gather_that_no_forward_used_is_not_used_after_the_step(two_ranks):
    wanted = after_part_of_a_forward(tiny_flamingo())
    for rank in two_ranks:
        assert rank["prefetched"] == pytest.approx(wanted, rel=1e-5)


def test_each_parameter_that_the_optimizer_lacks_is_named(two_ranks):
    for rank in two_ranks:
        one, many, whole = rank["not optimized"]
        assert "optimizer: lm_head.weight: trainable, but not given to the optimizer" in one
        for layer in (0, 1):
            assert f"model.layers.{layer}.mlp.up_proj.weight, " in many
        assert "model.norm.weight, lm_head.weight: trainable, but not given to the optimizer" in whole


@pytest.mark.parametrize("way", ["FSDP1", "FSDP2", "DDP"])
@pytest.mark.parametrize("form", FORMS)
def test_mappings_and_outputs_of_any_form_train_alike(two_ranks, way, form):
    wanted = steps_of("object", None)
    assert wanted[0][2] == 3, "rank 1 has one sample of two"
    for rank in two_ranks:
        for figures, expected in zip(rank["outputs"][f"{way}, {form}"], wanted, strict=True):
            assert figures == pytest.approx(expected, rel=1e-5)


def test_other_numbers_of_micro_batches_are_told_by_rank_and_number(two_ranks):
    for rank in two_ranks:
        more, none, empty, other_source = rank["micro-batches"]
        assert "micro_batches: rank 1 has 2, the others have 1; every rank must have the same number" in more
        assert "micro_batches: rank 1 has 1, the others have 0; every rank" in none
        assert "micro_batches: is empty" in empty
        assert "rank 1 has the sources data 1, rank 0 has data 0; every rank must have the same" in other_source


def test_a_sharded_part_called_before_the_whole_model_is_told_what_to_do(two_ranks):
    with torch.no_grad():
        plain = llama("all but head and norm").model
        whole = float(plain(inputs_of(0)["input_ids"])[0].sum())
        mlp = float(plain.layers[1].mlp(torch.ones(1, 2, 16))[0].sum())
    for rank in two_ranks:
        for way, (of_model, of_mlp, after) in rank["parts first"].items():
            assert after == pytest.approx(whole, rel=1e-4)
            if way in ("FSDP1", "FSDP2"):
                assert "model: model.layers.1.mlp was called before the first forward of the whole model" in of_mlp
            else:  # every rank has all of it
                assert of_mlp == pytest.approx(mlp, rel=1e-4)
            if way == "DDP":
                assert of_model == pytest.approx(whole, rel=1e-4)
            else:
                assert "model: model was called before the first forward of the whole model" in of_model


def test_freezing_after_wrapping_is_told_by_ddp_and_done_by_fsdp(two_ranks):
    for rank in two_ranks:
        found = rank["frozen later"]
        assert "lm_head.weight: trainable when the plan was made, frozen now, and DDP waits" in found["DDP"]
        assert "model: 20 parameters train, and when DDP wrapped the model 21 did" in found["plain DDP"]
        assert found["FSDP1"] == pytest.approx(found["FSDP2"], rel=1e-5)


SCRIPT = pages.PAGES / "own_loop.py"
EPOCH = re.compile("^epoch .*$", flags=re.M)


def run_script(folder: Path, epochs: int) -> list[str]:
    """Run the page's script on two ranks as it says; return what it prints, a line for each epoch."""
    # --standalone lets torchrun choose a free port.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", SCRIPT]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(epochs)], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return EPOCH.findall(done.stdout)


def test_the_script_of_the_page_trains_evaluates_saves_and_resumes(tmp_path):
    first, second = run_script(tmp_path, 2)
    accuracies = [float(line.split()[-1]) for line in (first, second)]
    assert first.startswith("epoch 1 step 4 ")
    assert second.startswith("epoch 2 step 8 ")
    assert 0 <= accuracies[0] < accuracies[1] <= 1
    # Without the second epoch's checkpoint the same figures come again.
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000008")
    printed = printed_by_ranks(SCRIPT, tmp_path, "2", ranks=RANKS)
    assert [EPOCH.findall(text) for text in printed] == [[second], []]
