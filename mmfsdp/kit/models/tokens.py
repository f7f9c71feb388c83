"""New tokens: a small table of their own next to the frozen one, at the input and at the output.

So the frozen table stays frozen and shared, and no gradient is ever masked (the idea of torchtune's fusion embedding).
B batch, L tokens, D width, K known tokens, N new tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from ...params import ParamError

CONFIG_KEY = "mmfsdp_new_tokens"
"""Key of a saved language model's configuration that says how many of its last tokens are new."""
INITIAL_SPREAD = 0.1
"""Standard deviation of new rows around the mean of the known ones, as a share of theirs."""


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
        """Return the ids for a tokenizer of `known` tokens that has none of the three."""
        return cls(image=known + 1, end_of_chunk=known, pad=known + 2, known=known, new=3)


class ExtendedEmbedding(nn.Module):
    """An embedding table and the new tokens' rows after it."""

    def __init__(self, table: nn.Embedding, known: int, new: int):
        super().__init__()
        self.known = known
        self.table = table
        self.new_tokens = nn.Embedding(new, table.embedding_dim, device=table.weight.device, dtype=table.weight.dtype)
        with torch.no_grad():
            self.new_tokens.weight.copy_(initial_rows(table.weight[:known], new))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(B, L) -> (B, L, D)."""
        is_new = input_ids >= self.known  # (B, L)
        old = self.table(input_ids.masked_fill(is_new, 0))  # (B, L, D)
        new = self.new_tokens((input_ids - self.known).clamp(min=0))  # (B, L, D)
        return torch.where(is_new[..., None], new.to(old.dtype), old)


class ExtendedHead(nn.Module):
    """An output matrix and the new tokens' rows after it, the latter shared with the input's if `shared` is set."""

    def __init__(self, table: nn.Linear, known: int, new: int, shared: nn.Embedding | None):
        super().__init__()
        self.known = known
        self.table = table
        weight = table.weight
        self.new_tokens = nn.Linear(weight.shape[1], new, bias=False, device=weight.device, dtype=weight.dtype)
        if shared is not None:
            self.new_tokens.weight = shared.weight

    def forward(
        self,
        hidden_states: torch.Tensor,
        targets: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(..., D) -> (..., K + N); with targets the sum of their losses, if the table is a LossLinear."""
        if targets is not None:
            # The table calls this, so that its forward begins first, as without targets: a unit of the norm before the
            # head and the table stays one.
            def extra() -> torch.Tensor:
                return self.new_tokens(hidden_states.to(self.new_tokens.weight.dtype)).to(hidden_states.dtype)

            return self.table(hidden_states, targets, positions=positions, extra=extra, known=self.known)
        old = self.table(hidden_states)[..., : self.known]  # a table may have more rows than its tokenizer has tokens
        new = self.new_tokens(hidden_states.to(self.new_tokens.weight.dtype))  # (..., N)
        if old.requires_grad:
            # Its gradient is a slice of rows of K + N numbers, an odd number mostly. In 16 bits, products on a GPU are
            # then five times as slow as after a copy.
            old.register_hook(torch.Tensor.contiguous)
        return torch.cat((old, new.to(old.dtype)), dim=-1)


def initial_rows(known: torch.Tensor, new: int) -> torch.Tensor:
    """Return (N, D) from (K, D): near the mean of the known rows, but different from each other."""
    known = known.float()
    noise = torch.randn(new, known.shape[1], device=known.device)
    return known.mean(0) + INITIAL_SPREAD * known.std() * noise


