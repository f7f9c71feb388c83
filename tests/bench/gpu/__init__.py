"""What a machine with a GPU tells of mmfsdp: the parts of `tests/bench/gpu.sh`.

`parts` starts them, with Python's own library only; `goals` lays the rows beside what is aimed at. Each other file is
one part, or two of a kind.
"""
