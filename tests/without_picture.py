"""`python -m tests.without_picture`: two ranks with FSDP2, of which one has no picture in its batch.

Prints what happens without a blank picture, with one, and with torch's switch for unused parameters.
notebooks/reference/no_picture.md shows the output.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from mmfsdp import FSDPParams, wrap_fsdp
from tests.families import IMAGE, Inputs, build
from tests.ranks import in_processes

TIMEOUT_S = 20
WORD = 3


def with_blank(batch: dict[str, torch.Tensor], blank: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the batch with one more sample, that of a blank picture. Its tokens have no weight in the loss."""
    joined = dict(blank)
    for key, tensor in batch.items():
        joined[key] = torch.cat([tensor, blank[key]])
    joined["labels"][len(batch["labels"]) :] = -100
    return joined


def sample_of(rank: int) -> dict[str, torch.Tensor]:
    """Return one sample with a picture."""
    return {key: tensor[:1] for key, tensor in Inputs("llava", seed=rank).mapping.items()}


class Adder(nn.Module):
    """Adds what a projector makes of a picture to the text. The encoder is frozen, and a text needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.projector, self.language = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.encoder.requires_grad_(False)

    def forward(self, text: torch.Tensor, picture: torch.Tensor | None) -> torch.Tensor:
        if picture is not None:
            text = text + self.projector(self.encoder(picture))
        return self.language(text).square().sum()


def gradients_with_switch(rank: int) -> list[str]:
    """Return what the gradients of two ranks are, with torch's switch. Rank 1 has no picture."""
    torch.manual_seed(0)
    alone, model = Adder(), Adder()
    model.load_state_dict(alone.state_dict())
    fully_shard(model.language)
    fully_shard(model, ignored_params=set(model.encoder.parameters()))  # the projector is in the root's unit
    model.set_reduce_scatter_unused_params(True)
    text, picture = torch.ones(2, 4), torch.ones(2, 4)
    model(text, picture if rank == 0 else None).backward()
    by_rank: list[dict[str, torch.Tensor]] = []
    for own_picture in (picture, None):
        alone.zero_grad()
        alone(text, own_picture).backward()
        by_rank.append({name: p.grad.clone() for name, p in alone.named_parameters() if p.grad is not None})
    lines = []
    for name in ("projector.weight", "language.weight"):
        grad = model.get_parameter(name).grad.full_tensor()
        right = (by_rank[0][name] + by_rank[1].get(name, 0)) / 2
        difference = (grad - right).norm() / right.norm()
        lines.append(f"{name}: differs from one process by {100 * difference:.0f} % of its norm")
    # The second reduce-scatter is the root's on rank 0, and that of the language layer on rank 1.
    mixed = (by_rank[0]["projector.weight"] + by_rank[1]["language.weight"]) / 2
    first_rows = model.get_parameter("projector.weight").grad.full_tensor()[:2]
    if torch.allclose(first_rows, mixed[:2]):
        lines.append("projector.weight of rank 0: its own gradient, and rank 1's of language.weight")
    return lines


def of_rank(rank: int, folder: str, blank: bool) -> list[str]:
    """Return this rank's loss, or how its step failed. Rank 1 has no picture; with blank, a blank one joins it.

    With blank, lines on what torch's switch does follow.
    """
    store, timeout = dist.FileStore(f"{folder}/store", 2), timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    batch = sample_of(rank)
    if rank == 1:
        del batch["pixel_values"]
        batch["input_ids"][batch["input_ids"] == IMAGE] = WORD
        if blank:
            picture = sample_of(rank)
            picture["pixel_values"].zero_()
            batch = with_blank(batch, picture)
    model = wrap_fsdp(build("llava"), FSDPParams(frozen_policy="REPLICATE"), example=sample_of(0))
    try:
        loss = model(**batch).loss
        if loss.requires_grad:
            loss.backward()
        else:  # nothing to train here: this rank is busy with its next batch
            time.sleep(TIMEOUT_S + 5)
    except RuntimeError as error:
        return [str(error).splitlines()[0].partition("] ")[2]]
    has_switch = blank and hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # torch 2.13
    return [f"loss {loss.item():.4f}", *(gradients_with_switch(rank) if has_switch else [])]


def results(blank: bool) -> list[list[str]]:
    """Return what each rank's step comes to, and with blank, what torch's switch does."""
    return in_processes(of_rank, 2, blank)


def main() -> None:
    """Print what each rank comes to, without and with a blank picture, and with torch's switch."""
    for blank in (False, True):
        print("with a blank picture" if blank else "without a blank picture")
        by_rank = results(blank)
        for rank, lines in enumerate(by_rank):
            print(f"  rank {rank}: {lines[0]}")
    print("without a blank picture, with set_reduce_scatter_unused_params(True)")
    for line in by_rank[0][1:]:
        print(f"  {line}")


if __name__ == "__main__":
    main()
