"""Programs to read and run; `python -m examples.quickstart` from the root of the repository."""
