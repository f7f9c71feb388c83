"""Checks of 07_checkpoints."""

from __future__ import annotations

from .checks import exercise, run_of, saved


@exercise("07.dcp")
def dcp() -> str | None:
    """The resumed losses are the unbroken ones, bit by bit."""
    found = saved("07.dcp")
    if isinstance(found, str):
        return found
    unbroken, resumed = found[0]["unbroken"], found[0]["resumed"]
    if not any(name.endswith(".distcp") for name in found[0]["files"]):
        return "Nothing was saved: `dcp.save({...}, checkpoint_id=folder)`, on every rank."
    if resumed == unbroken:
        return None
    if resumed[0] == unbroken[0] and found[0]["lr"] != 0.02:
        return (
            f"The learning rate is {found[0]['lr']} again, and was 0.02 when it was saved. `dcp.load` fills tensors; "
            "give the optimizer its numbers back with `set_state_dict`."
        )
    if resumed[0] != unbroken[0]:
        return (
            f"The first loss is {resumed[0]:.4f} instead of {unbroken[0]:.4f}: the model has not got the weights. Give "
            "it what was loaded, with `set_state_dict`."
        )
    return (
        "The first loss is right, so the weights are; the later ones are not. The optimizer's moments are missing: "
        "save them, load them, and give them back."
    )


@exercise("07.resume")
def resume() -> str | None:
    """The losses of the unbroken run, bit by bit."""
    run, whole = run_of("stopped"), run_of("whole")
    if isinstance(run, str):
        return run
    if isinstance(whole, str):
        return whole
    rows = run.metrics()
    if len(rows) < len(whole.metrics()):
        return (
            f"It has done {len(rows)} of {len(whole.metrics())} steps. `stopped.resume(params=...)` with those that "
            "ask for all of them, and `.wait()` for its end."
        )
    if [row["loss"] for row in rows] != [row["loss"] for row in whole.metrics()]:
        return "The losses differ from the unbroken run's. Only `launch.name` may differ in the parameters."
    return None


@exercise("07.reshard")
def reshard() -> str | None:
    """It went on, on one rank."""
    run = run_of("resharded")
    if isinstance(run, str):
        return "Fill in both changes, then run the two cells: " + run
    params, state = run.params, run.state()
    if params.launch.ranks != 1:
        return f"It went on with {params.launch.ranks} ranks; one was asked for."
    if params.fsdp.sharding_strategy.name != "SHARD_GRAD_OP":
        return f"Its strategy is {params.fsdp.sharding_strategy.name}; SHARD_GRAD_OP was asked for."
    return None if state.ok and len(run.metrics()) == params.train.steps else f"It has not completed: {state}."
