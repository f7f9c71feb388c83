# ruff: noqa: F821 -- it is added to the file of the course
# What is added: as many frozen layers as fit are whole on every rank, and gradients of micro-batches are added first.
from contextlib import contextmanager

SYNC = [True]


def bytes_of(module):
    return sum(p.numel() * p.element_size() for p in module.parameters() if not p.requires_grad)


def wrap(model, budget):
    left = budget - 3 * bytes_of(model.layers[0]) - bytes_of(model) // 64
    units = []
    for block in model.encoder:
        units.append(shard(block))
    units.append(shard(model.projector))
    for layer in model.layers:
        units.append(shard(layer.adapter))
        fits = bytes_of(layer) <= left
        left -= bytes_of(layer) if fits else 0
        units.append(shard(layer, frozen="REPLICATE" if fits else "SHARD"))
    units.append(shard(model))
    return units


@contextmanager
def no_sync(units):
    SYNC[0] = False
    yield
    SYNC[0] = True


def after_backward(unit, grads):
    if unit.trains and not SYNC[0]:
        unit.kept = [g.clone() for g in grads[: len(unit.pieces)]]
    elif unit.trains:
        kept = getattr(unit, "kept", None)
        whole = grads[: len(unit.pieces)]
        reduce(unit, [g + k for g, k in zip(whole, kept, strict=True)] if kept else whole)
        unit.kept = None
    release(unit)
