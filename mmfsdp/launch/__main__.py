"""`python -m mmfsdp.launch FOLDER`: starts a run, and supervises it if it is local. `... FOLDER watch PID`, within a
Slurm job, watches its ranks. People call `mmfsdp run` or `launch(params)`."""

import sys
from pathlib import Path

folder = Path(sys.argv[1])
if sys.argv[2:3] == ["watch"]:
    from .within import watch

    watch(folder, parent=int(sys.argv[3]))
else:
    from .supervisor import read_record, supervise

    if read_record(folder).executor == "slurm":
        from .slurm import submit

        submit(folder)
    else:
        supervise(folder)
