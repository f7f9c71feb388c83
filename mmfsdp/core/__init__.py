"""Plan the units of a model, wrap it and train it with frozen-aware FSDP: torch and `mmfsdp.params` only.

Read the files in this order. The door, `make_plan`, stands above them in `mmfsdp/planning.py`. What a plan costs is
predicted in `mmfsdp.predict`.

1. freeze: name patterns set `requires_grad`, once.
2. plan: the words (unit, grad flow, frozen policy, wire bytes), a plan as data, and how it prints; model_record: what
   is remembered of a model, its plan first.
3. trace: the order in which modules run, and the frozen weights that backward passes through; fake tensors; precision:
   inputs in the dtype of the weights.
4. group: modules to groups, by policy; tied parameters.
5. units: groups to units, with policy, dtypes and all-gathers; unit_rules: their bytes.
6. planner: `trace_and_group`, then `plan_units` for one policy. optimizer_states: an optimizer by its name, and what it
   keeps for each byte that trains.
7. guards: a model that is no longer as its plan says.
8. wrap: a plan applied; wrapper, and fsdp2, with activation checkpointing: one call of torch for each unit; weights:
   rank 0's, copied to every rank, which wrapping then shards; parameters: their hooks and attributes, kept; quantize:
   frozen matrices in 8 or 4 bits.
9. reshard: between two steps each unit is sharded and idle, also after an error. inference: evaluations and `generate`
   between steps.
10. micro_batch: what `train_step` takes. gradient_sync: gradients are reduced in the last micro-batch.
    step: `train_step`; same_parts: ranks that use different parts in a step; collectives: this rank, the number of
    ranks, sums over ranks.
"""
