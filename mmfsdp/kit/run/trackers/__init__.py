"""Trackers: programs that show the metrics of runs."""
