"""Lines of a batch file as a centre's documentation has them: `#SBATCH -p gpu -N 2   # two nodes`."""

from __future__ import annotations

import re

PREFIX = "#SBATCH"
LETTERS = {
    "A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint", "c": "cpus-per-task",
    "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile", "G": "gpus", "H": "hold", "i": "input",
    "J": "job-name", "k": "no-kill", "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes",
    "n": "ntasks", "O": "overcommit", "o": "output", "p": "partition", "Q": "quiet", "q": "qos", "S": "core-spec",
    "s": "oversubscribe", "t": "time", "v": "verbose", "W": "wait", "w": "nodelist", "x": "exclude",
}  # fmt: skip
"""Letter of an option of sbatch -> its name (https://slurm.schedmd.com/sbatch.html)."""


def options_of_line(line: str) -> list[str]:
    """Return the options in a line, as `partition=gpu` or `exclusive`. One without dashes is returned as it is.

    A line that is a comment, as `##SBATCH -p gpu`, has none.
    A word without a dash belongs to the option before it, as in `--partition gpu` and `--comment=my first run`.
    """
    if line.startswith("##"):
        return []
    text = re.sub(r"\s#.*", "", line.removeprefix(PREFIX)).strip()
    if not text.startswith("-"):
        return [line]
    options: list[str] = []
    for word in text.split():
        if word.startswith("--"):
            options.append(word.removeprefix("--"))
        elif word.startswith("-") and word[1:2] in LETTERS:
            value = word[2:]
            options.append(f"{LETTERS[word[1]]}={value}" if value else LETTERS[word[1]])
        elif word.startswith("-") or not options:
            return [line]  # which is refused as it stands
        else:
            options[-1] += f" {word}" if "=" in options[-1] else f"={word}"
    return [_without_quotes(option) for option in options]


def _without_quotes(option: str) -> str:
    """Return an option without the quotes around its value, which the batch file sets where they are needed."""
    name, equals, value = option.partition("=")
    quoted = re.fullmatch(r"""(["'])(.*)\1""", value)
    return f"{name}{equals}{quoted[2] if quoted else value}"
