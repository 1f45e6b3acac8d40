"""The integer counters of one table."""

from threading import Lock

from shoal.errors import NotFoundError

# Every counter of a table, with what one unit of it is.
MEANINGS = {
    "lookups": "a key looked up, repeats included",
    "hits": "a key looked up that had a row",
    "births": "a row made for an unseen key",
    "erased": "a row removed by erase",
    "dropped_gradients": "a row's gradient dropped because the row was erased between forward and backward",
    "skipped_backwards": "a backward pass skipped whole because of NaN or infinity",
    "skipped_rows": "a row's update skipped because of NaN or infinity",
    "steps": "a backward pass applied",
}


class Counters:
    """Named integers that start at 0 and only grow. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._values = dict.fromkeys(MEANINGS, 0)

    def add(self, name: str, n: int = 1) -> None:
        """Add `n` to the counter `name`."""
        with self._lock:
            if name not in self._values:
                raise NotFoundError(f"[Counters.add] wanted one of {', '.join(MEANINGS)}; got {name!r}.")
            self._values[name] += n

    def snapshot(self) -> dict[str, int]:
        """All counters at one moment."""
        with self._lock:
            return dict(self._values)

    # A lock cannot be copied, so a deepcopy or pickle of an object that has counters carries their values only.
    def __getstate__(self) -> dict[str, int]:
        return self.snapshot()

    def __setstate__(self, values: dict[str, int]) -> None:
        self._lock = Lock()
        self._values = dict(values)
