"""Commands of a batch file, and options of srun: words in which bash expands variables, and does nothing else.

Each word is quoted in the batch file, so that none can end its line or start another command. What bash would do with
more than variables belongs into a script that `launch.setup` sources.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_PLAIN = r"[A-Za-z0-9_./:=@%+,^#~-]"
_USE = rf"\$(?:{_NAME}|\{{{_NAME}\}})"
_OPTIONAL = rf"\$\{{{_NAME}:?[-+](?:{_PLAIN}|{_USE})*\}}"
"""Forms in which a variable may be unset: ${NAME:-text}, ${NAME:+text}, and both without the colon."""
_WORD = re.compile(rf"(?:{_PLAIN}|{_OPTIONAL}|{_USE})+")
_OPTIONAL_OR_USE = re.compile(f"{_OPTIONAL}|{_USE}")
_NOT_A_WORD = re.compile("#|(.*[=:,])?~[^/]")
"""Words that bash does not take as they are: comments, and other users' home folders."""
_USED = re.compile(rf"\$(?:({_NAME})|\{{({_NAME})\}})")
_HOME = re.compile(r"(^|[=:,])~(?=/|$)")
"""Places at which bash reads ~ as the home folder."""

_EXAMPLES = "`export NAME=value` or `source $HOME/env.sh`"
_REFUSED = {
    r"[\n\r\x00-\x1f\x7f]": "it holds a line break or a control character",
    r"['\"\\]": "it holds a quote or a backslash; leave them out, since each word is quoted in the batch file",
    r"`|\$\(": "it holds a command inside a command",
    r"[;&|<>()]": "it is more than one simple command: it holds one of ; & | < > ( )",
    r"\$\{": "of ${...} only ${NAME}, ${NAME:-text} and ${NAME:+text} are allowed",
    r"[*?\[\]{}]": "it holds a pattern of file names, which is not expanded",
    r"(^| )#": "it holds a comment",
    r"(^|[ =:,])~[^/ ]": "it holds another user's home folder; write the path in full",
}
"""Pattern -> why a text that is not only words is refused. The first that is found counts."""


def check_words(text: str) -> str:
    """Return a text of words with single spaces between. Raises ValueError that says what is not allowed in it."""
    words = [word for word in text.split(" ") if word]
    if words and all(map(_WORD.fullmatch, words)) and not any(map(_NOT_A_WORD.match, words)):
        return " ".join(words)
    others = _OPTIONAL_OR_USE.sub("", text)
    reasons = [why for pattern, why in _REFUSED.items() if re.search(pattern, others)]
    why = reasons[0] if reasons else "it is empty, or holds other letters than those of ASCII"
    raise ValueError(f"{text!r} is not allowed: {why}. Write it as in {_EXAMPLES}; setup can source a script")


def needed_variables(command: str) -> list[str]:
    """Return the variables that must be set for a command, each once.

    One that may be unset is not among them: of ${NAME:-text} and ${NAME:+text}, and the one that the command itself
    sets, as in `export LD_LIBRARY_PATH=/x:$LD_LIBRARY_PATH`.
    """
    names: dict[str, None] = {}
    for word in command.split():
        assigned = re.match(rf"({_NAME})=", word)
        for use in _USED.finditer(re.sub(_OPTIONAL, "", word)):
            name = use[1] or use[2]
            if not (assigned and assigned[1] == name):
                names[name] = None
    return list(names)


def bash_words(command: str) -> str:
    """Return a command as bash is to read it: its words quoted, so that it expands variables in them and no more."""
    words = []
    for word in command.split():
        word = _HOME.sub(r"\1$HOME", word)
        words.append(f'"{word}"' if "$" in word else shlex.quote(word))
    return " ".join(words)


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Return one word as bash would expand it. Raises KeyError for a variable that must be set and is not."""

    def value(match: re.Match[str]) -> str:
        if simple := _USED.fullmatch(match[0]):
            return variables[simple[1] or simple[2]]
        parts = re.fullmatch(rf"\$\{{({_NAME})(:?)([-+])(.*)\}}", match[0])
        assert parts, match[0]
        name, colon, sign, other = parts.groups()
        is_set = bool(variables.get(name)) if colon else name in variables
        if sign == "-":
            return variables[name] if is_set else expanded(other, variables)
        return expanded(other, variables) if is_set else ""

    return _OPTIONAL_OR_USE.sub(value, _HOME.sub(r"\1$HOME", text))
