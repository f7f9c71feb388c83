"""`python -m mmfsdp.train FOLDER`: one rank, with torch.distributed's environment variables set (by torchrun, say)."""

import sys
from pathlib import Path

from .. import runs
from .job import run

runs.listen(term=True)  # torchrun passes a preemption on as SIGTERM
run(Path(sys.argv[1]))
