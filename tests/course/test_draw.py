"""Pictures of lessons and slides: their numbers and words are legible on the boxes that they stand on."""

import re

import pytest
from course.draw import collective, ledger, timeline

MIN_CONTRAST = 4.4
"""Between a text and its box. The accessibility guidelines ask for 4.5 where letters are small, and 3 for large."""
ON_A_BOX = re.compile(r"<rect [^>]*fill='(#\w{6})'>(?:<title>[^<]*</title>)?</rect><text [^>]*fill='(#\w+)'")
PICTURES = {
    "all-reduce": collective("all-reduce"),
    "ledger": ledger({"a rank": {"parameters": 26.0, "gradients": 26.0, "optimizer": 52.0, "gathered": 30.0}}),
    "timeline": timeline(),
}


def luminance(color):
    digits = color.removeprefix("#")
    if len(digits) == 3:
        digits = "".join(2 * digit for digit in digits)
    linear = []
    for place in (0, 2, 4):
        share = int(digits[place : place + 2], 16) / 255
        linear.append(share / 12.92 if share <= 0.03928 else ((share + 0.055) / 1.055) ** 2.4)
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("name", PICTURES)
def test_text_on_a_box_is_legible(name):
    pairs = set(ON_A_BOX.findall(PICTURES[name]))
    assert len(pairs) >= 2
    for box, ink in pairs:
        dark, light = sorted((luminance(box), luminance(ink)))
        assert (light + 0.05) / (dark + 0.05) >= MIN_CONTRAST, (box, ink)


@pytest.mark.parametrize("limit", [20, 50, 52, 60, 80, 100])
def test_the_line_of_a_device_crosses_no_number(limit):
    picture = ledger({"DDP": {"parameters": 26.1, "gradients": 26.1, "optimizer": 52.2}}, limit=limit)
    line = float(re.search(r"<line x1='([\d.]+)'", picture)[1])
    numbers = re.findall(r"<text x='([\d.]+)' y='49.0' text-anchor='middle' fill='#\w+'>[\d.]+</text>", picture)
    assert len(numbers) == 3
    for x in numbers:
        assert abs(float(x) - line) > 16, (x, line)
