"""The run room: start the ranks of a run, watch them, and know the state of a run from any process. Imports no torch.

`launch` -> a supervisor in a session of its own (or the process that submits a Slurm job) -> a launcher (launchers/),
by submitit or by a scheduler of its own -> one process per rank, each calling the entry function with the run folder.
Local ranks on the CPU are forks of one process.

The run folder is the database. Every file in it but events.jsonl has one writer:

| file | who writes it, and what |
|---|---|
| run.json | `launch`: who runs it, and where (RunRecord) |
| params.yaml | `launch`: all parameters |
| status.json | the supervisor, or on Slurm whoever finds it out first: job number, failure, final state |
| logs/rank<N>.json | rank N: its process, then done, preempted, or failed with a traceback and a kind (reasons.py) |
| logs/rank<N>.beat | rank N: its heartbeat, which names what it is about to do |
| logs/backbones.* | the process that pretrains the backbones of a run: how far it is, what it prints |
| logs/ranks.* | a Slurm job: preempted (any rank), exit code (its batch script) |
| logs/*_<N>_log.out | rank N: what it prints (submitit's files, but for a launcher without it) |
| metrics.jsonl | rank 0: one line per step; metrics-rank<N>.jsonl for the others |
| events.jsonl | anybody: saved, preempted, resumed and the like, and states, one line each; rank 0: its stages |
| events-rank<N>.jsonl | rank N: its starts, stages and ends, one line each (history.py) |
| code/, code.json | `launch`: the person's own modules, and the versions of the packages that they import |
| tracked-*.json, track.log, tensorboard/, wandb/ | the process that tracks the run (track.py) |
| plan.json, checkpoints/, result.json, report.html | the training |
| cancel | whoever wants the run to stop; only its presence counts |

Read in this order:

1. files/: folder, record: the files above, and the records in them; history: the events of a run; snapshot: one look at
   a run, from any process; reasons, stages.
2. launch, start, rank_count, own_code, trust: from a person's call to a started run.
3. launchers/: who starts the ranks; local_launcher with fork, forked_ranks and warm of ranks/, slurm_launcher with
   slurm/; supervisor and local: who watches them, once the backbones are there (pretraining); ranks/hang: the rank that
   hangs.
4. ranks/rank, preempt: what each rank does before and around the entry function.
5. state, local_state, and of slurm/ slurm_state, slurm_log: the state of a run, a function of one look at it; progress:
   how far it is; error_kinds, trouble: what is wrong, and what to do.
6. replay/: a run that was recorded, played again without its ranks.
7. handle, watch, sweep, trackers/: what a person has in hand.
"""
