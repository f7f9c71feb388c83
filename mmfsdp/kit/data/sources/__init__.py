"""Sources of data: what opens files, shards, tables and data sets of the hub, and a person's own reader."""
