"""Recordings of runs: how they are made, and played again without ranks."""
