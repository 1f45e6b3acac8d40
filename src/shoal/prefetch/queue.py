"""A batch of a run with prefetch, and the queues in which batches wait on their way from the loader to the loop."""

import threading
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from shoal.prefetch.streams import Events
from shoal.table import Staging

BatchT = TypeVar("BatchT")


@dataclass(eq=False)
class QueuedBatch(Generic[BatchT]):
    """A batch on its way to the loop, whose rows are on their way to the top tier, and how far both are."""

    batch: BatchT
    staging: Staging | None  # None once the rows are given up
    ready: Events  # on devices
    is_between: bool = False  # it was taken from the loader and is not ready
    is_counted: bool = False  # its rows are among those that are being read
    is_read: bool = False  # or reading was tried
    is_for_loop: bool = False  # the loop places its rows, once they are read
    is_placed: bool = False  # or placing was tried

    def release(self) -> None:
        """Give up the rows: they may leave the top tier."""
        if self.staging is not None:
            self.staging.release()
            self.staging = None


class Queue(Generic[BatchT]):
    """Batches that wait for a thread. A new batch wakes one thread only: others would take the loop's time."""

    def __init__(self, came: threading.Condition) -> None:
        self.batches: deque[QueuedBatch[BatchT]] = deque()
        self.came = came
        self.has_ended = False
