"""The place where the ranks of a job meet: the address of its first node, and the interface that leads there."""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import psutil

from ..error_kinds import with_reason
from ..files.reasons import SITE, Reason
from ..local import LOOPBACK, RUN_VARIABLE

if TYPE_CHECKING:
    import torch

HOST_VARIABLE = "MMFSDP_HOST"
"""Environment variable of a job: launch.host, such as {host}i."""
CONNECT_TIMEOUT_S = 30.0
"""Seconds within which the job's first node must answer; a packet that is lost is sent again after 1, 3, 7 and 15 s."""
PORTS = range(20_000, 32_000)
"""Ports at which ranks meet: below those that Linux gives to outgoing connections, from 32768 on."""
NO_ROUTE_TIMEOUT_S = 5.0
"""Seconds after which it counts that there is no way to that node."""


def _no_address(cause: str, fix: str) -> OSError:
    """Return the error of ranks that cannot meet, with its reason as data."""
    return with_reason(OSError(f"{cause}; {fix}"), Reason(cause, SITE, fix))


def set_address(nodes: Sequence[str]) -> str:
    """Set MASTER_ADDR, and the network interface of the ranks here. Return the name of the host that it stands for.

    In this order: a MASTER_ADDR that the person has exported; the loopback address for one node, since nothing outside
    it needs to connect; the address of launch.host; the first node's name. Raises OSError if the name does not resolve,
    rather than waiting minutes for it.

    nodes: the names of the job's nodes.
    """
    pattern = os.environ.get(HOST_VARIABLE)
    if "MASTER_ADDR" in os.environ:
        host = os.environ["MASTER_ADDR"]
    elif len(nodes) == 1:
        host = os.environ["MASTER_ADDR"] = LOOPBACK
    elif pattern:
        host = pattern.replace("{host}", nodes[0])
        os.environ["MASTER_ADDR"] = address_of(host)
    else:
        host = os.environ["MASTER_ADDR"] = nodes[0]
    set_interface_to(address_between(host, nodes))
    return host


def address_between(host: str, nodes: Sequence[str]) -> str:
    """Return an address by which the interface between the nodes is found: that of the host at which they meet.

    On that host itself its name may lead to the loopback interface (127.0.1.1 in /etc/hosts, as Debian has it), by
    which no other node reaches it. Then it is the address of another node. Raises OSError if the host has none.
    """
    address = address_of(host)
    if not ip_address(address).is_loopback:
        return address
    for node in nodes:
        with suppress(OSError):
            other = address_of(node)
            if not ip_address(other).is_loopback:
                return other
    return address  # all nodes are this machine


def address_of(host: str) -> str:
    """Return the address of a host. Raises OSError if its name does not resolve here."""
    try:
        return str(socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0][4][0])
    except (socket.gaierror, UnicodeError) as error:
        words = f"{host!r} has no address on {socket.gethostname()} ({error})"
        fix = "name the first node as others reach it by launch.host, such as {host}i, or export MASTER_ADDR in "
        raise _no_address(f"no rank reaches {host}: {words}", f"{fix}launch.setup") from None


def set_interface_to(address: str) -> None:
    """Set the network interface that leads to an address, unless the person has named one.

    A host's own name may lead nowhere. Leaves it open where no route leads there: `check_answers` tells that.
    """
    family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    own_address = ""
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as trial:
        trial.connect(target)  # sends nothing
        own_address = trial.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if own_address in [item.address for item in addresses]:
            set_interface(name)


def loopback_interface() -> str:
    """Return the name of this machine's loopback interface: `lo` on Linux, `lo0` on macOS; "" if it has neither."""
    names = {name for _, name in socket.if_nameindex()}
    for loopback in ("lo", "lo0"):
        if loopback in names:
            return loopback
    return ""


def free_port() -> int:
    """Return a port of the loopback interface at which nobody listens, for the rendezvous of ranks on this machine.

    Raises OSError if there is none.
    """
    with _bound_socket() as bound:
        return int(bound.getsockname()[1])


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port as `free_port` returns it, which nobody else who looks for one is given in this block.

    Ranks take seconds to import torch before rank 0 listens there. Only on Linux, which lets rank 0 have the port
    though it is bound here: of sockets with SO_REUSEADDR one may listen (man 7 socket).
    """
    with _bound_socket() as bound:
        port = int(bound.getsockname()[1])
        if sys.platform == "linux":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not before bind: it would share a port, too
        else:
            bound.close()
        yield port


def _bound_socket() -> socket.socket:
    """Return a socket that is bound to a port of the loopback interface that no other one has."""
    for port in random.SystemRandom().sample(PORTS, 100):
        bound = socket.socket()
        try:
            bound.bind((LOOPBACK, port))
        except OSError:
            bound.close()
        else:
            return bound
    raise OSError(f"no free port on {LOOPBACK} between {PORTS[0]} and {PORTS[-1]}")


def set_interface(name: str) -> None:
    """Have gloo and NCCL meet over a network interface, unless the person has named others.

    NCCL follows gloo: left to itself, it may choose an interface by which the nodes do not reach each other.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    # `=`: NCCL would take eth1 for the beginning of a name, and use eth10, too.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={os.environ['GLOO_SOCKET_IFNAME']}")


def check_answers(host: str, port: int, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
    """Raise OSError if nobody answers at the address where the ranks meet. torch would notice it after many minutes.

    A refused connection is an answer: the host can be reached, and rank 0 does not listen yet. torch waits for that.
    """
    start = time.monotonic()
    end = start + timeout_s
    address = address_of(host)
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.1, end - time.monotonic())).close()
            return
        except ConnectionRefusedError:
            return
        except TimeoutError as error:  # no answer: a firewall drops the packets
            cause: OSError = error
        except OSError as error:  # no route to the host
            cause = error
            end = min(end, start + NO_ROUTE_TIMEOUT_S)
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    words = f"no rank reaches {host} ({address}):{port} from {socket.gethostname()}: {cause}"
    fix = "if the nodes reach each other by another name or network, set launch.host (such as {host}i) or "
    fix += "launch.interface; else ask the administrators whether nodes may connect to ports "
    fix += f"{PORTS[0]} to {PORTS[-1]} of others"
    raise _no_address(words, fix)


def join_group(backend: str, device: torch.device | None = None, *, timeout_s: float | None = None) -> None:
    """Join the process group that torch.distributed's environment variables name; wait for all ranks.

    device: nccl's, which then never guesses a rank's GPU, and connects immediately, so that a mistake shows here.
    timeout_s: of the meeting and of each collective; default torch's.
    """
    import torch.distributed as dist

    options: dict[str, Any] = {"device_id": device}
    if timeout_s is not None:
        options["timeout"] = timedelta(seconds=timeout_s)
    if RUN_VARIABLE in os.environ and os.environ["MASTER_ADDR"] == LOOPBACK:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # torch's own store would listen on every interface.
        port = int(os.environ["MASTER_PORT"])
        listener = socket.create_server((LOOPBACK, port)).detach() if rank == 0 else None
        limit = {} if timeout_s is None else {"timeout": options["timeout"]}
        store = dist.TCPStore(LOOPBACK, port, ranks, is_master=rank == 0, master_listen_fd=listener, **limit)
        options |= {"store": store, "rank": rank, "world_size": ranks}
    dist.init_process_group(backend, **options)
