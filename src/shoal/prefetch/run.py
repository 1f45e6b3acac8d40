"""One pass over a loader, whose batches find their rows in the top tier.

One thread takes batches from the loader, up to `depth` ahead of the loop; others read the rows that are not in the top
tier, for several batches at a time, so that `depth` hides a storage's latency. Which rows these are is found, and they
are put there once they are read:
- in host memory by the loop, on its way to its next batch. Both take all of its threads a moment, and spare the lookup
  as much; another thread at that time would take a core from one of them, and the others would wait for it. Where
  rows must leave memory first, and be written, a thread does it.
- for a device by threads, which wait for it.
They place, and nothing else: with and without them a run is the same, bit for bit. A batch that could not be placed,
for want of room or because a disk failed, is handed on all the same: its lookup brings the rows itself, or says what is
wrong. A storage that fails is warned of, once: should it never answer threads, prefetch would do nothing.
"""

import atexit
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, Generic, TypeVar

import torch

from shoal.config import get_num_threads
from shoal.errors import ForkError, PrefetchWarning, ShoalError, StorageError
from shoal.prefetch.streams import Events, LoaderStreams
from shoal.table import Staging

BatchT = TypeVar("BatchT")

# How often a thread that waits for room looks whether there is some.
_LOOK_SECONDS = 0.02
# Batches that are read at a time.
_MOST_IO_THREADS = 8
# A loader that does not answer is left alone after so long. Other threads are left sooner, since they may wait for a
# lock that the closing thread holds: they end when they can, and release their batches.
_JOIN_SECONDS = 10.0
_JOIN_OTHERS_SECONDS = 1.0


_running: "weakref.WeakSet[Run[Any]]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Threads that come back from the core when the interpreter is going would end the process."""
    for run in list(_running):
        run.close()
        run.await_threads(_JOIN_SECONDS)


@dataclass(eq=False)
class _Ahead(Generic[BatchT]):
    """A batch on its way to the loop, and its rows to the top tier, if they are."""

    batch: BatchT
    placed: Staging | None
    ready: Events  # on devices
    is_between: bool = False  # the threads
    is_counted: bool = False  # among those that are being read
    is_read: bool = False  # or was tried
    is_for_loop: bool = False  # to be placed, once it is read
    is_placed: bool = False  # or was tried

    def release(self) -> None:
        if self.placed is not None:
            self.placed.release()
            self.placed = None


class _Line(Generic[BatchT]):
    """Batches that wait for a thread. One is woken when one comes: others would take the loop's time."""

    def __init__(self, came: threading.Condition) -> None:
        self.batches: deque[_Ahead[BatchT]] = deque()
        self.came = came
        self.has_ended = False


def _told(error: BaseException) -> str:
    """What is wrong, of an exception that may be anything."""
    try:
        said = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
        return "; ".join(said).rstrip(".")
    except Exception:
        return type(error).__name__


