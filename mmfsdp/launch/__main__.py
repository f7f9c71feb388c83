"""`python -m mmfsdp.launch FOLDER`: the supervisor of one run. People call `mmfsdp run` or `launch(params)`."""

import sys
from pathlib import Path

from .supervisor import supervise

supervise(Path(sys.argv[1]))
