# ruff: noqa: F401, F821 -- it is added to my_fsdp.py, with `pack` and `fill` of exercise 11.four_bits in its middle
# ---- what lesson 11 adds: frozen units are kept and sent in 4 bits ----
import sys

from mmfsdp.quantized.nf4 import LEVELS

my_fsdp = sys.modules[__name__]
shard_numbers, gather_numbers, fill_numbers = shard, gather, fill
start_numbers = globals().get("start")  # of lesson 05, if the file has it
STARTED = globals().get("STARTED", {})  # unit -> what its all-gather fills, the sizes of its pieces, and a handle


def make_room(piece):
    """Give the storage of a whole parameter its size."""
    piece.whole.untyped_storage().resize_(piece.whole.nbytes)


# ---- yours ----
fill_bytes = fill


def fill(piece, parts):
    """Fill a whole parameter from numbers, or from codes and scales."""
    if hasattr(piece, "packed"):
        fill_bytes(piece, parts)
    else:
        fill_numbers(piece, parts)


def shard(*modules, **options):
    """Make a unit of modules. Of a frozen one this rank keeps codes and scales only."""
    unit = shard_numbers(*modules, **options)
    if unit is not None and not unit.trains:
        for piece in unit.pieces:
            piece.packed = pack(piece.shard.detach().flatten())
            piece.shard.untyped_storage().resize_(0)
    return unit


def start(unit):
    """Begin to all-gather a unit: the bytes of a frozen one."""
    if unit.trains:
        start_numbers(unit)
    elif not unit.gathered and unit not in STARTED:
        mine = torch.cat([piece.packed.flatten() for piece in unit.pieces])
        by_rank = mine.new_empty(dist.get_world_size(), len(mine))
        sizes = [piece.packed.numel() for piece in unit.pieces]
        STARTED[unit] = by_rank, sizes, all_gather(by_rank.view(-1), mine, async_op=True)


def gather(unit):
    """All-gather a unit, unless it is gathered."""
    if unit.trains:
        gather_numbers(unit)
    elif not unit.gathered:
        start(unit)
        by_rank, sizes, handle = STARTED.pop(unit)
        handle.wait()
        for piece, parts in zip(unit.pieces, by_rank.split(sizes, dim=1), strict=True):
            fill(piece, parts)
        unit.gathered = True
