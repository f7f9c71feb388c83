"""Both pictures of a plan as HTML: pointing at a unit in one lights it in the other, and says what it is.

No script is needed for that: rules of a style sheet do it, so it works in a notebook, in a report and in an exported
page. One moves the play head; where none runs, the head stands still.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

from ....core.plan import WrapPlan
from ....params import RunParams
from ....predict.timeline import Timeline, step_timeline
from ..markup import note
from .opened_patterns import opened_patterns, opening_controls, opening_rules
from .play_head import PlayHead
from .rank_picture import WIDTH, Lanes, rank_picture
from .step_picture import step_picture
from .unit_boxes import Box, about

HINT = "Point at a unit, or press Tab, to see what it is and why."
OPENS = "Click a repeated pattern, or press the space bar, to open it."
"""Both are one line in a cockpit: a second one would cover the title of the next picture."""
AT_REST, AT_HEAD = "What each rank holds between steps", "What each rank holds"
BOXES = "a box is a unit, as wide as its parameters"
COLORS = "green and pink: at the play head"
PLAY = '<button type="button" class="mm-play" data-lm-suppress-shortcuts="true" hidden>Play</button>'
"""It is shown where a script runs."""
NO_EXAMPLE = "One step on a rank is drawn for a plan with an example: add one, and activations are counted, too."


def timeline_of(params: RunParams, plan: WrapPlan) -> Timeline | None:
    """Return the timeline of a step of a run; None for a plan without an example."""
    return step_timeline(plan, params.train, sources=len(params.data.sources()))


def plan_pictures(
    plan: WrapPlan,
    timeline: Timeline | None,
    *,
    pinned: Timeline | None = None,
    activations: bool = False,
    width: int = WIDTH,
    missing: str = NO_EXAMPLE,
    scale_to: int = 0,
) -> str:
    """Return what each rank holds between steps, and one step on a rank, as HTML.

    timeline: of the plan, if it has an example. pinned: another plan's, drawn as a dashed line. activations: draw them,
    too. missing: why there is no timeline, in words. scale_to: see `step_picture`.
    """
    lanes = Lanes(plan, width)
    boxes = lanes.boxes
    head = PlayHead(plan, timeline, lanes) if timeline else None
    html = _title(AT_REST, BOXES)
    beneath: list[str] = []
    above: list[str] = []
    if head:
        html = _title(AT_HEAD, f"{BOXES}; {COLORS}")
        beneath, above = head.beneath(), head.above()
    picture = rank_picture(plan, lanes=lanes, beneath=beneath, above=above) + opening_controls(lanes)
    html += _scrolling(f'<div class="mm-lanes">{picture}</div>')
    opened = opened_patterns(lanes, width)
    html += opened
    hint = f"{HINT} {OPENS}" if opened else HINT
    lines = "".join(f'<span class="mm-b{place}">{escape(about(plan, box))}</span>' for place, box in enumerate(boxes))
    html += f'<p class="mm-about" aria-live="polite"><span class="mm-hint">{hint}</span>{lines}</p>'
    if timeline is None or head is None:
        return _linked(html + note(missing), boxes)
    html += f'<p class="mm-now"><span>{escape(head.sentence(head.fullest))}</span></p>'
    html += f'<div class="mm-step-title">{_title("One step on a rank", _calls(timeline))}{PLAY}</div>'
    picture = step_picture(
        plan, timeline, pinned=pinned, activations=activations, width=width, scale_to=scale_to, head=head
    )
    html += _scrolling(head.control(width) + picture)
    return _linked(html, boxes)


def _title(words: str, about_it: str) -> str:
    return f'<h3 class="mm-title">{words} <span class="mm-quiet">{about_it}</span></h3>'


def _scrolling(picture: str) -> str:
    """Return a picture that is scrolled on a narrow page, not scaled down: its text stays legible."""
    return f'<div class="mm-scroll" tabindex="0" role="group" aria-label="picture">{picture}</div>'


def _calls(timeline: Timeline) -> str:
    """Return the collectives of a step in words."""
    counts = Counter(collective.kind for collective in timeline.collectives)
    calls = ", ".join(f"{number} {kind}{'s' if number > 1 else ''}" for kind, number in counts.items())
    micro_steps = f"; {timeline.micro_steps} micro-steps are drawn" if timeline.micro_steps > 1 else ""
    return f"{calls or 'nothing is sent'}{micro_steps}"


def _linked(html: str, boxes: Sequence[Box]) -> str:
    """Return HTML in which all that has the class of a box is lit while one of it is pointed at, or has the focus."""
    rules = opening_rules(boxes)
    for place in range(len(boxes)):
        name = f".mm-b{place}"
        # One rule for the pictures and the line beneath, where style.py takes the outline away: a rule for each box.
        rules += f".mm-plan:has({name}:is(:hover,:focus-visible)) {name}{{outline:2px solid;display:inline}}\n"
    return f'<div class="mm-plan"><style>{rules}</style>{html}</div>'
