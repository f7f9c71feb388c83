"""Frozen-aware FSDP in 200 lines: what `fully_shard` does, without its streams, and what mmfsdp decides on top.

    units = [shard(block) for block in model.blocks]  # inner modules first, as with fully_shard
    units += [shard(model.encoder, frozen="REPLICATE"), shard(model)]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)  # after sharding

Read it in the order of a step: `before_forward`, `after_forward`, `before_backward`, `after_backward`.
"""

from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map

# torch 2.14 has new names for these two, and warns of the old ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def is_float(x):
    """Return True for a tensor of floating-point numbers."""
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def needs_grad(x):
    """Return True for a tensor whose gradient backward computes."""
    return isinstance(x, torch.Tensor) and x.requires_grad


def shard_of(tensor):  # (n, ...) -> (ceil(n / W), ...)
    """Return the rows of a tensor that this rank keeps. Rows of zeros make all ranks' shards equally large."""
    world, rank = dist.get_world_size(), dist.get_rank()
    rows = -(-len(tensor) // world)
    shard = tensor.new_zeros(rows, *tensor.shape[1:])
    mine = tensor[rank * rows : (rank + 1) * rows]
    shard[: len(mine)] = mine
    return shard


class Piece:
    """One parameter: the shard that this rank keeps, and the whole, which has memory only while it is gathered."""

    def __init__(self, p, owners, dtype):
        self.owners = owners  # [(module, name), ...]: every place where the model has it, several if it is tied
        self.shard = nn.Parameter(shard_of(p.detach()), requires_grad=p.requires_grad)
        self.shard.taken = True  # no other unit takes it
        self.whole = nn.Parameter(torch.empty_like(p, dtype=dtype), requires_grad=p.requires_grad)
        if p.requires_grad:
            self.whole.register_post_accumulate_grad_hook(drop_grad)
        free(self)


def drop_grad(whole):
    """Drop the gradient of a whole parameter. `after_backward` has had it, and only the shard's gradient stays."""
    whole.grad = None


def place(piece, p):
    """Make p the parameter that the model sees, in every place."""
    for module, name in piece.owners:
        module._parameters[name] = p


def free(piece):
    """Free the memory of the whole parameter, but keep the tensor: autograd refers to it."""
    piece.whole.untyped_storage().resize_(0)
    place(piece, piece.shard)


def fill(piece, parts):  # parts: (W, elements of a shard)
    """Give the whole parameter memory, and the values of all ranks' shards."""
    piece.whole.untyped_storage().resize_(piece.whole.numel() * piece.whole.element_size())
    rows = parts.reshape(-1, *piece.whole.shape[1:])
    piece.whole.data.copy_(rows[: len(piece.whole)])  # .data: autograd does not count it as a change
    place(piece, piece.whole)


class Unit:
    """Modules whose parameters one all-gather fetches."""

    def __init__(self, modules, reshard, dtype):
        self.modules, self.reshard, self.dtype = modules, reshard, dtype
        self.pieces = [Piece(p, owners, dtype or p.dtype) for p, owners in parameters_left(modules)]
        self.trains = any(piece.shard.requires_grad for piece in self.pieces)
        self.gathered = False
        self.hook = None  # calls after_backward


def parameters_left(modules):
    """Return the parameters that no unit has yet, each with its places: [(p, [(module, name), ...]), ...]."""
    places = {}
    for outer in modules:
        for module in outer.modules():
            for name, p in module._parameters.items():
                if p is not None and not hasattr(p, "taken"):
                    places.setdefault(p, []).append((module, name))
    return list(places.items())


def release(unit):
    """Free the whole parameters of a unit."""
    for piece in unit.pieces:
        free(piece)
    unit.gathered = False


def padded_grad(piece, grad):  # (n, ...) -> (W, elements of a shard)
    """Return a whole gradient in the shard's dtype, with rows of zeros; all zeros if the parameter was not used."""
    world = dist.get_world_size()
    padded = piece.shard.new_zeros(world * len(piece.shard), *piece.shard.shape[1:])
    if grad is not None:
        padded[: len(grad)] = grad
    return padded.view(world, -1)


def gather(unit):
    """All-gather the parameters of a unit, unless they are gathered."""
    if unit.gathered:
        return
    shards = [piece.shard.detach().to(piece.whole.dtype).flatten() for piece in unit.pieces]
    sizes = [len(shard) for shard in shards]
    by_rank = shards[0].new_empty(dist.get_world_size(), sum(sizes))  # row r: the shards of rank r
    mine = by_rank[dist.get_rank()]
    torch.cat(shards, out=mine)
    all_gather(by_rank.view(-1), mine)
    for piece, parts in zip(unit.pieces, by_rank.split(sizes, dim=1)):
        fill(piece, parts)
    unit.gathered = True


def reduce(unit, grads):
    """Add to each shard's gradient its part of the mean over the ranks of the whole gradients."""
    by_rank = torch.cat([padded_grad(piece, grad) for piece, grad in zip(unit.pieces, grads)], dim=1)
    mine = by_rank.new_empty(by_rank.shape[1])
    reduce_scatter(mine, by_rank.flatten())
    mine /= dist.get_world_size()
    sizes = [piece.shard.numel() for piece in unit.pieces]
    for piece, part in zip(unit.pieces, mine.split(sizes)):
        part = part.view_as(piece.shard)
        piece.shard.grad = part if piece.shard.grad is None else piece.shard.grad + part


def watch_backward(unit, module, args, kwargs):
    """Call `after_backward` when backward has left the unit. Return the inputs, each as a view of its own."""
    if module is unit.modules[0] and unit.hook:
        unit.hook.remove()  # of the step before
        unit.hook = None
    if not torch.is_grad_enabled():
        return args, kwargs
    args, kwargs = tree_map(lambda x: x.view_as(x) if needs_grad(x) else x, (args, kwargs))
    last = [piece.whole for piece in unit.pieces if unit.trains]
    last += [x for x in tree_leaves((args, kwargs)) if needs_grad(x)]
    if last and unit.hook is None:
        unit.hook = register_multi_grad_hook(last, partial(after_backward, unit))
    return args, kwargs


def cast(dtype, module, args, kwargs):
    """Return the inputs in the dtype of the unit's parameters, if it has one of its own."""
    if dtype is None:
        return args, kwargs
    return tree_map(lambda x: x.to(dtype) if is_float(x) else x, (args, kwargs))


def before_forward(unit, module, args, kwargs):
    """Gather the unit, and cast its inputs. Return them."""
    gather(unit)
    args, kwargs = cast(unit.dtype, module, args, kwargs)
    return watch_backward(unit, module, args, kwargs)


def after_forward(unit, module, args, output):
    """Let backward gather the unit before it begins here. Free the unit."""
    outputs = [x for x in tree_leaves(output) if needs_grad(x)]
    if outputs:
        register_multi_grad_hook(outputs, partial(before_backward, unit), mode="any")
    if module is unit.modules[-1] and (unit.reshard or not outputs):
        release(unit)


def before_backward(unit, _):
    """Gather the unit: the first gradient of its output is there."""
    gather(unit)


def after_backward(unit, grads):
    """Reduce the gradients of a unit that trains, and free the unit."""
    if unit.trains:
        reduce(unit, grads[: len(unit.pieces)])
    release(unit)


def shard(*modules, reshard=True, frozen="SHARD", dtype=None):
    """Make a unit of modules. frozen: SHARD, KEEP or REPLICATE, for a unit of which nothing trains."""
    left = [p for p, _ in parameters_left(modules)]
    trains = {p.requires_grad for p in left}
    if len(trains) == 2:
        raise ValueError("frozen and trainable parameters in one unit: shard the modules inside it first")
    if frozen == "REPLICATE":
        if True in trains:
            raise ValueError("REPLICATE is for frozen parameters: nobody would average the gradients of these")
        for p in left:
            p.data = p.data.to(dtype or p.dtype)
            p.taken = True  # whole on every rank, in no unit
        for module in modules:
            module.register_forward_pre_hook(partial(cast, dtype), with_kwargs=True)
        return None
    unit = Unit(modules, reshard and frozen != "KEEP", dtype)
    for module in modules:
        module.register_forward_pre_hook(partial(before_forward, unit), with_kwargs=True)
        module.register_forward_hook(partial(after_forward, unit))
    return unit


@torch.no_grad()
def clip(parameters, max_norm):
    """Clip by the norm of the whole gradient, of which each rank has only a part. Return the norm."""
    grads = [p.grad for p in parameters if p.grad is not None]
    square = torch.stack([grad.square().sum() for grad in grads]).sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    for grad in grads:
        grad *= (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm


def predict(units):
    """Return the bytes that a rank sends in a step, by collective and phase; after a first forward."""
    world = dist.get_world_size()
    sent = Counter()
    for unit in filter(None, units):
        elements = sum(piece.shard.numel() for piece in unit.pieces)  # of each rank, with the padding
        gathered = (world - 1) * elements * unit.pieces[0].whole.element_size()
        sent["all-gather, forward"] += gathered
        if unit.reshard and unit.hook:  # a unit without a hook has no backward
            sent["all-gather, backward"] += gathered
        if unit.trains:
            sent["reduce-scatter, backward"] += (world - 1) * elements * unit.pieces[0].shard.element_size()
    return dict(sent)
