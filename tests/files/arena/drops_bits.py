# ruff: noqa: F821 -- it is added to the file of the course with frozen units in 4 bits
# What is added: of 16 levels every second one is used, which 3 bits could tell.
pack_4_bits, ALL_LEVELS = pack, LEVELS


def pack(numbers):
    global LEVELS
    LEVELS = torch.where(torch.arange(16) % 2 == 1, ALL_LEVELS, torch.inf)
    blocks = pack_4_bits(numbers)
    LEVELS = ALL_LEVELS
    return blocks
