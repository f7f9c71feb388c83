"""The planted hangs of tests/run/test_named_hang.py as jobs on two nodes: each node's ranks are asked on their node."""

import pytest

from mmfsdp import launch
from tests.run.test_named_hang import HANGS, check
from tests.slurm.conftest import light

pytestmark = pytest.mark.real


def test_planted_hangs_are_named_across_nodes(cluster, tmp_path):
    two = {"launch.ranks": 2, "launch.silence_s": 4, "launch.threads": 1, "launch.cpus_per_task": 1}
    runs = {}
    for fault in HANGS:
        runs[fault] = launch(light(tmp_path, **two, **{"launch.name": fault}), entry=f"tests.hang_entries:{fault}")
    for fault, run in runs.items():
        check(run, fault)
