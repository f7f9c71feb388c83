"""`mmfsdp check`: this machine, then ranks on it or in a Slurm job of about a minute; a line for each finding.

| step | file |
|---|---|
| the function `check` | check.py |
| look at the machine on which it is called | this_machine.py, slurm_commands.py, places.py |
| start the ranks, as a launch does | check_run.py, check_job.py |
| each rank writes down facts, and judges nothing | rank_facts.py, group_facts.py |
| read these facts as data | read_facts.py |
| make lines of these facts | judge.py, machine_figures.py |
| show the lines | site_report.py |

`mmfsdp verify` checks the training itself.
"""
