"""Whether the hub of Hugging Face can be reached, asked before its library would try again and again for a minute."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

SILENT = f"it was never downloaded here, and {ENDPOINT} does not answer"
PATIENCE = 10.0
"""Seconds that it may take to find the hub; without network the answer mostly comes at once."""


def answers() -> bool:
    """Whether somebody takes the call there; not asked with HF_HUB_OFFLINE, which fails at once, or behind a proxy."""
    if HF_HUB_OFFLINE or getproxies().keys() - {"no"}:
        return True
    url, connected = urlsplit(ENDPOINT), threading.Event()

    def call() -> None:
        port = url.port or (80 if url.scheme == "http" else 443)
        with suppress(OSError), socket.create_connection((url.hostname or "", port), timeout=PATIENCE / 3):
            connected.set()

    caller = threading.Thread(target=call, daemon=True)  # a name server that is silent keeps it longer
    caller.start()
    caller.join(PATIENCE)
    return connected.is_set()
