"""Real ranks for tests: as the benches start theirs."""

from mmfsdp.cli.spawn_ranks import in_processes, on_ranks

__all__ = ["in_processes", "on_ranks"]
