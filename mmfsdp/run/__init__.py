"""The run room: start the ranks of a run, watch them, and know the state of a run from any process. Imports no torch.

`launch` -> a supervisor in a session of its own (or the process that submits a Slurm job) -> submitit -> one process
per rank, each calling the entry function with the run folder.

The run folder is the database. Every file in it but events.jsonl has one writer:

| file | who writes it, and what |
|---|---|
| run.json | `launch`: who runs it, and where (RunRecord) |
| params.yaml | `launch`: all parameters |
| status.json | the supervisor, or on Slurm whoever finds it out first: job number, failure, final state |
| logs/rank<N>.json | rank N: its process, then done, preempted, or failed with a traceback |
| logs/rank<N>.beat | rank N: its heartbeat, which names what it is about to do |
| logs/ranks.* | a Slurm job: preempted (any rank), exit code (its batch script) |
| logs/*_<N>_log.out | rank N: what it prints (submitit's files) |
| metrics.jsonl | rank 0: one line per step; metrics-rank<N>.jsonl for the others |
| events.jsonl | anybody: saved, preempted, resumed and the like, one line each |
| plan.json, checkpoints/, result.json, report.html | the training |
| cancel | whoever wants the run to stop; only its presence counts |

Read in this order: folder, record, launch, supervisor and slurm, job, preempt, state (local, slurm_state), handle.
"""
