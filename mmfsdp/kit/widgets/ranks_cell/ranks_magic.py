"""`%%ranks 2 NAME`: runs a cell's code on so many real processes that talk over gloo, and shows their lines by rank.

`%load_ext mmfsdp.kit.widgets.ranks_cell.ranks_magic` registers it in a notebook; `import course` does so, too. What a
rank saves with `save(name=value)` lies in the artifact folder of that name, for the next cells and the checks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from contextlib import suppress
from html import escape
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import psutil

from ...hangs.stacks import short_stacks

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


def artifacts(name: str) -> Path:
    """Return the folder where a `%%ranks` cell of this name leaves what it made, in $MMFSDP_COURSE or runs/ranks.

    Raises ValueError for a name that is not one plain word.
    """
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"name: {name!r} has other characters than letters, digits, '_', '-' and '.'; take those")
    return Path(os.environ.get("MMFSDP_COURSE", "runs/ranks")).resolve() / name


def run_on_ranks(code: str, ranks: int, name: str) -> list[str]:
    """Run source code on so many processes; return the text that each printed, by rank. Failures are in the text."""
    folder = artifacts(name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "cell.py").write_text(code, encoding="utf-8")
    for rank in range(ranks):
        (folder / f"{rank}.log").touch()
    try:
        server = server_process()
        assert server.stdin and server.stdout
        server.stdin.write(json.dumps({"folder": str(folder), "ranks": ranks}) + "\n")
        server.stdin.flush()
        if server.stdout.readline() != "done\n":
            raise RuntimeError(f"%%ranks: the process that makes the ranks ended; {folder} has what they said")
    except BaseException:  # the interrupt of a cell, too: it ends the ranks
        stop_servers()
        raise
    return [(folder / f"{rank}.log").read_text(errors="replace") for rank in range(ranks)]


_servers: list[Popen[str]] = []


def server_process() -> Popen[str]:
    """Return the process that makes ranks; it starts with the first cell that needs it, or when the magic is loaded."""
    if not _servers or _servers[0].poll() is not None:
        _servers.clear()
        path = os.pathsep.join(folder for folder in sys.path if folder)  # ranks import what the notebook imports
        env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "PYTHONUNBUFFERED": "1"}
        # Ranks talk over gloo. With a GPU in sight, torch's fully_shard would move each layer there.
        env["CUDA_VISIBLE_DEVICES"] = ""
        env.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # torch's flight recorder records; before any process group
        command = [sys.executable, "-m", "mmfsdp.kit.widgets.ranks_cell.ranks_worker"]
        _servers.append(Popen(command, stdin=PIPE, stdout=PIPE, text=True, env=env, start_new_session=True))
    return _servers[0]


def stop_servers() -> None:
    """End the process that makes ranks, and its ranks."""
    for server in _servers:
        if server.poll() is None:
            for rank in psutil.Process(server.pid).children():
                with suppress(psutil.NoSuchProcess):  # it ends by itself
                    rank.kill()
            server.kill()
        server.wait()
    _servers.clear()


def results(name: str) -> list[dict[str, Any]]:
    """Return what each rank saved in the `%%ranks` cell of this name, by rank; {} for a rank that saved nothing."""
    import torch

    folder = artifacts(name)
    count = len(list(folder.glob("*.log")))
    files = [folder / f"{rank}.pt" for rank in range(count)]
    return [torch.load(file, weights_only=True) if file.is_file() else {} for file in files]


def shown(texts: list[str]) -> str:
    """Return each rank's text as HTML: escaped, colored by rank, stacks shortened, the last 200 lines."""
    blocks = []
    for rank, text in enumerate(texts):
        lines = "\n".join(short_stacks(text).splitlines()[-200:]) or "(no output)"
        edge = f"border-left:4px solid {COLORS[rank % len(COLORS)]};padding-left:8px;margin:4px 0"
        blocks.append(f"<div style='{edge}'><b>rank {rank}</b><pre style='margin:0'>{escape(lines)}</pre></div>")
    return "".join(blocks)


def ranks(line: str, cell: str) -> None:
    """Run a cell as `%%ranks COUNT NAME`, and show what each rank printed. Raises ValueError for other words."""
    from IPython.display import HTML, display

    words = line.split()
    count, name = words if len(words) == 2 else ("", "")
    if count not in set("12345678"):
        raise ValueError(f"%%ranks: wants a number from 1 to 8 and a name, as in '%%ranks 2 hello', not {line!r}")
    display(HTML(shown(run_on_ranks(cell, int(count), name))))


def load_ipython_extension(shell: Any) -> None:
    """Register `%%ranks` in a shell of IPython: what `%load_ext mmfsdp.kit.widgets.ranks_cell.ranks_magic` calls."""
    shell.register_magic_function(ranks, "cell", "ranks")
    server_process()  # it imports torch while the person reads
