"""Operators on rows. Each folder holds the same operator twice: `reference.py`, plain torch and obvious, and `cpu.py`."""
