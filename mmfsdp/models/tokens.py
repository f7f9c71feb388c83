"""New tokens: a small table of their own beside the frozen one, at the input and at the output.

So the frozen table stays frozen and shared, and no gradient is ever masked (the idea of torchtune's fusion embedding).
B batch, L tokens, D width, K known tokens, N new tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

KEPT = "mmfsdp_new_tokens"
"""In a saved language model's configuration: how many of its last tokens were new."""


@dataclass(frozen=True)
class TokenIds:
    """Ids of the tokens a Flamingo needs; the `new` ids from `known` on have rows of their own."""

    image: int
    end_of_chunk: int
    pad: int
    known: int
    new: int

    @classmethod
    def after(cls, known: int) -> TokenIds:
        """As if a tokenizer of `known` tokens had none of the three."""
        return cls(image=known + 1, end_of_chunk=known, pad=known + 2, known=known, new=3)


class ExtendedEmbedding(nn.Module):
    """An embedding table and the new tokens' rows after it."""

    def __init__(self, table: nn.Embedding, known: int, new: int):
        super().__init__()
        self.known = known
        self.table = table
        self.new_tokens = nn.Embedding(new, table.embedding_dim, device=table.weight.device, dtype=table.weight.dtype)
        with torch.no_grad():
            self.new_tokens.weight.copy_(first_rows(table.weight[:known], new))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(B, L) -> (B, L, D)."""
        is_new = input_ids >= self.known
        old = self.table(input_ids.masked_fill(is_new, 0))
        new = self.new_tokens((input_ids - self.known).clamp(min=0))
        return torch.where(is_new[..., None], new.to(old.dtype), old)


def first_rows(known: torch.Tensor, new: int) -> torch.Tensor:
    """(new, D) from (K, D): near the mean of what the decoder is used to, apart enough to be told from each other."""
    rows = known.float()
    return rows.mean(0) + 0.1 * rows.std() * torch.randn(new, rows.shape[1], device=rows.device)


class ExtendedHead(nn.Module):
    """An output matrix and the new tokens' rows after it, the latter shared with the input's where given."""

    def __init__(self, table: nn.Linear, known: int, new: int, shared: nn.Embedding | None):
        super().__init__()
        self.known = known
        self.table = table
        weight = table.weight
        self.new_tokens = nn.Linear(weight.shape[1], new, bias=False, device=weight.device, dtype=weight.dtype)
        if shared is not None:
            self.new_tokens.weight = shared.weight

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(..., D) -> (..., K + N)."""
        old = self.table(hidden_states)[..., : self.known]  # a table may have more rows than its tokenizer has tokens
        new = self.new_tokens(hidden_states.to(self.new_tokens.weight.dtype))
        return torch.cat((old, new.to(old.dtype)), dim=-1)


def extend_vocabulary(model: PreTrainedModel, ids: TokenIds) -> None:
    """Give `model` rows for the new tokens, in place. Raises ValueError where its tables have another form."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(table, nn.Embedding) or not isinstance(head, nn.Linear):
        raise ValueError(
            f"language: {type(model).__name__} embeds with {type(table).__name__} and predicts with "
            f"{type(head).__name__}; new tokens need nn.Embedding and nn.Linear"
        )
    if not ids.new:
        return
    if ids.known > len(table.weight):
        raise ValueError(
            f"language: the tokenizer has {ids.known} tokens but the embedding table only {len(table.weight)} rows; "
            "use the tokenizer that belongs to the model"
        )
    embedding = ExtendedEmbedding(table, ids.known, ids.new)
    shared = embedding.new_tokens if head.weight is table.weight else None
    model.set_input_embeddings(embedding)
    model.set_output_embeddings(ExtendedHead(head, ids.known, ids.new, shared))
    _name_ties(model)
    model.config.get_text_config().vocab_size = ids.known + ids.new
    if kept_tokens(model) != ids.new:
        return
    head = model.get_output_embeddings()
    with torch.no_grad():  # a language model that was saved with them
        for part in (embedding, head):
            part.new_tokens.weight.copy_(part.table.weight[ids.known : ids.known + ids.new])
    _set_rows(embedding.table, head.table, ids.known, *(part.table.weight[: ids.known] for part in (embedding, head)))


def _name_ties(model: PreTrainedModel) -> None:
    """Say where what is tied lies now, to those who tie it anew: transformers, and accelerate before FSDP1."""
    names = {id(module): name for name, module in model.named_modules()}
    table, head = names[id(model.get_input_embeddings())], names[id(model.get_output_embeddings())]
    keys = model._tied_weights_keys
    if isinstance(keys, dict) and keys.get(f"{head}.weight") == f"{table}.weight":
        moved = {f"{head}.{part}.weight": f"{table}.{part}.weight" for part in ("table", "new_tokens")}
        model._tied_weights_keys = {k: v for k, v in keys.items() if k != f"{head}.weight"} | moved


def kept_tokens(model: PreTrainedModel) -> int:
    """How many of a language model's last tokens `merge_vocabulary` has put there."""
    return getattr(model.config, KEPT, 0)


def merge_vocabulary(model: PreTrainedModel, ids: TokenIds) -> None:
    """The way back from `extend_vocabulary`, in place: tables of K + N rows. The configuration then says that the last
    N are such, so that `extend_vocabulary` parts them again."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, ExtendedEmbedding) or not isinstance(head, ExtendedHead):
        return
    whole = [
        torch.cat((part.table.weight[: ids.known], part.new_tokens.weight.to(part.table.weight.dtype)))
        for part in (embedding, head)
    ]
    _set_rows(embedding.table, head.table, ids.known, *whole)
    model.set_input_embeddings(embedding.table)
    model.set_output_embeddings(head.table)
    model.__dict__.pop("_tied_weights_keys", None)
    model.config.get_text_config().vocab_size = len(whole[0])
    setattr(model.config, KEPT, ids.new)


def _set_rows(table: nn.Embedding, head: nn.Linear, known: int, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Give both tables other rows; what was shared stays so."""
    tied = head.weight is table.weight
    table.weight = nn.Parameter(rows.detach().clone())
    head.weight = table.weight if tied else nn.Parameter(out.detach().clone())
    if head.bias is not None:  # new tokens have none
        head.bias = nn.Parameter(F.pad(head.bias.detach()[:known], (0, len(out) - known)))
    table.num_embeddings, head.out_features = len(rows), len(out)
