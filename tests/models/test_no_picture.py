"""A rank whose batch has no picture: the others wait for it for ever, and a blank picture is the way out."""

import pytest
from torch.distributed.fsdp import FSDPModule

from tests.pages import PAGES
from tests.without_picture import TIMEOUT_S, results


@pytest.mark.real
def test_without_a_blank_picture_the_other_rank_waits_and_with_one_the_loss_is_the_same():
    (hanging,), (text_only,) = results(blank=False)
    assert hanging.startswith(f"Timed out waiting {TIMEOUT_S}000ms")
    by_rank = results(blank=True)
    both = [lines[0] for lines in by_rank]
    assert both[0].startswith("loss ") and both[1] == text_only
    with_switch = by_rank[0][1:]
    if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # torch 2.13
        assert with_switch[-1].startswith("projector.weight of rank 0: its own gradient, and rank 1's of language")
        assert by_rank[1][1:] == with_switch
    page = (PAGES / "no_picture.md").read_text()
    for line in (*both, f"Timed out waiting {TIMEOUT_S}000ms", *with_switch):
        assert line in page
