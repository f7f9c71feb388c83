"""A right training loop with plain fully_shard, and mistakes in it: each changes a few lines of Right."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, PADDING = 32, 8, 0


class Block(nn.Module):
    """Hidden states (B, L, D), mask (B, L) -> (B, L, D): each position sees the mean of those up to it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weights = mask[..., None].to(x.dtype)
        mean = (self.norm(x) * weights).cumsum(dim=1) / weights.cumsum(dim=1).clamp(min=1)
        return x + self.layer(self.dropout(torch.tanh(self.mix(mean))))


class Captioner(nn.Module):
    """Tokens and labels (B, L), pictures (B, 6) -> loss and logits: a frozen encoder, and a causal decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU())
        self.projector = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor, pictures: Tensor) -> dict[str, Tensor]:
        x = self.table(input_ids) + self.projector(self.encode(pictures))[:, None]
        for block in self.blocks:
            x = self.run(block, x, attention_mask)
        logits = self.head(x)
        return {"loss": self.loss(logits, labels), "logits": logits}

    def run(self, block: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        return block(x, mask)

    def encode(self, pictures: Tensor) -> Tensor:
        return self.encoder(pictures)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def first_of(batch: Any) -> dict[str, Tensor]:
    """Return the first micro-batch."""
    return batch[0] if isinstance(batch, list) else batch


class Right:
    """A right loop, in the parts that `verify` takes."""

    Model: Any = Captioner

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.Model()
        model.encoder.requires_grad_(False)
        return self.set_modes(model)

    def set_modes(self, model: nn.Module) -> nn.Module:
        model.train()
        getattr(model, "module", model).encoder.eval()  # .module: of DDP and FSDP1
        return model

    def wrap(self, model: nn.Module) -> None:
        for module in (model.encoder, model.projector, *model.blocks):
            fully_shard(module)
        fully_shard(model)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        torch.manual_seed(100 + dist.get_rank())  # the weights are there: now ranks draw numbers of their own
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        self.backward(model, batch)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        self.evaluate(model, batch)
        return {"norm": norm}

    def backward(self, model: nn.Module, batch: Any) -> None:
        model(**batch)["loss"].backward()

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batch: Any) -> None:
        model.eval()
        model(**first_of(batch))
        self.set_modes(model)

    def batch(self, rank: int) -> Any:
        """Return rows of 9 and 6 tokens, padded to 10; the prompt, of two tokens, has no label."""
        generator = torch.Generator().manual_seed(rank)
        lengths = torch.tensor([9, 6, 10])[:, None]
        mask = (torch.arange(10)[None] < lengths).long()
        ids = torch.randint(3, VOCABULARY, (3, 10), generator=generator).masked_fill(mask == 0, PADDING)
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :2] = -100
        pictures = torch.randn(3, 6, generator=generator)
        return {"input_ids": ids, "labels": labels, "attention_mask": mask, "pictures": pictures}

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `verify`."""
        batches = [self.batch(rank) for rank in range(2)]
        return {"wrap": self.wrap, "optimizer": self.optimizer, "step": self.step, "batches": batches}


def change(**parts: Any) -> type[Right]:
    """Return Right with other methods or another model."""
    return type("Changed", (Right,), parts)


def model(**methods: Any) -> type[Right]:
    """Return Right with a model that has other methods."""
    return change(Model=type("ChangedCaptioner", (Captioner,), methods))


# ---- gradients of a step ----


