"""Batches whose rows come to the top tier ahead of their lookup."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


def address_of(values: Tensor) -> tuple[int, int]:
    """What tells a batch from others for as long as somebody keeps its values."""
    return values.data_ptr(), values.numel()


class Staging(Protocol):
    """A batch whose rows come to the top tier ahead of its lookup. It changes no result."""

    waits: bool  # whether `read` or `place` may wait, for a storage or for room
    # Whether the loop finds, and places what there is room for: all of its threads do that in little time, and another
    # thread would only take theirs.
    in_loop: bool

    def find(self, threads: int) -> None:
        """Find which are below, on so many threads. Batches do so one after the other, as they will be looked up."""

    def may_read(self, is_first: bool) -> bool:
        """Whether there is memory to read them now; if it is the first of those that come, there is."""

    def expect(self) -> None:
        """They are read from here on, and count for others that ask whether they may be."""

    def read(self) -> None:
        """Read them from below, beside other batches; find them first, where nobody did."""

    def has_room(self) -> bool:
        """Whether there is room for them now. REQUIRES: they are found, and the caller holds up nobody."""

    def place_into_room(self, threads: int) -> bool:
        """Put them in the top tier, on so many threads, but for those that others would have to make room for; says
        whether all are there. REQUIRES: `in_loop`."""

    def place(self, may_wait: Callable[[], bool]) -> None:
        """Put them in the top tier. `may_wait`, asked where batches hold all of it, waits for a while and says whether
        to try again; where not, the lookup brings them."""

    def release(self) -> None:
        """It is not needed any more: its rows may leave."""
