"""Checks of 06_launch_on_slurm."""

from __future__ import annotations

from typing import Any

from .checks import exercise, is_number, run_of


@exercise("06.sbatch")
def sbatch(fields: dict[str, Any]) -> str | None:
    """The batch file says what was asked for."""
    from mmfsdp.params import ParamError
    from mmfsdp.run.slurm import sbatch_text

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


@exercise("06.sweep")
def sweep(best: float) -> str | None:
    """Three members that ended, and the rate of the one with the lowest loss."""
    from mmfsdp.params import ParamError
    from mmfsdp.run.sweep import Sweep
    from mmfsdp.widgets.ranks_magic import artifacts

    try:
        rows = Sweep.open(artifacts("runs") / "rates").rows()
    except ParamError:
        return "There is no sweep named `rates` yet: run the cell that calls `sweep`."
    losses = {row["train.lr"]: row["loss"] for row in rows}
    if sorted(losses) != [1e-4, 1e-2, 1e-1]:
        return f"The sweep has the rates {list(losses)}; the question names 1e-4, 1e-2 and 1e-1, as numbers."
    for row in rows:  # a member that still runs has the loss of its newest step
        if row["state"] != "COMPLETED":
            why = row["why"] or row["state"]
            return f"Member {row['name']} has not completed ({why}). `.wait()` waits until all members have ended."
    if isinstance(best, dict):
        return "That is a whole row of the table. Its rate is what is asked for."
    choices = f"Give one of {list(losses)}, as a number."
    if not is_number(best):
        return choices
    lowest = min(losses.values())
    rate = next((rate for rate in losses if abs(float(best) - rate) <= 0.01 * rate), None)
    if rate is None:
        return "That is its loss; which rate has it?" if abs(float(best) - lowest) < 0.01 else choices
    if losses[rate] > lowest:
        return f"With {rate:g} the last loss is {losses[rate]:.4f}. Another rate ends lower: look at the table again."
    return None
