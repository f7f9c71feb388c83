"""The planted hangs of tests/run/test_named_hang.py as jobs on two nodes: each node's ranks are asked on their node."""

import re

import pytest

from mmfsdp import launch
from mmfsdp.kit.run.files.run_record import Status
from tests.run.test_named_hang import HANGS, check
from tests.slurm.conftest import light

pytestmark = pytest.mark.real


LEFT = (
    r"rank 1 never entered the all-gather of vision\.0 in forward \(collective \d+\), in which rank 0 waits; it is in "
    r"(another collective|an all-gather of 16\.4 KiB) instead.*; then "
)
ABORTED = r"rank \d on 127\.0\.0\.\d: Aborted.*, it was ended by a library \(in step 3 compute\): "
FAILS = rf"({LEFT})?{ABORTED}.*"
"""gloo fails. srun then ends the other rank, before or after it has written what it had entered."""
HERE = ("sleeps", "stops")
"""Those that need the most of a cluster: the stack of a rank on another node, whose data workers get the signal too,
and the state of its process there. All are compared by the same code, which tests/run/test_named_hang.py runs."""


def hangs(folder, faults):
    """Jobs of two ranks on two nodes, by their faults."""
    two = {"launch.ranks": 2, "launch.silence_s": 20, "launch.threads": 1, "launch.cpus_per_task": 1}
    return {
        fault: launch(light(folder, **two, **{"launch.name": fault}), entry=f"tests.hang_entries:{fault}")
        for fault in faults
    }


def test_planted_hangs_are_named_across_nodes(cluster, tmp_path):
    runs = hangs(tmp_path, (*HERE, "no_picture_in_gloo"))
    failed = runs.pop("no_picture_in_gloo").wait(600)
    assert failed.status is Status.FAILED and re.fullmatch(FAILS, failed.reason, re.DOTALL), failed
    for fault, run in runs.items():
        check(run, fault)


@pytest.mark.extended
def test_all_other_planted_hangs_are_named_across_nodes(cluster, tmp_path):
    for fault, run in hangs(tmp_path, HANGS.keys() - set(HERE)).items():
        check(run, fault)
