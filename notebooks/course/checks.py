"""Checks of the exercises: each says 'right' and keeps that in the learner's progress, or gives the hint that helps."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmfsdp import Run

RIGHT, HINT = "#009E73", "#D55E00"
Checker = Callable[..., "str | None"]
_CHECKS: dict[str, Checker] = {}


def exercise(name: str) -> Callable[[Checker], Checker]:
    """Register a checker: it takes what the learner gives `check` and returns a hint, or None where all is right."""

    def register(checker: Checker) -> Checker:
        assert name not in _CHECKS, name
        _CHECKS[name] = checker
        return checker

    return register


def hint_for(name: str, *given: Any) -> str | None:
    """The hint for what was given to exercise 'NN.name'; None if it is right. Raises ValueError for unknown names."""
    import_module(f".e{name.partition('.')[0]}", __package__)
    if name not in _CHECKS:
        raise ValueError(f"exercise: {name!r} is not one of {', '.join(sorted(_CHECKS))}")
    if any(value is ... for value in given):
        return "Not answered yet: put your own in place of the three dots `...`, run that cell, then this one."
    try:
        return _CHECKS[name](*given)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return f"That is not of the kind that is asked for, so it cannot be checked ({type(error).__name__}: {error})."


def check(name: str, *given: Any) -> None:
    """Say whether an exercise is right, with a hint if not; what is right is kept in the learner's progress."""
    from IPython.display import HTML, display

    hint = hint_for(name, *given)
    if hint is None:
        passed(name)
        unpack_reward(name)
    color, head, text = (RIGHT, "Right.", story(name)) if hint is None else (HINT, "Not yet.", hint)
    edge = f"border-left:6px solid {color};padding:4px 10px"
    display(HTML(f"<div style='{edge}' role='status'><b>{head}</b> {with_links(text)}</div>"))


def story(name: str) -> str:
    """What a lesson tells after an exercise that is right; nothing for most."""
    stories = getattr(import_module(f".e{name.partition('.')[0]}", __package__), "STORIES", {})
    return stories.get(name, "")


def with_links(text: str) -> str:
    """Text as HTML, in which the addresses are links."""
    return re.sub(r"https://[\w./-]*\w", r"<a href='\g<0>' target='_blank'>\g<0></a>", escape(text))


def compare(guess: Any, measured: float, unit: str = "") -> None:
    """A prediction beside what was measured; a blank one is welcome too."""
    if guess is ...:
        print(f"measured: {measured:,.6g} {unit}  (next time, write a guess down first: that is how it sticks)")
        return
    print(f"predicted: {guess:,.6g} {unit}   measured: {measured:,.6g} {unit}   {verdict(guess, measured)}")


def verdict(guess: float, measured: float) -> str:
    """How near a guess came: +12%, close."""
    off = (guess - measured) / measured if measured else float(guess != measured)
    words = "spot on" if abs(off) < 0.01 else "close" if abs(off) < 0.25 else "a surprise: read on"
    return f"{off:+.0%}, {words}"


def progress_file() -> Path:
    """Where this user's progress is kept: $MMFSDP_PROGRESS, or a file in the user's data folder."""
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(os.environ.get("MMFSDP_PROGRESS") or Path(home) / "mmfsdp" / "course.json")


def progress() -> set[str]:
    """Names of the exercises that this user has passed."""
    try:
        return set(json.loads(progress_file().read_text()))
    except (OSError, ValueError):
        return set()


def passed(name: str) -> None:
    """Add to the progress. A place that cannot be written is said, once, and harms nothing else."""
    file = progress_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(sorted(progress() | {name})))
        beside.replace(file)
    except OSError as error:
        print(f"(progress is not kept: {error})")


REWARDS = {"03.predict": "fsdp_in_200_lines.py"}
"""The last exercise of a file -> the finished file, which lies packed in the class's copy until then."""


def unpack_reward(name: str) -> None:
    """Unpack the finished file once its last exercise is right, and say so."""
    from mmfsdp.kit.cli.class_copy import unpacked

    if name not in REWARDS:
        return
    file = Path(__file__).resolve().parent.parent / REWARDS[name]
    source = unpacked(file.read_text(encoding="utf-8"))
    if source is not None:
        file.write_text(source, encoding="utf-8")
        print(f"{file.name} is unpacked now: the finished file, to compare with yours.")


