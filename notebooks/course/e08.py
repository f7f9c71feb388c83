"""Checks of 08_find_the_bug."""

from __future__ import annotations

from .checks import DEADLOCK, MISMATCH, exercise, names_in, saved

MARKS = "# --- fix from here", "# --- to here"


@exercise("08.clip")
def clip() -> str | None:
    """A norm of 1 in the same direction."""
    found = saved("08.clip")
    if isinstance(found, str):
        return found
    norm, cosine = float(found[0]["norm"]), float(found[0]["cosine"])
    if abs(norm - 2) < 1e-3:
        return f"The norm is {norm:.2f}. Four layers, each clipped to 1: what is the norm of all together?"
    if abs(norm - 1) > 1e-3:
        return f"The norm is {norm:.2f}, and should be 1. It is the norm of all parameters' gradients together."
    if cosine < 0.9999:
        return "The norm is 1, but the gradient points elsewhere: all layers must shrink by the same factor."
    return None


@exercise("08.mask")
def mask() -> str | None:
    """Rows 6 and 7, whole."""
    found = saved("08.mask")
    if isinstance(found, str):
        return found
    changed = found[0]["changed"].tolist()
    if not changed:
        return "No row changed. Each rank's shard starts at 0 again: where in the whole table does it begin?"
    if changed == [1, 5]:
        return "Rows 1 and 5 changed: 6 and 7 are rows, and the shard is flat. Which elements make a row?"
    if changed != [6, 7]:
        return f"Rows {changed} changed, and only 6 and 7 should: which row is element i of this rank's shard in?"
    if found[0]["values"].view(8, 4)[6:].min() == found[0]["values"].view(8, 4)[6:].max():
        return None
    return "Rows 6 and 7 changed only in part: all WIDTH elements of a row belong to its token."


@exercise("08.stale")
def stale() -> str | None:
    """The same norm in every step."""
    found = saved("08.stale")
    if isinstance(found, str):
        return found
    import torch

    norms = found[0]["norms"]
    if len(norms) != 4:
        return "The four norms are the figure to look at: leave `norms` as it is."
    if norms.max() - norms.min() > 1e-4:
        return (
            "Still growing. `optimizer.zero_grad()` clears the gradients of the optimizer's parameters. What clears "
            "those of `frozen`? Or better: how do you keep them from being computed?"
        )
    if not found[0]["trains"]:
        return "Now the trained layer has no gradient, and it needs its own."
    if found[0]["optimized"] > 2:
        return "The norm stays, but now the optimizer has the frozen layer's parameters, and would change them."
    torch.manual_seed(0)
    frozen, trained = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    frozen(trained(x)).square().mean().backward()
    own = torch.nn.utils.get_total_norm([p.grad for p in trained.parameters()])
    both = torch.nn.utils.get_total_norm([p.grad for p in (*frozen.parameters(), *trained.parameters())])
    if min(abs(norms[0] - own), abs(norms[0] - both)) > 1e-4:
        return "The norm stays, but it is no longer that of these two layers and this `x`: leave them as they are."
    return None


@exercise("08.resume")
def resume() -> str | None:
    """The same weights."""
    found = saved("08.resume")
    if isinstance(found, str):
        return found
    import torch

    torch.manual_seed(1)
    trained = torch.nn.utils.parameters_to_vector(torch.nn.Linear(16, 16).parameters()).detach()
    if not torch.equal(found[0]["saved"], trained):
        return "The saved model has changed: correct only what stands between the two lines."
    if {"trained", "sharded", "manual_seed"} & names_in("08.resume", *MARKS):
        return "After a crash there is no `trained` to copy from: take the weights from the checkpoint, in `state`."
    wrong = found[0]["resumed"] != trained
    if wrong.any() and not wrong.all():
        return "Only a part of the model is restored: the layer has a weight and a bias, and each rank a shard of both."
    if wrong.any():
        return (
            "The resumed model still has its own initial weights: `dcp.load` has filled the tensors in `state`, which "
            "are not the model's. A function that is imported at the top copies them there."
        )
    return None


@exercise("08.eval")
def evaluation() -> str | None:
    """Both ranks get there with the same loss."""
    found = saved("08.eval")
    if isinstance(found, str):
        if found in (DEADLOCK, MISMATCH):
            return "One rank is in a collective that the other one does not enter. Who must call `net`, and how often?"
        return found
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    right = net(torch.ones(4, 16)).square().mean().item()
    for rank, values in enumerate(found):
        loss = torch.as_tensor(values["loss"]).item()
        if abs(loss - right) > 1e-6:
            return f"Rank {rank} has a loss of {loss:.6f}; that of the data is {right:.6f}."
    return None


