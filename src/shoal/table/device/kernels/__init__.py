"""Kernels that need the index and the rows at once."""
