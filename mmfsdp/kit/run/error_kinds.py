"""The kind of a cause (reasons.py) of an exception: by its type, and by what raised it."""

from __future__ import annotations

import dis
import errno
import os
import pwd
import re
import shutil
from pathlib import Path
from typing import TypeVar

from .files.reasons import COLLECTIVES, DISK, LOST_PEER, MEMORY, SHARED_MEMORY, SITE, Reason

SHM = "/dev/shm"
"""The file system in memory by which data workers hand batches to their rank, and NCCL's ranks of a node talk."""
REASON = "mmfsdp_reason"
"""Attribute of an exception: its reason as data, where this package raises it."""
OUT_OF_MEMORY = {"torch.OutOfMemoryError"}
OF_NETWORK = {
    "torch.distributed.DistBackendError",
    "torch.distributed.DistNetworkError",
    "torch.distributed.DistStoreError",
}
"""Types of torch.distributed, such as NCCL's errors."""
OF_FILES = {"safetensors._safetensors_rust.SafetensorError", "safetensors_rust.SafetensorError"}
LIBRARY_TEXTS = {
    "DefaultCPUAllocator: (can't allocate|not enough) memory": MEMORY,
    "(insufficient|out of) shared memory": SHARED_MEMORY,
    r"</torch_\w+>: No space left on device": SHARED_MEMORY,
    "No space left on device|Disk quota exceeded": DISK,
    r"op\.preamble\.length <= op\.nbytes": COLLECTIVES,
    "Connection (closed|reset) by peer|Broken pipe": LOST_PEER,
    "Unable to find address for": SITE,
}
"""Text of an error that C++ raises, of which torch's type is RuntimeError whatever the cause -> kind. Never the text of
a person."""
_NO_CALL = ("RAISE_VARARGS", "RERAISE", "RESUME", "YIELD_VALUE", "RETURN_GENERATOR", "SEND")
"""Instructions at which a line raises itself, or a generator is given an exception by whoever runs it."""
Error = TypeVar("Error", bound=BaseException)


def with_reason(error: Error, reason: Reason) -> Error:
    """Return an exception with its reason as data, for `raise`."""
    setattr(error, REASON, reason)
    return error


def reason_of(error: BaseException) -> Reason:
    """Return the reason that an exception of this package carries; an empty one for any other exception."""
    reason = getattr(error, REASON, None)
    return reason if isinstance(reason, Reason) else Reason()


def kind_of(error: BaseException) -> str:
    """Return the kind of the cause of an exception; "" where only its text could tell."""
    if reason := reason_of(error):
        return reason.kind
    names = {f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__}
    if isinstance(error, MemoryError) or names & OUT_OF_MEMORY:
        return MEMORY
    if names & OF_NETWORK:
        return LOST_PEER if text_kind(str(error)) == LOST_PEER else SITE
    if names & OF_FILES:
        return text_kind(str(error))
    kind = ""
    if isinstance(error, OSError):
        kind = _kind_of_os_error(error)
    elif type(error) is RuntimeError and is_raised_in_c(error):
        kind = text_kind(str(error))
    if not kind and error.__cause__ is not None:  # `raise ... from cause`
        kind = kind_of(error.__cause__)
    return kind


def error_words(error: BaseException) -> str:
    """Return the message of an exception in a line; where a file may not be read or written, with whose it is."""
    words = " ".join(str(error).split())
    if not isinstance(error, PermissionError) or not isinstance(error.filename, (str, bytes)):
        return words
    path = Path(os.fsdecode(error.filename)).absolute()
    while True:
        try:
            owner = path.stat().st_uid
            break
        except OSError:  # a file that is not there, or in a folder that is closed
            path = path.parent
    if owner == os.getuid():
        return words
    try:
        user = pwd.getpwuid(owner).pw_name
    except KeyError:  # of another machine
        user = f"number {owner}"
    return f"{path} belongs to the user {user}, and you may not {'write' if os.access(path, os.R_OK) else 'read'} it"


def text_kind(text: str) -> str:
    """Return the kind of a message of a library in C++; "" if it is another one. Not for the text of a person."""
    for pattern, kind in LIBRARY_TEXTS.items():
        if re.search(pattern, text):
            return kind
    return MEMORY if text == "std::bad_alloc" else ""


def _kind_of_os_error(error: OSError) -> str:
    if error.errno == errno.ENOMEM:
        return MEMORY
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    is_shared = str(error.filename or SHM).startswith(SHM)  # a semaphore has no name here
    return SHARED_MEMORY if is_shared and is_full(SHM) else DISK


def is_raised_in_c(error: BaseException) -> bool:
    """Return True if a function in C raised an exception, not a line of Python.

    In the innermost frame of its traceback, that line then calls something rather than raises.
    """
    traceback = error.__traceback__
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    instruction = traceback.tb_frame.f_code.co_code[traceback.tb_lasti]
    return dis.opname[instruction] not in _NO_CALL


def is_full(folder: str) -> bool:
    """Return True if a file system has less than 1 % of its space left."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return False
    return usage.free < 0.01 * usage.total
