"""Functions that kernels share."""
