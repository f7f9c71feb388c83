"""Parameters as the flags of a command line, and back: for `mmfsdp` itself, and for a form."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

from .check import ParamError, unknown_key
from .presets import load
from .run import RunParams, read_yaml

COMMANDS = ("run", "launch", "plan")


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in nested mappings that is not one with something in it."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value


def differences(a: RunParams, b: RunParams) -> dict[str, tuple[Any, Any]]:
    """Dotted name -> (value in a, value in b) of what differs, as plain data; None where there is none."""
    old, new = dict(leaves(a.to_dict())), dict(leaves(b.to_dict()))
    return {n: (old.get(n), new.get(n)) for n in old | new if old.get(n) != new.get(n)}


def command_line(params: RunParams, config: str | None = None, *, command: str = "run") -> str:
    """The command that does a run with these parameters. config: a preset or YAML file to start from.

    What cannot be a flag (a key that the file's architecture lacks, further encoders) is named in a comment.
    """
    base = load(config) if config else RunParams()
    words = ["mmfsdp", command, *(["--config", config] if config else [])]
    rest: dict[str, str] = {}
    old, new = dict(leaves(base.to_dict())), dict(leaves(params.to_dict()))
    for name in differences(base, params):
        flag = _flag(name, new[name], old[name]) if name in old and name in new else None
        words += flag or ()
        rest |= {} if flag else {name.split(".config")[0]: ""}
    line = shlex.join(words)
    return line + f"\n# no flags say all of {', '.join(rest)}: save the YAML, and give it as --config" * bool(rest)


def _flag(name: str, value: Any, was: Any) -> list[str] | None:
    """The words that set a value; None where there are none."""
    dashed = name.replace("_", "-")
    if name == "data.more":
        return [f"--{dashed}", yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).strip()]
    if isinstance(value, bool) and isinstance(was, bool):
        *path, last = dashed.split(".")
        return ["--" + ".".join([*path, last if value else f"no-{last}"])]
    if isinstance(value, list) and isinstance(was, list):
        return None if any(isinstance(v, (dict, list)) for v in value + was) else [f"--{dashed}", *map(str, value)]
    return None if isinstance(value, (dict, list)) or isinstance(was, (dict, list)) else [f"--{dashed}", str(value)]


def read_command_line(text: str) -> tuple[RunParams, str | None]:
    """The parameters that a command line says, and its --config. Raises ParamError; understands no -h."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise ParamError("command line", f"{error}: close the quote") from None
    if words[:1] != ["mmfsdp"] or words[1:2] not in [[c] for c in COMMANDS]:
        raise ParamError(
            "command line", f"begins {' '.join(words[:2])!r}; begin it with mmfsdp {' or '.join(COMMANDS)}"
        )
    return read_words(words[2:])


def read_words(words: Iterable[str], *, default: RunParams | None = None) -> tuple[RunParams, str | None]:
    """The parameters that the words after a command say, over `default`, and their --config. Raises ParamError."""
    flags: list[tuple[str, list[str]]] = []
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            flags.append((name[2:].replace("-", "_"), [value] if equals else []))
        elif flags:
            flags[-1][1].append(word)
        else:
            raise ParamError("command line", f"{word!r} belongs to no flag; flags begin with --")
    config = None
    if flags and flags[0][0] == "config":
        config = _one("config", flags.pop(0)[1])
    if any(name == "config" for name, _ in flags):
        raise ParamError("config", "must come first, before the flags that change it, and once")
    base = load(config) if config else default or RunParams()
    known = dict(leaves(base.to_dict()))
    for name, values in list(known.items()):  # those of lists of mappings, too: data.more.0.weight
        items = {f"{name}.{i}": one for i, one in enumerate(values)} if isinstance(values, list) else {}
        known |= dict(leaves({key: one for key, one in items.items() if isinstance(one, dict)}))
    return base.change(**dict(_value(name, values, known) for name, values in flags)), config


def taken(argv: list[str], flag: str, *, many: bool = False) -> list[str]:
    """The value of a flag that is no parameter, taken out of argv: one word, or with `many` all up to the next flag;
    none where the flag is not there. Raises ParamError for a flag without a value."""
    place = next((i for i, word in enumerate(argv) if word.partition("=")[0] == flag), None)
    if place is None:
        return []
    _, equals, value = argv[place].partition("=")
    end = next((i for i in range(place + 1, len(argv)) if argv[i].startswith("--")), len(argv))
    end = end if many else min(end, place + 1 + (not equals))
    words = [value] * bool(equals) + argv[place + 1 : end]
    if not words:
        raise ParamError(flag.lstrip("-"), "needs a value")
    del argv[place:end]
    return words


def number_taken(argv: list[str], flag: str, of: str) -> int | None:
    """The same of a flag that says how many: from 1; None where it is not there. of: what is counted."""
    words = taken(argv, flag)
    if words and not (words[0].isdecimal() and int(words[0])):
        raise ParamError(flag.lstrip("-"), f"{words[0]!r} is not a number of {of} from 1")
    return int(words[0]) if words else None


def _value(name: str, words: list[str], known: dict[str, Any]) -> tuple[str, Any]:
    """(dotted name, plain value) of a flag."""
    *path, last = name.split(".")
    turned = ".".join([*path, last.removeprefix("no_")])
    if name not in known and isinstance(known.get(turned), bool):
        name, words = turned, ["False", *words]
    if name not in known:
        raise unknown_key(name, [*known, "config"])
    was = known[name]
    if name == "data.more":
        return name, read_yaml(_one(name, words), name=name)
    if isinstance(was, list):
        return name, words
    if isinstance(was, bool) and not words:
        return name, True
    word = _one(name, words)
    if isinstance(was, bool) or word in ("None", "True", "False"):
        return name, {"None": None, "True": True, "False": False}.get(word, word)
    if ".config." in name and isinstance(was, (int, float)):
        number = read_yaml(word, name=name)
        if not isinstance(number, (int, float)):
            raise ParamError(name, f"{word!r} is not a number, as {was} is")
        return name, number
    return name, word


def _one(name: str, words: list[str]) -> str:
    if len(words) != 1:
        raise ParamError(name, f"has {len(words) or 'no'} values{f', {shlex.join(words)}' * bool(words)}; give it one")
    return words[0]
