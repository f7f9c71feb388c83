"""estimate: what a plan will cost each rank in memory, on the wire and in time. Pure functions of plain data."""

from .cost import CONTROL_BYTES, CONTROL_CALLS, Estimate, Memory, Wire, estimate
from .peak import Peak
from .times import MACHINES, Machine, Times, step_time

__all__ = [
    "CONTROL_BYTES",
    "CONTROL_CALLS",
    "MACHINES",
    "Estimate",
    "Machine",
    "Memory",
    "Peak",
    "Times",
    "Wire",
    "estimate",
    "step_time",
]
