"""Flamingo.wrap_fsdp as OpenFlamingo documents it, on real ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from tests.ranks import on_ranks
from tests.tiny import tiny_batch, tiny_flamingo

pytestmark = pytest.mark.real

CPU = torch.device("cpu")
PERCEIVER_STEPS = 3


def usage_example() -> list[float]:
    """The documented example, with the CPU in place of a GPU, and a step after it."""
    model = tiny_flamingo()
    mp_policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    wrapper_kwargs = {"mixed_precision": mp_policy}
    device_id = CPU
    model.wrap_fsdp(wrapper_kwargs=wrapper_kwargs, device_id=device_id)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    return steps(model, optimizer, dist.get_rank(), 1)


def steps(model, optimizer, first: int, every: int) -> list[float]:
    """Losses on batches of equally many label tokens: one per rank, or all of them together."""
    losses = []
    for step in range(PERCEIVER_STEPS):
        for rank in range(first, first + every):
            loss = model(**tiny_batch(2, seed=10 * step + 5 * rank).inputs()).loss / every
            loss.backward()
            losses.append(loss.item() * every)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def checks() -> dict:
    found: dict = {"example": usage_example()}
    rank = dist.get_rank()
    model = tiny_flamingo(tied=True, seed=rank)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    same = model
    strategy = ShardingStrategy.FULL_SHARD
    model.wrap_fsdp({"sharding_strategy": strategy, "use_orig_params": True, "sync_module_states": True}, CPU)
    units = {n for n, m in same.named_modules() if isinstance(m, FSDP) and "_fsdp_wrapped_module" not in n}
    found["units"] = sorted(units)
    found["strategies"] = all(m.sharding_strategy is strategy for m in FSDP.fsdp_modules(model.perceiver))
    found["boundary"] = {
        n.replace("_fsdp_wrapped_module.", "") for n, p in model.named_parameters() if p.requires_grad
    } == trained
    found["whole"] = sorted(n for n, _ in model.named_parameters() if "_fsdp_wrapped_module" not in n)
    with pytest.raises(ValueError, match="wrap_fsdp: the model is wrapped already; call it once"):
        model.wrap_fsdp({}, CPU)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found["losses"] = steps(model, optimizer, rank, 1)
    found["held"] = sum(p.numel() for p in model.parameters())
    prompt = tiny_batch()
    found["said"] = model.generate(prompt.input_ids, media=prompt.media, max_new_tokens=3).tolist()
    return found


def test_the_usage_example_and_what_it_promises():
    model = tiny_flamingo(tied=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    both = steps(model, optimizer, 0, 2)
    results = on_ranks(checks, 2)
    layers = [f"language_model.model.layers.{i}" for i in range(3)]
    wanted = ["perceiver", "vision_encoder", f"{layers[1]}.cross_attention", *(f"{n}.decoder_layer" for n in layers)]
    prompt = tiny_batch()
    said = model.generate(prompt.input_ids, media=prompt.media, max_new_tokens=3).tolist()
    for rank, found in enumerate(results):
        assert found["units"] == sorted(wanted)
        assert found["strategies"] and found["boundary"]
        assert found["whole"] == [
            "language_model.model.embed_tokens.new_tokens.weight",
            "language_model.model.embed_tokens.table.weight",
            "language_model.model.norm.weight",
        ]
        assert found["held"] < 0.7 * sum(p.numel() for p in model.parameters())
        assert found["losses"] == pytest.approx(both[rank::2], rel=1e-5), "one process with both batches"
        assert found["said"] == said
        assert all(0 < loss < 10 for loss in found["example"])
