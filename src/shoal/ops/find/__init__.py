"""Keys to slots in device memory; on CPU the native index does this."""
