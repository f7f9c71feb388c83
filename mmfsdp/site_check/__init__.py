"""`mmfsdp check`: this machine, then ranks on it or in a Slurm job of about a minute; a line for each finding.

check.py is the function and the command. this_machine.py and slurm_commands.py look at the machine that it is called
on; check_run.py starts the ranks, as a launch does; rank_facts.py is what each of them does: it writes down what it
finds, and judges nothing. judge.py makes lines of these facts. `mmfsdp verify` checks the training itself.
"""