class Run(Generic[BatchT]):
    """One pass over the loader."""

    def __init__(
        self,
        batches: Iterator[BatchT],
        stage: Callable[[BatchT], Staging | None],
        depth: int,
        devices: Sequence[torch.device],
    ) -> None:
        self._batches = batches
        self._stage = stage
        self._depth = depth
        self._streams = LoaderStreams(devices)
        self._lock = threading.RLock()  # a garbage collection may close the run in the thread that holds it
        # What came, is found, read and ready: each is taken from the one before. The loop takes the first and the last.
        loops = threading.Condition(self._lock)
        self._came: _Line[BatchT] = _Line(loops)
        self._found: _Line[BatchT] = _Line(threading.Condition(self._lock))
        self._read: _Line[BatchT] = _Line(threading.Condition(self._lock))
        self._ready: _Line[BatchT] = _Line(loops)
        self._taken = threading.Condition(self._lock)  # by the loop
        self._room = threading.Condition(self._lock)  # where rows can be placed; or the loop waits
        self._tried = threading.Condition(self._lock)  # to place a batch's rows
        self._ahead = 0  # batches that were taken from the loader, and not by the loop
        self._between = 0  # of these, those that are not ready
        self._unfound = 0  # of these, those that the loop is to find
        self._on_way = 0  # of all, those that are found, read or ready
        self._is_found_by_loop = False  # then one more may wait to be found
        self._alive: set[_Ahead[BatchT]] = set()  # batches that are not released
        self._in_use: _Ahead[BatchT] | None = None
        self._is_awaited = self._is_placing = self._is_closed = False
        self._error: BaseException | None = None
        self._failure: str | None = None  # of a storage: the first one
        self._has_warned = False
        self._io_threads = min(depth, _MOST_IO_THREADS)
        self._finding = threading.Lock()  # by an I/O thread: batches are found in their order
        self._process = os.getpid()
        works = [("load", self._load_all), *[("read", self._read_all)] * self._io_threads, ("place", self._place_all)]
        _running.add(self)
        self._threads = [
            threading.Thread(target=work, name=f"shoal-prefetch-{name}", daemon=True) for name, work in works
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # the system has no more of them, say: those that it gave would wait for ever
            self.close()
            raise

    @property
    def _lines(self) -> "tuple[_Line[BatchT], ...]":
        return self._came, self._found, self._read, self._ready

    # ---- the loop's side

    def next(self) -> BatchT:
        """The next batch; StopIteration at the end, or what the loader raised there."""
        if not self._is_own():
            raise ForkError(
                f"[prefetch] this loop belongs to process {self._process}, and so do its threads; this is its forked "
                f"child {os.getpid()}. Begin another one here."
            )
        self._let_go()
        self._work_until_ready()
        self._warn_once()
        with self._lock:
            if not self._ready.batches:
                if self._error is not None:
                    raise self._error
                raise StopIteration
            given = self._in_use = self._ready.batches.popleft()
            self._ahead -= 1
            self._on_way -= 1
            self._taken.notify()
            coming = [ahead for ahead in self._ready.batches if not ahead.is_placed]
        self._streams.hand_over(given.batch, given.ready)
        for ahead in coming:
            self._bring(ahead)
        while work := self._take_work():
            work()
        return given.batch

    def _work_until_ready(self) -> None:
        """Find and place until a batch is ready, or none comes any more."""
        with self._lock:
            self._is_awaited = True
            self._room.notify()
        while True:
            with self._lock:
                work = None
                while not (self._ready.batches or self._ready.has_ended or (work := self._take_work())):
                    self._ready.came.wait()
                if work is None:
                    self._is_awaited = False
                    return
            work()

    def _warn_once(self) -> None:
        """Of a storage that failed: here and not in its thread, which a warning that is an error would end."""
        if self._failure is None or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            PrefetchWarning(
                f"[prefetch] rows of a batch could not be brought ahead: {self._failure}. Its lookup brings them "
                f"itself, or raises. What else fails in this loop is only counted: stats()[table].tiers[-1].failures."
            ),
            stacklevel=4,  # the loop
        )

    def _take_work(self) -> Callable[[], None] | None:
        """What the loop can do for the batches that come: the next ones first."""
        with self._lock:
            if self._is_to_be_placed(by_loop=True):
                return partial(self._place_into_room, self._take_read())
            if self._came.batches and self._on_way < self._depth:
                self._on_way += 1
                return partial(self._find, self._came.batches.popleft())
        return None

    def _find(self, ahead: _Ahead[BatchT]) -> None:
        def find(placed: Staging) -> None:
            placed.find(get_num_threads())
            ahead.is_for_loop = placed.in_loop and placed.has_room()

        self._work(ahead, find)
        with self._lock:
            self._put(self._found, ahead)
            self._unfound -= 1
            self._end_if_all_are_found()

    def _place_into_room(self, ahead: _Ahead[BatchT]) -> None:
        """Place rows, if none has to leave for them: else that is for the thread, which may wait."""
        has_room = True

        def place(placed: Staging) -> None:
            nonlocal has_room
            has_room = placed.place_into_room(get_num_threads())

        self._work(ahead, place)
        if has_room:
            self._end_placing(ahead)
            return
        with self._lock:
            ahead.is_for_loop = self._is_placing = False
            self._read.batches.appendleft(ahead)
            self._say_who_places()

    def close(self) -> None:
        """End it, wherever it is."""
        if not self._is_own():
            return
        with self._lock:
            self._is_closed = True
            for waited in (self._taken, self._room, self._tried, *(line.came for line in self._lines)):
                waited.notify_all()
        try:
            self._join(self._threads[0], _JOIN_SECONDS)
            self.await_threads(_JOIN_OTHERS_SECONDS)
        finally:
            self._let_go()
            # Wherever they are: an interrupt may have come while the loop had one in hand.
            for ahead in tuple(self._alive):
                ahead.release()
            self._streams.close()

    def await_threads(self, seconds: float) -> None:
        """Wait until they ended, or so long."""
        if not self._is_own():
            return
        end = time.monotonic() + seconds
        for thread in self._threads:
            self._join(thread, max(end - time.monotonic(), 0.0))

    def _is_own(self) -> bool:
        """Whether this process made it. In a child a lock may be held for ever, by a thread that it does not have."""
        return os.getpid() == self._process

    @staticmethod
    def _join(thread: threading.Thread, seconds: float) -> None:
        # Who collects garbage may be any of them, and one that could not be started cannot be waited for.
        if thread is not threading.current_thread() and thread.is_alive():
            thread.join(seconds)

    def _let_go(self) -> None:
        if self._in_use is not None:
            self._in_use.release()
            self._alive.discard(self._in_use)
            self._streams.take_back(self._in_use.batch)
            self._in_use = None

    # ---- the threads' side

    def _load_all(self) -> None:
        try:
            with self._streams.current():
                while self._may_go_on():
                    try:
                        batch = next(self._batches)
                    except StopIteration:
                        break
                    placed = self._stage(batch)
                    self._send(_Ahead(batch, placed, self._streams.ready()))
        except StopIteration as error:  # not the loader's: in the loop it would look like its end
            self._error = RuntimeError("[prefetch] features raised StopIteration.")
            self._error.__cause__ = error
        except BaseException as error:
            self._error = error
        finally:
            with self._lock:
                self._came.has_ended = True
                self._end_if_all_are_found()

    def _end_if_all_are_found(self) -> None:
        if self._came.has_ended and not self._unfound:
            self._end(self._found)

    def _send(self, ahead: _Ahead[BatchT]) -> None:
        """To be found and read or, where nothing has to be waited for, to the loop: threads that take turns with it
        would cost it more time than the work."""
        placed = ahead.placed
        waits = placed is not None and placed.waits
        with self._lock:
            self._alive.add(ahead)
            is_for_loop = self._unfound > 0 or (placed is not None and placed.in_loop)
            self._is_found_by_loop |= is_for_loop
            if not waits and not self._between:  # it overtakes none
                self._on_way += 1
                self._put(self._ready, ahead)
                return
            self._between += 1
            ahead.is_between = True
            self._unfound += is_for_loop
            self._on_way += not is_for_loop
            self._put(self._came if is_for_loop else self._found, ahead)

    def _bring(self, ahead: _Ahead[BatchT]) -> None:
        """Place the rows of a batch that waits for nothing."""
        ahead.is_placed = True
        self._work(ahead, lambda placed: placed.read())
        self._work(ahead, lambda placed: placed.place(lambda: False))

    def _may_go_on(self) -> bool:
        with self._lock:
            self._taken.wait_for(lambda: self._is_closed or self._ahead < self._depth + self._is_found_by_loop)
            self._ahead += 1
            return not self._is_closed

    def _put(self, where: _Line[BatchT], ahead: _Ahead[BatchT]) -> None:
        with self._lock:
            if not self._is_closed:
                where.batches.append(ahead)
                if where is self._ready and ahead.is_between:
                    self._between -= 1
                where.came.notify()
                return
        ahead.release()  # it will not be looked up

    def _end(self, where: _Line[BatchT]) -> None:
        with self._lock:
            where.has_ended = True
            where.came.notify()

    def _read_all(self) -> None:
        """Read what is found. Batches are in the next line from their begin on, or one that is read sooner than another
        would overtake it."""
        found, read = self._found, self._read
        while True:
            with self._finding:
                with self._lock:
                    found.came.wait_for(lambda: found.batches or found.has_ended or self._is_closed)
                    if self._is_closed or not found.batches:
                        break
                    ahead = found.batches.popleft()
                    read.batches.append(ahead)
                self._work(ahead, lambda placed: placed.find(1))
            if self._may_read(ahead):
                self._work(ahead, lambda placed: placed.read())
            with self._lock:
                ahead.is_read = True
                self._say_who_places()
        with self._lock:
            self._io_threads -= 1
            found.came.notify()  # another I/O thread may wait for what will not come
        if not self._io_threads:
            self._end(read)

    def _place_all(self) -> None:
        """Place what is read, and is not for the loop to place."""
        read = self._read

        def is_over() -> bool:
            return self._is_closed or (read.has_ended and not read.batches and not self._is_placing)

        while True:
            with self._lock:
                read.came.wait_for(lambda: is_over() or self._is_to_be_placed(by_loop=False))
                if is_over():
                    break
                ahead = self._take_read()
            self._work(ahead, lambda placed: placed.place(self._may_wait))
            self._end_placing(ahead)
        self._end(self._ready)

    def _is_to_be_placed(self, by_loop: bool) -> bool:
        """Whether the first of those that are read is to be placed now, by the loop or by a thread: one at a time, or
        one would overtake another."""
        if self._is_placing or not self._read.batches:
            return False
        first = self._read.batches[0]
        return first.is_read and first.is_for_loop == by_loop

    def _take_read(self) -> _Ahead[BatchT]:
        """The first of those that are read. REQUIRES: the lock is held, and it is to be placed."""
        self._is_placing = True
        ahead = self._read.batches.popleft()
        self._tried.notify_all()  # the next one is the first now
        return ahead

    def _say_who_places(self) -> None:
        """Another one is the first of those that are read, or it is read by now. REQUIRES: the lock is held."""
        (self._ready if self._is_to_be_placed(by_loop=True) else self._read).came.notify()

    def _end_placing(self, ahead: _Ahead[BatchT]) -> None:
        with self._lock:
            ahead.is_placed = True
            self._put(self._ready, ahead)
            self._is_placing = False
            self._tried.notify_all()
            self._say_who_places()

    def _may_read(self, ahead: _Ahead[BatchT]) -> bool:
        """Wait while many rows are read and have no place, which are outside of any budget; False once it is closed.
        Those before it in line count first: otherwise they would be read at the same time."""

        def has_memory() -> bool:
            placed = ahead.placed
            if self._is_closed or placed is None:
                return True
            before = takewhile(lambda one: one is not ahead, self._read.batches)
            return all(one.is_counted for one in before) and placed.may_read(self._read.batches[0] is ahead)

        with self._lock:
            self._tried.wait_for(has_memory)
            if (placed := ahead.placed) is not None:
                placed.expect()
            ahead.is_counted = True
            self._tried.notify_all()
            return not self._is_closed

    def _work(self, ahead: _Ahead[BatchT], work: Callable[[Staging], None]) -> None:
        placed = ahead.placed
        if placed is None:  # it failed before, or was released by close()
            return
        try:
            work(placed)
        except BaseException as error:
            # The lookup raises it too, in the loop, where the user can handle it.
            ahead.release()
            if not isinstance(error, Exception) and threading.current_thread() not in self._threads:
                raise  # an interrupt is meant for the loop
            if not self._is_closed and self._failure is None and _is_of_storage(error):
                self._failure = _told(error)

    def _may_wait(self) -> bool:
        """Wait for batches before this one to let their rows go, unless the loop waits for this one."""
        with self._lock:
            if self._is_closed or (self._is_awaited and not self._ready.batches):
                return False
            self._room.wait(_LOOK_SECONDS)
            return not self._is_closed


def _is_of_storage(error: BaseException) -> bool:
    """A user's storage may raise anything; ours say so. What else is wrong lookups meet too."""
    return isinstance(error, StorageError) or not isinstance(error, ShoalError)
