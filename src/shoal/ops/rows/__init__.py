"""Whole rows, or parts of them, in and out of device memory by slot."""
