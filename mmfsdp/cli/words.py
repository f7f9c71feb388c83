"""What the words behind a command mean: a run, or its parameters."""

from __future__ import annotations

from pathlib import Path

from ..params import LaunchParams, ParamError, RunParams


def parse(command: str, argv: list[str], *, default: RunParams | None = None) -> RunParams:
    """RunParams from `--config` (if it is there, first), else `default`, and flags on top; or exits with the help.

    Raises ParamError.
    """
    from ..params.flags import read_words

    if "--profile" in argv:
        place = argv.index("--profile")
        argv[place : place + 1] = ["--train.profile", "3"]
    params, _ = read_words([word for word in argv if word not in ("-h", "--help")], default=default)
    if {"-h", "--help"} & set(argv):
        import tyro

        enums = (tyro.conf.EnumChoicesFromValues,)
        tyro.cli(RunParams, default=params, args=["--help"], prog=f"mmfsdp {command} [--config C]", config=enums)
    return params


def one_run(argv: list[str]) -> Path:
    """The run that a person means: a folder, or the name of one in the current folder's runs/."""
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ParamError("run", f"{' '.join(argv)!r} is not one run folder; name one, such as runs/demo")
    path, named = Path(argv[0]), Path(LaunchParams().folder, argv[0])
    return path if path.exists() or len(path.parts) > 1 else named
