"""One step of an optimizer on rows in device memory; on CPU the update kernel has it in itself."""
