"""The kit around the small package, which imports none of it: models, data, training, runs, widgets, commands."""
