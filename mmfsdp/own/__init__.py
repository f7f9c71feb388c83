"""Import and call a person's own code, which parameters name by its import path (params/own.py). No torch."""
