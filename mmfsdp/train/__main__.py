"""`python -m mmfsdp.train FOLDER`: one rank, with torch.distributed's environment variables set (by torchrun, say)."""

import sys
from pathlib import Path

from .job import run

run(Path(sys.argv[1]))