@exercise("08.text")
def text() -> str | None:
    """Both get there; rank 1's output is that of its text alone."""
    import torch

    found = saved("08.text")
    if found in (DEADLOCK, MISMATCH):
        return (
            "The ranks wait for each other: every rank must enter `encoder`, in forward and (through the graph) in "
            "backward. Give rank 1 a blank picture."
        )
    if isinstance(found, str):
        return found
    if torch.allclose(found[0]["out"], found[1]["out"]):
        return "Rank 0 had a picture and rank 1 none, and yet their outputs are equal: rank 0's picture must count."
    torch.manual_seed(0)
    encoder, head, ones = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.ones(4, 8)
    if not torch.allclose(found[1]["out"], head(ones), atol=1e-6):
        return "Rank 1's output has changed: a blank picture gives the encoder's bias. Multiply it by 0."
    if not torch.allclose(found[0]["out"], head(ones + encoder(ones)), atol=1e-6):
        return "Rank 0's output has changed: its `x` is the text plus what the encoder makes of its picture."
    return None


@exercise("08.class")
def layer_class(name: str | type) -> str | None:
    """A unit per layer."""
    from .lessons import encoder_plan

    name = name.__name__ if isinstance(name, type) else name
    if not isinstance(name, str):
        return "The name of a class, as a string."
    try:
        plan = encoder_plan(name)
    except ValueError as error:
        return str(error)
    largest = max(unit.numel for unit in plan.units) / sum(unit.numel for unit in plan.units)
    if largest > 0.2 and len(plan.units) > 1:
        return f"Modules of no such class stay in the root unit: {largest:.0%} of the model, gathered at once."
    if largest > 0.2:
        return f"The largest unit holds {largest:.0%} of the model, gathered at once. Name the class of one *layer*."
    if len(plan.units) > 30:
        return f"{len(plan.units)} units are too many: each all-gather has a fixed cost. Make one per layer."
    return None


@exercise("08.scaler")
def scaler() -> str | None:
    """Both step in the last step only."""
    found = saved("08.scaler")
    if isinstance(found, str):
        return found
    if "overflows" in names_in("08.scaler", *MARKS):
        return "`overflows` only makes the example; in a real run a rank knows its own gradient and asks the others."
    first, second = (values["stepped"].tolist() for values in found)
    for step, (a, b) in enumerate(zip(first, second, strict=True)):
        if a != b:
            return f"Step {step}: one rank stepped and the other did not: parts of one tensor are of different steps."
        if a and step < 2:
            return (
                f"Step {step}: a rank steps with an infinite gradient. One overflow anywhere must skip it everywhere."
            )
    return None if first[2] else "Step 2 has no overflow on any rank, and is skipped."


def reference(steps: int = 4) -> tuple[list[list[float]], list[list[float]]]:
    """Return the losses of both ranks' data, and of twice these inputs, in each step of one process with all data."""
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = [torch.randn(8, 16, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    trained: list[list[float]] = [[], []]
    heldout: list[list[float]] = [[], []]
    for _ in range(steps):
        losses = [(net(x) - 1).square().mean() for x in data]
        optimizer.zero_grad()
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        for rank, x in enumerate(data):
            trained[rank].append(losses[rank].item())
            heldout[rank].append((net(2 * x) - 1).square().mean().item())
        optimizer.step()
    return trained, heldout


@exercise("08.optimizer")
def optimizer() -> str | None:
    """The losses of one process with all data, and sharded parameters."""
    import torch

    found = saved("08.optimizer")
    if isinstance(found, str):
        return found
    trained, _ = reference()
    for rank, values in enumerate(found):
        if not values["sharded"]:
            return "The model is not sharded any more: keep the calls of `fully_shard`."
        losses = values["losses"]
        if losses.max() - losses.min() < 1e-6:
            return (
                f"The loss is {losses[0]:.4f} in each step. Which tensors does the optimizer have, and which the model?"
            )
        if not torch.allclose(losses, torch.tensor(trained[rank]), rtol=1e-4):
            return "The loss moves, but otherwise than with SGD of this learning rate on these data: keep both."
    return None


@exercise("08.evaluate")
def evaluate() -> str | None:
    """The losses of training without evaluation, and the held-out losses."""
    import torch

    found = saved("08.evaluate")
    if isinstance(found, str):
        return found
    trained, heldout = reference()
    for rank, values in enumerate(found):
        losses = values["losses"]
        if losses.max() - losses.min() < 1e-6:
            return "Now nothing is learned: are the gradients still there when `step()` comes?"
        if not torch.allclose(losses, torch.tensor(trained[rank]), rtol=1e-4):
            return (
                f"Rank {rank}: step 1 has a loss of {losses[1]:.4f}, and without evaluation {trained[rank][1]:.4f}. "
                "Which weights does forward use after the evaluation: is every unit gathered anew?"
            )
        if values["heldout"].shape != losses.shape or not torch.allclose(
            values["heldout"], torch.tensor(heldout[rank]), rtol=1e-4
        ):
            return "The training is right, and the held-out losses are gone: evaluate `2 * x` in each step."
    return None
