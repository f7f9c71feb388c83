"""`python -m tests.without_picture`: two ranks with FSDP2, of which one has no picture in its batch.

Prints what happens without a blank picture and with one. notebooks/reference/no_picture.md shows the output.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

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


def loss_of_rank(rank: int, folder: str, blank: bool) -> str:
    """Return this rank's loss, or how its step failed. Rank 1 has no picture; with blank, a blank one joins it."""
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
        return str(error).splitlines()[0].partition("] ")[2]
    return f"loss {loss.item():.4f}"


def results(blank: bool) -> list[str]:
    """Return what each rank's step comes to."""
    return in_processes(loss_of_rank, 2, blank)


def main() -> None:
    """Print what each rank comes to, without and with a blank picture."""
    for blank in (False, True):
        print("with a blank picture" if blank else "without a blank picture")
        for rank, result in enumerate(results(blank)):
            print(f"  rank {rank}: {result}")


if __name__ == "__main__":
    main()
