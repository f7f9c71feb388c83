"""What a real step sent and held."""

from .collectives import Collectives, Counted
from .memory import CpuMemory, PeakMemory, cpu_memory, silent

__all__ = ["Collectives", "Counted", "CpuMemory", "PeakMemory", "cpu_memory", "silent"]
