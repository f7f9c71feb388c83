"""`python -m mmfsdp.kit.train FOLDER`: one rank, with torch.distributed's variables set (by torchrun, say)."""

import sys
from pathlib import Path

if len(sys.argv) != 2:
    sys.exit("usage: torchrun --nproc-per-node N -m mmfsdp.kit.train FOLDER")

from ...params import RunParams  # noqa: E402
from ..run.own_code import use_code_of  # noqa: E402
from ..run.preempt import listen_for_preemption  # noqa: E402
from ..run.ranks.rank_imports import rank_imports  # noqa: E402

folder = Path(sys.argv[1])
listen_for_preemption(sigterm=True)  # torchrun forwards a preemption as SIGTERM
use_code_of(folder)
with rank_imports(RunParams.from_yaml(folder / "params.yaml")):
    from .job import run
run(folder)
