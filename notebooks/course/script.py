"""The scripts of the clinic: `%open_script 3`, `%run_script 3 TOOL`, `%my_changes 3`, and `%%edit_script 3`.

Each script has a bug. A learner edits a copy of it, and the check runs the copy on two ranks and looks at what comes
of it.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
import shutil
from html import escape
from pathlib import Path
from typing import Any

from mmfsdp.kit.hangs.stacks import short_stacks
from mmfsdp.kit.widgets.ranks_cell.ranks_magic import artifacts, run_on_ranks, shown

from .checks import saved
from .draw import Picture
from .file_parts import HERE, own_file

ORIGINALS = HERE / "clinic"
RANKS = 2
ANOTHER_ORDER = "[once more, with the batches in another order]"
"""What is printed before the second run of a script."""
MOVED = {1, 4, 9}
"""Scripts in which some batches are special: a check runs them a second time, with these in other steps and ranks."""
TOOLS = {
    "": "nothing beside it",
    "stacks": "where each rank is when nothing moves",
    "detail": "TORCH_DISTRIBUTED_DEBUG=DETAIL",
    "recorder": "torch's flight recorder",
    "counts": "how many collectives a step has",
    "describe": "mmfsdp's plan of the wrapped model, with its lint",
    "trace": "a trace of torch's profiler",
    "verify": "mmfsdp.verify",
    "one_rank": "the script on one rank",
}
OWN_WORDS = (
    r"Rank (\d) is running collective: CollectiveFingerPrint\(SequenceNumber=(\d+), OpType=(\w+), TensorShape=\[(.*?)\]"
)
"""What torch says with DETAIL of a rank's collective."""

ENDED = "[ended here, since "
"""Begins the line after which a rank is ended. What a rank says later comes only from the end of another one."""

NAMED = rf"\n\[[^\n]*(?:never entered|have entered|the process of)[^\n]*\](?=\n{re.escape(ENDED)})"
"""mmfsdp's own line on a hang: which rank the others wait for."""

CALLERS = ("/course/script_rank.py", ": run(globals()")
"""Words in the lines of a stack that call the script."""


def exercise_name(number: int) -> str:
    """Return the name of a script's exercise."""
    return f"08.bug{number}"


def original(number: int) -> Path:
    """Return the path of a script as it ships. Raises ValueError for a number that no script has."""
    files = sorted(ORIGINALS.glob(f"{number:02d}_*.py"))
    if not files:
        numbers = [int(file.name[:2]) for file in sorted(ORIGINALS.glob("[0-9][0-9]_*.py"))]
        raise ValueError(f"there is no script {number}; there are {', '.join(map(str, numbers))}")
    return files[0]


def own_script(number: int) -> Path:
    """Return the path of the learner's copy; it is made if there is none."""
    source = original(number)
    copy = own_file().parent / "clinic" / source.name
    if not copy.is_file():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    return copy


def changed_figures(number: int) -> dict[str, tuple[Any, Any]]:
    """Return the figures at the top of a script that are others in the learner's copy: {name: (before, now)}."""
    before = figures_of(original(number).read_text(encoding="utf-8"))
    now = figures_of(own_script(number).read_text(encoding="utf-8"))
    return {name: (before[name], now[name]) for name in before if name in now and now[name] != before[name]}


def figures_of(text: str) -> dict[str, Any]:
    """Return the constants of a script, such as STEPS; {} if it has a syntax error."""
    figures: dict[str, Any] = {}
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return figures
    for line in tree.body:
        if isinstance(line, ast.Assign):
            target = line.targets[0]
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            values = line.value.elts if isinstance(line.value, ast.Tuple) else [line.value]
            for name, value in zip(names, values, strict=False):
                if isinstance(name, ast.Name) and name.id.isupper() and isinstance(value, ast.Constant):
                    figures[name.id] = value.value
    return figures


def ran(number: int) -> list[dict[str, Any]] | str:
    """Run the learner's script, unless it has run as it is; return what the ranks saved, or a hint why they did not."""
    run_if_changed(number)
    return saved(exercise_name(number))


