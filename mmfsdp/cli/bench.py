"""`mmfsdp bench`: measure, print a table, write it down."""

from __future__ import annotations

from pathlib import Path

from ..params import ParamError

BENCHES = ("checkpoint", "data", "form", "launch", "parity", "plan", "startup", "step", "stream", "wrap")


def bench(argv: list[str]) -> int:
    """Measure. Returns 1 where something is not as it must be."""
    import json
    from importlib import import_module

    import tyro

    from ..bench import machine

    name, *flags = argv or [""]
    if name not in BENCHES:
        raise ParamError("bench", f"{name!r} is no bench; choose {', '.join(BENCHES)}")
    module = import_module(f"mmfsdp.bench.{name}")
    found = tyro.cli(getattr(module, f"bench_{name}"), args=flags, prog=f"mmfsdp bench {name}")
    here = machine()
    print(f"{here}\n{module.table(found)}")
    rows = {"machine": here} | ({"rows": found} if isinstance(found, list) else found)
    files = {"json": json.dumps(rows, indent=1)} | ({"svg": module.picture(found)} if name == "wrap" else {})
    try:
        for ending, text in files.items():
            Path(f"bench_{name}.{ending}").write_text(text)
            print(f"written to bench_{name}.{ending}")
    except OSError as error:
        raise ParamError("bench", f"the figures above are in no file: {error}; go to a folder of yours") from None
    return int(name == "parity" and not all(row["ok"] for row in found))
