"""What the ranks of tests run in place of a training, here and on Slurm: real processes, most without torch."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from mmfsdp.kit.run.files.folder import MetricsWriter, add_event, heartbeat_path, last_row, write_json
from mmfsdp.kit.run.files.run_record import RunRecord, rank_statuses
from mmfsdp.kit.run.preempt import Preempted, preemption_requested
from mmfsdp.kit.run.ranks.hang import Heartbeat
from mmfsdp.kit.run.ranks.rank_imports import rank_imports
from mmfsdp.own.calls import call_own
from mmfsdp.params import RunParams

RANK = int(os.environ.get("RANK", "0"))


def talk(folder: Path) -> None:
    """Print and measure five steps, both ranks."""
    metrics = MetricsWriter(folder, RANK)
    keys = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS CUDA_VISIBLE_DEVICES".split()
    keys += ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    print("env", *(f"{key}={os.environ[key]}" for key in keys))
    print("a warning", file=sys.stderr)
    for step in range(1, 6):
        print(f"step {step} at {time.time()}")
        metrics.write({"step": step, "time": time.time(), "loss": 1 / step})
        time.sleep(0.1)
    sys.stdout.write("no newline at the end")


def call_own_code(folder: Path) -> None:
    """Call the callback, and print what it returns."""
    print(call_own("train.callbacks", RunParams.from_yaml(folder / "params.yaml").train.callbacks[0]))


def listen(folder: Path) -> None:
    """Print the addresses at which a rank of a training listens once it has joined, and what ranks tell each other."""
    import psutil

    from mmfsdp.core.collectives import gather_json
    from mmfsdp.kit.train.process_group import process_group

    with process_group(RunParams.from_yaml(folder / "params.yaml")):
        told = gather_json({"rank": RANK, "name": "\u00e9" * RANK})
        connections = psutil.Process().net_connections(kind="inet")
        print("told", told)
        print("listens at", sorted({c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}))


def busy(folder: Path) -> None:
    """Steps as of a training for five minutes that saves each fifth one, with all that a panel shows."""
    saved = last_row(folder, 0).get("step", 0) // 5 * 5
    metrics, beat = MetricsWriter(folder, RANK, after=saved), Heartbeat(folder, RANK)
    if saved and RANK == 0:
        add_event(folder, "resumed", step=saved, text=f"resumed from step {saved}")
    for step in range(saved + 1, 3001):
        beat(f"step {step} compute")
        row = {"loss": 3 / step + step % 7 / 50, "grad_norm": 1 + step % 5, "samples_per_s": 90.0 + step % 11}
        memory = (200 << 20) + step % 13 * (1 << 18)
        metrics.write({"step": step, "time": time.time(), "step_s": 0.1, "memory_bytes": memory, **row})
        odd = "  WARNING: <b>slow</b> disk" if step % 25 == 9 else ""
        print(f"step {step}/3000  \x1b[32mloss {row['loss']:.4f}\x1b[0m{odd}")
        time.sleep(0.1)


def sleep(folder: Path) -> None:
    """Run on, with a child each, until stopped."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    metrics = MetricsWriter(folder, RANK)
    for step in range(1, 6000):
        metrics.write({"step": step, "time": time.time()})
        time.sleep(0.1)


def fail(folder: Path) -> None:
    """Rank 1 fails, rank 0 would go on for ever and does not listen to TERM."""
    if RANK == 1:
        time.sleep(0.3)
        raise RuntimeError("the cause")
    sturdy(folder)


def die(folder: Path) -> None:
    """Rank 1 is killed; rank 0, which talks to it, fails for want of it, at once and with a traceback."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if RANK == 1:
        with socket.create_server(address) as server:
            peer, _ = server.accept()
            print("last words of rank 1")
            os.kill(os.getpid(), signal.SIGKILL)
    while (peer := socket.socket()).connect_ex(address):
        time.sleep(0.05)
    if not peer.recv(1):
        raise ConnectionError("connection closed by peer")


def diverge(folder: Path) -> None:
    """Five steps, of which the last two are skipped."""
    metrics = MetricsWriter(folder, RANK)
    for step in range(1, 6):
        skipped = max(0, step - 3)
        row = {"loss": float("nan") if skipped else 1.0, "skipped_steps": skipped, "skipped_in_a_row": skipped}
        metrics.write({"step": step, "time": time.time(), **row})


def differ(folder: Path) -> None:
    """Rank 1 sends more than rank 0 awaits, as where a part of a model is used on some ranks only."""
    import faulthandler

    import torch
    import torch.distributed as dist

    from mmfsdp.kit.train.process_group import process_group

    with process_group(RunParams.from_yaml(folder / "params.yaml")):
        faulthandler.enable()
        Heartbeat(folder, RANK)("step 2 callback gathers")
        dist.all_reduce(torch.ones(8000 if RANK else 8))


def sturdy(folder: Path) -> None:
    """Hold out against TERM, with a child that does so, too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep(folder)


