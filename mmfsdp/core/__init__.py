"""Plan the units of a model, wrap it and train it with frozen-aware FSDP: torch and `mmfsdp.params` only.

Read the files in this order: each uses only those before it. The door, `make_plan`, stands above them in
`mmfsdp/planning.py`; begin there if you would rather open what it calls. What a plan costs is predicted in
`mmfsdp.predict`.

The plan

- plan: the words (unit, grad flow, frozen policy, wire bytes), a plan as data, and how it prints.
- model_record: what is remembered of a model, its plan first.
- names: names of parameters and modules, without what wrappers add; tied parameters.
- freeze: name patterns set `requires_grad`, once.
- fake_tensors: a model without memory, on which operators compute shapes only.
- precision: inputs in the dtype of the weights.
- trace: the order in which modules run, and the frozen weights that backward passes through.
- group: modules to groups, by policy; tied parameters.
- recompute: activation checkpointing, and what backward runs again.
- wrapper: what planning and wrapping ask of FSDP2, FSDP1 and DDP.
- reshard: between two steps each unit is sharded and idle, also after an error.
- parameters: hooks and attributes of a parameter, kept where another object takes its place.
- collectives: this rank, the number of ranks, plain data and sums of all ranks.
- quantize: frozen matrices in 8 or 4 bits.
- unit_rules: the bytes of a unit.
- units: groups to units, with policy and dtypes, and when their weights are freed.
- planner: `trace_and_group`, then `plan_units` for one policy.
- optimizer_states: an optimizer by its name, what it keeps for each byte that trains; does it need whole matrices?
- several_optimizers: optimizers of different parameters as one.

The wrapped model

- guards: stop where a model is no longer as its plan says.
- checksums: CRC-32 of tensors, and of those that several ranks read in parts.
- tensor_files: parts of tensors, read from safetensors files.
- shared_files: each rank reads its rows, where all ranks see rank 0's files.
- weights: rank 0's, copied to every rank, which wrapping then shards.
- inference: evaluations and `generate` between steps.
- even_batches: ranks with different numbers of batches to evaluate.
- fsdp2: one call of `fully_shard` for each unit.
- wrap: a plan applied.

The step

- step_batch: the micro-batches that a step takes, as a data worker makes them.
- micro_batch: what `train_step` checks of micro-batches, and the loss in what a forward returns.
- token_loss: the loss of a language model's head, piece by piece.
- gradient_sync: gradients are reduced in the last micro-batch.
- same_parts: ranks that use different parts of the model in a step.
- written_state: frozen state that a forward has written.
- before_step: what `train_step` looks at before it begins.
- step: `train_step`.
"""
