"""`python -m mmfsdp.kit.run FOLDER`: supervise a run, or submit a Slurm run. People call `mmfsdp run` or `launch`.

`... FOLDER helper watchdog PID`: watch the job of rank 0, process PID. `... FOLDER helper asker PID`: ask the ranks of
this node, of which PID is one, when they hang. `... FOLDER sweep`: start the runs of a sweep.
`... FOLDER rank`: be one rank, for a launcher without submitit.
`... FOLDER ranks`: start the ranks of a local run as forks of this process.
`... FOLDER replay SPEED RECORDING`: play a recording.
`... FOLDER backbones`: pretrain the backbones of a run. `... FOLDER track KIND ...`: hand the metrics of a run, or of a
sweep's runs, to trackers.
"""

import os
import sys
from pathlib import Path

os.umask(os.umask(0o022) | 0o022)  # also files that ranks, submitit and Slurm write are writable by their owner alone

folder, role = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "start"
if role == "helper":
    from .ranks.helpers import HELPERS

    HELPERS[sys.argv[3]](folder, int(sys.argv[4]))
elif role == "ranks":
    from .ranks.forked_ranks import fork_ranks

    fork_ranks(folder)
elif role == "rank":
    from .ranks.rank import run_alone

    run_alone(folder)
elif role == "sweep":
    from .sweep import run_sweep

    run_sweep(folder)
elif role == "backbones":
    from .pretraining import pretrain_here

    pretrain_here(folder)
elif role == "track":
    from ...params import TrackerKind
    from .trackers.track import track

    track(folder, [TrackerKind(kind) for kind in sys.argv[3:]])
elif role == "replay":
    from .replay.replay import play

    play(folder, float(sys.argv[3]), Path(sys.argv[4]))
else:
    from .supervisor import take_care

    take_care(folder)
