"""`mmfsdp check`: this machine, then ranks on it or in a Slurm job of about a minute; a line for each finding.

| step | file |
|---|---|
| the function `check` | check.py |
| look at the machine on which it is called | this_machine.py, places.py |
| start the ranks, as a launch does | check_run.py |
| what Slurm adds: its commands, and the job of the ranks | slurm_lines.py |
| each rank writes down facts, and judges nothing; they are read as data | rank_facts.py, group_facts.py |
| make lines of these facts | judge.py, machine_figures.py |
| show the lines | site_report.py |

`mmfsdp verify` checks the training itself.
"""
