"""Failures of storages while a run with prefetch reads or places rows, and the warning about the first of them."""

import warnings

from shoal.errors import PrefetchWarning, ShoalError, StorageError


class Failures:
    """The first failure of a storage, and whether the loop was warned of it."""

    def __init__(self) -> None:
        self.first: str | None = None
        self._has_warned = False

    def add(self, error: BaseException) -> None:
        """Keep an error, if it is the first one of a storage. The lookup meets all errors again."""
        if self.first is None and _is_of_storage(error):
            self.first = _text_of(error)

    def warn_once(self) -> None:
        """Warn of the first failure. The loop calls it: a warning that is an error would end another thread."""
        if self.first is None or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            PrefetchWarning(
                f"[prefetch] rows of a batch could not be brought ahead: {self.first}. Its lookup brings them "
                f"itself, or raises. What else fails in this loop is only counted: stats()[table].tiers[-1].failures."
            ),
            stacklevel=4,  # the loop
        )


def _text_of(error: BaseException) -> str:
    """Returns the message and the notes of an exception of any class."""
    try:
        said = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
        return "; ".join(said).rstrip(".")
    except Exception:
        return type(error).__name__


def _is_of_storage(error: BaseException) -> bool:
    """Whether a storage raised it. A user's storage may raise any class, Shoal's own raise StorageError."""
    return isinstance(error, StorageError) or not isinstance(error, ShoalError)
