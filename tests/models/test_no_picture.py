"""A rank whose batch has no picture: the others wait for it for ever, and a blank picture is the way out."""

import pytest

from tests.pages import PAGES
from tests.without_picture import TIMEOUT_S, results


@pytest.mark.real
def test_without_a_blank_picture_the_other_rank_waits_and_with_one_the_loss_is_the_same():
    hanging, text_only = results(blank=False)
    assert hanging.startswith(f"Timed out waiting {TIMEOUT_S}000ms")
    both = results(blank=True)
    assert both[0].startswith("loss ") and both[1] == text_only
    page = (PAGES / "no_picture.md").read_text()
    for line in (*both, f"Timed out waiting {TIMEOUT_S}000ms"):
        assert line in page
