"""`python -m tests.bench.peaks --draws 200`: predicted peaks beside those of real ranks, for drawn configurations."""

from __future__ import annotations

import argparse
import gc
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mmfsdp.core.plan import WrapPlan
from mmfsdp.core.step import train_step
from mmfsdp.core.wrap import apply_plan
from mmfsdp.kit.bench.bench_models import random_batch, random_model
from mmfsdp.kit.data.batch import Batch
from mmfsdp.kit.models import TokenIds
from mmfsdp.kit.spawn_ranks import on_ranks
from mmfsdp.kit.train.cpu_memory import cpu_memory
from mmfsdp.kit.train.evaluate import HeldOut
from mmfsdp.kit.train.meters import OPERATORS, Collectives
from mmfsdp.kit.train.optimizer import build_optimizer
from mmfsdp.params import BackboneParams, FSDPParams, ModelKind, ModelParams, ParamError, TrainParams
from mmfsdp.planning import make_plan
from mmfsdp.predict import Estimate, estimate
from tests.parity import bytes_held, local

WORDS, LENGTH = 1000, 24
VISION = {"image_size": 32, "patch_size": 8, "width": 96, "layers": 1, "head_width": 32}
LANGUAGE = {"model_type": "llama", "hidden_size": 160, "intermediate_size": 440, "num_hidden_layers": 3}
LANGUAGE |= {"num_attention_heads": 4, "vocab_size": WORDS}


KINDS = {"flamingo": ModelKind.FLAMINGO, "projector": ModelKind.MULTIMODAL}


def build(model: str) -> nn.Module:
    """Return a small Flamingo, or an encoder, a projector and a language model, frozen as by default."""
    params = ModelParams(
        kind=KINDS[model],
        vision=BackboneParams(source="open_clip", config={"embed_dim": 64, "vision_cfg": VISION}),
        language=BackboneParams(config=LANGUAGE),
        cross_attention_every=2,
        num_latents=8,
        perceiver_depth=1,
        attention_heads=4,
        attention_head_dim=32,
    )
    return random_model(params)


def batch_of(model: str, *, source: str = "data") -> Batch:
    """Return two samples of one picture each."""
    if model == "projector":
        batch = random_batch(WORDS, WORDS, (2, LENGTH), 32, seed=0, placeholders=16)
    else:
        batch = random_batch(WORDS, TokenIds.after(WORDS).image, (2, LENGTH), 32, seed=0)
    return replace(batch, source=source)


@dataclass(frozen=True)
class Case:
    """One configuration to measure."""

    model: str
    fsdp: dict[str, Any]
    micro_steps: int = 1
    sources: int = 1

    def __str__(self) -> str:
        choices = [self.model, *(f"{key}={value}" for key, value in self.fsdp.items())]
        return " ".join([*choices, f"micro_steps={self.micro_steps}", f"sources={self.sources}"])

    def make(self) -> tuple[nn.Module, list[Batch]]:
        """Return the model, and a batch of each source."""
        batches = [batch_of(self.model, source=f"data.{i}") for i in range(self.sources)]
        return build(self.model), batches

    def plan(self, ranks: int) -> WrapPlan:
        """Plan it. Raises ParamError where the choices do not go together."""
        model, batches = self.make()
        plan = make_plan(model, FSDPParams(**self.fsdp), world_size=ranks, example=batches[0].inputs())
        plan.check()
        return plan

    def estimate(self, plan: WrapPlan) -> Estimate:
        """Predict what a rank holds and sends."""
        return estimate(plan, TrainParams(accumulation=self.micro_steps, device="cpu"), sources=self.sources)


CHOICES: dict[str, list[Any]] = {
    "backend": ["FSDP2", "FSDP2", "FSDP2", "FSDP1", "FSDP1", "DDP"],
    "sharding_strategy": ["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"],
    "auto_wrap_policy": ["FROZEN_AWARE", "FROZEN_AWARE", "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"],
    "frozen_policy": ["SHARD", "KEEP", "REPLICATE"],
    "mixed_precision": [None, "bf16", "fp32"],
    "frozen_dtype": [None, None, None, "bf16", "int8", "nf4"],
    "reduce_dtype": ["fp32", "fp32", "bf16"],
    "activation_checkpointing": ["none", "none", "all", "every:2"],
    "forward_prefetch": [False, True],
    "backward_prefetch": ["BACKWARD_PRE", "BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"],
    "cpu_offload": [False, False, False, False, True],
}
"""What is drawn from, by field; what is named twice is drawn twice as often."""


