"""The launchers: each one starts the ranks of runs in its own way, in a file of its own.

registry.py finds them by name; launcher.py says what a run asks of one. Nothing outside of this folder compares the
name of a launcher.
"""
