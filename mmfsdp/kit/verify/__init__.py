"""Verify a training: a few steps on two ranks of the CPU, compared with one process, and a line for each check.

own_loop.py is `mmfsdp.verify`, for a loop of one's own; from_params.py is `mmfsdp verify`, for a configuration. Both
describe the training as a Loop (trial.py), which runs it; the checks are a table (step_checks.py).
"""