def run_if_changed(number: int) -> list[str]:
    """Return what each rank printed, of a run of the script as it is now."""
    name, code = exercise_name(number), with_call(number, "")
    logs = [artifacts(name) / f"{rank}.log" for rank in range(RANKS)]
    cell = artifacts(name) / "cell.py"
    if cell.is_file() and cell.read_text(encoding="utf-8") == code and all(log.is_file() for log in logs):
        return [log.read_text(errors="replace") for log in logs]
    return run_on_ranks(code, RANKS, name)


def with_call(number: int, tool: str) -> str:
    """Return the code of the learner's script, and after it, so that its lines keep their numbers, what runs it."""
    name = exercise_name(number) + (f".{tool}" if tool else "")
    again = f", again={ANOTHER_ORDER!r}" if number in MOVED and not tool else ""
    call = f"run(globals(), {tool!r}, {str(artifacts(name))!r}, save{again})"
    script = own_script(number).read_text(encoding="utf-8").rstrip("\n")
    return f"{script}\n\n\nfrom course.script_rank import run\n\n{call}\n"


def open_script(line: str) -> None:
    """Say where the learner's copy of a script is, with a link: the line magic `%open_script 3`."""
    from IPython.display import HTML, display

    file = own_script(int(line))
    path = os.path.relpath(file)
    count = len(file.read_text(encoding="utf-8").splitlines())
    link = f"<a href='{escape(path)}' target='_blank'>{escape(path)}</a>"
    command = f"torchrun --nproc-per-node 2 {file.name}"
    where = f"in a terminal in its folder: <code>{escape(command)}</code>"
    display(HTML(f"Open {link} ({count} lines), edit it and save it. It also runs {where}"))


def run_script(line: str) -> None:
    """Run the learner's script on two ranks, with a tool beside it: the line magic `%run_script 3 stacks`."""
    from IPython.display import HTML, display

    number, tool = number_and_tool(line)
    if not tool:
        display(HTML(shown(readable(number, run_if_changed(number)))))
        return
    name = f"{exercise_name(number)}.{tool}"
    ranks = 1 if tool == "one_rank" else RANKS
    texts = readable(number, run_on_ranks(with_call(number, tool), ranks, name), tool)
    if tool == "detail":
        texts = [short_fingerprints(text) for text in texts]
    display(HTML(shown(texts)))
    if tool == "recorder":
        print(recorder_table(artifacts(name)))
    if tool == "trace":
        show_trace(artifacts(name))


def show_trace(folder: Path) -> None:
    """Draw the last step of rank 0, and say where the trace is."""
    from IPython.display import display

    from mmfsdp.kit.widgets.report import timeline

    file = folder / "summary.json"
    if file.is_file():
        figures = json.loads(file.read_text(encoding="utf-8"))
        picture = timeline(figures["lanes"], seconds=figures["seconds"], title="the last step of rank 0")
        display(Picture(picture))
        trace = os.path.relpath(folder / "trace_of_rank_0.json.gz")
        print(f"Every operation of all steps is in {trace}: drop this file into the page https://ui.perfetto.dev")


def number_and_tool(line: str) -> tuple[int, str]:
    """Return the words of `%run_script`. Raises ValueError for others."""
    words = [*line.split(), "", ""]
    number, tool = words[:2]
    if not number.isdigit() or tool not in TOOLS or any(words[2:]):
        tools = ", ".join(filter(None, TOOLS))
        raise ValueError(f"%run_script: wants a number and perhaps a tool ({tools}), as in '%run_script 3 stacks'")
    return int(number), tool


