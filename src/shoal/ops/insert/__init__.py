"""Entries for keys that the index in device memory does not have."""
