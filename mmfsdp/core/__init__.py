"""Plan, wrap and train with frozen-aware FSDP: torch and `mmfsdp.params` only. Read the files in this order.

1. freeze: name patterns set `requires_grad`, once.
2. plan: the words (unit, grad flow, frozen policy, wire bytes), a plan as data, and how it prints.
3. trace: the order in which modules run, and the frozen weights that backward passes through; fake tensors.
4. group: modules to groups, by policy; tied parameters.
5. units: groups to units, with policy, dtypes, all-gathers and bytes.
6. memory: bytes at rest, and the peak of a step; memory_events: one micro-step on fake tensors, from which it follows.
7. planner: `make_plan`, and AUTO within a memory budget.
8. lint: mistakes in a plan, with the parameter and the fix.
9. wrap: a plan applied; fsdp2, with activation checkpointing, and fsdp1: one call of torch for each unit; weights: each
   rank gets its shard; quantize: frozen matrices in 8 or 4 bits.
10. step: `train_step`; optimizer: AdamW, its schedule, the loss scale; collectives: what was really sent.
"""
