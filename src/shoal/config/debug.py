"""Whether errors that a device finds are waited for."""

_enabled = False


class debug:
    """Make every call on device tables wait for the device and raise what it found; otherwise a later call does.

    `shoal.debug()` from now on, `shoal.debug(False)` no longer, `with shoal.debug():` for a while.
    """

    def __init__(self, enabled: bool = True) -> None:
        global _enabled
        self._before = _enabled
        _enabled = enabled

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        global _enabled
        _enabled = self._before


def debugging() -> bool:
    """Whether `debug` is on."""
    return _enabled
