"""The folder of benchmarks' files: SHOAL_BENCH_DIR, or the system's folder for temporary files."""

import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def folder() -> Iterator[pathlib.Path]:
    """Yields a folder, and removes it afterwards."""
    made = pathlib.Path(tempfile.mkdtemp(prefix="shoal-bench-", dir=os.environ.get("SHOAL_BENCH_DIR")))
    try:
        yield made
    finally:
        shutil.rmtree(made)