def half_batches(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    first = {key: value[:2] for key, value in batch.items()}
    return [first, {key: value[2:] for key, value in batch.items()}]


def two_batches(self: Right, rank: int) -> list[dict[str, Tensor]]:
    return [Right.batch(self, rank), Right.batch(self, rank + 10)]


def label_count(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def accumulate_divided(self: Right, model: nn.Module, batch: Any) -> None:
    for each in batch:
        (model(**each)["loss"] / len(batch)).backward()


def accumulate_by_tokens(self: Right, model: nn.Module, batch: Any) -> None:
    parts = half_batches(batch)
    tokens = sum(map(label_count, parts))
    for part in parts:
        (model(**part)["loss"] * label_count(part) / tokens).backward()


def accumulate_undivided(self: Right, model: nn.Module, batch: Any) -> None:
    for each in batch:
        model(**each)["loss"].backward()


def accumulate_means(self: Right, model: nn.Module, batch: Any) -> None:
    for part in half_batches(batch):
        (model(**part)["loss"] / 2).backward()


def accumulate_with_zeros(self: Right, model: nn.Module, batch: Any) -> None:
    for each in batch:
        model.zero_grad()
        (model(**each)["loss"] / len(batch)).backward()


def accumulate_without_sync(self: Right, model: nn.Module, batch: Any) -> None:
    for number, each in enumerate(batch, start=1):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(number == len(batch))
        (model(**each)["loss"] / len(batch)).backward()


def step_without_zeros(self: Right, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    self.backward(model, batch)
    optimizer.step()


def step_with_zeros_first(self: Right, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    loss = model(**batch)["loss"]
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()


def step_with_zeros_too_late(self: Right, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    self.backward(model, batch)
    optimizer.zero_grad()
    optimizer.step()


def step_clipped_too_late(self: Right, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    self.backward(model, batch)
    optimizer.step()
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.zero_grad()


def step_with_schedule(self: Right, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    norm = Right.step(self, model, optimizer, batch)
    for group in optimizer.param_groups:
        group["lr"] *= 0.9
    return norm


def backward_by_tokens_of_all(self: Right, model: nn.Module, batch: Any) -> None:
    """The mean over the label tokens of all ranks: FSDP averages gradients over ranks."""
    tokens = torch.tensor(float(label_count(batch)))
    of_all = tokens.clone()
    dist.all_reduce(of_all)
    (model(**batch)["loss"] * tokens * dist.get_world_size() / of_all).backward()


def backward_in_autocast(self: Right, model: nn.Module, batch: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch)["loss"]
    loss.backward()


def backward_after_kept_casts(self: Right, model: nn.Module, batch: Any) -> None:
    """Autocast keeps the casts of a forward under no_grad, and those are of parameters that FSDP has freed."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            model(**batch)
        loss = model(**batch)["loss"]
    loss.backward()


def backward_by_ranks(self: Right, model: nn.Module, batch: Any) -> None:
    (model(**batch)["loss"] / dist.get_world_size()).backward()


# ---- ranks ----


def one_batch(self: Right, rank: int) -> Any:
    return Right.batch(self, 0)


def fewer_labels(self: Right, rank: int) -> Any:
    batch = Right.batch(self, rank)
    batch["labels"][0, : 4 + 3 * rank] = -100
    return batch


def optimizer_of_groups(self: Right, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = Right.optimizer(self, model)
    trainable = optimizer.param_groups[0]["params"]
    matrices = {"params": [p for p in trainable if p.dim() > 1], "weight_decay": 0.1}
    vectors = {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0}
    return torch.optim.AdamW([matrices, vectors], lr=1e-2)


def rate_by_rank(self: Right, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = Right.optimizer(self, model)
    optimizer.param_groups[0]["lr"] *= 1 + dist.get_rank()
    return optimizer


def optimizer_by_rank(self: Right, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = Right.optimizer(self, model)
    if dist.get_rank() == 0:
        return optimizer
    return torch.optim.SGD(optimizer.param_groups[0]["params"], lr=1e-2)


def rate_falls_on_rank_0(self: Right, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    step_with_zeros_first(self, model, optimizer, batch)
    if dist.get_rank() == 0:
        optimizer.param_groups[0]["lr"] *= 0.5


def optimizer_without_seed(self: Right, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def build_without_seed(self: Right) -> nn.Module:
    model = self.Model()
    model.encoder.requires_grad_(False)
    return self.set_modes(model)


def backward_with_seed(self: Right, model: nn.Module, batch: Any) -> None:
    torch.manual_seed(0)
    model(**batch)["loss"].backward()


def encode_on_rank_0(self: Captioner, pictures: Tensor) -> Tensor:
    features = self.encoder(pictures)
    return self.blocks[0].layer(features) if dist.get_rank() == 0 else features


class LocalNorm(Captioner):
    def __init__(self) -> None:
        super().__init__()
        self.projector = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


# ---- labels and loss ----


def labels_of_padding(self: Right, rank: int) -> Any:
    batch = Right.batch(self, rank)
    return batch | {"labels": batch["input_ids"].clone()}


def labels_masked(self: Right, rank: int) -> Any:
    batch = Right.batch(self, rank)
    return batch | {"labels": torch.full_like(batch["labels"], -100)}


def labels_shifted(self: Right, rank: int) -> Any:
    batch = Right.batch(self, rank)
    labels = batch["labels"].roll(-1, dims=1)
    labels[:, -1] = -100
    return batch | {"labels": labels}


def shift_by_two(self: Captioner, logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-2].flatten(0, 1), labels[:, 2:].flatten())


def no_shift(self: Captioner, logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def mean_of_rows(self: Captioner, logits: Tensor, labels: Tensor) -> Tensor:
    losses = cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none")
    return (losses.sum(dim=1) / (labels[:, 1:] != -100).sum(dim=1).clamp(min=1)).mean()


def mean_of_positions(self: Captioner, logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none").mean()


def sum_of_labels(self: Captioner, logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="sum")


def smoothed(self: Captioner, logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)


def with_extra_sum(self: Captioner, logits: Tensor, labels: Tensor) -> Tensor:
    return Captioner.loss(self, logits, labels) + 1e-3 * logits[:, :2].logsumexp(dim=-1).square().sum()


def with_extra_mean(self: Captioner, logits: Tensor, labels: Tensor) -> Tensor:
    return Captioner.loss(self, logits, labels) + 1e-3 * logits[:, :2].logsumexp(dim=-1).square().mean()


def with_padding(self: Captioner, logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].clamp(min=0).flatten())


class SeesPadding(Captioner):
    """Rows are padded on the left, and the mask is not passed on."""

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor, pictures: Tensor) -> dict[str, Tensor]:
        return super().forward(input_ids, labels, torch.ones_like(attention_mask), pictures)


def padded_on_the_left(self: Right, rank: int) -> Any:
    batch = Right.batch(self, rank)
    for key in ("input_ids", "labels", "attention_mask"):
        batch[key] = batch[key].clone()
        batch[key][1] = batch[key][1].roll(4)
    return batch


class SeesAhead(Captioner):
    """Each position sees the mean of all."""

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor, pictures: Tensor) -> dict[str, Tensor]:
        x = self.table(input_ids) * attention_mask[..., None]
        x = self.table(input_ids) + x.mean(dim=1, keepdim=True)
        for block in self.blocks:
            x = block(x, attention_mask)
        logits = self.head(x + self.projector(self.encode(pictures))[:, None])
        return {"loss": self.loss(logits, labels), "logits": logits}


class MaskedWords(SeesAhead):
    """Predicts the words that are hidden, from those before and after them."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), labels.flatten())


def hidden_words(self: Right, rank: int) -> Any:
    batch = Right.batch(self, rank)
    hidden = torch.zeros_like(batch["labels"], dtype=torch.bool)
    hidden[:, 2::3] = True
    labels = batch["input_ids"].masked_fill(~hidden | (batch["attention_mask"] == 0), -100)
    return batch | {"input_ids": batch["input_ids"].masked_fill(labels != -100, 2), "labels": labels}


# ---- the model ----


class PlainList(Captioner):
    """Its blocks are in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.more = [nn.Linear(WIDTH, WIDTH)]

    def encode(self, pictures: Tensor) -> Tensor:
        return self.more[0](self.encoder(pictures))


class Tied(Captioner):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.table.weight


def writes_frozen(self: Captioner, pictures: Tensor) -> Tensor:
    with torch.no_grad():
        self.encoder[0].weight.mul_(0.9)
    return self.encoder(pictures)


class Codebook(Captioner):
    """Keeps a moving average of features."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def encode(self, pictures: Tensor) -> Tensor:
        features = self.encoder(pictures)
        if self.training:
            self.average.lerp_(self.mean(features.detach()), 0.1)
        return features - self.average

    def mean(self, features: Tensor) -> Tensor:
        return features.mean(dim=0)


class SharedCodebook(Codebook):
    """The average is over all ranks."""

    def mean(self, features: Tensor) -> Tensor:
        mean = features.mean(dim=0)
        dist.all_reduce(mean)
        return mean / dist.get_world_size()


def run_checkpointed(self: Captioner, block: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    return checkpoint(block, x, mask, use_reentrant=False)


def run_for_some_rows(self: Captioner, block: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    """Stochastic depth: all ranks run the block, for other rows."""
    keep = torch.rand(len(x), 1, 1) < 0.8
    return x + (block(x, mask) - x) * keep / 0.8 if self.training else block(x, mask)


class Adapted(Captioner):
    """A frozen encoder with an adapter, whose second matrix begins as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def encode(self, pictures: Tensor) -> Tensor:
        features = self.encoder(pictures)
        return features + self.up(self.down(features))


class FrozenDropout(Captioner):
    """A frozen encoder that drops features in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, WIDTH), nn.Dropout(0.1))


@torch.no_grad()
def encode_without_graph(self: Captioner, pictures: Tensor) -> Tensor:
    return self.encoder(pictures)


def set_seed_in_forward(self: Captioner, pictures: Tensor) -> Tensor:
    torch.manual_seed(len(pictures))
    return self.encoder(pictures)


class SameMask(Captioner):
    """Drops the same features in each forward."""

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return super().forward(*args, **kwargs)


def eval_in_forward(self: Captioner, pictures: Tensor) -> Tensor:
    self.blocks.eval()
    return self.encoder(pictures)


def mask_of_rows(grad: Tensor) -> Tensor:
    """Keep the rows of new tokens."""
    mask = torch.zeros_like(grad)
    mask[-4:] = 1
    return grad * mask


def build_with_hook(self: Right) -> nn.Module:
    model = Right.build(self)
    model.table.weight.register_hook(mask_of_rows)
    return model


def wrap_with_hook(self: Right, model: nn.Module) -> None:
    Right.wrap(self, model)
    model.table.weight.register_hook(mask_of_rows)


class NormsInBf16(Captioner):
    """Its norms are cast to bf16, as `model.bfloat16()` would."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm.to(torch.bfloat16)
            block.norm.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))


def slow_optimizer(self: Right, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = Right.optimizer(self, model)
    optimizer.param_groups[0]["lr"] = 1e-3
    return optimizer


def wrap_norms(self: Right, model: nn.Module) -> None:
    """Norms are units of their own: gradients of a unit have one dtype."""
    for block in model.blocks:
        fully_shard(block.norm)
    Right.wrap(self, model)


def wrap_in_bf16(self: Right, model: nn.Module) -> None:
    whole = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
    fully_shard(model.encoder, mp_policy=whole)  # its batch norm keeps statistics in float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (model.projector, *model.blocks):
        fully_shard(module, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def wrap_ddp(self: Right, model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def wrap_fsdp1(self: Right, model: nn.Module) -> nn.Module:
    by_block = ModuleWrapPolicy({Block})
    device = torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=by_block, use_orig_params=True, device_id=device)


def train_frozen(self: Right, model: nn.Module) -> nn.Module:
    return model.train()


@torch.no_grad()
def evaluate_and_stay(self: Right, model: nn.Module, batch: Any) -> None:
    model.eval()
    model(**first_of(batch))


# ---- losses over all ranks ----


class Contrastive(nn.Module):
    """Pictures and texts (B, 6) of all ranks -> the contrastive loss of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, WIDTH)
        self.projector = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(6, WIDTH)])

    def forward(self, pictures: Tensor, texts: Tensor) -> dict[str, Tensor]:
        ours = self.gather(self.projector(torch.tanh(self.encoder(pictures))))
        theirs = self.gather(self.blocks[0](texts))
        return {"loss": cross_entropy(ours @ theirs.T, torch.arange(len(ours)))}

    def gather(self, features: Tensor) -> Tensor:
        return torch.cat(torch.distributed.nn.functional.all_gather(features))


class GatheredWithoutGradient(Contrastive):
    """Only this rank's features carry a gradient."""

    def gather(self, features: Tensor) -> Tensor:
        parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, features)
        parts[dist.get_rank()] = features
        return torch.cat(parts)


def pairs(self: Right, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {"pictures": torch.randn(4, 6, generator=generator), "texts": torch.randn(4, 6, generator=generator)}


# ---- packed rows ----


class Packed(Captioner):
    """Rows of several texts, whose positions begin again."""

    sees = "its own text"

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())])

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor, pictures: Tensor) -> dict[str, Tensor]:
        texts = (position_ids == 0).cumsum(dim=1)
        same = (texts[:, :, None] == texts[:, None]).tril()
        if self.sees == "all before":
            same = torch.ones_like(same).tril()
        x = self.table(input_ids)
        x = x + (same / same.sum(dim=2, keepdim=True)) @ self.blocks[0](x)
        logits = self.head(x + self.projector(self.encode(pictures))[:, None])
        return {"loss": self.loss(logits, labels), "logits": logits}


