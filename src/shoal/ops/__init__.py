"""Operators on rows, each in a folder of its own: `reference.py` in plain torch, obvious, `cpu.py` and `triton.py`.

Nothing imports a `triton.py` before a table is made in device memory: Shoal works without Triton.
"""
