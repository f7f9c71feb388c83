"""A copy of the package that comes first on the path: to change it, and to see what the change does on two ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mmfsdp
from mmfsdp.kit.run.ranks.address import free_port
from mmfsdp.kit.widgets.ranks_cell.ranks_magic import artifacts

TIMEOUT_S = 300


def fresh_copy() -> Path:
    """Copy the package, in place of an older copy. Return the folder of the copy."""
    folder = artifacts("changed") / "mmfsdp"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(Path(mmfsdp.__file__).parent, folder, ignore=shutil.ignore_patterns("backbones"))
    print(f"a copy of the package: {os.path.relpath(folder)}")
    return folder


def change(file: str, old: str, new: str) -> None:
    """Replace a text of a file of the copy. Raises ValueError if it does not stand there exactly once."""
    path = artifacts("changed") / "mmfsdp" / file
    text = path.read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise ValueError(f"{file}: the text stands there {text.count(old)} times, and must be there once: {old!r}")
    if new is ...:
        print(f"{file}: not changed yet, three dots are left")
        return
    path.write_text(text.replace(old, new), encoding="utf-8")
    print(f"{file}: changed")


def measure(policy: str) -> dict[str, Any]:
    """Train a step on two ranks with the copy. Return what was predicted and measured, or the "error".

    "predicted" and "measured": bytes sent, by collective and phase. "backward": for SHARD, KEEP and this policy, how
    often each frozen unit is gathered in backward. "in_bf16": the same for this policy, where they are unsharded in
    bf16.
    """
    port = free_port()
    paths = [str(artifacts("changed")), str(Path(__file__).resolve().parent.parent)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "course.changed_rank", policy]
    logs = [artifacts("changed") / f"{rank}.log" for rank in range(2)]
    ranks = []
    for rank, log in enumerate(logs):
        # To a file: a rank that fills the pipe of its errors would wait until somebody reads it.
        with log.open("w") as errors:
            pipes = {"stdout": subprocess.PIPE, "stderr": errors}
            # With -m, Python puts the current folder before PYTHONPATH.
            rank_env = env | {"RANK": str(rank)}
            ranks.append(subprocess.Popen(command, cwd=artifacts("changed"), env=rank_env, text=True, **pipes))
    try:
        printed = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    except subprocess.TimeoutExpired:
        return {"error": f"the ranks have not ended within {TIMEOUT_S} s"}
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        return {"error": first_error(logs)}
    return json.loads(printed[0].splitlines()[-1])


def first_error(logs: Sequence[Path]) -> str:
    """Return the last line of a rank that has failed. gloo's error only says that another rank has failed."""
    last_lines = []
    for log in logs:
        last_lines += log.read_text(errors="replace").strip().splitlines()[-1:]
    causes = [line for line in last_lines if "gloo" not in line]
    return next(iter(causes + last_lines), "a rank ended without a message")