def readable(number: int, texts: list[str], tool: str = "") -> list[str]:
    """Return the ranks' texts with the script under its own name, and of torch's frames in a stack only the first.

    Which rank the others wait for is left for the learner to find, but beside the records that tell it.
    """
    found = []
    name, count = original(number).name, len(own_script(number).read_text(encoding="utf-8").splitlines())
    for text in texts:
        lines = []
        until_ended = re.sub(rf"^({re.escape(ENDED)}.*)\n[\s\S]*", r"\1", text, count=1, flags=re.MULTILINE)
        if tool != "recorder":
            until_ended = re.sub(NAMED, "", until_ended)
        for line in re.sub(r"(?:[^\s\"]*/)?\bcell\.py\b", name, until_ended).splitlines():
            frame = re.match(rf'  File "{re.escape(name)}", line (\d+) in ', line)
            if any(word in line for word in CALLERS) or (frame and int(frame[1]) > count):
                continue
            lines.append(line)
        found.append(short_stacks("\n".join(lines)))
    return found


def short_fingerprints(text: str) -> str:
    """Return a rank's text with what DETAIL says of the collectives, in one line each."""
    lines = []
    for line in text.splitlines():
        for rank, number, kind, shape in re.findall(OWN_WORDS, line):
            lines.append(f"DETAIL: rank {rank} is in collective {number}: {kind.strip('_')}, a tensor of [{shape}]")
        if "CollectiveFingerPrint" not in line:
            lines.append(line)
    return "\n".join(lines)


def recorder_table(folder: Path, last: int = 12) -> str:
    """Return the last collectives of each rank, side by side."""
    by_rank = []
    for rank in range(RANKS):
        file = folder / f"records_{rank}.json"
        entries = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
        by_rank.append({entry["collective_seq_id"]: entry for entry in entries})
    most = max((number for entries in by_rank for number in entries), default=0)
    lines, different = [f"{'':8}{'rank 0':34}rank 1"], False
    for number in range(max(1, most - last + 1), most + 1):
        words = [_entry(entries.get(number)) for entries in by_rank]
        kinds = {word.partition(" (")[0] for word in words}
        different = different or len(kinds) > 1
        lines.append(f"{number:5} {'!' if len(kinds) > 1 else ' '} {words[0]:34}{words[1]}".rstrip())
    end = "!  the ranks are in different collectives" if different else "Both ranks are in the same collectives."
    return "\n".join([*lines, end])


def _entry(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "-"
    kind = entry["profiling_name"].removeprefix("gloo:")
    sizes = " ".join(str(size) for size in entry["input_sizes"])
    return f"{kind} {sizes}".rstrip() + f" ({'done' if entry['retired'] else 'waits'})"


def my_changes(line: str) -> None:
    """Print what the learner has changed in a script: the line magic `%my_changes 3`."""
    number = int(line)
    before = original(number).read_text(encoding="utf-8").splitlines()
    after = own_script(number).read_text(encoding="utf-8").splitlines()
    lines = list(difflib.unified_diff(before, after, "as it was", "yours", lineterm="", n=1))
    print("\n".join(lines) or f"You have not changed {original(number).name} yet.")


def edit_script(line: str, cell: str) -> None:
    """Replace lines of the script as it ships: the cell magic `%%edit_script 3`. Raises ValueError.

    Lines that begin with `-` must stand in it, one after the other, and those after them with `+` take their place.
    """
    number = int(line)
    text = original(number).read_text(encoding="utf-8")
    for old, new in changes_in(cell):
        if text.count(old) != 1:
            raise ValueError(f"{original(number).name} has these lines {text.count(old)} times, not once:\n{old}")
        text = text.replace(old, new)
    own_script(number).write_text(text, encoding="utf-8")
    my_changes(line)


def changes_in(diff: str) -> list[tuple[str, str]]:
    """Return the pairs of old and new lines in a text of `-` and `+` lines."""
    pairs: list[tuple[str, str]] = []
    for block in re.findall(r"(?:^-.*\n?)+(?:^\+.*\n?)*", diff, re.MULTILINE):
        lines = block.splitlines()
        old = "".join(f"{row[1:]}\n" for row in lines if row.startswith("-"))
        new = "".join(f"{row[1:]}\n" for row in lines if row.startswith("+"))
        pairs.append((old, new))
    return pairs
