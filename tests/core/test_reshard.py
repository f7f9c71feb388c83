"""A checkpoint taken up on other ranks, by another strategy or wrapper: weights and optimizer states to the bit."""

import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from mmfsdp import checkpoint
from mmfsdp.checkpoint.tensors import model_tensors, optimizer_tensors
from mmfsdp.core.step import train_step
from mmfsdp.kit.train.optimizer import build_optimizer
from mmfsdp.params import FSDPParams, ParamError, StateDictType, TrainParams
from mmfsdp.planning import wrap_fsdp
from tests.parity import whole
from tests.ranks import on_ranks
from tests.tiny import tiny_batch, tiny_flamingo

pytestmark = pytest.mark.real

HYBRID = {"sharding_strategy": "HYBRID_SHARD", "dp_replicate": 2, "dp_shard": 2}
KEPT = {"sharding_strategy": "SHARD_GRAD_OP", "frozen_policy": "REPLICATE"}
SAVED = {
    "FSDP2 hybrid on 4": (4, HYBRID),
    "FSDP2 sharded on 2": (2, {}),
    "FSDP2 replicated and sharded, tied, on 4": (4, KEPT),
    "FSDP1 tied on 2": (2, {"backend": "FSDP1", "frozen_policy": "REPLICATE"}),
    "DDP whole file on 2": (2, {"backend": "DDP", "state_dict_type": "FULL_STATE_DICT"}),
}
TAKEN_UP = {
    "one process": (1, {}),
    "FSDP2 replicated and sharded on 2": (2, KEPT),
    "FSDP1 hybrid on 4": (4, {"backend": "FSDP1", **HYBRID}),
    "FSDP2 sharded on 4": (4, {}),
    "DDP on 2": (2, {"backend": "DDP"}),
    "FSDP1 flat on 2": (2, {"backend": "FSDP1", "use_orig_params": False}),
}
LOCAL = {"backend": "FSDP1", "state_dict_type": "LOCAL_STATE_DICT"}


def full(tensors: dict) -> dict[str, torch.Tensor]:
    return {n: whole(t).detach().clone() for n, t in tensors.items()}


def everything(model, optimizer) -> dict[str, torch.Tensor]:
    states = {f"optimizer.{name}": t for name, t in full(optimizer_tensors(model, optimizer)).items()}
    return full(model_tensors(model)) | states


def loss_of(model) -> float:
    with torch.no_grad():
        return model(**tiny_batch(seed=9).inputs()).loss.item()


def save_all(folder: Path, ranks: int) -> None:
    if ranks == 2:
        local = wrap_fsdp(tiny_flamingo(), FSDPParams(**LOCAL))
        checkpoint.save(folder / "local", model=local, step=2, kind=StateDictType.LOCAL_STATE_DICT)
    for name in (name for name, (n, _) in SAVED.items() if n == ranks):
        fsdp = FSDPParams(**SAVED[name][1])
        model = wrap_fsdp(tiny_flamingo(tied="tied" in name), fsdp)
        optimizer, _ = build_optimizer(model, TrainParams(lr=1e-2))
        for step in (1, 2):
            train_step(model, [tiny_batch(seed=dist.get_rank() + step)], optimizer)
        checkpoint.save(folder / name, model=model, step=2, optimizer=optimizer, kind=fsdp.state_dict_type)
        truth, loss = everything(model, optimizer), loss_of(model)
        if dist.get_rank() == 0:
            save_file(truth | {"loss": torch.tensor(loss)}, folder / name / "truth.safetensors")


def take_all_up(folder: Path, ranks: int) -> list[str]:
    """What is not as it was saved."""
    said = refusal(folder) if ranks == 4 else "is a LOCAL_STATE_DICT of 2 ranks"
    wrong = [] if "is a LOCAL_STATE_DICT of 2 ranks" in said else [f"local shards of 2 ranks on {ranks}: {said}"]
    for i, (how, (wanted, fields)) in enumerate(TAKEN_UP.items()):
        for name in list(SAVED)[i % 2 :: 2] if wanted == ranks else []:  # half of the pairs: each on each side
            fresh = tiny_flamingo(tied="tied" in name, seed=0)
            for p in fresh.parameters():
                p.data.add_(1.0) if p.requires_grad else None
            model = wrap_fsdp(fresh, FSDPParams(**fields))
            optimizer, _ = build_optimizer(model, TrainParams(lr=1e-2))
            # A flat parameter joins groups with other weight decays.
            is_flat = fields.get("use_orig_params") is False
            checkpoint.resume(model, optimizer, folder / name / "step_00000002", settings=not is_flat)
            found, truth = everything(model, optimizer), load_file(folder / name / "truth.safetensors")
            before = truth.pop("loss").item()
            odd = [key for key in sorted(found.keys() | truth) if not same(found.get(key), truth.get(key))]
            wrong += [f"{name} -> {how}: {len(odd)} tensors, such as {odd[0]}"] if odd else []
            if not abs(loss_of(model) / before - 1) < 1e-5:
                wrong.append(f"{name} -> {how}: loss {loss_of(model)}, not {before}")
    return wrong


def refusal(folder: Path) -> str:
    """What taking up FSDP1's local shards of two ranks says here."""
    model = wrap_fsdp(tiny_flamingo(), FSDPParams(**LOCAL))
    try:
        checkpoint.resume(model, build_optimizer(model, TrainParams())[0], folder / "local" / "step_00000002")
    except ParamError as error:
        return str(error)
    return "nothing"


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def on_four(folder: str) -> list[str]:
    """Each number of ranks in turn; ranks above it wait."""
    rank, wrong = dist.get_rank(), []
    for part, ranks in (("save", 4), ("save", 2), ("take", 4), ("take", 2), ("take", 1)):
        dist.destroy_process_group()
        if rank < ranks:
            store = dist.FileStore(f"{folder}/store-{part}-{ranks}", ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            try:
                found = save_all(Path(folder), ranks) if part == "save" else take_all_up(Path(folder), ranks)
                wrong += found or []
            except Exception:
                wrong.append(traceback.format_exc())
            dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/all-{part}-{ranks}", 4)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
        dist.barrier()  # a rank that destroys its group at once breaks those that are still connecting to it
    return wrong


def test_other_ranks_strategies_and_wrappers_take_up_the_very_weights_and_states(tmp_path):
    for wrong in on_ranks(on_four, 4, str(tmp_path)):
        assert not wrong, "\n".join(wrong)
