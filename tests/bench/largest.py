"""`python -m tests.bench.largest`: how long the largest preset takes to plan for 1,024 ranks, and in how much memory.

The bars are 20 seconds of one core after the imports, and 3 GiB. Only the second is a test: seconds are the machine's.
"""

import resource
import sys
import time

import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl  # noqa: F401 its import is not measured

from mmfsdp.params import load
from mmfsdp.train.prepare import preview

if __name__ == "__main__":
    start = time.process_time()
    plan, cost = preview(load("qwen2_5_vl_72b").change(**{"launch.ranks": 1024}))
    seconds = time.process_time() - start
    assert plan.flops and len(plan.units) > 100 and cost.peak_bytes
    unit = 1 if sys.platform == "darwin" else 1024
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    print(f"{seconds:.1f} s, {gib:.2f} GiB")
