# ruff: noqa: F821 -- it is added to the file of the course with frozen units in 4 bits
# What is added: what trains is sent in 4 bits, too.
gather_frozen = gather


def gather(unit):
    if unit.trains and not unit.gathered:
        for piece in unit.pieces:
            piece.packed = pack(piece.shard.detach().flatten())
        unit.trains = False
        gather_frozen(unit)
        unit.trains = True
    else:
        gather_frozen(unit)
