"""New tokens beside the frozen tables."""

import pytest
import torch

from mmfsdp.kit.models import TokenIds

TIED = [("llama", False), ("llama", True), ("gpt2", True), ("gpt2", False), ("opt", True), ("gpt_neox", False)]


@pytest.mark.parametrize(("family", "tied"), TIED)
def test_tables_are_kept_and_shared_as_before(family, tied, build):
    model = build(family, config={"tie_word_embeddings": tied})
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert (embedding.table.weight is head.table.weight) == tied
    assert (embedding.new_tokens.weight is head.new_tokens.weight) == tied
    assert embedding.table.weight.shape[0] == 60 and embedding.new_tokens.weight.shape[0] == 3

    ids = torch.tensor([[4, 60, 59, 62]])
    rows = torch.cat((embedding.table.weight, embedding.new_tokens.weight))
    assert torch.equal(embedding(ids), rows[ids])
    hidden = torch.randn(1, 4, rows.shape[1])
    out_rows = torch.cat((head.table.weight, head.new_tokens.weight))
    torch.testing.assert_close(head(hidden), hidden @ out_rows.T)


def test_a_table_with_more_rows_than_tokens_is_cut_at_the_tokens(build):
    model = build("qwen2", tokens=TokenIds(image=51, end_of_chunk=50, pad=52, known=50, new=3))
    assert model(torch.tensor([[4, 49]])).logits.shape == (1, 2, 53)
    embedding = model.get_input_embeddings()
    assert torch.equal(embedding(torch.tensor([50])), embedding.new_tokens.weight[:1])
    assert model.config.vocab_size == 53