def extend_vocabulary(model: PreTrainedModel, ids: TokenIds) -> None:
    """Give `model` rows for the new tokens, in place. Raises ParamError if its tables are of another kind or size."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(table, nn.Embedding) or not isinstance(head, nn.Linear):
        words = f"{type(model).__name__} embeds with {type(table).__name__} and predicts with {type(head).__name__}"
        raise ParamError("language", f"{words}; new tokens need nn.Embedding and nn.Linear")
    if not ids.new:
        return
    check_tokens(model, ids.known)
    embedding = ExtendedEmbedding(table, ids.known, ids.new)
    shared = embedding.new_tokens if head.weight is table.weight else None
    extended_head = ExtendedHead(head, ids.known, ids.new, shared)
    model.set_input_embeddings(embedding)
    model.set_output_embeddings(extended_head)
    _rename_ties(model)
    model.config.get_text_config().vocab_size = ids.known + ids.new
    if saved_new_tokens(model) == ids.new:
        # Move the rows that `merge_vocabulary` appended to the tables back into their own.
        rows, head_rows = table.weight, head.weight
        with torch.no_grad():
            embedding.new_tokens.weight.copy_(rows[ids.known : ids.known + ids.new])
            extended_head.new_tokens.weight.copy_(head_rows[ids.known : ids.known + ids.new])
        _replace_rows(table, head, ids.known, rows[: ids.known], head_rows[: ids.known])


def check_tokens(model: PreTrainedModel, known: int) -> None:
    """Raise ParamError if the embedding table has no rows for all tokens that a tokenizer knows."""
    table: Any = model.get_input_embeddings()
    rows = len(table.weight)
    if known > rows:
        words = f"the tokenizer has {known} tokens but the embedding table only {rows} rows"
        raise ParamError("language", f"{words}; use the tokenizer that belongs to the model")


def _rename_ties(model: PreTrainedModel) -> None:
    """Update the names of tied weights, for code that ties them again: transformers, and accelerate before FSDP1."""
    names = {module: name for name, module in model.named_modules()}
    table, head = names[model.get_input_embeddings()], names[model.get_output_embeddings()]
    ties: Any = model._tied_weights_keys
    if isinstance(ties, dict) and ties.get(f"{head}.weight") == f"{table}.weight":
        ties = {key: value for key, value in ties.items() if key != f"{head}.weight"}
        for part in ("table", "new_tokens"):
            ties[f"{head}.{part}.weight"] = f"{table}.{part}.weight"
        model._tied_weights_keys = ties


def saved_new_tokens(model: PreTrainedModel) -> int:
    """Return how many of a language model's last tokens were appended by `merge_vocabulary`."""
    return getattr(model.config, CONFIG_KEY, 0)


def merge_vocabulary(model: PreTrainedModel, ids: TokenIds) -> None:
    """Undo `extend_vocabulary`, in place: append the new rows to the tables, which then have K + N rows.

    The configuration says that the last N are new, so that `extend_vocabulary` separates them again.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, ExtendedEmbedding) or not isinstance(head, ExtendedHead):
        return
    merged = []
    for part in (embedding, head):
        known = part.table.weight[: ids.known]
        merged.append(torch.cat((known, part.new_tokens.weight.to(known.dtype))))  # (K + N, D)
    _replace_rows(embedding.table, head.table, ids.known, *merged)
    model.set_input_embeddings(embedding.table)
    model.set_output_embeddings(head.table)
    model.__dict__.pop("_tied_weights_keys", None)
    model.config.get_text_config().vocab_size = ids.known + ids.new
    setattr(model.config, CONFIG_KEY, ids.new)


def _replace_rows(
    table: nn.Embedding, head: nn.Linear, known: int, rows: torch.Tensor, head_rows: torch.Tensor
) -> None:
    """Give both tables other rows (rows, D), K of them known; tables that share their weight still do."""
    tied = head.weight is table.weight
    table.weight = nn.Parameter(rows.detach().clone())
    head.weight = table.weight if tied else nn.Parameter(head_rows.detach().clone())
    if head.bias is not None:  # new tokens have none
        head.bias = nn.Parameter(F.pad(head.bias.detach()[:known], (0, len(head_rows) - known)))
    table.num_embeddings, head.out_features = len(rows), len(head_rows)
