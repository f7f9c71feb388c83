"""A real Slurm on this machine: munge, slurmctld and two slurmd nodes with four fake GPUs each, as root.

Everything it makes is in one temporary folder, sockets and devices too; stopping it leaves no file and no process.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.waiting import until

NODES = ("127.0.0.1", "127.0.0.2")
"""Names that resolve by themselves: ranks meet at the first of them."""
SPARE = "127.0.0.3"
"""A third node, unknown to Slurm until it is started."""
NOWHERE = "0x"
"""A node that is unknown to Slurm until it is started. Its name has no address, but with 7f.4 behind it has: C's
functions read 0x7f.4 as 127.0.0.4. Slurm sorts it before the others."""
TYPED, BARE = "127.0.0.5", "127.0.0.6"
"""Two more: one whose GPUs have a type and that has another generic resource, and one without any."""
COMMANDS = ("squeue", "sacct", "scancel", "scontrol", "sinfo")
"""Slurm's commands as those under test call them: out of order while a file NAME.broken says so, and slow while a file
`slow` holds seconds. Those of `ask` are Slurm's own."""
FILES = Path(__file__).resolve().parent.parent / "files/slurm"


def configuration(file: str, **values: Any) -> str:
    """Return a file of tests/files/slurm with these values in it."""
    return (FILES / file).read_text().format(**values)


