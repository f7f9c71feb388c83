"""Train nanoVLM with frozen-aware FSDP: run it in a checkout of nanoVLM, which has the folder `models`.

PYTHONPATH=. torchrun --nproc-per-node 2 nanovlm.py
"""

import os

import torch
import torch.distributed as dist
from models.config import VLMConfig
from models.vision_language_model import VisionLanguageModel
from torch import nn

from mmfsdp import FSDPParams, freeze, train_mode, train_step, wrap_fsdp

BATCH_SIZE = 4
MICRO_BATCHES = 2  # of a step, on all ranks together
STEPS = 5


class ForTraining(nn.Module):
    """nanoVLM's model as `train_step` calls it: a batch of its collator goes in, and a loss comes out."""

    def __init__(self, vlm):
        super().__init__()
        self.vlm = vlm

    def forward(self, input_ids, image, attention_mask, labels):
        # nanoVLM returns (logits, loss), and train_step takes the first of a tuple for the loss.
        _, loss = self.vlm(input_ids, image, attention_mask=attention_mask, targets=labels)
        return {"loss": loss}

    def count_label_tokens(self, batch):
        """Return what the loss is a mean over: nanoVLM's collator has shifted the labels, so all of them count."""
        return int((batch["labels"] != -100).sum())


def random_batch(cfg, seed):
    """Return a batch as nanoVLM's VQACollator makes it: put your loader here."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(cfg.lm_vocab_size, (BATCH_SIZE, cfg.lm_max_length), generator=generator)
    labels = ids.roll(-1, dims=1)  # each position predicts the next token
    labels[:, -1] = -100
    labels[:, : seed % 4] = -100  # a question, which is not learned
    image = torch.randn(BATCH_SIZE, 3, cfg.vit_img_size, cfg.vit_img_size, generator=generator)
    return {"input_ids": ids, "image": image, "attention_mask": torch.ones_like(ids), "labels": labels}


def main():
    """Train the projector and the last layer of the language model."""
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    cfg = VLMConfig()
    model = ForTraining(VisionLanguageModel(cfg, load_backbone=True))
    last = len(model.vlm.decoder.blocks) - 1
    freeze(model, ["*", "!vlm.MP.*", f"!vlm.decoder.blocks.{last}.*"])  # in place of a learning rate of 0
    model = wrap_fsdp(model, FSDPParams(frozen_policy="KEEP"), example=random_batch(cfg, seed=0))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    train_mode(model)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(STEPS):
        batches = [random_batch(cfg, seed=i) for i in range(rank, MICRO_BATCHES, ranks)]
        metrics = train_step(model, batches, optimizer, max_grad_norm=1.0)
        if rank == 0:
            print(f"step {step + 1} loss {metrics.loss:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
