"""Rows: how a row of a data set becomes a sample, by its keys and values."""
