"""`python -m tests.bench.largest`: how long the largest preset takes to plan for 1,024 ranks, and in how much memory.

The bars are 20 seconds of one core after the imports, and 3 GiB. Only the second is a test: seconds are the machine's.
"""

import resource
import sys
import time
from pathlib import Path

import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl  # noqa: F401 its import is not measured

from mmfsdp.kit.train.prepare import preview
from mmfsdp.params import load


def peak_of_this_process() -> int:
    """Return the largest resident memory of this program so far, in bytes.

    Linux keeps ru_maxrss across exec: a small program that a large one has started gets the figure of the large
    one. VmHWM begins with the program.
    """
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    start = time.process_time()
    plan, cost = preview(load("qwen2_5_vl_72b").change(**{"launch.ranks": 1024}))
    seconds = time.process_time() - start
    assert plan.flops and len(plan.units) > 100 and cost.peak_bytes
    print(f"{seconds:.1f} s, {peak_of_this_process() / 2**30:.2f} GiB")