def draw(number: int, *, seed: int) -> list[Case]:
    """Draw so many cases for 2 or 4 ranks, no two alike; the lint may refuse some of them."""
    generator = random.Random(seed)
    cases: dict[str, Case] = {}
    while len(cases) < number:
        fsdp = {field: generator.choice(values) for field, values in CHOICES.items()}
        if fsdp["auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP":
            fsdp["transformer_layer_cls"] = "LlamaDecoderLayer"
        if fsdp["backend"] == "DDP":
            for field in ("sharding_strategy", "forward_prefetch", "backward_prefetch", "reduce_dtype", "cpu_offload"):
                del fsdp[field]
        elif "HYBRID" in fsdp["sharding_strategy"]:
            fsdp["dp_shard"] = 2
        if fsdp["backend"] == "FSDP1":
            fsdp["cpu_offload"] = False  # from GPUs only
        model = generator.choice(list(KINDS))
        case = Case(model, fsdp, micro_steps=generator.choice([1, 1, 2, 3]), sources=generator.choice([1, 1, 1, 2]))
        try:
            FSDPParams(**fsdp)
        except ParamError:
            continue
        cases[str(case)] = case
    return list(cases.values())


def one_thread_gloo(store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Return gloo with one thread. It has two by default, so when two all-gathers are sent for, one after the other, it
    depends on the load of the machine whether their copies are held at the same time."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    options._threads = 1
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, ranks, options)


dist.Backend.register_backend("one_thread_gloo", one_thread_gloo, devices="cpu")  # ranks import this module, too


def results(cases: list[Case], ranks: int) -> list[Result]:
    """Plan and measure cases on real ranks; leaves out those that the lint refuses."""
    of_ranks = zip(cases, *on_ranks(measure_all, ranks, cases, backend="one_thread_gloo"), strict=True)
    return [Result(case, WrapPlan.from_json(rows[0]["plan"]), rows) for case, *rows in of_ranks if rows[0]]


@dataclass
class Result:
    """A case beside what its ranks measured."""

    case: Case
    plan: WrapPlan
    rows: list[dict[str, Any]]

    @property
    def cost(self) -> Estimate:
        """The prediction."""
        return self.case.estimate(self.plan)

    @property
    def error(self) -> float:
        """By how much the predicted peak is above the measured one; of the ranks the worst."""
        predicted = self.cost.peak_bytes
        assert predicted
        return max((predicted / row["peak"] - 1 for row in self.rows), key=abs)


def measure_all(cases: list[Case]) -> list[dict[str, Any] | None]:
    """Plan and measure each case on this rank; None for one that the lint refuses."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    texts: dict[str, str | None] = {}
    for case in cases[rank::ranks]:  # each rank makes its share of the plans
        try:
            texts[str(case)] = case.plan(ranks).to_json()
        except ParamError:
            texts[str(case)] = None
    shares: list[Any] = [None] * ranks
    dist.all_gather_object(shares, texts)
    for share in shares:
        texts |= share
    rows: list[dict[str, Any] | None] = []
    for case in cases:
        text = texts[str(case)]
        if text is None:
            rows.append(None)
        else:
            rows.append({"plan": text} | measure(case.make, WrapPlan.from_json(text), case.micro_steps))
    return rows


def measure_plans(make: Callable[[str], tuple[nn.Module, list[Any]]], plans: dict[str, str]) -> dict[str, Any]:
    """Measure plans on this rank, by case: the model and batches that `make(case)` returns, and the plan as JSON."""
    return {case: measure(partial(make, case), WrapPlan.from_json(text)) for case, text in plans.items()}


class FreedAtOnce(TorchDispatchMode):
    """Let compute go on after a collective only when gloo's thread has freed the tensors that it used for it.

    The thread reports a collective as done before it frees its tensors, so the load of the machine decides for how much
    of the compute that follows they are held. It frees them before it begins the next collective: a small one follows
    each.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            _, _, group_index = OPERATORS[func.__name__.removesuffix(".default")]
            backend = dist.ProcessGroup.unbox(args[group_index])._get_backend(torch.device("cpu"))
            # On the backend itself, not by an operator of c10d: `Collectives` does not count it.
            backend.allreduce([torch.zeros(1)], dist.AllreduceOptions()).wait()
        return result


def measure(make: Callable[[], tuple[nn.Module, list[Any]]], plan: WrapPlan, micro_steps: int = 1) -> dict[str, Any]:
    """Return a step's peak, parameters at rest and collectives, and (loss, gradient norm) of the two steps before it.
    make: returns a model, and a batch of each source."""
    gc.collect()  # what goes while memory is watched must have come while it was
    gc.freeze()  # modules that are imported: each collection would look through them
    with cpu_memory() as memory:
        model, batches = make()
        model = apply_plan(model, plan)
        optimizer, _ = build_optimizer(model, TrainParams())
        model.train()
        micro_batches = batches * micro_steps
        frozen = hash_of_frozen(model)
        steps = []
        for _ in range(2):  # AdamW's states exist then, and DDP has made its buckets anew
            steps.append(train_step(model, micro_batches, optimizer, max_grad_norm=1.0))
        HeldOut(batches).loss(model)  # leaves no trace in the step that follows
        gc.collect()
        memory.mark()
        with Collectives() as collectives, FreedAtOnce():
            train_step(model, micro_batches, optimizer, max_grad_norm=1.0)
            counts = collectives.rows()
    return {
        "steps": [(m.loss, m.grad_norm) for m in steps],
        "frozen changed": hash_of_frozen(model) != frozen,
        "peak": memory.peak,
        "parameters": bytes_held(model),
        "wire": sorted((r.kind, r.phase, r.count, r.bytes, r.wire_bytes) for r in counts),
    }


def hash_of_frozen(model: nn.Module) -> str:
    """Return a hash of the bits of all frozen parameters that this rank holds."""
    bits = hashlib.sha256()
    for p in model.parameters():
        if not p.requires_grad and p.numel():
            bits.update(local(p).detach().view(torch.uint8).numpy().tobytes())
    return bits.hexdigest()


def main() -> None:
    """Print the share of peaks within 5 %, and the worst."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    choices = parser.parse_args()
    found = results(draw(choices.draws, seed=choices.seed), choices.ranks)
    found.sort(key=lambda result: -abs(result.error))
    within = sum(abs(result.error) <= 0.05 for result in found)
    wrong = [r for r in found if any(row["parameters"] != r.cost.memory.parameters for row in r.rows)]
    print(f"{len(found)} of {choices.draws} can be planned; {within / len(found):.1%} of the peaks within 5 %")
    print(f"{len(wrong)} with other bytes of parameters than predicted")
    for result in found[:15]:
        print(f"{result.error:+7.1%}  {result.case}")


if __name__ == "__main__":
    main()
