"""`%%part 2 NAME`: writes a cell into my_fsdp.py, the file that lessons 02, 03 and 05 build in seven steps."""

from __future__ import annotations

import ast
import json
import os
import re
import zlib
from base64 import b64decode
from pathlib import Path

from mmfsdp.kit.cli import class_copy

HERE = Path(__file__).resolve().parent
MARK = "# ---- part "
LAST = "prefetch"
"""The part of step 7, in which functions of step 3 are written anew."""
broken: set[str] = set()
"""Parts whose last cell had a syntax error."""


def own_file() -> Path:
    """Return the path of the learner's file."""
    return Path(os.environ["MMFSDP_COURSE"]).resolve() / "my_fsdp.py"


def read_parts(text: str) -> dict[str, str]:
    """Return the parts of a file, by name, in their order."""
    pieces = re.split(rf"^{MARK}(\w+)\n", text, flags=re.MULTILINE)
    return {name: code.strip() for name, code in zip(pieces[1::2], pieces[2::2], strict=True)}


def own_parts() -> dict[str, str]:
    """Return the parts of the learner's file; none if there is no file yet."""
    return read_parts(own_file().read_text(encoding="utf-8")) if own_file().is_file() else {}


def write_parts(parts: dict[str, str]) -> None:
    """Write the learner's file."""
    own_file().parent.mkdir(parents=True, exist_ok=True)
    text = "\n\n\n".join(f"{MARK}{name}\n{code}" for name, code in parts.items())
    own_file().write_text(text + "\n", encoding="utf-8")


def lesson_parts() -> list[class_copy.Part]:
    """Return what the solutions of these lessons write, in order."""
    packed = HERE / "parts.txt"
    if packed.is_file():  # the class's copy, whose lessons have no solutions
        return [class_copy.Part(*part) for part in json.loads(zlib.decompress(b64decode(packed.read_text())))]
    return class_copy.lesson_parts(HERE.parent)


def parts_after(step: int) -> dict[str, str]:
    """Return the parts of the file as it should be after this step."""
    return {part.name: part.code for part in lesson_parts() if part.step <= step}


def catch_up(line: str) -> None:
    """Write my_fsdp.py as it should be after a step: the line magic `%catch_up 2`. Your own is kept beside it.

    `%catch_up 3 collectives` writes that part of step 3 only, into your own file. Raises ValueError for other words.
    """
    words = line.split()
    if len(words) == 2:
        write_one_part(*words)
        return
    step = int(line)
    if own_file().is_file():
        own_file().replace(own_file().with_name("my_fsdp_before.py"))
        print("Your own file is now my_fsdp_before.py.")
    write_parts(parts_after(step))
    broken.clear()
    print(f"{os.path.relpath(own_file())} is as after step {step}.")


def write_one_part(step: str, name: str) -> None:
    """Write one part as the solution of a step has it, and leave the others. Raises ValueError."""
    names = [part.name for part in lesson_parts() if str(part.step) == step]
    if name not in names:
        raise ValueError(f"%catch_up: step {step} has no part {name!r}; it has {', '.join(names) or 'none: 1 to 7'}")
    write_parts(own_parts() | {name: parts_after(int(step))[name]})
    broken.discard(name)
    print(f"{os.path.relpath(own_file())} has {name} as the solution of step {step} has it.")


def go_on_from(line: str) -> None:
    """Go on with your own file if it has all parts of the steps so far, else catch up: `%go_on_from 4`."""
    step = int(line)
    missing = [name for name in parts_after(step) if name not in own_parts()]
    unfinished = [name for name, code in own_parts().items() if blanks(code)]
    if missing or unfinished:
        print(f"Not written yet: {', '.join(missing + unfinished)}.")
        catch_up(line)
    else:
        print(f"Your own file: {os.path.relpath(own_file())}")


def blanks(code: str) -> list[str]:
    """Return the lines on which three dots still stand for an answer."""
    tree = ast.parse(code)
    in_brackets = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Subscript) for inner in ast.walk(node)}
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value is ... and id(node) not in in_brackets:
            lines.append(code.splitlines()[node.lineno - 1].strip())
    return lines


def unfinished_function(code: str) -> str:
    """Return the name of the first function in which three dots still stand for an answer; "this part" if none."""
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef) and blanks(ast.unparse(node)):
            return node.name
    return "this part"


def part(line: str, cell: str) -> None:
    """Write a cell into the learner's file: the cell magic `%%part STEP NAME`. Raises ValueError."""
    words = line.split()
    if len(words) != 2 or not re.fullmatch(r"[1-7]", words[0]) or not words[1].isidentifier():
        raise ValueError(f"%%part: wants a step and a name, as in '%%part 1 shard_of', not {line!r}")
    try:
        open_lines = blanks(cell)
    except SyntaxError as error:
        broken.add(words[1])
        print(f"Line {error.lineno}: {error.msg}. my_fsdp.py is unchanged.")
        return
    broken.discard(words[1])
    parts = own_parts()
    parts[words[1]] = cell.strip()
    write_parts(parts)
    text = own_file().read_text(encoding="utf-8")
    count = len([row for row in text.splitlines() if row.strip() and not row.strip().startswith("#")])
    print(
        f"my_fsdp.py: {count} lines of code"
        + (f"; {len(open_lines)} times three dots to replace" if open_lines else "")
    )
    if LAST in parts and words[1] != LAST:
        print(f"(The part {LAST} of lesson 05, further down, replaces `gather` and two of the four moments.)")