class Cluster:
    """One Slurm; `environment` reaches it. With accounting it has a database, and forgets finished jobs at once."""

    def __init__(self, *, accounting: bool = False) -> None:
        self.accounting = accounting
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.daemons: dict[str, subprocess.Popen] = {}
        self.environment = {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "TMPDIR": str(self.folder / "tmp"),
            # Jobs have login shells. A job that is killed while a start file of whoever runs the tests holds a lock
            # leaves the lock, and all later jobs wait for it: here there are no such files.
            "HOME": str(self.folder / "home"),
        }

    def start(self) -> None:
        """Start it all; raises AssertionError with the daemons' last words if it does not come up."""
        self._write_files()
        self._run("munged", "munged", "--foreground", "--force", *self._munge())
        until(lambda: (self.folder / "munge.socket").exists(), words=self.words)
        if self.accounting:
            self._start_accounting()
        self._run("slurmctld", "slurmctld", "-D")
        until(lambda: self.ask("scontrol", "ping").returncode == 0, words=self.words)
        for node in NODES:
            self.start_node(node)
        until(lambda: self.nodes() == dict.fromkeys(NODES, "idle"), words=self.words)

    def start_node(self, node: str, *, blind: bool = False) -> None:
        """Start a node's daemon, or start it anew; a blind one's jobs see only what its owner or all may see."""
        if node in self.daemons:
            self.daemons[node].terminate()
            self.daemons.pop(node).wait()
        less = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if blind else []
        self._run(node, *less, "slurmd", "-D", "-N", node)

    def forget_node(self, node: str) -> None:
        """Kill a node's daemon, and let Slurm know nothing of the node."""
        self.stop_node(node)
        self.ask("scontrol", "update", f"nodename={node}", "state=future")

    def stop_node(self, node: str) -> None:
        """Kill a node's daemon and all its jobs' processes, as when the machine goes down."""
        self.daemons.pop(node).kill()
        for process in self.processes():
            with suppress(psutil.Error):  # it has ended meanwhile
                here = (process.info["environ"] or {}).get("SLURMD_NODENAME") == node
                if here or any(file.path.endswith(f"slurmd.{node}.log") for file in process.open_files()):
                    _kill(process)

    def stop(self) -> None:
        """Stop it without a trace."""
        if "slurmctld" in self.daemons:
            self.ask("scancel", "--user=root")
            self.ask("scancel", "--user=root", "--signal=KILL", "--full")
            end = time.monotonic() + 3
            while self.ask("squeue", "--noheader").stdout and time.monotonic() < end:
                time.sleep(0.1)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in self.processes():
            _kill(process)
        shutil.rmtree(self.folder)

    def processes(self) -> list[psutil.Process]:
        """Living processes that belong to it: daemons, steps, ranks. Steps overwrite their environment."""
        return [p for p in psutil.process_iter(["environ", "cmdline"]) if p.pid != os.getpid() and self._owns(p)]

    def _owns(self, process: psutil.Process) -> bool:
        try:
            mine = (process.info["environ"] or {}).get("SLURM_CONF") == self.environment["SLURM_CONF"]
            return mine or any(file.path.startswith(str(self.folder)) for file in process.open_files())
        except psutil.Error:
            return False

    def ask(self, *command: str, timeout: float = 60) -> subprocess.CompletedProcess:
        """Run one of Slurm's commands."""
        environment = os.environ | self.environment | {"PATH": os.environ["PATH"].replace(f"{self.folder}/bin:", "")}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)

    def nodes(self) -> dict[str, str]:
        """State of each node."""
        rows = self.ask("sinfo", "--noheader", "--Node", "--Format=NodeList,StateLong").stdout.split()
        return dict(zip(rows[::2], rows[1::2], strict=True))

    def release(self) -> None:
        """Slurm holds requeued jobs for two minutes; this for two seconds. A start in the second of the requeue would
        be refused: its credential counts as revoked."""
        waiting = self.ask("squeue", "--noheader", "--states=PENDING", "--format=%i %r").stdout.splitlines()
        if held := [line.split()[0] for line in waiting if line.endswith(" BeginTime")]:
            time.sleep(2)
            for job in held:
                self.ask("scontrol", "update", f"jobid={job}", "StartTime=now")

    def words(self) -> str:
        """The last lines of all daemons."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-1500:]}" for log in logs)

    def _write_files(self) -> None:
        for name in (
            "state",
            "gpus",
            "bin",
            "tmp",
            "home",
            *(f"spool/{node}" for node in (*NODES, SPARE, NOWHERE, TYPED, BARE)),
        ):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "tmp").chmod(0o1777)
        for number in range(4):  # character devices: files give neither count nor CUDA_VISIBLE_DEVICES
            os.mknod(self.folder / f"gpus/nvidia{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        port, dbd, self.db, spare, nowhere, typed, bare, *nodes = free_ports()
        host = socket.gethostname().split(".")[0]
        values = {"folder": self.folder, "host": host, "port": port, "nodes": ",".join(map(str, nodes)), "dbd": dbd}
        values |= {"spare": spare, "nowhere": nowhere, "typed": typed, "bare": bare}
        values["accounting"] = configuration("accounting.conf", **values) if self.accounting else ""
        values["memory"] = 2 if self.accounting else 300
        (self.folder / "slurm.conf").write_text(configuration("slurm.conf", **values))
        (self.folder / "slurmdbd.conf").write_text(configuration("slurmdbd.conf", db=self.db, **values))
        (self.folder / "slurmdbd.conf").chmod(0o600)
        (self.folder / "gres.conf").write_text(configuration("gres.conf", folder=self.folder))
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        for name in COMMANDS:
            command = configuration("command", folder=self.folder, name=name, real=shutil.which(name))
            (self.folder / "bin" / name).write_text(command)
            (self.folder / "bin" / name).chmod(0o755)

    def _start_accounting(self) -> None:
        data, tongue = f"--datadir={self.folder}/db", f"--socket={self.folder}/db.socket"
        method = "--auth-root-authentication-method=normal"
        made = self.ask("mariadb-install-db", "--no-defaults", "--user=root", data, "--skip-test-db", method)
        assert made.returncode == 0, made.stdout + made.stderr
        network = ("--bind-address=127.0.0.1", f"--port={self.db}", f"--pid-file={self.folder}/db.pid")
        self._run("mariadbd", "mariadbd", "--no-defaults", "--user=root", data, tongue, *network)
        client = ("mariadb", "--no-defaults", tongue, "--user=root", "--execute")
        until(lambda: self.ask(*client, "select 1").returncode == 0, words=self.words)
        grant = "grant all on slurm_acct_db.* to slurm@'127.0.0.1' identified by 'slurm'"
        self.ask(*client, f"{grant}; {grant.replace('127.0.0.1', 'localhost')}")
        self._run("slurmdbd", "slurmdbd", "-D")
        until(lambda: self.ask("sacctmgr", "--noheader", "show", "cluster").returncode == 0, words=self.words)
        for what in (("cluster", "test"), ("account", "lab"), ("user", "root", "account=lab")):
            self.ask("sacctmgr", "--immediate", "add", *what)

    def _munge(self) -> list[str]:
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "seed-file": "munge.seed"}
        return [f"--{option}={self.folder / name}" for option, name in files.items()]

    def _run(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.out.log", "ab") as log:
            self.daemons[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | self.environment, start_new_session=True
            )


def missing() -> str | None:
    """Why there can be no such cluster here; None if there can."""
    programs = ("munged", "slurmctld", "slurmd", "sbatch", "slurmdbd", "mariadbd")
    absent = [name for name in programs if not shutil.which(name)]
    if absent:
        packages = "slurm-wlm munge slurmdbd mariadb-server"
        return f"{', '.join(absent)} not installed: apt-get install --no-install-recommends {packages}"
    return None if os.geteuid() == 0 else "only root can start slurmd"


def free_ports() -> list[int]:
    """Nine free ports, one after the other."""
    for first in range(17_000 + os.getpid() % 1000, 32_000, 9):
        trials = [socket.socket() for _ in range(9)]
        try:
            for number, trial in enumerate(trials):
                trial.bind(("127.0.0.1", first + number))
            return list(range(first, first + 9))
        except OSError:
            continue
        finally:
            for trial in trials:
                trial.close()
    raise OSError("no free ports")


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
