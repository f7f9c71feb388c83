"""The stages of a run, by what its ranks report: how far each rank is, and how long it may take without a report.

A rank writes what it is about to do into its heartbeat (hang.py): `importing`, `building`, `step 5 compute`. The first
word tells the stage. Work that nobody can divide, such as imports from a network disk or a person's own reader, is
given more time than a step.
"""

from __future__ import annotations

from typing import NamedTuple

BACKBONES, PROCESSES, IMPORTS, PLAN, WEIGHTS = "backbones", "processes", "imports", "plan", "weights"
FIRST_STEP, STEPS, CAPTIONS = "first step", "steps", "captions"
PARTS = (BACKBONES, PROCESSES, IMPORTS, PLAN, WEIGHTS, FIRST_STEP, STEPS, CAPTIONS)
"""The parts of a run that a person sees, in order."""


class Stage(NamedTuple):
    """Describe what a rank does at one moment."""

    part: str
    """The part of the run that it belongs to; of a step, STEPS."""
    words: str
    """The words that a person reads."""
    patience: float
    """Multiple of `launch.silence_s` that a rank may take in it without a report; more is a hang."""


JOINING = "joining"
STAGES = {
    "importing": Stage(IMPORTS, "importing torch and transformers", 20),
    "starting": Stage(IMPORTS, "reading the parameters", 5),
    JOINING: Stage(PLAN, "joining the other ranks", 5),
    "building": Stage(PLAN, "building the model", 5),
    "opening": Stage(PLAN, "opening the data", 20),
    "planning": Stage(PLAN, "planning", 5),
    "wrapping": Stage(WEIGHTS, "sharding the weights", 5),
    "taking": Stage(WEIGHTS, "taking up where the run stands", 5),
    "step": Stage(STEPS, "training", 1),
    "trained": Stage(STEPS, "checking the frozen weights", 5),
    "captions": Stage(CAPTIONS, "captioning new pictures", 5),
}
"""First word of what a rank reports -> its stage, in the order in which a rank goes through them."""
NOT_STARTED = Stage(PROCESSES, "starting the processes", 5)
"""The stage of a rank that has not reported anything."""

STEP_PARTS = ("data", "compute", "profile", "held-out", "metric", "callback", "save")
"""Words after `step N`, in order."""
OF_ANY_LENGTH = ("profile", "metric", "callback", "save")
"""Those that write files, or run a person's own code: they may take longer than a step, and do not tell how long a step
takes."""
SLOW_FACTOR = 5
"""Multiple of `launch.silence_s` that the first step and those parts may take; other steps, of the longest so far."""

QUIET_S = 10.0
"""Seconds without a report after which a rank that trains stands out; or five of its steps, if they are longer."""
QUIET_SHARE = 0.5
"""Share of the time that a rank may take in any other stage, after which it stands out."""


class Activity(NamedTuple):
    """A heartbeat as data."""

    word: str
    """The first word of the activity, a key of STAGES if it is known."""
    step: int = 0
    """The step that the rank is in; 0 outside of steps."""
    part: str = ""
    """The part of the step, of STEP_PARTS if it is known."""
    detail: str = ""
    """More that the rank says, such as the name of a parameter or of a callback."""

    @property
    def stage(self) -> Stage:
        """Return the stage that it belongs to."""
        return STAGES.get(self.word, NOT_STARTED)


def parsed(activity: str) -> Activity:
    """Return what a heartbeat such as `step 5 compute` or `wrapping: head.weight` says."""
    told, _, detail = activity.partition(": ")
    words = [word.rstrip(":,") for word in told.split()] or [""]
    if words[0] == "step" and len(words) > 2 and words[1].isdecimal():
        return Activity("step", int(words[1]), words[2], " ".join(words[3:]) or detail)
    return Activity(words[0], detail=detail)


def stage_of(activity: str) -> Stage:
    """Return the stage of a rank that has reported this last."""
    return parsed(activity).stage


def progress_of(activity: str) -> tuple[int, int, int]:
    """Return how far a rank is as (stage, step, part of the step), by what it last reported."""
    told = parsed(activity)
    stage = list(STAGES).index(told.word) if told.word in STAGES else -1
    return stage, told.step, STEP_PARTS.index(told.part) if told.part in STEP_PARTS else 0


def is_step(activity: str) -> bool:
    """Return whether a rank that reports this is in a part of a step that tells how long steps take."""
    told = parsed(activity)
    return told.stage is STAGES["step"] and told.part not in OF_ANY_LENGTH


def patience_s(activity: str, silence_s: float) -> float:
    """Return the seconds without a report after which a rank hangs, where it is in no step or in its first one."""
    stage = stage_of(activity)
    return silence_s * (SLOW_FACTOR if stage is STAGES["step"] else stage.patience)


def quiet_s(activity: str, silence_s: float, step_s: float | None) -> float:
    """Return the seconds without a report after which a rank stands out. step_s: of its last step; None before one."""
    if step_s is not None and is_step(activity):
        return max(QUIET_S, 5 * step_s)
    return max(QUIET_S, QUIET_SHARE * patience_s(activity, silence_s))
