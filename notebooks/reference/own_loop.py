"""Train in a loop of your own: two epochs, a schedule, an evaluation after each epoch, a metric, saving and resuming.

torchrun --nproc-per-node 2 own_loop.py       # run it again, and it goes on from the newest checkpoint
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

from mmfsdp import FSDPParams, freeze, train_mode, train_step, wrap_fsdp
from mmfsdp.checkpoint import newest, resume, save
from mmfsdp.core.even_batches import even_batches

BATCH_SIZE = 4
ACCUMULATION = 2  # micro-batches in a step
WARMUP_STEPS = 3
CHECKPOINTS = Path("checkpoints")


def small_model():
    """Return a language model of which the first layer and the embedding are frozen: put yours here."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    freeze(model, ["model.embed_tokens.*", "model.layers.0.*"])  # before wrap_fsdp, and not after it
    return model


def texts(number, seed):
    """Return texts of 12 tokens that count up from a random one: put your data set here."""
    starts = torch.randint(32, (number,), generator=torch.Generator().manual_seed(seed))
    return [(start + torch.arange(12)) % 32 for start in starts]


def collate(samples):
    """Return a batch of samples: the keyword arguments of the model's forward, as most collators make them."""
    ids = torch.stack(samples)
    return {"input_ids": ids, "labels": ids.clone()}


def loader(samples, epoch=0, shuffle=False):
    """Return this rank's part of the data in batches. All ranks have as many."""
    sampler = DistributedSampler(samples, shuffle=shuffle, drop_last=True)
    sampler.set_epoch(epoch)  # another order in each epoch, the same again after a resume
    return DataLoader(samples, BATCH_SIZE, sampler=sampler, collate_fn=collate, drop_last=True)


def rate(step):
    """Return the factor of the learning rate: a warm-up, then the inverse square root of the step."""
    return min((step + 1) / WARMUP_STEPS, (WARMUP_STEPS / (step + 1)) ** 0.5)


def check_rows(name, samples, rows):
    """End the script if there are fewer rows than are used at once: an epoch would be over before its first step."""
    if len(samples) < rows:
        fix = "give it more rows, or lower BATCH_SIZE, ACCUMULATION or the number of ranks"
        sys.exit(
            f"{name}: {len(samples)} rows, and at least {rows} are needed: batch size x micro-batches x ranks; {fix}"
        )


@torch.no_grad()  # not torch.inference_mode(): FSDP cannot train with tensors that it allocates there
def evaluate(model, samples, device):
    """Return the loss per token and the share of tokens that are predicted, over all ranks. Every rank must call it."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # loss, right, tokens
    for batch in even_batches(loader(samples)):  # an error where ranks have different numbers of batches, not a wait
        batch = {key: tensor.to(device) for key, tensor in batch.items()}
        output = model(**batch)
        targets = batch["labels"][:, 1:]
        right = output.logits[:, :-1].argmax(dim=-1) == targets
        totals[0] += output.loss * targets.numel()
        totals[1] += right.sum()
        totals[2] += targets.numel()
    dist.all_reduce(totals)  # sums first, then one division: ranks may have different numbers of tokens
    loss, right, tokens = totals.tolist()
    return loss / tokens, right / tokens


def main(epochs):
    """Train up to so many epochs."""
    training, held_out = texts(64, seed=1), texts(32, seed=2)
    ranks = int(os.environ["WORLD_SIZE"])  # by torchrun
    check_rows("training", training, BATCH_SIZE * ACCUMULATION * ranks)
    check_rows("held-out", held_out, BATCH_SIZE * ranks)
    dist.init_process_group()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    # 1. Wrap, then make the optimizer: wrapping replaces the parameters. Any schedule of torch will do.
    model = wrap_fsdp(small_model(), FSDPParams(frozen_policy="KEEP"), example=collate(training[:BATCH_SIZE]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    # 2. Go on from the newest complete checkpoint, if there is one. It has the schedule's place, too.
    step = first_epoch = 0
    checkpoint = newest(CHECKPOINTS)
    if checkpoint is not None:
        marker = resume(model, optimizer, checkpoint, schedule=schedule).marker
        step, first_epoch = marker["step"], marker["epoch"]

    # 3. Each epoch: steps, an evaluation, a checkpoint. Every rank makes the same calls.
    for epoch in range(first_epoch, epochs):
        train_mode(model)  # not model.train(), which would train the batch norms of frozen parts
        micro_batches = []
        for batch in loader(training, epoch, shuffle=True):
            micro_batches.append(batch)  # on the CPU: train_step moves it
            if len(micro_batches) == ACCUMULATION:
                metrics = train_step(model, micro_batches, optimizer, schedule=schedule, max_grad_norm=1.0)
                micro_batches = []
                step += 1
        loss, accuracy = evaluate(model, held_out, device)
        record = {"epoch": epoch + 1}  # what your loop needs to go on
        save(CHECKPOINTS, model=model, optimizer=optimizer, schedule=schedule, step=step, record=record)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1} step {step} loss {metrics.loss:.6f} held-out {loss:.6f} accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(epochs=int(sys.argv[1]) if len(sys.argv) > 1 else 2)