def preemptible(folder: Path) -> None:
    """A training of 60 steps that saves nothing but its step, and ends when it is preempted."""
    done = last_row(folder, RANK).get("step", 0)
    if done and RANK == 0:
        add_event(folder, "resumed", step=done, text=f"resumed from step {done}")
    record = RunRecord.read(folder)
    while any(status.get("state") != "running" for status in rank_statuses(folder, record)):
        time.sleep(0.05)  # a drill needs them all, and on a busy node one starts much later than another
    metrics = MetricsWriter(folder, RANK)
    for step in range(done + 1, 61):
        metrics.write({"step": step, "time": time.time(), "loss": 1 / step})
        time.sleep(0.05)
        if preemption_requested():
            if RANK == 0:
                add_event(folder, "preempted", step=step, text=f"preempted at step {step}")
            raise Preempted(step)


def goes_on_once_preempted(folder: Path) -> None:
    """Steps without end until it is preempted, and five more in its next life."""
    done = last_row(folder, RANK).get("step", 0)
    if done and RANK == 0:
        add_event(folder, "resumed", step=done, text=f"resumed from step {done}")
    metrics = MetricsWriter(folder, RANK)
    for step in range(done + 1, done + 6 if done else 60_000):
        metrics.write({"step": step, "time": time.time(), "loss": 1 / step})
        time.sleep(0.1)
        if preemption_requested():
            if RANK == 0:
                add_event(folder, "preempted", step=step, text=f"preempted at step {step}")
            raise Preempted(step)


def member(folder: Path) -> None:
    """A sweep's member: 4 steps; where the learning rate is 2, rank 1 fails the first time, at step 3."""
    rate = RunParams.from_yaml(folder / "params.yaml").train.lr
    done = last_row(folder, RANK).get("step", 0)
    metrics = MetricsWriter(folder, RANK)
    for step in range(done + 1, 5):
        metrics.write({"step": step, "time": time.time(), "loss": rate / step})
        time.sleep(0.05 if rate < 5 else 600)
        if rate == 2 and RANK == 1 and step == 3 and not done:
            raise RuntimeError("a bad member")
    if RANK == 0:
        write_json(folder / "result.json", {"heldout_exact_match": rate / 10})


def places(folder: Path) -> None:
    """Say where this rank is."""
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS CUDA_VISIBLE_DEVICES PLACE"
    names += " GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME HF_HUB_OFFLINE"
    print(*(f"{name}={os.environ.get(name)}" for name in names.split()), f"node={os.environ['SLURMD_NODENAME']}")
    print(f"port={os.environ['MASTER_PORT']}")


