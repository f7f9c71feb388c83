"""estimate: what a plan will cost each rank in memory, on the wire and in time. Pure functions of plain data."""

from .cost import CONTROL_BYTES, CONTROL_CALLS, Estimate, Memory, Wire, estimate
from .peak import Peak
from .times import MACHINES, Machine, Mesh, Times, machine_of, mesh_table, meshes, on_mesh, step_time

__all__ = [
    "CONTROL_BYTES",
    "CONTROL_CALLS",
    "MACHINES",
    "Estimate",
    "Machine",
    "Memory",
    "Mesh",
    "Peak",
    "Times",
    "Wire",
    "estimate",
    "machine_of",
    "mesh_table",
    "meshes",
    "on_mesh",
    "step_time",
]
