"""predict: what a plan costs each rank in memory, on the wire and in time; the search of AUTO."""

from .cost import Estimate, estimate
from .machines import LAPTOP, LAPTOP_BYTES, MACHINES, Machine, gpu_with, machine_of, machine_of_run
from .meshes import Mesh, mesh_table, meshes, on_mesh
from .seconds import Times, step_time, workload