def saved(name: str, ranks: int = 2) -> list[dict[str, Any]] | str:
    """What the ranks of a cell saved, or the hint that says why there is nothing to check."""
    from mmfsdp.kit.widgets.ranks_cell.ranks_magic import artifacts, results

    found = results(name)
    if not found:
        return f"There is nothing to check: run the `%%ranks {ranks} {name}` cell first."
    if len(found) != ranks:
        return f"This one is for {ranks} ranks, and the cell ran on {len(found)}: write `%%ranks {ranks} {name}`."
    if all(found):
        return found
    logs = [(artifacts(name) / f"{rank}.log").read_text(errors="replace") for rank in range(ranks)]
    for rank, log in enumerate(logs):
        for error in re.findall(r"^\w*(?:Error|Exception): .*", log, re.MULTILINE):
            if "gloo" not in error:  # gloo's only tells that another rank has failed
                explained = [text for pattern, text in EXPLAINED.items() if re.search(pattern, error)]
                return f"Rank {rank} failed: {error}" + "".join(f". {text}" for text in explained[:1])
    for said, hint in STOPPED.items():
        if any(said in log for log in logs):
            return hint
    return f"Rank {found.index({})} ended without a `save(...)`."


EXPLAINED = {
    "operand.*NoneType|(got|not) NoneType|'NoneType' object has no attribute": "Something is None here: a gradient "
    "before the first one, or what a collective returns. A collective changes its tensor in place, and returns None.",
    "Expected parameter `tensor` of type torch.Tensor": "Send and receive tensors. `mine` and `other` are numbers of "
    "ranks, `halves[mine]` is a tensor.",
    "expected Tensor as element .* but got int": "Is a tensor replaced by what `recv` returns? It fills its tensor in "
    "place, and returns the number of the rank that sent it.",
    "Must specify global_rank or group_rank": "Name the rank whose tensor all ranks get: `src=0`.",
    "name 'math' is not defined": "Write `import math` in your own cell, or round up with `//`.",
}
"""What an error of Python says, as a pattern -> what a learner may not see in it."""


def cell_code(name: str) -> str:
    """The code of the newest `%%ranks` cell of this name."""
    from mmfsdp.kit.widgets.ranks_cell.ranks_magic import artifacts

    return (artifacts(name) / "cell.py").read_text(encoding="utf-8")


def names_in(name: str, begin: str, end: str) -> set[str]:
    """The words in a cell's code between two marks, comments apart."""
    code = cell_code(name).partition(begin)[2].partition(end)[0]
    return set(re.findall(r"\w+", re.sub(r"#.*", "", code)))


DEADLOCK = (
    "The ranks deadlocked: each waited for another one. Each `recv` needs a matching `send` on the other rank, and "
    "each collective needs every rank: compare, line by line, what the ranks call."
)
MISMATCH = (
    "A rank received more than its tensor holds: either the ranks' tensors have different shapes, or the ranks are in "
    "different collectives. Compare, line by line, what they call and with which shapes."
)
STOPPED = {
    "since nothing moved]": DEADLOCK,
    "op.preamble.length": MISMATCH,
    "s were over]": "The ranks were ended, since they were busy for too long. Above, each shows the line where it was: "
    "does a loop there never end?",
}
"""What a log says of ranks that neither failed nor saved -> the hint."""


_missed: set[str] = set()
"""Formulas of numbers that were wrong once."""


def is_number(given: Any) -> bool:
    """Whether this is a number, also one of numpy or torch."""
    return hasattr(given, "__float__") and not isinstance(given, (str, bool))


def number(given: Any, right: float, near: dict[float, str], formula: str, *, tolerance: float = 0.01) -> str | None:
    """The hint for a number, also of numpy or torch: one that belongs to a known slip; else, from the second on, a
    formula. tolerance: what it may be off, as a share."""
    if not is_number(given):
        return f"A number is wanted here, not {type(given).__name__}."
    value = float(given)
    if abs(value - right) <= tolerance * right:
        return None
    for slip, hint in near.items():
        if abs(value - slip) <= tolerance * slip:
            return hint
    far = f"{value:,.4g} is too {'large' if value > right else 'small'}."
    if formula in _missed:
        return f"{far} Think of {formula}"
    _missed.add(formula)
    return f"{far} Try once more; the next hint is the formula."


def power_of_two(given: Any) -> int | None:
    """The power of two that was given, also as a float or of numpy or torch; None for anything else."""
    if not is_number(given):
        return None
    value = int(given) if float(given).is_integer() else 0
    return value if value > 0 and value & (value - 1) == 0 else None


def unanswered(said: Mapping[str, object]) -> str | None:
    """The hint for answers that are not True or False yet."""
    for question, answer in said.items():
        if answer not in (True, False):
            return f"Put True or False, without quotes, for {question!r}."
    return None


def run_of(name: str) -> Run | str:
    """A run of the lessons by its name, or the hint that says that there is none."""
    from mmfsdp import Run
    from mmfsdp.kit.widgets.ranks_cell.ranks_magic import artifacts
    from mmfsdp.params import ParamError

    try:
        return Run.open(artifacts("runs") / name)
    except ParamError:
        return f"There is no run {name!r} yet: run the cells above that make it."
