"""The `mmfsdp` command, and `python -m mmfsdp`, which is the same where no script of that name is on PATH."""

import os
import signal
import sys
from typing import Any


def main() -> int:
    """Import the command line, which takes a second, and run it. Ctrl-C ends the import in one line, too."""
    heeds = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # what a shell starts with `&` ignores SIGINT
    if heeds:
        # An exception may come at any line of an import, where libraries catch it or Python prints it and goes on.
        signal.signal(signal.SIGINT, _end)
    from .kit import cli

    if heeds:
        signal.signal(signal.SIGINT, cli.note_interrupt)
    return cli.main()


def _end(*_: Any) -> None:
    """End this process, which has started nothing yet."""
    os.write(2, b"\nmmfsdp: interrupted\n")
    os._exit(128 + signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
