"""Keys between device memory and pinned host memory."""
