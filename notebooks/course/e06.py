"""Checks of 06_launch_on_slurm."""

from __future__ import annotations

from typing import Any

from .checks import exercise, run_of, saved


@exercise("06.sbatch")
def sbatch(fields: dict[str, Any]) -> str | None:
    """The batch file says what was asked for."""
    from mmfsdp.kit.run.slurm.slurm import sbatch_text
    from mmfsdp.params import ParamError

    from .lessons import small_run

    if any(value is ... for value in fields.values()):
        return f"{next(k for k, v in fields.items() if v is ...)} is not filled in yet."
    try:
        text = sbatch_text(small_run(**fields))
    except (ParamError, TypeError) as error:
        return str(error)
    given = {line.split("=")[0].removeprefix("#SBATCH --"): line.split("=")[-1] for line in text.splitlines()}
    want = {"partition": "gpu", "account": "lab7", "nodes": "2", "cpus-per-task": "8", "ntasks-per-node": "4"}
    for option, value in want.items():
        if given.get(option) != value:
            return f"The batch file says --{option}={given.get(option, '(nothing)')}, and it should be {value}."
    if given.get("time") not in ("120", "02:00:00", "2:00:00"):
        return f"The batch file says --time={given.get('time')}; two hours are wanted."
    return None


@exercise("06.drill")
def drill() -> str | None:
    """It was preempted, went on, and has done all steps with the losses of the unbroken run."""
    run, plain = run_of("drilled"), run_of("here")
    if isinstance(run, str):
        return run
    if isinstance(plain, str):
        return plain
    if not any(event["kind"] == "drill" for event in run.events()):
        return "The run was not drilled: `drilled.drill()` while it runs, once `drilled.metrics()` has two rows."
    if not run.state().ok:
        return f"The run has not completed: {run.state()}."
    if [row["loss"] for row in run.metrics()] != [row["loss"] for row in plain.metrics()]:
        return "Its losses differ from the unbroken run's: were the parameters the same?"
    return None


@exercise("06.agree")
def agree() -> str | None:
    """Both ranks stop after step 2."""
    found = saved("06.agree")
    if isinstance(found, str):
        return found
    done = [values["done"] for values in found]
    if done == [[0, 1, 2], [0, 1, 2]]:
        return None
    if done[0] != done[1]:
        return (
            f"Rank 0 stops after step {done[0][-1]}, rank 1 after step {done[1][-1]}: let them exchange what they know."
        )
    if len(done[0]) == 6:
        return (
            "Neither rank stops, although rank 1 was signaled: *any* rank's signal counts, as a maximum over the ranks."
        )
    return f"Both stop after step {done[0][-1]}; rank 1 is signaled in step 2, and no rank before."
