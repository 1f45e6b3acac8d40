"""Staged batches: their rows come to the top tier before their lookup."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


def address_of(values: Tensor) -> tuple[int, int]:
    """Returns what identifies a batch for as long as its values are kept."""
    return values.data_ptr(), values.numel()


class Staging(Protocol):
    """A staged batch. Staging changes no result."""

    waits: bool  # whether `read` or `place` may wait, for a storage or for room
    # Whether the training loop's thread finds, and places what there is room for. Where that takes all threads little
    # time, another thread would only compete with them.
    in_loop: bool

    def find(self, threads: int) -> None:
        """Find which keys are below, on so many threads. Batches do so one after the other, in the order of lookups."""

    def may_read(self, is_first: bool) -> bool:
        """Whether there is memory to read their rows now. The first batch in line always may."""

    def expect(self) -> None:
        """Count the rows as being read: other batches that ask `may_read` see them."""

    def read(self) -> None:
        """Read the rows from below, concurrently with other batches. Finds them first, if that was not done."""

    def has_room(self) -> bool:
        """Whether there is room for the rows now. REQUIRES: keys are found, and no thread waits for the caller."""

    def place_into_room(self, threads: int) -> bool:
        """Put rows in the top tier, on so many threads, as far as no others have to leave; returns whether all are
        there. REQUIRES: `in_loop`."""

    def place(self, may_wait: Callable[[], bool]) -> None:
        """Put the rows in the top tier. Where batches hold all of it, `may_wait` waits for a while and returns whether
        to try again; if not, the lookup brings the rows."""

    def release(self) -> None:
        """End the staging: its rows may leave."""
