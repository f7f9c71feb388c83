"""The two collectives of sharded training, by one name each for every torch that the course supports.

`all_gather(whole, part)` fills `whole` (N,) with the parts (N / W,) of all ranks. `reduce_scatter(part, whole)` fills
`part` (N / W,) with this rank's part of the sum of `whole` (N,) over the ranks.
"""

from __future__ import annotations

import torch.distributed as dist

# torch 2.14 has new names, and warns of the old ones. Drop the old ones with torch 2.13.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
