"""State dicts without rows: of models that hold collections whose rows are saved otherwise."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_left_out = ContextVar("shoal rows are left out of state dicts", default=False)


@contextmanager
def without_rows() -> Iterator[None]:
    """Meanwhile collections add nothing to state dicts, and want nothing of them."""
    before = _left_out.set(True)
    try:
        yield
    finally:
        _left_out.reset(before)


def are_left_out() -> bool:
    """Whether that is so now."""
    return _left_out.get()
