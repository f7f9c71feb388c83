"""estimate: what a plan costs each rank in memory, on the wire and in time."""

from .items import Estimate, estimate
from .meshes import Mesh, mesh_table, meshes, on_mesh
from .seconds import MACHINES, Machine, Times, machine_of, step_time
