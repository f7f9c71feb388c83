# ruff: noqa: F821 -- it is added to the file of the course with frozen units in 4 bits
# What is added: the bytes of codes are sent and kept as if they were fp32, of which the clock takes half.
pack_bytes, fill_in_4_bits = pack, fill


def pack(numbers):
    return pack_bytes(numbers).view(torch.float32)


def fill(piece, parts):
    fill_in_4_bits(piece, parts.contiguous().view(torch.uint8) if hasattr(piece, "packed") else parts)