def stream(folder: Path) -> None:
    """A line and a row of metrics every tenth of a second until stopped; deaf to TERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    metrics, beat = MetricsWriter(folder, RANK), Heartbeat(folder, RANK)
    for step in range(1, 6000):
        beat(f"step {step} compute")
        print(f"at {time.time()}")
        metrics.write({"step": step, "time": time.time()})
        time.sleep(0.1)


def hang(folder: Path) -> None:
    """Rank 3 hangs in its third step, and the others wait for it."""

    def hang_here() -> None:
        time.sleep(600)

    beat = Heartbeat(folder, RANK)
    beat("joining")
    while RANK != 3 and not heartbeat_path(folder, 3).exists():  # as they meet in a training, however late one starts
        time.sleep(0.05)
    for step in range(1, 3):
        beat(f"step {step} compute")
        time.sleep(0.1)
    beat(f"step {3 if RANK == 3 else 4} compute")
    hang_here()


def killed(folder: Path) -> None:
    """Rank 2 is killed, the others wait."""
    if RANK == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def raises(folder: Path) -> None:
    """Rank 2 raises, rank 0 holds out."""
    if RANK == 2:
        raise RuntimeError("the cause")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def polite(folder: Path) -> None:
    """Steps until it is preempted, as in training."""
    for step in range(1, 6000):
        if preemption_requested():
            raise Preempted(step)
        print(f"life {os.environ.get('SLURM_RESTART_COUNT', '0')} step {step}")
        time.sleep(0.1)


def import_training(folder: Path) -> None:
    """Import what trains as a rank of a training does: without what these parameters do not use."""
    with rank_imports(RunParams.from_yaml(folder / "params.yaml")):
        import mmfsdp.kit.train.job  # noqa: F401


def trains(folder: Path) -> None:
    """The real training, with a pause in each step and save until its last life, whose number is by launch.name."""
    import_training(folder)
    from mmfsdp.checkpoint import saving
    from mmfsdp.kit import train
    from mmfsdp.kit.train import meters

    last, pause = (1, 2.0) if folder.name == "limited" else (3, 0.5)
    if int(os.environ.get("SLURM_RESTART_COUNT", "0")) >= last:
        return train.run(folder)
    states, reset = saving.random_states, meters.Collectives.reset

    def slow_states():
        time.sleep(pause)
        return states()

    def slow_reset(self) -> None:
        time.sleep(pause)
        reset(self)

    saving.random_states, meters.Collectives.reset = slow_states, slow_reset
    train.run(folder)


SIGNALS = {
    "local": ["USR1 workers, USR1 step, USR1 evaluation, USR1 save, USR2 evaluation", "USR2 save"],
    "job": ["USR1 workers, USR1 step, USR1 evaluation, USR1 save, TERM save", "USR2 step"],
}
"""By launch.name, for each life of a run: the signals that all its processes get, and in what."""


def signalled(folder: Path) -> None:
    """The real training. In what SIGNALS lists of this life, rank 0 sends a signal to all processes of the job."""
    import_training(folder)
    from mmfsdp.checkpoint import saving
    from mmfsdp.kit import train
    from mmfsdp.kit.run.files.folder import read_events
    from mmfsdp.kit.train import evaluate, loop, meters

    life = sum(event["kind"] == "preempted" for event in read_events(folder))
    signals = (SIGNALS[folder.name] + [""])[life].split(", ")

    def send_in(place: str) -> None:
        for text in [text for text in signals if RANK == 0 and text.endswith(" " + place)]:
            signals.remove(text)
            send_to_all(text.split()[0])
            print(f"sent {text}")

    def after(place: str, function):
        def with_signal(*args, **kwargs):
            result = function(*args, **kwargs)
            send_in(place)
            return result

        return with_signal

    loop.batches = after("workers", loop.batches)
    meters.Collectives.reset = after("step", meters.Collectives.reset)
    evaluate.HeldOut.loss = after("evaluation", evaluate.HeldOut.loss)
    saving.random_states = after("save", saving.random_states)
    train.run(folder)


def send_to_all(name: str) -> None:
    """Send a signal to every process of this rank's job, and wait until it is here."""
    number = signal.Signals[f"SIG{name}"]
    if job := os.environ.get("SLURM_JOB_ID"):
        subprocess.run(["scancel", f"--signal={name}", job], check=True)
    else:
        os.killpg(0, number)
    while number != signal.SIGUSR1 and not preemption_requested(number):
        time.sleep(0.05)


def vanishes(folder: Path) -> None:
    """Step until SIGTERM comes, then end with exit code 0 and without a report, as ranks of a lost node may."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    for step in range(1, 6000):
        print(f"life {os.environ.get('SLURM_RESTART_COUNT', '0')} step {step}")
        time.sleep(0.1)


def leaves(folder: Path) -> None:
    """End without a report, as a process that calls os._exit; rank 0 alone finishes."""
    if RANK:
        os._exit(0)


def hangs_on_a_skewed_file_server(folder: Path) -> None:
    """Rank 1 hangs in its third step. The clock of the file server is an hour behind, or ahead, as the run is named."""
    (folder / f"rank{RANK}.here").touch()
    while not (folder / f"rank{1 - RANK}.here").exists():  # however late one of them starts
        time.sleep(0.05)
    beat, path = Heartbeat(folder, RANK), heartbeat_path(folder, RANK)
    for step in range(1, 4):
        beat(f"step {step} compute")
        at = time.time() + (3600 if folder.name == "ahead" else -3600)
        os.utime(path, (at, at))
        time.sleep(0.2)
        if RANK == 1 and step == 3:
            time.sleep(600)
    beat("step 4 compute")
    time.sleep(600)
