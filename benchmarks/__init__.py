"""Benchmarks: `scripts/bench cpu` runs every case of cpu.py against its peers and appends to results/cpu.csv."""
