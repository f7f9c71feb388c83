"""The batch file of a form: what sbatch would receive, and back to the fields that its #SBATCH lines come from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..params import Executor, ParamError, RunParams
from ..params.launch import SLURM_FIELDS

_NAMES = {"time": "timeout_min", "job-name": "name"}
_OURS = ("open-mode", "output", "requeue", "signal", "wckey")


def write_batch(params: RunParams) -> tuple[str, str | None]:
    """(the batch file, why it cannot be edited now). Without Slurm, what it would be with."""
    from ..launch import sbatch_text

    if params.launch.executor is Executor.SLURM:
        try:
            return sbatch_text(params), None
        except ParamError as error:
            return "", str(error)
    why = f"launch.executor is {params.launch.executor}: ranks start as processes here, and nothing is submitted. "
    try:
        text = sbatch_text(replace(params, launch=replace(params.launch, executor=Executor.SLURM)))
    except ParamError as error:
        return "", f"{why}Slurm would need more: {error}"
    return text, f"{why}Slurm would get this; set launch.executor to slurm to edit it."


def read_batch(text: str, params: RunParams) -> RunParams:
    """The parameters whose batch file a text is, beside those that it does not tell. Raises ParamError."""
    was, now = (_split(one) for one in (write_batch(params)[0], text))
    if was[1] != now[1]:
        line = next((a for a, b in zip(now[1], was[1], strict=False) if a != b), (now[1] or [""])[-1])
        raise ParamError(
            "batch file",
            f"{line!r} differs: beside #SBATCH lines, nothing here can be edited; launch.modules, launch.setup and "
            "launch.python say what else is done",
        )
    changes: dict[str, Any] = {}
    more = dict(option.partition("=")[::2] for option in params.launch.sbatch)
    for name in was[0] | now[0]:
        value, field = now[0].get(name), _NAMES.get(name, name.replace("-", "_"))
        if value == was[0].get(name) or name in ("nodes", "ntasks-per-node"):
            continue
        if name in _OURS:
            raise ParamError("batch file", f"mmfsdp itself depends on {name}; put the line back as it was")
        if field in (*SLURM_FIELDS, *_NAMES.values()):
            changes[f"launch.{field}"] = value
        else:
            more = {k: v for k, v in more.items() if k != name} | ({} if value is None else {name: value})
            changes["launch.sbatch"] = [f"{k}={v}" if v else k for k, v in more.items()]
    for name in ("nodes", "ntasks-per-node"):
        if not (now[0].get(name) or "").isdecimal():
            raise ParamError("batch file", f"#SBATCH --{name}={now[0].get(name)} is no count")
    nodes = int(now[0]["nodes"])
    changes |= {"launch.nodes": nodes, "launch.ranks": nodes * int(now[0]["ntasks-per-node"])}
    return params.change(**changes)


def _split(text: str) -> tuple[dict[str, str], list[str]]:
    """(value by option of the #SBATCH lines, the other lines that say something)."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [line.removeprefix("#SBATCH").strip() for line in lines if line.startswith("#SBATCH")]
    return dict(o.lstrip("-").partition("=")[::2] for o in ours), [x for x in lines if not x.startswith("#SBATCH")]
