"""Operators on rows, each in a folder of its own: `reference.py` in plain torch, obvious, and `cpu.py`."""
