"""Tables belong to the process that made them; a forked child has a copy that only it would see."""

import os

from shoal.errors import ForkError

# How many forks lie between this process and the first: asking the operating system for the process takes longer.
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class OwnProcess:
    """The process in which it was made."""

    __slots__ = ("_forks", "_process")

    def __init__(self) -> None:
        self._process, self._forks = os.getpid(), _forks

    @property
    def is_here(self) -> bool:
        """Whether this is the process, and not a forked child."""
        return _forks == self._forks

    def require(self, where: str) -> None:
        """Raise ForkError in a forked child."""
        if _forks != self._forks:
            raise ForkError(
                f"[{where}] these tables belong to process {self._process}; this is its forked child "
                f"{os.getpid()}, whose copy no other process would see. Look ids up in the main process, or make a "
                f"collection here."
            )
