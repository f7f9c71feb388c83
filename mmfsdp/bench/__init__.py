"""What things cost: measured here, in interleaved rounds, with medians."""
