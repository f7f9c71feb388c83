"""`python -m mmfsdp.launch FOLDER`: starts a run, and supervises it if it is local; `... FOLDER unseen` lints it first.
`... FOLDER lint` only says what is wrong with it; `... FOLDER watch PID`, within a Slurm job, watches its ranks.
People call `mmfsdp run` or `launch(params)`."""

import sys
from pathlib import Path

folder = Path(sys.argv[1])
if sys.argv[2:3] == ["watch"]:
    from .within import watch

    watch(folder, parent=int(sys.argv[3]))
elif sys.argv[2:] == ["lint"]:
    from .lint import lint_folder

    sys.exit(lint_folder(folder))
else:
    from .supervisor import read_record, supervise

    unseen = sys.argv[2:] == ["unseen"]
    if read_record(folder).executor == "slurm":
        from .slurm import submit

        submit(folder, unseen=unseen)
    else:
        supervise(folder, unseen=unseen)
