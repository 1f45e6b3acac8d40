"""A batch whose rows come to several groups."""

from collections.abc import Callable, Sequence

from shoal.table.lower.threads import IoThreads
from shoal.table.staging import Staging


class StagedTogether:
    """One batch on its way to several groups or collections."""

    def __init__(self, parts: Sequence[Staging], io_threads: IoThreads) -> None:
        self._parts = parts
        self._io_threads = io_threads
        self.waits = any(part.waits for part in parts)
        self.in_loop = all(part.in_loop for part in parts)

    def find(self, threads: int) -> None:
        for part in self._parts:
            part.find(threads)

    def may_read(self, is_first: bool) -> bool:
        return all(part.may_read(is_first) for part in self._parts)

    def expect(self) -> None:
        for part in self._parts:
            part.expect()

    def read(self) -> None:
        if self.waits:  # at the same time: storages may be far away
            self._io_threads.map(lambda part: part.read(), self._parts)
        else:
            for part in self._parts:
                part.read()

    def has_room(self) -> bool:
        return all(part.has_room() for part in self._parts)

    def place_into_room(self, threads: int) -> bool:
        return all(part.place_into_room(threads) for part in self._parts)

    def place(self, may_wait: Callable[[], bool]) -> None:
        for part in self._parts:
            part.place(may_wait)

    def release(self) -> None:
        for part in self._parts:
            part.release()
