"""What several test files use: batches, twins, oracles, faults."""