class PackedSeesAll(Packed):
    sees = "all before"


def packed_rows(self: Right, rank: int) -> Any:
    batch = Right.batch(self, rank)
    ids = torch.randint(3, VOCABULARY, (3, 10), generator=torch.Generator().manual_seed(rank))
    labels = ids.clone()
    labels[:, [0, 5]] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(10)[None].repeat(3, 1) % 5,
            "pictures": batch["pictures"]}  # fmt: skip


def packed_with_first(self: Right, rank: int) -> Any:
    batch = packed_rows(self, rank)
    return batch | {"labels": batch["input_ids"].clone()}


class PackedAtPlaces(Packed):
    """Each token has a vector of its position; the numbers in the mask say of which text it is."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(10, WIDTH)

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor, position_ids: Tensor
    ) -> dict[str, Tensor]:
        same = (attention_mask[:, :, None] == attention_mask[:, None]).tril()
        x = self.projector(self.table(input_ids) + self.places(self.positions(position_ids)))
        x = x + (same / same.sum(dim=2, keepdim=True)) @ self.blocks[0](x)
        logits = self.head(x)
        return {"loss": self.loss(logits, labels), "logits": logits}

    def positions(self, position_ids: Tensor) -> Tensor:
        return position_ids


class PackedByColumn(PackedAtPlaces):
    """Takes the column in the row for the position in the text."""

    def positions(self, position_ids: Tensor) -> Tensor:
        return torch.arange(position_ids.shape[1])[None].expand_as(position_ids)


def numbered_rows(self: Right, rank: int) -> Any:
    batch = packed_rows(self, rank)
    del batch["pictures"]
    return batch | {"attention_mask": torch.ones(3, 10, dtype=torch.long) + (torch.arange(10) >= 5)}


def numbered_rows_whose_positions_go_on(self: Right, rank: int) -> Any:
    return numbered_rows(self, rank) | {"position_ids": torch.arange(10)[None].repeat(3, 1)}


Case = tuple[type[Right], str, str]
"""The changed loop, the check that finds it, and words of the line."""

NAMED: dict[str, Case] = {
    "accumulation not divided": (
        change(backward=accumulate_undivided, batch=two_batches),
        "accumulation",
        "the losses of 2 micro-batches are added: the gradient is 2 times",
    ),
    "no zero_grad": (change(step=step_without_zeros), "zero_grad", "step 2 begins with the gradients of step 1"),
    "one batch for all ranks": (change(batch=one_batch), "batches", "ranks 0 and 1 have the same batch"),
    "one seed for all ranks": (
        change(optimizer=optimizer_without_seed),
        "seeds",
        "all ranks have the same seed, and draw the same dropout",
    ),
    "a seed in each step": (
        change(backward=backward_with_seed),
        "seeds",
        "a step sets the state of torch: all ranks, and all steps",
    ),
    "a seed in forward": (model(encode=set_seed_in_forward), "random", "forward sets the state of torch"),
    "shifted twice in the model": (
        model(loss=shift_by_two),
        "shift",
        "labels are shifted twice, both times in the model",
    ),
    "shifted in the batch and in the model": (
        change(batch=labels_shifted),
        "shift",
        "labels are shifted twice, in the batch, and again in the model",
    ),
    "padding in the loss": (model(loss=with_padding), "padding", "it is attended to, or counts in the loss"),
    "padding in the labels": (change(batch=labels_of_padding), "padding", "5 labels of rank 0's batch are padding"),
    "all labels masked": (change(batch=labels_masked), "labels", "all labels of rank 0's batch are masked"),
    "a mean over rows": (model(loss=mean_of_rows), "mean", "a mean over rows of the means of their labels"),
    "a mean over positions": (model(loss=mean_of_positions), "mean", "as that of all positions"),
    "an extra loss that is a sum": (model(loss=with_extra_sum), "loss", "a part of it is a sum"),
    "batch norm of one rank": (change(Model=LocalNorm), "batch norm", "projector.1: each rank normalizes by its own"),
    "norms in bf16": (
        change(Model=NormsInBf16, optimizer=slow_optimizer, wrap=wrap_norms),
        "precision",
        "a step leaves most values of blocks.0.norm.weight, blocks.1.norm.weight as they were",
    ),
    "left in eval": (change(evaluate=evaluate_and_stay), "mode", "step 2 trains in eval mode"),
    "a layer that rank 0 runs": (
        model(encode=encode_on_rank_0),
        "same code",
        "rank 0 runs blocks.0.layer, and rank 1 does so less often, for the same batch",
    ),
    "a plain list": (change(Model=PlainList), "registered", "more: holds parameters in a plain list"),
    "a gather without a gradient": (
        change(Model=GatheredWithoutGradient, batch=pairs),
        "derivatives",
        "the gradient is 0.50 of the derivative of the loss of all ranks",
    ),
    "a frozen parameter that forward writes to": (
        model(encode=writes_frozen),
        "written",
        "forward writes to encoder.0.weight",
    ),
    "a buffer that forward writes to": (change(Model=Codebook), "written", "forward writes to average, on each rank"),
    "a hook before wrapping": (change(build=build_with_hook), "hooks", "table.weight: has a hook"),
    "a learning rate by rank": (change(optimizer=rate_by_rank), "settings", "lr is 0.01 on rank 0 and 0.02 on rank 1"),
    "an optimizer by rank": (change(optimizer=optimizer_by_rank), "settings", "optimizer is AdamW on rank 0 and SGD"),
}
"""Mistakes that the issue of this page names."""

OTHERS: dict[str, Case] = {
    "micro-batches count the same": (
        change(backward=accumulate_means),
        "accumulation",
        "micro-batches of 11 and 8 label tokens count the same",
    ),
    "zeros between micro-batches": (
        change(backward=accumulate_with_zeros, batch=two_batches),
        "zero_grad",
        "between two micro-batches",
    ),
    "zeros before the step": (
        change(step=step_with_zeros_too_late),
        "zero_grad",
        "gradients are gone when the optimizer steps",
    ),
    "clipped after the step": (
        change(step=step_clipped_too_late),
        "zero_grad",
        "gradients are changed after optimizer.step()",
    ),
    "divided by the ranks": (
        change(backward=backward_by_ranks),
        "accumulation",
        "the loss is divided by the number of ranks",
    ),
    "a rate that falls on rank 0": (
        change(step=rate_falls_on_rank_0),
        "settings",
        "lr is 0.0025 on rank 0 and 0.01 on rank 1 after 2 steps",
    ),
    "weights without a seed": (change(build=build_without_seed), "weights", "ranks start from different weights"),
    "labels not shifted": (model(loss=no_shift), "shift", "labels are not shifted"),
    "a loss that is a sum": (model(loss=sum_of_labels), "loss", "a sum: with each row twice it is twice as large"),
    "no causal mask": (change(Model=SeesAhead), "shift", "a label is predicted from the tokens after it"),
    "padding on the left without a mask": (
        change(Model=SeesPadding, batch=padded_on_the_left),
        "padding",
        "it is attended to, or counts in the loss",
    ),
    "one dropout mask": (change(Model=SameMask), "random", "dropout draws the same mask in every forward"),
    "eval in forward": (model(encode=eval_in_forward), "mode", "trained in eval mode"),
    "a frozen batch norm in train mode": (
        change(set_modes=train_frozen),
        "mode",
        "frozen, but in train mode, so that its running statistics change",
    ),
    "a hook after wrapping": (change(wrap=wrap_with_hook), "hooks", "table.weight: has a hook"),
    "packed texts that see each other": (
        change(Model=PackedSeesAll, batch=packed_rows),
        "packed",
        "a text attends to the one that is packed before",
    ),
    "the first token of a packed text": (
        change(Model=Packed, batch=packed_with_first),
        "packed",
        "the first token of a packed text counts in the loss",
    ),
    "positions of packed texts that go on": (
        change(Model=PackedAtPlaces, batch=numbered_rows_whose_positions_go_on),
        "packed",
        "predicted otherwise than by itself: its positions begin at 5",
    ),
    "a column for a position": (
        change(Model=PackedByColumn, batch=numbered_rows),
        "packed",
        "a text that begins in column 5 of a row is predicted otherwise than by itself",
    ),
    "casts that autocast keeps": (
        change(backward=backward_after_kept_casts),
        "gradients",
        "have none at all",
    ),
}
"""Mistakes that were found beside them."""

RIGHT: dict[str, type[Right]] = {
    "as it is": Right,
    "accumulation": change(backward=accumulate_divided, batch=two_batches),
    "accumulation by tokens": change(backward=accumulate_by_tokens),
    "zero_grad first": change(step=step_with_zeros_first),
    "an extra loss that is a mean": model(loss=with_extra_mean),
    "a codebook over all ranks": change(Model=SharedCodebook),
    "a gather with a gradient": change(Model=Contrastive, batch=pairs),
    "padding on the left": change(batch=padded_on_the_left),
    "packed rows": change(Model=Packed, batch=packed_rows),
    "packed rows whose positions begin again": change(Model=PackedAtPlaces, batch=numbered_rows),
    "tied table": change(Model=Tied),
    "reduced once for all micro-batches": change(backward=accumulate_without_sync, batch=two_batches),
    "weighted by label tokens over ranks": change(backward=backward_by_tokens_of_all, batch=fewer_labels),
    "a schedule and two groups": change(optimizer=optimizer_of_groups, step=step_with_schedule),
    "label smoothing": model(loss=smoothed),
    "masked words": change(Model=MaskedWords, batch=hidden_words),
    "activation checkpointing": model(run=run_checkpointed),
    "stochastic depth": model(run=run_for_some_rows),
    "an adapter that begins as zeros": change(Model=Adapted),
    "an encoder under no_grad": model(encode=encode_without_graph),
    "autocast": change(backward=backward_in_autocast),
    "mixed precision": change(wrap=wrap_in_bf16),
    "DDP": change(wrap=wrap_ddp),
    "dropout of a frozen encoder": change(Model=FrozenDropout, set_modes=train_frozen),
    "FSDP1": change(wrap=wrap_fsdp1, step=step_with_zeros_first),
}
"""Right loops, in which nothing may be found."""

NOTES: dict[str, tuple[str, str]] = {
    "as it is": ("optimizer", "weight decay pulls norms, biases and the like to zero: blocks.0"),
    "autocast": ("precision", "autocast casts encoder.0.weight in each forward"),
    "dropout of a frozen encoder": ("mode", "dropout of frozen parts is on: encoder.1"),
}
"""By the right loop: the check that says something of it in a note, and words of the line."""
