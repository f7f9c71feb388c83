"""`mmfsdp check --cluster` on a real Slurm: faults are planted, and each is found by the line that is for it."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.slurm.cluster import FILES, NODES, NOWHERE, SPARE
from tests.waiting import until

pytestmark = pytest.mark.real

OTHER_TORCH = FILES.parent / "other_torch"
TWO_NODES = ("--launch.nodes", "2", "--launch.ranks", "2")


class Fault(NamedTuple):
    """Faults of a cluster in one profile, and what the check is to say of them."""

    profile: dict
    found: dict[str, tuple[str, str]]
    """By the check that is to find it: a part of its words, and of what to do."""
    words: tuple[str, ...] = ("--launch.ranks", "2")
    """Further words of the command."""
    environment: dict[str, str] = {}


def faults(folder: Path) -> dict[str, Fault]:
    """All that is planted; the profiles name files in a folder."""
    return {
        "none": Fault({}, {}, TWO_NODES),
        "no slurm": Fault(
            {},
            {
                "sbatch": ("not on PATH", "login node"),
                "squeue": ("not installed here", "login node"),
                "sacct": ("not installed here", "login node"),
            },
            environment={"PATH": str(folder)},
        ),
        "no such partition": Fault(
            {"partition": "nope"},
            {"submission": ("invalid partition specified", "change launch.partition")},
        ),
        "held": Fault(
            {"sbatch": ["hold"]},
            {"queue": ("will not start: JobHeldUser", "scontrol release")},
        ),
        "interrupted": Fault({"sbatch": ["begin=now+1hour"]}, {}),
        "cancelled": Fault(
            {"sbatch": ["begin=now+1hour"]},
            {"queue": ("ended before it started: cancelled by scancel", "check again")},
        ),
        "setup": Fault(
            {"setup": ["false"]},
            {"batch script": ("launch.setup: false failed with exit code 1", "correct launch.setup")},
        ),
        "address": Fault(
            {"setup": ["export MASTER_ADDR=255.255.255.255", "scontrol update jobid=$SLURM_JOB_ID requeue=0"]},
            {
                "address": ("no rank reaches 255.255.255.255", "launch.host"),
                "requeue": ("Requested operation is presently disabled", "no-requeue"),
            },
        ),
        "name": Fault(
            {"sbatch": [f"nodelist={NOWHERE},{NODES[1]}", "no-requeue"]},
            {"address": (f"'{NOWHERE}' has no address on", "launch.host, such as {host}i")},
            TWO_NODES,
        ),
        "hidden folder": Fault(
            {"sbatch": [f"nodelist={NODES[0]},{SPARE}", "no-requeue"]},
            {"ranks": ("no report from rank 1", "on a file system that all nodes share")},
            (*TWO_NODES, "--launch.folder", str(folder / "hidden")),
        ),
        "many": Fault(
            {
                "gpus_per_node": 1,
                "python": str(folder / "python"),
                "setup": [f"export MMFSDP_CACHE={folder}/small/cache"],
            },
            {
                "sacct": ("Connection refused", "whether slurmdbd runs"),
                "versions": (f"2.9.0 on rank 1 on {NODES[1]}", "launch.python"),
                "GPUs of ranks": (f"rank 0 on {NODES[0]} sees 0", "nvidia-smi"),
                "cache": ("cannot be written", "export MMFSDP_CACHE="),
                "login shell": ("`bash -l -c true` takes ", "~/.bash_profile"),
                "scancel": ("Access/permission denied", "administrators"),
            },
            ("--train.device", "auto", *TWO_NODES),
            {"PATH": f"{folder}/commands:{os.environ['PATH']}", "HOME": str(folder / "slow_home")},
        ),
    }


def heed_interrupts():
    """Let a process be interrupted though this one is not: what a shell starts in the background ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def planted(cluster, tmp_path):
    """A folder with what the profiles name, on a Slurm with two more nodes: one is blind, one's name has no address."""
    commands = {
        "commands/scancel": 'echo "scancel: error: Kill job error: Access/permission denied" >&2\nexit 1',
        # a real sacct, whose database does not run
        "commands/sacct": f'SLURM_CONF={tmp_path}/no_database.conf exec /usr/bin/sacct "$@"',
        "python": f'[ "$SLURMD_NODENAME" != {NODES[1]} ] || export PYTHONPATH={OTHER_TORCH}:$PYTHONPATH\n'
        f'exec {sys.executable} "$@"',
    }
    (tmp_path / "commands").mkdir()
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    conf = (cluster.folder / "slurm.conf").read_text()
    database = "AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=127.0.0.1\n"
    (tmp_path / "no_database.conf").write_text(f"{conf}{database}AccountingStoragePort=9\n")
    (tmp_path / "hidden").mkdir(mode=0o700)
    os.chown(tmp_path / "hidden", 65534, 65534)
    (tmp_path / "slow_home").mkdir()
    (tmp_path / "slow_home/.bash_profile").write_text("sleep 6")
    (tmp_path / "small").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path / "small"]).returncode == 0
    if not mounted:
        (tmp_path / "small/cache").touch()  # no folder: it cannot be written, either
    cluster.start_node(SPARE, blind=True)
    cluster.start_node(NOWHERE)
    try:
        until(lambda: [cluster.nodes().get(node) for node in (SPARE, NOWHERE)] == ["idle"] * 2, words=cluster.words)
        yield tmp_path
    finally:
        cluster.forget_node(SPARE)
        cluster.forget_node(NOWHERE)
        if mounted:
            subprocess.run(["umount", tmp_path / "small"], check=True)


def test_planted_faults_of_a_cluster_are_found_each_by_its_line(cluster, planted):
    started = {}
    for name, fault in faults(planted).items():
        profile = planted / f"{name.replace(' ', '_')}.yaml"
        values = {"cpus_per_task": 1, **fault.profile}
        if "nodelist" not in str(values):
            values["exclude"] = f"{NOWHERE},{SPARE}"
        profile.write_text(yaml.safe_dump(values))
        folder = planted / "runs" / profile.stem
        words = ["--cluster", str(profile), "--json", "--launch.folder", str(folder), "--train.device", "cpu"]
        command = [sys.executable, "-m", "mmfsdp", "check", *words, *fault.words]
        started[name] = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | fault.environment,
            preexec_fn=heed_interrupts,
        )
    interrupted = started.pop("interrupted")
    until(lambda: (line := interrupted.stderr.readline()) and " waits" in line)
    interrupted.send_signal(signal.SIGINT)
    assert interrupted.wait(600) == 130, interrupted.stderr.read()
    assert "interrupted" not in cluster.ask("squeue", "--noheader", "--format=%o").stdout, "its job is cancelled"
    assert not (planted / "runs/interrupted").exists(), "and its folder is gone"
    waits = until(lambda: re.search(r"job (\d+) waits", started["cancelled"].stderr.readline()))
    cluster.ask("scancel", waits[1])
    mistakes = []
    for name in started:
        fault = faults(planted)[name]
        out, err = started[name].communicate(timeout=600)
        lines = json.loads(out)["lines"] if out else []
        wrong = {line["code"]: line for line in lines if line["level"] == "wrong"}
        right = wrong.keys() == fault.found.keys() and started[name].returncode == int(bool(wrong))
        for check, (words, fix) in fault.found.items():
            line = wrong.get(check, {"message": "", "fix": ""})
            right = right and words in line["message"] and fix in line["fix"]
        if not right:
            mistakes.append(f"{name}: {started[name].returncode} {json.dumps(list(wrong.values()), indent=1)}\n{err}")
    assert not mistakes, "\n".join(mistakes)
