"""`python -m mmfsdp` is `mmfsdp`, also where no script of that name is on PATH."""

import sys

from .cli import main

sys.exit(main())
