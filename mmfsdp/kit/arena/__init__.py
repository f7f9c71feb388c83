"""The arena: one number for a file of one's own FSDP. `mmfsdp arena my_fsdp.py`.

- model: the small vision-language model that every file shards, and its batches.
- step_log: what a rank computes and sends in a step, in order.
- ranks: what the ranks do with a file: train, be measured, send back counts.
- gate: whether a file computes what torch's `fully_shard` does, and tells the truth of what it sends.
- clock: the counted step, played on a machine with 64 GPUs; the largest model that fits there.
- result: a file's result, as JSON that can be checked again from its counts.
- report, wall: a result as text and picture; a class's results on one page.
"""
