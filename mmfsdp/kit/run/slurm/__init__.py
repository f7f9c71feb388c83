"""Slurm: batch scripts, the options of sites, job arrays, and what Slurm says about a job."""
