"""Rows between device memory and pinned host memory."""
