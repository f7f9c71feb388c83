"""torch's data-parallel wrappers other than FSDP2: an object for each, which wraps, and its rules for a unit.

core/wrapper.py says what such an object does. FSDP2, which the files of the core are about, has its own in
core/fsdp2.py.
"""
