"""A rank's process: how it is started, what it does around its entry, and how it is watched."""
